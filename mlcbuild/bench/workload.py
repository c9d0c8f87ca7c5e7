"""Defines workloads of the load generator: number and times of requests, and lengths of prompts and answers.

All random numbers come from one seed, so a workload is the same against every server and in every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from mlcbuild.errors import UsageError

Kind = Literal["constant", "uniform", "normal", "lognormal"]
_FORMS = "N, uniform:LOW,HIGH, normal:MEAN,DEVIATION or lognormal:MEDIAN,SIGMA"
_TEXT = (
    "a about after all and any as at back be but by can come could day do even first for from get give go "
    "good have he her here him his how I if in into it its just know like look make man many me more my new "
    "no not now of on one only or other our out over people say see she so some take than that the their "
    "them then there these they thing think this time to two up us use want was way we well what when which "
    "who will with work would year you your river stone garden window number letter morning summer paper"
)
"""Common English words, separated by spaces, which are single tokens or nearly so in the vocabulary of any
model."""
WORDS = _TEXT.split()
"""The English words of which prompts are made."""


@dataclass(frozen=True)
class Lengths:
    """A distribution from which the numbers of tokens of prompts or answers are drawn; each is at least 1."""

    kind: Kind
    a: float
    b: float = 0.0

    @classmethod
    def of(cls, text: str) -> Lengths:
        """Parses a length option, in tokens: "128" (constant), "uniform:LOW,HIGH" (both included),
        "normal:MEAN,DEVIATION" or "lognormal:MEDIAN,SIGMA" (SIGMA is the deviation of the logarithm). Raises
        UsageError for any other text, a first number below 1, a negative second one, any from 10 million on,
        and LOW above HIGH."""
        name, colon, rest = text.partition(":")
        kinds: dict[str, Kind] = {"uniform": "uniform", "normal": "normal", "lognormal": "lognormal"}
        try:
            if not colon:
                lengths = cls("constant", int(text))
            else:
                a, b = (float(part) for part in rest.split(","))
                lengths = cls(kinds[name], a, b)
        except (ValueError, KeyError):
            raise UsageError(f"mlcbuild bench: '{text}' is not a length: write {_FORMS}") from None
        if not (1 <= lengths.a < 1e7 and 0 <= lengths.b < 1e7) or (
            lengths.kind == "uniform" and lengths.b < lengths.a
        ):
            raise UsageError(f"mlcbuild bench: '{text}' is not a length of at least 1 token: write {_FORMS}")
        return lengths

    def draw(self, random: Random) -> int:
        match self.kind:
            case "constant":
                value = self.a
            case "uniform":
                value = random.randint(int(self.a), int(self.b))
            case "normal":
                value = random.gauss(self.a, self.b)
            case "lognormal":
                value = min(random.lognormvariate(math.log(self.a), self.b), 1e7)
        return max(1, round(value))


@dataclass(frozen=True)
class Demand:
    """The content of one request of a load test: the numbers of tokens of prompt and answer, and the seed
    from which the prompt's text is drawn."""

    prompt_tokens: int
    answer_tokens: int
    seed: int


@dataclass(frozen=True)
class Load:
    """The timing of the requests of a load test.

    If `rate` is None, it is a closed loop: each of `clients` clients sends its next request when it has
    received its answer. Otherwise it is an open loop: `rate` requests are sent per second, whether or not
    answers have arrived."""

    clients: int | None = None
    rate: float | None = None
    even: bool = False
    """True if an open loop sends requests at equal intervals instead of random ones (a Poisson process)."""

    @property
    def name(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g}/s"
        return f"{self.clients} client{'s' if self.clients != 1 else ''}"

    def arrivals(self, random: Random) -> Iterator[float]:
        """Yields without end, in ascending order, the times at which an open loop (one that does not wait for
        answers) sends its requests, in seconds after the start of the load test; the first is 0. The
        intervals are 1 / `rate` seconds: each of them if `even` is True, else on average, drawn from
        `random`. `rate` must not be None."""
        assert self.rate is not None
        moment = 0.0
        while True:
            yield moment
            moment += 1 / self.rate if self.even else random.expovariate(self.rate)


@dataclass(frozen=True)
class Workload:
    """The requests of one load test: their number or the test's duration in seconds, the lengths of prompts
    and answers in tokens, and the seed of all random numbers.
    """

    prompts: Lengths
    answers: Lengths
    requests: int | None
    """Total number of requests of the load test; None: as many requests as are sent within `seconds`. If both
    are set, the limit that is reached first ends the test."""
    seconds: float | None = None
    seed: int = 0

    def demands(self) -> Iterator[Demand]:
        """Yields a Demand (numbers of tokens of prompt and answer, and a random seed) for each request of a
        load test, without end. The sequence is the same in every run with the same workload seed.
        """
        random = Random(f"demands {self.seed}")
        while True:
            yield Demand(self.prompts.draw(random), self.answers.draw(random), random.getrandbits(48))


def words(random: Random, count: int) -> str:
    return " ".join(random.choices(WORDS, k=count))
