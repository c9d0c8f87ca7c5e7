"""Defines the command-line options of a server."""

from __future__ import annotations

import argparse
import os

from mlcbuild_format import sizes
from mlcbuild_format.bundle import POOLINGS
from mlcbuild_format.program import DEVICE_VARIABLE

from mlcbuild_runtime.engine.drafts import TOKENS, Speculate
from mlcbuild_runtime.engine.memory_modes import MODES, LimitOverrides
from mlcbuild_runtime.http.access import Access
from mlcbuild_runtime.http.serve import KEY_VARIABLE, Logs, ServerOptions
from mlcbuild_runtime.option_values import natural, positive, seconds

NAMES = "a bundle, or a directory of bundles"


def add(parser: argparse.ArgumentParser, names: str = NAMES) -> None:
    """Adds the arguments for bundles and all options of a server to a parser. names: text for the help that
    describes the accepted bundles."""
    defaults = ServerOptions()
    parser.add_argument(
        "bundles",
        nargs="+",
        metavar="[NAME=]BUNDLE",
        help=f"{names}, and a name for it; several are loaded when requests name them",
    )
    parser.add_argument("--host", default=defaults.host, help=f"address (default {defaults.host})")
    parser.add_argument(
        "--port", type=int, default=defaults.port, help=f"port; 0: any free one (default {defaults.port})"
    )
    _add_machine(parser, defaults)
    _add_requests(parser)
    _add_model(parser)
    _add_access(parser)
    _add_process(parser, defaults)


def _add_machine(parser: argparse.ArgumentParser, defaults: ServerOptions) -> None:
    """Adds to the parser of the server's command line the options for the computing threads, the GPU, the
    memory and its mode, and the page that runs a bundle in browsers."""
    parser.add_argument(
        "--threads", type=positive, help="computing threads (default: the physical cores that are available)"
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="GPU for bundles of GPUs: a part of its name, or its number (default: the fastest kind)",
    )
    parser.add_argument(
        "--browser",
        action="store_true",
        help="serve a page that runs the bundle in the visitors' browsers, through WebGPU",
    )
    parser.add_argument(
        "--write", metavar="DIRECTORY", help="write the files of that page to DIRECTORY and exit"
    )
    parser.add_argument(
        "--mode",
        choices=tuple(MODES),
        default=defaults.limits.mode,
        help="how much of the machine to use (default server): "
        + "; ".join(f"{name}: {share.about}" for name, share in MODES.items()),
    )
    parser.add_argument(
        "--memory", type=_bytes, help="memory for all bundles, such as 8GB (default: from the mode)"
    )


def _add_requests(parser: argparse.ArgumentParser) -> None:
    """Adds to the parser of the server's command line the options that limit the batch, the KV cache pages,
    the prompt tokens between two decode steps, and the waiting requests."""
    parser.add_argument("--max-batch", type=positive, help="requests in a batch (default: from the mode)")
    parser.add_argument(
        "--max-pages",
        type=positive,
        help="pages of 16 tokens in the KV cache (default: as many as fit the memory)",
    )
    parser.add_argument(
        "--prefill-chunk",
        type=positive,
        help="prompt tokens computed between two decode steps (default: from the mode)",
    )
    parser.add_argument(
        "--max-waiting", type=natural, help="requests that may wait; more get 503 (default: 1024)"
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Adds to the parser of the server's command line the options of embeddings and of speculative
    decoding.
    """
    parser.add_argument(
        "--pooling", choices=POOLINGS, help="how hidden states become embeddings (default: from the bundle)"
    )
    parser.add_argument(
        "--speculate",
        metavar="lookup|BUNDLE",
        help="draft tokens by looking up the earlier text, or with a smaller bundle of the same vocabulary",
    )
    parser.add_argument(
        "--draft-tokens",
        type=positive,
        help=f"maximum tokens of a draft, with --speculate (default: {TOKENS})",
    )


def _add_access(parser: argparse.ArgumentParser) -> None:
    """Adds to the parser of the server's command line the options that restrict access and limit requests."""
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        help=f"bearer key that requests must carry; also {KEY_VARIABLE}",
    )
    parser.add_argument(
        "--cors", action="append", default=[], metavar="ORIGIN", help="origin whose pages may call; '*': all"
    )
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name that requests may address besides localhost (local servers without keys)",
    )
    parser.add_argument(
        "--max-body",
        type=_bytes,
        default=Access().max_body,
        help="maximum size of a request's body (default 8MiB)",
    )
    parser.add_argument(
        "--max-tokens",
        type=positive,
        help="maximum tokens of an answer (default: as many as fit the context)",
    )
    parser.add_argument(
        "--lenient",
        action="store_true",
        help="log and drop unknown fields of requests instead of refusing them",
    )
    parser.add_argument("--timeout", type=seconds, help="maximum seconds for a request (default: no limit)")


def _add_process(parser: argparse.ArgumentParser, defaults: ServerOptions) -> None:
    """Adds to the parser of the server's command line the options for shutdown and logs."""
    parser.add_argument(
        "--drain",
        type=seconds,
        default=defaults.drain,
        help=f"seconds that running requests get to end after SIGTERM (default {defaults.drain})",
    )
    parser.add_argument(
        "--access-log", metavar="FILE", help="add a line of JSON for each request to FILE; '-': stdout"
    )
    parser.add_argument(
        "--log",
        choices=("auto", "text", "json", "none"),
        default=defaults.logs.form,
        help="a line for each request on standard error (default: text on a terminal); json: all lines",
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="write the engine's steps to FILE, in Chrome's trace format"
    )


def options(arguments: argparse.Namespace) -> ServerOptions:
    """Returns the options of a server from parsed command-line arguments, and sets the environment variable
    that names the GPU if --device is stated. Raises ArgumentTypeError if an option is stated without another
    option that it requires."""
    _refuse_conflicts(arguments)
    if arguments.device is not None:
        # This also applies to the processes that this one starts.
        os.environ[DEVICE_VARIABLE] = arguments.device
    return ServerOptions(
        host=arguments.host,
        port=arguments.port,
        threads=arguments.threads,
        limits=LimitOverrides(
            arguments.mode,
            arguments.memory,
            arguments.max_batch,
            arguments.max_pages,
            arguments.prefill_chunk,
        ),
        max_waiting=arguments.max_waiting,
        pooling=arguments.pooling,
        speculate=None
        if arguments.speculate is None
        else Speculate.of(arguments.speculate, arguments.draft_tokens),
        drain=arguments.drain,
        logs=Logs(arguments.access_log, arguments.log, arguments.trace),
        browser=arguments.browser,
        site=arguments.write,
        access=Access(
            keys=tuple(arguments.api_key),
            origins=tuple(arguments.cors),
            timeout=arguments.timeout,
            max_body=arguments.max_body,
            hosts=tuple(arguments.allowed_host),
            max_tokens=arguments.max_tokens,
            lenient=arguments.lenient,
        ),
    )


def _refuse_conflicts(arguments: argparse.Namespace) -> None:
    """Raises ArgumentTypeError for an option that has no effect without another one, which is missing."""
    if arguments.draft_tokens is not None and arguments.speculate is None:
        raise argparse.ArgumentTypeError(
            "--draft-tokens limits the drafts of --speculate, which is missing: add --speculate"
            " lookup, or --speculate with the directory of a smaller bundle, or leave --draft-tokens out"
        )
    if arguments.write is not None and not arguments.browser:
        raise argparse.ArgumentTypeError(
            "--write writes the files of the page of --browser, which is missing: add --browser"
        )


def _bytes(text: str) -> int:
    try:
        count = sizes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not count:
        raise argparse.ArgumentTypeError(f"must be at least 1 byte, found '{text}'")
    return count
