"""Writes a copy of a GGUF file with a vocabulary added, because llama.cpp's server does not start without
one. argv: the GGUF file, a checkpoint's tokenizer.json, the GGUF file to write, which gets the tokens of
tokenizer.json, but not its merges.

It is a program for the Python environment in which the benchmarks install llama.cpp and gguf."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf


def main() -> None:
    source, tokenizer, out = map(Path, sys.argv[1:4])
    vocabulary = json.loads(tokenizer.read_text())["model"]["vocab"]
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, "llama")
    for field in reader.fields.values():
        if field.name.startswith(("GGUF.", "tokenizer.")) or field.name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_token_merges(["! !"])  # A missing id is not allowed; this one belongs to an unused token.
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
