"""Whole models train right, and a fault in a pass is seen.

Holds the measuring tools of the other whole-program tests: every program runs once in fp64, which is the truth,
and once compiled; the errors of its outputs, gradients and buffers must stay below a bound for bf16.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import mpcompile
from benchmarks.models import GPT, Bert, Llama, PreNormBlock, ResidualNet
from mpcompile.inspection.report import NodeRecord

BOUND = 0.02
"""Relative error allowed to a few bf16 layers: rounding to bf16 errs by up to 2^-9 = 0.002, and errors add up."""


def mixprec(model: Callable[..., Any], dynamic: bool | None = None, **options: Any) -> Any:
    """``model`` compiled with mixprec, in bf16 and without code generation unless ``options`` say otherwise."""
    options = {"dtype": "bf16", "compiler": "aot_eager", **options}
    return torch.compile(model, backend="mixprec", dynamic=dynamic, options=options)


def in_fp32(model: Callable[..., Any]) -> Any:
    """``model`` through the same compiler, in fp32: it draws the same dropout masks."""
    return mixprec(model, policy="fp32", dtype="auto")


def low_matmuls(compiled: Any) -> tuple[int, int]:
    """How many matmuls, convolutions and attentions read bf16, in forward and in backward."""
    return _count(node for node in matmuls(compiled) if "bfloat16" in node.inputs)


def fp32_matmuls(compiled: Any) -> tuple[int, int]:
    """How many read fp32 instead."""
    return _count(node for node in matmuls(compiled) if "bfloat16" not in node.inputs)


def matmuls(compiled: Any) -> list[NodeRecord]:
    """All of them, of all graphs."""
    return [node for report in mpcompile.reports(compiled) for node in report.matmuls()]


def _count(nodes: Iterator[NodeRecord]) -> tuple[int, int]:
    directions = [node.direction for node in nodes]
    return directions.count("forward"), directions.count("backward")


def error(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Relative error of ``found`` as one long vector."""
    assert len(found) == len(truth) > 0
    for one, other in zip(found, truth, strict=True):
        assert one.shape == other.shape
    difference = sum((a.double() - b.double()).square().sum() for a, b in zip(found, truth, strict=True))
    return float(difference.sqrt() / sum(b.double().square().sum() for b in truth).sqrt())


@dataclass(frozen=True)
class Step:
    """What one forward and backward left behind."""

    outputs: list[Tensor]
    gradients: list[Tensor]
    buffers: list[Tensor]


def step(call: Callable[..., Any], model: Any, inputs: Sequence[Any], seed: int = 0) -> Step:
    """Run ``call`` forward and backward under ``seed``; gradients are of inputs that need them, and of ``model``."""
    inputs = tree_map(_leaf, list(inputs))
    leaves = [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.requires_grad]
    is_module = isinstance(model, nn.Module)
    leaves += [p for p in model.parameters() if p.requires_grad] if is_module else []
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(seed)
    outputs = [x for x in tree_leaves(call(*inputs)) if isinstance(x, Tensor)]
    if leaves:
        sum(map(_projection, enumerate(outputs))).backward()
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    buffers = [b for b in model.buffers() if b.is_floating_point()] if is_module else []
    return Step([x.detach() for x in outputs], gradients, [b.clone() for b in buffers])


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def _projection(numbered: tuple[int, Tensor]) -> Tensor | int:
    """A random linear function of an output: every element matters, and no gradient is zero by symmetry."""
    index, output = numbered
    if not output.requires_grad:
        return 0
    generator = torch.Generator().manual_seed(index)
    weights = torch.randn(output.shape, dtype=torch.float64, generator=generator)
    return (output * weights.to(output.dtype)).sum()


def in_fp64(value: Any) -> Any:
    """A copy of a model, or of inputs, whose fp32 tensors are fp64."""
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).double()
    if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.bfloat16):
        return value.detach().double().requires_grad_(value.requires_grad)
    return value


def check(
    model: Callable[..., Any],
    *inputs: Any,
    low: tuple[int, int],
    bound: float = BOUND,
    truth: Callable[..., Any] | None = None,
    dynamic: bool | None = None,
    **options: Any,
) -> Any:
    """Compile ``model``, compare a forward and backward with fp64, count its low matmuls; returns the compiled model.

    ``truth`` is the model to run in fp64, for a model that asks for fp32 in its code.
    """
    exact_model = in_fp64(model if truth is None else truth)
    exact = step(exact_model, exact_model, tree_map(in_fp64, inputs))
    plain_model = copy.deepcopy(model)
    plain = step(plain_model, plain_model, inputs)
    compiled = mixprec(model, dynamic=dynamic, **options)
    mixed = step(compiled, model, inputs)
    assert_close(mixed, exact, bound)
    assert _kinds(mixed) == _kinds(plain)
    assert low_matmuls(compiled) == low
    assert_casts_are_shared(compiled)
    return compiled


def assert_casts_are_shared(compiled: Any) -> None:
    """No value is cast twice to one dtype, in forward or in backward."""
    for graph in (graph for report in mpcompile.reports(compiled) for graph in report.graphs):
        casts = [(cast.value, cast.after, cast.direction) for cast in graph.casts]
        assert len(casts) == len(set(casts))


def assert_close(mixed: Step, exact: Step, bound: float = BOUND) -> None:
    """Outputs, gradients and buffers are within ``bound`` of the exact ones, as far as there are any."""
    for found, truth in (
        (mixed.outputs, exact.outputs),
        (mixed.gradients, exact.gradients),
        (mixed.buffers, exact.buffers),
    ):
        assert len(found) == len(truth)
        assert not truth or error(found, truth) < bound


def _kinds(step: Step) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtypes and strides, which must be those of the uncompiled model."""
    return [(x.dtype, x.stride()) for x in (*step.outputs, *step.gradients, *step.buffers)]


def test_gpt() -> None:
    # Forward: qkv, attention, projection, up, down, head. Backward: two matmuls for each, one attention.
    compiled = check(GPT(32, 64, 1, 16), torch.randint(0, 32, (2, 16)), low=(6, 11))
    assert fp32_matmuls(compiled) == (0, 0)


def test_bert_with_attention_written_out() -> None:
    # The input needs no gradient, so the three matmuls that read it have one for backward instead of two.
    compiled = check(Bert(64, 1), torch.randn(2, 16, 64), low=(9, 15))
    assert fp32_matmuls(compiled) == (0, 0)


def test_llama() -> None:
    compiled = check(Llama(64, 1), torch.randn(2, 16, 64), low=(9, 17))
    # The rotary frequencies became a product; no matmul is left that could round them.
    assert fp32_matmuls(compiled) == (0, 0)


def test_residual_net() -> None:
    # A convolution has one node for backward; the stem's computes the weight's gradient alone.
    compiled = check(ResidualNet(8, 1), torch.randn(4, 3, 8, 8), low=(4, 5), bound=0.05)
    assert fp32_matmuls(compiled) == (0, 0)


def test_fp32_policy_changes_no_bit() -> None:
    model, ids = GPT(32, 64, 1, 16), torch.randint(0, 32, (2, 16))
    plain = torch.compile(model, backend="aot_eager_decomp_partition")
    one, other = step(plain, model, [ids]), step(in_fp32(model), model, [ids])
    assert all(map(torch.equal, one.outputs + one.gradients, other.outputs + other.gradients))


@pytest.mark.inductor
def test_transformer_block_through_inductor() -> None:
    model = PreNormBlock(32, 2)
    compiled = check(model, torch.randn(2, 8, 32, requires_grad=True), low=(5, 9), compiler="inductor")
    assert fp32_matmuls(compiled) == (0, 0)
