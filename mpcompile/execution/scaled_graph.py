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
        self._collectors: dict[tuple[int, ...], _Collector] = {}
        self._select: Callable[[Sequence[Any]], tuple[Any, ...]] | None = None
        self._others: list[int] = []
        """Positions of the differentiable inputs that are no parameters: activations, and leaves of the user's."""
        self._backward = _Backward(self._probe)

    def __call__(self, *args: Any) -> Any:
        """Run forward; the backward of what it returns reports to the flags of the parameters among ``args``."""
        if self._select is None:
            if any(isinstance(argument, FakeTensor) for argument in args):
                return self._compiled(*args, *self._examples)  # DDP compiles the next graph with this one's outputs
            self._select = self._look_at(args)
        key = tuple(map(id, self._select(args)))
        if self._others:
            key += tuple(id(args[position]) for position in self._others if args[position].is_leaf)
        collector = self._collectors.get(key or (id(self._find_owner()[0]),))
        if collector is None:
            collector = self._bind(key, args)
        outputs = self._compiled(*args, collector.flags.runtime.scale_on(self._device), self._probe)
        if not self._hook_known(outputs, collector):
            self._hook_found(outputs, args, collector)
        return outputs

    def _look_at(self, args: Sequence[Any]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """See which of the differentiable inputs are parameters; return what picks those that tell models apart."""
        parameters = [i for i in self._slots if isinstance(args[i], nn.Parameter)]
        self._others = [i for i in self._slots if i not in parameters]
        telling = parameters[:: max(1, len(parameters) // _TELLING)]
        if len(telling) > 1:
            return operator.itemgetter(*telling)
        return lambda args: tuple(args[i] for i in telling)

    def _bind(self, key: tuple[int, ...], args: Sequence[Any]) -> _Collector:
        runtime, model = self._find_owner()
        names = {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}
        key = key or (id(runtime),)
        flags = Flags(runtime, self._device)
        collector = self._collectors[key] = _Collector(flags, self._backward)
        for slot, (position, name) in enumerate(self._slots.items()):
            parameter = args[position]
            if parameter.is_leaf:
                flags.belong_to(parameter, watch(parameter, names.get(id(parameter), name), runtime), slot)
                weakref.finalize(parameter, self._collectors.pop, key, None).atexit = False
        return collector

    def _hook_known(self, outputs: Sequence[Any], collector: _Collector) -> bool:
        """Hook the nodes of this graph right behind ``outputs``; False where there are none, or others too.

        The common case, and every call pays for it: a few microseconds.
        """
        hooked: Any = None
        known: Any = self._backward.kind
        for output in outputs:
            node: Any = output.grad_fn if isinstance(output, Tensor) else None
            if node is None or node is hooked:
                continue
            if type(node) is not known:
                return False
            node.register_hook(collector)
            hooked = node
        return hooked is not None

    def _hook_found(self, outputs: Sequence[Any], args: Sequence[Any], collector: _Collector) -> None:
        """Hook the nodes of this graph that are behind views, or behind an input that a result was written into."""
        if not any([self._hook(node, collector) for node in backward_nodes(outputs)]):
            for node in backward_nodes(args):
                self._hook(node, collector)

    def _hook(self, node: Any, collector: _Collector) -> bool:
        """Hook a node; False where it is not of this graph."""
        if not self._backward.is_of(node):
            return False
        node.register_hook(collector)
        return True


class _Backward:
    """The backward of one compiled graph, as autograd's nodes of it show it."""

    def __init__(self, probe: Tensor) -> None:
        self._probe = probe
        self.kind: type | None = None
        """Each compiled graph has a class of nodes of its own; None before the first one."""
        self._position = 0

    def is_of(self, node: Any) -> bool:
        """Whether ``node`` is of this graph: the probe is among its inputs."""
        if self.kind is None:
            functions = [getattr(function, "variable", None) for function, _ in node.next_functions]
            position = next((i for i, leaf in enumerate(functions) if leaf is self._probe), None)
            if position is None:
                return False
            self.kind, self._position = type(node), position
        return type(node) is self.kind

    def without_flags(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """The gradients that a node computed, without the probe's."""
        return (*gradients[: self._position], None, *gradients[self._position + 1 :])

    def flags_among(self, gradients: tuple[Tensor | None, ...]) -> Tensor | None:
        """The probe's gradient among those that a node computed."""
        return gradients[self._position]


class _Collector:
    """A hook on backward that takes the probe's gradient (``torch.autograd.grad`` would not accumulate it)."""

    def __init__(self, flags: Flags, backward: _Backward) -> None:
        self.flags = flags
        self._backward = backward

    def __call__(self, gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        found = self._backward.flags_among(gradients)
        if found is not None:
            leaf = self.flags.a_leaf()
            self.flags.add(found, number_of_backward(), accumulates=leaf is not None and accumulates(leaf))
        return self._backward.without_flags(gradients)


def make_probe(slots: int, device: torch.device) -> Tensor:
    """The input whose gradient is the flags: fp32 [slots], never read."""
    return torch.zeros(slots, device=device, requires_grad=True)
