"""Options of the verbs about CI."""

from __future__ import annotations

import argparse

Formats = ("github", "gitlab", "json")


def affected(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--affected-by",
        metavar="RANGE",
        help="only variants whose inputs changed in these commits of Git, such as main...HEAD",
    )


def outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shard", metavar="I/N", help="do one of N parts, the same on every machine")
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


def only(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="only these variants or steps and what they need; shell patterns",
    )


def report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="the recipe of the run")
    parser.add_argument(
        "--output", "-o", metavar="FILE", default="report.html", help="the page (default: report.html)"
    )
