"""Act on an optimizer step through torch's hooks: skip it where gradients overflowed, let it step master weights.

The hooks are global, installed once, and act only on optimizers that hold parameters of a scaled graph or have
master weights.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpcompile.execution.judgement import judge
from mpcompile.execution.stand_in import is_stand_in, parameters_of, stand_in, substitute_of, without_parameters
from mpcompile.execution.watch import Watched, watched_among
from mpcompile.notices import MixprecError

Call = tuple[tuple[Any, ...], dict[str, Any]]


@functools.cache
def install() -> None:
    """Install the hooks, once in a process."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Return the step's arguments with a stand-in for the optimizer where its parameters are not to be stepped."""
    watched = watched_among(parameters_of(optimizer))
    masters = substitute_of(optimizer)
    if not (watched or masters) or is_stand_in(optimizer) or _is_nested(optimizer):
        return None
    _refuse_closure(args, kwargs)
    changes = _judge(optimizer, watched) if watched else {}
    if changes is None:
        return (without_parameters(optimizer), *args[1:]), kwargs
    if masters is not None:
        changes = {**changes, **masters.prepare(optimizer)}
    return ((stand_in(optimizer, **changes), *args[1:]), kwargs) if changes else None


def _judge(optimizer: Optimizer, watched: list[tuple[Tensor, Watched]]) -> dict[str, Any] | None:
    """The attributes to step with; None where the step must be skipped."""
    _refuse_grad_scaler()
    judgement = judge(watched)
    if judgement is None:
        return {}
    # A fused optimizer on a GPU reads the verdict there, and the host need not wait for it.
    on_device = _reads_verdict(optimizer) and judgement.skip.device.type != "cpu"
    for runtime in judgement.runtimes:
        if not on_device or runtime.is_due_to_warn:
            runtime.warn()
    if on_device:
        return {"found_inf": judgement.skip.to(torch.float32)}
    return None if judgement.skip else {}


def _reads_verdict(optimizer: Optimizer) -> bool:
    """Whether a step of the optimizer leaves everything as it is where its ``found_inf`` says so."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    # Fused SGD would make momentum buffers of uninitialised memory in a first step that it then leaves out.
    momentum = any(group.get("momentum") for group in optimizer.param_groups)
    return not momentum or all(optimizer.state.get(parameter) for parameter in parameters_of(optimizer))


def _refuse_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(argument is not None for argument in (*args[1:2], kwargs.get("closure"))):
        raise MixprecError(
            "optimizer.step(closure) computes gradients inside the step, where an overflow can no longer be judged and "
            "master weights cannot follow. Call the closure first, then optimizer.step() without it. For an optimizer "
            "that needs a closure, such as LBFGS, use dtype='bf16' and fp32 parameters."
        )


def _refuse_grad_scaler() -> None:
    """Raise where a ``GradScaler`` is stepping the optimizer: its factor would come on top of the graph's own."""
    frame = sys._getframe(1)
    for _ in range(12):
        if frame.f_back is None:
            return
        frame = frame.f_back
        owner = frame.f_locals.get("self") if frame.f_code.co_name in ("step", "_maybe_opt_step") else None
        if isinstance(owner, torch.amp.GradScaler) and owner.is_enabled():
            raise MixprecError(
                "A torch.amp.GradScaler steps an optimizer whose gradients mixprec scales already. Remove the "
                "GradScaler (loss.backward(); optimizer.step()), or compile with options={'loss_scale': 'external'}."
            )


def _is_nested(optimizer: Optimizer) -> bool:
    """Whether this is a ``super().step()`` within a step of the same optimizer: torch calls the hooks for it again."""
    # Every step of every optimizer class is wrapped in one function of torch's, whose frame calls the hook.
    wrapper = sys._getframe(2)
    frame = wrapper.f_back
    while frame is not None:
        if frame.f_code is wrapper.f_code and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False
