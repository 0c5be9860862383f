"""Measure one training step of a model under several ways of compiling it, interleaved in one process."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.workloads import Workload


@dataclass(frozen=True)
class Peer:
    """One way of compiling a model and running it."""

    name: str
    compile: Callable[[nn.Module], nn.Module]
    context: Callable[[], AbstractContextManager[object]] = nullcontext


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def peers(dtype: str) -> list[Peer]:
    """mixprec, autocast and fp32, all through Inductor; ``dtype``: ``"bf16"`` or ``"fp16"``."""
    return [
        Peer("mixprec", lambda model: torch.compile(model, backend="mixprec", options={"dtype": dtype})),
        Peer("autocast", torch.compile, lambda: torch.autocast("cpu", DTYPES[dtype])),
        Peer("fp32", torch.compile),
    ]


@dataclass(frozen=True)
class Measurement:
    """What one peer needs for one step of one workload."""

    step_ms: float
    """Median wall time of forward and backward, milliseconds."""
    saved_bytes: int
    """Activations kept between forward and backward, parameters and inputs of the step apart."""
    gradient_error: float
    """Relative error of the gradient of all parameters together, against fp64."""
    compile_s: float
    """Wall time of the first step, seconds, caches as they were."""


def measure(workload: Workload, peers: list[Peer], rounds: int) -> dict[str, Measurement]:
    """Measure ``peers`` on the same weights and inputs, ``rounds`` interleaved steps each."""
    torch.manual_seed(0)
    model, inputs = workload.model(), workload.inputs()
    truth = gradient(copy.deepcopy(model).double(), tuple(map(_double, inputs)))
    models = {peer.name: copy.deepcopy(model) for peer in peers}
    compiled: dict[str, nn.Module] = {}
    times: dict[str, list[float]] = {peer.name: [] for peer in peers}
    first, errors, saved = {}, {}, {}
    for peer in peers:
        compiled[peer.name] = peer.compile(models[peer.name])
        first[peer.name] = _timed(compiled[peer.name], peer, inputs)
    for peer in peers:
        with peer.context():
            errors[peer.name] = relative_error(gradient(compiled[peer.name], inputs), truth)
        saved[peer.name] = saved_bytes(compiled[peer.name], peer, inputs)
    for _ in range(rounds):
        for peer in peers:
            times[peer.name].append(_timed(compiled[peer.name], peer, inputs))
    return {
        name: Measurement(statistics.median(times[name]) * 1e3, saved[name], errors[name], first[name])
        for name in times
    }


def gradient(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """The gradient of the model's scalar output, all parameters in one fp64 vector."""
    model.zero_grad()
    model(*inputs).backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    return ((found - truth).norm() / truth.norm()).item()


def saved_bytes(model: nn.Module, peer: Peer, inputs: tuple[Tensor, ...]) -> int:
    """Bytes of the distinct tensors kept for backward that are neither parameters nor inputs."""
    known = {t.data_ptr() for t in (*model.parameters(), *model.buffers(), *inputs)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in known:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), peer.context():
        loss = model(*inputs)
    total = sum(kept.values())
    loss.backward()
    return total


def _timed(model: nn.Module, peer: Peer, inputs: tuple[Tensor, ...]) -> float:
    model.zero_grad()
    start = time.perf_counter()
    with peer.context():
        loss = model(*inputs)
    loss.backward()
    return time.perf_counter() - start


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value
