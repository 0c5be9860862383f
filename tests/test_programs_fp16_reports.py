"""What scales fp16 gradients can be seen: in reports, in what generated code does, in a second process."""

from pathlib import Path
from typing import Any

import pytest
import torch

import mpcompile
from tests.helpers import relative_error
from tests.process_tools import assert_warm, train_in_process
from tests.test_programs import in_fp64, mixprec
from tests.test_programs_fp16 import BOUND, SCALES, fp16, set_scale
from tests.test_programs_fp16_training import LR, Net, copies


def graph_of(report: mpcompile.Report) -> str:
    (graph,) = report.graphs
    return graph.after


def scaling_changes(report: mpcompile.Report) -> list[str]:
    return [
        change.node
        for graph in report.graphs
        for result in graph.results
        for change in result.changes
        if result.name == "insert_loss_scaling"
    ]


NAMED = [
    "scaled_tangents_1",
    "inverse_scale",
    "unscaled_first_weight",
    "unscaled_first_bias",
    "unscaled_last_weight",
    "unscaled_last_bias",
    "gradient_flags",
]


def test_nodes_that_scale_are_named_in_reports() -> None:
    model, x = Net(), torch.randn(4, 8)
    compiled = fp16(model)
    compiled(x).sum().backward()
    (report,) = mpcompile.reports(compiled)
    lines = [line.split(":")[0] for line in graph_of(report).splitlines()]
    assert [name for name in NAMED if name not in lines] == []
    assert set(scaling_changes(report)) == set(NAMED) - {"inverse_scale"}
    explained = mpcompile.explain(model, x, options={"dtype": "fp16"})
    assert explained.graphs == report.graphs
    assert mpcompile.Report.from_json(report.to_json()) == report


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"dtype": "fp16", "loss_scale": None}, {"policy": "fp32"}])
def test_nothing_scales_where_nothing_is_to_be_scaled(options: dict[str, Any]) -> None:
    model, x = Net(), torch.randn(4, 8)
    report = mpcompile.explain(model, x, options=options)
    found = graph_of(report)
    assert not any(name in found for name in ("scale", "flags"))
    assert scaling_changes(report) == []
    # No inputs but the model's own, and the tangent.
    assert found.count("= input") == 6
    compiled = mixprec(model, **{"dtype": "auto", **options})
    compiled(x).sum().backward()
    runtime = mpcompile.runtime(compiled)
    assert (runtime.scale, runtime.state_dict()) == (1.0, {})


def test_a_pass_without_gradients_scales_nothing() -> None:
    model = Net()
    compiled = fp16(model)
    with torch.no_grad():
        compiled(torch.randn(4, 8))
    (report,) = mpcompile.reports(compiled)
    assert "scale" not in graph_of(report)
    assert scaling_changes(report) == []


@pytest.mark.inductor
def test_generated_code_scales_and_flags() -> None:
    model, x = Net(), torch.randn(4, 8)
    exact = in_fp64(model)
    (exact(x.double()).square().sum() / 4).backward()
    compiled, found = fp16(model, compiler="inductor"), []
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    for scale in SCALES:
        set_scale(compiled, scale)
        optimizer.zero_grad()
        (compiled(x).square().sum() / 4).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other, truth in zip(*found, exact.parameters(), strict=True):
        assert relative_error(one, truth.grad) < BOUND
        assert torch.equal(one, other)
    before, runtime = copies(model), mpcompile.runtime(compiled)
    optimizer.zero_grad()
    (compiled(x) * 1e6).sum().backward()
    optimizer.step()
    assert all(map(torch.equal, before, copies(model)))
    assert runtime.last_step_skipped
    # Biases are summed in fp32, where 4e6 * 2^12 is no overflow, and so is what comes down from one output: a product.
    assert runtime.overflowed == ("first.weight", "last.weight")
    assert runtime.scale == SCALES[1] / 2


PROCESS = """
options = {"dtype": "fp16", "loss_scale": {"init_scale": float(sys.argv[1])}}
compiled = torch.compile(model, backend="mixprec", options=options)
runtime, optimizer = mpcompile.runtime(compiled), torch.optim.AdamW(model.parameters(), 1e-2)
steps = []
for factor in (1e-6, 1e6):
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    (compiled(x).sum() * factor).backward()
    gradients = [p.grad.tolist() for p in model.parameters()]
    optimizer.step()
    stayed = all(map(torch.equal, before, model.parameters()))
    steps.append((stayed, runtime.last_step_skipped, runtime.scale, runtime.overflowed))
    if factor < 1:
        small = gradients
(report,) = mpcompile.reports(compiled)
answer(report=report.to_json(), steps=steps, gradients=small)
"""


def process(folder: Path, scale: float) -> dict[str, Any]:
    """Train two steps in a new process, of which the second overflows."""
    return train_in_process(folder, PROCESS, str(scale))


@pytest.mark.inductor
def test_a_second_process_starts_warm_scales_skips_and_names(tmp_path: Path) -> None:
    cold, warm = process(tmp_path, 2.0**16), process(tmp_path, 2.0**14)
    assert_warm(cold, warm)
    # The scale is no part of the cached code: the second process has another, and the same gradients.
    assert warm["gradients"] == cold["gradients"]
    overflowed = ["first.weight", "first.bias", "last.weight"]
    assert cold["steps"] == [[False, False, 2.0**16, []], [True, True, 2.0**15, overflowed]]
    assert warm["steps"] == [[False, False, 2.0**14, []], [True, True, 2.0**13, overflowed]]
    assert "gradient_flags" in graph_of(mpcompile.Report.from_json(warm["report"]))
    assert warm["report"] == cold["report"]
