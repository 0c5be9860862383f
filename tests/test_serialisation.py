"""Any report is read back from JSON as it was, and nothing else is taken for one."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpcompile.inspection.report import CastRecord, GraphReport, NodeRecord, Report, ValueRecord
from mpcompile.passes.result import Change, PassResult
from tests.report_tools import stack_report

TEXT = st.text(max_size=12)
TEXTS = st.lists(TEXT, max_size=3).map(tuple)
SIZE = st.none() | st.integers(0, 2**50)


def some(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(strategy, max_size=3).map(tuple)


NODES = st.builds(NodeRecord, **dict.fromkeys(NodeRecord.__dataclass_fields__, TEXT) | {"inputs": TEXTS})
CASTS = st.builds(CastRecord, **dict.fromkeys(CastRecord.__dataclass_fields__, TEXT) | {"bytes": SIZE})
VALUES = st.builds(
    ValueRecord,
    **dict.fromkeys(ValueRecord.__dataclass_fields__, TEXT)
    | {"shape": some(st.integers(0, 2**40) | TEXT), "reads": TEXTS, "rounds": st.booleans()}
    | dict.fromkeys(("bytes", "saved_bytes", "saved_bytes_fp32"), SIZE),
)
RESULTS = st.builds(PassResult, TEXT, some(st.builds(Change, TEXT, TEXT, TEXT, TEXT, TEXT)))
GRAPHS = st.builds(GraphReport, some(NODES), some(CASTS), some(RESULTS), TEXT, TEXT, some(VALUES))
REPORTS = st.builds(Report, TEXT, some(GRAPHS), preset=TEXT)


@given(REPORTS)
@settings(max_examples=60, deadline=None)
def test_a_report_is_read_back_equal(report: Report) -> None:
    assert Report.from_json(report.to_json()) == report


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_report_of_a_model_is_read_back_equal(dtype: str) -> None:
    report = stack_report(dtype)
    again = Report.from_json(report.to_json())
    assert again == report
    assert (again.diff(), str(again), again.rollups) == (report.diff(), str(report), report.rollups)


@pytest.mark.parametrize("document", ["[]", "{}", '"text"', '{"format": 1, "graphs": []}'])
def test_another_document_is_refused(document: str) -> None:
    with pytest.raises(ValueError, match="no report that this version of mpcompile reads"):
        Report.from_json(document)


def test_the_document_is_plain_json() -> None:
    data = json.loads(stack_report().to_json())
    assert data["dtype"] == "bfloat16"
    assert {value["kind"] for value in data["graphs"][0]["values"]} >= {"input", "operation", "cast", "output"}
