"""Casts between floating types in one step, and the bytes they read and write where they stand alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd  # how a backend is made of AOTAutograd: there is no public way
from torch._functorch.partitioners import default_partition
from torch.utils._python_dispatch import TorchDispatchMode

import mpcompile
from benchmarks.peers import EAGER, MIXPREC, Candidate

Casts = tuple[int, int]
"""How many, and their bytes."""


def count_casts(candidate: Candidate) -> Casts:
    """Casts of one forward and backward.

    mixprec: what its passes put in, from its report. Compiled peers: what the traced graph of forward and backward
    holds before Inductor fuses. Eager: what runs.
    """
    if candidate.peer.name == MIXPREC:
        casts = [cast for report in mpcompile.reports(candidate.forward) for cast in report.casts]
        return len(casts), sum(cast.bytes or 0 for cast in casts)
    counter = _in_eager if candidate.peer.name == EAGER else _in_graph
    return counter(candidate)


class _CastCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and _changes_float(args[0], result):
            self.found.append(args[0].nbytes + result.nbytes)
        return result


def _in_eager(candidate: Candidate) -> Casts:
    with _CastCounter() as counter:
        result = candidate.run_forward()
        if candidate.workload.training:
            result.backward()
    candidate.model.zero_grad()
    return len(counter.found), sum(counter.found)


def _in_graph(candidate: Candidate) -> Casts:
    found: list[int] = []

    def look(gm: fx.GraphModule, *_: Any, **__: Any) -> Any:
        for node in gm.graph.nodes:
            if node.op == "call_function" and node.target is torch.ops.aten._to_copy.default:
                source, result = node.args[0].meta["val"], node.meta["val"]
                if _changes_float(source, result):
                    found.append(source.nbytes + result.nbytes)
        return gm

    def partition(gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        look(gm)
        return default_partition(gm, joint_inputs, **kwargs)

    def keep(gm: fx.GraphModule, _: Sequence[Any]) -> Any:
        return gm

    backend = aot_autograd(fw_compiler=keep, inference_compiler=look, partition_fn=partition)
    Candidate(
        candidate.peer,
        candidate.workload,
        candidate.model,
        torch.compile(candidate.model, backend=backend),
        candidate.inputs,
    ).run_forward()
    return len(found), sum(found)


def _changes_float(source: Tensor, result: Tensor) -> bool:
    return source.is_floating_point() and result.is_floating_point() and source.dtype != result.dtype
