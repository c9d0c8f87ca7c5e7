"""Functions that add options and arguments to the parsers of verbs, and functions that parse their values."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from mlcbuild_format import sizes

from mlcbuild.errors import UsageError

Formats = ("github", "gitlab", "json")
RECIPE = "recipe.yaml"
"""Name of the recipe file that is used if the command line names none."""
NAMES = (
    "a bundle, a directory of bundles, a checkpoint (a directory or a GGUF file), hf://org/model, "
    "oci://host/name:tag, or an installed model"
)
"""Text that lists the kinds of names which `chat` and `serve` accept, for messages and help."""


def affected(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--affected-by",
        metavar="RANGE",
        help="only variants whose inputs changed in these commits of Git, such as main...HEAD",
    )


def outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shard", metavar="I/N", help="run part I of N; every machine computes the same parts"
    )
    parser.add_argument("--junit", metavar="FILE", help="write steps and variants as JUnit XML")
    parser.add_argument(
        "--summary", metavar="FILE", help="write a summary in Markdown; also to $GITHUB_STEP_SUMMARY"
    )


def matrix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=Formats, default="json", help="what to print (default: json)")
    parser.add_argument("--all", action="store_true", help="up-to-date variants, too")
    parser.add_argument(
        "--shards", type=int, metavar="N", help="N jobs that share all the work, not one for each variant"
    )
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="TARGET=RUNNER",
        help="the runner for a target, * for all (default: by system and architecture)",
    )


def shard(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=2, metavar="N", help="parts (default: 2)")
    parser.add_argument(
        "--record", action="store_true", help="first write this store's durations beside the recipe"
    )


def shell(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def only(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="only these variants or steps and what they need; shell patterns",
    )


def report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", nargs="?", default="recipe.yaml", help="the recipe of the run (default: recipe.yaml here)"
    )
    parser.add_argument(
        "--output", "-o", metavar="FILE", default="report.html", help="the page (default: report.html)"
    )


def settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="NAME=VALUE", help="sets a var"
    )
    parser.add_argument(
        "--allow-outside", action="store_true", help="paths may leave the directory of the recipe"
    )


def size(text: str) -> int:
    """Parses a size such as 20GB or 1.5 GiB into bytes, rounded down: units up to TB are powers of 1000, up
    to TiB powers of 1024, in any case of letters; without a unit it is in bytes. Raises
    argparse.ArgumentTypeError for other text."""
    try:
        return sizes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, found '{text}'")
    return int(text)


def tls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tls",
        metavar="DIR",
        help="encrypt what goes over dask, with ca.pem, cert.pem and key.pem of DIR (default: $MLCBUILD_TLS)",
    )


def worker(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scheduler", help="a scheduler of dask.distributed: dask://HOST:PORT")
    parser.add_argument("--name", help="name of the worker (default: machine and process id)")
    parser.add_argument(
        "--cores", type=positive, metavar="N", help="cores to divide among steps (default: all)"
    )
    parser.add_argument(
        "--memory",
        type=size,
        metavar="SIZE",
        help="memory to divide among steps, such as 48GB or 48GiB (default: nine tenths)",
    )
    parser.add_argument(
        "--labels",
        action="append",
        default=[],
        metavar="NAME[=COUNT],...",
        help="further labels, for COUNT steps at a time; tools and processor are detected",
    )
    tls(parser)


def cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("status", "verify", "gc", "push", "pull", "export", "import"),
        help="status: show its contents; verify: hash everything again, and fetch damaged files from "
        "shared caches, if any are named; gc: remove old or excess records; "
        "push, pull: send to, or fetch from, shared caches; export, import: one file for machines without "
        "a network",
    )
    parser.add_argument(
        "operands",
        nargs="*",
        metavar="OPERAND",
        help="push RECIPE [URL ...] or push --all URL ...; pull RECIPE [URL ...]; verify [RECIPE] [URL ...]; "
        "export FILE [RECIPE]; import FILE",
    )
    parser.add_argument("--all", action="store_true", help="push: everything in the store")
    parser.add_argument(
        "--max-size", type=size, metavar="SIZE", help="gc: largest total size to keep, such as 50GB or 50GiB"
    )
    parser.add_argument(
        "--unused-days", type=positive, metavar="N", help="gc: remove records not used for N days"
    )
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="KEY",
        help="import, pull: accept only records that this key signed",
    )
    only(parser)
    settings(parser)


def provenance(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--provenance",
        action="store_true",
        help="check the provenance and its signatures",
    )
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="KEY",
        help="require provenance signed by this key; repeat it to allow several",
    )


def publish(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--to",
        action="append",
        default=[],
        metavar="URL",
        help="send one bundle, named in the recipe's place",
    )
    parser.add_argument(
        "--unverified", action="store_true", help="also bundles that this machine could not compare"
    )


def pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="oci://host/repository:tag (or @sha256:...), hf://org/name@revision")
    parser.add_argument("directory", nargs="?", help="destination (default: the last part of the name)")


def keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("new", "show"), help="make a key, or print its public half")
    parser.add_argument("--file", metavar="FILE", help="the private key (default: $MLCBUILD_KEY)")


def bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", help="'serve' to put load on a server, or a bundle's directory")
    parser.add_argument("url", nargs="?", help="serve: the server, any that speaks OpenAI's API")
    lengths = "a number, uniform:LOW,HIGH, normal:MEAN,DEVIATION or lognormal:MEDIAN,SIGMA"
    parser.add_argument(
        "--prompt-tokens", default="128", metavar="LENGTH", help=f"tokens of prompts: {lengths} (default 128)"
    )
    parser.add_argument(
        "--tokens", default="32", metavar="LENGTH", help="tokens of answers, likewise (default 32)"
    )
    serve = parser.add_argument_group("serve")
    _bench_load(serve)
    _bench_requests(serve)


def _bench_load(serve: argparse._ArgumentGroup) -> None:
    """Adds to the parser of `bench` the options that determine how many requests are sent, and when."""
    serve.add_argument(
        "--clients",
        metavar="N,...",
        help="closed loop: each client sends its next request after its answer (default 1)",
    )
    serve.add_argument(
        "--rate", metavar="R,...", help="open loop: requests per second, independent of answers"
    )
    serve.add_argument(
        "--arrivals", choices=("poisson", "constant"), help="intervals of --rate: random (default) or equal"
    )
    serve.add_argument(
        "--requests",
        type=positive,
        metavar="N",
        help="requests of each load (default: 8 per client; open loop: 100)",
    )
    serve.add_argument("--seconds", type=seconds, metavar="S", help="send new requests for S seconds")
    serve.add_argument("--warmup", type=natural, metavar="N", help="requests before each load (default 2)")


def _bench_requests(serve: argparse._ArgumentGroup) -> None:
    """Adds to the parser of `bench` the options that determine each request, and how its answer is
    evaluated.
    """
    serve.add_argument("--chat", action="store_true", help="ask /v1/chat/completions, not /v1/completions")
    serve.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    serve.add_argument(
        "--token-ids", type=positive, metavar="N", help="prompts of random tokens below N, not of words"
    )
    serve.add_argument(
        "--no-ignore-eos",
        action="store_true",
        help="answers may end early; for servers that reject the field ignore_eos",
    )
    serve.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="NAME=S",
        help="ttft, tpot or e2e within S seconds: goodput counts requests that meet all limits",
    )
    serve.add_argument("--timeout", type=seconds, metavar="S", help="limit for one request (default 300)")
    serve.add_argument("--api-key", metavar="KEY", help="default: $MLCBUILD_API_KEY")
    serve.add_argument("--seed", type=natural, metavar="N", help="seed of all random choices (default 0)")
    serve.add_argument("--plot", metavar="FILE", help="write distributions as SVG")


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, found '{text}'")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, found '{text}'")
    return value


def choice(parser: argparse.ArgumentParser) -> None:
    """Adds to a verb's parser the options that select steps, and those that force steps to run."""
    only(parser)
    parser.add_argument(
        "--force",
        action="append",
        default=[],
        metavar="STEP",
        help="run these steps even if the store has their results; shell patterns",
    )


def graph(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb `graph` to its parser."""
    parser.add_argument(
        "--format",
        choices=("mermaid", "dot", "svg", "html"),
        default="mermaid",
        help="what to write (default: mermaid)",
    )
    parser.add_argument("--output", "-o", metavar="FILE", help="where to (default: stdout)")


def chat(parser: argparse.ArgumentParser) -> None:
    """Adds to the parser of the verb `chat` the name of the model to chat with, the optional message, and the
    options of the runtime's own chat command.
    """
    from mlcbuild_runtime.chat import chat_options

    chat_options.add(parser, NAMES)


def scheme(parser: argparse.ArgumentParser) -> None:
    """Adds to a parser the option for the scheme with which `chat` and `serve` build a checkpoint."""
    parser.add_argument(
        "--scheme", metavar="NAME", help="build a checkpoint with this scheme (default: one that fits here)"
    )


def names(parser: argparse.ArgumentParser) -> None:
    """Adds the argument for names of installed models to a parser."""
    parser.add_argument("names", nargs="+", metavar="NAME", help="a model as `mlcbuild list` names it")


def recipe(parser: argparse.ArgumentParser) -> None:
    """Adds to a parser the argument that names a recipe, --set, which sets a variable of the recipe, and
    --allow-outside, which lets its paths leave its directory."""
    parser.add_argument(
        "recipe",
        nargs="?",
        default=RECIPE,
        help=f"the recipe, a YAML file, or a directory with {RECIPE} (default: {RECIPE} here)",
    )
    settings(parser)


def init(parser: argparse.ArgumentParser) -> None:
    """Adds to the parser of the verb `init` its optional argument: the model of the new recipe (a directory
    with a checkpoint's config.json, a GGUF file or hf://org/model), or else the directory into which the
    recipe is written, by default the current one."""
    parser.add_argument(
        "model",
        nargs="?",
        default=".",
        metavar="MODEL|DIRECTORY",
        help="the model of the recipe: a checkpoint's directory, a GGUF file, or hf://org/model; or the "
        f"directory where {RECIPE} is written (default: here)",
    )


def recipe_file(name: str, verb: str) -> str:
    """Returns the path of the recipe that a command line names. If `verb` is publish, a directory is a
    bundle, whatever it holds, and is returned unchanged; for other verbs it stands for the recipe.yaml in it.
    Raises UsageError if such a directory holds no recipe.yaml, or if `name` is recipe.yaml, the default, and
    no such file exists; other files are not checked."""
    recipe_path = Path(name) / RECIPE
    if verb != "publish" and Path(name).is_dir():
        if not recipe_path.is_file():
            where = f"{name}: there is no {RECIPE} in this directory"
            raise UsageError(f"{where}: name a recipe, or write one with `mlcbuild init`")
        return os.path.normpath(recipe_path)
    if name == RECIPE and not os.path.lexists(name):
        raise UsageError(f"there is no {RECIPE} here: name a recipe, or write one with `mlcbuild init`")
    return name
