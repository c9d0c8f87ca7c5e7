"""Chooses a scheme for each matrix of a model under a budget (maximum bits per weight, bytes, or loss), as
the step `budget/<model>/<quantization>`.

The choice starts with the smallest scheme for each matrix. It then applies upgrades in the order of loss
saved per byte; those of one matrix are the corners of the lower convex hull of its losses over its bytes, so
that each saves less per byte than the one before it. Losses of several matrices are taken as their sum, and
the mixture that results is evaluated as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import cast

from mlcbuild import progress
from mlcbuild.bundles.sensitivity import SENSITIVITY
from mlcbuild.bundles.weight_losses import WeightTrial, open_trial
from mlcbuild.canon import Json
from mlcbuild.errors import UsageError
from mlcbuild.quant import Storage, from_json, stored_bytes
from mlcbuild.quant.budget_limits import base_and_overrides, budget_fault, byte_limit, weight_count
from mlcbuild.quant.choice import CHOICE, mixture
from mlcbuild.quant.scheme import BudgetKind

REPORT = "budget.json"
FRAGMENT = "quantization.yaml"


@dataclass(frozen=True)
class Option:
    """One quantization scheme for one matrix: its size in bytes, and the loss (mean KL divergence) that it
    causes.
    """

    scheme: str
    bytes: int
    loss: float
    """Mean KL divergence, in nats, between the exact model and the model in which only this matrix is
    quantized, in this scheme.
    """


@dataclass(frozen=True)
class Upgrade:
    """The replacement of one matrix's quantization scheme by a larger and more accurate one."""

    matrix: str
    option: Option
    bytes: int
    """Number of bytes by which a bundle grows when this scheme replaces the one of the same matrix's previous
    upgrade, or its smallest scheme if there is none.
    """
    saved: float
    """Decrease of the loss that this matrix alone causes (mean KL divergence from the exact model), in nats,
    when this scheme replaces the one of its previous upgrade, or its smallest scheme if there is none.
    """


@dataclass(frozen=True)
class Ladder:
    """The way from the smallest version of a model to the most accurate one: the smallest quantization scheme
    of each matrix, and the replacements (upgrades) by larger schemes.
    """

    smallest: Mapping[str, Option]
    """Name of a matrix -> the candidate scheme that stores it in the fewest bytes, with its size and loss."""
    upgrades: tuple[Upgrade, ...]
    """The replacements of quantization schemes of single matrices by larger ones, each of which continues the
    previous one of its matrix. The replacement that saves the most loss per byte comes first; candidate
    schemes that are never worth their bytes are left out.
    """
    rest: int
    """Number of bytes of all parameters that are not matrices, such as norms and biases: the most that any
    candidate scheme stores for them. It is counted whatever schemes are chosen for the matrices.
    """

    def mixture(self, applied: Sequence[Upgrade]) -> dict[str, Option]:
        """Returns name of a matrix -> its quantization scheme (Option) after replacements of schemes by
        larger ones: the scheme of the matrix's last replacement, or its smallest scheme if it has none.
        applied: the replacements, in order.
        """
        return {**self.smallest, **{upgrade.matrix: upgrade.option for upgrade in applied}}

    def size(self, options: Mapping[str, Option]) -> int:
        return self.rest + sum(option.bytes for option in options.values())

    def within(self, most: int) -> list[Upgrade]:
        """Returns the replacements of matrices' quantization schemes by larger ones (a list of Upgrade) with
        which the whole model fits in `most` bytes; [] if none fits, also if the model is too large even with
        the smallest schemes. They are applied by falling loss saved per byte; after one that does not fit,
        the same matrix gets no further one."""
        left, applied, full = most - self.size(self.smallest), list[Upgrade](), set[str]()
        for upgrade in self.upgrades:
            if upgrade.matrix in full:
                continue
            if upgrade.bytes > left:
                full.add(upgrade.matrix)
                continue
            applied.append(upgrade)
            left -= upgrade.bytes
        return applied


def ladder_of(table: Mapping[str, Sequence[Option]], rest: int) -> Ladder:
    """Returns the Ladder of a model: the smallest quantization scheme of each matrix, and the replacements by
    larger schemes (Upgrade), the one that saves most loss per byte first. table: name of a matrix -> its
    candidate schemes, at least one; rest: bytes of the parameters that are not matrices, which every size
    includes.
    """
    hulls = {name: hull(options) for name, options in table.items()}
    upgrades = [
        Upgrade(name, after, after.bytes - before.bytes, before.loss - after.loss)
        for name, corners in hulls.items()
        for before, after in pairwise(corners)
    ]
    # The sort is stable: equal ratios keep the order of the model's parameters.
    upgrades.sort(key=lambda upgrade: -upgrade.saved / upgrade.bytes)
    return Ladder({name: corners[0] for name, corners in hulls.items()}, tuple(upgrades), rest)


def hull(options: Sequence[Option]) -> list[Option]:
    """Returns those quantization schemes of one matrix (a list of Option, the smallest first) that are
    corners of the lower convex hull of loss over bytes. Each has a smaller loss than the one before, and
    saves less per additional byte. options: all candidate schemes of the matrix.
    """
    corners: list[Option] = []
    for option in sorted(options, key=lambda option: (option.bytes, option.loss)):
        if corners and (option.bytes == corners[-1].bytes or option.loss >= corners[-1].loss):
            continue
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) <= _slope(corners[-1], option):
            corners.pop()
        corners.append(option)
    return corners


def _slope(before: Option, after: Option) -> float:
    """Returns the decrease of the loss per additional byte, in nats, from the quantization scheme `before` of
    a matrix to the larger one `after`."""
    return (before.loss - after.loss) / (after.bytes - before.bytes)


def budget(params: Mapping[str, Json], inputs: Mapping[str, Path], out: Path) -> None:
    """Action of a build step: chooses a quantization scheme for each matrix of a model under a budget. Writes
    to the directory `out` choice.json, which later steps read, budget.json for reports, and
    quantization.yaml, a fragment of a recipe.

    params: `name` of the quantization in the recipe; `kind` of the budget, "target_bits" (bits per weight),
    "max_size" (bytes) or "max_kl" (mean KL divergence in nats), and its `limit`, a number as text;
    `candidates` (schemes as JSON); `context_window` in tokens or null. inputs: `checkpoint`, and the
    directories that the steps `config`, `reference` and `sensitivity` wrote. Raises UsageError for a budget
    that cannot be met, CheckpointError for a checkpoint that cannot be read or that a candidate scheme cannot
    store.
    """
    candidates = [from_json(value) for value in cast("list[Json]", params["candidates"])]
    trial = open_trial(params, inputs)
    kind, limit = cast(BudgetKind, params["kind"]), float(cast(str, params["limit"]))
    listed = tuple(trial.params.values())
    if fault := budget_fault(kind, limit, candidates, listed):
        raise UsageError(fault)
    vectors = [param for param in listed if param.matrix is None]
    table = _table(inputs["sensitivity"])
    ladder = ladder_of(table, max(stored_bytes(vectors, candidate) for candidate in candidates))
    chooser = _Chooser(trial, candidates, ladder)
    most = byte_limit(kind, limit, listed)
    applied = chooser.under(limit) if most is None else ladder.within(most)
    _write(params, chooser, applied, out)


def _table(directory: Path) -> dict[str, list[Option]]:
    rows = json.loads((directory / SENSITIVITY).read_bytes())["matrices"]
    return {
        row["name"]: [Option(name, row["bytes"][name], loss) for name, loss in row["losses"].items()]
        for row in rows
    }


class _Chooser:
    """Evaluates a model whose matrices are stored in different quantization schemes (a mixture): computes its
    mean KL divergence from the exact model, in nats. The result for a mixture is kept, so that none is
    evaluated twice."""

    def __init__(self, trial: WeightTrial, candidates: Sequence[Storage], ladder: Ladder) -> None:
        self._trial, self._candidates = trial, candidates
        self.ladder = ladder
        self._losses: dict[tuple[tuple[str, str], ...], float] = {}
        self._done = 0

    @property
    def weights(self) -> int:
        return weight_count(tuple(self._trial.params.values()))

    def count(self, name: str) -> int:
        """Returns the number of weights of the matrix with this name."""
        return weight_count([self._trial.params[name]])

    @property
    def tokens(self) -> int:
        return self._trial.tokens

    def described(self, applied: Sequence[Upgrade]) -> tuple[str, list[tuple[str, str]]]:
        """Describes a mixture, in which matrices of a model have different quantization schemes, as a recipe
        does. Returns (name of the scheme that most matrices have, overrides for the others as pairs of a
        pattern of matrix names, globs joined by "|", and a scheme's name). applied: replacements of matrices'
        smallest schemes by larger ones; the last one of a matrix counts."""
        names = {name: option.scheme for name, option in self.ladder.mixture(applied).items()}
        return base_and_overrides(names, tuple(self._trial.params.values()))

    def scheme(self, applied: Sequence[Upgrade]) -> Storage:
        return mixture(self._candidates, *self.described(applied))

    def loss(self, applied: Sequence[Upgrade]) -> float:
        """Returns the mean KL divergence, in nats, of the model from the exact one, over all prompts and with
        activations rounded as the schemes do, to four significant digits. applied: the replacements of
        matrices' smallest schemes by larger ones.
        """
        options = self.ladder.mixture(applied)
        key = tuple((name, option.scheme) for name, option in options.items())
        if key not in self._losses:
            value = self._trial.loss(self.scheme(applied), self._note)
            self._losses[key] = float(f"{value:.4g}")
        return self._losses[key]

    def _note(self) -> None:
        self._done += 1
        progress.report(self._done, 0, "prompts")

    def under(self, limit: float) -> Sequence[Upgrade]:
        """Returns the fewest replacements of matrices' schemes by larger ones, applied by falling loss saved
        per byte, with which the measured loss of the model (mean KL divergence in nats) is at most `limit`.
        Their number is searched by bisection, which assumes that each of them lowers the loss. Raises
        UsageError if the loss is larger with all of them.
        """
        upgrades = self.ladder.upgrades
        low, high = 0, len(upgrades)
        if not self.loss(upgrades) <= limit:
            names = ", ".join(candidate.name for candidate in self._candidates)
            raise UsageError(
                f"max_kl is {limit:g}, but the loss is {self.loss(upgrades):.4g} with the best "
                f"mixture of {names}; raise max_kl, or add larger candidates"
            )
        while low < high:
            middle = (low + high) // 2
            if self.loss(upgrades[:middle]) <= limit:
                high = middle
            else:
                low = middle + 1
        return upgrades[:high]


def _write(params: Mapping[str, Json], chooser: _Chooser, applied: Sequence[Upgrade], out: Path) -> None:
    base, overrides = chooser.described(applied)
    options, ladder = chooser.ladder.mixture(applied), chooser.ladder
    size, loss = ladder.size(options), chooser.loss(applied)
    choice = {"base": base, "overrides": overrides}
    (out / CHOICE).write_text(json.dumps(choice) + "\n", encoding="utf-8")
    report = {
        "kind": params["kind"],
        "limit": params["limit"],
        "scheme": chooser.scheme(applied).name,
        "bytes": size,
        "bits": float(f"{8 * size / chooser.weights:.4g}"),
        "kl": loss,
        "kl_estimate": float(f"{sum(option.loss for option in options.values()):.4g}"),
        "tokens": chooser.tokens,
        "curve": _curve(ladder),
        "matrices": [
            {"name": name.removesuffix(".weight"), "scheme": option.scheme, **_size(chooser, name, option)}
            for name, option in options.items()
        ],
    }
    (out / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    lines = [
        f"# {params['kind']} {params['limit']}: {report['bits']:g} bits a weight, {size} bytes, "
        f"KL {loss:g} nats over {chooser.tokens} tokens",
        "quantizations:",
        f"  {json.dumps(params['name'])}:",
        f"    scheme: {base}",
        *(["    overrides:"] if overrides else []),
        *(f"      - {{match: {json.dumps(match)}, scheme: {scheme}}}" for match, scheme in overrides),
    ]
    (out / FRAGMENT).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _size(chooser: _Chooser, name: str, option: Option) -> dict[str, float]:
    """Returns the size of a quantized matrix: "bytes" -> its number of bytes, "bits" -> bits per weight, to
    four significant digits. name: the matrix.
    """
    return {"bytes": option.bytes, "bits": float(f"{8 * option.bytes / chooser.count(name):.4g}")}


def _curve(ladder: Ladder) -> list[tuple[int, float]]:
    """Returns pairs (bytes of the model, sum of the losses of all matrices in nats to four significant
    digits, at least 0): the first with the smallest quantization scheme of each matrix, the others after each
    further replacement of one scheme by a larger one.
    """
    loss, size = sum(option.loss for option in ladder.smallest.values()), ladder.size(ladder.smallest)
    points = [(size, float(f"{loss:.4g}"))]
    for upgrade in ladder.upgrades:
        loss, size = loss - upgrade.saved, size + upgrade.bytes
        points.append((size, float(f"{max(loss, 0.0):.4g}")))
    return points
