"""Tests of the checks whether a quantization fits a model and a device."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild import quant, scheme_fit
from mlcbuild.quant.scheme import Budget
from mlcbuild.quant.schemes import SCHEMES
from mlcbuild.targets.backends import backend
from mlcbuild.targets.presets import presets
from tests.checkpoint_files import CONFIG

DEVICE = backend(presets()["x86-64-v3"])


def test_overrides_without_effect_are_faults() -> None:
    scheme = SCHEMES["q4f16_1"]
    assert scheme_fit.scheme_faults(scheme, DEVICE, CONFIG) == ()
    wrong = replace(scheme, overrides=(("no_such", SCHEMES["q0f32"]),))
    (fault,) = scheme_fit.scheme_faults(wrong, DEVICE, CONFIG)
    assert "the override 'no_such' matches no parameter" in fault


def test_a_budget_below_its_candidates_is_a_fault_and_limits_the_size() -> None:
    params = scheme_fit.listed_parameters(CONFIG)
    candidates = (SCHEMES["q4a8_1"], SCHEMES["q8a8_1"])
    sizes = [quant.stored_bytes(params, DEVICE.storage(scheme)) for scheme in candidates]
    roomy = replace(candidates[1], budget=Budget("max_size", float(sizes[0] + 1), candidates))
    assert scheme_fit.scheme_faults(roomy, DEVICE, CONFIG) == ()
    assert scheme_fit.most_stored_bytes(roomy, DEVICE, CONFIG) == sizes[0] + 1
    assert scheme_fit.most_stored_bytes(candidates[1], DEVICE, CONFIG) == sizes[1]
    tight = replace(candidates[1], budget=Budget("max_size", 10.0, candidates))
    (fault,) = scheme_fit.scheme_faults(tight, DEVICE, CONFIG)
    assert "the smallest mixture of q4a8_1, q8a8_1 has" in fault


def test_what_a_device_cannot_read_or_compute_is_said_once() -> None:
    assert scheme_fit.storage_fault(SCHEMES["q4a8_1"], DEVICE) is None
    unknown = replace(SCHEMES["q4a8_1"], format="nowhere")
    assert "nowhere" in (scheme_fit.storage_fault(unknown, DEVICE) or "")
    override = replace(SCHEMES["q4a8_1"], overrides=(("lm_head", unknown),))
    assert scheme_fit.storage_fault(override, DEVICE) == scheme_fit.storage_fault(unknown, DEVICE)
    assert scheme_fit.block_fault(DEVICE, CONFIG) is None
