"""insert_loss_scaling: S on what enters backward, 1/S and a flag on what leaves it, and every gradient the true one.

S is a power of two, so it rounds nothing: with it, gradients have the same bits as without it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from mpcompile import explain
from mpcompile.joint_pass import _mark_backward
from mpcompile.options import Options
from mpcompile.passes import PassError, PassResult, Policy, run_passes
from mpcompile.passes.graph import is_backward, op_name
from mpcompile.passes.scaling import SCALING, ScalingSite, insert_loss_scaling
from tests.helpers import calls, joint, layouts, operand_dtypes, reasons, text

# Dynamo's own, of every custom autograd function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

FP16 = Policy(dtype=torch.float16)
SCALES = (2.0**4, 2.0**16)
INF, NAN = float("inf"), float("nan")


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def joint_graph(fn: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> fx.GraphModule:
    """The joint graph of a function, with a place for the scale, before any pass."""
    torch._dynamo.reset()
    gm = joint(fn, *inputs, dynamic=dynamic, scaled=True, low=torch.float16)
    _mark_backward(gm.graph)  # as the backend does: autograd does not, in the backward of a custom function
    return gm


def scale(gm: fx.GraphModule) -> PassResult:
    """Run the pass under the verifier."""
    return run_passes(gm, FP16, (insert_loss_scaling,))[0]


def scaled(fn: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """The joint graph of a function after the pass."""
    gm = joint_graph(fn, *inputs)
    scale(gm)
    return gm


def site(gm: fx.GraphModule) -> ScalingSite:
    found = gm.meta[SCALING]
    assert isinstance(found, ScalingSite)
    return found


def run(gm: fx.GraphModule, factor: float = 1.0, **given: Tensor) -> list[Any]:
    """The outputs of a joint graph with S = ``factor``, for inputs that depend on nothing but the graph."""
    generator = torch.Generator().manual_seed(0)
    values = {node.name: example(node.meta["val"], generator) for node in gm.graph.find_nodes(op="placeholder")}
    values[site(gm).scale] = torch.tensor(factor)
    return list(fx.Interpreter(gm).run(*{**values, **given}.values(), enable_io_processing=False))


def example(fake: Any, generator: torch.Generator) -> Any:
    """A value for an input: random numbers, indices that any dimension has, or a size as it was captured."""
    if not isinstance(fake, Tensor):
        return fake.node.hint
    shape = [size if isinstance(size, int) else size.node.hint for size in fake.shape]
    if fake.is_floating_point() or fake.is_complex():
        return torch.randn(shape, generator=generator, dtype=torch.promote_types(fake.dtype, torch.float32)).to(
            fake.dtype
        )
    return torch.arange(fake.numel(), dtype=fake.dtype).reshape(shape) % 2


def gradients(gm: fx.GraphModule, factor: float = 1.0, **given: Tensor) -> list[Tensor]:
    """The gradients among the outputs."""
    outputs = run(gm, factor, **given)
    return [outputs[position] for position in site(gm).gradients]


def flags(gm: fx.GraphModule, factor: float = 1.0, **given: Tensor) -> list[float]:
    """The flag of every input that may have a gradient."""
    found = run(gm, factor, **given)[site(gm).flags]
    assert found.dtype is torch.float32
    return found.tolist()


def same_bits(found: list[Tensor], truth: list[Tensor]) -> bool:
    pairs = zip(found, truth, strict=True)
    return all(one.dtype is two.dtype and torch.equal(one, two) for one, two in pairs)


def named(gm: fx.GraphModule, name: str) -> fx.Node:
    (node,) = [node for node in gm.graph.nodes if node.name == name]
    return node


def test_a_matmul_line_by_line() -> None:
    gm = scaled(lambda x, w: x @ w, torch.randn(2, 3), leaf(3, 4))
    lines = text(gm).splitlines()
    forward, backward = lines[: lines.index("# backward")], lines[lines.index("# backward") :]
    assert forward == [
        "primals_1: f32[2, 3] = input",
        "primals_2: f32[3, 4] = input",
        "primals_3: f32[] = input",
        "primals_4: f32[1] = input",
        "tangents_1: f32[2, 4] = input",
        "mm: f32[2, 4] = aten.mm.default(primals_1, primals_2)",
    ]
    assert "inverse_scale: f32[] = aten.reciprocal.default(primals_3)" in backward
    steps = ("scaled_", "permute", "mm", "unscaled_", "return")
    assert [line for line in backward if line.startswith(steps)] == [
        "scaled_tangents_1: f32[2, 4] = aten.mul.Tensor(tangents_1, primals_3)",
        "permute: f32[3, 2] = aten.permute.default(primals_1, [1, 0])",
        "mm_1: f32[3, 4] = aten.mm.default(permute, scaled_tangents_1)",
        "unscaled_l_w_: f32[3, 4] = aten.mul.Tensor(mm_1, inverse_scale)",
        "return [mm, None, unscaled_l_w_, None, gradient_flags]",
    ]
    assert named(gm, "gradient_flags").meta["val"].shape == (1,)


def test_gradients_are_named_after_their_parameters() -> None:
    gm = scaled(nn.Linear(3, 4), torch.randn(2, 3))
    assert {node.name for node in calls(gm) if node.name.startswith("unscaled")} == {
        "unscaled_weight",
        "unscaled_bias",
    }


def test_the_changes_name_the_nodes_in_the_graph() -> None:
    gm = joint_graph(lambda x: F.relu(x) ** 2, leaf(3))
    before = {node.name for node in gm.graph.nodes}
    result = scale(gm)
    assert result.name == "insert_loss_scaling"
    assert [change.node for change in result.changes] == ["scaled_tangents_1", "unscaled_l_x_", "gradient_flags"]
    for change in result.changes:
        assert change.node not in before
        assert op_name(named(gm, change.node)) == change.op
        assert change.after == "float32"


def test_the_factor_surrounds_everything_that_is_narrow_in_float16() -> None:
    gm = joint_graph(lambda x, w, v: (x @ w).tanh() @ v, torch.randn(2, 3), leaf(3, 4), leaf(4, 2))
    run_passes(gm, FP16)
    start = named(gm, "scaled_tangents_1")
    ends = {named(gm, "unscaled_l_w_"), named(gm, "unscaled_l_v_")}
    assert all(operand_dtypes(node) == {torch.float32} for node in (start, *ends))
    narrow = [node for node in calls(gm) if is_backward(node) and node.meta["val"].dtype is torch.float16]
    derived = [node for node in narrow if reads(node, "tangents_1")]
    assert len(derived) >= 4  # two gradients narrowed, two products of them
    assert all(reads(node, "scaled_tangents_1") for node in derived)
    assert not any(reads(node, end.name) for node in narrow for end in ends)


def reads(node: fx.Node, name: str) -> bool:
    """Whether a node depends on another."""
    return any(source.name == name or reads(source, name) for source in node.all_input_nodes)


def test_gradients_below_the_range_of_float16_survive() -> None:
    gm = joint_graph(lambda x, w: x @ w, torch.eye(2), leaf(2, 2))
    run_passes(gm, FP16)
    tiny = {"primals_1": torch.eye(2), "tangents_1": torch.eye(2) * 2.0**-30}
    assert same_bits(gradients(gm, 2.0**16, **tiny), [torch.eye(2) * 2.0**-30])
    assert same_bits(gradients(gm, 1.0, **tiny), [torch.zeros(2, 2)])


@pytest.mark.parametrize(("factor", "flag"), [(2.0**15, 0.0), (2.0**16, 1.0)])
def test_a_scale_beyond_the_range_of_float16_is_flagged(factor: float, flag: float) -> None:
    gm = joint_graph(lambda x, w: x @ w, torch.eye(2), leaf(2, 2))
    run_passes(gm, FP16)
    assert flags(gm, factor, primals_1=torch.eye(2), tangents_1=torch.eye(2)) == [flag]


INDEX = torch.tensor([0, 2, 0])
MODELS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "linear layers": (lambda x, w, b: F.linear(F.linear(x, w, b).relu(), w.t()), (leaf(2, 3), leaf(4, 3), leaf(4))),
    "softmax": (lambda x: x.softmax(-1), (leaf(2, 3),)),
    "attention": (lambda q, k: F.scaled_dot_product_attention(q, k, k), (leaf(1, 2, 3, 4), leaf(1, 2, 3, 4))),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (3,), w, b), (leaf(2, 3), leaf(3), leaf(3))),
    "convolution": (lambda x, w, b: F.conv1d(x, w, b).tanh(), (leaf(1, 2, 5), leaf(3, 2, 2), leaf(3))),
    "embedding": (lambda w, i: F.embedding(i, w).tanh(), (leaf(4, 3), INDEX)),
    "weight used twice": (lambda w, i: F.linear(F.embedding(i, w).tanh(), w), (leaf(4, 3), INDEX)),
    "indexing": (lambda x, i: x[i].exp() + x[:, :2].sum(), (leaf(3, 3), INDEX)),
    "pieces": (lambda x: x.split(1)[0].sin() * x.unbind(1)[2].cos(), (leaf(3, 3),)),
    "flipped": (lambda x: x.flip(0).exp(), (leaf(3, 3),)),
    "choice": (lambda x, y: torch.where(x > 0, x * y, y.exp()), (leaf(3, 3), leaf(3, 3))),
    "statistics": (lambda x: x.std(0) + x.amax(0) + x.logsumexp(0), (leaf(3, 3),)),
    "fp64": (lambda x, y: (x @ y.double()).tanh(), (leaf(2, 2, dtype=torch.float64), leaf(2, 2))),
    "several outputs": (lambda x, y: (x.exp(), (x * y).sum(), y.double().sin()), (leaf(2, 3), leaf(2, 3))),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_gradients_have_the_bits_they_have_without_scaling(model: str) -> None:
    fn, inputs = MODELS[model]
    gm = joint_graph(fn, *inputs)
    before, truth = layouts(gm), gradients(gm)
    scale(gm)
    assert layouts(gm)[:-1] == before
    for factor in SCALES:
        assert same_bits(gradients(gm, factor), truth)
        assert set(flags(gm, factor)) == {0.0}


@pytest.mark.parametrize("model", ["linear layers", "layer norm", "softmax", "embedding", "flipped"])
def test_an_ordinary_backward_has_the_factor_from_end_to_end(model: str) -> None:
    fn, inputs = MODELS[model]
    gm = joint_graph(fn, *inputs)
    # One for the tangent, one for each gradient, one for the flags: what is unscaled on the way and scaled again costs
    # two passes over memory, and in 16 bits the small numbers that it is scaled for.
    assert len(scale(gm).changes) == 1 + len(site(gm).gradients) + 1


def test_forward_does_not_read_the_scale() -> None:
    fn, inputs = MODELS["linear layers"]
    gm = scaled(fn, *inputs)
    readers = named(gm, site(gm).scale).users
    assert readers
    assert all(map(is_backward, readers))


def test_every_tangent_is_scaled() -> None:
    fn, inputs = MODELS["several outputs"]
    gm = scaled(fn, *inputs)
    for name in ("tangents_1", "tangents_2", "tangents_3"):
        (reader,) = named(gm, name).users
        assert reader is named(gm, f"scaled_{name}")
    assert named(gm, "scaled_tangents_3").meta["val"].dtype is torch.float64


def test_a_parameter_used_twice_has_one_gradient_and_one_flag() -> None:
    fn, inputs = MODELS["weight used twice"]
    gm = scaled(fn, *inputs)
    assert len(site(gm).gradients) == 1
    assert flags(gm) == [0.0]
    assert flags(gm, tangents_1=torch.full((3, 4), INF)) == [1.0]


def test_an_input_without_a_gradient_is_never_flagged() -> None:
    def second_is_detached(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a * 2 + b.detach() + c * 3

    gm = scaled(second_is_detached, leaf(2), leaf(2), leaf(2))
    assert site(gm).names == ("l_a_", "l_b_", "l_c_")
    assert flags(gm, tangents_1=torch.tensor([INF, 0.0])) == [1.0, 0.0, 1.0]


def test_an_input_that_asks_for_no_gradient_has_no_flag() -> None:
    gm = scaled(lambda a, b: a * b, torch.randn(2), leaf(2))
    assert site(gm).names == ("l_b_",)
    assert flags(gm) == [0.0]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_exactly_the_gradients_that_are_not_finite_are_flagged(bad: float) -> None:
    gm = scaled(lambda a, b, c: (a * 2, b * 3, c.t() * 4), leaf(2, 2), leaf(2, 2), leaf(2, 2))
    tangent = torch.tensor([[1.0, 2.0], [bad, 3.0]])
    assert flags(gm, 2.0**4) == [0.0, 0.0, 0.0]
    assert flags(gm, 2.0**4, tangents_1=tangent) == [1.0, 0.0, 0.0]
    assert flags(gm, 2.0**4, tangents_2=tangent) == [0.0, 1.0, 0.0]
    assert flags(gm, 2.0**4, tangents_1=tangent, tangents_3=tangent) == [1.0, 0.0, 1.0]


def test_the_largest_finite_gradient_is_not_flagged() -> None:
    gm = scaled(lambda a: a * 2, leaf(2))
    largest = torch.finfo(torch.float32).max
    assert flags(gm, 1.0, tangents_1=torch.tensor([largest / 2, -largest / 2])) == [0.0]


def test_an_overflow_of_scaling_itself_is_flagged() -> None:
    gm = scaled(lambda a: a * 2, leaf(2))
    large = torch.tensor([1.0, 2.0**120])
    assert flags(gm, 2.0**4, tangents_1=large) == [0.0]
    assert flags(gm, 2.0**16, tangents_1=large) == [1.0]


def test_a_gradient_that_does_not_depend_on_the_loss_is_flagged_too() -> None:
    gm = scaled(custom(lambda g, x: 1 / x), leaf(2))
    assert flags(gm, primals_1=torch.tensor([1.0, 0.0])) == [1.0]


GRADIENTS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "an expanded number": (lambda x: x.sum(), (leaf(2, 3),)),
    "an expanded row": (lambda x: x.sum(0), (leaf(2, 3),)),
    "the tangent itself": (lambda x, y: x + y, (leaf(2, 3), leaf(2, 3))),
    "another shape": (lambda x: x.reshape(6) * 2, (leaf(2, 3),)),
    "half of a tangent": (lambda x, y: torch.cat([x, y], 1), (leaf(2, 3), leaf(2, 3))),
    "every other number of a tangent": (lambda x, y: torch.stack([x, y], 2), (leaf(2, 3), leaf(2, 3))),
    "the real part of a transform": (lambda x: torch.fft.fft(x), (leaf(2, 3),)),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_a_gradient_keeps_its_strides(case: str) -> None:
    fn, inputs = GRADIENTS[case]
    gm = joint_graph(fn, *inputs)
    before = layouts(gm)
    truth = gradients(gm)
    scale(gm)
    assert layouts(gm)[:-1] == before
    for factor in SCALES:
        found = gradients(gm, factor)
        assert same_bits(found, truth)
        assert [v.stride() for v in found] == [v.stride() for v in truth]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_tangent_is_scaled_in_float32(dtype: torch.dtype) -> None:
    gm = joint_graph(lambda x, y: x * y, leaf(3, dtype=dtype), leaf(3, dtype=dtype))
    truth = gradients(gm)
    scale(gm)
    assert operand_dtypes(named(gm, "scaled_tangents_1")) == {torch.float32}
    assert operand_dtypes(named(gm, "unscaled_l_x_")) == {torch.float32}
    assert same_bits(gradients(gm, 2.0**4), truth)


def test_a_float64_tangent_is_not_narrowed() -> None:
    gm = scaled(lambda x: x * 2, leaf(2, dtype=torch.float64))
    fine = torch.tensor([1 + 2.0**-52, 2.0**-140], dtype=torch.float64)
    assert same_bits(gradients(gm, 2.0**16, tangents_1=fine), [2 * fine])


def custom(backward: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of one argument with a hand-written backward, which gets the gradient and the argument."""

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *incoming: Tensor) -> Tensor:
            return backward(incoming[0], *ctx.saved_tensors)

    return lambda x: Custom.apply(x)


BACKWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "clips": lambda g, x: g.clamp(-0.5, 0.5),
    "clips, then multiplies": lambda g, x: g.clamp(-0.5, 0.5) @ x.t() @ x,
    "squares": lambda g, x: g * g,
    "takes the sign": lambda g, x: g.sign() * 0.1,
    "rounds": lambda g, x: (g * 4).round() / 4,
    "keeps what is positive": lambda g, x: torch.where(g > 0, g, torch.zeros_like(g)),
    "keeps what is large": lambda g, x: torch.where(g.abs() > 0.5, g, 0.1 * g),
    "adds a number": lambda g, x: g + 0.01,
    "adds a tensor": lambda g, x: g + 0.01 * x,
    "adds a constant tensor": lambda g, x: g + torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "divides by the norm": lambda g, x: g / g.norm(),
    "sorts": lambda g, x: g.sort(1).values,
    "takes what is largest": lambda g, x: torch.zeros_like(g).scatter(1, g.topk(1).indices, 1.0),
    "is constant": lambda g, x: torch.ones_like(g),
    "is the argument": lambda g, x: x.clone(),
    "mixes": lambda g, x: torch.cat([g[:1], x[1:2], g[2:].clamp(-0.5, 0.5)]),
    "fills in a number": lambda g, x: g.masked_fill(x > 0, 3.0),
    "convolves with a bias": lambda g, x: F.conv1d(g[None], torch.ones(3, 3, 1), torch.ones(3))[0],
    "multiplies and adds a bias": lambda g, x: F.linear(g, torch.ones(4, 4), torch.ones(4)),
    "divides and rounds": lambda g, x: torch.div(g, 0.5, rounding_mode="floor"),
    "stores eight bits": lambda g, x: (g * 16).to(torch.int8).float() / 16,
    "masks": lambda g, x: x * g.bool(),
}


@pytest.mark.parametrize("backward", BACKWARDS)
def test_a_backward_that_is_not_linear_sees_the_true_gradient(backward: str) -> None:
    gm = joint_graph(custom(BACKWARDS[backward]), leaf(3, 4))
    truth = gradients(gm)
    scale(gm)
    for factor in SCALES:
        assert same_bits(gradients(gm, factor), truth)


@pytest.mark.parametrize("name", ["clamp", "sort"])
def test_what_is_not_linear_is_scaled_again_for_what_follows(name: str) -> None:
    def apply(g: Tensor) -> Tensor:
        return g.clamp(-1, 1) if name == "clamp" else g.sort(1).values

    gm = joint_graph(custom(lambda g, x: apply(g) @ x), leaf(2, 2))
    run_passes(gm, FP16)
    tiny = torch.eye(2) * 2.0**-30  # float16 has no such number: the product must be one of scaled values
    found = gradients(gm, 2.0**16, primals_1=torch.eye(2), tangents_1=tiny)
    assert same_bits(found, [apply(tiny)])


def test_a_backward_that_adds_a_size_sees_the_true_gradient() -> None:
    gm = joint_graph(custom(lambda g, x: g + x.shape[0]), leaf(3, 4), dynamic=True)
    truth = gradients(gm)
    scale(gm)
    # Its operand is unscaled and its result scaled: what is added is the same, so are the bits.
    assert same_bits(gradients(gm, 2.0**10), truth)


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Tensor:
        return incoming[0].clamp(-0.5, 0.5)


def test_a_branch_carries_the_factor() -> None:
    def branches(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x * 3, (x,))

    gm = joint_graph(branches, leaf(3))
    truth = gradients(gm)
    scale(gm)
    assert same_bits(gradients(gm, 2.0**10), truth)


def test_a_branch_that_is_not_linear_sees_the_true_gradient() -> None:
    def branches(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: Clip.apply(x), lambda x: Clip.apply(x * 3), (x,))

    gm = joint_graph(branches, leaf(3))
    truth = gradients(gm)
    scale(gm)
    assert same_bits(gradients(gm, 2.0**10), truth)


def test_a_true_value_is_computed_once_for_all_its_readers() -> None:
    gm = scaled(custom(lambda g, x: g.sign() + g.round() + g.abs()), leaf(3))
    assert len([node for node in calls(gm) if node.name.startswith("true_")]) == 1


def test_the_changes_tell_which_operation_is_not_linear() -> None:
    gm = joint_graph(custom(lambda g, x: g.round()), leaf(3))
    assert any("aten.round" in reason for reason in reasons(scale(gm)))


@pytest.mark.parametrize("passes", [(insert_loss_scaling,), None], ids=["the pass alone", "all passes"])
def test_again_changes_nothing(passes: Any) -> None:
    gm = joint_graph(custom(lambda g, x: g.clamp(-0.5, 0.5) @ x.t() @ x), leaf(3, 4))
    options = {} if passes is None else {"passes": passes}
    assert reasons(run_passes(gm, FP16, **options))
    once = text(gm)
    assert reasons(run_passes(gm, FP16, **options)) == []
    assert text(gm) == once


def test_a_graph_that_is_not_to_be_scaled_is_left_alone() -> None:
    gm = joint(lambda x, w: x @ w, torch.randn(2, 3), leaf(3, 4))
    before = text(gm)
    assert insert_loss_scaling(gm, FP16) == PassResult("insert_loss_scaling", ())
    assert text(gm) == before


SCALED: dict[str, tuple[dict[str, Any], bool]] = {
    "fp16": ({"dtype": "fp16"}, True),
    "fp16 with a fixed scale": ({"dtype": "fp16", "loss_scale": 1024.0}, True),
    "fp16 scaled by the training loop": ({"dtype": "fp16", "loss_scale": "external"}, False),
    "fp16 without a scale": ({"dtype": "fp16", "loss_scale": None}, False),
    "bf16": ({"dtype": "bf16"}, False),
    "fp32": ({"policy": "fp32"}, False),
}


@pytest.mark.parametrize("case", SCALED)
def test_the_backend_scales_only_what_computes_in_float16(case: str) -> None:
    options, expected = SCALED[case]
    ((_, after),) = explain(nn.Linear(3, 4), torch.randn(2, 3), options=options).modules
    inputs = len(after.graph.find_nodes(op="placeholder"))
    assert inputs == (6 if expected else 4)  # weight, bias, x, tangent; scale and probe
    assert ("inverse_scale" in text(after)) is expected


def test_inference_in_float16_is_not_scaled() -> None:
    with torch.no_grad():
        ((_, after),) = explain(nn.Linear(3, 4), torch.randn(2, 3), options={"dtype": "fp16"}).modules
    assert len(after.graph.find_nodes(op="placeholder")) == 3


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float32])
def test_other_types_than_float16_have_no_scale(low: torch.dtype) -> None:
    assert Options().scaling(low) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tangents": ()}, "0 tangents and 2 gradients"),
        ({"gradients": {}}, "1 tangents and 0 gradients"),
        ({"gradients": {1: 0}}, r"\(aten\.mm\.default.*\) would leave the graph where no gradient does"),
    ],
    ids=["no tangents", "no gradients", "one gradient too few"],
)
def test_scaled_values_that_would_not_be_unscaled_are_refused(wrong: dict[str, Any], message: str) -> None:
    gm = joint_graph(torch.mm, leaf(2, 3), leaf(3, 4))
    assert set(site(gm).gradients) == {1, 2}
    gm.meta[SCALING] = replace(site(gm), **wrong)
    with pytest.raises(PassError, match=message):
        scale(gm)


def test_a_graph_over_several_devices_is_refused() -> None:
    gm = joint_graph(lambda x, y: (x * 2, y * 3), leaf(2), torch.randn(2, device="meta", requires_grad=True))
    with pytest.raises(PassError, match=r"tangents_2 \(placeholder\) is on meta, the loss scale on cpu"):
        scale(gm)
