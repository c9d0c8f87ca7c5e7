"""Makes the build steps that compare a bundle's logits with those of the exact model, whose weights are not
quantized, and measure the bundle's speed."""

from __future__ import annotations

from mlcbuild import machine
from mlcbuild.build.graph import Input, Step
from mlcbuild.bundles.verify import THRESHOLDS
from mlcbuild.prospect import PROCESS_MEMORY, Checkpoint
from mlcbuild.recipe import Bench, Variant, Verify
from mlcbuild.scheme_fit import most_stored_bytes
from mlcbuild.targets.backends import backend
from mlcbuild.weight_steps import MANY_CORES


def verify_step(variant: Variant, checkpoint: Checkpoint, bundle: str, reference: str) -> Step:
    """Returns the build step that compares a bundle's logits with those of the exact model. bundle,
    reference: names of the steps that assemble the bundle and compute the exact model's logits."""
    limits = variant.verify or Verify(())
    config = checkpoint.config
    size = (
        checkpoint.most
        if config is None
        else most_stored_bytes(variant.scheme, backend(variant.target), config)
    )
    return Step(
        f"verify/{variant.name}",
        "mlcbuild.bundles.verify:verify",
        {name: None if (value := getattr(limits, name)) is None else repr(value) for name in THRESHOLDS},
        {"bundle": Input(bundle), "reference": Input(reference)},
        code=backend(variant.target).executor,
        cores=MANY_CORES,
        memory=size + PROCESS_MEMORY,
        needs=backend(variant.target).labels(variant.target),
    )


def bench_step(variant: Variant, bench: Bench, bundle: str) -> Step:
    """Returns the build step that measures a bundle's speed. The result depends on the kind of machine, which
    is therefore among the parameters of the step, and the step runs alone. bundle: name of the step that
    assembles the bundle."""
    machine_kind = machine.kind()
    return Step(
        f"bench/{variant.name}",
        "mlcbuild.bench.speed:bench",
        {
            "prompt_tokens": bench.prompt_tokens,
            "generate_tokens": bench.generate_tokens,
            "machine": machine_kind,
        },
        {"bundle": Input(bundle)},
        code=backend(variant.target).executor,
        cores=MANY_CORES,
        needs=(*backend(variant.target).labels(variant.target), machine.label(machine_kind)),
        shared=False,
        alone=True,
    )
