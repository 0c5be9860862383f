"""saved_values: what a partitioner will keep for backward, against what torch's keeps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mpcompile
from benchmarks.workloads import workloads
from mpcompile.passes.graph import is_backward
from mpcompile.passes.saved_values import elements, predict_partition, size
from tests.helpers import call, calls, joint, trace
from tests.saved_bytes_tools import bytes_predicted, bytes_saved

QUICK = ("GPT", "ResNet", "DLRM")
TRAINED = {workload.name: workload for workload in workloads("cpu") if workload.training}
PARAMS = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in TRAINED]
OPTIONS = {"dtype": "bf16", "compiler": "aot_eager"}


def predicted_to_real(name: str, policy: str = "default") -> float:
    """Bytes predicted for a workload, over the bytes that its compiled model keeps."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, inputs = TRAINED[name].model(), TRAINED[name].inputs()
    compiled = torch.compile(model, backend="mixprec", options={**OPTIONS, "policy": policy})
    real = bytes_saved(compiled, inputs)
    (report,) = mpcompile.reports(compiled)
    return bytes_predicted(report.modules[0][1].graph) / real


@pytest.mark.parametrize("name", PARAMS)
def test_predicted_bytes_are_those_of_the_partitioner(name: str) -> None:
    assert 0.95 < predicted_to_real(name) < 1.05


@pytest.mark.parametrize("name", ["ResNet", "DLRM"])
def test_predicted_bytes_where_masks_are_saved(name: str) -> None:
    assert 0.95 < predicted_to_real(name, "accurate") < 1.05


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_predicted_bytes_where_the_low_type_is_native(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpcompile.joint_pass, "has_native_bf16", lambda device: True)
    assert 0.95 < predicted_to_real(name) < 1.05


X, W = torch.randn(8, 4), torch.randn(4, 4)


def partition(fn: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> tuple[set[str], set[str]]:
    """The names of the values that are saved, without inputs, and of those that are computed anew."""
    torch._dynamo.reset()
    gm = joint(fn, *(v.clone().requires_grad_() for v in inputs), dynamic=dynamic)
    found = predict_partition(gm.graph)
    return {n.name for n in found.saved if n.op == "call_function"}, {n.name for n in found.recomputed}


def test_products_are_saved_and_never_repeated() -> None:
    saved, recomputed = partition(lambda x, w: ((x @ w).tanh() @ w).sin(), X, W)
    assert saved == {"tanh", "mm_1"}
    assert not any(name.startswith("mm") for name in recomputed)


def test_elementwise_values_are_computed_anew_from_what_is_smaller() -> None:
    saved, recomputed = partition(lambda x, w: (x @ w).sin().cos().exp(), X, W)
    assert saved == {"mm", "exp"}
    assert "sin" in recomputed


def test_inputs_cost_nothing() -> None:
    saved, recomputed = partition(lambda x: x.sin().cos(), X)
    assert saved == set()
    assert "sin" in recomputed


def test_random_numbers_are_never_drawn_twice() -> None:
    saved, _ = partition(lambda x: F.dropout(x.sin(), 0.5, True).cos(), X)
    assert saved == {"gt"}  # the mask
    assert partition(lambda x: x * torch.rand_like(x), X) == ({"rand"}, set())


def test_a_mask_that_autograd_recorded_is_computed_ahead() -> None:
    saved, recomputed = partition(lambda x, w: F.hardtanh((x @ w).sin() @ w), X, W)
    assert "bitwise_or" in saved
    assert "mm_1" not in saved | recomputed
    saved, recomputed = partition(lambda x, w: (x @ w).relu() @ w, X, W)
    assert "relu" in saved  # a product needs it; its mask is read off it
    assert "le" in recomputed


def test_reductions_are_saved() -> None:
    assert partition(lambda x, w: F.layer_norm(x @ w, (4,)), X, W) == ({"getitem_1", "rsqrt", "mm"}, set())


def test_views_are_saved_as_what_they_are_views_of() -> None:
    saved, _ = partition(lambda x, w: (x @ w).view(32).sin(), X, W)
    assert saved == {"mm"}


def test_what_a_checkpoint_repeats_is_not_saved() -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sin() @ w

    def repeated(x: Tensor, w: Tensor) -> Any:
        return checkpoint(block, x, w, use_reentrant=False).cos()

    assert partition(block, X, W)[0] == {"mm", "sin"}
    saved, recomputed = partition(repeated, X, W)
    assert saved == set()
    assert {"mm", "mm_1", "sin"} <= recomputed


def test_nothing_is_saved_of_a_graph_without_backward() -> None:
    found = predict_partition(trace(lambda x, w: (x @ w).sin(), X, W).graph)
    assert found.saved == found.recomputed == set()


def test_every_value_backward_reads_is_saved_or_computed_anew() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 3), nn.Softmax(-1))
    torch._dynamo.reset()
    gm = joint(model, X.clone().requires_grad_())
    found = predict_partition(gm.graph)
    assert not found.saved & found.recomputed
    there = found.saved | found.recomputed
    for node in gm.graph.nodes:
        if is_backward(node) or node in found.recomputed:
            assert all(is_backward(source) or source in there for source in node.all_input_nodes)


def test_sizes_are_bytes_and_a_dynamic_dimension_counts_as_64() -> None:
    gm = trace(lambda x: (x.sin(), x.half().sin(), x.split(2)), X)
    assert [(elements(node), size(node)) for node in calls(gm, "sin")] == [(32, 128), (32, 64)]
    assert (elements(call(gm, "split")), size(gm.graph.output_node())) == (0, 0)
    torch._dynamo.reset()
    dynamic = joint(lambda x: (x * 2).sin(), torch.randn(5, 3, requires_grad=True), dynamic=True)
    node = calls(dynamic, "mul")[0]
    assert (elements(node), size(node)) == (64 * 64, 64 * 64 * 4)
