"""save_masks_as_bytes: the same results, with the masks that backward reads in 8-bit integers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from mpcompile.passes import Policy, run_passes
from mpcompile.passes.mask_bytes import save_masks_as_bytes
from mpcompile.passes.saved_values import predict_partition
from tests.helpers import call, joint, reasons, run_joint, text, trace

BF16 = Policy()
X, W = torch.randn(8, 4), torch.randn(4, 4)


def dropped(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(x @ w, 0.5) @ w


def clipped(x: Tensor, w: Tensor) -> Tensor:
    """A hardtanh's mask is recorded for backward alone, and forward can compute it."""
    return F.hardtanh(x @ w) @ w


def dropped_and_repeated(x: Tensor, w: Tensor) -> Tensor:
    """Backward computes what was dropped anew, for the cosine."""
    return F.dropout(x @ w, 0.5).sin() @ w


MASKED: dict[str, Callable[..., Any]] = {
    "of dropout": dropped,
    "that autograd recorded": clipped,
    "of what is computed anew": dropped_and_repeated,
}


def graph(fn: Callable[..., Any]) -> fx.GraphModule:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return joint(fn, *(v.clone().requires_grad_() for v in (X, W)))


def saved_dtypes(gm: fx.GraphModule) -> set[torch.dtype]:
    saved = predict_partition(gm.graph).saved
    return {node.meta["val"].dtype for node in saved if node.op == "call_function"}


@pytest.mark.parametrize("kind", MASKED)
def test_masks_are_saved_as_integers_and_nothing_else_changes(kind: str) -> None:
    gm, plain = graph(MASKED[kind]), graph(MASKED[kind])
    assert torch.bool in saved_dtypes(gm)
    assert len(save_masks_as_bytes(gm, BF16).changes) == 1
    assert saved_dtypes(gm) - saved_dtypes(plain) == {torch.uint8}
    assert torch.bool not in saved_dtypes(gm)
    results = []
    for each in (gm, plain):
        torch.manual_seed(1)
        results.append(run_joint(each, (X, W), (torch.ones(8, 4),)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert len(results[0]) == 3


def test_the_change_says_why_and_a_second_run_finds_nothing() -> None:
    gm = graph(dropped)
    found = run_passes(gm, BF16)
    mask = call(gm, "gt").name
    assert f"{mask} is saved as 8-bit integers, which a kernel stores at once" in reasons(found)
    once = text(gm)
    assert reasons(run_passes(gm, BF16)) == []
    assert text(gm) == once


def anew(x: Tensor, w: Tensor) -> Tensor:
    return torch.where(x > 0.5, x @ w, 0.0)


def looked_up(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return torch.cond((y > 0).all(), lambda a: a.sin(), lambda a: a.cos(), (y,))


@pytest.mark.parametrize("fn", [anew, looked_up], ids=["computed anew from an input", "read by what does not fuse"])
def test_masks_that_are_left_alone(fn: Callable[..., Any]) -> None:
    gm = graph(fn)
    before = text(gm)
    assert save_masks_as_bytes(gm, BF16).changes == ()
    assert text(gm) == before


def test_forward_graphs_are_left_alone() -> None:
    assert save_masks_as_bytes(trace(clipped, X, W), BF16).changes == ()


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_no_mask_is_kept_as_booleans(compiler: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4), nn.Hardtanh(), nn.Dropout(0.5))
    compiled = torch.compile(model, backend="mixprec", options={"compiler": compiler, "dtype": "bf16"})
    result = compiled(torch.randn(6, 8))
    saved = {tensor.dtype for tensor in result.grad_fn.saved_tensors}
    assert torch.uint8 in saved
    assert torch.bool not in saved
