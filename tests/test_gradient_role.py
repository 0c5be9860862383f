"""The role of every operation of a joint graph: forward, the gradient of a weight, or the rest of backward."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from mpcompile.passes import run_passes
from mpcompile.passes.gradient_role import WEIGHT_GRADIENTS, gradient_roles, phases
from mpcompile.passes.graph import is_backward, is_getitem, output_of, packet_name
from mpcompile.passes.op_classes import LOW_OPS
from mpcompile.passes.policy import Policy
from tests.helpers import Net, call, calls, joint, run_joint

X = torch.randn(5, 8)


def roles(gm: fx.GraphModule) -> list[tuple[str, str]]:
    """Operator and role of every LOW operation, in order."""
    found = gradient_roles(gm.graph)
    return [(packet_name(node.target), role) for node, role in found.items() if packet_name(node.target) in LOW_OPS]


def count(gm: fx.GraphModule) -> dict[str, int]:
    """How many LOW operations have each role."""
    names = [role for _, role in roles(gm)]
    return {role: names.count(role) for role in ("forward", "dgrad", "wgrad")}


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def test_two_layers_have_two_weight_gradients_and_one_between() -> None:
    gm = joint(Net(), X)
    assert roles(gm) == [("addmm", "forward")] * 2 + [("mm", "dgrad"), ("mm", "wgrad"), ("mm", "wgrad")]


def test_every_operation_has_a_role_and_backward_ones_that_are_no_matmul_are_dgrad() -> None:
    gm = joint(Net(), X)
    found = gradient_roles(gm.graph)
    assert list(found) == calls(gm)
    for node, role in found.items():
        assert (role == "forward") is not is_backward(node)
        if packet_name(node.target) in ("sum", "permute"):
            assert role != "wgrad", node  # a bias gradient is no LOW operation


def test_the_gradient_of_an_input_is_no_weight_gradient() -> None:
    gm = joint(Net(), X.clone().requires_grad_())
    assert count(gm) == {"forward": 2, "dgrad": 2, "wgrad": 2}


def test_leaves_are_the_weights_of_a_function_without_parameters() -> None:
    first, second = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    assert count(joint(lambda a, b: (a @ b).relu() @ b, first, second)) == {"forward": 2, "dgrad": 1, "wgrad": 3}
    assert count(joint(lambda a, b: (a @ b).relu() @ b, first * 1, second)) == {"forward": 2, "dgrad": 2, "wgrad": 2}


def test_every_gradient_counts_in_a_graph_that_does_not_say_which_are_of_weights() -> None:
    gm = joint(Net(), X.clone().requires_grad_())
    del output_of(gm).meta[WEIGHT_GRADIENTS]
    assert count(gm) == {"forward": 2, "dgrad": 1, "wgrad": 3}


class Uses(nn.Module):
    """One matrix, used in one way."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.weight, self.use = weight(*shape), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight)


WAYS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], int]] = {
    "transposed": (lambda x, w: x @ w.t(), (8, 8), 1),
    "viewed": (lambda x, w: x @ w.view(8, 4), (4, 8), 1),
    "sliced": (lambda x, w: x @ w[:8], (9, 8), 1),
    "split": (lambda x, w: sum((x @ piece for piece in w.split(4, 1)), torch.zeros(())), (8, 12), 3),
    "chunked and concatenated": (lambda x, w: x @ torch.cat(w.chunk(2), 0), (8, 8), 1),
    "selected": (lambda x, w: x @ w[0] + x @ w[1], (2, 8, 8), 2),
    "used twice": (lambda x, w: (x @ w).relu() @ w, (8, 8), 2),
    "scaled by a number": (lambda x, w: x @ (w * 0.5), (8, 8), 1),
    "divided by a number": (lambda x, w: x @ (w / 3), (8, 8), 1),
    "scaled by a tensor of one number": (lambda x, w: x @ (w * x.detach().sum()), (8, 8), 1),
    "broadcast": (lambda x, w: torch.bmm(torch.stack((x, x)), w.expand(2, 8, 8)), (8, 8), 1),
    "negated": (lambda x, w: x @ -w, (8, 8), 1),
    "padded": (lambda x, w: x @ F.pad(w, (0, 1)), (8, 8), 1),
    "in fp64": (lambda x, w: x.double() @ w.double(), (8, 8), 1),
    "subtracted": (lambda x, w: x @ (x.detach().t() @ x.detach() - w), (8, 8), 1),
    "gated, so that its gradient is": (lambda x, w: x @ (w * w.detach()), (8, 8), 0),
    "squashed": (lambda x, w: x @ w.tanh(), (8, 8), 0),
}


@pytest.mark.parametrize("way", WAYS)
def test_weight_gradients_are_found_behind_moves_additions_and_factors(way: str) -> None:
    use, shape, expected = WAYS[way]
    gm = joint(Uses(use, *shape), X)
    assert count(gm)["wgrad"] == expected, gm.graph


def test_attention_between_projections_is_dgrad() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    gm = joint(Attention(), torch.randn(2, 5, 8))
    backward = [(name, role) for name, role in roles(gm) if role != "forward"]
    assert sorted(backward) == [("bmm", "dgrad")] * 4 + [("mm", "wgrad")]


def test_attention_backward_has_three_results_that_are_dgrad() -> None:
    class Attention(Uses):
        def forward(self, x: Tensor) -> Tensor:
            heads = (x @ self.weight).view(1, 1, 5, 8)
            return F.scaled_dot_product_attention(heads, heads, heads)

    gm = joint(Attention(torch.mm, 8, 8), X)
    node = call(gm, "_scaled_dot_product_flash_attention_for_cpu_backward")
    assert phases(node, gradient_roles(gm.graph)) == {"dgrad"}


@pytest.mark.parametrize(
    ("trained", "needs_input", "own", "both"),
    [
        (True, True, "dgrad", {"dgrad", "wgrad"}),
        (True, False, "wgrad", {"wgrad"}),
        (False, True, "dgrad", {"dgrad"}),
    ],
)
def test_convolution_backward_has_the_roles_of_its_results(
    trained: bool, needs_input: bool, own: str, both: set[str]
) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.Conv2d(3, 3, 1, bias=False))
    model[0].weight.requires_grad_(trained)
    gm = joint(model, torch.randn(1, 2, 5, 5).requires_grad_(needs_input))
    first = calls(gm, "convolution_backward")[-1]  # of the first layer
    found = gradient_roles(gm.graph)
    assert found[first] == own
    assert phases(first, found) == both
    parts = {user.args[1]: found[user] for user in first.users if is_getitem(user)}
    assert parts == {index: role for index, role in ((0, "dgrad"), (1, "wgrad")) if role in both}


def test_a_graph_without_backward_is_all_forward() -> None:
    model = Net().requires_grad_(False)
    found: list[str] = []

    def backend(gm: fx.GraphModule, _: object) -> Callable[..., object]:
        found.extend(gradient_roles(gm.graph).values())
        return gm.forward

    torch.compile(model, backend=backend)(X)
    assert set(found) == {"forward"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_roles_are_the_same_after_the_passes(dtype: torch.dtype) -> None:
    gm = joint(Net(), X, scaled=dtype is torch.float16, low=dtype)
    before = roles(gm)
    run_passes(gm, Policy(dtype=dtype))
    assert roles(gm) == before


def test_weight_gradients_by_role_are_those_that_depend_on_the_input_activations() -> None:
    """Independent of how roles are found: break the operation, and see which gradients change."""
    model = Net()
    gm = joint(model, X)
    inputs, tangent = [*model.parameters()], torch.randn(5, 4)
    leaves = [inputs[0], inputs[1], X, inputs[2], inputs[3]]
    right = run_joint(gm, leaves, [tangent])
    for node, role in gradient_roles(gm.graph).items():
        if packet_name(node.target) != "mm":
            continue
        with gm.graph.inserting_after(node):
            broken = gm.graph.call_function(torch.ops.aten.mul.Tensor, (node, 2.0))
        node.replace_all_uses_with(broken, delete_user_cb=lambda user, own=broken: user is not own)
        wrong = run_joint(gm, leaves, [tangent])
        changed = [i for i, (a, b) in enumerate(zip(right, wrong, strict=True)) if not torch.equal(a, b)]
        broken.replace_all_uses_with(node)
        gm.graph.erase_node(broken)
        # A weight gradient is one output; what is between layers reaches the weight and the bias before it.
        assert len(changed) == {"wgrad": 1, "dgrad": 2}[role]


def test_what_is_also_summed_into_a_bias_gradient_is_dgrad() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert count(joint(model, X)) == {"forward": 2, "dgrad": 1, "wgrad": 2}


def test_what_is_also_summed_into_a_position_table_is_dgrad() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(9, 8), weight(5, 8)
            self.head = nn.Linear(8, 9)

        def forward(self, index: Tensor) -> Tensor:
            return self.head(self.tokens(index) + self.positions)

    assert count(joint(Model(), torch.arange(5)[None].expand(2, 5))) == {"forward": 1, "dgrad": 1, "wgrad": 1}


def test_tied_weights_have_a_weight_gradient() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(9, 8)

        def forward(self, index: Tensor) -> Tensor:
            return self.tokens(index) @ self.tokens.weight.t()

    assert count(joint(Model(), torch.arange(5))) == {"forward": 1, "dgrad": 1, "wgrad": 1}


def test_roles_are_the_same_with_dynamic_sizes() -> None:
    class Sliced(Uses):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * x.shape[0]

    gm = joint(Sliced(lambda x, w: (x @ w[: x.shape[1]]).relu() @ w, 8, 8), X, dynamic=True)
    assert count(gm) == {"forward": 2, "dgrad": 1, "wgrad": 2}


aten = torch.ops.aten
JOINED: dict[str, tuple[Callable[..., tuple[object, tuple[object, ...]]], tuple[str, str]]] = {
    "as Inductor writes a sum of two weight gradients": (
        lambda a, b: (aten.addmm.default, (a, b, b)),
        ("wgrad", "dgrad"),
    ),
    "before decomposition": (lambda a, b: (aten.stack.default, ([a, b],)), ("wgrad", "wgrad")),
}


@pytest.mark.parametrize("way", JOINED)
def test_operations_that_tracing_does_not_make_are_known(way: str) -> None:
    join, expected = JOINED[way]
    graph = fx.Graph()
    x = graph.placeholder("x")
    first, second = (graph.call_function(aten.mm.default, (x, x)) for _ in range(2))
    total = graph.call_function(*join(first, second))
    for node in (first, second, total):
        node.meta["partitioner_tag"] = "is_backward"
    graph.output((total,))
    found = gradient_roles(graph)
    assert (found[first], found[second]) == expected


def test_a_size_read_off_a_weight_gradient_is_nothing_it_becomes() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    gradient = graph.call_function(torch.ops.aten.mm.default, (x, x))
    size = graph.call_function(torch.ops.aten.sym_size.int, (gradient, 0))
    other = graph.call_function(torch.ops.aten.mul.Tensor, (x, size))
    gradient.meta["val"], size.meta["val"], other.meta["val"] = torch.ones(2, 2), 2, torch.ones(2, 2)
    for node in (gradient, size, other):
        node.meta["partitioner_tag"] = "is_backward"
    graph.output((gradient, other)).meta[WEIGHT_GRADIENTS] = (0,)
    assert gradient_roles(graph)[gradient] == "wgrad"


def test_one_walk_is_enough_for_a_long_graph() -> None:
    """Thousands of additions in a row: neither recursion nor a search from every node."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes = [graph.call_function(torch.ops.aten.mm.default, (x, x))]
    for _ in range(5000):
        nodes.append(graph.call_function(torch.ops.aten.add.Tensor, (nodes[-1], nodes[-1])))
    for node in nodes:
        node.meta["partitioner_tag"] = "is_backward"
    graph.output((nodes[-1],))
    assert gradient_roles(graph)[nodes[0]] == "wgrad"
