"""Call a compiled graph that scales its gradients: hand it the loss scale, collect its overflow flags."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mpcompile.execution.backward_node import accumulates, backward_nodes, number_of_backward
from mpcompile.execution.flags import Flags
from mpcompile.execution.runtime import Runtime
from mpcompile.execution.watch import watch

Owner = tuple[Runtime, nn.Module | None]
"""The runtime of the model that is being called, and the model; None for a function."""


_TELLING = 8
"""By so many of its parameters a model is recognised at every call: looking at all costs 0.2 microseconds each. Should
two models of one structure share just these, a flag may name the other's parameter; gradients are looked at as well."""


class ScaledGraph:
    """A compiled graph whose last two inputs are the loss scale and the probe, whose gradient is the flags.

    One graph may serve several models of equal structure: it has flags for each set of parameters it is called on.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        slots: Mapping[int, str],
        examples: tuple[Tensor, Tensor],
        find_owner: Callable[[], Owner],
    ) -> None:
        """``slots``: position and name of every differentiable input, in the order of their flags; ``examples``: the
        fake scale and probe that the graph was compiled with."""
        self._compiled = compiled
        self._slots = slots
        self._examples = examples
        self._device = examples[0].device
        self._find_owner = find_owner
        self._probe = make_probe(len(slots), self._device)
        self._flags: dict[tuple[int, ...], Flags] = {}
        self._select: Callable[[Sequence[Any]], tuple[Any, ...]] | None = None
        self._others: list[int] = []
        """Positions of the differentiable inputs that are no parameters: activations, and leaves of the user's."""
        self._probe_position: dict[type, int | None] = {}

    def __call__(self, *args: Any) -> Any:
        """Run forward; the backward of what it returns reports to the flags of the parameters among ``args``."""
        if self._select is None:
            if any(isinstance(argument, FakeTensor) for argument in args):
                return self._compiled(*args, *self._examples)  # DDP compiles the next graph with this one's outputs
            self._select = self._look_at(args)
        key = tuple(map(id, self._select(args)))
        if self._others:
            key += tuple(id(args[position]) for position in self._others if args[position].is_leaf)
        flags = self._flags.get(key or (id(self._find_owner()[0]),))
        if flags is None:
            flags = self._bind(key, args)
        outputs = self._compiled(*args, flags.runtime.scale_on(self._device), self._probe)
        if not any([self._collect(node, flags) for node in backward_nodes(outputs)]):
            for node in backward_nodes(args):  # a result may have been written into an input
                self._collect(node, flags)
        return outputs

    def _look_at(self, args: Sequence[Any]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """See which of the differentiable inputs are parameters; return what picks those that tell models apart."""
        parameters = [i for i in self._slots if isinstance(args[i], nn.Parameter)]
        self._others = [i for i in self._slots if i not in parameters]
        telling = parameters[:: max(1, len(parameters) // _TELLING)]
        if len(telling) > 1:
            return operator.itemgetter(*telling)
        return lambda args: tuple(args[i] for i in telling)

    def _bind(self, key: tuple[int, ...], args: Sequence[Any]) -> Flags:
        runtime, model = self._find_owner()
        names = {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}
        key = key or (id(runtime),)
        flags = self._flags[key] = Flags(runtime, self._device)
        for slot, (position, name) in enumerate(self._slots.items()):
            parameter = args[position]
            if parameter.is_leaf:
                flags.belong_to(parameter, watch(parameter, names.get(id(parameter), name), runtime), slot)
                weakref.finalize(parameter, self._flags.pop, key, None).atexit = False
        return flags

    def _collect(self, node: Any, flags: Flags) -> bool:
        """Take the probe's gradient by a hook on backward (``torch.autograd.grad`` would not accumulate it).

        False where ``node`` is not of this graph.
        """
        kind = type(node)  # each compiled graph has a class of its own
        if kind not in self._probe_position:
            self._probe_position[kind] = _position_of(self._probe, node)
        position = self._probe_position[kind]
        if position is None:
            return False

        def take(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
            found = gradients[position]
            if found is not None:
                leaf = flags.a_leaf()
                flags.add(found, number_of_backward(), accumulates=leaf is not None and accumulates(leaf))
            return (*gradients[:position], None, *gradients[position + 1 :])

        node.register_hook(take)
        return True


def make_probe(slots: int, device: torch.device) -> Tensor:
    """The input whose gradient is the flags: fp32 [slots], never read."""
    return torch.zeros(slots, device=device, requires_grad=True)


def _position_of(leaf: Tensor, node: Any) -> int | None:
    """Which of the gradients of ``node`` is that of ``leaf``."""
    for position, (function, _) in enumerate(node.next_functions):
        if getattr(function, "variable", None) is leaf:
            return position
    return None
