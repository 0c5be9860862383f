"""fusion: which operations share kernels, and which kernel is the earliest that each can be in."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpcompile.passes import register_op
from mpcompile.passes.fusion import fuses, stages
from tests.helpers import call, calls, joint, trace

A, W = torch.rand(4, 4), torch.randn(4, 4)
IMAGE, KERNEL = torch.randn(1, 2, 8, 8), torch.randn(3, 2, 3, 3)

FUSE: dict[str, Callable[[Tensor], Any]] = {
    "sin": lambda x: x.sin(),
    "exp": lambda x: x.exp(),
    "sum": lambda x: x.sum(0),
    "var_mean": lambda x: torch.var_mean(x, 0),
    "_softmax": lambda x: x.softmax(0),
    "cat": lambda x: torch.cat([x, x]),
    "view": lambda x: x.view(16),
    "slice": lambda x: x[:2],
    "split": lambda x: x.split(2),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "argmax": lambda x: x.argmax(0),
    "index": lambda x: x[x.argmax(0)],
    "bernoulli": lambda x: torch.bernoulli(x),
}
WHOLE: dict[str, Callable[[Tensor], Any]] = {
    "mm": lambda x: x @ x,
    "convolution": lambda x: F.conv2d(x.view(1, 1, 4, 4), torch.ones(1, 1, 2, 2)),
    "sort": lambda x: x.sort(),
    "topk": lambda x: x.topk(2),
    "scatter_add": lambda x: x.scatter_add(0, x.argsort(0), x),
    "index_put": lambda x: x.index_put((x.argmax(0),), x),
    "_fft_r2c": lambda x: torch.fft.rfft(x),
    "linalg_inv_ex": lambda x: torch.linalg.inv(x),
    "max_pool2d_with_indices": lambda x: F.max_pool2d(x.view(1, 1, 4, 4), 2, return_indices=True),
    "grid_sampler_2d": lambda x: F.grid_sample(x.view(1, 1, 4, 4), x.view(1, 2, 4, 2), align_corners=False),
}


@pytest.mark.parametrize("name", FUSE)
def test_operations_that_share_a_kernel(name: str) -> None:
    gm = trace(FUSE[name], A)
    assert fuses(calls(gm, name)[0])
    assert all(map(fuses, calls(gm, "getitem")))


@pytest.mark.parametrize("name", WHOLE)
def test_operations_that_are_kernels_of_their_own(name: str) -> None:
    gm = trace(WHOLE[name], A)
    assert not fuses(call(gm, name))
    assert not any(map(fuses, calls(gm, "getitem")))


def test_inputs_and_outputs_share_none() -> None:
    gm = trace(lambda x: x.sin(), A)
    assert not any(fuses(node) for node in gm.graph.nodes if node.op != "call_function")


def test_an_operator_that_is_not_known_is_a_kernel_of_its_own() -> None:
    with torch.library._scoped_library("mpcompile_fusion", "FRAGMENT") as library:
        for name in ("known", "unknown"):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, torch.sin, "CompositeExplicitAutograd")
        register_op("mpcompile_fusion::known", "follow")
        gm = trace(lambda x: torch.ops.mpcompile_fusion.unknown(torch.ops.mpcompile_fusion.known(x)), A)
        assert [fuses(node) for node in calls(gm)] == [True, False]


def by_name(fn: Callable[..., Any], *inputs: Tensor) -> dict[str, int]:
    """The stage of every call."""
    graph = trace(fn, *inputs).graph
    return {node.name: stage for node, stage in stages(graph).items() if node.op == "call_function"}


def test_what_only_reads_inputs_begins_together() -> None:
    found = by_name(lambda x, w: (x @ w, x.sin(), x.sort()), A, W)
    assert found == {"mm": 0, "sin": 0, "sort": 0, "getitem": 1, "getitem_1": 1}


def test_a_chain_of_fusing_operations_is_one_stage() -> None:
    found = by_name(lambda x: (x.sin() * x).view(16).sum().exp() + x.softmax(0), A)
    assert set(found.values()) == {0}


def test_a_product_ends_and_begins_a_stage() -> None:
    found = by_name(lambda x, w: ((x.sin() @ w).cos() @ w @ w) + x.sin(), A, W)
    assert found == {"sin": 0, "mm": 1, "cos": 2, "mm_1": 3, "mm_2": 4, "sin_1": 0, "add": 5}


def test_a_stage_is_that_of_the_longest_way() -> None:
    found = by_name(lambda x, w: ((y := x.sin()) + 1, y + (y @ w), y + (x @ w)), A, W)
    assert (found["add"], found["add_1"], found["add_2"]) == (0, 2, 1)


def test_the_results_of_a_kernel_come_after_it() -> None:
    found = by_name(lambda x: (x.sin().topk(2)[0].cos(), x.sin().split(2)[1].cos()), A)
    assert (found["topk"], found["getitem"], found["cos"]) == (1, 2, 3)
    assert (found["split"], found["getitem_3"], found["cos_1"]) == (0, 0, 0)


def test_every_value_of_a_joint_graph_has_a_stage_not_before_its_sources() -> None:
    gm = joint(lambda x, k: F.conv2d(x, k).relu().mean(), IMAGE, KERNEL.clone().requires_grad_())
    found = stages(gm.graph)
    assert set(found) == set(gm.graph.nodes)
    assert all(found[node] >= found[source] for node in found for source in node.all_input_nodes)
    assert found[call(gm, "convolution_backward")] > found[call(gm, "convolution")]
