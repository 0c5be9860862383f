"""Call a compiled graph that reads low copies of parameters: hand it those of the parameters of every call."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mpcompile.execution.low_copies import Changes, LowCopy, copy_of, refresh
from mpcompile.notices import MixprecError

_version = operator.attrgetter("_version")
_address = Tensor.data_ptr


@dataclass(frozen=True, slots=True)
class Cached:
    """One parameter of a graph that it gets a low copy of."""

    position: int
    name: str
    low: torch.dtype
    held: torch.dtype
    """The dtype of the copy: ``low``, or fp32, which then holds rounded values."""


class CachedGraph:
    """A compiled graph whose last inputs are the low copies of some of its first.

    One graph may serve several models of equal structure: it has a ``Binding`` for each set of parameters.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        cached: Sequence[Cached],
        examples: tuple[Tensor, ...],
        *,
        strict: bool,
    ) -> None:
        """``cached``: the parameters with a copy, in the order of these; ``examples``: the fake copies the graph was
        compiled with; ``strict``: compare copies and parameters at every call."""
        self._compiled = compiled
        self._cached = cached
        self._examples = examples
        self._strict = strict
        self._bindings: dict[tuple[int, ...], Binding] = {}
        positions = [each.position for each in cached]
        pick = operator.itemgetter(*positions)
        self._pick: Callable[[Any], Sequence[Any]] = pick if len(positions) > 1 else lambda args: (pick(args),)

    def __call__(self, *args: Any) -> Any:
        """Run the graph with the copies of the parameters among ``args``, made anew where those changed."""
        parameters = self._pick(args)
        binding = self._bindings.get(tuple(map(id, parameters))) or self._bind(parameters)
        if binding is None:
            return self._compiled(*args, *self._without_cache(args, parameters))
        if self._strict:
            binding.check(parameters, [each.name for each in self._cached])
        return self._compiled(*args, *binding.copies_of(parameters))

    def _bind(self, parameters: Sequence[Any]) -> Binding | None:
        if not all(type(parameter) is nn.Parameter and may_be_cached(parameter) for parameter in parameters):
            return None
        key = tuple(map(id, parameters))
        reference = weakref.ref(self)

        def forget(_: Any) -> None:  # a new tensor may get the id of one that is gone
            graph = reference()
            if graph is not None:
                graph._bindings.pop(key, None)

        copies = [copy_of(p, each.low, each.held) for p, each in zip(parameters, self._cached, strict=True)]
        self._bindings[key] = Binding(copies, [weakref.ref(parameter, forget) for parameter in parameters])
        return self._bindings[key]

    def _without_cache(self, args: Sequence[Any], parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """For this call alone; the example copies for the fake arguments that DDP compiles the next graph with."""
        if any(isinstance(argument, FakeTensor) for argument in args):
            return self._examples
        with torch.no_grad():
            pairs = zip(parameters, self._cached, strict=True)
            return [parameter.to(each.low).to(each.held) for parameter, each in pairs]


class Binding:
    """The copies of one set of parameters, and what was seen of the parameters when they were last fresh."""

    def __init__(self, copies: Sequence[LowCopy], references: Sequence[weakref.ref[Tensor]]) -> None:
        """``references``: kept for their callbacks."""
        self._copies = copies
        self._references = references
        self._values = tuple(copy.value for copy in copies)
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._changes = -1

    def copies_of(self, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The copies, fresh; costs about 0.2 microseconds for each where nothing changed."""
        versions, addresses = list(map(_version, parameters)), list(map(_address, parameters))
        if self._changes != Changes.count or versions != self._versions or addresses != self._addresses:
            self._changes = Changes.count
            self._versions, self._addresses = versions, addresses
            refresh(self._copies, parameters)
        return self._values

    def check(self, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
        """Raise ``MixprecError`` where a copy that looks fresh is not its parameter rounded."""
        for copy, parameter, name in zip(self._copies, parameters, names, strict=True):
            if copy.is_fresh(parameter) and not copy.holds(parameter):
                raise MixprecError(
                    f"Parameter {name!r} was changed in a way that shows neither in its version nor in its address "
                    "(a write through `.data`, numpy or dlpack), so its copy in the weight cache is stale. Call "
                    "mpcompile.runtime(compiled).refresh() after such a write, write under torch.no_grad() without "
                    "`.data`, or compile with options={'weight_cache': False}."
                )


def may_be_cached(value: Any) -> bool:
    """Whether a value is a plain, dense fp32 parameter, whose changes can be seen; or the fake of one."""
    if not isinstance(value, nn.Parameter) or type(value) not in (nn.Parameter, FakeTensor):
        return False
    if value.dtype is not torch.float32 or value.layout is not torch.strided:
        return False
    return not value.is_inference() and is_dense(value)


def is_dense(value: Tensor) -> bool:
    """Whether the elements fill their memory, each once, so that a copy has the same strides."""
    order = sorted(range(value.dim()), key=lambda dim: (value.stride(dim), value.shape[dim]))
    return value.permute(order[::-1]).is_contiguous()
