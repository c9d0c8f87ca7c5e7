"""Describes models in the form of Ollama's /api/tags and /api/show."""

from __future__ import annotations

from mlcbuild_format import files
from mlcbuild_format.errors import ServingError
from mlcbuild_format.fields import Json
from mlcbuild_format.manifest import Manifest

from mlcbuild_runtime.engine.served_models import ServedModel
from mlcbuild_runtime.openai.ollama_stream import moment
from mlcbuild_runtime.openai.reasoning import MARKS
from mlcbuild_runtime.text.chat_template import find_template

_LARGEST = 4 << 20
"""Largest tokenizer_config.json that is read for its template, in bytes."""


def _details(manifest: Manifest | None) -> dict[str, Json]:
    family = "" if manifest is None else manifest.model.family
    scheme = "" if manifest is None else str(manifest.scheme.get("name", ""))
    return {
        "parent_model": "",
        "format": "mlcbuild",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": scheme,
    }


def tag(entry: ServedModel) -> dict[str, Json]:
    """Returns the JSON object that describes one model in the list of Ollama's /api/tags. `size` is in bytes,
    of all files; it is 0, and the digest is empty, if the bundle's manifest was invalid."""
    manifest = entry.manifest
    try:
        changed = (entry.path / "bundle.json").stat().st_mtime
    except OSError:
        changed = 0.0
    return {
        "name": entry.names[0],
        "model": entry.names[0],
        "modified_at": moment(changed),
        "size": 0 if manifest is None else sum(file.size for file in manifest.files.values()),
        "digest": "" if manifest is None else manifest.signature,
        "details": _details(manifest),
    }


def shown(entry: ServedModel, manifest: Manifest) -> dict[str, Json]:
    """Returns the JSON document of Ollama's /api/show for one model, which need not be loaded."""
    template, family = _template(entry, manifest), manifest.model.family
    serving, has_thinking = manifest.serving, any(mark in template for pair in MARKS for mark in pair)
    chosen = {"temperature": serving.temperature, "top_k": serving.top_k, "top_p": serving.top_p}
    capabilities: list[Json] = ["completion", "embedding"]
    capabilities += ["tools"] if template else []
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in chosen.items() if value is not None),
        "template": template,
        "details": _details(manifest),
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": manifest.limits.context_window,
            f"{family}.embedding_length": manifest.model.config.get("hidden_size"),
            f"{family}.block_count": manifest.num_layers,
        },
        "capabilities": [*capabilities, *(["thinking"] if has_thinking else [])],
        "modified_at": tag(entry)["modified_at"],
    }


def _template(entry: ServedModel, manifest: Manifest) -> str:
    """Returns the source text of a bundle's chat template; "" where there is none, or its file cannot be
    read."""
    try:
        name = "tokenizer_config.json"
        config = files.read_json(entry.path / name, _LARGEST) if name in manifest.files else {}
        return find_template(entry.path, config, manifest.files) or ""
    except ServingError:
        return ""
