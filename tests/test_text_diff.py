"""The text diff: what changed, by module, and no more."""

import dataclasses

import torch
from torch import nn

import mpcompile
from mpcompile.inspection.report import Report
from tests.report_tools import report_of, stack_report, value


def sections(text: str) -> dict[str, list[str]]:
    """The lines under each heading."""
    found: dict[str, list[str]] = {}
    for block in text.split("\n\n"):
        lines = block.splitlines()
        body = next(i for i, line in enumerate(lines) if not line.startswith(("===", "    ")))
        found[" ".join(line.strip() for line in lines[:body])] = lines[body:]
    return found


def test_lines_are_at_most_100_columns_wide() -> None:
    for report in (stack_report(), stack_report("fp16")):
        assert max(map(len, report.diff().splitlines())) <= 100


def test_every_module_has_its_own_heading_and_like_layers_share_one() -> None:
    found = sections(stack_report().diff())
    (up,) = (heading for heading in found if heading.startswith("=== layers.0.up, forward"))
    assert up == "=== layers.0.up, forward, and alike in layers.1.up, layers.2.up"
    assert "=== head, forward" in found
    assert "=== head, backward" in found
    assert not any(heading.startswith("=== layers.1.up, forward") for heading in found)


def test_it_shows_what_was_put_in_and_what_it_replaced() -> None:
    lines = sections(stack_report().diff())["=== head, forward"]
    assert [line for line in lines if line.startswith("- addmm")] == ["- addmm_6: f32[256, 4] = addmm(" + tail(lines)]
    (new,) = (line for line in lines if line.startswith("+ addmm"))
    assert new.startswith("+ addmm_6: bf16[256, 4] = addmm(convert_element_type_default")
    assert any(line.startswith("+ convert") and "f32[256, 4] = convert_element_type(addmm_6" in line for line in lines)


def tail(lines: list[str]) -> str:
    (old,) = (line for line in lines if line.startswith("- addmm"))
    return old.partition("addmm(")[2]


def test_lines_that_did_not_change_are_context_only() -> None:
    report = stack_report().within("head")
    without = report.diff(context=0).splitlines()
    assert not [line for line in without if line.startswith("  ") and line.strip() != "..." and "alike" not in line]
    changed = sum(line[:2] in ("- ", "+ ") for line in without)
    assert changed == sum(line[:2] in ("- ", "+ ") for line in report.diff(context=3).splitlines()) > 0


def test_applying_it_to_the_text_before_gives_the_text_after() -> None:
    part = stack_report().within("head")
    (graph,) = part.graphs
    lines = part.diff(context=10**6).splitlines()

    def side(sign: str) -> list[str]:
        kept = [line for line in lines if line[:1] in (" ", sign) and line.strip() != "..."]
        joined: list[str] = []
        for line in kept:
            if line[2:].startswith("    ") and joined:  # the rest of a long line
                joined[-1] += " " + line.strip(" +-")
            else:
                joined.append(line[2:])
        return [line.partition(":")[0] for line in joined]

    assert side("-") == [line.partition(":")[0] for line in graph.before.splitlines()]
    assert side("+") == [line.partition(":")[0] for line in graph.after.splitlines()]


def test_where_nothing_changed_it_says_so() -> None:
    report = mpcompile.explain(nn.Linear(4, 4), torch.randn(2, 4), options={"policy": "fp32"})
    assert report.diff() == "The passes changed nothing."
    assert Report("bfloat16", ()).diff() == "The passes changed nothing."


def test_graphs_are_numbered_where_there_are_several() -> None:
    one = report_of(value("a"))
    before, after = "a: f32[2] = aten.mm.default(x)", "a: bf16[2] = aten.mm.default(x)"
    graph = dataclasses.replace(one.graphs[0], before=before, after=after)
    text = Report("bfloat16", (graph, graph)).diff()
    assert text.splitlines()[0] == "graph 1 of 2"
    assert text.count("+ a: bf16[2] = mm(x)") == 2
