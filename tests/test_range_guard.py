"""fp16's range: constants, fills and parameters that it cannot hold keep the operations that read them in fp32."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import mpcompile
from mpcompile import backend
from mpcompile.inspection.report import NodeRecord
from mpcompile.joint_pass import JointPass
from mpcompile.passes import Decision, Policy, plan_compute, run_passes
from mpcompile.passes.graph import is_backward
from mpcompile.passes.range_guard import beyond_range
from tests.helpers import call, calls, joint, matmul_bound, operand_dtypes, run_flat, trace
from tests.test_programs import matmuls, mixprec

INF, NAN = float("inf"), float("nan")
FP16 = Policy(dtype=torch.float16)
A, B = torch.randn(4, 4), torch.randn(4, 4)

BEYOND = [65504.01, -65505.0, 1e9, 2.0**-25, -1e-9]
WITHIN = [65504.0, -65504.0, 2.0**-24, -(2.0**-24), 1.0, 0.0, INF, -INF, NAN]


@pytest.mark.parametrize("value", BEYOND)
def test_numbers_beyond_range(value: float) -> None:
    assert beyond_range([1.0, value, 1e30]) == value


@pytest.mark.parametrize("value", WITHIN)
def test_numbers_within_range_and_what_is_no_finite_number(value: float) -> None:
    assert beyond_range([value]) is None


def test_sizes_and_other_values_do_not_count() -> None:
    assert beyond_range([100000, True, None, "1e9", A, torch.float32]) is None


# A constant of the operation itself.

Call = Callable[[Tensor, Tensor, float], Tensor]

CONSTANTS: dict[str, tuple[str, Call]] = {
    "addmm alpha": ("addmm", lambda a, b, c: torch.addmm(a, a, b, alpha=c)),
    "addmm beta": ("addmm", lambda a, b, c: torch.addmm(a, a, b, beta=c)),
    "baddbmm alpha": ("baddbmm", lambda a, b, c: torch.baddbmm(a[None], a[None], b[None], alpha=c)),
    "baddbmm beta": ("baddbmm", lambda a, b, c: torch.baddbmm(a[None], a[None], b[None], beta=c)),
    "attention scale": (
        "_scaled_dot_product_flash_attention_for_cpu",
        lambda a, b, c: F.scaled_dot_product_attention(a[None, None], b[None, None], b[None, None], scale=c),
    ),
}


def decision(op: str, fn: Call, constant: float, policy: Policy = FP16) -> Decision:
    """The decision for the only call of ``op`` in ``fn``."""
    gm = trace(lambda a, b: fn(a, b, constant), A, B)
    return plan_compute(gm, policy)[call(gm, op)]


@pytest.mark.parametrize("case", CONSTANTS)
def test_an_operation_with_a_constant_beyond_range_stays_fp32(case: str) -> None:
    for constant in BEYOND:
        found = decision(*CONSTANTS[case], constant)
        assert found == Decision("fp32", "range guard", f"its constant {constant:g} is beyond float16")


@pytest.mark.parametrize("case", CONSTANTS)
def test_an_operation_with_another_constant_is_low(case: str) -> None:
    assert {decision(*CONSTANTS[case], constant).precision for constant in WITHIN} == {"low"}


@pytest.mark.parametrize("case", CONSTANTS)
def test_bf16_has_the_range_of_fp32(case: str) -> None:
    assert decision(*CONSTANTS[case], 1e9, Policy(dtype=torch.bfloat16)).precision == "low"


@pytest.mark.parametrize("case", CONSTANTS)
def test_an_operation_with_such_a_constant_is_as_in_fp32(case: str) -> None:
    fn = CONSTANTS[case][1]
    for constant in (1e5, 1e-9):
        (found,) = run_flat(rewritten(trace(functools.partial(fn, c=constant), A, B)), A, B)
        truth = fn(A.double(), B.double(), constant)
        assert (found.double() - truth).abs().max() <= 2.0**-20 * max(1.0, float(truth.abs().max()))


def rewritten(gm: fx.GraphModule, policy: Policy = FP16) -> fx.GraphModule:
    """The graph after the passes."""
    run_passes(gm, policy)
    return gm


def test_the_passes_leave_such_an_operation_its_fp32_operands() -> None:
    gm = rewritten(trace(lambda a, b: torch.addmm(a, a, b, alpha=1e5) @ b, A, B))
    assert operand_dtypes(call(gm, "addmm")) == {torch.float32}
    assert operand_dtypes(call(gm, "mm")) == {torch.float16}


# An operand that is filled with a constant.

FILLS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "full": lambda x, c: torch.full((4, 4), c),
    "full_like": lambda x, c: torch.full_like(x, c),
    "new_full": lambda x, c: x.new_full((4, 4), c),
    "masked_fill": lambda x, c: x.masked_fill(x > 0, c),
    "where, a number": lambda x, c: torch.where(x > 0, x, c),
    "where, a full": lambda x, c: torch.where(x > 0, torch.full((), c), x),
    "where in where": lambda x, c: torch.where(x > 1, x, torch.where(x > 0, x, c)),
    "pad": lambda x, c: F.pad(x[:, :3], (0, 1), value=c),
    "a view": lambda x, c: torch.full((16,), c).view(4, 4).t(),
    "expanded": lambda x, c: torch.full((1, 4), c).expand(4, 4),
}


def filled(name: str, constant: float) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A matmul that reads a filled operand, and one that does not."""
    return lambda x, w: (FILLS[name](x, constant) @ w, x @ w)


def decisions(fn: Callable[[Tensor, Tensor], Any], policy: Policy) -> list[Decision]:
    """The decisions for the matmuls of ``fn``."""
    gm = trace(fn, A, B)
    plan = plan_compute(gm, policy)
    return [plan[node] for node in calls(gm, "mm")]


@pytest.mark.parametrize("name", FILLS)
def test_an_operation_with_a_filled_operand_stays_fp32(name: str) -> None:
    for constant in (-1e9, 1e-9):
        first, second = decisions(filled(name, constant), FP16)
        assert first == Decision("fp32", "range guard", f"an operand is filled with {constant:g}, beyond float16")
        assert second.precision == "low"


@pytest.mark.parametrize("name", FILLS)
def test_an_operand_filled_with_another_constant_is_read_low(name: str) -> None:
    for constant in (65504.0, -INF, 0.0):
        assert {found.precision for found in decisions(filled(name, constant), FP16)} == {"low"}


@pytest.mark.parametrize("name", FILLS)
def test_bf16_reads_filled_operands_low(name: str) -> None:
    assert {found.precision for found in decisions(filled(name, -1e9), Policy())} == {"low"}


@pytest.mark.parametrize("name", ["full", "masked_fill", "pad"])
def test_backward_reads_a_filled_operand_in_fp32_as_well(name: str) -> None:
    gm = rewritten(joint(filled(name, 1e9), A.clone().requires_grad_(), B.clone().requires_grad_(), low=torch.float16))
    kept = [is_backward(node) for node in calls(gm, "mm") if operand_dtypes(node) == {torch.float32}]
    # The product itself, and the gradient of its other operand.
    assert kept == [False, True]


def test_a_result_that_is_filled_is_no_operand() -> None:
    (found,) = decisions(lambda x, w: (x @ w).masked_fill(x > 0, -1e9).softmax(-1), FP16)
    assert found.precision == "low"


@pytest.mark.parametrize("name", FILLS)
def test_a_product_with_a_filled_operand_is_as_in_fp32(name: str) -> None:
    for constant in (1e9, 1e-9):
        found = run_flat(rewritten(trace(filled(name, constant), A, B)), A, B)[0]
        operand = FILLS[name](A, constant)
        error = (found.double() - operand.double() @ B.double()).abs()
        assert (error <= 8 * 2.0**-24 * (operand.double().abs() @ B.double().abs())).all()


# A parameter that holds values beyond range.


def in_fp16(model: Callable[..., Any], **options: Any) -> Any:
    """Compiled, with the gradients as they are unless ``options`` say otherwise."""
    return mixprec(model, **{"dtype": "fp16", "loss_scale": None, **options})


class Layers(nn.Module):
    """Three layers, the second of which has an element set."""

    def __init__(self, element: float, parameter: str = "weight") -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        with torch.no_grad():
            getattr(self.b, parameter).view(-1)[1] = element

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)) * 1e-6)


def decided(element: float, parameter: str = "weight", **options: Any) -> list[NodeRecord]:
    """The matmuls of three layers with one element set, forward and backward."""
    compiled = in_fp16(Layers(element, parameter), **options)
    compiled(torch.randn(3, 4, requires_grad=True)).sum().backward()
    return matmuls(compiled)


@pytest.mark.parametrize("element", [-70000.0, 1e30])
def test_a_parameter_beyond_range_keeps_its_readers_in_fp32_and_no_others(element: float) -> None:
    nodes = decided(element)
    kept = [node for node in nodes if node.precision == "fp32"]
    # Forward, and the gradient of the layer's input; the gradient of the weight does not read the weight.
    assert [(node.module, node.direction) for node in kept] == [("b", "forward"), ("b", "backward")]
    assert all(set(node.inputs) == {"float32"} for node in kept)
    assert {node.rule for node in kept} == {"range guard"}
    assert {node.reason for node in kept} == {"parameter 'b.weight' holds values beyond float16's 65504"}
    others = [node for node in nodes if node not in kept]
    assert len(others) == 7
    assert all((node.precision, set(node.inputs)) == ("low", {"float16"}) for node in others)


def test_a_bias_beyond_range_keeps_the_product_it_is_added_to_in_fp32() -> None:
    kept = [node for node in decided(70000.0, "bias") if node.precision == "fp32"]
    assert [(node.module, node.direction) for node in kept] == [("b", "forward")]
    assert kept[0].reason == "parameter 'b.bias' holds values beyond float16's 65504"


@pytest.mark.parametrize("element", [-65504.0, INF, NAN])
def test_a_parameter_within_range_and_one_that_is_not_finite_is_read_low(element: float) -> None:
    assert {node.precision for node in decided(element)} == {"low"}


def test_bf16_reads_a_parameter_of_any_size_low() -> None:
    assert {node.precision for node in decided(1e30, dtype="bf16")} == {"low"}


def test_the_report_tells_of_it() -> None:
    model = Layers(70000.0)
    compiled = in_fp16(model)
    compiled(torch.randn(3, 4))
    (report,) = mpcompile.reports(compiled)
    assert "parameter 'b.weight' holds values beyond float16's 65504" in report.summary()
    assert "parameter 'b.weight' holds values beyond float16's 65504" in str(report)


READERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as it is": lambda x, w: x @ w,
    "transposed": lambda x, w: x @ w.t(),
    "linear": lambda x, w: F.linear(x, w),
    "two views": lambda x, w: torch.bmm(x[None], w.t().unsqueeze(0)),
    "reshaped": lambda x, w: F.conv1d(x[..., None], w.view(4, 4, 1)),
    "a slice": lambda x, w: x @ w[:, :2],
    "a piece": lambda x, w: F.linear(x, w.chunk(2)[0]),
    "a copy": lambda x, w: x @ w.clone(),
    "laid out anew": lambda x, w: x @ w.t().contiguous(),
    "concatenated": lambda x, w: F.linear(x, torch.cat((w, w))),
    "cast": lambda x, w: F.linear(x, w.double().to(x.dtype)),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None, None], x[None, None], w[None, None]),
}


@pytest.mark.parametrize("how", READERS)
def test_a_parameter_beyond_range_is_recognised_where_it_is_read(how: str) -> None:
    weight, other = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    with torch.no_grad():
        weight[1, 1] = 1e5
    read = READERS[how]
    x = torch.rand(4, 4) * 1e-3
    compiled = in_fp16(lambda x: (read(x, weight), x @ other))
    found, _ = compiled(x)
    assert rules_of(compiled) == ["range guard", "class"]
    truth, size = read(x.double(), weight.double()), read(x.double(), weight.double().abs()).max()
    # Sums of four products in fp32, for attention also the rounding of its weights.
    assert (found.double() - truth).abs().max() <= 4 * 4 * 2.0**-24 * size


def rules_of(compiled: Any) -> list[str]:
    """Who decided, for every matmul of forward."""
    return [node.rule for node in matmuls(compiled) if node.direction == "forward"]


ATTENDED: dict[str, Callable[[Tensor], Tensor]] = {
    "full": lambda x: torch.full_like(x, 1e5),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1e5),
}


@pytest.mark.parametrize("how", ATTENDED)
def test_attention_with_a_filled_operand_stays_fp32(how: str) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(1, 1, 3, 4)
    compiled = in_fp16(lambda x: F.scaled_dot_product_attention(layer(x), x, ATTENDED[how](x)))
    found = compiled(x)
    assert rules_of(compiled) == ["class", "range guard"]
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_parameters_of_other_dtypes_are_no_obstacle(dtype: torch.dtype) -> None:
    layer, frozen = nn.Linear(4, 4), nn.Parameter(torch.ones(4, 4).to(dtype), requires_grad=False)
    compiled = in_fp16(lambda x: layer(x * (frozen.real if dtype.is_complex else frozen.float())))
    found = compiled(A)
    error = (found.double() - F.linear(A.double(), layer.weight.double(), layer.bias.double())).abs()
    assert (error <= matmul_bound(A, layer.weight.detach().t(), torch.float16, torch.float16) + 2.0**-11).all()
    assert rules_of(compiled) == ["class"]


def test_a_parameter_beyond_range_is_recognised_in_a_branch() -> None:
    weight, other = nn.Parameter(torch.full((4, 4), 1e5)), nn.Parameter(torch.randn(4, 4))

    def branching(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cond(x.sum() > 0, lambda x: x @ weight, lambda x: x - 1, (x,)), x @ other

    x = torch.full((4, 4), 2.0**-10)
    with torch.no_grad():
        found, _ = in_fp16(branching)(x)
    assert torch.equal(found, torch.full((4, 4), 4e5 * 2.0**-10))


# Who decides first.


def kept_in_fp32(nodes: list[NodeRecord]) -> set[tuple[str, str]]:
    """Direction and rule of what computes in fp32."""
    return {(node.direction, node.rule) for node in nodes if "float16" not in node.inputs}


@pytest.mark.parametrize("rule", ["b", "param:b.weight", "op:linear"])
def test_a_low_rule_beats_the_guard(rule: str) -> None:
    nodes = decided(70000.0, low=[rule])
    assert kept_in_fp32(nodes) == set()
    assert {node.rule for node in nodes if node.module == "b"} == {"low rule"}


def test_an_fp32_rule_beats_a_low_rule_and_comes_before_the_guard() -> None:
    nodes = decided(70000.0, low=["op:linear"], fp32=["param:b.weight"])
    assert kept_in_fp32(nodes) == {("forward", "fp32 rule"), ("backward", "fp32 rule")}
    assert {node.rule for node in nodes if node.module == "b"} == {"fp32 rule"}
    assert {node.rule for node in nodes if node.module != "b"} == {"low rule"}


def test_the_users_region_comes_before_the_guard() -> None:
    layer = Layers(70000.0)

    def model(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = layer.b(x)
        return layer.c(x)

    compiled = in_fp16(model)
    compiled(torch.randn(3, 4))
    assert kept_in_fp32(matmuls(compiled)) == {("forward", "user"), ("backward", "user")}


@pytest.mark.parametrize(("rules", "rule"), [({"low": ["op:addmm"]}, "low rule"), ({}, "range guard")])
def test_a_low_rule_beats_the_guard_of_a_constant(rules: dict[str, Any], rule: str) -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    compiled = in_fp16(lambda x: torch.addmm(x, x, weight, alpha=1e5) @ weight, **rules)
    compiled(A)
    nodes = [node for node in matmuls(compiled) if node.rule == rule]
    assert [node.direction for node in nodes] == ["forward", "backward"]
    assert {"float16" in node.inputs for node in nodes} == {rule == "low rule"}


# The compile cache must tell the two graphs apart.


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Compile three layers with one element set, and return the key they are cached by."""
    passes: list[JointPass] = []

    class Watched(JointPass):
        def __call__(self, graph: fx.Graph) -> None:
            passes.append(self)
            super().__call__(graph)

    monkeypatch.setattr(backend, "JointPass", Watched)

    def key(element: float, parameter: str = "weight", **options: Any) -> Any:
        torch._dynamo.reset()
        in_fp16(Layers(element, parameter), **options)(A)
        return passes[-1].uuid()

    return key


def test_the_compile_key_tells_which_parameters_are_beyond_range(keys: Callable[..., Any]) -> None:
    within, weight, bias = keys(1.0), keys(70000.0), keys(70000.0, "bias")
    assert len({within, weight, bias}) == 3
    assert keys(-1e30) == weight


def test_in_bf16_the_compile_key_does_not_look_at_values(keys: Callable[..., Any]) -> None:
    assert keys(1.0, dtype="bf16") == keys(70000.0, dtype="bf16")


# Numbers: as good as fp32, where fp16 would overflow or vanish.


@pytest.mark.parametrize("compiler", ["aot_eager", "reference"])
def test_a_layer_beyond_range_computes_as_in_fp32(compiler: str) -> None:
    layer, x, g = nn.Linear(8, 4, bias=False), torch.randn(5, 8) * 1e-2, torch.randn(5, 4)
    with torch.no_grad():
        layer.weight[::2] *= 1e6
    weight = layer.weight.detach()
    x.requires_grad_()
    y = in_fp16(layer, compiler=compiler)(x)
    y.backward(g)
    assert ((y.double() - x.double() @ weight.double().t()).abs() <= matmul_bound(x, weight.t(), torch.float32)).all()
    error = (x.grad.double() - g.double() @ weight.double()).abs()
    assert (error <= matmul_bound(g, weight, torch.float32)).all()
    # The gradient of the weight is an ordinary fp16 product.
    error = (layer.weight.grad.double() - g.double().t() @ x.double()).abs()
    assert (error <= matmul_bound(g.t(), x.detach(), torch.float16, torch.float16)).all()


def test_plain_fp16_overflows_there() -> None:
    layer, x = nn.Linear(8, 4, bias=False), torch.randn(5, 8) * 1e-2
    with torch.no_grad():
        layer.weight[0] = 1e6
    y = in_fp16(layer, low=["op:linear"])(x)
    assert not torch.isfinite(y[:, 0]).any()
    assert torch.isfinite(y[:, 1:]).all()
