"""One model being trained: the ordinary fp32 loop, and the autocast loop to compare it with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from gpt import GPT
from stdlib_text import Batch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

LEARNING_RATE = 1e-3
WARM_UP_STEPS = 10
UNTIMED_STEPS = 3
"""The first steps compile and warm the caches; they are left out of the step time."""


def schedule(step: int, steps: int) -> float:
    """Scale the learning rate: a linear warm-up, then half a cosine down to a tenth."""
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    return warm_up * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps)))


@dataclass(kw_only=True)
class Trainee:
    """A model, the compiled model that trains it, and what was measured on the way."""

    name: str
    model: GPT
    steps: int
    backend: str = "inductor"
    options: dict[str, Any] | None = None
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.compiled = torch.compile(self.model, backend=self.backend, options=self.options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
        self.scheduler = LambdaLR(self.optimizer, lambda step: schedule(step, self.steps))

    def step(self, batch: Batch) -> Tensor:
        """Take one training step. Nothing in it says that anything is mixed precision."""
        loss: Tensor = self.compiled(*batch)
        loss.backward()
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.detach()

    def timed_step(self, batch: Batch) -> None:
        """Take one step and record its loss and its time."""
        synchronise()
        start = time.perf_counter()
        loss = self.step(batch)
        synchronise()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    def step_time(self) -> float:
        """Return the median time of a step, in seconds."""
        return median(self.seconds[UNTIMED_STEPS:] or self.seconds)

    def final_loss(self, last: int) -> float:
        """Return the mean loss of the last steps."""
        tail = self.losses[-last:]
        return sum(tail) / len(tail)

    @torch.no_grad()
    def held_out_loss(self, batch: Batch) -> float:
        """Return the loss of the fp32 weights, uncompiled: what the training arrived at."""
        return float(self.model(*batch))


@dataclass(kw_only=True)
class ScaledTrainee(Trainee):
    """The loop of autocast: a context around the forward, and for fp16 a GradScaler."""

    dtype: torch.dtype
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __post_init__(self) -> None:
        super().__post_init__()
        device = next(self.model.parameters()).device.type
        self.scaler = torch.amp.GradScaler(device, enabled=self.dtype is torch.float16)

    def step(self, batch: Batch) -> Tensor:
        """Take one training step, with everything that autocast asks of a loop."""
        with self.context():
            loss: Tensor = self.compiled(*batch)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.detach()


def synchronise() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
