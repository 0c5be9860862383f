"""Which parameters matmul-like calls read, told from the graph before autograd."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from mpcompile.passes import Policy
from mpcompile.passes.intent import Scope, read_intent
from mpcompile.passes.matmul_weights import matmul_weights, single_row_weights
from mpcompile.torch_compat import parameters_of


def read_by(call: Callable[[Tensor, nn.Parameter], Any], weight: Tensor, policy: Policy | None = None) -> bool:
    """Whether the weight is among what matmuls read in the graph of ``call``."""
    found: list[bool] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        names = parameters_of(gm, {})
        read_intent(gm, policy or Policy(), Scope(), names)
        found.append(any(names.get(node.name) == "weight" for node in matmul_weights(gm)))
        return gm.forward

    parameter = nn.Parameter(weight)
    torch.compile(lambda x, weight: call(x, weight), backend=backend)(torch.randn(4, 4), parameter)
    return any(found)


def in_fp32(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return x @ w


READ: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "matmul": lambda x, w: x @ w,
    "reversed": lambda x, w: w @ x,
    "linear": lambda x, w: F.linear(x, w),
    "addmm": lambda x, w: torch.addmm(x, x, w),
    "einsum": lambda x, w: torch.einsum("ij,jk", x, w),
    "transposed": lambda x, w: x @ w.t(),
    "attribute": lambda x, w: x @ w.T,
    "viewed": lambda x, w: x @ w.view(2, 8).reshape(4, 4),
    "a piece": lambda x, w: x[:, :2] @ w.chunk(2)[0],
    "a slice": lambda x, w: x[:, :2] @ w[:2],
    "conv1d": lambda x, w: F.conv1d(x[None], w[:, :, None]),
    "checkpoint": lambda x, w: checkpoint(lambda x, w: x @ w.t(), x, w, use_reentrant=False),
    "looked up as well": lambda x, w: F.embedding(torch.arange(4), w) @ w,
}


@pytest.mark.parametrize("case", READ)
def test_matrix_operands_are_read(case: str) -> None:
    assert read_by(READ[case], torch.randn(4, 4))


NOT_READ: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "scaled by": lambda x, w: x * w,
    "a norm": lambda x, w: F.layer_norm(x, (4, 4), w),
    "looked up": lambda x, w: F.embedding(torch.arange(4), w),
    "a bias": lambda x, w: F.linear(x, x, w[0]),
    "a bias by name": lambda x, w: torch.addmm(w, x, x),
    "computed": lambda x, w: x @ (w * 2),
    "asked for in fp32": lambda x, w: x.float() @ w.float(),
    "an island": in_fp32,
}


@pytest.mark.parametrize("case", NOT_READ)
def test_others_are_not(case: str) -> None:
    assert not read_by(NOT_READ[case], torch.randn(4, 4))


def test_what_a_rule_keeps_in_fp32_is_not_read() -> None:
    policy = Policy(fp32=("op:linear",))
    assert not read_by(READ["linear"], torch.randn(4, 4), policy)
    assert read_by(READ["matmul"], torch.randn(4, 4), policy)


def read_by_one_row(call: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> bool:
    """Whether products of one row are all that reads the weight, the last of ``inputs``."""
    found: list[bool] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        names = parameters_of(gm, {})
        found.append(any(names.get(node.name) == "weight" for node in single_row_weights(gm)))
        return gm.forward

    *others, weight = inputs
    function = torch.compile(lambda *values, weight: call(*values, weight), backend=backend, dynamic=dynamic)
    function(*others, weight=nn.Parameter(weight))
    return any(found)


def test_products_of_one_row_are_told_from_others() -> None:
    w = torch.randn(4, 4)
    assert read_by_one_row(F.linear, torch.randn(1, 4), w)
    assert read_by_one_row(F.linear, torch.randn(4), w)
    assert read_by_one_row(lambda x, w: F.linear(x, w, x[0, 0]), torch.randn(1, 1, 4), w)
    assert not read_by_one_row(F.linear, torch.randn(2, 4), w)
    assert not read_by_one_row(F.linear, torch.randn(2, 4), w, dynamic=True)
    assert not read_by_one_row(torch.mm, torch.randn(1, 4), w)  # reads across the rows of the matrix


def test_a_weight_that_something_else_reads_is_not_of_one_row() -> None:
    x, w = torch.randn(1, 4), torch.randn(4, 4)
    assert not read_by_one_row(lambda x, y, w: (F.linear(x, w), F.linear(y, w)), x, torch.randn(3, 4), w)
    assert not read_by_one_row(lambda x, w: F.linear(x, w) + w.sum(), x, w)
    assert not read_by_one_row(lambda x, w: F.linear(w, x), x, w)  # the row is the matrix there
