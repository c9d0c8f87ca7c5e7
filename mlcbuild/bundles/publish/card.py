"""The model card of a published bundle, derived from its manifest alone."""

from __future__ import annotations

from collections.abc import Sequence

from mlcbuild_format.bundle import Manifest

_FIGURES = {
    "kl_mean": "mean KL divergence per token, nats",
    "kl_max": "largest KL divergence",
    "top1_agreement": "agreement of the most likely token",
    "perplexity": "perplexity",
    "reference_perplexity": "perplexity of the original",
    "tokens": "tokens compared",
}


def card(manifest: Manifest, sources: Sequence[str], place: str) -> str:
    """Returns the model card of a bundle: Markdown with the front matter that hubs read. sources: hf://
    addresses of the original model; place: address of the published bundle.
    """
    machine, limits, memory = manifest.machine, manifest.limits, manifest.memory
    front = ["---", "library_name: mlcbuild", "tags:", "- mlcbuild", f"- {manifest.model.family}"]
    if sources:
        names = [source.removeprefix("hf://").partition("@")[0] for source in sources]
        front += ["base_model:", *(f"- {name}" for name in names), "base_model_relation: quantized"]
    lines = [
        *front,
        "---",
        "",
        f"# {manifest.name}",
        "",
        f"{manifest.model.name} as a bundle of mlcbuild: code, weights and tokenizer in one directory.",
        "",
        "| | |",
        "|---|---|",
        *(f"| made from | {source} |" for source in sources),
        f"| family | {manifest.model.family} |",
        f"| scheme | {manifest.scheme['name']} |",
        f"| target | {machine.triple} {machine.cpu} {' '.join(machine.features)}".rstrip() + " |",
        f"| context | {limits.context_window} tokens, {limits.max_batch} sequences at once |",
        f"| memory | {memory.total / 1e6:.1f} MB, of it weights {memory.weights / 1e6:.1f} MB |",
        f"| signature | `{manifest.signature}` |",
        "",
        "## Compared with the original in float32",
        "",
        *_figures(manifest),
        "",
        "## Use",
        "",
        "```",
        f"mlcbuild pull {place} bundle",
        "mlcbuild serve bundle",
        "```",
        "",
    ]
    return "\n".join(lines)


def _figures(manifest: Manifest) -> list[str]:
    figures = manifest.verification
    if figures is None:
        return ["Not compared: it was built for another machine than the one that built it."]
    rows = [f"| {words} | {figures[key]} |" for key, words in _FIGURES.items() if key in figures]
    return ["| | |", "|---|---|", *rows]
