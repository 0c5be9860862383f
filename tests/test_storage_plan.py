"""storage_plan: what is chosen for whole models, and that it is the same every time."""

import time
from typing import Any

import pytest
import torch
from torch import nn

import mpcompile
from benchmarks.models import GPT
from benchmarks.workloads import workloads
from mpcompile.passes import PASSES, Policy, run_passes, store_low
from mpcompile.passes.minimum_cut import NEVER, energy
from mpcompile.passes.readers import low_form
from mpcompile.passes.storage_plan import EXACT, SAVED, STORED, plan_storage, storage_problem
from tests.helpers import joint, reasons, run_flat, stored, text, trace

TRAINED = {workload.name: workload for workload in workloads("cpu") if workload.training}
QUICK = ("GPT", "ResNet", "DLRM")
PARAMS = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in TRAINED]
BEFORE = PASSES[: PASSES.index(store_low)]
PRESETS = ("default", "accurate", "fast")


def model_graph(name: str) -> torch.fx.GraphModule:
    """The joint graph of a workload's model."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    return joint(TRAINED[name].model(), *TRAINED[name].inputs())


@pytest.mark.parametrize("name", PARAMS)
def test_no_plan_in_sight_is_cheaper(name: str) -> None:
    gm = model_graph(name)
    run_passes(gm, Policy(), BEFORE)
    for preset in PRESETS:
        problem = storage_problem(gm, Policy(preset=preset))
        plan = plan_storage(gm, Policy(preset=preset))
        chosen = {(SAVED, value.node) for value in plan} | {
            (STORED, v.node) for v, how in plan.items() if how == STORED
        }
        # Nothing, all that has a low copy anyway, and everything.
        shared = {(how, node) for node in problem.values if low_form(node) for how in (STORED, SAVED)}
        everything = {(how, node) for node in problem.values for how in (STORED, SAVED)}
        found = [min_over_exact(problem, plan) for plan in (chosen, set(), shared, everything)]
        assert found[0] <= min(found[1:]) + 1e-6


def min_over_exact(problem: Any, chosen: set[Any]) -> float:
    """The energy of a plan that says of no value whether it is exact: with all that it makes exact."""
    exact = {(EXACT, node) for node in problem.values if problem.cost[EXACT, node] == 0.0}
    while True:
        broken = {
            choice
            for choice, other, price in problem.pulls
            if choice in exact and other not in chosen and other not in exact and price > 0
        }
        if not broken:
            return energy(problem.cost, problem.pulls, chosen | exact)
        exact -= broken


@pytest.mark.parametrize("preset", PRESETS)
def test_every_run_plans_alike(preset: str) -> None:
    first, second = model_graph("DLRM"), model_graph("DLRM")
    results = [reasons(run_passes(gm, Policy(preset=preset))) for gm in (first, second)]
    assert results[0] == results[1]
    assert text(first) == text(second)


class Attended(nn.Module):
    """A softmax that a product reads, and a stream through relus."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (self.first(x) @ x.t()).softmax(-1) @ x
        z = (y + x).relu()
        return self.last((z + self.second(z)).relu())


MODELS = {
    "relus": (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), 8),
    "softmax": (Attended, 8),
}


@pytest.mark.parametrize("kind", MODELS)
def test_accurate_rounds_nothing_that_was_not_rounded(kind: str) -> None:
    make, count = MODELS[kind]
    model = make()
    graphs = []
    for _ in range(2):
        torch._dynamo.reset()
        graphs.append(joint(model, torch.randn(6, 8, requires_grad=True)))
    gm, plain = graphs
    generator = torch.Generator().manual_seed(0)
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    values = [torch.rand(tuple(v.shape), generator=generator).to(v.dtype) for v in fakes]
    assert stored(gm, Policy(preset="accurate")).changed
    run_passes(plain, Policy(preset="accurate"), BEFORE)
    pairs = list(zip(run_flat(gm, *values), run_flat(plain, *values), strict=True))
    assert len(pairs) == count
    assert all(torch.equal(found, expected) for found, expected in pairs)


def test_a_selection_counts_as_exact_only_where_it_reads_the_low_form() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        moved = (y := x.sin()).view(16)
        return moved.sum(), moved.abs().exp(), y > 0, y @ w  # the sum reads what was not rounded, through the same view

    gm = trace(fn, torch.randn(4, 4), torch.randn(4, 4))
    run_passes(gm, Policy(), BEFORE)
    problem = storage_problem(gm, Policy())
    (absolute,) = (node for node in gm.graph.nodes if node.name == "abs_1")
    (value,) = (node for node in problem.values if node.name == "sin")
    assert [reader.name for reader in problem.values[value].sooner] == ["gt"]
    assert problem.cost[EXACT, absolute] == NEVER


def test_presets_store_more_and_more() -> None:
    accurate, default, fast = (
        len(stored(model_graph("GPT"), Policy(preset=preset)).changes) for preset in ("accurate", "default", "fast")
    )
    assert accurate <= default <= fast
    assert accurate < fast


class Block(nn.Module):
    """A residual block with a norm, at any batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(nn.functional.gelu(self.first(self.norm(x))))


@pytest.mark.parametrize("preset", PRESETS)
def test_no_decision_depends_on_a_dynamic_size(preset: str) -> None:
    model, plans = Block(), []
    for batch in (3, 700):
        torch._dynamo.reset()
        gm = joint(model, torch.randn(batch, 16), dynamic=True)
        plans.append((reasons(stored(gm, Policy(preset=preset))), [node.name for node in gm.graph.nodes]))
    assert plans[0] == plans[1]


def test_planning_adds_no_guard() -> None:
    torch._dynamo.reset()
    options = {"policy": Policy(preset="fast"), "compiler": "aot_eager"}
    model = Block()
    compiled = torch.compile(model, backend="mixprec", options=options, dynamic=True)
    for batch in (3, 5, 200, 64, 700):
        with torch._dynamo.config.patch(error_on_recompile=batch != 3):
            compiled(torch.randn(batch, 16)).sum().backward()
    assert len(mpcompile.reports(compiled)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_ten_thousand_nodes_are_planned_in_seconds(preset: str) -> None:
    torch._dynamo.reset()
    gm = joint(GPT(256, 64, 45, 32, 32), torch.randint(0, 256, (2, 32)))
    run_passes(gm, Policy(preset=preset), BEFORE)
    assert len(gm.graph.nodes) > 9_000
    start = time.process_time()
    plan = plan_storage(gm, Policy(preset=preset))
    assert time.process_time() - start < 5
    assert bool(plan) == (preset != "accurate")  # nothing in it is exact in the low type
