"""Verifies a bundle: compares its logits with those of the NumPy reference.

Two build steps share the work. `reference` runs once for a model and its prompts. `verify` runs for each
bundle and loads it through the runtime in a fresh process, as a server does.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mlcbuild import progress
from mlcbuild.bundles import fresh_process
from mlcbuild.bundles.divergence import divergence, log_softmax
from mlcbuild.canon import Json
from mlcbuild.errors import VerificationError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Logits = NDArray[np.float32]


DECODED = 16
"""Number of first tokens of each prompt that are also decoded one at a time, so that decoding is verified and
not only prefill.
"""


@dataclass(frozen=True)
class Threshold:
    """A limit that a recipe may set on a figure of verification, such as the mean KL divergence: the highest
    allowed value if `is_maximum` is True, else the lowest."""

    words: str
    is_maximum: bool
    value: Callable[[Mapping[str, float]], float]


THRESHOLDS: Mapping[str, Threshold] = {
    "max_kl": Threshold("the mean KL divergence", True, lambda figures: figures["kl_mean"]),
    "min_top1": Threshold("top-1 agreement", False, lambda figures: figures["top1_agreement"]),
    "max_perplexity_increase": Threshold(
        "the relative increase of perplexity",
        True,
        lambda figures: figures["perplexity"] / figures["reference_perplexity"] - 1,
    ),
}


def verify(params: Mapping[str, Json], inputs: Mapping[str, Path], out: Path) -> None:
    """Action of a build step: writes to the directory `out` a copy of the bundle's manifest bundle.json with
    the figures of its verification, such as mean KL divergence and perplexity, under "verification". Raises
    VerificationError, and writes nothing, if a figure violates a threshold (the error's `figures` then has
    all of them) or the bundle cannot be run (`figures` is then empty).

    params: for each threshold in THRESHOLDS (such as max_kl) a number as a string, or null for no limit.
    inputs: the directories `bundle`, and `reference` with the reference logits of the prompts.
    """
    from mlcbuild_format.bundle import MANIFEST

    figures = measure(inputs["bundle"], inputs["reference"])
    faults = _faults(figures, params)
    if faults:
        error = VerificationError(
            f"{'; '.join(faults)} over {figures['tokens']} tokens: use a scheme that keeps more, "
            "or relax `verify` in the recipe if the loss is acceptable"
        )
        error.figures = figures
        raise error
    document = json.loads((inputs["bundle"] / MANIFEST).read_bytes())
    document["verification"] = figures
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    (out / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _faults(figures: Mapping[str, float], params: Mapping[str, Json]) -> list[str]:
    faults = []
    for name, threshold in THRESHOLDS.items():
        limit = params[name]
        if limit is None:
            continue
        value, allowed = threshold.value(figures), float(cast(str, limit))
        # A NaN fails this comparison and is therefore reported.
        if not (value <= allowed if threshold.is_maximum else value >= allowed):
            faults.append(f"{threshold.words} is {value:.4g}, {name} is {allowed:g}")
    return faults


def measure(bundle: Path, reference_dir: Path) -> dict[str, float]:
    """Compares a bundle's logits with reference logits in a fresh process, and returns name of a figure ->
    number, rounded to four significant digits (except `tokens`).

    kl_mean and kl_max: KL(reference || bundle) of the next-token distributions, in nats, mean and maximum
    over positions. top1_agreement: share of positions with the same most likely token. perplexity and
    reference_perplexity: those of the prompts under the bundle and under the reference. decode_error: largest
    absolute difference between the bundle's logits when it decodes the first tokens of a prompt one at a time
    and all at once. tokens: number of positions. Raises VerificationError when the process fails, or the
    bundle's logits are not finite.
    """
    figures: dict[str, float] = fresh_process.run("mlcbuild.bundles.verify", str(bundle), str(reference_dir))
    return figures


@dataclass
class _Sums:
    """The sums and maxima of KL divergence, top-1 agreement and losses over all tokens of the prompts, in
    float64, from which the figures of verification are computed.
    """

    tokens: int = 0
    predicted: int = 0
    kl: float = 0.0
    kl_max: float = 0.0
    agree: int = 0
    loss: float = 0.0
    reference_loss: float = 0.0
    decode_errors: list[float] = field(default_factory=list)

    def add(self, tokens: Sequence[int], expected: Logits, actual: Logits) -> None:
        """Adds the results of one prompt to the sums over all prompts: KL divergence, top-1 agreement, and
        the losses of both models on the prompt's own next tokens. tokens: its n token ids; expected, actual:
        logits [n, vocab] of the reference and of the bundle for them.
        """
        import numpy as np

        p, q = log_softmax(expected), log_softmax(actual)
        kl = divergence(p, q)
        self.tokens += len(tokens)
        self.kl += float(kl.sum())
        self.kl_max = max(self.kl_max, float(kl.max()))
        self.agree += int((p.argmax(axis=-1) == q.argmax(axis=-1)).sum())
        following = np.asarray(tokens[1:])
        rows = np.arange(len(following))
        self.predicted += len(following)
        self.loss -= float(q[rows, following].sum())
        self.reference_loss -= float(p[rows, following].sum())

    def figures(self) -> dict[str, float]:
        values = {
            "kl_mean": self.kl / self.tokens,
            "kl_max": self.kl_max,
            "top1_agreement": self.agree / self.tokens,
            "perplexity": _exp(self.loss / self.predicted),
            "reference_perplexity": _exp(self.reference_loss / self.predicted),
            "decode_error": max(self.decode_errors),
        }
        # Four digits, because further ones depend on the order of sums in the machine's linear algebra.
        return {**{key: float(f"{value:.4g}") for key, value in values.items()}, "tokens": self.tokens}


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def _compare(bundle: str, reference_dir: str) -> dict[str, float]:
    """Compares a bundle with reference logits in this process, in which nothing of the compiler is loaded, as
    in a server. Returns name of a figure -> value: kl_mean, kl_max (nats), top1_agreement, perplexity,
    reference_perplexity, tokens (compared), and decode_error, the largest difference between logits computed
    token by token and all at once. Ends the process with a message if the bundle's logits are not finite.
    """
    import numpy as np
    from mlcbuild_runtime.executor import loading
    from mlcbuild_runtime.executor.executor import score

    model = loading.load(bundle, threads=int(os.environ.get("MLCBUILD_CORES", "1")))
    sums, sequences = _Sums(), json.loads(Path(reference_dir, "tokens.json").read_bytes())
    total = sum(map(len, sequences))
    for i, tokens in enumerate(sequences):
        expected = np.load(Path(reference_dir, f"logits-{i:04}.npy"))
        logits, head = score(model, tokens), tokens[:DECODED]
        stepped = score(model, head, chunk=1)
        if not (np.isfinite(logits).all() and np.isfinite(stepped).all()):
            sys.exit(f"prompt {i + 1}: the bundle's logits are not finite")
        sums.add(tokens, expected, logits)
        sums.decode_errors.append(float(np.abs(stepped - logits[: len(head)]).max()))
        progress.report(sums.tokens, total, "tokens")
    return sums.figures()


if __name__ == "__main__":
    fresh_process.main(_compare)
