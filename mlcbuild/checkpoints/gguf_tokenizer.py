"""Writes tokenizer files for the runtime from the metadata of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mlcbuild.checkpoints.gguf_pieces import split_tokens, tokenizer_model
from mlcbuild.checkpoints.gguf_pretokenizers import PRE_TOKENIZERS, PreTokenizer
from mlcbuild.checkpoints.gguf_vocabulary import (
    CONTROL,
    CONVERT,
    UNUSED,
    USER_DEFINED,
    WORD_PIECE,
    GgufVocabulary,
    MetadataReader,
    check_name,
    read_vocabulary,
)
from mlcbuild.checkpoints.gguf_word_pieces import as_word_pieces, word_piece_parts
from mlcbuild.errors import CheckpointError

LARGEST_TEMPLATE = 1 << 20
"""Maximum size of a chat template in bytes, which is the runtime's limit."""
LARGEST_FILE = 256 << 20
"""Maximum size of tokenizer.json or tokenizer.model in bytes, which is the runtime's limit."""
LINES = 60
"""Maximum number of problems of a GGUF file that one error lists; further ones are only counted."""
_TEMPLATE = "tokenizer.chat_template"
_ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "[EOT]",
        "<eos>",
        "</s>",
        "<｜end▁of▁sentence｜>",
    }
)
"""Control tokens that end a message. A GGUF file states few of them; llama.cpp also recognises the others by
name.
"""


def write_tokenizer(metadata: Mapping[str, object], place: str, out: Path) -> None:
    """Writes the files of a GGUF file's tokenizer into the directory `out`.

    metadata: GGUF key -> string, number, bool, or a list or NumPy array of these. place: the beginning of
    each error message. The files are tokenizer.json or tokenizer.model, tokenizer_config.json,
    generation_config.json, and chat_template.jinja if there is a default template. Raises CheckpointError
    with the problems, one per line (at most 60, then a count), and then writes nothing.
    """
    reader = MetadataReader(metadata)
    templates = _templates(metadata, reader)
    vocabulary = read_vocabulary(reader)
    files = _files(vocabulary, templates, reader) if vocabulary else {}
    for name, content in files.items():
        if len(content) > LARGEST_FILE:
            reader.problem("tokenizer.ggml.tokens", f"{name} would have {len(content)} bytes; {CONVERT}")
    if reader.problems:
        lines = [f"{place}: {problem}" for problem in reader.problems[:LINES]]
        if len(reader.problems) > LINES:
            lines.append(f"{place}: there are {len(reader.problems) - LINES} more problems of these kinds")
        raise CheckpointError("\n".join(lines))
    for name, content in files.items():
        (out / name).write_bytes(content)


def _files(
    vocabulary: GgufVocabulary, templates: Mapping[str, str], reader: MetadataReader
) -> dict[str, bytes]:
    """Returns name of a tokenizer file -> its bytes, for the vocabulary of a GGUF file; {} if the GGUF file
    names an unknown pre-tokenizer, or has a WordPiece vocabulary and any problem. Problems are added to
    `reader`, the reader of the file's metadata; if there are any, the bytes must not be used. templates: name
    -> chat template."""
    if vocabulary.model == "gpt2":
        if not check_name(reader, "tokenizer.ggml.pre", vocabulary.pre_tokenizer, list(PRE_TOKENIZERS)):
            return {}
        words = PRE_TOKENIZERS[vocabulary.pre_tokenizer]
        files = {
            "tokenizer.json": _document(_tokenizer_json(vocabulary, _byte_level_parts(vocabulary, words)))
        }
        adds_bos = words.adds_bos
    elif vocabulary.model == "bert":
        vocabulary = as_word_pieces(vocabulary, reader)
        if reader.problems:
            return {}
        files = {"tokenizer.json": _document(_tokenizer_json(vocabulary, word_piece_parts(vocabulary)))}
        adds_bos = True
    else:
        files = {"tokenizer.model": tokenizer_model(vocabulary, reader)}
        adds_bos = vocabulary.model == "llama"
    files["tokenizer_config.json"] = _document(_config(vocabulary, templates, adds_bos))
    files["generation_config.json"] = _document(_generation(vocabulary))
    if "default" in templates:
        files["chat_template.jinja"] = templates["default"].encode()
    return files


def _document(content: object) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _adds(vocabulary: GgufVocabulary, role: str, default: bool) -> bool:
    return role in vocabulary.ids and vocabulary.flags.get(f"add_{role}_token", default)


def _tokenizer_json(vocabulary: GgufVocabulary, parts: Mapping[str, object]) -> dict[str, object]:
    """Returns a tokenizer.json as a dict: control and user-defined tokens as added tokens, and `parts`, those
    of its fields that depend on the kind of vocabulary (byte-level BPE or WordPiece)."""
    added = [
        {
            "id": token,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for token, (content, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **parts,
    }


def _byte_level_parts(vocabulary: GgufVocabulary, words: PreTokenizer) -> dict[str, object]:
    """Returns those fields of a tokenizer.json that byte-level BPE and WordPiece fill differently, for
    byte-level BPE. words: the pre-tokenizer that splits text into words. Tokens of the type UNUSED are left
    out."""
    kinds = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    return {
        "normalizer": {"type": "NFC"} if words.is_nfc else None,
        "pre_tokenizer": words.to_json(),
        "post_processor": _post_processor(vocabulary, words.adds_bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": words.ignores_merges,
            # Unused tokens pad the vocabulary to a round number of rows. The original tokenizer has no names
            # for them.
            "vocab": {content: token for token, (content, kind) in enumerate(kinds) if kind != UNUSED},
            "merges": vocabulary.merges,
        },
    }


def _post_processor(vocabulary: GgufVocabulary, adds_bos: bool) -> dict[str, object] | None:
    ends = {
        role: {"SpecialToken": {"id": vocabulary.tokens[vocabulary.ids[role]], "type_id": 0}}
        for role, default in (("bos", adds_bos), ("eos", False))
        if _adds(vocabulary, role, default)
    }
    if not ends:
        return None
    names = {vocabulary.tokens[vocabulary.ids[role]]: vocabulary.ids[role] for role in ends}
    first, second = ([{"Sequence": {"id": letter, "type_id": i}}] for i, letter in enumerate("AB"))
    before = [ends["bos"]] if "bos" in ends else []
    after = [ends["eos"]] if "eos" in ends else []
    return {
        "type": "TemplateProcessing",
        "single": [*before, *first, *after],
        "pair": [*before, *first, *after, *before, *second, *after],
        "special_tokens": {
            name: {"id": name, "ids": [token], "tokens": [name]} for name, token in names.items()
        },
    }


def _config(vocabulary: GgufVocabulary, templates: Mapping[str, str], adds_bos: bool) -> dict[str, object]:
    config: dict[str, object] = {
        f"{role}_token": vocabulary.tokens[vocabulary.ids[role]]
        for role in ("bos", "eos", "unk", "pad", *WORD_PIECE)
        if role in vocabulary.ids
    }
    config["add_bos_token"] = _adds(vocabulary, "bos", adds_bos)
    config["add_eos_token"] = _adds(vocabulary, "eos", vocabulary.model == "t5")
    if vocabulary.model in ("llama", "t5") and (split := split_tokens(vocabulary)):
        config["added_tokens_decoder"] = {str(token): entry for token, entry in split.items()}
    if templates.keys() - {"default"}:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config


def _generation(vocabulary: GgufVocabulary) -> dict[str, object]:
    """Returns a generation_config.json as a dict: the ids of the BOS and padding tokens, if there are any,
    and under eos_token_id the sorted list of the ids of all tokens that end a message."""
    ends = {vocabulary.ids[role] for role in ("eos", "eot", "eom") if role in vocabulary.ids}
    named = {
        content: token
        for token, (content, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == CONTROL and content in _ENDS
    }
    if named.keys() >= {"<|return|>", "<|call|>"}:
        named.pop("<|end|>", None)  # In gpt-oss, this token ends one of several parts of a message.
    document: dict[str, object] = {
        f"{role}_token_id": vocabulary.ids[role] for role in ("bos", "pad") if role in vocabulary.ids
    }
    return document | {"eos_token_id": sorted(ends | set(named.values()))}


def _templates(metadata: Mapping[str, object], reader: MetadataReader) -> dict[str, str]:
    """Returns name -> text of the chat templates in a GGUF file's metadata; the template under
    tokenizer.chat_template is called "default", the others by what follows that and a dot in their keys.
    Templates that are invalid or too long are left out and become problems of `reader`, the metadata's
    reader.
    """
    templates: dict[str, str] = {}
    for key in sorted(key for key in metadata if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")):
        text = reader.text(key)
        if text is not None and len(text.encode()) > LARGEST_TEMPLATE:
            reader.problem(
                key, f"has {len(text.encode())} bytes, and at most {LARGEST_TEMPLATE} are read; {CONVERT}"
            )
        elif text is not None:
            templates.setdefault(key[len(_TEMPLATE) + 1 :] or "default", text)  # The first key has no name.
    return templates
