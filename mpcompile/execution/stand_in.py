"""Let an optimizer's own ``step`` run with other parameters or attributes, without touching the optimizer."""

from __future__ import annotations

from typing import Any, Protocol

from torch.optim import Optimizer

_MARK = "_mixprec_stand_in"
"""Attribute of a stand-in: the names of the attributes that were replaced."""
_SUBSTITUTE = "_mixprec_substitute"


class Substitute(Protocol):
    """What takes the place of an optimizer's parameters in every step."""

    def prepare(self, optimizer: Optimizer) -> dict[str, Any]:
        """The attributes to step with instead of the optimizer's own."""


def substitute_of(optimizer: Optimizer) -> Any:
    """The optimizer's ``Substitute``, or None."""
    return optimizer.__dict__.get(_SUBSTITUTE)


def set_substitute(optimizer: Optimizer, substitute: Substitute) -> None:
    """Let ``substitute`` take the place of the optimizer's parameters; ``ValueError`` where something does already."""
    if _SUBSTITUTE in optimizer.__dict__:
        raise ValueError("This optimizer has master weights already.")
    optimizer.__dict__[_SUBSTITUTE] = substitute


def stand_in(optimizer: Optimizer, **attributes: Any) -> Optimizer:
    """An optimizer of the same class with the same attributes, except ``attributes``.

    State and parameter groups are shared unless replaced; what a step assigns to other attributes stays in here.
    """
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__, **attributes)
    twin.__dict__[_MARK] = frozenset(attributes)
    return twin


def is_stand_in(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one made here."""
    return _MARK in optimizer.__dict__


def assigned_in(twin: Optimizer) -> dict[str, Any]:
    """The attributes of a stand-in that were not replaced, with what its step assigned to them."""
    replaced = twin.__dict__[_MARK] | {_MARK}
    return {name: value for name, value in twin.__dict__.items() if name not in replaced}


def without_parameters(optimizer: Optimizer) -> Optimizer:
    """A stand-in whose step changes nothing: it sees no parameter, and only copies of the groups."""
    return stand_in(optimizer, param_groups=[{**group, "params": []} for group in optimizer.param_groups])


def parameters_of(optimizer: Optimizer) -> list[Any]:
    """Every parameter of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
