"""exactness: what the low type holds without rounding, and what that takes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from mpcompile.passes.exactness import beyond_range, sources
from tests.helpers import calls, trace

LOW = torch.bfloat16
A, L = torch.randn(4, 4), torch.randn(4, 4).bfloat16()


def last(fn: Callable[..., Any], *inputs: Tensor) -> fx.Node:
    """The operation that makes the result."""
    return calls(trace(fn, *inputs))[-1]


def names(node: fx.Node, low: torch.dtype = LOW) -> list[str] | None:
    found = sources(node, low)
    return None if found is None else [source.name for source in found]


EXACT: dict[str, Callable[[Tensor], Any]] = {
    "relu": lambda y: y.relu(),
    "negative": lambda y: -y,
    "absolute value": lambda y: y.abs(),
    "largest": lambda y: y.amax(0),
    "smallest": lambda y: y.amin(0),
    "larger": lambda y: torch.maximum(y, y.flip(0)),
    "smaller": lambda y: torch.minimum(y, y.t()),
    "selection": lambda y: torch.where(y > 0, y, 0.5),
    "concatenation": lambda y: torch.cat([y, y[:1]]),
    "stack": lambda y: torch.stack([y, y]),
    "indexing": lambda y: y[y.argmax(0)],
    "selected rows": lambda y: y.index_select(0, y.argmax(0)),
    "gather": lambda y: y.gather(0, y.argsort(0)),
    "padding": lambda y: F.pad(y, (1, 1), value=0.25),
    "padding with infinity": lambda y: F.pad(y, (1, 1), value=-float("inf")),
    "order": lambda y: y.flip(0),
    "roll": lambda y: y.roll(1),
    "repetition": lambda y: y.repeat(2, 1),
    "of a view": lambda y: y.view(2, 8).relu(),
    "of a slice": lambda y: y[1:].relu(),
    "of a piece of a split": lambda y: y.split(2)[1].relu(),
    "with zeros": lambda y: torch.cat([y, torch.zeros(1, 4)]),
    "with exact numbers": lambda y: torch.maximum(y, torch.full((4, 4), 0.125)),
}


@pytest.mark.parametrize("kind", EXACT)
def test_a_selection_of_low_values_is_exact(kind: str) -> None:
    assert names(last(lambda low: EXACT[kind](low.float()), L)) in ([], ["flip"])


@pytest.mark.parametrize("kind", EXACT)
def test_and_so_it_is_at_run_time(kind: str) -> None:
    result = EXACT[kind](L.float())
    assert torch.equal(result, result.bfloat16().float())


@pytest.mark.parametrize("kind", EXACT)
def test_a_selection_of_a_wide_value_is_exact_where_that_is_stored_low(kind: str) -> None:
    found = names(last(lambda x: EXACT[kind](x.sin()), A))
    assert found is not None
    assert "sin" in found


ROUNDING: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda y: y.sum(0),
    "product": lambda y: y * 2.0,
    "addition": lambda y: y + y,
    "function": lambda y: y.sin(),
    "square": lambda y: y * y,
    "a number between two low ones": lambda y: F.pad(y, (1, 1), value=0.1),
    "a choice of such a number": lambda y: torch.where(y > 0, y, 0.1),
    "a number beyond the range": lambda y: F.pad(y, (1, 1), value=1e39),
    "a view is no value of its own": lambda y: y.view(16),
}


@pytest.mark.parametrize("kind", ROUNDING)
def test_what_computes_is_not_exact(kind: str) -> None:
    found = names(last(lambda low: ROUNDING[kind](low.float()), L))
    assert found is None or found != []


def test_numbers_are_held_or_not_by_the_type_in_question() -> None:
    fn = lambda low: F.pad(low.float(), (1, 1), value=2049.0)  # noqa: E731
    assert names(last(fn, L)) is None  # 12 bits
    fn = lambda low: F.pad(low.float(), (1, 1), value=1025.0)  # noqa: E731
    assert names(last(fn, L)) is None
    assert names(last(fn, L.half()), torch.float16) == []  # 11 bits
    fn = lambda low: F.pad(low.float(), (1, 1), value=2.0**20)  # noqa: E731
    assert names(last(fn, L)) == []
    assert names(last(fn, L.half()), torch.float16) is None  # beyond the range


def test_what_is_not_a_number_counts_as_held() -> None:
    assert names(last(lambda low: F.pad(low.float(), (1, 1), value=float("nan")), L)) == []


def test_low_values_of_the_other_type_are_not_exact() -> None:
    node = last(lambda low: low.float().relu(), L)
    assert names(node, torch.float16) == ["_to_copy"]


def test_all_wide_operands_have_to_be_stored() -> None:
    node = last(lambda x, low: torch.cat([x.sin(), low.float(), x.cos()[:2], x]), A, L)
    assert names(node) == ["sin", "cos", "x_1"]


def test_masks_and_indices_do_not_count() -> None:
    node = last(lambda x, low: torch.where(x.sin() > 0.3, low.float(), 0.0), A, L)
    assert names(node) == []


LEAST = torch.finfo(torch.float32).min
BEYOND: dict[str, tuple[Callable[[Tensor], Any], bool, bool]] = {
    # whether the result may be beyond the range of bf16, and of fp16
    "fill": (lambda y: y.tanh().masked_fill(y > 0, LEAST), True, True),
    "fill and a sum": (lambda y: y + torch.where(y > 0, LEAST, 0.0), True, True),
    "fill in fp16's range": (lambda y: y.tanh().masked_fill(y > 0, -1e4), False, False),
    "large fill": (lambda y: y.tanh().masked_fill(y > 0, -1e9), False, True),
    "large factor": (lambda y: (y * 1e6).view(2, 8).t(), False, True),
    "infinity": (lambda y: y.masked_fill(y > 0, -float("inf")), False, False),
    "behind a reduction": (lambda y: (y + torch.where(y > 0, LEAST, 0.0)).sum(0), False, False),
    "a slice to the end": (lambda y: y.tanh()[1:], False, False),
}


@pytest.mark.parametrize("case", BEYOND)
def test_constants_beyond_the_range_of_the_low_type(case: str) -> None:
    fn, in_bf16, in_fp16 = BEYOND[case]
    gm = trace(fn, A)
    result = calls(gm)[-1]
    assert (result in beyond_range(gm.graph, torch.bfloat16)) is in_bf16
    assert (result in beyond_range(gm.graph, torch.float16)) is in_fp16


def test_a_mask_that_comes_in_as_an_input_may_be_beyond_range() -> None:
    def fn(x: Tensor, mask: Tensor) -> Any:
        scores = x @ x
        return scores + mask, scores * mask, (scores + mask).softmax(-1).sin(), scores + x

    gm = trace(fn, A, torch.zeros(4))
    found = {node.name for node in beyond_range(gm.graph, torch.bfloat16)}
    assert {"add", "add_1"} <= found
    assert not {"mul", "sin", "add_2"} & found  # a product, behind a softmax, of as many elements
