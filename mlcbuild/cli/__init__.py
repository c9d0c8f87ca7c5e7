"""The command line: one parser, and verbs implemented as functions that return an exit code.

Exit codes: 0 ok, 1 a step or other work failed, 2 bad usage or recipe, 3 this machine lacks something, 130
interrupted. This module imports nothing slow, so `--help` and error messages appear at once. A verb's module
is imported when the verb is called.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version

from mlcbuild_format.errors import ServingError

from mlcbuild.cli import options, standard_streams
from mlcbuild.cli.annotations import annotate
from mlcbuild.errors import InputError, MlcbuildError, UsageError, did_you_mean

INTERRUPTED = 130

Configure = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Verb:
    """A verb of the command line: `function` of `mlcbuild.cli.<module>` maps parsed arguments to an exit
    code. `configure` lists functions that add arguments to the verb's parser."""

    module: str
    function: str
    help: str
    example: str
    configure: tuple[Configure, ...] = ()


def _store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", metavar="DIR", help="the artifact store (default: $MLCBUILD_STORE)")


def _remote(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-remote", action="store_true", help="use no shared cache")


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else there")


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs", type=options.positive, metavar="N", help="steps at a time (default: by cores)"
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="after a failure, run the steps that do not depend on it"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would run, like `plan`")
    parser.add_argument(
        "--executor",
        default="processes",
        metavar="WHERE",
        help="where steps run: processes, inline (this process, for debugging), or a cluster: dask://HOST:PORT",
    )
    options.tls(parser)


def _lock(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the lock is stale")


def _step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("step", help="a step's name, as `plan` prints it")


def _bundle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="a bundle's directory")


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--measure", action="store_true", help="load the bundle and compare its memory with the estimate"
    )


def _serve(parser: argparse.ArgumentParser) -> None:
    from mlcbuild_runtime.http import arguments

    arguments.add(parser, options.NAMES)


def _threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads",
        type=options.positive,
        metavar="N",
        help="threads of the model (default: one per physical core)",
    )


def _schema(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kind", choices=("recipe", "target"), nargs="?", default="recipe", help="default: recipe"
    )


VERBS: dict[str, Verb] = {
    "init": Verb(
        "recipes", "init", "write a first recipe", "mlcbuild init hf://Qwen/Qwen3-0.6B", (options.init,)
    ),
    "validate": Verb(
        "recipes", "validate", "check a recipe", "mlcbuild validate recipe.yaml", (options.recipe, _json)
    ),
    "lock": Verb(
        "recipes", "lock", "pin every non-local source", "mlcbuild lock recipe.yaml", (options.recipe, _lock)
    ),
    "plan": Verb(
        "build",
        "plan",
        "print what would run, and why",
        "mlcbuild plan recipe.yaml",
        (options.recipe, options.choice, options.affected, _store, _remote, _json),
    ),
    "run": Verb(
        "build",
        "run",
        "build what the recipe declares",
        "mlcbuild run recipe.yaml --set ctx=8192",
        (options.recipe, options.choice, _run, options.affected, options.outputs, _store, _remote, _json),
    ),
    "explain": Verb(
        "build",
        "explain",
        "show what changed for a step",
        "mlcbuild explain recipe.yaml bundle/tiny-q4a8_1-host",
        (options.recipe, _step, _store, _remote),
    ),
    "graph": Verb(
        "build",
        "graph",
        "draw the steps and their states",
        "mlcbuild graph recipe.yaml --format svg -o graph.svg",
        (options.recipe, options.graph, _store, _remote),
    ),
    "matrix": Verb(
        "ci",
        "matrix",
        "list the variants that need work as CI jobs",
        "mlcbuild matrix recipe.yaml --format github",
        (options.recipe, options.matrix, options.only, options.affected, _store, _remote),
    ),
    "shard": Verb(
        "ci",
        "shard",
        "show how a run is split over machines",
        "mlcbuild shard recipe.yaml --count 3",
        (options.recipe, options.shard, options.only, options.affected, _store, _json),
    ),
    "report": Verb(
        "ci",
        "report",
        "make an HTML page of the last run",
        "mlcbuild report recipe.yaml -o report.html",
        (options.report, _store),
    ),
    "worker": Verb(
        "cluster",
        "worker",
        "run steps for builds on other machines",
        "mlcbuild worker dask://10.0.0.5:8786 --labels gpu=1",
        (options.worker, _store),
    ),
    "cache": Verb(
        "store_verbs",
        "cache",
        "maintain the store, and share it",
        "mlcbuild cache push recipe.yaml https://cache.example/mlc",
        (options.cache, _store, _json),
    ),
    "keys": Verb(
        "store_verbs",
        "keys",
        "create and show the key that signs records",
        "mlcbuild keys new",
        (options.keys, _json),
    ),
    "targets": Verb("listing", "targets", "list the target presets", "mlcbuild targets", (_json,)),
    "models": Verb("listing", "models", "list the model families", "mlcbuild models", (_json,)),
    "schemes": Verb("listing", "schemes", "list the quantization schemes", "mlcbuild schemes", (_json,)),
    "inspect": Verb(
        "bundles",
        "inspect",
        "describe a bundle",
        "mlcbuild inspect dist/tiny-q4a8_1-host",
        (_bundle, _inspect, _json),
    ),
    "verify": Verb(
        "bundles",
        "verify",
        "re-hash a bundle's files against its manifest",
        "mlcbuild verify dist/tiny-q4a8_1-host --provenance",
        (_bundle, options.provenance, _json),
    ),
    "serve": Verb(
        "everyday",
        "serve",
        "serve models over HTTP",
        "mlcbuild serve dist/tiny-q4a8_1-host --port 8000",
        (_serve, options.scheme, _store),
    ),
    "chat": Verb(
        "everyday",
        "chat",
        "talk to a model",
        "mlcbuild chat hf://Qwen/Qwen3-0.6B",
        (options.chat, _threads, options.scheme, _store),
    ),
    "list": Verb("everyday", "listed", "list the installed models", "mlcbuild list", (_store, _json)),
    "rm": Verb(
        "everyday", "remove", "remove installed models", "mlcbuild rm tiny-q4a8_1", (options.names, _store)
    ),
    "bench": Verb(
        "bench",
        "bench",
        "measure a server under load, or a bundle",
        "mlcbuild bench serve http://127.0.0.1:8000 --clients 1,4,16",
        (options.bench, _threads, _json),
    ),
    "publish": Verb(
        "publishing",
        "publish",
        "build, verify and send bundles to registries and model hubs",
        "mlcbuild publish recipe.yaml",
        (
            options.publish,
            options.recipe,
            options.choice,
            _run,
            options.affected,
            options.outputs,
            _store,
            _remote,
            _json,
        ),
    ),
    "pull": Verb(
        "publishing",
        "pull",
        "fetch a published bundle",
        "mlcbuild pull oci://registry.example/team/tiny:q4a8_1-host bundle",
        (options.pull, _json),
    ),
    "doctor": Verb("listing", "doctor", "check this machine", "mlcbuild doctor", (_store, _json)),
    "completion": Verb(
        "completion", "completion", "complete in a shell", "mlcbuild completion bash", (options.shell,)
    ),
    "schema": Verb(
        "listing", "schema", "print a JSON Schema", "mlcbuild schema recipe > recipe.schema.json", (_schema,)
    ),
}


def parser() -> argparse.ArgumentParser:
    """Returns a parser of all verbs for --help, --version and completion; `verb_parser` parses verbs."""
    top = argparse.ArgumentParser(
        prog="mlcbuild",
        description="Builds LLM artifacts from a recipe: models x quantizations x targets.",
        epilog="example: mlcbuild run recipe.yaml",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"mlcbuild {version('mlcbuild')}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, verb in VERBS.items():
        _configure(verbs.add_parser(name, help=verb.help), verb)
    return top


def verb_parser(name: str) -> argparse.ArgumentParser:
    """Returns the parser of a verb's arguments. It is no subparser, since only a parser without subparsers
    accepts operands before, between and after options."""
    one = argparse.ArgumentParser(prog=f"mlcbuild {name}")
    _configure(one, VERBS[name])
    return one


def _configure(one: argparse.ArgumentParser, verb: Verb) -> None:
    one.description = f"{verb.help[0].upper()}{verb.help[1:]}."
    one.epilog = f"example: {verb.example}"
    one.allow_abbrev = False
    for configure in verb.configure:
        configure(one)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code. argv: the arguments after the program's name; None:
    those of this process. An exception becomes an error message on stderr, and its kind determines the code
    (1 for a defect, with a traceback if MLCBUILD_DEBUG is set). If standard output cannot be written, the
    code is 1; if its reader has closed it, there is no message, and the code is 0, or 1 for `run`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    standard_streams.open_closed()
    try:
        code = _command(arguments)
    except (MlcbuildError, ServingError) as error:
        annotate(error.problems if isinstance(error, InputError) else ())
        return _fail(str(error), error.exit_code, arguments)
    except KeyboardInterrupt:
        return _fail("mlcbuild: interrupted", INTERRUPTED, arguments)
    except BrokenPipeError:
        standard_streams.silence()
        # The reader of standard output has closed it, as `head` does. This is no error, but a run ends early.
        return 1 if arguments[:1] == ["run"] else 0
    except Exception as error:
        code = UsageError.exit_code if _is_unusable_path(error) else 1
        return _fail(_unexpected(error), code, arguments)
    return code if standard_streams.flushed() else 1


def _command(arguments: Sequence[str]) -> int:
    if not arguments:
        parser().print_help(sys.stderr)
        return 2
    name, *words = arguments
    _check_verb(name)
    try:
        if name not in VERBS:
            parser().parse_args(arguments)  # prints what --help and --version ask for, and exits
        with standard_streams.usage_errors(arguments):
            parsed, rest = verb_parser(name).parse_known_intermixed_args(words)
    except SystemExit as stop:  # argparse raises it for --help, --version and bad usage.
        return stop.code if isinstance(stop.code, int) else 2
    if rest:
        raise UsageError(_unknown(name, rest))
    parsed.verb, parsed.words = name, list(arguments)
    if getattr(parsed, "recipe", None) is not None:
        parsed.recipe = options.recipe_file(parsed.recipe, name)
    verb = VERBS[name]
    function: Callable[[argparse.Namespace], int] = getattr(
        import_module(f"mlcbuild.cli.{verb.module}"), verb.function
    )
    return function(parsed)


def _check_verb(name: str) -> None:
    if name in VERBS or name in ("-h", "--help", "--version"):
        return
    if name.startswith("-"):
        raise UsageError(f"mlcbuild: '{name}' stands before the verb: write mlcbuild VERB [OPTIONS]")
    raise UsageError(f"mlcbuild: '{name}' is not a verb; {did_you_mean(name, VERBS)}")


def _unknown(name: str, rest: Sequence[str]) -> str:
    """Returns an error message about the first argument that a verb does not accept. rest: the arguments
    that were not parsed."""
    argument = rest[0].partition("=")[0]
    if not argument.startswith("-"):
        return f"mlcbuild {name}: '{argument}' is one argument too many; see mlcbuild {name} --help"
    options = set(re.findall(r"--[a-z-]+", verb_parser(name).format_help()))
    return f"mlcbuild {name}: '{argument}' is not an option; {did_you_mean(argument, options)}"


def _is_unusable_path(error: Exception) -> bool:
    """Returns True for an OSError about a path that is too long or that this process may not access, such as
    a path on the command line."""
    if not isinstance(error, OSError) or error.filename is None:
        return False
    return error.errno in (errno.EACCES, errno.ENAMETOOLONG)


def _unexpected(error: Exception) -> str:
    """Returns the message for an exception that is not one of mlcbuild's: for a full disk, for a path that
    cannot be used, for a current directory that was removed, or for a defect of mlcbuild, whose traceback it
    prints if MLCBUILD_DEBUG is set."""
    if isinstance(error, OSError) and _is_unusable_path(error):
        return f"mlcbuild: {error.filename}: {error.strerror}; name another path"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f"{error.filename}: " if error.filename else ""
        return f"mlcbuild: {where}nothing more can be written: {error.strerror}"
    from pathlib import Path

    try:
        Path.cwd()
    except FileNotFoundError:
        return "mlcbuild: the current directory was removed: change to another one"
    if os.environ.get("MLCBUILD_DEBUG"):
        traceback.print_exception(error)
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return f"mlcbuild: a defect of mlcbuild, please report it: {message} (MLCBUILD_DEBUG=1 shows where)"


def _fail(message: str, code: int, arguments: Sequence[str]) -> int:
    """Prints an error message to stderr with unprintable characters escaped, after all standard output, and
    returns `code`. arguments: those of the command line, which may ask for a log of JSON lines."""
    standard_streams.flushed()
    standard_streams.write_error(message, arguments)
    return code
