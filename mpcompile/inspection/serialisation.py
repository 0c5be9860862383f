"""A report as JSON, and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from mpcompile.inspection.report import CastRecord, GraphReport, NodeRecord, Report, ValueRecord
from mpcompile.passes.result import Change, PassResult

_FORMAT = 2
"""Goes up when the fields change, so that a file of another version is refused rather than misread."""


def write(report: Report) -> str:
    """The report without the FX graphs."""
    document = {"format": _FORMAT, "dtype": report.dtype, "preset": report.preset, "graphs": report.graphs}
    return json.dumps(document, default=_fields)


def _fields(record: Any) -> dict[str, Any]:
    # Not dataclasses.asdict: it copies every value deeply, which takes longer than all the rest of a report.
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def read(text: str) -> Report:
    """Read what ``write`` wrote; raises ``ValueError`` for anything else."""
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        found = data.get("format", "none") if isinstance(data, dict) else "none"
        raise ValueError(
            f"This is no report that this version of mpcompile reads (format {found!r}, wanted {_FORMAT}); "
            "make it anew with mpcompile.explain or Report.to_json."
        )
    return Report(data["dtype"], tuple(map(_graph, data["graphs"])), preset=data["preset"])


def _graph(data: dict[str, Any]) -> GraphReport:
    read_fields = {
        "nodes": tuple(NodeRecord(**{**node, "inputs": tuple(node["inputs"])}) for node in data["nodes"]),
        "casts": tuple(CastRecord(**cast) for cast in data["casts"]),
        "results": tuple(
            PassResult(result["name"], tuple(Change(**change) for change in result["changes"]))
            for result in data["results"]
        ),
        "values": tuple(map(_value, data["values"])),
    }
    return GraphReport(**{**data, **read_fields})


def _value(data: dict[str, Any]) -> ValueRecord:
    return ValueRecord(**{**data, "shape": tuple(data["shape"]), "reads": tuple(data["reads"])})
