"""Sends load to an OpenAI-compatible server and collects the measurements."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from random import Random

from mlcbuild_format import strict_json

from mlcbuild.bench.exchange import ExchangeError, Server, TimedReply, exchange
from mlcbuild.bench.figures import LoadResult, Sample, Usage, sample
from mlcbuild.bench.workload import Demand, Load, Workload, words
from mlcbuild.canon import Json
from mlcbuild.errors import MlcbuildError

TRIAL_WORDS = (8, 40)
"""Numbers of words in the two trial prompts, which show how many tokens the server counts per word."""


class BenchError(MlcbuildError):
    """The error for a server that cannot be measured, because it does not answer, refuses requests, or
    answers with something else than a JSON object."""


@dataclass(frozen=True)
class Style:
    """Settings by which the lengths of a request of a load test become the body of an HTTP request: API,
    model, kind of prompt.
    """

    model: str | None = None
    chat: bool = False
    vocabulary: int | None = None
    """Number of token ids from which prompts are drawn at random, from id 0 on; None: prompts consist of
    words.
    """
    ignore_eos: bool = True
    """True if answers must have exactly the requested number of tokens, which only servers with an
    extension of the API support.
    """
    tokens_per_word: float = 1.0
    extra_tokens: float = 0.0
    """Number of tokens that the server adds to every prompt, such as those of its chat template, as `prepare`
    estimates it. Prompts of words are shortened by so many tokens."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, demand: Demand) -> dict[str, Json]:
        random = Random(demand.seed)
        if self.vocabulary is not None:
            prompt: Json = [random.randrange(self.vocabulary) for _ in range(demand.prompt_tokens)]
        else:
            word_count = (demand.prompt_tokens - self.extra_tokens) / self.tokens_per_word
            prompt = words(random, max(1, round(word_count)))
        return self._around(prompt, demand.answer_tokens) | {
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def trial(self, count: int) -> dict[str, Json]:
        """Returns the body of an HTTP request whose prompt has `count` words and whose answer has at most one
        token, and is not streamed.
        """
        return self._around(words(Random(count), count), 1)

    def _around(self, prompt: Json, answer_tokens: int) -> dict[str, Json]:
        body: dict[str, Json] = {"max_tokens": answer_tokens, "temperature": 0}
        if self.model is not None:
            body["model"] = self.model
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        return body


async def prepare(server: Server, style: Style, timeout: float) -> Style:
    """Returns the settings for requests to a server, completed: with the name of the first model that the
    server lists (None if it lists none) if `style` names none, and, if prompts consist of words, with the
    measured numbers of tokens per word and of tokens that the server adds. One token per word is assumed if
    the server does not report tokens. timeout: seconds for one query. Raises BenchError if the server cannot
    be reached, refuses a query, does not answer it in time, or sends no JSON object."""
    if style.model is None:
        document = await _asked(server, "/v1/models", None, timeout)
        listed = document.get("data")
        first = listed[0] if isinstance(listed, list) and listed else None
        name = first.get("id") if isinstance(first, dict) else None
        style = replace(style, model=name if isinstance(name, str) else None)
    if style.vocabulary is not None:
        return style
    counts = []
    for count in TRIAL_WORDS:
        usage = Usage.of((await _asked(server, style.path, style.trial(count), timeout)).get("usage"))
        if usage is None or usage.prompt is None:
            return style  # Assumes one token per word; the report shows the actual counts.
        counts.append(usage.prompt)
    per_word = max(0.1, (counts[1] - counts[0]) / (TRIAL_WORDS[1] - TRIAL_WORDS[0]))
    return replace(style, tokens_per_word=per_word, extra_tokens=counts[0] - per_word * TRIAL_WORDS[0])


async def _asked(
    server: Server, path: str, document: Mapping[str, Json] | None, timeout: float
) -> Mapping[str, object]:
    """Sends one HTTP request to the measured server, a GET if `document` is None, otherwise a POST, and
    returns the JSON object of the answer. Raises BenchError if the server cannot be reached, answers with
    another status than 200, does not answer completely within `timeout` seconds, or sends no JSON object.
    """
    where = f"{server.name}{server.path}{path}"
    try:
        async with asyncio.timeout(timeout):
            reply = await exchange(server, path, document)
    except TimeoutError:
        raise BenchError(
            f"{where} has not answered after {timeout:g} s; raise --timeout, or lower the load"
        ) from None
    except ExchangeError as error:
        raise BenchError(str(error)) from None
    text = reply.body.decode(errors="replace").strip()
    if reply.status != 200:
        raise BenchError(f"{where} answered with status {reply.status}: {text[:400]}")
    try:
        parsed = strict_json.parse(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise BenchError(
            f"{where} must answer with a JSON object; is it a server of the OpenAI API? Found: {text[:200]}"
        )
    return parsed


async def measure(
    server: Server,
    style: Style,
    runs: Iterable[tuple[Load, Workload]],
    timeout: float,
    warmup: int = 0,
    on_load: Callable[[Load], None] | None = None,
) -> list[LoadResult]:
    """Measures a server under several loads, one after the other, and returns a result for each. A load is a
    number of concurrent clients or a rate of requests per second. Raises BenchError if the server fails one
    of the first queries, with which `prepare` completes `style`, for instance because it is not
    OpenAI-compatible or lacks the model; later failures of requests count as errors in the results.

    runs: pairs of a load and a workload (the number and lengths of requests). timeout: seconds for one
    request. warmup: number of requests before each load that are not measured. on_load: called with each load
    before it is measured, after its warm-up."""
    style, results = await prepare(server, style, timeout), []
    for load, workload in runs:
        if warmup:
            first = replace(workload, requests=warmup, seconds=None, seed=~workload.seed)
            await run(server, style, Load(clients=load.clients or 1), first, timeout)
        if on_load is not None:
            on_load(load)
        results.append(await run(server, style, load, workload, timeout))
    return results


async def run(server: Server, style: Style, load: Load, workload: Workload, timeout: float) -> LoadResult:
    """Sends a server the requests of one load, which is a number of concurrent clients or a rate per second,
    waits until the last one has ended, and returns all measurements. workload: the number and lengths of the
    requests; timeout: seconds for one request. A failed request counts as an error in the result. Without a
    limit of the workload (its `requests` and `seconds` are None), this does not end.
    """
    start, cpu = time.perf_counter(), time.process_time()
    replies: list[tuple[Sample, TimedReply | None]] = []

    async def ask(demand: Demand, due: float | None = None) -> None:
        body = style.body(demand)
        sent = time.perf_counter()
        replies.append(await _ask(server, style.path, body, (sent if due is None else due, sent, timeout)))

    if load.rate is None:
        demands = _limited(workload, start)

        async def client() -> None:
            for demand in demands:
                await ask(demand)

        await asyncio.gather(*(client() for _ in range(load.clients or 1)))
    else:
        async with asyncio.TaskGroup() as group:
            moments = load.arrivals(Random(f"arrivals {workload.seed}"))
            for demand, moment in zip(_limited(workload, None), moments, strict=False):
                if workload.seconds is not None and moment > workload.seconds:
                    break
                await asyncio.sleep(max(0.0, start + moment - time.perf_counter()))
                group.create_task(ask(demand, start + moment))
    spent = time.process_time() - cpu
    samples = tuple(
        item if reply is None else sample(item.due, item.sent, item.end, reply) for item, reply in replies
    )
    end = max((item.end for item in samples), default=start)
    late = None if load.rate is None else max((item.sent - item.due for item in samples), default=0.0)
    return LoadResult(load.name, samples, end - start, spent, late)


def _limited(workload: Workload, start: float | None) -> Iterator[Demand]:
    """Yields the requests of a load test's workload: at most `requests`, or without end if that is None.
    start: time (time.perf_counter) at which the load began, after which requests are only yielded for the
    workload's `seconds`; None: this limit is ignored.
    """
    most = workload.requests
    demands = (
        (demand for _, demand in zip(range(most), workload.demands(), strict=False))
        if (most is not None)
        else workload.demands()
    )
    end = None if start is None or workload.seconds is None else start + workload.seconds
    return takewhile(lambda _: end is None or time.perf_counter() < end, demands)


async def _ask(
    server: Server, path: str, body: Mapping[str, Json], moments: tuple[float, float, float]
) -> tuple[Sample, TimedReply | None]:
    """Sends one request of a load test, and returns (a Sample with its times only, the server's reply of any
    status). If no complete reply arrived, the reply is None, and the sample has the error.

    moments: (time at which the request was due, time of sending, both of time.perf_counter, and maximum wait
    for the complete reply after sending), in seconds."""
    due, sent, timeout = moments
    try:
        async with asyncio.timeout(timeout):
            reply = await exchange(server, path, body)
    except TimeoutError:
        return Sample(due, sent, time.perf_counter(), error="timeout"), None
    except ExchangeError as error:
        return Sample(due, sent, time.perf_counter(), error=error.kind, message=str(error)), None
    return Sample(due, sent, reply.pieces[-1][0] if reply.pieces else time.perf_counter()), reply
