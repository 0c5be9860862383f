"""Building nodes: their place, their values and their provenance."""

import pytest
import torch
from torch import fx, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition

from mpcompile.passes.edit import (
    insert_after,
    insert_cast,
    insert_view,
    recompute_in_backward,
    refresh,
    replace_arguments,
    run_fake,
)
from mpcompile.passes.graph import CAST, DECOMPOSED, dtype_of, is_backward, module_path, op_name, source_line
from tests.helpers import call, calls, joint, run_flat, trace

aten = torch.ops.aten
A = torch.randn(4, 6)


def sin_graph() -> tuple[fx.Graph, fx.Node, fx.Node]:
    """A graph of two inputs and one operation that carries provenance; the inputs are not dense in rows."""
    gm = trace(lambda x, y: x.sin() + y, A.t(), A.t())
    node = call(gm, "sin")
    node.meta.update({"stack_trace": 'File "model.py", line 41', "custom": {"a": 1}, "tensor_meta": 3})
    return gm.graph, node, next(iter(gm.graph.nodes))


def test_arguments_are_replaced_by_name() -> None:
    node = call(trace(lambda x: torch.addmm(x[0], x, x.t(), beta=2), A[:4, :4]), "addmm")
    args = node.args
    seen = []

    def replace(name: str, value: object) -> object:
        seen.append(name)
        return 3 if name == "beta" else value

    replace_arguments(node, replace)
    assert seen == ["self", "mat1", "mat2", "beta"]
    assert (node.args, node.kwargs) == (args, {"beta": 3})


def test_arguments_that_are_lists_are_replaced_whole() -> None:
    gm = trace(lambda x, y: torch.cat([x, y]), A, A + 1)
    node = call(gm, "cat")
    replace_arguments(node, lambda name, value: value[::-1] if name == "tensors" else value)
    assert [source.name for source in node.args[0]] == ["y_1", "x_1"]


def test_inserted_cast_has_a_true_value_and_the_provenance_of_its_source() -> None:
    graph, node, _ = sin_graph()
    cast = insert_cast(node, torch.bfloat16)
    assert (node.next, cast.args, cast.kwargs) == (cast, (node,), {"dtype": torch.bfloat16})
    value = cast.meta["val"]
    assert (value.dtype, tuple(value.shape), value.stride()) == (torch.bfloat16, (6, 4), (1, 6))
    assert cast.meta[CAST] is True
    assert source_line(cast) == "model.py:41"
    assert cast.meta["custom"] == {"a": 1}
    assert "tensor_meta" not in cast.meta
    graph.lint()


def test_cast_of_an_input_comes_after_all_inputs() -> None:
    graph, node, first = sin_graph()
    cast = insert_cast(first, torch.float16, like=node)
    assert [n.op for n in graph.nodes][:3] == ["placeholder", "placeholder", "call_function"]
    assert source_line(cast) == "model.py:41"


def test_a_cast_speaks_the_vocabulary_of_its_graph() -> None:
    # Before decomposition a cast must have a derivative; after it, a code generator must know it.
    graph, node, _ = sin_graph()
    assert op_name(insert_cast(node, torch.bfloat16)) == "aten._to_copy.default"
    assert graph.owning_module is not None
    graph.owning_module.meta[DECOMPOSED] = True
    cast = insert_cast(node, torch.bfloat16)
    assert op_name(cast) == "prims.convert_element_type.default"
    assert (dtype_of(cast), cast.meta["val"].stride()) == (torch.bfloat16, (1, 6))


@pytest.mark.parametrize("decomposed", [False, True])
def test_a_cast_rounds_to_nearest_even(decomposed: bool) -> None:
    gm = trace(lambda x: x.view(-1) * 1, torch.zeros(4, 1))
    if decomposed:
        gm.meta[DECOMPOSED] = True
    node = call(gm, "mul")
    wide = insert_cast(insert_cast(node, torch.float16), torch.float32)
    node.replace_all_uses_with(wide, delete_user_cb=lambda user: user.op == "output")
    gm.recompile()
    values = torch.tensor([[1 + 2.0**-11], [1 + 3 * 2.0**-11], [65520.0], [2.0**-25]])
    rounded = torch.tensor([1.0, 1 + 2.0**-9, float("inf"), 0.0])
    assert torch.equal(run_flat(gm, values)[0], rounded)


def test_inserted_view_is_the_same_view_of_another_node() -> None:
    gm = trace(lambda x: x.view(3, 8), A)
    view = call(gm, "view")
    low = insert_view(view, insert_cast(view.args[0], torch.bfloat16))
    assert (low.target, low.args[1]) == (view.target, [3, 8])
    assert (dtype_of(low), tuple(low.meta["val"].shape)) == (torch.bfloat16, (3, 8))


def test_an_inserted_node_has_the_name_it_is_given() -> None:
    _, node, _ = sin_graph()
    after = insert_after(node, aten.mul.Tensor, (node, 2.0), {}, node, "doubled")
    again = insert_after(node, aten.mul.Tensor, (node, 2.0), {}, node, "doubled")
    assert after.name == "doubled"
    assert again.name == "doubled_1"
    assert node.next is again


def test_an_inserted_node_of_several_results_has_all_their_values() -> None:
    _, node, _ = sin_graph()
    after = insert_after(node, aten.topk.default, (node, 2), {"dim": 0}, node)
    values, indices = after.meta["val"]
    assert (values.dtype, tuple(values.shape)) == (torch.float32, (2, 4))
    assert (indices.dtype, tuple(indices.shape)) == (torch.int64, (2, 4))


def test_refresh_recomputes_the_value() -> None:
    _, node, _ = sin_graph()
    cast = insert_cast(node.args[0], torch.float16)
    node.update_arg(0, cast)
    node.meta["eager_input_vals"] = ()
    refresh(node)
    assert dtype_of(node) is torch.float16
    assert {"tensor_meta", "eager_input_vals"}.isdisjoint(node.meta)
    assert run_fake(node).dtype is torch.float16
    after = insert_after(node, aten.relu.default, (node,), {}, node)
    assert dtype_of(after) is torch.float16


class Scaled(nn.Module):
    """A layer whose backward can be told from its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sin()


def test_what_follows_a_tangent_is_where_backward_begins() -> None:
    gm = joint(Scaled(), A.clone().requires_grad_())
    (tangent,) = [node for node in gm.graph.find_nodes(op="placeholder") if is_backward(node)]
    first = next(node for node in gm.graph.nodes if node.op == "call_function" and is_backward(node))
    scaled = insert_after(tangent, aten.mul.Tensor, (tangent, 2.0), {}, tangent)
    assert scaled.next is first
    assert not is_backward(next(node for node in calls(gm)))
    # It is a part of backward itself, so the partitioner leaves it there.
    assert is_backward(scaled)
    gm.graph.lint()


def test_what_follows_another_input_is_the_first_call() -> None:
    gm = joint(Scaled(), A.clone().requires_grad_())
    first = calls(gm)[0]
    source = gm.graph.find_nodes(op="placeholder")[0]
    assert insert_cast(source, torch.float16).next is first
    gm.graph.lint()


def test_what_is_made_for_backward_has_its_module() -> None:
    gm = joint(Scaled(), A.clone().requires_grad_())
    product = next(node for node in calls(gm, "mm") if is_backward(node))
    cast = insert_cast(product, torch.float16)
    assert is_backward(cast)
    assert module_path(cast) == "layer"


def test_sizes_that_are_not_known_stay_unknown() -> None:
    gm = joint(Scaled(), A.clone().requires_grad_(), dynamic=True)
    node = call(gm, "sin")
    cast = insert_cast(node, torch.float16)
    assert isinstance(node.meta["val"].shape[0], torch.SymInt)
    assert cast.meta["val"].shape[0].node.expr == node.meta["val"].shape[0].node.expr


@pytest.mark.parametrize("marked", [False, True])
def test_what_is_marked_is_computed_again_in_backward(marked: bool) -> None:
    gm = joint(lambda x, w: (x @ w).sin(), A.clone().requires_grad_(), A.t().clone())
    product = next(node for node in calls(gm, "mm") if not is_backward(node))
    if marked:
        recompute_in_backward(product)
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    forward, backward = min_cut_rematerialization_partition(gm, inputs, compiler="inductor", num_fwd_outputs=1)
    # Unmarked, the partitioner saves the result of a matmul; backward has one matmul of its own.
    assert (len(calls(forward, "mm")), len(calls(backward, "mm"))) == (1, 2 if marked else 1)
