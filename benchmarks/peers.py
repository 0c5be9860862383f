"""What mixprec is measured against: each peer compiles its own copy of a workload's model and steps it its own way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workloads import Workload

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MIXPREC = "mixprec"
BASELINE = "compile+autocast"
"""The peer that ratios are taken against."""
EAGER = "eager autocast"
FP32 = "compile fp32"
LOW = "compile low"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One way of compiling a model and running it."""

    name: str
    compile: Callable[[nn.Module, Workload], Callable[..., Any]]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around every forward."""
    dtype: torch.dtype = torch.float32
    """Of parameters, buffers and inputs."""
    scaled: bool = False
    """Whether the training loop scales its loss with a ``GradScaler``."""

    def candidate(self, workload: Workload, model: nn.Module, inputs: tuple[Tensor, ...]) -> Candidate:
        """A copy of ``model`` (fp32), ready to step on ``inputs``; compiles at its first step."""
        own = copy.deepcopy(model).to(self.dtype).train(workload.training)
        return Candidate(self, workload, own, self.compile(own, workload), inputs)


class Candidate:
    """A peer's copy of a workload's model, with inputs: what is timed, and whose results are compared."""

    def __init__(
        self,
        peer: Peer,
        workload: Workload,
        model: nn.Module,
        forward: Callable[..., Any],
        inputs: tuple[Tensor, ...],
    ) -> None:
        self.peer, self.workload, self.model, self.forward = peer, workload, model, forward
        self.device = next(model.parameters()).device
        self.inputs = cast_floating(inputs, peer.dtype)
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=peer.scaled)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # what the scaler unscales; never stepped

    def load(self, reference: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Take over the weights of another model of the same structure, and other inputs."""
        self.model.load_state_dict(reference.state_dict())
        self.inputs = cast_floating(inputs, self.peer.dtype)

    def prepare(self) -> None:
        """What happens between two steps and is not timed: no gradients, weights written as by an optimizer.

        Copies of weights that were kept from the step before are stale after it, and made again inside the step.
        """
        if self.workload.training:
            self.model.zero_grad()
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(0)

    def run_forward(self) -> Tensor:
        """One forward in the peer's context: the loss, or the output in inference."""
        with torch.set_grad_enabled(self.workload.training), self.peer.context():
            result: Tensor = self.forward(*self.inputs)
        return result

    def step(self) -> Tensor:
        """One step of the workload; gradients end up in ``.grad``, unscaled. Returns the last loss or output."""
        for _ in range(self.workload.micro_batches):
            result = self.run_forward()
            if self.workload.training:
                self._scaler.scale(result).backward()
        if self.peer.scaled and self.workload.training:
            self._scaler.unscale_(self._optimizer)
            self._scaler.update()
        return result


def peers(device: str, dtype: str, preset: str = "default") -> list[Peer]:
    """mixprec (with ``preset`` as its policy) and its peers on ``device`` with the low type ``dtype``."""
    low = DTYPES[dtype]

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast(device, low)

    def mixprec(model: nn.Module, workload: Workload) -> Callable[..., Any]:
        return torch.compile(model, backend="mixprec", options=mixprec_options(workload, dtype, preset))

    def inductor(model: nn.Module, _: Workload) -> Callable[..., Any]:
        return torch.compile(model)

    def eager(model: nn.Module, _: Workload) -> Callable[..., Any]:
        return model

    scaled = low is torch.float16
    return [
        Peer(name=MIXPREC, compile=mixprec),
        Peer(name=BASELINE, compile=inductor, context=autocast, scaled=scaled),
        Peer(name=EAGER, compile=eager, context=autocast, scaled=scaled),
        Peer(name=FP32, compile=inductor),
        Peer(name=LOW, compile=inductor, dtype=low),
    ]


def mixprec_options(workload: Workload, dtype: str, preset: str) -> dict[str, Any]:
    """The backend's options for a workload."""
    options: dict[str, Any] = {"dtype": dtype}
    if workload.weight_cache:
        options["weight_cache"] = True
    if preset != "default":
        options["policy"] = preset
    return options


def cast_floating(values: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The same tensors, those of floating point in ``dtype``."""
    return tuple(value.to(dtype) if value.is_floating_point() else value for value in values)
