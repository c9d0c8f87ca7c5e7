"""Computes percentiles, throughput and goodput (requests per second that meet all latency limits) from the
arrival times of answers.

    ttft   seconds to the first piece of text (time to first token)
    tpot   seconds for each later token: (last - first) / (tokens - 1)
    itl    seconds between two arrivals of text (inter-token latency); the sample is the gap, not the request
    e2e    seconds to the end of the answer

A client sees no time between tokens that arrive together: an answer that arrives at once has neither tpot nor
itl. ttft and e2e count from the time at which a request was due, so that in an open loop a late generator
does not make the server look faster than it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mlcbuild_format import strict_json

from mlcbuild.bench.exchange import TimedReply

METRICS = ("ttft", "tpot", "itl", "e2e")
PERCENTILES = (50, 90, 99)
SLO_METRICS = ("ttft", "tpot", "e2e")
_TEXTS = ("text", "content", "reasoning_content", "reasoning", "tool_calls")
"""Fields of a streamed choice that hold generated text. Servers name reasoning in one of two ways."""


@dataclass(frozen=True)
class Sample:
    """The measurements of one request to the measured server. All times are seconds of one clock."""

    due: float
    sent: float
    end: float
    texts: tuple[float, ...] = ()
    """Arrival time of each piece of a streamed answer's text, in seconds of the clock that also measures when
    the request was due, was sent and ended.
    """
    prompt_tokens: int | None = None
    """Number of tokens of the request's prompt as the server reports it; None if it does not."""
    answer_tokens: int | None = None
    error: str | None = None
    """The kind of error, under which errors are counted, such as "timeout" or "http 503"; None for a request
    that succeeded."""
    message: str = ""

    @property
    def tokens(self) -> int:
        """Returns the number of tokens of a request's answer as the server reports it, or the number of its
        pieces of text if the server reports none.
        """
        return len(self.texts) if self.answer_tokens is None else self.answer_tokens

    def values(self) -> dict[str, float]:
        """Returns metric -> seconds for one request: e2e, ttft if text has arrived, and tpot if the answer
        has several tokens that did not all arrive together."""
        seconds = {"e2e": self.end - self.due}
        if self.texts:
            seconds["ttft"] = self.texts[0] - self.due
            if self.tokens > 1 and self.texts[-1] > self.texts[0]:
                seconds["tpot"] = (self.texts[-1] - self.texts[0]) / (self.tokens - 1)
        return seconds

    def gaps(self) -> list[float]:
        """Returns the seconds between each arrival of text and the next one, in order; [] for less than two.
        Pieces of text that arrive together count as one arrival."""
        return [late - soon for soon, late in pairwise(dict.fromkeys(self.texts))]

    def meets(self, slo: Mapping[str, float]) -> bool:
        values = self.values()
        return self.error is None and all(values.get(name, 0.0) <= most for name, most in slo.items())


def sample(due: float, sent: float, end: float, reply: TimedReply) -> Sample:
    """Returns the measurements of one streamed request, computed from its reply. due, sent, end: times in
    seconds at which the request was due, was sent and ended. It raises nothing: a failure becomes the
    sample's `error` ("http STATUS", "malformed", "stream" for an error that the server sends in the stream,
    or "cut"). Of failed samples, only a "cut" one keeps its texts' arrival times and its numbers of tokens.
    """
    if reply.status != 200:
        return Sample(due, sent, end, error=f"http {reply.status}", message=_reason(reply.body))
    texts, usage, done = list[float](), Usage(), False
    for moment, data in reply.events():
        if data == b"[DONE]":
            done = True
            break
        try:
            document = strict_json.parse(data)
        except ValueError:
            return Sample(due, sent, end, error="malformed", message="an event is not JSON")
        if not isinstance(document, dict):
            return Sample(due, sent, end, error="malformed", message="an event is not an object")
        if document.get("error"):
            return Sample(due, sent, end, error="stream", message=_reason(data))
        usage = Usage.of(document.get("usage")) or usage
        if _has_text(document):
            texts.append(moment)
    error = None if done else "cut"
    return Sample(due, sent, end, tuple(texts), usage.prompt, usage.answer, error)


@dataclass(frozen=True)
class Usage:
    """The numbers of tokens of prompt and answer that a server reports for one request; None for one that it
    does not report."""

    prompt: int | None = None
    answer: int | None = None

    @classmethod
    def of(cls, usage: object) -> Usage | None:
        if not isinstance(usage, dict):
            return None
        numbers = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
        prompt, answer = (number if isinstance(number, int) else None for number in numbers)
        return cls(prompt, answer)


def _has_text(document: Mapping[str, object]) -> bool:
    choices = document.get("choices")
    if not isinstance(choices, list):
        return False
    for choice in choices:
        if isinstance(choice, dict):
            delta = choice.get("delta")
            fields = delta if isinstance(delta, dict) else choice
            if any(fields.get(key) for key in _TEXTS):
                return True
    return False


def _reason(body: bytes) -> str:
    """Returns the error message in the JSON body of a failed HTTP response or, if it has no message, the text
    of its error or of the whole document, cut to 300 characters; for a body that is no JSON, its first line,
    cut to 200 characters, or "" if there is none."""
    try:
        document = strict_json.parse(body)
    except ValueError:
        lines = body.decode(errors="replace").strip().splitlines()
        return lines[0][:200] if lines else ""
    inner = document.get("error", document) if isinstance(document, dict) else document
    return str(inner.get("message", inner) if isinstance(inner, dict) else inner)[:300]


@dataclass(frozen=True)
class LoadResult:
    """All measurements of one load, which is a number of concurrent clients or a rate of requests."""

    load: str
    samples: tuple[Sample, ...]
    wall: float
    """Seconds from the start of the load, when its first request is due, to the end of the last answer."""
    cpu: float
    """CPU seconds that the load generator itself used during this load."""
    late: float | None = None
    """For an open loop, the largest delay in seconds with which a request was sent; None for a
    closed loop.
    """

    @property
    def good(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.error is None]

    def errors(self) -> dict[str, int]:
        return dict(Counter(sample.error for sample in self.samples if sample.error is not None))

    def values(self, metric: str) -> list[float]:
        """Returns the values of one metric (ttft, tpot, itl or e2e) in seconds, in ascending order, for all
        requests that succeeded: one for each request that has the metric, and for itl one for each gap."""
        if metric == "itl":
            return sorted(gap for sample in self.good for gap in sample.gaps())
        listed = (sample.values() for sample in self.good)
        return sorted(values[metric] for values in listed if metric in values)

    def rate(self, amount: float) -> float:
        return amount / self.wall if self.wall > 0 else 0.0

    def to_json(self, slo: Mapping[str, float]) -> dict[str, object]:
        good = self.good
        prompt = [sample.prompt_tokens for sample in good if sample.prompt_tokens is not None]
        goodput = self.rate(sum(sample.meets(slo) for sample in good)) if slo else None
        return {
            "load": self.load,
            "requests": len(self.samples),
            "failed": len(self.samples) - len(good),
            "errors": self.errors(),
            "seconds": round(self.wall, 6),
            "prompt_tokens_mean": round(sum(prompt) / len(prompt), 1) if prompt else None,
            "answer_tokens": sum(sample.tokens for sample in good),
            "answer_tokens_per_second": round(self.rate(sum(sample.tokens for sample in good)), 3),
            "requests_per_second": round(self.rate(len(good)), 4),
            "goodput_per_second": None if goodput is None else round(goodput, 4),
            **{metric: _spread(self.values(metric)) for metric in METRICS},
            "generator": {
                "cpu_share": round(self.cpu / self.wall, 4) if self.wall > 0 else 0.0,
                "late_seconds": None if self.late is None else round(self.late, 6),
            },
        }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    statistics = {f"p{p}": round(percentile(values, p), 6) for p in PERCENTILES}
    return statistics | {"mean": round(sum(values) / len(values), 6), "max": round(values[-1], 6)}


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns a percentile (0 to 100) of at least one value, interpolated linearly between neighbours.
    values: in ascending order.
    """
    place = (len(values) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


_ROWS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("requests", ("requests",)),
    ("failed", ("failed",)),
    ("prompt tokens", ("prompt_tokens_mean",)),
    ("output tok/s", ("answer_tokens_per_second",)),
    ("requests/s", ("requests_per_second",)),
    ("goodput/s", ("goodput_per_second",)),
    *((f"{name} {part}, s", (name, part)) for name in METRICS for part in ("p50", "p90", "p99", "mean")),
    ("generator, cores", ("generator", "cpu_share")),
    ("generator late, s", ("generator", "late_seconds")),
)
"""Label of a row in the table of load test results -> the keys that lead, one inside the other, to the row's
figure in a load test's JSON document.
"""


def rows(documents: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """Returns the cells of a table of load test results: a heading, then a row for each metric, with its
    label and a column for each load. A missing figure is "-", and rows without any figure are left out.
    documents: the result of each load as LoadResult.to_json returns it.
    """
    lines = [["", *(str(document["load"]) for document in documents)]]
    for label, path in _ROWS:
        figures = [_at(document, path) for document in documents]
        if any(figure is not None for figure in figures):
            lines.append([label, *map(_number, figures)])
    return lines


def _at(value: object, path: Sequence[str]) -> object:
    for key in path:
        value = value[key] if isinstance(value, dict) else None
    return value


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return "-" if value is None else str(value)
