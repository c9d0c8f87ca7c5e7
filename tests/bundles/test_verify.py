"""Tests of the step that verifies bundles: its figures are compared with an independent computation,
thresholds are exceeded, and bundles that cannot be executed are reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from mlcbuild_runtime.executor import executor, loading

from mlcbuild import progress
from mlcbuild.bundles import reference_logits, verify
from mlcbuild.errors import UsageError, VerificationError
from mlcbuild.models import action
from tests.conftest import TINY


def prompts_reference(directory: Path, prompts: list[str], window: int | None = None) -> Path:
    config, out = directory / "config", directory / "reference"
    out.mkdir(parents=True)
    action.normalise({}, {"checkpoint": TINY}, config)
    reference_logits.reference(
        {"prompts": list(prompts), "context_window": window},
        {"config": config, "checkpoint": TINY, "tokenizer": TINY},
        out,
    )
    return out


def test_the_reference_reports_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[tuple[int, int, str]] = []
    monkeypatch.setattr(progress, "_PERIOD", 0.0)
    progress.listen(lambda *report: reports.append(report))
    try:
        out = prompts_reference(tmp_path, ["What is 1 + 2?", "copy abc"])
    finally:
        progress.listen(None)
    first, second = map(len, json.loads((out / "tokens.json").read_bytes()))
    layers = json.loads((TINY / "config.json").read_bytes())["num_hidden_layers"]
    expected_counts = [*(first * i // layers for i in range(1, layers + 1))]
    expected_counts += [first + second * i // layers for i in range(1, layers + 1)]
    assert [report[0] for report in reports] == pytest.approx(expected_counts, abs=1)
    assert reports[-1] == (first + second, first + second, "tokens")


def test_reference_logits_of_each_prompt(tmp_path: Path) -> None:
    out = prompts_reference(tmp_path, ["What is 1 + 2?", "copy abc", ""])
    tokens = json.loads((out / "tokens.json").read_bytes())
    assert len(tokens) == 2, "a prompt of one token or none says nothing"
    for i, prompt_tokens in enumerate(tokens):
        logits = np.load(out / f"logits-{i:04}.npy")
        assert logits.shape[0] == len(prompt_tokens)
        assert np.isfinite(logits).all()


def test_long_prompts_are_cut_at_the_window(tmp_path: Path) -> None:
    out = prompts_reference(tmp_path, ["copy abcdefgh " * 20], window=32)
    (tokens,) = json.loads((out / "tokens.json").read_bytes())
    assert len(tokens) == 32


def test_prompts_without_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no prompt has more than one token"):
        prompts_reference(tmp_path, [""])


def test_figures_agree_with_a_plain_computation() -> None:
    rng = np.random.default_rng(1)
    expected = rng.normal(size=(7, 11)).astype(np.float32) * 3
    actual = expected + rng.normal(size=expected.shape).astype(np.float32) * 0.5
    tokens = rng.integers(0, 11, 7).tolist()
    sums = verify._Sums()
    sums.add(tokens, expected, actual)
    sums.decode_errors.append(0.0)
    figures = sums.figures()

    def softmax(row: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float]:
        weights = [float(np.exp(value)) for value in row]
        return [weight / sum(weights) for weight in weights]

    pairs = [
        (softmax(p.astype(np.float64)), softmax(q.astype(np.float64)))
        for p, q in zip(expected, actual, strict=True)
    ]
    kl = [sum(a * np.log(a / b) for a, b in zip(p, q, strict=True)) for p, q in pairs]
    assert figures["kl_mean"] == pytest.approx(np.mean(kl), rel=1e-3)
    assert figures["kl_max"] == pytest.approx(max(kl), rel=1e-3)
    same = [np.argmax(p) == np.argmax(q) for p, q in pairs]
    assert figures["top1_agreement"] == pytest.approx(np.mean(same), rel=1e-3)
    losses = [-np.log(q[token]) for (_, q), token in zip(pairs, tokens[1:], strict=False)]
    assert figures["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-3)
    assert figures["tokens"] == 7


@pytest.mark.parametrize(
    ("name", "inputs", "words"),
    [
        ("max_kl", "0.1", "the mean KL divergence is 0.2, max_kl is 0.1"),
        ("min_top1", "0.95", "top-1 agreement is 0.9, min_top1 is 0.95"),
        (
            "max_perplexity_increase",
            "0.05",
            "the relative increase of perplexity is 0.1, max_perplexity_increase is 0.05",
        ),
    ],
)
def test_thresholds(name: str, inputs: str, words: str) -> None:
    figures = {"kl_mean": 0.2, "top1_agreement": 0.9, "perplexity": 11.0, "reference_perplexity": 10.0}
    params = dict.fromkeys(verify.THRESHOLDS) | {name: inputs}
    assert verify._faults(figures, params) == [words]
    assert verify._faults(figures, dict.fromkeys(verify.THRESHOLDS)) == []
    lost = dict.fromkeys(figures, float("nan"))
    assert len(verify._faults(lost, params)) == 1, "what is not a number is a fault"


def test_a_bundle_that_cannot_be_run_is_told_in_one_sentence(
    tmp_path: Path, bundle_copy: Callable[[str], Path]
) -> None:
    bundle = bundle_copy("q0f32")
    library = bundle / "model.so"
    library.write_bytes(library.read_bytes()[:1000])
    reference = prompts_reference(tmp_path / "r", ["copy ab"])
    with pytest.raises(VerificationError) as caught:
        verify.measure(bundle, reference)
    assert str(caught.value).startswith("the bundle could not be run: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lost_call", range(4))
def test_logits_that_are_no_numbers_are_found_out(
    lost_call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def score(model: object, tokens: Sequence[int], chunk: int | None = None) -> verify.Logits:
        calls.append(len(calls))
        return np.full((len(tokens), 5), np.nan if calls[-1] == lost_call else 0.0, np.float32)

    monkeypatch.setattr(loading, "load", lambda path, threads: None)
    monkeypatch.setattr(executor, "score", score)
    (tmp_path / "tokens.json").write_text("[[1, 2, 3], [1, 2]]")
    for i, count in enumerate((3, 2)):
        np.save(tmp_path / f"logits-{i:04}.npy", np.zeros((count, 5), np.float32))
    with pytest.raises(SystemExit, match=f"prompt {lost_call // 2 + 1}: the bundle's logits are not finite"):
        verify._compare("bundle", str(tmp_path))


def test_a_wrong_bundle_is_found_out(tmp_path: Path, tiny_bundles: Path) -> None:
    """Checks that verification can fail: a sound bundle is compared with the logits of another model."""
    reference = prompts_reference(tmp_path, ["What is 12 + 5?", "reverse abc"])
    for path in reference.glob("*.npy"):
        np.save(path, -np.load(path))
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(VerificationError, match="top-1 agreement is"):
        verify.verify(
            {"max_kl": "0.5", "min_top1": "0.9", "max_perplexity_increase": None},
            {"bundle": tiny_bundles / "dist" / "tiny-q0f32-host", "reference": reference},
            out,
        )
    assert not list(out.iterdir())
