"""Builds a bundle of the small model in recipes/models with the vocabulary, tokenizer and limits of the toy
model, so that tests written for the toy model run with a real one: `real_toy.py DIRECTORY TARGET` writes it.

It is a separate program, because the runtime's tests do not import the builder.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from mlcbuild_format import bundle

from tests.runtime import real, toy

TEXT_FILES = ("tokenizer", "chat_template", "generation_config", "special_tokens", "added_tokens")
"""Beginnings of file names of a tokenizer and its settings. Files with such names are removed from a real
model's bundle, because the toy model's tokenizer replaces them."""


def main(out: Path, target: str) -> None:
    limits = {name: value for name, value in toy.LIMITS.items() if name != "page_size"}
    real.build("q0f32", out, {"vocab_size": toy.VOCAB}, target, limits)
    for path in list(out.iterdir()):
        if path.name.startswith(TEXT_FILES):
            path.unlink()
    toy.write_tokenizer(out)
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    manifest = replace(
        bundle.manifest(out),
        name=toy.NAME,
        files={name: toy.describe(out / name) for name in names if name != "bundle.json"},
        serving=bundle.Serving(bos_token_id=toy.BOS, eos_token_ids=(toy.EOS,), temperature=0.0),
    )
    (out / "bundle.json").write_bytes(manifest.to_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
