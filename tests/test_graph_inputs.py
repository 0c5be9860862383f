"""GraphInputs: what is seen of the inputs of Dynamo's graph is written onto the right nodes of autograd's."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    ForwardTokenAOTInput,
    GradAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    SyntheticBaseAOTInput,
    TangentAOTInput,
    ViewBaseAOTInput,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from mpcompile.graph_inputs import GraphInputs
from mpcompile.passes.graph import PARAMETER, parameter_name
from mpcompile.passes.range_guard import BEYOND_RANGE
from mpcompile.passes.scaling import SCALING, ScalingSite
from mpcompile.passes.wide_gradients import WIDE_GRADIENTS
from tests.helpers import joint

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


class Net(nn.Module):
    """Parameters of four shapes, none used in the order it is declared."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.unused = nn.Linear(5, 2), nn.Linear(3, 5), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


@pytest.mark.parametrize("dynamic", [False, True])
def test_inputs_and_gradients_lead_back_to_the_parameters_of_the_model(dynamic: bool) -> None:
    model, x = Net(), torch.randn(4, 3, requires_grad=True)
    gm = joint(model, x, scaled=True, low=FP16, dynamic=dynamic)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    marked = {n.meta[PARAMETER]: n.meta["val"].shape for n in gm.graph.nodes if PARAMETER in n.meta}
    assert marked == {name: shape for name, shape in shapes.items() if "unused" not in name}

    site, outputs = gm.meta[SCALING], gm.graph.output_node().args[0]
    found = {site.names[slot]: outputs[position].meta["val"].shape for position, slot in site.gradients.items()}
    assert {name: shape for name, shape in found.items() if name in shapes} == marked
    assert len(found) == len(site.names) == 5  # the input has one as well


def test_the_scale_the_probe_and_the_tangents_are_found() -> None:
    gm = joint(lambda x, y: (x * 2, y.sum()), *(torch.randn(2, 3, requires_grad=True) for _ in "xy"), scaled=True)
    site, output = gm.meta[SCALING], gm.graph.output_node()
    described = {node.name: node.meta["desc"] for node in gm.graph.find_nodes(op="placeholder")}
    assert described[site.scale] == PlainAOTInput(2)
    assert [described[name] for name in site.tangents] == [TangentAOTInput(PlainAOTOutput(i)) for i in (0, 1)]
    assert output.meta["desc"][site.flags] == GradAOTOutput(PlainAOTInput(3))
    assert output.args[0][site.flags] is None


# By hand: descriptions that autograd writes only for tensor subclasses, views of one base, and side effects.


def described(inputs: Mapping[str, AOTInput], outputs: Sequence[tuple[str, AOTOutput]]) -> fx.GraphModule:
    """A joint graph whose outputs are inputs, or None where no name is given."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node | None] = {"": None}
    for name, description in inputs.items():
        node = nodes[name] = graph.placeholder(name)
        node.meta = {"desc": description, "val": torch.ones(2)}
    output = graph.output([nodes[name] for name, _ in outputs])
    output.meta["desc"] = [description for _, description in outputs]
    return fx.GraphModule(nn.Module(), graph)


def site_of(gm: fx.GraphModule) -> ScalingSite:
    found = gm.meta[SCALING]
    assert isinstance(found, ScalingSite)
    return found


def inputs_of(slots: Mapping[int, str], count: int, **facts: Any) -> GraphInputs:
    empty: dict[str, Any] = {"parameters": {}, "beyond_range": frozenset(), "wide_gradients": frozenset()}
    return GraphInputs(**{**empty, **facts}, slots=slots, count=count)


WHOLE = PlainAOTInput(7)
WRAPPED: dict[str, AOTInput] = {
    "itself": WHOLE,
    "a part": SubclassGetAttrAOTInput(WHOLE, "inner"),
    "a part of a part": SubclassGetAttrAOTInput(SubclassGetAttrAOTInput(WHOLE, "outer"), "inner"),
    "its base": ViewBaseAOTInput(WHOLE),
    "a base made for it": SyntheticBaseAOTInput(WHOLE),
    "a part of its base": SubclassGetAttrAOTInput(ViewBaseAOTInput(WHOLE), "inner"),
}


@pytest.mark.parametrize("case", WRAPPED)
def test_an_input_is_known_through_whatever_autograd_made_of_it(case: str) -> None:
    gm = described({"x": PlainAOTInput(0), "w": WRAPPED[case]}, [("x", PlainAOTOutput(0))])
    inputs_of({}, 8, parameters={7: "fc.weight"}, beyond_range=frozenset({7})).mark(gm)
    x, w = gm.graph.find_nodes(op="placeholder")
    assert (parameter_name(w), BEYOND_RANGE in w.meta) == ("fc.weight", True)
    assert (parameter_name(x), BEYOND_RANGE in x.meta) == ("", False)


GRADIENTS: dict[str, AOTOutput] = {
    "its own": GradAOTOutput(WHOLE),
    "a part": SubclassGetAttrAOTOutput(GradAOTOutput(WHOLE), "inner"),
    "its base's": GradAOTOutput(ViewBaseAOTInput(WHOLE)),
    "a part of its base's": SubclassGetAttrAOTOutput(GradAOTOutput(ViewBaseAOTInput(WHOLE)), "inner"),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_a_gradient_is_known_through_whatever_autograd_made_of_its_input(case: str) -> None:
    gm = described({"w": WHOLE}, [("w", PlainAOTOutput(0)), ("w", GRADIENTS[case])])
    inputs_of({}, 8, wide_gradients=frozenset({7})).mark(gm)
    assert gm.meta[WIDE_GRADIENTS] == (1,)


def test_slots_follow_the_inputs_whatever_the_order_of_the_graph() -> None:
    first, second, scale, probe = map(PlainAOTInput, range(4))
    gm = described(
        {"b": second, "probe": probe, "a": first, "s": scale, "g": TangentAOTInput(PlainAOTOutput(0))},
        [
            ("a", PlainAOTOutput(0)),
            ("b", GradAOTOutput(second)),
            ("", GradAOTOutput(probe)),
            ("a", GradAOTOutput(first)),
            ("", GradAOTOutput(scale)),
        ],
    )
    inputs_of({0: "layer.a", 1: "layer.b"}, 2).mark(gm)
    assert site_of(gm) == ScalingSite(
        scale="s", tangents=("g",), gradients={1: 1, 3: 0}, flags=2, names=("layer.a", "layer.b")
    )


def test_the_parts_of_a_gradient_share_the_slot_of_their_input() -> None:
    first, second, scale, probe = map(PlainAOTInput, range(4))
    parts = [SubclassGetAttrAOTInput(second, name) for name in ("left", "right")]
    gradients = [SubclassGetAttrAOTOutput(GradAOTOutput(second), name) for name in ("left", "right")]
    tangent = TangentAOTInput(PlainAOTOutput(0))
    gm = described(
        {
            **{"x": first, "left": parts[0], "right": parts[1], "s": scale, "probe": probe},
            **{name: SubclassGetAttrAOTInput(tangent, name) for name in ("gl", "gr")},
        },
        [
            ("x", PlainAOTOutput(0)),
            ("", GradAOTOutput(first)),
            ("left", gradients[0]),
            ("right", gradients[1]),
            ("", GradAOTOutput(scale)),
            ("", GradAOTOutput(probe)),
        ],
    )
    inputs_of({0: "x", 1: "w"}, 2).mark(gm)
    assert site_of(gm) == ScalingSite(
        scale="s", tangents=("gl", "gr"), gradients={2: 1, 3: 1}, flags=5, names=("x", "w")
    )


def test_autograd_s_own_inputs_are_not_mistaken_for_the_user_s() -> None:
    gm = described({"token": ForwardTokenAOTInput(0), "w": PlainAOTInput(0)}, [("w", PlainAOTOutput(0))])
    inputs_of({}, 1, parameters={0: "fc.weight"}).mark(gm)
    assert [parameter_name(node) for node in gm.graph.find_nodes(op="placeholder")] == ["", "fc.weight"]


def test_a_graph_without_gradients_is_not_scaled() -> None:
    gm = described({"w": PlainAOTInput(0)}, [("w", PlainAOTOutput(0))])
    inputs_of({0: "w"}, 1).mark(gm)
    assert SCALING not in gm.meta
    assert gm.meta[WIDE_GRADIENTS] == ()


def test_a_graph_without_descriptions_is_left_as_it_is() -> None:
    graph = fx.Graph()
    graph.output([graph.placeholder("w")])
    gm = fx.GraphModule(nn.Module(), graph)
    inputs_of({}, 1, parameters={0: "fc.weight"}, wide_gradients=frozenset({0})).mark(gm)
    assert [node.meta for node in gm.graph.find_nodes(op="placeholder")] == [{}]
    assert gm.meta[WIDE_GRADIENTS] == ()
