"""The single measurements of the program ci/bench/gpu: each runs one kind of work on a GPU and returns rates
or times, computed from the median of several runs (`serve`: from one run)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from mlcbuild_format.program import evaluate, scalar_values
from mlcbuild_runtime.devices.gpu import GpuExecutor
from mlcbuild_runtime.executor.batch import FollowingSteps, ModelStep
from mlcbuild_runtime.executor.executor import forward

Figures = dict[str, float]
SERVED_TOKENS = 64
"""Maximum number of tokens of each prompt, and of each answer, when the engine is measured with many requests
on a GPU."""
COPY = 64 << 20
"""Size in bytes of each of the two GPU buffers between which copies are timed to measure the GPU's bandwidth.
"""
GREEDY = (0.0, float("-inf"), 1.0, 0.0, 0.0)
PATIENCE = 120
"""Seconds to wait for an event of the engine, after which the measurement fails."""


@dataclass
class Repetitions:
    """Number of timed calls of which a measurement takes the median: the option --rounds of ci/bench/gpu."""

    count: int = 5


REPETITIONS = Repetitions()


def seconds(work: Callable[[], object]) -> float:
    """Returns the median wall seconds of several calls of `work`, after a first call that is not timed. work:
    function that returns only when the GPU has finished."""
    work()
    taken = []
    for _ in range(REPETITIONS.count):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return median(taken)


def copy(model: GpuExecutor) -> Figures:
    """Measures copies from one GPU buffer to another and returns {"gigabytes_per_second": rate}. The rate
    counts the bytes read and the bytes written.
    """
    device = model.device.device
    source, target = (device.create_buffer(size=COPY, usage=0x4 | 0x8) for _ in range(2))

    def work() -> None:
        encoder = device.create_command_encoder()
        for _ in range(8):
            encoder.copy_buffer_to_buffer(source, 0, target, 0, COPY)
        device.queue.submit([encoder.finish()])
        device.queue.read_buffer(target, 0, 4)

    taken = seconds(work)
    for buffer in (source, target):
        buffer.destroy()
    return {"gigabytes_per_second": 16 * COPY / taken / 1e9}


def launch(model: GpuExecutor) -> Figures:
    """Measures the time of one kernel launch that computes almost nothing, among many in one submission to
    the GPU. Returns {"microseconds": time}.
    """

    def choose(count: int) -> None:
        model.device.run([("greedy", {"q": 1})] * count)  # two launches each
        model.device.read("sampled", 0, 1)

    few, many = (seconds(lambda count=count: choose(count)) for count in (1, 401))
    return {"microseconds": (many - few) / (400 * 2) * 1e6}


def gemv(model: GpuExecutor) -> Figures:
    """Measures the product of the output matrix with the vector of one token, the largest matrix-vector
    product of a decode step. Returns {"megabytes": size of the matrix, "gigabytes_per_second": rate at which
    it is read}.
    """
    program, sizes = model.device.program, {"q": 1}
    weights = {name for name, *_ in program.params}
    size = 0
    for own in program.variant("head", sizes).launches:
        shader = program.kernels[own.kernel]
        scalars = scalar_values(shader, own, {**sizes, "pages": model.pages})
        bound = zip(own.uses, shader.bindings, strict=True)
        size += sum(evaluate(binding.size, scalars) for use, binding in bound if use.name in weights)

    def heads(count: int) -> None:
        model.device.run([("head", sizes)] * count)
        model.device.read("sampled", 0, 1)

    few, many = (seconds(lambda count=count: heads(count)) for count in (1, 41))
    return {"megabytes": size / 1e6, "gigabytes_per_second": 40 * size / max(many - few, 1e-9) / 1e9}


def prefill(model: GpuExecutor) -> Figures:
    """Measures the prefill of the longest prompt that one call computes. Returns {"tokens": its length,
    "tokens_per_second": rate}.
    """
    limits = model.limits
    count = min(limits.prefill_chunk, limits.context_window)
    pages = range(-(-count // limits.page_size))
    taken = seconds(lambda: forward(model, ModelStep.of([([7] * count, count, pages)])))
    return {"tokens": count, "tokens_per_second": count / taken}


def decode(model: GpuExecutor, count: int) -> Figures:
    """Measures greedy decoding of `count` sequences on a GPU, where one submission to the device computes
    several steps. Returns {"tokens_per_second": rate of all sequences together, "launches_per_step": number
    of kernel launches, "gigabytes_per_second": rate at which weights are read}.
    """
    limits = model.limits
    length = min(limits.context_window // 2, 128)
    each = -(-(length + model.burst) // limits.page_size)
    step = ModelStep.of([([7], length, range(own * each, own * each + each)) for own in range(count)])
    following = FollowingSteps([[0.0] * count] * (model.burst - 1), [False] * count, ())
    launches = model.device.launches
    steps = len(model.steps(step, [GREEDY] * count, following))
    launches = (model.device.launches - launches) // steps
    taken = seconds(lambda: model.steps(step, [GREEDY] * count, following)) / steps
    weights = model.manifest.memory.weights
    return {
        "tokens_per_second": count / taken,
        "launches_per_step": launches,
        "gigabytes_per_second": weights / taken / 1e9,
    }


def serve(model: GpuExecutor, tokenizer: Path) -> Figures:
    """Measures the runtime's engine with twice as many requests as a batch holds, all sent at once. The
    engine is closed afterwards, the model is not. Returns {"requests": their number, "first_event_seconds":
    time to the first event of any request, "tokens_per_second": rate of all answers together}. tokenizer:
    directory with the tokenizer's files. Raises the error of a request that fails, and queue.Empty if no
    event arrives for PATIENCE seconds."""
    from queue import SimpleQueue

    from mlcbuild_runtime.engine.engine import Engine
    from mlcbuild_runtime.engine.engine_options import EngineOptions
    from mlcbuild_runtime.engine.request import Event, Request
    from mlcbuild_runtime.executor.sampling_params import Sampling
    from mlcbuild_runtime.text.tokenizer import Tokenizer

    engine = Engine(model, Tokenizer.load(tokenizer, model.manifest.serving), EngineOptions()).start()
    try:
        count, length = 2 * model.limits.max_batch, min(SERVED_TOKENS, model.limits.context_window // 4)
        events: SimpleQueue[Event] = SimpleQueue()
        prompts = [tuple(3 + (own + at) % 200 for at in range(length)) for own in range(count)]
        start, first = time.perf_counter(), 0.0
        for prompt in prompts:
            request = Request(prompt, length, Sampling(temperature=0), ignore_eos=True)
            engine.submit(request, events.put)
        left = count
        while left:
            event = events.get(timeout=PATIENCE)
            if event.error is not None:
                raise event.error
            left -= event.last
            first = first or time.perf_counter() - start
        taken = time.perf_counter() - start
    finally:
        engine.close()
    return {"requests": count, "first_event_seconds": first, "tokens_per_second": count * length / taken}


def llama(file: Path) -> Figures:
    """Measures with llama.cpp how fast a GGUF file decodes a single sequence, with all layers on the GPU.
    Returns {"tokens_per_second": rate}. Needs the package llama_cpp.
    """
    from llama_cpp import Llama

    model = Llama(str(file), n_gpu_layers=-1, n_ctx=512, verbose=False)
    model.eval([7] * 128)

    def step() -> None:
        for _ in range(16):
            model.eval([7])

    return {"tokens_per_second": 16 / seconds(step)}
