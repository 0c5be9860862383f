"""GraphInputs: what was seen of the inputs is written onto the right nodes of autograd's graph."""

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

from mpcompile.graph_inputs import GraphInputs
from mpcompile.passes.graph import PARAMETER, parameter_name
from mpcompile.passes.range_guard import BEYOND_RANGE
from mpcompile.passes.scaling import SCALING, ScalingSite
from mpcompile.passes.wide_gradients import WIDE_GRADIENTS
from tests.helpers import joint

BF16, FP16 = torch.bfloat16, torch.float16


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
    empty: dict[str, Any] = dict.fromkeys(("weights", "beyond_range", "wide_gradients"), frozenset())
    return GraphInputs(**{"parameters": {}, **empty, **facts}, slots=slots, count=count)


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
