"""Attention: its operands are narrowed before torch chooses a kernel; masks and the user's wishes survive."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention

import mpcompile
from mpcompile.inspection.report import NodeRecord
from mpcompile.passes import Policy
from mpcompile.passes.intent import Scope, read_intent
from mpcompile.passes.kernels import lower_kernels
from tests.helpers import UNIT_ROUNDOFF
from tests.test_programs import mixprec

BF16 = torch.bfloat16
LEAST = torch.finfo(torch.float32).min
SHAPE = (2, 3, 8, 16)
BOUND = 4 * UNIT_ROUNDOFF[BF16]
"""Of values up to 1: v is rounded, the weights inside the kernel are, the result is, and q and k move the weights."""


def positional(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask)


def keyword(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=mask)


def mixed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, value=v, attn_mask=mask)


SPELLINGS = [positional, keyword, mixed]


def qkv(requires_grad: bool = True) -> list[Tensor]:
    return [torch.empty(SHAPE).uniform_(-1, 1).requires_grad_(requires_grad) for _ in range(3)]


def attention(compiled: Any) -> list[NodeRecord]:
    """The attention calls of the only graph, forward first."""
    (report,) = mpcompile.reports(compiled)
    return [node for node in report.nodes if "scaled_dot_product" in node.op]


def exact(inputs: list[Tensor], mask: Tensor | None = None) -> Tensor:
    q, k, v = (x.detach().double() for x in inputs)
    if mask is not None and mask.is_floating_point():
        mask = mask.double()
    return F.scaled_dot_product_attention(q, k, v, mask)


def largest_error(found: Tensor, truth: Tensor) -> float:
    return float((found.detach().double() - truth).abs().max())


@pytest.mark.parametrize("call", SPELLINGS)
def test_operands_are_narrowed_and_the_result_is_fp32_again(call: Callable[..., Tensor]) -> None:
    inputs, compiled = qkv(), mixprec(call)
    output = compiled(*inputs)
    output.sum().backward()
    forward, backward = attention(compiled)
    assert forward.inputs == ("bfloat16",) * 3
    assert backward.inputs[:4] == ("bfloat16",) * 4
    assert output.dtype is torch.float32
    assert [x.grad.dtype for x in inputs if x.grad is not None] == [torch.float32] * 3
    assert largest_error(output, exact(inputs)) < BOUND


@pytest.mark.parametrize("call", SPELLINGS)
def test_a_float_mask_stays_fp32_on_a_cpu(call: Callable[..., Tensor]) -> None:
    inputs, mask, compiled = qkv(), torch.randn(SHAPE[0], 1, 8, 8), mixprec(call)
    output = compiled(*inputs, mask)
    assert attention(compiled)[0].inputs == ("bfloat16",) * 3 + ("float32",)
    assert largest_error(output, exact(inputs, mask)) < BOUND


@pytest.mark.parametrize("call", SPELLINGS)
def test_a_row_masked_with_the_least_float_is_the_mean_as_in_fp32(call: Callable[..., Tensor]) -> None:
    mask = torch.zeros(1, 1, 8, 8)
    mask[:, :, 3] = LEAST
    inputs = qkv()
    output = mixprec(call)(*inputs, mask)
    mean = inputs[2].detach().double().mean(-2)
    assert float(mean.abs().max()) > 2 * BOUND  # zeros would not pass for it
    assert largest_error(output[:, :, 3], mean) < BOUND
    assert largest_error(output, exact(inputs, mask)) < BOUND


def test_a_boolean_mask_is_kept() -> None:
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    inputs, compiled = qkv(), mixprec(positional)
    output = compiled(*inputs, mask)
    assert attention(compiled)[0].inputs[:3] == ("bfloat16",) * 3
    assert largest_error(output, exact(inputs, mask)) < BOUND


def test_a_causal_attention_hides_the_future() -> None:
    inputs = qkv(False)

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    compiled = mixprec(causal)
    first = compiled(*inputs)
    inputs[2][:, :, 5:] += 1
    assert torch.equal(compiled(*inputs)[:, :, :5], first[:, :, :5])


def test_inside_an_island_attention_stays_fp32() -> None:
    def island(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.scaled_dot_product_attention(q, k, v)

    inputs, compiled = qkv(), mixprec(island)
    compiled(*inputs).sum().backward()
    forward, backward = attention(compiled)
    assert set(forward.inputs) == set(backward.inputs) == {"float32"}
    assert (forward.rule, forward.reason) == ("user", "inside autocast(enabled=False)")


def test_fp64_attention_is_left_alone() -> None:
    inputs, compiled = [x.double() for x in qkv(False)], mixprec(positional)
    assert torch.equal(compiled(*inputs), positional(*inputs))
    assert "bfloat16" not in attention(compiled)[0].inputs


def test_operands_in_the_other_16_bit_type_are_left_alone() -> None:
    compiled = mixprec(positional)
    output = compiled(*(x.half() for x in qkv(False)))
    assert output.dtype is torch.float16
    assert attention(compiled)[0].inputs[:3] == ("float16",) * 3


def test_flex_attention_reads_low_operands_under_no_grad() -> None:
    scale = nn.Parameter(torch.ones(SHAPE[-1]))

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q * scale, k, v, score_mod=lambda s, b, h, i, j: s + (i - j) * 0.1)

    inputs, compiled = qkv(False), mixprec(forward)
    with torch.no_grad():
        output = compiled(*inputs)
    (node,) = (node for node in mpcompile.reports(compiled)[0].nodes if "flex_attention" in node.op)
    assert node.inputs[:3] == ("bfloat16",) * 3
    assert output.dtype is torch.float32
    positions = torch.arange(8.0)
    assert largest_error(output, exact(inputs, (positions[:, None] - positions) * 0.1)) < BOUND


def captured(call: Callable[..., Tensor], *inputs: Tensor) -> fx.GraphModule:
    """The torch-level graph of a function."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch.compile(call, backend=backend)(*inputs)
    return graphs[0]


def test_the_account_names_the_call() -> None:
    gm = captured(positional, *qkv())
    read_intent(gm, Policy(), Scope(), {})
    (change,) = lower_kernels(gm, Policy()).changes
    assert (change.op, change.before, change.after) == ("scaled_dot_product_attention", "float32", "bfloat16")
    assert change.reason == "kernel is chosen by dtype"


def test_a_second_run_changes_nothing() -> None:
    gm = captured(positional, *qkv())
    assert lower_kernels(gm, Policy()).changed
    assert not lower_kernels(gm, Policy()).changed


def test_the_fp32_policy_changes_nothing() -> None:
    gm = captured(positional, *qkv())
    assert not lower_kernels(gm, Policy(dtype=torch.float32)).changed


def on_gpu(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with its recorded values on a GPU, where a mask must be of the operands' dtype."""
    mode = FakeTensorMode()
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, Tensor):
            with mode:
                node.meta["example_value"] = torch.empty(value.shape, dtype=value.dtype, device="cuda")
    return gm


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("call", SPELLINGS)
def test_a_mask_that_must_be_narrowed_is_clamped_first(call: Callable[..., Tensor], low: torch.dtype) -> None:
    mask = torch.tensor([0.0, -1.5, -torch.inf, LEAST, -1e30, torch.inf, -70000.0, 3.0]).expand(8, 8).contiguous()
    gm = on_gpu(captured(call, *qkv(False), mask))
    lower_kernels(gm, Policy(dtype=low))
    (attend,) = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    seen: list[Tensor] = []

    def record(*args: Tensor, **kwargs: Tensor) -> Tensor:
        seen.append(kwargs["attn_mask"] if "attn_mask" in kwargs else args[3])
        return seen[0]

    attend.target = record
    inputs = {"q": mask, "k": mask, "v": mask, "mask": mask}
    names = [node.name.strip("_").removeprefix("l_") for node in gm.graph.find_nodes(op="placeholder")]
    fx.Interpreter(gm).run(*(inputs[name] for name in names))
    (narrowed,) = seen
    assert narrowed.dtype is low
    assert torch.equal(narrowed.isinf(), mask.isinf())
    truth = mask.clamp(min=torch.finfo(low).min).where(mask.isfinite(), mask).to(low)
    assert torch.equal(narrowed, truth)


def test_a_mask_that_needs_a_gradient_stays_fp32() -> None:
    bias = nn.Parameter(torch.randn(8, 8))
    compiled = mixprec(positional)
    compiled(*qkv(), bias).sum().backward()
    assert bias.grad is not None
    assert bias.grad.dtype is torch.float32
    assert bool(bias.grad.any())
