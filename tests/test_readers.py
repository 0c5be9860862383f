"""readers: through which operations a value is followed, and which of them must see it unrounded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from mpcompile.passes import Policy, insert_casts
from mpcompile.passes.graph import is_backward
from mpcompile.passes.readers import (
    accumulates,
    feeds_convolution,
    is_computed,
    is_later,
    is_moved,
    keeps_signs,
    low_form,
    origin,
    reads_sign,
    reads_unrounded,
)
from tests.helpers import call, calls, joint, trace

A, W = torch.randn(4, 4), torch.randn(4, 4)

MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda y: y,
    "through a view": lambda y: y.view(2, 8),
    "through a transposition": lambda y: y.t(),
    "through a slice": lambda y: y[:2],
    "through a copy": lambda y: y.t().contiguous(),
    "through a split": lambda y: y.split(2)[1],
    "through a split of a view": lambda y: y.view(8, 2).split(4)[0],
    "through unbind": lambda y: y.unbind()[1],
}
UNROUNDED: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda y: y.sum(),
    "softmax": lambda y: y.softmax(-1),
    "comparison": lambda y: y > 0.5,
    "ranking": lambda y: y.argmax(-1),
    "the user's cast": lambda y: y.double(),
    "output": lambda y: y,
}
ROUNDED: dict[str, Callable[[Tensor], Any]] = {
    "function": lambda y: y.sin(),
    "product": lambda y: y * 2,
    "steep function": lambda y: y.exp(),
    "sum of two": lambda y: y + y.detach(),
}


def producer(fn: Callable[[Tensor], Any]) -> fx.Node:
    """The tanh that ``fn`` reads."""
    return call(trace(lambda x: fn(x.tanh()), A), "tanh")


def any_unrounded(node: fx.Node, kept: set[fx.Node] | None = None) -> bool:
    return any(reads_unrounded(user, kept or set()) for user in node.users)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("reader", UNROUNDED)
def test_must_see_what_was_not_rounded(reader: str, move: str) -> None:
    assert any_unrounded(producer(lambda y: UNROUNDED[reader](MOVES[move](y))))


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("reader", ROUNDED)
def test_may_see_the_low_form(reader: str, move: str) -> None:
    node = producer(lambda y: ROUNDED[reader](MOVES[move](y)))
    assert not any_unrounded(node)
    assert any_unrounded(node, set(calls(node.graph.owning_module)))  # where the plan keeps them in fp32


SIGNS: dict[str, Callable[[Tensor], Any]] = {
    "positive": lambda y: y > 0,
    "not positive": lambda y: y <= 0.0,
    "zero": lambda y: y == 0,
    "sign": lambda y: y.sign(),
    "sign bit": lambda y: y.signbit(),
}
MORE_THAN_SIGNS: dict[str, Callable[[Tensor], Any]] = {
    "comparison with a number": lambda y: y > 0.5,
    "comparison with a value": lambda y: y > y.detach().flip(0),
    "function": lambda y: y.sin(),
    "output": lambda y: y,
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("reader", SIGNS)
def test_comparisons_with_zero_learn_nothing_but_a_sign(reader: str, move: str) -> None:
    assert all(map(reads_sign, producer(lambda y: SIGNS[reader](MOVES[move](y))).users))


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("reader", MORE_THAN_SIGNS)
def test_what_learns_more_than_a_sign(reader: str, move: str) -> None:
    assert not all(map(reads_sign, producer(lambda y: MORE_THAN_SIGNS[reader](MOVES[move](y))).users))


def test_one_reader_of_a_view_that_learns_more_is_enough() -> None:
    node = producer(lambda y: ((moved := y.view(2, 8)) > 0, moved.sin()))
    assert not any(map(reads_sign, node.users))


def test_signs_survive_where_the_exponents_are_those_of_fp32() -> None:
    smallest = torch.finfo(torch.float32).smallest_normal
    for low in (torch.bfloat16, torch.float16):
        assert keeps_signs(low) == bool(torch.tensor(smallest).to(low) > 0)


@pytest.mark.parametrize("move", MOVES)
def test_a_value_is_followed_to_what_computed_it(move: str) -> None:
    node = producer(lambda y: MOVES[move](y).sin())
    sin = call(node.graph.owning_module, "sin")
    assert origin(sin.args[0]) is node
    assert origin(sin) is sin
    assert not is_moved(sin)


def test_products_read_no_operands_in_fp32() -> None:
    q, mask = torch.randn(1, 1, 4, 8), torch.randn(4, 4)
    gm = trace(lambda q, m: F.scaled_dot_product_attention(q, q, q, m.tanh()), q, mask)
    assert any_unrounded(call(gm, "tanh"))


def test_outputs_and_casts_do_not_compute() -> None:
    gm = trace(lambda x: (x.tanh().sin(), x.tanh().view(16), x.tanh().double(), x.tanh().view(16).sin()), A)
    found = [all(map(is_computed, node.users)) for node in calls(gm, "tanh")]
    assert found == [True, False, False, True]


@pytest.mark.parametrize("move", MOVES)
def test_sums_of_two_values_of_one_shape_accumulate(move: str) -> None:
    node = producer(lambda y: (z := MOVES[move](y)) + z.sin())
    assert any(map(accumulates, node.users))
    assert not any(map(accumulates, producer(lambda y: MOVES[move](y) + 1).users))
    assert not any(map(accumulates, producer(lambda y: MOVES[move](y) + MOVES[move](y).sum()).users))


def test_the_low_form_is_the_cast_of_a_pass() -> None:
    gm = trace(lambda x, w: ((y := x.tanh()) @ w, y.bfloat16(), x.sin().bfloat16()), A, W)
    assert low_form(call(gm, "tanh")) is None
    insert_casts(gm, Policy())
    low = low_form(call(gm, "tanh"))
    assert low is not None
    assert low.meta["val"].dtype is torch.bfloat16
    assert low_form(call(gm, "sin")) is None
    assert not feeds_convolution(low)


def test_what_feeds_a_convolution() -> None:
    image, kernel = torch.randn(1, 2, 4, 4), torch.randn(2, 2, 1, 1)
    gm = trace(lambda x, k: F.conv2d(x.tanh().view(1, 2, 4, 4), k), image, kernel)
    insert_casts(gm, Policy())
    assert feeds_convolution(low_form(call(gm, "tanh")))
    assert not feeds_convolution(None)


def test_readers_of_backward() -> None:
    torch._dynamo.reset()
    gm = joint(lambda x: (x.tanh().sin() * 3).view(16), A.clone().requires_grad_())
    tanh = call(gm, "tanh")
    later = {user.name: is_later(user) for user in tanh.users}
    assert later["sin"] is False
    assert all(later[user.name] for user in tanh.users if is_backward(user))
    assert True in later.values()
