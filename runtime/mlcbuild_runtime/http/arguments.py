"""The options of a server, for every command line that starts one."""

from __future__ import annotations

import argparse
import math

from mlcbuild_format import sizes
from mlcbuild_format.bundle import POOLINGS

from mlcbuild_runtime.engine.drafts import TOKENS, Speculate
from mlcbuild_runtime.engine.memory_modes import MODES, RequestedLimits
from mlcbuild_runtime.http.access import Access
from mlcbuild_runtime.http.serve import KEY_VARIABLE, Options


def add(parser: argparse.ArgumentParser) -> None:
    """Bundles and everything else."""
    defaults = Options()
    parser.add_argument(
        "bundles",
        nargs="+",
        metavar="[NAME=]BUNDLE",
        help="directory that holds bundle.json, and its name; several are loaded when they are asked for",
    )
    parser.add_argument("--host", default=defaults.host, help=f"address (default {defaults.host})")
    parser.add_argument(
        "--port", type=int, default=defaults.port, help=f"port; 0: any free one (default {defaults.port})"
    )
    parser.add_argument("--threads", type=_positive, help="threads (default: the physical cores at hand)")
    parser.add_argument(
        "--mode",
        choices=tuple(MODES),
        default=defaults.limits.mode,
        help="what the machine is for (default server): "
        + "; ".join(f"{name}: {share.about}" for name, share in MODES.items()),
    )
    parser.add_argument(
        "--memory", type=_bytes, help="for all bundles, such as 8GB (default: as the mode says)"
    )
    parser.add_argument("--max-batch", type=_positive, help="requests at a time (default: as the mode says)")
    parser.add_argument(
        "--max-pages",
        type=_positive,
        help="pages of 16 tokens in the KV cache (default: what there is room for)",
    )
    parser.add_argument(
        "--prefill-chunk",
        type=_positive,
        help="tokens of prompts computed between two steps of answers (default: as the mode says)",
    )
    parser.add_argument(
        "--max-waiting", type=_natural, help="requests that may wait; more get 503 (default: 1024)"
    )
    parser.add_argument(
        "--pooling", choices=POOLINGS, help="how embeddings are made (default: as the bundle says)"
    )
    parser.add_argument(
        "--speculate",
        metavar="lookup|BUNDLE",
        help="draft tokens: from what was said before, or by a smaller bundle of the same vocabulary",
    )
    parser.add_argument(
        "--draft-tokens",
        type=_positive,
        help=f"to draft at most, with --speculate (default: {TOKENS})",
    )
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        help=f"bearer key that opens the server, also {KEY_VARIABLE}",
    )
    parser.add_argument(
        "--cors", action="append", default=[], metavar="ORIGIN", help="origin whose pages may call; '*': all"
    )
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="name by which the server may be called, besides localhost, where it is for this machine only",
    )
    parser.add_argument(
        "--max-body", type=_bytes, default=Access().max_body, help="of a request's body (default 8MiB)"
    )
    parser.add_argument(
        "--max-tokens",
        type=_positive,
        help="tokens that an answer may have (default: what the context has room for)",
    )
    parser.add_argument("--timeout", type=_seconds, help="seconds that a request may take (default: any)")
    parser.add_argument(
        "--drain",
        type=_seconds,
        default=defaults.drain,
        help=f"seconds that running requests get to end after SIGTERM (default {defaults.drain})",
    )
    parser.add_argument(
        "--access-log", metavar="FILE", help="add a line of JSON for each request to FILE; '-': stdout"
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="write the engine's steps to FILE, in Chrome's trace format"
    )


def options(found: argparse.Namespace) -> Options:
    """From what a parser found. Raises ArgumentTypeError for options that do not go together."""
    if found.draft_tokens is not None and found.speculate is None:
        raise argparse.ArgumentTypeError(
            "--draft-tokens says how many tokens to draft, and without --speculate none are: add --speculate"
            " lookup, or --speculate with the directory of a smaller bundle, or leave --draft-tokens out"
        )
    return Options(
        host=found.host,
        port=found.port,
        threads=found.threads,
        limits=RequestedLimits(
            found.mode, found.memory, found.max_batch, found.max_pages, found.prefill_chunk
        ),
        max_waiting=found.max_waiting,
        pooling=found.pooling,
        speculate=None if found.speculate is None else Speculate.of(found.speculate, found.draft_tokens),
        drain=found.drain,
        access_log=found.access_log,
        trace=found.trace,
        access=Access(
            keys=tuple(found.api_key),
            origins=tuple(found.cors),
            timeout=found.timeout,
            max_body=found.max_body,
            hosts=tuple(found.allowed_host),
            max_tokens=found.max_tokens,
        ),
    )


def _bytes(text: str) -> int:
    try:
        count = sizes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not count:
        raise argparse.ArgumentTypeError(f"must be at least 1 byte, found '{text}'")
    return count


def _natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, found {text}")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, found {text}")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {text}")
    return number
