"""Describes a mixture of experts as data: many feed-forwards, of which each token uses the few that a router
chooses.

The output is a sum over the chosen experts e, with weights w that the router computes from the token's
normalized hidden state x:

    y = sum_e w_e down_e(gate(gate_up_e(x)))  [+ shared(x), or sigmoid(g . x) shared(x)]

Shazeer et al., 2017 (arXiv 1701.06538); groups and corrections: DeepSeek-V3 (arXiv 2412.19437), section 2.1;
sparsemixer: Phi-3.5-MoE, GRIN (arXiv 2409.12136).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mlcbuild.models.param import Activation, Param

SMALLEST_SUM = 1e-20
"""Lower bound of the sum of the chosen experts' scores, by which their weights are divided, since sigmoids
may all be 0."""
SMALLEST_LOGIT = 2.0**-126
"""Lower bound of the divisor max(|logit|, largest) in the rule of sparsemixer, the smallest normal float32:
the distance of a logit 0 from the largest, 0, is 0 instead of 0 / 0."""


@dataclass(frozen=True)
class Router:
    """The rule by which a router chooses a token's experts from one logit per expert.

    Logits become scores. The experts with the largest scores are chosen, from the groups with the largest
    scores if experts are grouped; a correction may be added to the scores for this choice. The scores of the
    chosen experts are their weights. Of equal scores the lowest index is chosen: torch.topk promises no
    order, and libraries must give one answer.
    """

    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    """The function from a router's logits to scores. softmax: over all experts; with `normalized` it equals a
    softmax over the chosen ones. sigmoid: each by itself. sparsemixer: two experts are chosen one after the
    other, each with the largest logit L that is left; its weight is its softmax over the experts left whose
    logit l satisfies (L - l) / max(|l|, L) <= 2 * jitter."""
    normalized: bool = True
    """True if the weights of the chosen experts are divided by their sum; sparsemixer ignores it."""
    bias: bool = False
    """True if a bias is added to the router's logits."""
    correction: bool = False
    """True if one learned number per expert is added to the scores when experts are chosen, but not to the
    experts' weights.
    """
    groups: int = 1
    """Number of groups of equal size into which the experts are divided by their index; 1: there are no
    groups. The score of a group is the sum of the two largest scores of its experts, with their corrections,
    unless `group_by_largest` is set."""
    groups_kept: int = 1
    """Number of groups from which experts are chosen: those with the largest group scores."""
    scale: float = 1.0
    """Factor by which the weights of the chosen experts are multiplied, after any division by their sum; 1:
    they are not scaled, as with sparsemixer."""
    jitter: float | None = None
    """The parameter of sparsemixer: an expert counts for the softmax only if its logit l satisfies (L - l) /
    max(|l|, L) <= 2 * jitter, where L is the largest logit of the experts not chosen yet. None for other
    kinds of scores."""
    group_by_largest: bool = False
    """True if the score of a group of experts is the largest score of one of them (DeepSeek-V2), False if it
    is the sum of the two largest."""


@dataclass(frozen=True)
class Clamp:
    """The limits of gpt-oss's gated feed-forward, which computes (up + 1) * g * sigmoid(alpha * g) with g =
    min(gate, limit), and `up` clipped to -limit .. limit."""

    limit: float
    alpha: float


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: one gated feed-forward for each of `count` experts, of which each token uses
    `chosen`."""

    count: int
    chosen: int
    size: int
    """Number of hidden units of one expert's feed-forward."""
    activation: Activation = "silu"
    router: Router = Router()
    bias: bool = False
    """True if the matrices gate, up and down of each expert have biases."""
    clamp: Clamp | None = None
    """The constants `limit` and `alpha` of gpt-oss's clamped gate, which then replaces the activation
    function `activation` in the experts; None: the gate is not clamped, and `activation` is used."""
    shared_size: int = 0
    """Number of inner values (hidden units) of a feed-forward that every token uses beside its experts; 0:
    there is none.
    """
    shared_gate: bool = False
    """True if the output of the shared feed-forward, which every token uses, is multiplied by sigmoid(weight
    . x), where x is the feed-forward's input."""


def experts_parameters(block: Experts, hidden: int) -> Iterator[Param]:
    """Yields the parameters of a mixture of experts: those of the router, the experts and the feed-forward
    that all tokens share. One tensor [experts, rows, columns] holds a matrix, such as gate_up, of all
    experts. The router's weights are never quantized, since a small error would choose other experts. hidden:
    size of the residual stream."""
    router = block.router
    yield Param("mlp.router.weight", (block.count, hidden), stored="plain")
    if router.bias:
        yield Param("mlp.router.bias", (block.count,), stored="float32")
    if router.correction:
        yield Param("mlp.router.correction", (block.count,), stored="float32")
    rows, parts = 2 * block.size, (block.size, block.size)
    yield Param("mlp.experts.gate_up.weight", (block.count, rows, hidden), parts)
    if block.bias:
        yield Param("mlp.experts.gate_up.bias", (block.count, rows), stored="plain")
    yield Param("mlp.experts.down.weight", (block.count, hidden, block.size))
    if block.bias:
        yield Param("mlp.experts.down.bias", (block.count, hidden), stored="plain")
    if block.shared_size:
        rows, parts = 2 * block.shared_size, (block.shared_size, block.shared_size)
        yield Param("mlp.shared.gate_up.weight", (rows, hidden), parts)
        yield Param("mlp.shared.down.weight", (hidden, block.shared_size))
    if block.shared_gate:
        yield Param("mlp.shared_gate.weight", (1, hidden), stored="plain")


def experts_faults(block: Experts, _: Sequence[object]) -> Iterator[str]:
    """Yields error messages for contradictions between the fields of a mixture of experts, such as more
    chosen experts than there are; of several contradictions between its numbers, only one."""
    router = block.router
    if min(block.count, block.chosen, block.size, router.groups, router.groups_kept) < 1:
        yield "the numbers of experts, of chosen ones and of groups and an expert's size must be at least 1"
        return
    if block.chosen > block.count:
        yield f"{block.chosen} of {block.count} experts cannot be chosen"
    elif block.count % router.groups:
        yield f"{router.groups} groups do not divide {block.count} experts"
    elif router.groups > 1 and block.count // router.groups < 2 and not router.group_by_largest:
        yield f"a group needs 2 experts to be scored by, but {router.groups} groups share {block.count}"
    elif router.groups_kept > router.groups:
        yield f"{router.groups_kept} of {router.groups} groups cannot be kept"
    elif router.groups_kept * (block.count // router.groups) < block.chosen:
        yield f"{router.groups_kept} groups have fewer experts than the {block.chosen} to be chosen"
    if (router.scores == "sparsemixer") != (router.jitter is not None):
        yield "jitter and scores by sparsemixer need each other"
    if router.scores == "sparsemixer" and (block.chosen != 2 or router.groups > 1 or router.correction):
        yield "sparsemixer chooses 2 experts, without groups and correction"
    if router.scores == "sparsemixer" and router.scale != 1:
        yield "sparsemixer does not scale the weights of its experts"
    if block.shared_gate and not block.shared_size:
        yield "shared_gate needs a shared feed-forward"


def experts_numbers(block: Experts) -> Iterator[float]:
    """Yields, without names, the numbers in the description of a mixture of experts that must be finite and
    above 0, such as the factor of its weights."""
    yield block.router.scale
    if block.router.jitter is not None:
        yield block.router.jitter
    if block.clamp is not None:
        yield from (block.clamp.limit, block.clamp.alpha)
