"""Joint graphs with a loss scale: how the tests of scaling make, run and read them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from mpcompile.joint_pass import _mark_backward
from mpcompile.passes import PassResult, Policy, run_passes
from mpcompile.passes.scaling import SCALING, ScalingSite, insert_loss_scaling
from tests.helpers import joint

FP16 = Policy(dtype=torch.float16)
# Powers of two round nothing: with them, gradients have the same bits as without.
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
