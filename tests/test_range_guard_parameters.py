"""fp16's range: parameters with values beyond it keep the operations that read them in fp32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import mpcompile
from mpcompile import backend
from mpcompile.joint_pass import JointPass
from tests.helpers import matmul_bound
from tests.range_guard_tools import INF, NAN, A, Layers, decided, in_fp16, rules_of


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
