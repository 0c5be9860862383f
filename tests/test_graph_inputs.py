"""GraphInputs: what is seen of the inputs of Dynamo's graph, and told apart by the cache key."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpcompile.graph_inputs import GraphInputs

BF16, FP16 = torch.bfloat16, torch.float16
INF, NAN = float("inf"), float("nan")


def look_at(
    inputs: Mapping[str, Any], low: torch.dtype = FP16, scaled: bool = True, names: Mapping[str, str] | None = None
) -> GraphInputs:
    """What is seen of a graph with these inputs, by placeholder name; ``names``: the parameters among them."""
    graph = fx.Graph()
    for name in inputs:
        graph.placeholder(name)
    graph.output(())
    gm = fx.GraphModule(nn.Module(), graph)
    return GraphInputs.of(gm, list(inputs.values()), names or {}, low, scaled)


def parameter(*values: float, dtype: torch.dtype = torch.float32, trained: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values or (1.0, 2.0)).to(dtype), requires_grad=trained)


def is_beyond(value: Any, low: torch.dtype = FP16) -> bool:
    return look_at({"w": value}, low, names={"w": "weight"}).beyond_range == {0}


def test_parameters_are_known_by_position_and_name() -> None:
    seen = look_at({"x": torch.ones(2), "w": parameter(), "b": parameter()}, names={"w": "fc.weight", "b": "fc.bias"})
    assert seen.parameters == {1: "fc.weight", 2: "fc.bias"}
    assert seen.count == 3


def test_slots_are_the_differentiable_inputs_in_order_of_position() -> None:
    frozen = parameter(trained=False)
    inputs = {"h": torch.ones(2, requires_grad=True), "n": 3, "w": parameter(), "x": torch.ones(2), "f": frozen}
    seen = look_at({**inputs, "v": parameter()}, names={"w": "fc.weight", "v": "fc.other", "f": "fc.frozen"})
    # A parameter has its name in the model, an activation its name in the graph.
    assert list(seen.slots.items()) == [(0, "h"), (2, "fc.weight"), (5, "fc.other")]


def test_nothing_has_a_slot_where_nothing_is_scaled() -> None:
    assert look_at({"w": parameter()}, scaled=False).slots == {}


RANGES = [
    ((65504.0, -65504.0), False),
    ((1.0, 65505.0), True),
    ((1.0, -65505.0), True),
    ((1e-30, 0.0), False),
    ((INF, 1.0), False),
    ((INF, -1e6), True),
    ((NAN, 1.0), False),
]


@pytest.mark.parametrize(("values", "expected"), RANGES, ids=str)
def test_a_parameter_is_beyond_range_by_its_finite_values(values: tuple[float, float], expected: bool) -> None:
    assert is_beyond(parameter(*values)) is expected


def test_the_range_of_bfloat16_holds_every_parameter() -> None:
    assert not is_beyond(parameter(1e30), BF16)


def test_only_parameters_are_looked_at_for_their_range() -> None:
    assert look_at({"x": torch.tensor([1e6])}).beyond_range == set()


def test_a_parameter_without_values_is_within_range() -> None:
    assert not is_beyond(nn.Parameter(torch.ones(0)))
    with FakeTensorMode() as mode:
        assert not is_beyond(mode.from_tensor(parameter(1e6)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.uint16, torch.int64, torch.float8_e4m3fn])
def test_parameters_of_other_types_are_within_range(dtype: torch.dtype) -> None:
    assert not is_beyond(parameter(1.0, 0.0, dtype=dtype, trained=False))


def accumulated_in_float32(dtype: torch.dtype) -> nn.Parameter:
    made = parameter(dtype=dtype)
    made.grad_dtype = torch.float32
    return made


WIDE: dict[str, tuple[Any, bool]] = {
    "bf16": (parameter(dtype=BF16), True),
    "fp16": (parameter(dtype=FP16), True),
    "bf16 with fp32 gradients": (accumulated_in_float32(BF16), True),
    "fp32": (parameter(), False),
    "frozen": (parameter(dtype=BF16, trained=False), False),
    "an activation": (parameter(dtype=BF16) * 2, False),
    "a number": (3, False),
}


@pytest.mark.parametrize("case", WIDE)
def test_the_gradients_of_16_bit_leaves_are_wide(case: str) -> None:
    value, expected = WIDE[case]
    assert look_at({"x": torch.ones(2), "w": value}).wide_gradients == ({1} if expected else set())


NAMES = {"w": "fc.weight"}
ALIKE: dict[str, GraphInputs] = {
    "plain": look_at({"w": parameter(), "x": torch.ones(2)}, names=NAMES),
    "no parameter": look_at({"w": parameter(), "x": torch.ones(2)}),
    "another name": look_at({"w": parameter(), "x": torch.ones(2)}, names={"w": "fc.other"}),
    "another position": look_at({"x": torch.ones(2), "w": parameter()}, names=NAMES),
    "beyond range": look_at({"w": parameter(1e6), "x": torch.ones(2)}, names=NAMES),
    "wide": look_at({"w": parameter(dtype=BF16), "x": torch.ones(2)}, names=NAMES),
    "not scaled": look_at({"w": parameter(), "x": torch.ones(2)}, scaled=False, names=NAMES),
    "one more slot": look_at({"w": parameter(), "x": torch.ones(2, requires_grad=True)}, names=NAMES),
}


def test_everything_that_decides_is_in_the_cache_key() -> None:
    keys = {name: inputs.key() for name, inputs in ALIKE.items()}
    assert [(one, two) for one in keys for two in keys if one < two and keys[one] == keys[two]] == []


def test_the_cache_key_is_the_same_for_the_same_inputs() -> None:
    again = look_at({"w": parameter(3.0, 4.0), "x": torch.ones(5)}, names=NAMES)
    assert again.key() == ALIKE["plain"].key()
