"""store_low: readers of a value that is kept low read its low form, with the stated exceptions."""

from collections.abc import Callable
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional as F

from mpcompile.passes import Policy, fold_casts, insert_casts, run_passes, store_low
from mpcompile.passes.graph import is_backward, is_cast, source_of_widening
from tests.helpers import (
    call,
    calls,
    count_casts,
    inserted_casts,
    joint,
    layouts,
    reasons,
    relative_error,
    stored,
    text,
    trace,
)

BF16, FAST = Policy(), Policy(preset="fast")
A, W = torch.randn(4, 4), torch.randn(4, 4)
X4, K4 = torch.randn(1, 2, 4, 4), torch.randn(2, 2, 1, 1)


def shared(fn: Callable[..., Any], *inputs: torch.Tensor, policy: Policy = BF16) -> fx.GraphModule:
    """The forward graph of a function after all passes."""
    gm = trace(fn, *inputs)
    run_passes(gm, policy)
    return gm


def reads_low_copy(gm: fx.GraphModule, op: str | fx.Node) -> bool:
    """Whether a call, or the only one of ``op``, reads a widened copy of tanh or relu (views of one included)."""
    node = call(gm, op) if isinstance(op, str) else op
    sources = []
    for source in node.all_input_nodes:
        while source.op == "call_function" and source_of_widening(source) is None and len(source.args) > 1:
            source = source.args[0]
        sources.append(source)
    widened = [source_of_widening(source) for source in sources if source in inserted_casts(gm, torch.float32)]
    return any(low.args[0].name in ("tanh", "relu") for low in widened if isinstance(low.args[0], fx.Node))


def later(y: torch.Tensor, w: torch.Tensor, readers: int = 3) -> torch.Tensor:
    """Something computed from ``y`` in as many kernels after that of ``y``, each begun by a product."""
    z = y
    for _ in range(readers):
        z = (z @ w) * y
    return z


def test_a_value_that_enough_kernels_read_is_stored_low() -> None:
    for fn in (lambda x, w: later(x.tanh(), w, 1), lambda x, w: later(x.tanh(), w, 2)):
        gm = shared(fn, A, W)  # no more than the price of a rounding is saved
        assert all("tanh" in {source.name for source in node.all_input_nodes} for node in calls(gm, "mul"))
    gm = shared(lambda x, w: ((y := x.tanh()) * 2, later(y, w)), A, W)
    assert (
        text(gm).splitlines()[2:9]
        == dedent("""\
        _to_copy_default_1: bf16[4, 4] = aten._to_copy.default(w_1, dtype=torch.bfloat16)
        tanh: f32[4, 4] = aten.tanh.default(x_1)
        _to_copy_default: bf16[4, 4] = aten._to_copy.default(tanh, dtype=torch.bfloat16)
        _to_copy_default_7: f32[4, 4] = aten._to_copy.default(_to_copy_default, dtype=torch.float32)
        mul: f32[4, 4] = aten.mul.Tensor(_to_copy_default_7, 2)
        mm: bf16[4, 4] = aten.mm.default(_to_copy_default, _to_copy_default_1)
        _to_copy_default_2: f32[4, 4] = aten._to_copy.default(mm, dtype=torch.float32)""").splitlines()
    )


def test_what_shares_the_kernel_of_a_value_saves_nothing() -> None:
    gm = shared(lambda x, w: ((y := x.tanh()) @ w, y.sin(), y.cos(), y.exp(), y * 2), A, W, policy=FAST)
    assert inserted_casts(gm, torch.float32) == [gm.graph.output_node().args[0][0]]


SHARES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "elementwise": ("cos", lambda y: y.cos()),
    "through a view": ("cos", lambda y: y.view(16).cos()),
    "through a slice": ("cos", lambda y: y[:2].cos()),
    "through a split": ("cos", lambda y: y.split(2)[1].cos()),
    "steep function": ("exp", lambda y: y.exp()),
    "scaled sum": ("add", lambda y: y + 1),
}


@pytest.mark.parametrize("reader", SHARES)
def test_all_readers_of_a_stored_value_share_its_low_form(reader: str) -> None:
    op, fn = SHARES[reader]
    gm = shared(lambda x, w: (fn(y := x.tanh()), later(y, w)), A, W)
    assert reads_low_copy(gm, op)
    assert [node.name for node in call(gm, "tanh").users] == ["_to_copy_default"]


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
    "comparison": ("gt", lambda y: y > 0.5),
    "comparison through a view": ("gt", lambda y: y.t() > 0.5),
    "the user's own cast": ("_to_copy", lambda y: y.double()),
}


@pytest.mark.parametrize("reader", READS_UNROUNDED)
def test_readers_that_keep_the_unrounded_value(reader: str) -> None:
    op, fn = READS_UNROUNDED[reader]
    gm = trace(lambda x, w: (later(y := x.tanh(), w), fn(y)), A, W)
    node = calls(gm, op)[-1]
    run_passes(gm, FAST)
    source = node.args[0]
    while source.name != "tanh":
        assert not is_cast(source)
        source = source.args[0]
    products = [node for node in calls(gm, "mul") if node in call(gm, "tanh").users]
    assert products == []  # the others read the low form


RESIDUALS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda y: y + y.sin(),
    "through a view": lambda y: y.view(16) + torch.ones(16),
    "through a slice": lambda y: y[:2] + torch.ones(2, 4),
}


@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_residual_stream_is_stored_low_only_under_fast(residual: str) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        return later(y := x.tanh(), w), RESIDUALS[residual](y)

    gm = shared(fn, A, W)
    assert [node.name for node in calls(gm, "mul") if node in call(gm, "tanh").users] == ["mul", "mul_1", "mul_2"]
    assert not reads_low_copy(gm, "add")
    fast = shared(fn, A, W, policy=FAST)
    assert [node for node in calls(fast, "mul") if node in call(fast, "tanh").users] == []
    assert reads_low_copy(fast, "add")


def test_what_may_be_beyond_the_range_of_the_low_type_keeps_fp32() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, least: float) -> Any:
        return later(y := x.tanh().masked_fill(x > 0, least), w), y.cos()

    kept = shared(lambda x, w: fn(x, w, torch.finfo(torch.float32).min), A, W, policy=FAST)  # infinite in bf16
    assert [is_cast(source) for source in call(kept, "cos").all_input_nodes] == [False]
    stored = shared(lambda x, w: fn(x, w, -1e9), A, W, policy=FAST)
    assert [is_cast(source) for source in call(stored, "cos").all_input_nodes] == [True]


@torch.library.custom_op("tests_storage::seen", mutates_args=())
def seen(x: torch.Tensor) -> torch.Tensor:
    """An operator that no table knows."""
    return x.clone()


@seen.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_unknown_operator_reads_what_it_was_traced_with() -> None:
    gm = shared(lambda x, w: (later(y := x.tanh(), w), seen(y)), A, W, policy=FAST)
    (reader,) = [node for node in calls(gm) if "seen" in str(node.target)]
    assert [source.name for source in reader.all_input_nodes] == ["tanh"]


def test_outputs_keep_the_unrounded_value() -> None:
    gm = shared(lambda x, w: (later(y := x.tanh(), w), y, y.view(16)), A, W, policy=FAST)
    assert reads_low_copy(gm, calls(gm, "mul")[0])
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
    assert not store_low(gm, BF16).changed
    assert call(gm, "sin").args[0].name == "_to_copy"


def test_graph_without_low_copies_is_left_alone() -> None:
    gm = trace(lambda x: x.relu().sin(), A)
    before = text(gm)
    assert not store_low(gm, BF16).changed
    assert text(gm) == before


def test_the_users_own_low_copy_is_left_alone() -> None:
    gm = trace(lambda x: ((y := x.relu()).bfloat16(), y.sin()), A)
    before = text(gm)
    assert not store_low(gm, BF16).changed
    assert text(gm) == before


def test_again_changes_nothing() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = x.tanh()
        moved = y.view(16).cos(), y.bfloat16(), y.view(16).bfloat16().sin(), y.split(2)[0].exp()
        return later(y, w), y.sin(), *moved

    gm = trace(fn, A, W)
    assert stored(gm, BF16).changed
    once = text(gm)
    assert reasons(run_passes(gm, BF16)) == []
    assert text(gm) == once


def test_outputs_keep_dtype_shape_and_strides() -> None:
    gm = trace(lambda x, w: (later(y := x.t().tanh(), w), y.sin(), y[:, 1:].cos()), A, W)
    before = layouts(gm)
    assert stored(gm, BF16).changed
    assert layouts(gm) == before


def test_result_says_what_happened() -> None:
    gm = trace(lambda x, w: (later(y := x.tanh(), w), y.cos()), A, W)
    insert_casts(gm, BF16)
    fold_casts(gm, BF16)
    result = store_low(gm, BF16)
    assert result.name == "store_low"
    ((node, op, before, after, reason),) = [(c.node, c.op, c.before, c.after, c.reason) for c in result.changes]
    assert (op, before, after) == ("aten._to_copy.default", "float32", "bfloat16")
    assert node in {cast.name for cast in inserted_casts(gm, torch.float32)}
    assert reason == "tanh is stored low: 4 more readers read that form"


@pytest.mark.parametrize(("low", "unit"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_shared_value_is_rounded_once(low: torch.dtype, unit: float) -> None:
    gm = shared(lambda x, w: (later(y := x.tanh(), w), y.neg()), A, W, policy=Policy(dtype=low))
    found, truth = gm(A, W)[1], -A.double().tanh()
    assert ((found - truth).abs() <= unit * truth.abs() + 1e-6).all()
    assert torch.equal(found, -A.tanh().to(low).float())


def test_gradients_through_a_stored_value_are_within_its_roundings() -> None:
    inputs = [v.clone().requires_grad_() for v in (A, W)]

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return later(x.tanh(), w)

    gm = joint(fn, *inputs)
    assert "tanh is stored low: 7 more readers read that form" in reasons(stored(gm, BF16))
    g = torch.randn(4, 4)
    exact = [v.double().requires_grad_() for v in (A, W)]
    fn(*exact).backward(g.double())
    found = fx.Interpreter(gm).run(A, W, g, enable_io_processing=False)[1:]
    for gradient, leaf in zip(found, exact, strict=True):
        # Forward rounds five times, backward twice for each of three products.
        assert relative_error(gradient, leaf.grad) < 12 * 2.0**-8


def test_a_residual_stream_is_saved_low_where_backward_alone_reads_it_so() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        y = x @ w + x @ v
        return (y * s) @ w + y

    inputs = [A, *(v.clone().requires_grad_() for v in (W, W.flip(0), A[0] + 2))]
    gm = joint(fn, *inputs)
    result = stored(gm, BF16)
    assert reasons(result) == ["add is saved low: 1 more reader reads that form"]
    stream = next(node for node in calls(gm, "add") if not is_backward(node))
    by_itself, low = sorted((user for user in stream.users), key=is_cast)[:2], sorted(stream.users, key=is_cast)[2]
    assert [node.target for node in by_itself] == [torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor]
    (wide,) = low.users
    (reader,) = wide.users
    assert is_backward(reader)


def test_a_shared_value_is_widened_once() -> None:
    inputs = [v.clone().requires_grad_() for v in (A, W)]
    gm = joint(lambda x, w: later(y := x.tanh(), w) * y.sin() * y.cos(), *inputs)
    run_passes(gm, BF16)
    assert set(count_casts(gm).values()) == {1}
