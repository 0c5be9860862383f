"""The verifier: every invariant catches a pass that breaks it, and says which pass and where."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from mpcompile.passes import PassError, PassResult, Policy, run_passes, verify
from mpcompile.passes.edit import insert_cast, refresh
from mpcompile.passes.graph import CAST
from mpcompile.passes.result import Change
from mpcompile.passes.verifier import signature
from tests.helpers import call, calls, joint, trace

aten = torch.ops.aten
A, W = torch.randn(4, 4), torch.randn(4, 4)


def graph() -> fx.GraphModule:
    """Two inputs, a matmul, two outputs."""
    return trace(lambda x, w: ((x @ w).relu(), x.sin()), A, W)


def broken_by(edit: Callable[[fx.Graph], None], gm: fx.GraphModule | None = None) -> None:
    """Run a pass that makes one edit under the verifier."""

    def broken(gm: fx.GraphModule, policy: Policy) -> PassResult:
        edit(gm.graph)
        return PassResult("broken", (Change("n", "op", "", "", "broken on purpose"),))

    run_passes(gm or graph(), Policy(), (broken,))


def find(graph: fx.Graph, op: str) -> fx.Node:
    """The only call of an operator."""
    return call(graph.owning_module, op)


def output(graph: fx.Graph) -> fx.Node:
    """The output node."""
    return next(iter(graph.find_nodes(op="output")))


def test_graph_that_keeps_its_promises_passes() -> None:
    gm = graph()
    broken_by(lambda graph: None, gm)
    assert verify(signature(gm), gm, "nothing") is None


def test_malformed_graph_is_caught() -> None:
    def use_before_definition(graph: fx.Graph) -> None:
        graph.output_node().prev.prev.append(find(graph, "mm"))
        find(graph, "relu").append(find(graph, "mm"))

    with pytest.raises(RuntimeError, match="was used before it has been defined"):
        broken_by(use_before_definition)


def test_added_input_is_caught() -> None:
    def add_input(graph: fx.Graph) -> None:
        with graph.inserting_before(next(iter(graph.nodes))):
            graph.placeholder("extra")

    with pytest.raises(PassError, match=r"^broken changed the graph's inputs"):
        broken_by(add_input)


def test_removed_output_is_caught() -> None:
    def drop_output(graph: fx.Graph) -> None:
        output(graph).args = (output(graph).args[0][:1],)

    with pytest.raises(PassError, match=r"^broken changed the number of outputs"):
        broken_by(drop_output)


def test_changed_output_dtype_is_caught() -> None:
    def narrow_output(graph: fx.Graph) -> None:
        relu = find(graph, "relu")
        low = insert_cast(relu, torch.bfloat16)
        relu.replace_all_uses_with(low, delete_user_cb=lambda user: user is not low)

    with pytest.raises(PassError, match=r"changed output 0 from torch.float32 .* to torch.bfloat16"):
        broken_by(narrow_output)


@pytest.mark.parametrize(
    ("view", "found"),
    [
        (lambda graph, node: graph.call_function(aten.t.default, (node,)), r"\(4, 4\) strides \(1, 4\)"),
        (lambda graph, node: graph.call_function(aten.view.default, (node, [16])), r"\(16,\) strides \(1,\)"),
    ],
    ids=["strides", "shape"],
)
def test_changed_output_layout_is_caught(view: Callable[..., fx.Node], found: str) -> None:
    def lay_out_anew(graph: fx.Graph) -> None:
        relu = find(graph, "relu")
        with graph.inserting_after(relu):
            node = view(graph, relu)
        refresh(node)
        output(graph).replace_input_with(relu, node)

    with pytest.raises(PassError, match=r"output 0 from .*strides \(4, 1\) to torch.float32 " + found):
        broken_by(lay_out_anew)


def test_output_that_aliases_an_input_is_caught() -> None:
    def return_input(graph: fx.Graph) -> None:
        find(graph, "sin").replace_all_uses_with(next(iter(graph.nodes)))

    with pytest.raises(PassError, match=r"made output 1 alias x_1, which it did not before"):
        broken_by(return_input)


def test_output_that_is_a_view_of_an_input_is_caught() -> None:
    gm = trace(lambda x: x.t().clone(memory_format=torch.preserve_format), A)

    def drop_clone(graph: fx.Graph) -> None:
        find(graph, "clone").replace_all_uses_with(find(graph, "t"))

    with pytest.raises(PassError, match=r"made output 0 alias x_1"):
        broken_by(drop_clone, gm)


def test_output_that_aliases_another_output_is_caught() -> None:
    gm = trace(lambda x: (x.sin(), x.sin()), A)

    def merge(graph: fx.Graph) -> None:
        first, second = calls(gm, "sin")
        second.replace_all_uses_with(first)

    with pytest.raises(PassError, match=r"made output 1 alias output 0, which it did not before"):
        broken_by(merge, gm)


def test_output_that_aliased_before_passes() -> None:
    gm = trace(lambda x: (x, x.view(16), (y := x.sin()), y.t()), A)
    assert signature(gm).aliases == {(0, "x_1"), (1, "x_1"), (1, "output 0"), (3, "output 2")}
    broken_by(lambda graph: None, gm)


def test_added_mutation_is_caught() -> None:
    def mutate(graph: fx.Graph) -> None:
        relu = find(graph, "relu")
        relu.target = aten.relu_.default

    with pytest.raises(PassError, match=r"added or removed an operation that mutates its arguments"):
        broken_by(mutate)


def narrow_one_operand(graph: fx.Graph, node: fx.Node | None = None) -> None:
    """Forget the second operand of a matmul."""
    node = node or find(graph, "mm")
    node.update_arg(0, insert_cast(node.args[0], torch.bfloat16))


def test_operands_of_two_dtypes_are_caught() -> None:
    with pytest.raises(PassError, match=r"left mm \(aten.mm.default.*with bfloat16 and float32 operands"):
        broken_by(narrow_one_operand)


class Model(nn.Module):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_error_names_module_and_source_line() -> None:
    gm = joint(Model(), A)
    with pytest.raises(PassError, match=rf"must have one dtype \(inner, {re.escape(__file__)}:\d+\)"):
        broken_by(lambda graph: narrow_one_operand(graph, calls(gm, "mm")[0]), gm)


def test_recorded_value_that_is_not_true_is_caught() -> None:
    def lie(graph: fx.Graph) -> None:
        sin = find(graph, "sin")
        with graph.inserting_after(sin):
            node = graph.call_function(aten._to_copy.default, (sin,), {"dtype": torch.float16})
        node.meta.update({"val": sin.meta["val"], CAST: True})
        output(graph).replace_input_with(sin, node)

    with pytest.raises(PassError, match=r"recorded value of torch.float32 .*but it computes torch.float16 \(4, 4\)"):
        broken_by(lie)


def test_unchanged_graph_is_not_verified() -> None:
    def silent(gm: fx.GraphModule, policy: Policy) -> PassResult:
        return PassResult("silent", ())

    results: Any = run_passes(graph(), Policy(), (silent,))
    assert [(result.name, result.changed) for result in results] == [("silent", False)]
