"""Hand a prepared Dynamo graph to AOTAutograd with the precision passes in its pipeline.

Three ways on: Inductor, AOTAutograd without code generation, and node by node. All run ``JointPass`` on the joint
graph, before partitioning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
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
from torch._inductor.decomposition import select_decomp_table

from mpcompile.joint_pass import EmulationPass, JointPass, is_on_cpu

Compiled = Callable[..., Any]
Execute = Callable[[fx.GraphModule, Any], Compiled]
"""Makes what runs one of AOTAutograd's graphs, from the graph and example inputs."""


def mode_settings(mode: str | None) -> dict[str, Any]:
    """Inductor's settings behind ``torch.compile(mode=...)``."""
    return {} if mode is None else dict(torch._inductor.list_mode_options(mode))


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], joint: JointPass, settings: Mapping[str, Any]
) -> Compiled:
    """Compile through Inductor; ``settings`` are Inductor's own configuration."""
    hook = "joint_custom_post_pass" if joint.runs_after_patterns(inputs) else "joint_custom_pre_pass"
    own: dict[str, Any] = {hook: joint}
    if is_on_cpu(inputs) and any("flex_attention" in str(node.target) for node in gm.graph.nodes):
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


def run_node_by_node(graph: fx.GraphModule, _: Any) -> Compiled:
    """The plain reference execution: FX's interpreter."""
    return fx.Interpreter(graph).run


def compile_with_reference(
    gm: fx.GraphModule, inputs: Sequence[Any], joint: JointPass, execute: Execute = run_node_by_node
) -> Compiled:
    """Execute the rewritten graph node by node, by ``execute``: nothing is recomputed, every cast rounds."""
    return _compile_with_aot(gm, inputs, joint, default_partition, execute)


def _compile_with_aot(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    joint: JointPass,
    partition: Callable[..., Any],
    execute: Execute,
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
