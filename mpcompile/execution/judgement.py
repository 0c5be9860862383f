"""Judge, before an optimizer step, whether the gradients it is about to use overflowed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from mpcompile.execution.flags import Flags
from mpcompile.execution.runtime import Runtime
from mpcompile.execution.watch import Watched


@dataclass(frozen=True, slots=True)
class Judgement:
    """What was found. Tensors on the device of the gradients: asking for a value waits for it."""

    overflowed: Tensor
    """For each of ``runtimes``: whether a gradient scaled by it is not finite on any process (bool)."""
    runtimes: tuple[Runtime, ...]
    skip: Tensor
    """Whether the step must be left out: any of them (bool, no dimensions)."""


def judge(parameters: Sequence[Watched]) -> Judgement | None:
    """Judge the gradients of ``parameters`` and consume their flags; None where none of them has a gradient.

    A gradient overflowed if it is not finite now, or if it was not when it left the graph (clipping may hide it).
    """
    waiting = [parameter for parameter in parameters if parameter.gradient is not None]
    if not waiting:
        return None
    bad = _not_finite([parameter.gradient for parameter in waiting if parameter.gradient is not None])
    bad = bad | _flagged(waiting).to(bad.device)
    runtimes = tuple(dict.fromkeys(runtime for parameter in waiting for runtime in parameter.runtimes))
    members = [[i for i, parameter in enumerate(waiting) if runtime in parameter.runtimes] for runtime in runtimes]
    own = [bad if len(member) == len(waiting) else bad[member] for member in members]
    overflowed = _shared(torch.stack([mine.any() for mine in own]), runtimes)
    judgement = Judgement(overflowed, runtimes, overflowed.any())
    for runtime, member, mine, over in zip(runtimes, members, own, overflowed.unbind(), strict=True):
        runtime.judged(tuple(waiting[i].name for i in member), mine, over, judgement.skip)
    _consume(parameters)
    return judgement


def _not_finite(gradients: Sequence[Tensor]) -> Tensor:
    """Whether each of ``gradients`` holds an infinity or NaN: bool, on the device of the first."""
    local = [_values(gradient) for gradient in gradients]
    device = local[0].device
    largest = [torch.zeros((), device=device)] * len(local)
    for place in dict.fromkeys(value.device for value in local):
        # The largest magnitude is not finite exactly where an element is not; an empty tensor has none.
        here = [i for i, value in enumerate(local) if value.device == place and value.numel()]
        norms = torch._foreach_norm([local[i] for i in here], float("inf")) if here else ()
        for i, norm in zip(here, norms, strict=True):
            largest[i] = norm.to(device, torch.float32)
    return ~torch.isfinite(torch.stack(largest))


def _values(gradient: Tensor) -> Tensor:
    """The numbers of a gradient that this process holds."""
    gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient  # a DTensor
    return gradient._values() if gradient.is_sparse else gradient


def _flagged(parameters: Sequence[Watched]) -> Tensor:
    result = torch.zeros(len(parameters), dtype=torch.bool)
    for flags, entries in _by_flags(parameters).items():
        raised = flags.raised([slot for _, slot in entries])
        index = torch.tensor([i for i, _ in entries], device=raised.device)
        result = result.to(raised.device).index_put((index,), raised, accumulate=True)
    return result


def _by_flags(parameters: Iterable[Watched]) -> dict[Flags, list[tuple[int, int]]]:
    """For each graph's flags: which of the parameters they speak of, and in which slots."""
    found: dict[Flags, list[tuple[int, int]]] = {}
    for i, parameter in enumerate(parameters):
        for flags, slot in parameter.flags():
            found.setdefault(flags, []).append((i, slot))
    return found


def _consume(parameters: Sequence[Watched]) -> None:
    for flags, entries in _by_flags(parameters).items():
        flags.consume([slot for _, slot in entries])


def _shared(overflowed: Tensor, runtimes: Sequence[Runtime]) -> Tensor:
    """The same over the processes that share the step."""
    groups = {runtime.process_group for runtime in runtimes} - {None}
    if not groups or not distributed.is_available() or not distributed.is_initialized():
        return overflowed
    found = overflowed.to(torch.float32)
    for group in sorted(groups, key=str):
        distributed.all_reduce(found, distributed.ReduceOp.MAX, group=None if group == "world" else group)
    return found > 0
