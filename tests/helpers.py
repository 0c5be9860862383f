"""Models and graphs to test on, and what the tests read off them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import default_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from mpcompile.execution.scaled_graph import make_probe
from mpcompile.graph_inputs import GraphInputs
from mpcompile.inspection.text import graph_text
from mpcompile.loss_scaling import LossScaling
from mpcompile.passes import PassResult, Policy, run_passes
from mpcompile.passes.graph import CAST, DECOMPOSED, is_backward, is_cast, op_name, packet_name
from mpcompile.torch_compat import fork, parameters_of

UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


def trace(fn: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    """The forward graph of a function, as ``make_fx`` records it on fake tensors."""
    return make_fx(fn, tracing_mode="fake")(*inputs)


def joint(
    model: Callable[..., Any], *inputs: Any, dynamic: bool = False, scaled: bool = False, low: torch.dtype | None = None
) -> fx.GraphModule:
    """The joint forward and backward graph of a model, decomposed, its inputs marked as by the backend.

    ``scaled``: with the inputs for loss scaling, the scale and the probe, after the model's own.
    """
    captured: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        gm = fork(gm)
        marks = GraphInputs.of(gm, example_inputs, parameters_of(gm, {}), low or torch.bfloat16, scaled)
        scaling = LossScaling.attach(gm, marks, torch.device("cpu"), None)

        def partition(graph: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            marks.mark(graph)
            captured.append(graph)
            return default_partition(graph, joint_inputs, **kwargs)

        compiler = aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )
        compiled = compiler(gm, [*example_inputs, *scaling.state])
        state = [torch.tensor(1.0), make_probe(len(marks.slots), torch.device("cpu"))] if scaling.state else []
        return lambda *args: compiled(*args, *state)

    torch.compile(model, backend=backend, dynamic=dynamic)(*inputs)
    (graph,) = captured
    graph.meta[DECOMPOSED] = True
    return graph


def exported(model: torch.nn.Module, *inputs: Any) -> fx.GraphModule:
    """The forward graph of a model, as ``torch.export`` records and decomposes it."""
    with warnings.catch_warnings():
        # torch.export copies its own pytree specs in a way that its own code deprecates.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated", category=FutureWarning)
        return torch.export.export(model, inputs).run_decompositions().graph_module


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors of a result, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def run_flat(gm: fx.GraphModule, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Run a graph node by node on its flat inputs."""
    return flat(fx.Interpreter(gm).run(*inputs, enable_io_processing=False))


def calls(gm: fx.GraphModule, name: str | None = None) -> list[fx.Node]:
    """The operator calls of a graph, or those of one operator (``"mm"``)."""
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    return [node for node in nodes if name is None or packet_name(node.target) == name]


def call(gm: fx.GraphModule, name: str) -> fx.Node:
    """The only call of an operator in a graph."""
    (node,) = calls(gm, name)
    return node


def ops(gm: fx.GraphModule) -> list[str]:
    """The operators a graph calls, in order: ``["aten.mm.default", ...]``."""
    return [op_name(node) for node in calls(gm)]


def dtypes(gm: fx.GraphModule) -> dict[str, list[torch.dtype]]:
    """The dtypes of the tensors each node stands for."""
    return {node.name: [v.dtype for v in flat(node.meta.get("val"))] for node in gm.graph.nodes}


def operand_dtypes(node: fx.Node) -> set[torch.dtype]:
    """The dtypes of the tensors an operator call reads."""
    return {v.dtype for source in node.all_input_nodes for v in flat(source.meta.get("val"))}


def text(gm: fx.GraphModule) -> str:
    """The graph as text, one line per node."""
    return graph_text(gm)


def inserted_casts(gm: fx.GraphModule, dtype: torch.dtype | None = None) -> list[fx.Node]:
    """The casts the passes put in, or those to one dtype."""
    casts = [node for node in calls(gm) if CAST in node.meta]
    return [node for node in casts if dtype in (None, node.meta["val"].dtype)]


def count_casts(gm: fx.GraphModule) -> Counter[tuple[str, torch.dtype, bool]]:
    """How often each value is cast to each dtype, in forward and in backward."""
    return Counter(
        (node.args[0].name, node.meta["val"].dtype, is_backward(node)) for node in calls(gm) if is_cast(node)
    )


def layouts(gm: fx.GraphModule) -> list[tuple[torch.dtype, tuple[Any, ...], tuple[Any, ...]]]:
    """Dtype, shape and strides of every output."""
    (output,) = gm.graph.find_nodes(op="output")
    values = flat([leaf.meta.get("val") for leaf in tree_leaves(output.args[0]) if leaf is not None])
    return [(v.dtype, tuple(v.shape), v.stride()) for v in values]


def reasons(results: Sequence[PassResult] | PassResult) -> list[str]:
    """The reasons of all changes."""
    results = [results] if isinstance(results, PassResult) else results
    return [change.reason for result in results for change in result.changes]


def stored(gm: fx.GraphModule, policy: Policy) -> PassResult:
    """What ``store_low`` changes when all passes run over a graph."""
    return next(result for result in run_passes(gm, policy) if result.name == "store_low")


def double(value: Any) -> Any:
    """The same values with every floating-point tensor in fp64."""
    return tree_map(lambda v: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v, value)


def relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the error over the norm of the truth, in fp64."""
    found, truth = found.detach().double(), truth.detach().double()
    return float((found - truth).norm() / truth.norm().clamp_min(1e-30))


def matmul_bound(
    first: torch.Tensor,
    second: torch.Tensor,
    low: torch.dtype,
    out: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Largest error of a low matmul with fp32 accumulation: two rounded operands, a sum, a rounded result."""
    depth = first.shape[-1]
    u_low, u_out = UNIT_ROUNDOFF[low], UNIT_ROUNDOFF[out]
    scale = first.double().abs() @ second.double().abs()
    return (2 * u_low + u_out + depth * 2.0**-24) * scale * (1 + 2 * u_low) + 1e-9


def run_joint(gm: fx.GraphModule, inputs: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Outputs and gradients of a joint graph."""
    leaves, _ = tree_flatten((list(inputs), list(tangents)))
    return run_flat(gm, *leaves)
