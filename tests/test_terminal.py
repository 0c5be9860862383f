"""A report in a terminal: the summary counts right, the table fits and can be read."""

import pytest
import torch
from torch import Tensor, nn

import mpcompile
from mpcompile.inspection.report import Report
from tests.test_programs import mixprec


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection_in, self.projection_out = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection_out(self.projection_in(x).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()])
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[0](x)).softmax(-1)


def report_of(rows: int | None = 4, **options: object) -> Report:
    compiled = mixprec(Net(), dynamic=rows is None, **options)
    compiled(torch.randn(rows or 4, 64)).square().sum().backward()
    (report,) = mpcompile.reports(compiled)
    return report


@pytest.fixture
def report() -> Report:
    return report_of(fp32=["head"])


@pytest.fixture(autouse=True)
def _terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_the_summary_counts(report: Report) -> None:
    lines = report.summary().splitlines()
    assert lines[0] == f"mixprec: 1 graph, {len(report.nodes)} operations, low type bfloat16, policy default"
    assert lines[1] == "  forward:  2 of 3 matmuls, convolutions and attentions run low"
    assert lines[2] == "  backward: 3 of 5 matmuls, convolutions and attentions run low"
    assert lines[3] == "  kept in fp32: 3 x rule 'head'"
    narrow = [cast for cast in report.casts if cast.after == "bfloat16"]
    moved = sum(cast.bytes or 0 for cast in report.casts) / 1e3
    assert lines[4] == (
        f"  casts:    {len(narrow)} narrow (4 of parameters), {len(report.casts) - len(narrow)} widen, "
        f"{moved:.3g} kB if none is fused"
    )
    kept = sum(value.saved_bytes or 0 for value in report.values)
    in_fp32 = sum(value.saved_bytes_fp32 or 0 for value in report.values)
    assert lines[5] == f"  saved:    {kept / 1e3:.3g} kB kept for backward, {kept / in_fp32:.2f} x of fp32 (predicted)"
    assert len(lines) == 6


def test_dynamic_sizes_are_said_to_be_missing_from_the_bytes() -> None:
    assert "kB and more if none is fused" in report_of(rows=None).summary()


def test_it_fits_into_80_columns(report: Report) -> None:
    assert max(len(line) for line in str(report).splitlines() if not line.startswith("  ")) <= 80


def test_each_row_says_what_where_and_why(report: Report) -> None:
    table = str(report).split("operation", 1)[1]
    rows = [line.split() for line in table.splitlines() if line.startswith(("fw", "bw"))]
    assert [row[0] for row in rows].count("fw") >= 3
    assert rows[0][:4] == ["fw", "addmm", "bf16", "bf16"]
    by_rule = [row for row in rows if row[1] == "addmm_2"]
    assert by_rule[0][:4] == ["fw", "addmm_2", "f32", "f32"]
    folded = "".join("".join(row) for row in (line.split() for line in table.splitlines()))
    assert "rule'head'" in folded.replace("fp32rule:", "")
    assert "test_terminal.py" in folded or "test_termin" in folded


def test_what_was_not_decided_specially_is_not_shown(report: Report) -> None:
    shown = str(report).split("operation", 1)[1]
    for node in report.nodes:
        listed = any(line.split()[1:2] == [node.name] for line in shown.splitlines())
        assert listed == (node.op_class == "low" or (node.rule != "class" and node.op_class != "exact")), node


def test_a_wide_terminal_is_used(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (line,) = (line for line in str(report).splitlines() if line.split()[:2] == ["fw", "addmm"])
    assert "class: matmul, convolution or attention" in line
    assert "layers.0.projection_in" in line


def test_a_narrow_terminal_gets_80_columns(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    at_80 = str(report)
    monkeypatch.setenv("COLUMNS", "30")
    assert str(report) == at_80


def test_there_are_no_colour_codes(report: Report) -> None:
    assert "\x1b" not in str(report)


def test_an_empty_report_can_be_shown() -> None:
    text = str(Report("bfloat16", ()))
    assert text.startswith("mixprec: 0 graphs, 0 operations")
    assert "0 narrow" in text
