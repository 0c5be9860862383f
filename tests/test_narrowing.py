"""A part of a report is a report: of the modules that match, and of nothing else."""

import pytest

from mpcompile.inspection.report import Report
from tests.report_tools import stack_report


def test_only_the_records_of_the_module_are_left() -> None:
    whole, part = stack_report(), stack_report().within("layers.1")
    for kind in ("nodes", "casts", "values"):
        expected = [record for record in getattr(whole, kind) if record.module.startswith("layers.1")]
        assert list(getattr(part, kind)) == expected
        assert expected
    assert part.saved_bytes == sum(v.saved_bytes or 0 for v in part.values) < (whole.saved_bytes or 0)


def test_a_pattern_may_match_several_modules() -> None:
    part = stack_report().within("layers.*.norm")
    assert {node.module for node in part.nodes} == {f"layers.{i}.norm" for i in range(3)}
    assert part.matmuls() == ()


def test_a_text_keeps_the_lines_of_its_nodes() -> None:
    part = stack_report().within("layers.2.up")
    (graph,) = part.graphs
    lines = [line.split(": ")[0] for line in graph.after.splitlines()]
    assert lines == [v.name for v in part.values if v.kind != "output"]
    # What the passes erased is found in the text before, beside what stood around it.
    erased = [line for line in graph.before.splitlines() if line.split(": ")[0] not in lines]
    assert any("aten.permute.default" in line for line in erased)
    assert all("bf16" not in line for line in erased)


def test_a_change_is_kept_with_its_node() -> None:
    part = stack_report("fp16").within("head")
    names = {value.name for value in part.values}
    changes = [change for graph in part.graphs for result in graph.results for change in result.changes]
    assert {change.node for change in changes} <= names
    assert "unscaled_head_weight" in {change.node for change in changes}


def test_it_shows_itself_and_survives_json() -> None:
    part = stack_report().within("layers.1")
    assert part.summary().splitlines()[1] == "  forward:  2 of 2 matmuls, convolutions and attentions run low"
    assert Report.from_json(part.to_json()) == part


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("layers.7", "matches no module; the nearest names are: 'layers.2'"),
        ("op:mm", "is no module"),
        ("head@backward", "is no module"),
        ("", "is not understood"),
    ],
)
def test_what_names_no_module_raises(pattern: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        stack_report().within(pattern)
