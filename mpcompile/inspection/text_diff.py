"""The graphs of a report before and after the passes, as a text diff by module."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mpcompile.inspection.narrowing import located_lines
from mpcompile.inspection.report import GraphReport, Report

_WIDTH = 100
_OPERATOR = re.compile(r"= (?:aten|prims)\.(\w+)\.(\w+)\(")
_DTYPE = re.compile(r"torch\.(bfloat16|float16|float32|float64)")
_NUMBER = re.compile(r"(?<=[A-Za-z])_\d+\b|(?<=\.)\d+\b")


@dataclass(frozen=True, slots=True)
class _Region:
    """What changed in one module, in one direction."""

    module: str
    direction: str
    lines: tuple[str, ...]

    @property
    def pattern(self) -> tuple[str, str, str]:
        """What it has in common with the same region of another layer: all but the numbers in names."""
        return _NUMBER.sub("", f".{self.module}"), self.direction, _NUMBER.sub("", "\n".join(self.lines))


def diff(report: Report, context: int) -> str:
    """The changed lines of all graphs, under a heading for each module and direction, with ``context`` lines around."""
    parts = []
    for number, graph in enumerate(report.graphs, 1):
        heading = [f"graph {number} of {len(report.graphs)}"] if len(report.graphs) > 1 else []
        parts.append("\n\n".join([*heading, *_regions(graph, context)]))
    return "\n\n".join(filter(None, parts)) or "The passes changed nothing."


def _regions(graph: GraphReport, context: int) -> Iterator[str]:
    alike: dict[tuple[str, str, str], list[_Region]] = {}
    for region in _changed(graph, context):
        alike.setdefault(region.pattern, []).append(region)
    for first, *others in alike.values():
        yield "\n".join([_heading(first, others), *first.lines])


def _heading(first: _Region, others: list[_Region]) -> str:
    same = f", and alike in {', '.join(region.module for region in others)}" if others else ""
    heading = f"=== {first.module or 'the model itself'}, {first.direction}{same}"
    return textwrap.fill(heading, _WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def _changed(graph: GraphReport, context: int) -> Iterator[_Region]:
    before, after = (_by_place(graph, text) for text in (graph.before, graph.after))
    for place in {**after, **before}:
        old, new = before.get(place, []), after.get(place, [])
        lines = list(difflib.unified_diff(old, new, n=context, lineterm=""))[2:]
        if lines:
            yield _Region(*place, tuple(_wrapped(lines)))


def _by_place(graph: GraphReport, text: str) -> dict[tuple[str, str], list[str]]:
    places: dict[tuple[str, str], list[str]] = {}
    for module, direction, line in located_lines(graph, text):
        places.setdefault((module, direction), []).append(_short(line))
    return places


def _short(line: str) -> str:
    line = _OPERATOR.sub(lambda match: f"= {match[1]}{'' if match[2] == 'default' else '.' + match[2]}(", line)
    return _DTYPE.sub(r"\1", line.strip())


def _wrapped(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if line.startswith("@@"):
            yield "  ..."
            continue
        sign, text = line[0], line[1:]
        yield from textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=f"{sign} ",
            subsequent_indent=f"{sign}     ",
            break_on_hyphens=False,
        )
