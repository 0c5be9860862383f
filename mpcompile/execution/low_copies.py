"""One low copy of every parameter that compiled graphs read, made anew when the parameter changes.

A change shows in the parameter's version, in the address of its memory, in the end of that memory, and in a step of an
optimizer that holds it (fused optimizers move no version). A write through ``.data`` shows in none of these.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpcompile.execution.stand_in import parameters_of


class LowCopy:
    """A parameter rounded to a low type, in one tensor for as long as a graph reads it."""

    def __init__(self, parameter: nn.Parameter, low: torch.dtype, held: torch.dtype) -> None:
        """``held``: the dtype to hold the rounded values in, ``low`` itself or fp32."""
        self.low = low
        self.value = torch.empty_like(parameter, dtype=held, requires_grad=False)
        self._parameter = weakref.ref(parameter)
        self._memory: weakref.ref[Any] | None = None
        self._seen = (-1, 0)

    def is_of(self, parameter: Tensor) -> bool:
        """Whether this is the copy of that parameter (a later one may have the same ``id``)."""
        return self._parameter() is parameter

    def is_fresh(self, parameter: Tensor) -> bool:
        """Whether the parameter is as it was when the copy was made, as far as can be seen."""
        return self._seen == (parameter._version, parameter.data_ptr())

    def made(self, parameter: Tensor) -> None:
        """Note that the copy is now that of the parameter as it is."""
        self._seen = (parameter._version, parameter.data_ptr())
        # Memory that is freed may be given out again: then another tensor has the same address.
        own = weakref.ref(self)
        self._memory = weakref.ref(parameter.untyped_storage(), lambda _: _freed(own))

    def stale(self) -> None:
        """Have the copy made anew before it is next read."""
        self._seen = (-1, 0)
        Changes.count += 1

    def holds(self, parameter: Tensor) -> bool:
        """Whether the copy is, bit for bit, the parameter rounded."""
        now = parameter.detach().to(self.low).to(self.value.dtype)
        bits = torch.int32 if now.itemsize == 4 else torch.int16
        return torch.equal(now.view(bits), self.value.view(bits))


class Changes:
    """Changes of parameters that neither a version nor an address tells."""

    count = 0
    """Grows with each."""


_copies: weakref.WeakValueDictionary[tuple[int, torch.dtype, torch.dtype], LowCopy] = weakref.WeakValueDictionary()


def copy_of(parameter: nn.Parameter, low: torch.dtype, held: torch.dtype) -> LowCopy:
    """The one copy of a parameter, stale where it is new; it lives as long as somebody holds it."""
    install()
    key = (id(parameter), low, held)
    found = _copies.get(key)
    if found is None or not found.is_of(parameter):
        with torch.inference_mode(False):  # a copy made within could not be refreshed outside
            found = _copies[key] = LowCopy(parameter, low, held)
    return found


def refresh(copies: Sequence[LowCopy], parameters: Sequence[Tensor]) -> None:
    """Make those copies anew whose parameter changed, in place and together."""
    stale = [(c, p) for c, p in zip(copies, parameters, strict=True) if not c.is_fresh(p)]
    if not stale:
        return
    with torch.inference_mode(False), torch.no_grad():
        # Rounded first: what is held in fp32 holds rounded values.
        sources = [p if c.value.dtype is c.low else p.to(c.low) for c, p in stale]
        torch._foreach_copy_([c.value for c, _ in stale], sources)
    for copy, parameter in stale:
        copy.made(parameter)


def stale_all(parameters: Iterable[Tensor] | None = None) -> None:
    """Have the copies of these parameters, or all there are, made anew before they are next read."""
    ids = None if parameters is None else set(map(id, parameters))
    for (owner, _, _), copy in list(_copies.items()):
        if ids is None or owner in ids:
            copy.stale()


@functools.cache
def install() -> None:
    """Install the hook on optimizer steps, once in a process."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    stale_all(parameters_of(optimizer))


def _freed(reference: weakref.ref[LowCopy]) -> None:
    copy = reference()
    if copy is not None:
        copy.stale()
