"""bytes_moved: counted by hand on small graphs, and against what Inductor counts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from benchmarks.kernel_costs import Costs
from benchmarks.traffic import VARIANTS, Traffic, misranked, traffic
from benchmarks.traffic_time import Timed, ranking, timed
from benchmarks.workloads import Workload
from mpcompile.joint_pass import emulates
from mpcompile.passes import Policy, run_passes
from mpcompile.passes.traffic import bytes_moved, bytes_moved_by_fused
from tests.helpers import call, joint, trace

A, W = torch.randn(4, 8), torch.randn(8, 16)


def moved(fn: Callable[..., Any], *inputs: Tensor, low: bool = False) -> int:
    gm = trace(fn, *inputs)
    if low:
        run_passes(gm, Policy())
    return bytes_moved(gm.graph)


def test_what_fuses_is_read_and_written_once() -> None:
    assert moved(lambda x: x.exp().sin() + x, A) == 2 * 4 * 32


def test_a_product_reads_its_operands_and_writes_its_result() -> None:
    assert moved(torch.mm, A, W) == 4 * (32 + 128 + 64)
    # exp and its sum are one kernel, which writes both; the last one reads the product and that sum.
    fn = lambda x: ((y := x.exp()) @ x.t()).sum() + y.sum()  # noqa: E731
    assert moved(fn, torch.randn(4, 4)) == 4 * ((16 + 16 + 1) + (16 + 16 + 16) + (16 + 1 + 1))


def test_views_and_broadcasts_are_read_as_what_they_view() -> None:
    assert moved(lambda x, b: x.t() + b[:, None], A, torch.randn(8)) == 4 * (32 + 8 + 32)
    assert moved(lambda x: x[:, :2].exp(), A) == 4 * (8 + 8)


def test_a_lookup_reads_what_it_returns() -> None:
    rows = torch.tensor([1, 2, 1])
    assert moved(lambda i, w: torch.nn.functional.embedding(i, w) + 1, rows, torch.randn(100, 5)) == 8 * 3 + 4 * (
        15 + 15
    )


def test_a_scatter_reads_and_writes_what_it_is_given() -> None:
    rows, values = torch.tensor([1, 2, 1]), torch.randn(3, 5)
    scatter = lambda i, v: torch.zeros(100, 5).index_put((i,), v, accumulate=True)  # noqa: E731
    assert moved(scatter, rows, values) == 4 * 500 + 8 * 3 + 4 * (15 + 2 * 15)


def test_an_operator_without_positional_arguments_reads_all_of_them() -> None:
    gm = trace(torch.mm, A, W)
    node = call(gm, "mm")
    node.kwargs, node.args = dict(zip(("self", "mat2"), node.args, strict=True)), ()
    assert bytes_moved(gm.graph) == 4 * (32 + 128 + 64)


def test_low_operands_are_half_as_many_bytes() -> None:
    wide, low = moved(torch.mm, A, W), moved(torch.mm, A, W, low=True)
    casts = (4 + 2) * (32 + 128) + (2 + 4) * 64
    assert low == wide // 2 + casts


def test_what_backward_recomputes_is_read_as_what_it_is_computed_from() -> None:
    gm = joint(lambda x: x.exp().sin(), A.clone().requires_grad_())
    # Forward: x in, y out. Backward: x and the tangent in, a gradient out.
    assert bytes_moved(gm.graph) == 4 * 32 * (2 + 3)


def test_fused_kernels_alone_leave_products_out() -> None:
    # exp is written for the product, whose result the last kernel reads; that one writes a scalar.
    gm = trace(lambda x, w: (x.exp() @ w).sum(), A, W)
    assert bytes_moved_by_fused(gm.graph) == 4 * (32 + 32 + 64 + 1)
    assert bytes_moved(gm.graph) == bytes_moved_by_fused(gm.graph) + 4 * (32 + 128 + 64)


class Block(nn.Module):
    """[N, 64] -> a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(nn.functional.gelu(self.up(self.norm(x))))).square().mean()


BLOCK = Workload(name="block", model=Block, inputs=lambda: (torch.randn(256, 64),))


@pytest.mark.inductor
@pytest.mark.parametrize("variant", ["fp32", "default"])
def test_inductor_counts_about_as_many(variant: str) -> None:
    found = traffic(BLOCK, variant)
    assert found.predicted == pytest.approx(found.found, rel=0.1)


class OneMore(Costs):
    """A second more for each graph."""

    def seconds(self, graph: fx.Graph) -> float:
        return 1.0 + super().seconds(graph)


@pytest.mark.inductor
def test_the_kernels_of_a_step_are_timed_and_the_graphs_that_run_are_predicted() -> None:
    found = timed(BLOCK, 3, OneMore(byte=1.0, rounding=0.0, boolean=0.0, integer=0.0))
    assert list(found) == list(VARIANTS)
    assert all(0 < each.kernels < each.step for each in found.values())
    assert all(2 < each.predicted < 3 for each in found.values())  # forward and backward
    # Where products are computed in fp32, rounding their operands is traffic; elsewhere 16 bits are less of it.
    assert (found["default"].predicted > found["fp32"].predicted) == emulates(Policy(), BLOCK.inputs())


def test_pairs_in_the_other_order_are_found_and_ties_are_not() -> None:
    found = {"a": Traffic(100, 100), "b": Traffic(90, 110), "c": Traffic(50, 60), "d": Traffic(51, 59)}
    assert misranked(found) == [("a", "b")]


def test_times_are_ranked_unless_they_are_alike() -> None:
    def ranked(**variants: tuple[float, float]) -> list[tuple[str, str]]:
        return ranking({name: Timed(moved, step=3.0, kernels=took) for name, (moved, took) in variants.items()})

    assert ranked(a=(1.0, 1.0), b=(1.1, 2.0), c=(1.2, 1.95), d=(2.0, 2.6)) == []
    assert ranked(a=(1.0, 2.0), b=(1.1, 1.0), c=(1.2, 1.05)) == [("a", "b"), ("a", "c")]
    assert ranked(a=(1.0, 2.0), b=(1.0, 1.0)) == [("a", "b")]
