"""The precision passes as custom passes of Inductor: what they run on, and what they are cached by."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort

from mpcompile.device import has_native_bf16, has_native_fp16
from mpcompile.graph_inputs import GraphInputs
from mpcompile.inspection.recorder import Recorder
from mpcompile.inspection.snapshot import snapshot
from mpcompile.passes import Policy, run_passes
from mpcompile.passes.emulation import emulate_low_products
from mpcompile.passes.graph import DECOMPOSED, is_backward, subgraphs
from mpcompile.passes.op_classes import registered_ops
from mpcompile.passes.pipeline import AUTOCAST
from mpcompile.passes.wide_products import EMULATED
from mpcompile.torch_compat import elides_roundings


class JointPass(CustomGraphPass):
    """The precision passes, as the custom pass that Inductor runs on every joint graph of one Dynamo graph."""

    def __init__(
        self,
        policy: Policy,
        recorder: Recorder,
        key: tuple[str, ...],
        inputs: GraphInputs,
        pinned: bool,
    ) -> None:
        self.policy = policy
        self._recorder = recorder
        self._key = key
        self._inputs = inputs
        self._pinned = pinned

    def __call__(self, graph: fx.Graph) -> None:
        gm = graph.owning_module
        assert gm is not None
        stable_topological_sort(graph)  # Inductor's patterns leave the graph unsorted until their last pass
        _mark_decomposed(gm)
        _mark_backward(graph)
        if self.needs_emulation([node.meta.get("val") for node in graph.find_nodes(op="placeholder")]):
            _mark_emulated(gm)
        self._inputs.mark(gm)
        if self.policy.preset == "torch":
            gm.meta[AUTOCAST] = True  # the backend traced it so
        before = snapshot(gm)
        self._recorder.add(before, gm, run_passes(gm, self.policy))

    def runs_after_patterns(self, inputs: Sequence[Any]) -> bool:
        """Whether to run after Inductor's joint-graph patterns instead of before them.

        After: attention that a model writes out is recognised in fp32 and fused, and the fused kernel runs low.
        Before: on accelerators, where padding of matmuls must see the final dtypes and a fused fp32 attention would
        be a kernel without a low form; and where a matmul or softmax is kept in fp32, since fusing loses the mark.
        """
        return is_on_cpu(inputs) and not self._pinned

    def needs_emulation(self, inputs: Sequence[Any]) -> bool:
        """Whether low products must be computed in fp32 kernels: on a CPU without instructions for the low type."""
        return emulates(self.policy, inputs)

    def uuid(self) -> tuple[Any, ...]:
        """The cache key: node metadata is in no cache key of torch, so the resolved decisions must be in this one."""
        return (
            "mpcompile",
            _source_hash(),
            self.policy.digest,
            registered_ops(),
            *self._key,
            *self._inputs.key(),
            *_reduced_precision_flags(),
        )


class EmulationPass(CustomGraphPass):
    """``emulate_low_products``, as the custom pass that Inductor runs on each graph after partitioning."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def __call__(self, graph: fx.Graph) -> None:
        gm = graph.owning_module
        assert gm is not None
        _mark_decomposed(gm)
        emulate_low_products(gm, self._policy, elides_roundings=elides_roundings())

    def uuid(self) -> tuple[str, ...]:
        """The cache key: the pass is a function of its source and the policy."""
        return ("mpcompile emulation", _source_hash(), self._policy.digest)


def _mark_decomposed(gm: fx.GraphModule) -> None:
    gm.meta[DECOMPOSED] = True
    for _, child in subgraphs(gm):
        _mark_decomposed(child)


def _mark_emulated(gm: fx.GraphModule) -> None:
    gm.meta[EMULATED] = True
    for _, child in subgraphs(gm):
        _mark_emulated(child)


def emulates(policy: Policy, inputs: Sequence[Any]) -> bool:
    """Whether a graph with these inputs runs on a CPU without instructions for the low type of ``policy``."""
    native = has_native_fp16 if policy.dtype is torch.float16 else has_native_bf16
    return not policy.is_fp32 and is_on_cpu(inputs) and not native(torch.device("cpu"))


def is_on_cpu(inputs: Sequence[Any]) -> bool:
    """Whether every tensor among the inputs of a graph is on a CPU."""
    return all(value.device.type == "cpu" for value in inputs if isinstance(value, torch.Tensor))


def _mark_backward(graph: fx.Graph) -> None:
    """Mark what depends on a gradient: autograd does not tag the backward of a custom ``autograd.Function``."""
    for node in graph.nodes:
        if node.op != "output" and any(map(is_backward, node.all_input_nodes)):
            node.meta["autograd_backward"] = True
    gm = graph.owning_module
    for name, body in subgraphs(gm) if gm is not None else ():
        readers = [node for node in graph.find_nodes(op="get_attr") if node.target == name]
        if any(is_backward(call) for node in readers for call in node.users):
            _mark_body(body)


def _mark_body(gm: fx.GraphModule) -> None:
    """Mark what the body of a higher-order op that backward calls computes; its inputs do not make it a joint graph."""
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.meta["autograd_backward"] = True
    for _, body in subgraphs(gm):
        _mark_body(body)


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
    # Not torch.get_float32_matmul_precision(), which raises where one of these was set by itself.
    fp32 = (matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    return (
        f"bf16_reduction={matmul.allow_bf16_reduced_precision_reduction}",
        f"fp16_reduction={matmul.allow_fp16_reduced_precision_reduction}",
        f"fp16_accumulation={matmul.allow_fp16_accumulation}",
        f"fp32={[backend.fp32_precision for backend in fp32]}",
    )
