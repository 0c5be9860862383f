"""Judge, before an optimizer step, whether the gradients it is about to use overflowed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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


def judge(parameters: Sequence[tuple[Tensor, Watched]]) -> Judgement | None:
    """Judge the gradients of ``parameters`` and consume their flags.

    None where none of them has a gradient, unless other processes share the step and may have some.

    A gradient overflowed if it is not finite now, or if it was not when it left the graph (clipping may hide it). Where
    a parameter belongs to several compiled models, the one whose graph raised the flag is to blame.
    """
    runtimes = tuple(dict.fromkeys(runtime for _, watched in parameters for runtime in watched.runtimes))
    waiting = [(parameter.grad, watched) for parameter, watched in parameters if parameter.grad is not None]
    if not waiting and not _groups(runtimes):
        return None
    not_finite = _not_finite([gradient for gradient, _ in waiting], parameters[0][0].device)
    judged = [watched for _, watched in waiting]
    flagged = torch.stack([_flagged_by(runtime, judged).to(not_finite.device) for runtime in runtimes])
    bad = flagged | (not_finite & ~flagged.any(0) & _belonging(runtimes, judged, not_finite.device))
    overflowed = _shared(bad.any(1), runtimes)
    judgement = Judgement(overflowed, runtimes, overflowed.any())
    names = tuple(watched.name for watched in judged)
    for runtime, mine, over in zip(runtimes, bad.unbind(), overflowed.unbind(), strict=True):
        runtime.judged(names, mine, over, judgement.skip)
    for flags, entries in _by_flags(watched for _, watched in parameters).items():
        flags.consume([slot for _, slot in entries])
    return judgement


def _not_finite(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Whether each of ``gradients`` holds an infinity or NaN: bool, on ``device`` unless all are on another."""
    local = [_values(gradient) for gradient in gradients]
    places = [value.device for value in local]
    result = torch.zeros(len(local), dtype=torch.bool, device=device)
    for place in dict.fromkeys(places):
        here = [i for i, own in enumerate(places) if own == place]
        found = ~_finite([local[i] for i in here])
        if len(here) == len(local):
            return found
        result[here] = found.to(result.device)
    return result


def _finite(values: list[Tensor]) -> Tensor:
    """Whether all elements of each tensor are finite; of one device."""
    if values[0].device.type != "cpu":
        return torch.isfinite(torch.stack(torch._foreach_norm(values, float("inf"))))  # one kernel for all
    # On a CPU that norm takes twenty times as long as looking for the ends of the range.
    lowest, highest = zip(*map(torch.aminmax, values), strict=True)
    return torch.isfinite(torch.stack(lowest)) & torch.isfinite(torch.stack(highest))


def _values(gradient: Tensor) -> Tensor:
    """The numbers of a gradient that this process holds; one zero for none."""
    gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient  # a DTensor
    gradient = gradient._values() if gradient.is_sparse else gradient
    gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return gradient if gradient.numel() else gradient.new_zeros(1)


def _belonging(runtimes: Sequence[Runtime], parameters: Sequence[Watched], device: torch.device) -> Tensor:
    """Which of the parameters belong to which runtime: bool, for broadcasting against [runtimes, parameters]."""
    if len(runtimes) == 1:
        return torch.ones((), dtype=torch.bool, device=device)
    table = [[runtime in parameter.runtimes for parameter in parameters] for runtime in runtimes]
    return torch.tensor(table, device=device)


def _flagged_by(runtime: Runtime, parameters: Sequence[Watched]) -> Tensor:
    """Whether a graph of ``runtime`` raised a flag for each of the parameters."""
    result: Tensor | None = None
    for flags, entries in _by_flags(parameters).items():
        if flags.runtime is runtime:
            raised = flags.raised([slot for _, slot in entries])
            if len(entries) < len(parameters):
                everywhere = torch.zeros(len(parameters), dtype=torch.bool, device=raised.device)
                everywhere[[i for i, _ in entries]] = raised
                raised = everywhere
            result = raised if result is None else result | raised
    return torch.zeros(len(parameters), dtype=torch.bool) if result is None else result


def _by_flags(parameters: Iterable[Watched]) -> dict[Flags, list[tuple[int, int]]]:
    """For each graph's flags: which of the parameters they speak of, and in which slots."""
    found: dict[Flags, list[tuple[int, int]]] = {}
    for i, parameter in enumerate(parameters):
        for flags, slot in parameter.flags():
            found.setdefault(flags, []).append((i, slot))
    return found


def _shared(overflowed: Tensor, runtimes: Sequence[Runtime]) -> Tensor:
    """The same over the processes that share the step."""
    found = overflowed.to(torch.float32)
    for group in _groups(runtimes):
        distributed.all_reduce(found, distributed.ReduceOp.MAX, group=None if group == "world" else group)
    return found > 0


def _groups(runtimes: Sequence[Runtime]) -> list[Any]:
    """The groups of processes that share the step; none where this process decides alone."""
    if not distributed.is_available() or not distributed.is_initialized():
        return []
    groups = {runtime.process_group for runtime in runtimes} - {None}
    return sorted(groups, key=lambda group: getattr(group, "group_name", ""))  # the same order in every process
