"""emulate_low_products: low matmuls computed in fp32 kernels, with the rounding of a low matmul."""

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from mpcompile import joint_pass
from mpcompile.passes import Policy, run_passes
from mpcompile.passes.emulation import emulate_low_products
from tests.helpers import call, calls, dtypes, joint, layouts, operand_dtypes, reasons, run_flat, text, trace

LOW = [torch.bfloat16, torch.float16]


def lowered(dtype: torch.dtype, *inputs: Tensor) -> fx.GraphModule:
    """A rewritten matmul, not yet emulated."""
    gm = trace(torch.mm, *inputs)
    run_passes(gm, Policy(dtype=dtype))
    return gm


def emulate(gm: fx.GraphModule, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """Run the pass alone and return the reasons of its changes."""
    result = emulate_low_products(gm, Policy(dtype=dtype))
    gm.graph.lint()
    gm.recompile()
    return reasons(result)


def test_operands_are_widened_and_the_result_is_rounded() -> None:
    gm = lowered(torch.bfloat16, torch.randn(3, 4), torch.randn(4, 5))
    assert emulate(gm) == ["emulated"]
    lines = [line.split(": ", 1)[1] for line in text(gm).splitlines()[2:-1]]
    assert [line.split(" = ")[0] for line in lines] == [
        "bf16[4, 5]",
        "f32[4, 5]",
        "bf16[3, 4]",
        "f32[3, 4]",
        "f32[3, 5]",  # the product
        "bf16[3, 5]",
        "f32[3, 5]",
    ]
    assert operand_dtypes(call(gm, "mm")) == {torch.float32}


@pytest.mark.parametrize("dtype", LOW)
def test_it_is_the_exact_product_of_rounded_values_rounded_once(dtype: torch.dtype) -> None:
    # Small integers times powers of two: fp32 sums of their products are exact, whatever the order.
    x, w = torch.randint(-8, 9, (5, 7)) * 0.25 + 2.0**-12, torch.randint(-8, 9, (7, 6)) * 0.5
    gm = lowered(dtype, x, w)
    emulate(gm, dtype)
    exact = (x.to(dtype).double() @ w.to(dtype).double()).to(dtype).float()
    assert torch.equal(run_flat(gm, x, w)[0], exact)


def test_an_fp16_product_overflows_as_an_fp16_matmul_does() -> None:
    x, w = torch.full((2, 4), 200.0), torch.full((4, 3), 100.0)
    w[:, 1] = 50.0
    gm = lowered(torch.float16, x, w)
    emulate(gm, torch.float16)
    assert run_flat(gm, x, w)[0].tolist() == [[float("inf"), 40000.0, float("inf")]] * 2


def test_an_operand_of_two_products_is_widened_once() -> None:
    gm = trace(lambda x, v, w: (x @ v, x @ w), torch.randn(3, 4), torch.randn(4, 5), torch.randn(4, 6))
    run_passes(gm, Policy())
    emulate(gm)
    first, second = calls(gm, "mm")
    assert first.args[0] is second.args[0]


def test_operations_in_fp32_and_unlisted_ones_are_left_alone() -> None:
    gm = trace(lambda x, w: (x @ w).softmax(-1), torch.randn(3, 4), torch.randn(4, 5))
    before = text(gm)
    assert emulate(gm) == []
    assert text(gm) == before


def test_running_it_again_changes_nothing() -> None:
    gm = lowered(torch.bfloat16, torch.randn(3, 4), torch.randn(4, 5))
    emulate(gm)
    before = text(gm)
    assert emulate(gm) == []
    assert text(gm) == before


def test_backward_of_convolution_and_attention() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        h = F.conv1d(x, w, padding=1)[:, None]
        return F.scaled_dot_product_attention(h, h, h)

    gm = joint(model, torch.randn(2, 4, 8, requires_grad=True), torch.randn(4, 4, 3, requires_grad=True))
    run_passes(gm, Policy())
    before = layouts(gm)
    assert len(emulate(gm)) == 4
    names = ("convolution", "convolution_backward", "_scaled_dot_product_flash_attention_for_cpu")
    for name in names:
        assert torch.bfloat16 not in operand_dtypes(call(gm, name)), name
    assert layouts(gm) == before
    assert {dtype for node in calls(gm) for dtype in dtypes(gm)[node.name]} >= {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    ("rows", "along", "emulated"), [(1, True, False), (2, True, True), (1, False, True)], ids=["row", "rows", "across"]
)
def test_the_product_of_one_row_with_what_lies_along_it_keeps_its_low_kernel(
    dtype: torch.dtype, rows: int, along: bool, emulated: bool
) -> None:
    x, b = torch.randn(rows, 64), torch.randn(32)
    w = torch.randn(32, 64).t() if along else torch.randn(64, 32)
    gm = trace(torch.addmm, b, x, w)
    run_passes(gm, Policy(dtype=dtype))
    assert emulate(gm, dtype) == (["emulated"] if emulated else [])
    product = call(gm, "addmm")
    assert operand_dtypes(product) == {torch.float32 if emulated else dtype}
    # Whichever kernel it is: rounded operands, a sum in fp32, and one rounding of the result.
    low = [value.to(dtype).double() for value in (b, x, w)]
    exact, size = torch.addmm(*low), torch.addmm(*(value.abs() for value in low))
    unit = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11
    result = run_flat(gm, b, x, w)[0].double()
    assert ((result - exact).abs() <= unit * exact.abs() + 65 * 2.0**-24 * size).all()


def test_a_dynamic_number_of_rows_is_emulated() -> None:
    gm = make_fx(lambda x, w: x @ w.t(), tracing_mode="symbolic")(torch.randn(3, 4), torch.randn(5, 4))
    run_passes(gm, Policy())
    assert emulate(gm) == ["emulated"]


@pytest.mark.inductor
def test_compiled_code_really_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_pass, "has_native_bf16", lambda _: False)
    model, x = nn.Linear(16, 32, bias=False), torch.randn(200, 16)
    compiled = torch.compile(model, backend="mixprec", options={"dtype": "bf16"})
    y = compiled(x)
    y.sum().backward()
    assert y.dtype is torch.float32
    assert torch.equal(y, y.bfloat16().float())  # the product was rounded to bf16
    rounded = x.bfloat16().double() @ model.weight.detach().bfloat16().double().t()
    # One rounding of the result, and the fp32 sum of 16 products before it.
    bound = (2**-8 + 16 * 2**-24) * (x.bfloat16().double().abs() @ model.weight.detach().double().abs().t() * 1.01)
    assert ((y.double() - rounded).abs() <= bound).all()
    # The gradient of the weight leaves as it was accumulated in fp32: a sum of 200 rounded values.
    gradient = x.bfloat16().double().sum(0).expand_as(model.weight)
    bound = 200 * 2**-24 * x.bfloat16().double().abs().sum(0)
    assert ((model.weight.grad.double() - gradient).abs() <= bound).all()
    assert not torch.equal(model.weight.grad, model.weight.grad.bfloat16().float())
