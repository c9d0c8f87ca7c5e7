"""The verbs `inspect` and `verify` of the command line, for a bundle."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlcbuild_format import bundle as form
from mlcbuild_format import sizes, weights
from mlcbuild_format.bundle import Manifest
from mlcbuild_format.errors import BundleError
from mlcbuild_format.fields import MAX_INTEGER, FieldError, Fields, Json, printable
from mlcbuild_format.files import read_json

from mlcbuild.bundles.assemble import LIBRARY
from mlcbuild.bundles.provenance import check
from mlcbuild.cli.listing import show, table
from mlcbuild.errors import UsageError
from mlcbuild.keyfile import is_public
from mlcbuild.quant.importance import REPORT

_LARGEST_LIBRARY_JSON = 16 << 20
"""Maximum size in bytes of a JSON file in a bundle, such as library.json; a larger one raises BundleError."""


def inspect(arguments: argparse.Namespace) -> int:
    path = Path(arguments.bundle)
    manifest = form.read(path)
    listed = LIBRARY in manifest.files
    library: Mapping[str, Json] = read_json(path / LIBRARY, _LARGEST_LIBRARY_JSON) if listed else {}
    kernels, slow = (_chosen(path / LIBRARY, library, key) for key in ("kernels", "fallbacks"))
    source = weights.read_header(path / manifest.weights[0]).source
    document: dict[str, object] = {**manifest.to_json(), "kernels": kernels, "fallbacks": slow}
    document["source"] = source
    reasons = [("slow", f"{use.removesuffix('.weight')}: {why}") for use, why in sorted(slow.items())]
    facts = [*_facts(manifest), *_calibration(path, manifest)]
    facts += [("source", source)] if source else []
    lines = [printable(line) for line in table([*facts, *_uses(kernels), *reasons])]
    if arguments.measure:
        from mlcbuild.bundles.footprint import measure

        peak = measure(path)
        document["measured"] = peak
        lines.append(_compared(manifest, peak))
    show(arguments.json, document, lines)
    return 0


def _facts(manifest: Manifest) -> list[tuple[str, str]]:
    limits, memory = manifest.limits, manifest.memory
    layers = manifest.num_layers
    machine = manifest.machine
    rows = [
        ("name", manifest.name),
        (
            "model",
            f"{manifest.model.name}, family {manifest.model.family}"
            + (f", {layers} layers" if layers else ""),
        ),
        ("scheme", str(manifest.scheme["name"])),
        ("target", f"{machine.triple} {machine.cpu} {' '.join(machine.features)}".rstrip()),
        (
            "limits",
            f"context {limits.context_window}, prefill {limits.prefill_chunk}, batch {limits.max_batch}",
        ),
        (
            "memory",
            f"{sizes.show(memory.total)} = weights {sizes.show(memory.weights)}"
            f" + KV cache {sizes.show(memory.kv_cache)} + workspace {sizes.show(memory.workspace)}",
        ),
        ("signature", manifest.signature),
        ("tools", ", ".join(f"{name} {value}" for name, value in sorted(manifest.tools.items()))),
    ]
    return [*rows, *_verification(manifest.verification)]


def _verification(figures: Mapping[str, object] | None) -> list[tuple[str, str]]:
    if figures is None:
        return [("verified", "no: the target is not the machine it was built on")]
    return [
        (
            "verified",
            f"KL {figures['kl_mean']} (largest {figures['kl_max']}), "
            f"top-1 agreement {figures['top1_agreement']}, perplexity {figures['perplexity']} "
            f"(model {figures['reference_perplexity']}), "
            f"{figures['tokens']} tokens",
        )
    ]


def _calibration(path: Path, manifest: Manifest) -> list[tuple[str, str]]:
    """Returns table rows about the calibration of a bundle's weights: one row, the pair ("calibrated", text
    with the numbers of tokens and prompts), or [] if they were not calibrated. Raises BundleError if the
    bundle's file about it is invalid."""
    if REPORT not in manifest.files:
        return []
    try:
        report = Fields(read_json(path / REPORT, _LARGEST_LIBRARY_JSON))
        tokens, prompts = (report.integer(name, 1, MAX_INTEGER) for name in ("tokens", "prompts"))
        return [("calibrated", f"with {tokens} tokens, prompts: {prompts}")]
    except FieldError as error:
        raise BundleError(f"{path / REPORT}: {error}; build the bundle again") from None


def _chosen(path: Path, library: Mapping[str, Json], key: str) -> dict[str, str]:
    """Returns the mapping that a bundle's library.json states under `key`: for "kernels", use (a kind of
    matrix, or attention) -> name of its kernel; for "fallbacks", use -> reason why its kernel is slow; {} if
    the key is missing. library: the parsed file; path: the file, for the error message. Raises BundleError if
    the value is not such a mapping."""
    try:
        section = Fields(library.get(key, {}), key)
        return {printable(use): section.text(use) for use in section.value}
    except FieldError as error:
        raise BundleError(f"{path}: {error}; build the bundle again") from None


def _uses(kernels: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns table rows, pairs ("kernel", text), one for each kernel of a bundle's library. The text states
    the kernel's name and all of its uses. kernels: use (a kind of matrix, or attention) -> name of the kernel
    that computes it."""
    rows = []
    for name in sorted(set(kernels.values())):
        uses = sorted(use.removesuffix(".weight") for use, chosen in kernels.items() if chosen == name)
        rows.append(("kernel", f"{name} for {', '.join(uses)}"))
    return rows


def _compared(manifest: Manifest, peak: int) -> str:
    total = manifest.memory.total
    difference = 100 * (peak - total) / total
    return f"measured {sizes.show(peak)}, {difference:+.0f}% of the estimate {sizes.show(total)}"


def verify(arguments: argparse.Namespace) -> int:
    path = Path(arguments.bundle)
    manifest = form.check(path, full=True)
    document: dict[str, object] = {"bundle": str(path), "ok": True, "files": len(manifest.files)}
    lines = [f"{path}: {len(manifest.files)} files are as the manifest says"]
    if arguments.provenance or arguments.trust:
        for key in arguments.trust:
            if not is_public(key):
                raise UsageError(f"mlcbuild verify: --trust {key}: a key is ed25519: and 43 characters")
        provenance = check(path, arguments.trust)
        document |= {"signers": provenance.signers, "statement": provenance.statement}
        lines.append(f"{path}: its provenance is {_signed(provenance.signers)}")
    show(arguments.json, document, lines)
    return 0


def _signed(signers: Sequence[str]) -> str:
    if not signers:
        return "about this bundle; it is not signed"
    return f"about this bundle; signed by {', '.join(signers)}"
