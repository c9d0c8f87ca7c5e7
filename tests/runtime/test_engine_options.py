"""Tests of the settings of one engine: what is left to the bundle, and what engines do not share by
accident."""

from __future__ import annotations

from dataclasses import fields

from mlcbuild_runtime.engine.engine_options import MAX_WAITING, EngineOptions
from mlcbuild_runtime.engine.threads import Turns


def test_everything_but_the_queue_is_left_to_the_bundle() -> None:
    options = EngineOptions()
    stated = {field.name for field in fields(options) if getattr(options, field.name) is not None}
    assert stated == {"max_waiting", "turns"} and options.max_waiting == MAX_WAITING == 1024


def test_engines_take_turns_only_if_they_share_a_lock() -> None:
    assert isinstance(EngineOptions().turns, Turns) and EngineOptions().turns is not EngineOptions().turns
    shared = Turns()
    assert EngineOptions(turns=shared).turns is EngineOptions(turns=shared, name="b").turns
