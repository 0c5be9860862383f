"""Hand a prepared Dynamo graph to AOTAutograd with the precision passes in its pipeline.

Three ways on: Inductor, AOTAutograd without code generation, and node by node. All run ``JointPass`` on the joint
graph, before partitioning. Besides ``torch_compat`` the only module that calls private torch functions.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._inductor.lowering  # the decomposition table needs it loaded (max_pool2d)
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import (
    default_partition,
    min_cut_rematerialization_partition,
)
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.pattern_matcher import stable_topological_sort

from mpcompile.device import has_native_bf16, has_native_fp16
from mpcompile.inspection.recorder import Recorder, snapshot
from mpcompile.passes import Policy, run_passes
from mpcompile.passes.emulation import emulate_low_products
from mpcompile.passes.graph import DECOMPOSED, PARAMETER, is_backward, subgraphs
from mpcompile.passes.op_classes import registered_ops
from mpcompile.torch_compat import input_index

Compiled = Callable[..., Any]


class JointPass(CustomGraphPass):
    """The precision passes, as the custom pass that Inductor runs on every joint graph of one Dynamo graph."""

    def __init__(
        self,
        policy: Policy,
        recorder: Recorder,
        key: tuple[str, ...],
        parameters: Mapping[int, str],
        pinned: bool,
    ) -> None:
        self.policy = policy
        self._recorder = recorder
        self._key = key
        self._parameters = parameters
        self._pinned = pinned

    def __call__(self, graph: fx.Graph) -> None:
        gm = graph.owning_module
        assert gm is not None
        stable_topological_sort(graph)  # Inductor's patterns leave the graph unsorted until their last pass
        _mark_decomposed(gm)
        _mark_backward(graph)
        self._name_parameters(graph)
        before = snapshot(gm)
        self._recorder.add(before, gm, run_passes(gm, self.policy))

    def runs_after_patterns(self, inputs: Sequence[Any]) -> bool:
        """Whether to run after Inductor's joint-graph patterns instead of before them.

        After: attention that a model writes out is recognised in fp32 and fused, and the fused kernel runs low.
        Before: on accelerators, where padding of matmuls must see the final dtypes and a fused fp32 attention would
        be a kernel without a low form; and where a matmul or softmax is kept in fp32, since fusing loses the mark.
        """
        return _is_on_cpu(inputs) and not self._pinned

    def needs_emulation(self, inputs: Sequence[Any]) -> bool:
        """Whether low products must be computed in fp32 kernels: on a CPU without instructions for the low type."""
        native = has_native_fp16 if self.policy.dtype is torch.float16 else has_native_bf16
        return not self.policy.is_fp32 and _is_on_cpu(inputs) and not native(torch.device("cpu"))

    def uuid(self) -> tuple[Any, ...]:
        """The cache key: node metadata is in no cache key of torch, so the resolved decisions must be in this one."""
        return (
            "mpcompile",
            _source_hash(),
            repr(self.policy),
            registered_ops(),
            *self._key,
            *map(str, sorted(self._parameters.items())),
            *_reduced_precision_flags(),
        )

    def _name_parameters(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="placeholder"):
            name = self._parameters.get(input_index(node))  # type: ignore[arg-type]
            if name is not None:
                node.meta[PARAMETER] = name


class EmulationPass(CustomGraphPass):
    """``emulate_low_products``, as the custom pass that Inductor runs on each graph after partitioning."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def __call__(self, graph: fx.Graph) -> None:
        gm = graph.owning_module
        assert gm is not None
        _mark_decomposed(gm)
        emulate_low_products(gm, self._policy)

    def uuid(self) -> tuple[str, ...]:
        """The cache key: the pass is a function of its source and the policy."""
        return ("mpcompile emulation", _source_hash(), repr(self._policy))


def _mark_decomposed(gm: fx.GraphModule) -> None:
    gm.meta[DECOMPOSED] = True
    for _, child in subgraphs(gm):
        _mark_decomposed(child)


def _is_on_cpu(inputs: Sequence[Any]) -> bool:
    return all(value.device.type == "cpu" for value in inputs if isinstance(value, torch.Tensor))


def _mark_backward(graph: fx.Graph) -> None:
    """Mark what depends on a gradient: autograd does not tag the backward of a custom ``autograd.Function``."""
    for node in graph.nodes:
        if node.op != "output" and any(map(is_backward, node.all_input_nodes)):
            node.meta["autograd_backward"] = True


@functools.cache
def _source_hash() -> str:
    """Hash of the package's source, so that an edited pass never meets code compiled by an older one."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _reduced_precision_flags() -> tuple[str, ...]:
    """The process's settings that change what a matmul accumulates in."""
    matmul = torch.backends.cuda.matmul
    return (
        f"bf16_reduction={matmul.allow_bf16_reduced_precision_reduction}",
        f"fp16_reduction={matmul.allow_fp16_reduced_precision_reduction}",
        f"fp16_accumulation={matmul.allow_fp16_accumulation}",
        f"fp32={torch.get_float32_matmul_precision()}",
    )


def mode_settings(mode: str | None) -> dict[str, Any]:
    """Inductor's settings behind ``torch.compile(mode=...)``."""
    return {} if mode is None else dict(torch._inductor.list_mode_options(mode))


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], joint: JointPass, settings: Mapping[str, Any]
) -> Compiled:
    """Compile through Inductor; ``settings`` are Inductor's own configuration."""
    hook = "joint_custom_post_pass" if joint.runs_after_patterns(inputs) else "joint_custom_pre_pass"
    own: dict[str, Any] = {hook: joint}
    if _is_on_cpu(inputs) and any("flex_attention" in str(node.target) for node in gm.graph.nodes):
        # Inductor's kernel for it on a CPU raises where an operation, such as a cast, is fused behind it.
        settings = {"epilogue_fusion": False, **settings}
    if joint.needs_emulation(inputs):
        own["post_grad_custom_pre_pass"] = EmulationPass(joint.policy)
        # Inductor drops a rounding inside a kernel unless told; emulated products are of rounded values.
        settings = {**settings, "emulate_precision_casts": True}
    if taken := own.keys() & settings.keys():
        raise ValueError(f"Inductor's {min(taken)} is where mixprec runs; it cannot be an option as well.")
    compiled: Compiled = compile_fx(gm, list(inputs), config_patches={**settings, **own})  # type: ignore[assignment]
    return compiled


def compile_with_aot_eager(gm: fx.GraphModule, inputs: Sequence[Any], joint: JointPass) -> Compiled:
    """Run the same passes and the same partitioner, and execute the two graphs without code generation."""
    partition = functools.partial(min_cut_rematerialization_partition, compiler="inductor")
    return _compile_with_aot(gm, inputs, joint, partition, lambda graph, _: graph.forward)


def compile_with_reference(gm: fx.GraphModule, inputs: Sequence[Any], joint: JointPass) -> Compiled:
    """Execute the rewritten graph node by node: nothing is recomputed, every cast rounds."""
    return _compile_with_aot(gm, inputs, joint, default_partition, lambda graph, _: fx.Interpreter(graph).run)


def _compile_with_aot(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    joint: JointPass,
    partition: Callable[..., Any],
    execute: Callable[[fx.GraphModule, Any], Compiled],
) -> Compiled:
    def rewrite_and_partition(graph: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        joint(graph.graph)
        graph.recompile()
        return partition(graph, joint_inputs, **kwargs)

    def infer(graph: fx.GraphModule, example_inputs: Any) -> Any:
        joint(graph.graph)
        graph.recompile()
        return make_boxed_func(execute(graph, example_inputs))

    def run(graph: fx.GraphModule, example_inputs: Any) -> Any:
        return make_boxed_func(execute(graph, example_inputs))

    compiled: Compiled = aot_autograd(
        fw_compiler=run,
        bw_compiler=run,
        inference_compiler=infer,
        partition_fn=rewrite_and_partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )(gm, list(inputs))
    return compiled
