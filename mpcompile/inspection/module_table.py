"""The modules of a report as a table for a terminal: layers that are alike share a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from mpcompile.inspection.report import Report
from mpcompile.inspection.rollup import ModuleRollup, children
from mpcompile.inspection.sizes import show_bytes

_DEPTH = 3
"""How many levels below the first that has several modules are shown; ``Report.within`` shows what is deeper."""


def module_table(report: Report) -> Table:
    """One row for each module: matmuls that run low, bytes made and which part low, casts, bytes kept for backward."""
    rollups = report.rollups
    below = children(rollups)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("module", overflow="fold")
    for title in ("low", "makes", "low part", "casts", "saved"):
        table.add_column(title, justify="right", no_wrap=True)
    top = ""
    while len(below[top]) == 1:
        (top,) = below[top]
    for depth, alike in _rows(rollups, below, [top], 0):
        last = alike[-1].rpartition(".")[2]
        name = f"{alike[0] or 'all'}{f' to {last}' if len(alike) > 1 else ''}"
        table.add_row("  " * max(0, depth - 1) + name, *_figures(rollups[alike[0]]))
    return table


def _rows(
    rollups: Mapping[str, ModuleRollup], below: Mapping[str, Sequence[str]], alike: list[str], depth: int
) -> Iterator[tuple[int, list[str]]]:
    yield depth, alike
    if depth < _DEPTH:
        for group in _groups(rollups, below[alike[0]]):
            yield from _rows(rollups, below, group, depth + 1)


def _groups(rollups: Mapping[str, ModuleRollup], paths: Sequence[str]) -> list[list[str]]:
    """Neighbours that are numbered and have the same figures, together."""
    groups: list[list[str]] = []
    for path in paths:
        if groups and _are_alike(rollups[groups[-1][-1]], rollups[path]):
            groups[-1].append(path)
        else:
            groups.append([path])
    return groups


def _are_alike(one: ModuleRollup, other: ModuleRollup) -> bool:
    numbers = [rollup.path.rpartition(".")[2] for rollup in (one, other)]
    return all(map(str.isdigit, numbers)) and dataclasses.replace(one, path=other.path) == other


def _figures(rollup: ModuleRollup) -> Iterator[str]:
    yield f"{rollup.low_matmuls}/{rollup.matmuls}" if rollup.matmuls else "-"
    yield show_bytes(rollup.bytes)
    yield f"{100 * rollup.low_bytes / rollup.bytes:.0f}%" if rollup.bytes else "-"
    yield str(rollup.casts)
    yield show_bytes(rollup.saved_bytes) if rollup.saved_bytes else "-"
