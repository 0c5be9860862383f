"""Reading nodes: provenance, values, paths and names."""

import operator
from pathlib import Path

import pytest
import torch
from torch import nn

from mpcompile.passes.graph import (
    arguments,
    describe,
    dtype_of,
    is_backward,
    is_cast,
    is_getitem,
    is_joint,
    is_partial_view,
    is_tuple_view,
    is_view,
    module_path,
    normalise_path,
    op_name,
    packet_name,
    parameter_name,
    source_line,
    source_of_widening,
    subgraphs,
    tensor,
    user_op_name,
)
from tests.helpers import call, calls, exported, joint, trace

aten = torch.ops.aten
A = torch.randn(4, 6)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self']._modules['layers'][0].norm", "layers.0.norm"),
        ("L['self']._modules['layers']._modules['0']", "layers.0"),
        ("L['self']._modules['layers']._modules['0']._parameters['weight']", "layers.0.weight"),
        ("L['self']._parameters['scale']", "scale"),
        ("L['fn']._modules['0']._parameters['weight']", "0.weight"),
        ("L['self'].layers.0.norm", "layers.0.norm"),
        ("L__self___layers.0", "layers.0"),
        ("G['model'].head", "head"),
        ("self.head", "head"),
        ("layers.0", "layers.0"),
        ("L['self']", ""),
        ("", ""),
    ],
)
def test_paths_are_spelled_as_the_user_spells_them(path: str, name: str) -> None:
    assert normalise_path(path) == name


class Model(nn.Module):
    """Parameters of every kind: of modules, of lists, own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6))])
        self.scale = nn.Parameter(torch.ones(6))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(6))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale * self.scales[0]


def test_joint_graph_names_parameters_and_modules() -> None:
    model = Model()
    gm = joint(model, A.clone().requires_grad_())
    found = {parameter_name(node) for node in gm.graph.find_nodes(op="placeholder")}
    assert found == {name for name, _ in model.named_parameters()} | {""}
    assert {module_path(node) for node in calls(gm)} == {"", "layers.0", "layers.1.0"}
    backward = {module_path(node) for node in calls(gm, "mm") if is_backward(node)}
    assert backward == {"layers.0", "layers.1.0"}


def test_exported_graph_names_parameters_and_modules() -> None:
    model = Model()
    gm = exported(model, A)
    assert {module_path(node) for node in calls(gm, "addmm")} == {"layers.0", "layers.1.0"}


def test_joint_graph_tells_forward_from_backward() -> None:
    gm = joint(lambda x: x.sin(), A.clone().requires_grad_())
    assert is_joint(gm.graph)
    assert {node.name: is_backward(node) for node in calls(gm)} == {"sin": False, "cos": True, "mul": True}
    assert not is_joint(trace(torch.sin, A).graph)


@pytest.mark.parametrize(
    ("fn", "op", "kinds"),
    [
        (lambda x: x.t(), "t", (True, False, False, False)),
        (lambda x: x.view(24), "view", (True, False, False, False)),
        (lambda x: x[1:], "slice", (False, True, False, False)),
        (lambda x: x.clone(), "clone", (False, True, False, False)),
        (lambda x: x.split(2), "split", (False, False, True, False)),
        (lambda x: x.double(), "_to_copy", (False, False, False, True)),
        (lambda x: x.sin(), "sin", (False, False, False, False)),
    ],
)
def test_kinds_of_nodes(fn: object, op: str, kinds: tuple[bool, ...]) -> None:
    node = call(trace(fn, A), op)
    assert (is_view(node), is_partial_view(node), is_tuple_view(node), is_cast(node)) == kinds


def test_pieces_of_a_split_are_partial_views_and_other_results_are_not() -> None:
    pieces = calls(trace(lambda x: x.split(2), A), "getitem")
    assert [(is_getitem(node), is_partial_view(node)) for node in pieces] == [(True, True)] * 2
    results = calls(trace(lambda x: x.topk(2), A), "getitem")
    assert [(is_getitem(node), is_partial_view(node)) for node in results] == [(True, False)] * 2


def test_conversion_to_another_device_or_layout_is_no_cast() -> None:
    gm = trace(lambda x: aten._to_copy(x, dtype=torch.float16, memory_format=torch.contiguous_format), A)
    assert not is_cast(call(gm, "_to_copy"))


@pytest.mark.parametrize(
    ("source", "target", "widens"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float16, torch.float32, True),
        (torch.float32, torch.float64, False),
        (torch.float32, torch.bfloat16, False),
        (torch.bfloat16, torch.float64, False),
        (torch.int32, torch.float32, False),
    ],
)
def test_source_of_widening(source: torch.dtype, target: torch.dtype, widens: bool) -> None:
    gm = trace(lambda x: x.to(target), A.to(source))
    node = call(gm, "_to_copy")
    assert source_of_widening(node) is (node.args[0] if widens else None)


def test_names_of_operators() -> None:
    gm = trace(lambda x: x.split(2)[0], A)
    split, item = call(gm, "split"), calls(gm, "getitem")[0]
    assert (op_name(split), op_name(item), op_name(split.args[0])) == ("aten.split.Tensor", "getitem", "placeholder")
    assert packet_name(aten.mm.default) == "mm"
    assert packet_name(torch.ops.prims.convert_element_type.default) == "convert_element_type"
    assert packet_name(torch.ops.quantized.add.default) == "quantized::add"
    assert packet_name(operator.getitem) == "getitem"
    softmax = calls(joint(lambda x: x.softmax(-1), A.clone().requires_grad_()), "exp")[0]
    assert user_op_name(softmax) == "aten._softmax.default"
    assert user_op_name(split) == "aten.split.Tensor"


def test_descriptions_name_the_source_line() -> None:
    node = calls(joint(Model(), A), "addmm")[0]
    file, line = source_line(node).rsplit(":", 1)
    assert file == __file__
    assert Path(file).read_text().splitlines()[int(line) - 1].strip() == "x = layer(x)"
    assert describe(node) == f"addmm (aten.addmm.default, layers.0, {file}:{line})"
    assert source_line(next(iter(node.graph.nodes))) == ""


def test_values_of_nodes() -> None:
    gm = trace(lambda x: x.split(2), A)
    split = call(gm, "split")
    assert tensor(split) is None
    assert dtype_of(split) is None
    assert tensor(3) is None
    assert dtype_of(calls(gm, "getitem")[0]) is torch.float32


def test_arguments_are_named() -> None:
    gm = trace(lambda x: torch.addmm(x[0], x, x.t(), beta=2)[:, :4], A[:, :4])
    assert [name for name, _ in arguments(call(gm, "addmm"))] == ["self", "mat1", "mat2", "beta"]
    item = calls(trace(lambda x: x.split(2), A), "getitem")[1]
    assert [(name, value) for name, value in arguments(item)][1] == ("1", 1)


def test_subgraphs_are_found() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    gm = trace(branch, A)
    found = {name: [packet_name(n.target) for n in calls(child)] for name, child in subgraphs(gm)}
    assert sorted(found.values()) == [["cos"], ["sin"]]
    assert list(subgraphs(trace(torch.sin, A))) == []
