"""The verdict on a step stays on the device where the optimizer can read it there."""

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from mpcompile.execution import optimizer_step
from tests.optimizer_step_tools import (
    HUGE,
    OPTIMIZERS,
    SCALE,
    CallsSuper,
    assert_every_overflow_is_skipped,
    everything,
    training,
)


class OnDevice:
    """A verdict that says it is on a GPU, and counts how often the host waited for it."""

    asked = 0
    device = SimpleNamespace(type="cuda")

    def __init__(self, verdict: Tensor) -> None:
        self._verdict = verdict

    def to(self, dtype: torch.dtype) -> Tensor:
        return self._verdict.to(dtype)

    def __bool__(self) -> bool:
        OnDevice.asked += 1
        return bool(self._verdict)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge as on a GPU: the optimizer itself reads the verdict, in ``found_inf``."""
    judge = optimizer_step.judge

    def judged(parameters: Any) -> Any:
        found = judge(parameters)
        if found is None:
            return None
        return SimpleNamespace(overflowed=found.overflowed, runtimes=found.runtimes, skip=OnDevice(found.skip))

    monkeypatch.setattr(optimizer_step, "judge", judged)
    monkeypatch.setattr(OnDevice, "asked", 0)


@pytest.fixture
def uninitialized_is_nan() -> Iterator[None]:
    """Memory that nobody wrote to is NaN, and not by chance zero."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


FUSED: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


@pytest.mark.usefixtures("on_device")
def test_a_fused_optimizer_skips_by_itself_and_changes_no_bit() -> None:
    for name, make in FUSED.items():
        t = training(make)
        t.step(seed=1)
        t.step(seed=2)
        asked = OnDevice.asked
        assert_every_overflow_is_skipped(t, name)
        assert OnDevice.asked == asked, name  # the host runs ahead of the device


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.usefixtures("on_device", "uninitialized_is_nan")
def test_a_fused_optimizer_goes_on_as_if_its_first_step_had_not_been(name: str) -> None:
    # The first step is the one that most often overflows; state that it makes must be what a clean one starts from.
    undisturbed = training(FUSED[name])
    disturbed = training(FUSED[name], copy.deepcopy(undisturbed.model))
    disturbed.step(HUGE, seed=7)
    for seed in range(2):
        undisturbed.step(seed=seed)
        disturbed.step(seed=seed)
    assert everything(disturbed.optimizer) == everything(undisturbed.optimizer)
    assert (undisturbed.runtime.skipped_steps, disturbed.runtime.skipped_steps) == (0, 1)


@pytest.mark.usefixtures("on_device")
def test_a_fused_subclass_that_calls_super_is_judged_once() -> None:
    torch.optim.AdamW([torch.ones(1)])
    t = training(lambda p: CallsSuper(p, lr=0.1, fused=True), loss_scale={"init_scale": SCALE, "growth_interval": 2})
    assert [t.step(factor) or t.runtime.scale for factor in (1.0, HUGE, 1.0, 1.0)] == [1024.0, 512.0, 512.0, 1024.0]
    assert t.runtime.skipped_steps == 1


@pytest.mark.usefixtures("on_device")
def test_the_verdict_is_no_attribute_of_the_optimizer() -> None:
    # What stays there would be read by the next step, of a GradScaler for instance.
    t = training(FUSED["adamw"])
    before = set(t.optimizer.__dict__)
    for factor in (1.0, HUGE, 1.0):
        t.step(factor)
        assert set(t.optimizer.__dict__) == before


@pytest.mark.usefixtures("on_device")
def test_an_optimizer_that_reads_no_verdict_makes_the_host_ask() -> None:
    t = training(OPTIMIZERS["sgd"])
    before = everything(t.optimizer)
    t.step(HUGE)
    assert everything(t.optimizer) == before
    assert OnDevice.asked == 1
