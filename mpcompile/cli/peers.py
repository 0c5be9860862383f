"""A model under mixprec and what it is compared with, timed in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mpcompile.cli.target import Target
from mpcompile.device import main_device
from mpcompile.measurement import interleaved, kept_storages, seconds

MIXPREC, AUTOCAST, FP32 = "mixprec", "compile + autocast", "compile fp32"
COMPILER = "inductor"
"""Who generates the code of all of them."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What was measured of one peer."""

    peer: str
    step_ms: float
    """Median over the rounds: forward and backward, or forward alone where nothing needs a gradient."""
    first_step_s: float
    """The first step, compilation included (with torch's caches as they are)."""
    saved_bytes: int | None
    """Bytes that forward keeps for backward, parameters, buffers and inputs apart; None without backward."""


class Peer:
    """One way of compiling a copy of the model, and stepping it."""

    def __init__(self, name: str, target: Target, low: torch.dtype, options: Mapping[str, Any]) -> None:
        self.name, self._target = name, target
        self._model = target.copy_model()
        mixprec = {"backend": "mixprec", "options": {**options, "compiler": COMPILER}}
        self._forward = torch.compile(self._model, **(mixprec if name == MIXPREC else {"backend": COMPILER}))
        self.device = main_device([*_parameters(self._model), *_tensors(target)])
        self._low = low if name == AUTOCAST else None
        scaled = self._low is torch.float16
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)
        parameters = list(_parameters(self._model))
        self._optimizer = torch.optim.SGD(parameters, lr=0.0) if scaled and parameters else None

    def forward(self) -> Tensor:
        """The loss of one forward."""
        context: AbstractContextManager[Any] = nullcontext()
        if self._low is not None:
            context = torch.autocast(self.device.type, self._low)
        with context:
            return self._target.loss(self._forward(*self._target.args, **self._target.kwargs))

    def step(self) -> None:
        """Forward, and backward where something needs a gradient; gradients of before are dropped."""
        for parameter in _parameters(self._model):
            parameter.grad = None
        loss = self.forward()
        if not loss.requires_grad:
            return
        self._scaler.scale(loss).backward()
        if self._optimizer is not None:
            self._scaler.unscale_(self._optimizer)
            self._scaler.update()

    def saved_bytes(self) -> int | None:
        """Bytes of the storages that a forward makes and keeps, each once."""
        known = (*_state(self._model), *_tensors(self._target))
        kept, loss = kept_storages(self.forward, known)
        return sum(kept.values()) if loss.requires_grad else None


def race(target: Target, low: torch.dtype, options: Mapping[str, Any], rounds: int) -> list[Timing]:
    """Compile the model three ways and time ``rounds`` steps of each in turns, so that noise meets all alike."""
    torch.compiler.reset()
    _start_compiler(low)
    peers = [Peer(name, target, low, options) for name in (MIXPREC, AUTOCAST, FP32)]
    first = {peer.name: seconds(peer.step, peer.device) for peer in peers}
    saved = {peer.name: peer.saved_bytes() for peer in peers}
    times = interleaved({peer.name: peer.step for peer in peers}, rounds, peers[0].device)
    return [Timing(name, taken * 1e3, first[name], saved[name]) for name, taken in times.items()]


def _start_compiler(low: torch.dtype) -> None:
    """Compile something small: what a process does once must not count against the peer that comes first."""
    options: dict[str, Any] = {"dtype": "fp16" if low is torch.float16 else "bf16", "compiler": COMPILER}
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
    torch.compile(layer, backend="mixprec", options=options)(torch.randn(3, 4)).sum().backward()


def _tensors(target: Target) -> Sequence[Tensor]:
    leaves = tree_leaves((target.args, dict(target.kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _parameters(model: Any) -> Sequence[Tensor]:
    return list(model.parameters()) if isinstance(model, nn.Module) else []


def _state(model: Any) -> Sequence[Tensor]:
    return [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
