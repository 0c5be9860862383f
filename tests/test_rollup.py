"""Figures by module add up, and are those of the records."""

import torch
from torch import nn

import mpcompile
from mpcompile.inspection.report import CastRecord
from mpcompile.inspection.rollup import children
from tests.report_tools import report_of, stack_report, value


def test_the_figures_of_the_whole_are_sums_over_the_records() -> None:
    report = stack_report()
    whole = report.rollups[""]
    assert whole.operations == len(report.nodes)
    assert whole.matmuls == len(report.matmuls()) == 7 + 2 * 7
    assert whole.low_matmuls == sum("bfloat16" in node.inputs for node in report.matmuls()) == whole.matmuls
    assert whole.low_share == 1.0
    assert (whole.casts, whole.cast_bytes) == (len(report.casts), sum(cast.bytes or 0 for cast in report.casts))
    assert whole.saved_bytes == report.saved_bytes
    made = [v for v in report.values if v.kind in ("operation", "added")]
    assert whole.bytes == sum(v.bytes or 0 for v in made)
    assert whole.low_bytes == sum(v.bytes or 0 for v in made if v.dtype == "bfloat16") > 0


def test_a_module_counts_what_is_inside_it() -> None:
    rollups = stack_report().rollups
    parts = [rollups[f"layers.1.{name}"] for name in ("norm", "up", "down")]
    layer = rollups["layers.1"]
    assert layer.matmuls == sum(part.matmuls for part in parts) == 6
    own = [node for node in stack_report().nodes if node.module == "layers.1"]
    assert layer.operations == sum(part.operations for part in parts) + len(own)
    assert rollups["layers"].matmuls == 6 * 3
    assert rollups["layers.1.norm"].low_share is None


def test_a_name_that_begins_like_another_is_another() -> None:
    rollups = report_of(value("a", module="layers.1"), value("b", module="layers.10")).rollups
    assert [rollups[path].operations for path in ("layers.1", "layers.10", "layers")] == [1, 1, 2]


def test_figures_of_one_module_by_hand() -> None:
    cast = CastRecord("c", "b", "float32", "bfloat16", 48, "", "m", "forward")
    rollup = report_of(
        value("a", module="m", bytes=32, saved_bytes=32, saved_bytes_fp32=64),
        value("b", module="m", bytes=64, dtype="float32"),
        value("view", module="m", bytes=64, kind="view"),
        value("dynamic", module="m", bytes=None, saved_bytes=None),
        casts=(cast,),
    ).rollups["m"]
    assert (rollup.bytes, rollup.low_bytes, rollup.casts, rollup.cast_bytes) == (96, 32, 1, 48)
    assert (rollup.saved_bytes, rollup.saved_bytes_fp32) == (32, 64)


def test_the_low_share_is_that_of_the_matmuls() -> None:
    x = torch.randn(3, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        report = mpcompile.explain(model, x, options={"dtype": "bf16", "fp32": ["1"]})
    assert [report.rollups[path].low_share for path in ("", "0", "1")] == [0.5, 1.0, 0.0]


def test_children_are_the_modules_right_inside() -> None:
    paths = ("", "a", "a.b", "a.b.c", "a.d", "e")
    assert children(paths) == {"": ["a", "e"], "a": ["a.b", "a.d"], "a.b": ["a.b.c"], "a.b.c": [], "a.d": [], "e": []}
