"""carries_factor: what it says of an operation holds for the operation's numbers."""

from collections.abc import Collection
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map

from mpcompile.passes import linearity
from mpcompile.passes.graph import packet_name
from mpcompile.passes.linearity import carries_factor
from tests.helpers import call, calls, trace
from tests.linearity_cases import ALL, BY_NAME, REFUSED, Case, M, aten, prims

# The factor is a power of two, so multiplying by it rounds nothing: where an operation is linear in the operands
# that are scaled, its result is so many times as large in every bit.


class Applied:
    """One call of an operation: the node of it, the nodes of its operands, and its numbers."""

    def __init__(self, case: Case, seed: int = 0, size: float = 1.0) -> None:
        args, kwargs = case.arguments(seed, size)
        graph, self.operands, self._target = fx.Graph(), list[fx.Node](), case.target

        def placed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            node = graph.placeholder(f"input_{len(graph.nodes)}")
            node.meta["val"] = value
            if value.is_floating_point() or value.is_complex():
                self.operands.append(node)
            return node

        placed_args = tree_map(placed, args)
        self.node = graph.call_function(case.target, tuple(placed_args), kwargs)
        self.node.meta["val"] = self._run({}, 1.0)

    def _run(self, scaled: Collection[fx.Node], factor: float) -> Any:
        def value(argument: Any) -> Any:
            if not isinstance(argument, fx.Node):
                return argument
            return argument.meta["val"] * factor if argument in scaled else argument.meta["val"]

        return self._target(*tree_map(value, list(self.node.args)), **self.node.kwargs)

    def subsets(self) -> list[set[int]]:
        """Every choice of operands but none."""
        count = len(self.operands)
        return [set(c) for c in chain(*(combinations(range(count), size) for size in range(1, count + 1)))]

    def carries(self, subset: Collection[int]) -> bool:
        """What is said of a factor that these operands have."""
        return carries_factor(self.node, {self.operands[index] for index in subset})

    def is_linear(self, subset: Collection[int], factor: float) -> bool:
        """Whether the numbers carry the factor, bit for bit."""
        found = self._run({self.operands[index] for index in subset}, factor)
        pairs = zip(self._results(found), self._results(self.node.meta["val"]), strict=True)
        return all(torch.equal(scaled, true * factor) for scaled, true in pairs)

    def _results(self, value: Any) -> list[Tensor]:
        # Solvers return the factors of their matrix as well, for autograd.
        return tree_leaves(value)[:1] if "solve" in packet_name(self._target) else tree_leaves(value)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_linear_operation_carries_the_factor_of_its_operands(name: str) -> None:
    applied = Applied(BY_NAME[name])
    assert [subset for subset in applied.subsets() if applied.carries(subset)] == list(BY_NAME[name].linear)


@pytest.mark.parametrize("name", BY_NAME)
def test_the_numbers_carry_the_factor_wherever_that_is_said(name: str) -> None:
    applied = Applied(BY_NAME[name])
    claimed = [subset for subset in applied.subsets() if applied.carries(subset)]
    assert [subset for subset in claimed if not applied.is_linear(subset, 2.0**10)] == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_linear_carries_no_factor(name: str) -> None:
    applied = Applied(REFUSED[name])
    assert not applied.is_linear({0}, 2.0**10)
    assert not applied.carries({0})


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
@given(st.data(), st.sampled_from(sorted(ALL)), st.integers(0, 2**16), st.integers(-8, 8), st.integers(1, 24))
def test_whatever_the_numbers_the_factor_is_carried(
    data: st.DataObject, name: str, seed: int, size: int, exponent: int
) -> None:
    applied = Applied(ALL[name], seed, 2.0**size)
    subset = data.draw(st.sampled_from(applied.subsets()))
    carried = applied.carries(subset)
    event(f"carried: {carried}")
    assert not carried or applied.is_linear(subset, 2.0**exponent)


def test_every_operation_of_the_tables_is_tried() -> None:
    tables = (linearity._OF_FIRST, linearity._SUMS, linearity._PRODUCTS, linearity._FUSED, linearity._LINEAR_IN)
    known = {name for name in chain(*tables) if hasattr(aten, name) or hasattr(prims, name)}
    assert known <= set(BY_NAME)


@pytest.mark.parametrize(
    ("branch", "carried"), [(lambda g: g * 2, True), (lambda g: g.clamp(-1, 1), False), (lambda g: g + 1, False)]
)
def test_a_condition_carries_the_factor_where_both_branches_do(branch: Any, carried: bool) -> None:
    gm = trace(lambda p, g: torch.cond(p, branch, lambda g: -g, (g,)), torch.tensor(True), torch.randn(3))
    _, g = gm.graph.find_nodes(op="placeholder")
    assert carries_factor(call(gm, "cond"), {g}) is carried


def test_a_value_times_itself_carries_no_factor() -> None:
    gm = trace(lambda g: g * g, torch.randn(3))
    assert not carries_factor(call(gm, "mul"), set(gm.graph.find_nodes(op="placeholder")))


def test_a_piece_of_several_results_carries_their_factor() -> None:
    gm = trace(lambda g: g.split(2)[1], torch.randn(4))
    (piece,) = [node for node in calls(gm, "getitem") if node.args[1] == 1]
    assert carries_factor(piece, {call(gm, "split")})


def test_a_sum_with_a_size_that_may_vary_carries_no_factor() -> None:
    gm = make_fx(lambda g: g + g.shape[0], tracing_mode="symbolic")(torch.randn(3))
    (g,) = gm.graph.find_nodes(op="placeholder")
    assert not carries_factor(call(gm, "add"), {g})


def test_an_operation_of_another_library_is_not_trusted_for_its_argument_s_name() -> None:
    with torch.library._scoped_library("mpcompile_test", "FRAGMENT") as library:
        library.define("clip(Tensor grad) -> Tensor")
        library.impl("clip", lambda grad: grad.clamp(-0.5, 0.5), "CompositeExplicitAutograd")
        clipped = Applied(Case(torch.ops.mpcompile_test.clip.default, M))
    assert not clipped.carries({0})
