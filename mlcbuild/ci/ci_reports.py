"""Formats the results of a run for CI systems: JUnit XML and Markdown."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from xml.etree import ElementTree

from mlcbuild_format import sizes

from mlcbuild.durations import duration
from mlcbuild.reports.report import counts
from mlcbuild.reports.runlog import LoggedStep, LoggedVariant, RunLog, speeds

_UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Matches a character that XML 1.0 cannot contain, not even as a character reference such as &#1;."""


def junit(log: RunLog) -> str:
    """Returns the results of a run as JUnit XML, with a suite of steps and a suite of variants. Failed and
    skipped items have these results, all others pass; only steps that ran have times above 0 seconds."""
    root = ElementTree.Element("testsuites", name=_xml(f"mlcbuild {log.recipe}"), time=f"{log.seconds:.3f}")
    _suite(root, f"{log.recipe} steps", log.steps)
    _suite(root, f"{log.recipe} variants", log.variants)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(root: ElementTree.Element, name: str, items: Iterable[LoggedStep | LoggedVariant]) -> None:
    suite = ElementTree.SubElement(root, "testsuite", name=_xml(name))
    counts = {"tests": 0, "failures": 0, "skipped": 0}
    for item in items:
        seconds = item.seconds if isinstance(item, LoggedStep) else 0.0
        case = ElementTree.SubElement(
            suite, "testcase", classname=_xml(name), name=_xml(item.name), time=f"{seconds:.3f}"
        )
        counts["tests"] += 1
        if item.status == "failed":
            counts["failures"] += 1
            failure = ElementTree.SubElement(case, "failure", message=_xml(item.words))
            failure.text = _xml(item.tail if isinstance(item, LoggedStep) and item.tail else item.words)
        elif item.status == "skipped":
            counts["skipped"] += 1
            ElementTree.SubElement(case, "skipped", message=_xml(item.words))
        else:
            ElementTree.SubElement(case, "system-out").text = _xml(f"{item.status} {item.words}".strip())
    for key, count in counts.items():
        suite.set(key, str(count))


def _xml(text: str) -> str:
    return _UNPRINTABLE.sub("�", text)


def markdown(log: RunLog) -> str:
    """Returns a summary of a run in Markdown: a table of variants with their sizes, accuracy and speeds, the
    failures, and a folded table of the steps that ran."""
    shard = f", shard {log.shard}" if log.shard else ""
    lines = [f"## mlcbuild: {_cell(log.recipe)}{shard}", "", f"{headline(log)}.", ""]
    if log.interrupted:
        lines[2] = f"Interrupted by {log.interrupted}: {lines[2]}"
    if log.variants:
        names = speeds(log)
        listed = {item.words for item in log.steps if item.status == "failed"}
        more = "".join(f" {words} tok/s |" for words in names.values())
        lines += [
            "| variant | result | bundle | weights | KL mean | KL max | top-1 | perplexity |" + more,
            "|---|---|--:|--:|--:|--:|--:|--:|" + "--:|" * len(names),
            *(_variant(item, names, listed) for item in log.variants),
            "",
        ]
    for item in log.steps:
        if item.status == "failed":
            lines += [f"**{_cell(item.name)} failed**", "", *_code(item.words)]
            lines += ["", "The end of its log:", "", *_code(item.tail)] if item.tail else []
            lines.append("")
    ran = [item for item in log.steps if item.status == "built"]
    if ran:
        lines += [f"<details><summary>{len(ran)} steps ran</summary>", "", "| step | time | size | why |"]
        lines.append("|---|--:|--:|---|")
        for item in sorted(ran, key=lambda item: -item.seconds):
            cells = (item.name, duration(item.seconds), _size(item.bytes), item.words)
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
        lines += ["", "</details>", ""]
    return "\n".join(lines)


def headline(log: RunLog) -> str:
    """Returns a summary of a run's steps such as "4 built, 2 reused in 3.1 s"."""
    return f"{counts(log)} in {duration(log.seconds)}"


def _variant(item: LoggedVariant, names: Iterable[str], listed: Container[str]) -> str:
    """Returns a variant's row of a summary's Markdown table. names: the measured speeds that have a column;
    listed: the reasons for failures that the summary shows below the table, which the row does not repeat."""
    figures = item.figures
    cells = [
        item.name,
        f"{item.status}: {item.words}" if item.words and item.words not in listed else item.status,
        _size(item.bytes),
        _size(item.weights),
        _number(figures, "kl_mean"),
        _number(figures, "kl_max"),
        f"{figures['top1_agreement']:.1%}" if "top1_agreement" in figures else "",
        f"{figures['perplexity']:.4g}" if "perplexity" in figures else "",
    ]
    if "reference_perplexity" in figures:
        cells[-1] += f" (exact {figures['reference_perplexity']:.4g})"
    cells += [f"{figures[name]:.0f}" if name in figures else "" for name in names]
    return f"| {' | '.join(map(_cell, cells))} |"


def _number(figures: Mapping[str, float], name: str) -> str:
    return f"{figures[name]:.3g}" if name in figures else ""


def _size(count: int | None) -> str:
    return sizes.show(count) if count is not None else ""


def _cell(text: str) -> str:
    """Returns text escaped for a cell of a Markdown table, so that none of it is read as Markdown or HTML.
    White space, also between lines, becomes single spaces; at both ends it is removed."""
    escaped = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_|\[\]])", r"\\\1", escaped)


def _code(text: str) -> list[str]:
    """Returns the lines of a Markdown code block that shows `text`. Its fence is longer than any fence in
    the text.
    """
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence, *text.splitlines(), fence]
