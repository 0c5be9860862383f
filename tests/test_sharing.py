"""share_low_copies: readers of a value that exists low read that copy, with the stated exceptions."""

from collections.abc import Callable
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional as F

from mpcompile.passes import Policy, fold_casts, insert_casts, run_passes, share_low_copies
from mpcompile.passes.graph import source_of_widening
from tests.helpers import call, calls, count_casts, inserted_casts, joint, layouts, reasons, relative_error, text, trace

BF16 = Policy()
A, W = torch.randn(4, 4), torch.randn(4, 4)
X4, K4 = torch.randn(1, 2, 4, 4), torch.randn(2, 2, 1, 1)


def shared(fn: Callable[..., Any], *inputs: torch.Tensor, policy: Policy = BF16) -> fx.GraphModule:
    """The forward graph of a function after all passes."""
    gm = trace(fn, *inputs)
    run_passes(gm, policy)
    return gm


def reads_low_copy(gm: fx.GraphModule, op: str) -> bool:
    """Whether the only call of ``op`` reads a widened low copy (views of one included)."""
    node = call(gm, op)
    sources = []
    for source in node.all_input_nodes:
        while source.op == "call_function" and source_of_widening(source) is None and len(source.args) > 1:
            source = source.args[0]
        sources.append(source)
    return any(source in inserted_casts(gm, torch.float32) for source in sources)


def test_another_reader_reads_the_low_copy() -> None:
    gm = shared(lambda x, w: (x.relu() @ w, x.relu().sin()), A, W)
    assert not reads_low_copy(gm, "sin")
    gm = shared(lambda x, w: ((y := x.relu()) @ w, y.sin()), A, W)
    assert text(gm) == dedent("""\
        x_1: f32[4, 4] = input
        w_1: f32[4, 4] = input
        _to_copy_default_1: bf16[4, 4] = aten._to_copy.default(w_1, dtype=torch.bfloat16)
        relu: f32[4, 4] = aten.relu.default(x_1)
        _to_copy_default: bf16[4, 4] = aten._to_copy.default(relu, dtype=torch.bfloat16)
        _to_copy_default_3: f32[4, 4] = aten._to_copy.default(_to_copy_default, dtype=torch.float32)
        mm: bf16[4, 4] = aten.mm.default(_to_copy_default, _to_copy_default_1)
        _to_copy_default_2: f32[4, 4] = aten._to_copy.default(mm, dtype=torch.float32)
        sin: f32[4, 4] = aten.sin.default(_to_copy_default_3)
        return (_to_copy_default_2, sin)""")


SHARES: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "elementwise": ("cos", lambda y: y.cos()),
    "through a view": ("cos", lambda y: y.view(16).cos()),
    "through a slice": ("cos", lambda y: y[:2].cos()),
    "through a split": ("cos", lambda y: y.split(2)[1].cos()),
    "steep function": ("exp", lambda y: y.exp()),
    "scaled sum": ("add", lambda y: y + 1),
    "product": ("mul", lambda y: y * y.detach()),
}


@pytest.mark.parametrize("reader", SHARES)
def test_readers_that_share(reader: str) -> None:
    op, fn = SHARES[reader]
    gm = shared(lambda x, w: ((y := x.tanh()) @ w, fn(y)), A, W)
    assert reads_low_copy(gm, op)


READS_UNROUNDED: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "sum": ("sum", lambda y: y.sum(0)),
    "mean": ("mean", lambda y: y.mean()),
    "softmax": ("_softmax", lambda y: y.softmax(-1)),
    "statistics": ("native_layer_norm", lambda y: F.layer_norm(y, (4,))),
    "statistics through a view": ("sum", lambda y: y.view(16).sum()),
    "statistics through a slice": ("sum", lambda y: y[:2].sum()),
    "statistics through a split": ("sum", lambda y: y.split(2)[1].sum()),
    "loss": ("mse_loss", lambda y: F.mse_loss(y, torch.zeros_like(y))),
    "argmax": ("argmax", lambda y: y.argmax(1)),
    "topk": ("topk", lambda y: y.topk(2)),
    "comparison": ("gt", lambda y: y > 0),
    "comparison through a view": ("gt", lambda y: y.t() > 0),
    "residual": ("add", lambda y: y + y.sin()),
    "residual through a view": ("add", lambda y: y.view(16) + torch.ones(16)),
    "the user's own cast": ("_to_copy", lambda y: y.double()),
}


@pytest.mark.parametrize("reader", READS_UNROUNDED)
def test_readers_that_keep_the_unrounded_value(reader: str) -> None:
    op, fn = READS_UNROUNDED[reader]
    gm = trace(lambda x, w: ((y := x.tanh()) @ w, fn(y)), A, W)
    node = calls(gm, op)[-1]
    kept = [source.name for source in node.all_input_nodes]
    run_passes(gm, BF16)
    assert [source.name for source in node.all_input_nodes] == kept


def test_outputs_keep_the_unrounded_value() -> None:
    gm = shared(lambda x, w: ((y := x.tanh()) @ w, y, y.view(16)), A, W)
    assert torch.equal(gm(A, W)[1], A.tanh())
    assert torch.equal(gm(A, W)[2], A.tanh().view(16))


def test_residual_shares_where_a_convolution_reads() -> None:
    gm = shared(lambda x, k: (y := x.relu()) + F.conv2d(y, k), X4, K4)
    assert reads_low_copy(gm, "add")
    assert "relu" not in {source.name for source in call(gm, "add").all_input_nodes}
    statistics = shared(lambda x, k: ((y := x.relu()).mean(), F.conv2d(y, k)), X4, K4)
    assert not reads_low_copy(statistics, "mean")


def test_inputs_and_parameters_are_not_shared() -> None:
    gm = shared(lambda x, w: (x @ w, x.sin(), w.cos()), A, W)
    assert not reads_low_copy(gm, "sin")
    assert not reads_low_copy(gm, "cos")


def test_values_that_came_from_a_widening_are_not_shared_again() -> None:
    gm = trace(lambda x, w: ((y := x.float()) @ w, y.sin()), A.half(), W)
    insert_casts(gm, BF16)
    assert not share_low_copies(gm, BF16).changed
    assert call(gm, "sin").args[0].name == "_to_copy"


def test_graph_without_low_copies_is_left_alone() -> None:
    gm = trace(lambda x: x.relu().sin(), A)
    before = text(gm)
    assert not share_low_copies(gm, BF16).changed
    assert text(gm) == before


def test_the_users_own_low_copy_is_left_alone() -> None:
    gm = trace(lambda x: ((y := x.relu()).bfloat16(), y.sin()), A)
    before = text(gm)
    assert not share_low_copies(gm, BF16).changed
    assert text(gm) == before


def test_again_changes_nothing() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = x.tanh()
        return y @ w, y.sin(), y.view(16).cos(), y.bfloat16(), y.view(16).bfloat16().sin(), y.split(2)[0].exp()

    gm = trace(fn, A, W)
    assert len(reasons(run_passes(gm, BF16))) > 3
    once = text(gm)
    assert reasons(run_passes(gm, BF16)) == []
    assert text(gm) == once


def test_outputs_keep_dtype_shape_and_strides() -> None:
    gm = trace(lambda x, w: ((y := x.t().relu()) @ w, y.sin(), y[:, 1:].cos()), A, W)
    before = layouts(gm)
    run_passes(gm, BF16)
    assert layouts(gm) == before


def test_result_says_what_happened() -> None:
    gm = trace(lambda x, w: ((y := x.relu()) @ w, y.sin(), y.cos()), A, W)
    insert_casts(gm, BF16)
    fold_casts(gm, BF16)
    result = share_low_copies(gm, BF16)
    assert result.name == "share_low_copies"
    ((node, op, before, after, reason),) = [(c.node, c.op, c.before, c.after, c.reason) for c in result.changes]
    assert (op, before, after) == ("aten._to_copy.default", "float32", "bfloat16")
    assert node in {cast.name for cast in inserted_casts(gm, torch.float32)}
    assert reason == "2 more readers of relu read its low copy"


@pytest.mark.parametrize(("low", "unit"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_shared_value_is_rounded_once(low: torch.dtype, unit: float) -> None:
    gm = shared(lambda x, w: ((y := x.tanh()) @ w, y.neg()), A, W, policy=Policy(dtype=low))
    found, truth = gm(A, W)[1], -A.double().tanh()
    assert ((found - truth).abs() <= unit * truth.abs() + 1e-6).all()
    assert torch.equal(found, -A.tanh().to(low).float())


def test_gradients_through_a_shared_value_are_within_its_roundings() -> None:
    inputs = [v.clone().requires_grad_() for v in (A, W)]

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.tanh()
        return (y @ w) * y.sin()

    gm = joint(fn, *inputs)
    run_passes(gm, BF16)
    g = torch.randn(4, 4)
    exact = [v.double().requires_grad_() for v in (A, W)]
    fn(*exact).backward(g.double())
    found = fx.Interpreter(gm).run(A, W, g, enable_io_processing=False)[1:]
    for gradient, leaf in zip(found, exact, strict=True):
        # At most six roundings to 8 bits lie on any path from an input to a gradient.
        assert relative_error(gradient, leaf.grad) < 6 * 2.0**-8


def test_a_shared_value_is_widened_once() -> None:
    inputs = [v.clone().requires_grad_() for v in (A, W)]
    gm = joint(lambda x, w: (y := x.tanh()) @ w * y.sin() * y.cos(), *inputs)
    run_passes(gm, BF16)
    assert set(count_casts(gm).values()) == {1}
