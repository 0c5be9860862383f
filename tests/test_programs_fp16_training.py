"""fp16 training loops go where fp64 loops go, through skipped steps and checkpoints."""

import io
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import mpcompile
from tests.test_programs import error, in_fp64
from tests.test_programs_fp16 import BOUND, fp16

BAND = 0.02
"""Relative error allowed to the way that weights went in a few steps: AdamW divides by what gradients are."""
LR, CLIP = 1e-2, 2.5


class Net(nn.Module):
    """A small regression."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


Batches = list[list[tuple[Tensor, Tensor]]]


def make_batches(steps: int, micro: int = 4) -> Batches:
    """For each optimizer step some micro-batches."""
    inputs = [[torch.randn(16, 8) for _ in range(micro)] for _ in range(steps)]
    return [[(x, x[:, :1] * x[:, 1:2] + 1) for x in group] for group in inputs]


@dataclass
class Loop:
    """A training loop as people write it: accumulation, clipping, a schedule."""

    call: Callable[[Tensor], Tensor]
    model: nn.Module
    optimizer: Optimizer
    scheduler: CosineAnnealingLR

    @classmethod
    def of(cls, call: Any, model: nn.Module, kind: str = "adamw") -> "Loop":
        parameters = model.parameters()
        optimizer = (
            torch.optim.AdamW(parameters, LR) if kind == "adamw" else torch.optim.SGD(parameters, LR, momentum=0.9)
        )
        return cls(call, model, optimizer, CosineAnnealingLR(optimizer, T_max=20))

    def train(self, batches: Batches, skipped: Collection[int] = ()) -> list[float]:
        """The norms of the gradients before they were clipped; the steps in ``skipped`` are left out."""
        norms = []
        for step, group in enumerate(batches):
            self.optimizer.zero_grad()
            for x, y in group:
                (F.mse_loss(self.call(x), y) / len(group)).backward()
            norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)))
            if step in skipped:
                self.optimizer.zero_grad()
            self.optimizer.step()
            self.scheduler.step()
        return norms


def in_fp64_too(batches: Batches) -> Batches:
    return [[(x.double(), y.double()) for x, y in group] for group in batches]


def copies(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def way(model: nn.Module, start: Iterable[Tensor]) -> list[Tensor]:
    """How far each parameter went from ``start``."""
    return [parameter.detach().double() - before for parameter, before in zip(model.parameters(), start, strict=True)]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_accumulated_clipped_and_scheduled_training_follows_fp64(kind: str) -> None:
    model, batches = Net(), make_batches(10)
    exact, start = in_fp64(model), copies(model)
    truth = Loop.of(exact, exact, kind).train(in_fp64_too(batches))
    compiled = fp16(model, {"init_scale": 2.0**12, "growth_interval": 3})
    norms = Loop.of(compiled, model, kind).train(batches)
    runtime = mpcompile.runtime(compiled)
    assert runtime.skipped_steps == 0
    assert runtime.scale == 2.0**15  # it grew three times meanwhile
    assert error(way(model, start), way(exact, start)) < BAND
    # What is clipped are the true gradients: their norms are those of fp64.
    assert max(truth) > CLIP > min(truth)  # some steps are clipped
    assert error([torch.tensor(norms)], [torch.tensor(truth)]) < BOUND


def test_skipped_steps_are_the_only_difference() -> None:
    # The scale starts at its cap and falls until steps go through: the fp64 loop leaves out the same steps.
    model, batches = Net(), make_batches(14)
    exact, start = in_fp64(model), copies(model)
    compiled = fp16(model, {"init_scale": 2.0**24})
    loop, runtime, skipped = Loop.of(compiled, model), mpcompile.runtime(compiled), []
    for step, group in enumerate(batches):
        before = copies(model)
        loop.train([group])
        if runtime.last_step_skipped:
            skipped.append(step)
            assert all(map(torch.equal, before, copies(model)))
    # Weight gradients do not overflow, so a later batch may be the first whose activations' gradients do.
    assert skipped[:3] == [0, 1, 2]
    assert 2 < len(skipped) < 10
    assert runtime.scale == 2.0 ** (24 - len(skipped))
    assert runtime.skipped_steps == len(skipped)
    assert {int(state["step"]) for state in loop.optimizer.state.values()} == {14 - len(skipped)}
    Loop.of(exact, exact).train(in_fp64_too(batches), skipped)
    assert error(way(model, start), way(exact, start)) < BAND


def test_one_bad_micro_batch_skips_the_whole_step() -> None:
    model, batches = Net(), make_batches(3)
    exact, start = in_fp64(model), copies(model)
    bad = [group[:] for group in batches]
    bad[1][2] = (bad[1][2][0], bad[1][2][1] * 1e9)
    compiled = fp16(model, {"init_scale": 2.0**12})
    loop, runtime, skipped = Loop.of(compiled, model), mpcompile.runtime(compiled), []
    for group in bad:
        loop.train([group])
        skipped.append(runtime.last_step_skipped)
    assert skipped == [False, True, False]
    assert runtime.scale == 2.0**11
    Loop.of(exact, exact).train(in_fp64_too(batches), skipped=[1])
    assert error(way(model, start), way(exact, start)) < BAND


def resume(saved: bytes, when: str, batches: Batches) -> tuple[nn.Module, Any]:
    """Go on from a checkpoint in a new model; its runtime is loaded before or after the first call."""
    checkpoint = torch.load(io.BytesIO(saved), weights_only=True)
    model = Net()
    compiled = fp16(model, {"growth_interval": 3})
    if when == "after":
        compiled(batches[0][0][0]).mean().backward()
        model.zero_grad()
    loop, runtime = Loop.of(compiled, model), mpcompile.runtime(compiled)
    model.load_state_dict(checkpoint["model"])
    loop.optimizer.load_state_dict(checkpoint["optimizer"])
    loop.scheduler.load_state_dict(checkpoint["scheduler"])
    runtime.load_state_dict(checkpoint["runtime"])
    loop.train(batches)
    return model, runtime


@pytest.mark.parametrize("when", ["before", "after"])
def test_training_resumed_from_a_checkpoint_is_the_same_to_the_bit(when: str) -> None:
    model, batches = Net(), make_batches(9, 2)
    batches[2][0] = (batches[2][0][0], batches[2][0][1] * 1e9)  # one skipped step before the checkpoint
    compiled = fp16(model, {"init_scale": 2.0**12, "growth_interval": 3})
    loop, runtime = Loop.of(compiled, model), mpcompile.runtime(compiled)
    loop.train(batches[:5])
    file = io.BytesIO()
    parts = {"model": model, "optimizer": loop.optimizer, "scheduler": loop.scheduler, "runtime": runtime}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    loop.train(batches[5:])
    resumed, resumed_runtime = resume(file.getvalue(), when, batches[5:])
    assert all(map(torch.equal, copies(model), copies(resumed)))
    # Two clean steps after the skipped one were counted before the checkpoint: the third let the scale grow.
    assert resumed_runtime.state_dict() == runtime.state_dict()
    assert (runtime.scale, runtime.skipped_steps) == (2.0**13, 1)
