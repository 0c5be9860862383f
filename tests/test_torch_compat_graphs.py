"""Private names of torch in the graphs that Dynamo captures: each test fails when torch moves one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import default_partition
from torch._subclasses.fake_tensor import FakeTensor

from mpcompile import torch_compat
from mpcompile.passes.graph import module_path
from mpcompile.torch_compat import parameters_of
from tests.torch_compat_tools import Outer, Seen


def test_fork_keeps_what_autograd_reads() -> None:
    seen = Seen()
    torch.compile(Outer(), backend=seen)(torch.randn(3, 4))
    for gm, copy, (metas, meta) in zip(seen.graphs, seen.forks, seen.metas, strict=True):
        assert str(copy.graph) == str(gm.graph)
        assert copy.meta == meta
        assert copy._param_name_to_source == gm._param_name_to_source  # type: ignore[attr-defined]
        for one, other, kept in zip(gm.graph.nodes, copy.graph.nodes, metas, strict=True):
            assert one is not other
            assert other.meta.keys() == kept.keys()
            assert all(other.meta[key] is kept[key] for key in ("grapharg", "example_value") if key in kept)
            assert getattr(one, "_dynamo_source", None) == getattr(other, "_dynamo_source", None)
    placeholders = [node for gm in seen.forks for node in gm.graph.find_nodes(op="placeholder")]
    assert any(getattr(node, "_dynamo_source", None) for node in placeholders)


def test_edits_of_a_fork_do_not_reach_the_original() -> None:
    seen = Seen()
    torch.compile(nn.Linear(4, 2), backend=seen)(torch.randn(3, 4))
    gm, copy = seen.graphs[0], seen.forks[0]
    before = str(gm.graph)
    for node in copy.graph.nodes:
        node.meta["custom"] = {"mark": 1}
    copy.meta["mark"] = 1
    copy.graph.erase_node(next(iter(copy.graph.find_nodes(op="output"))))
    assert str(gm.graph) == before
    assert "mark" not in gm.meta
    assert not any("custom" in node.meta and "mark" in node.meta["custom"] for node in gm.graph.nodes)


def test_parameters_of_and_name_modules_spell_from_the_root() -> None:
    seen = Seen()
    torch.compile(Outer(), backend=seen)(torch.randn(3, 4))
    names, paths = set(), set()
    for gm, site in zip(seen.forks, seen.sites, strict=True):
        torch_compat.name_modules(gm, site.locals)
        names |= set(parameters_of(gm, site.locals).values())
        paths |= {module_path(node) for node in gm.graph.nodes if node.op == "call_function"}
    assert names == {"inner.layers.0.weight", "inner.layers.0.bias", "inner.scale", "out.weight", "out.bias"}
    assert paths == {"inner.layers.0", "inner", "out"}


def test_parameters_of_a_function_have_their_variables_names() -> None:
    seen, weight = Seen(), nn.Parameter(torch.ones(3))

    def scale(x: Tensor, offset: Tensor) -> Tensor:
        return x * weight + offset

    torch.compile(scale, backend=seen)(torch.randn(3), nn.Parameter(torch.ones(3)))
    assert set(parameters_of(seen.forks[0], {}).values()) == {"weight", "offset"}


class Adds:
    """A backend that gives the graph one input more and compiles it by AOTAutograd."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.graphs: list[fx.GraphModule] = []
        self.joints: list[fx.GraphModule] = []
        self.example: Tensor | None = None

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graph = torch_compat.fork(gm)
        self.example = torch_compat.add_input(graph, "added", self.value)
        self.graphs += [gm, graph]

        def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            self.joints.append(joint)
            return default_partition(joint, joint_inputs, **kwargs)

        def run(graph: fx.GraphModule, _: Any) -> Any:
            return make_boxed_func(graph.forward)

        compiled = aot_autograd(fw_compiler=run, partition_fn=partition)(graph, [*inputs, self.example])
        return lambda *args: compiled(*args, self.value)


@pytest.mark.parametrize("dynamic", [False, True])
def test_add_input(dynamic: bool) -> None:
    adds, layer = Adds(torch.zeros(3, requires_grad=True)), nn.Linear(4, 2)
    x = torch.randn(5, 4, requires_grad=True)
    compiled = torch.compile(layer, backend=adds, dynamic=dynamic)
    y = compiled(x)
    y.sum().backward()
    # AOTAutograd took the input: the joint graph has it, last of the primals, at its size and unread.
    gm, graph = adds.graphs
    count = len(gm.graph.find_nodes(op="placeholder"))
    placeholders = graph.graph.find_nodes(op="placeholder")
    assert [node.name for node in placeholders][count:] == ["added"]
    (joint,) = adds.joints
    (added,) = [n for n in joint.graph.find_nodes(op="placeholder") if getattr(n.meta["desc"], "idx", None) == count]
    assert not added.users
    size = added.meta["val"].shape[0]
    assert isinstance(size, int)
    assert size == 3
    # What it computes is what it computed.
    assert torch.equal(y, layer(x))
    assert torch.equal(x.grad, layer.weight.detach().sum(0).expand(5, 4))
    assert adds.value.grad is None


def test_the_example_of_an_added_input_is_fake_in_the_mode_that_autograd_traces_with() -> None:
    adds = Adds(torch.ones(()))
    torch.compile(lambda x: x * 2, backend=adds, dynamic=True)(torch.randn(5, requires_grad=True))
    assert isinstance(adds.example, FakeTensor)
    assert (adds.example.dtype, tuple(adds.example.shape)) == (torch.float32, ())
    values = [node.meta["val"] for node in adds.joints[0].graph.find_nodes(op="placeholder")]
    modes = [value.fake_mode for value in values if isinstance(value, FakeTensor)]
    assert len(modes) >= 3
    assert all(mode is adds.example.fake_mode for mode in modes)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_added_input_that_needs_a_gradient_has_a_place_for_it(requires_grad: bool) -> None:
    adds = Adds(torch.zeros(3, requires_grad=requires_grad))
    torch.compile(lambda x: x.sin(), backend=adds)(torch.randn(5, requires_grad=True))
    (output,) = adds.joints[0].graph.find_nodes(op="output")
    places = [getattr(getattr(desc, "grad_of", None), "idx", None) for desc in output.meta["desc"]]
    assert (1 in places) == requires_grad
    assert output.args[0][-1] is None
