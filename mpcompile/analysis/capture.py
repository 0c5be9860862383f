"""Run a model once, with its backward, and keep every graph with the inputs it really got."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from mpcompile.backend import compile_graph
from mpcompile.inspection.registry import reports
from mpcompile.look import compile_apart, looking
from mpcompile.notices import MixprecError
from mpcompile.options import Options

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class GraphCall:
    """One call of one captured graph."""

    before: fx.GraphModule
    """The joint graph (or the inference graph) before the precision passes."""
    after: fx.GraphModule
    """The same graph as the passes left it."""
    inputs: Mapping[str, Any]
    """What every placeholder was, by its name: primals, and the tangents where backward ran."""
    dtype: torch.dtype
    """The low type."""
    batch: int
    """Which of the batches it was called with."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one call of a model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, given: Any) -> Batch:
        """From a tuple or list of arguments, a dict of keyword arguments, or the only argument."""
        if isinstance(given, Mapping):
            return cls((), given)
        return cls(tuple(given), {}) if isinstance(given, (tuple, list)) else cls((given,), {})


def default_loss(output: Any) -> Tensor:
    """The output where it is one number, else the mean of squares over all floating-point outputs."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not tensors:
        raise ValueError("The model returns no floating-point tensor; give `loss`, a function of what it returns.")
    if len(tensors) == 1 and tensors[0].numel() == 1:
        return tensors[0].reshape(())
    return torch.stack([tensor.float().square().mean() for tensor in tensors]).mean()


def capture(
    model: Callable[..., Any],
    batches: Sequence[Batch],
    options: Mapping[str, Any] | None,
    loss: Loss | None,
) -> list[GraphCall]:
    """Call a copy of ``model`` on every batch, with backward from ``loss`` where gradients are enabled.

    The model, its gradients and buffers stay as they are, the random state does not. Raises what compiling with
    ``options`` raises, and ``MixprecError`` where no graph was captured.
    """
    settings = _options(options)
    subject = copy.deepcopy(model) if isinstance(model, nn.Module) else model
    watches: list[_Watch] = []

    def watched(gm: fx.GraphModule, example_inputs: Any, *, options: Any = None) -> Callable[..., Any]:
        watch = _Watch()
        watches.append(watch)
        return watch.over(compile_graph(gm, example_inputs, Options.parse(options), execute=watch.execute))

    compiled = compile_apart(subject, watched, settings)
    found: list[GraphCall] = []
    for index, batch in enumerate(batches):
        args, kwargs = tree_map(_own, (batch.args, dict(batch.kwargs)))
        with looking():
            output = compiled(*args, **kwargs)
        leaves = list({id(leaf): leaf for watch in watches for leaf in watch.leaves}.values())
        if torch.is_grad_enabled() and leaves:
            _run_backward((loss or default_loss)(output), leaves)
        for watch, report in zip(watches, reports(compiled), strict=True):
            graphs, dtype = report.modules[0], getattr(torch, report.dtype)
            found += [GraphCall(*graphs, call.inputs, dtype, index) for call in watch.calls]
            watch.calls.clear()
            watch.leaves.clear()
    if not found:
        raise MixprecError("Dynamo captured no graph: everything ran eagerly, in float32. See TORCH_LOGS=graph_breaks.")
    return found


def _run_backward(loss: Tensor, leaves: Sequence[Tensor]) -> None:
    if loss.requires_grad:
        # Not backward(): it would accumulate into tensors that a function refers to.
        torch.autograd.grad(loss, leaves, allow_unused=True)


def _options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """What decides precision in ``given``: how graphs are run is ours, and a weight cache changes no number."""
    Options.parse(given)
    own = ("compiler", "inductor", "weight_cache", "check")
    return {key: value for key, value in (given or {}).items() if key not in own}


def _own(value: Any) -> Any:
    """An input of our own, so that nothing is written to the user's, nor to its gradient."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


@dataclass(slots=True, eq=False)
class _Call:
    inputs: dict[str, Any]
    addresses: frozenset[int] = frozenset()
    """Of the memory of what forward read and returned: backward is given some of it."""
    has_backward: bool = False


@dataclass(slots=True)
class _Watch:
    """Runs the forward and the backward graph of one Dynamo graph, and keeps what they are called with."""

    calls: list[_Call] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    """What the graph was called with that has a gradient of its own."""

    def over(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph, its leaves kept."""

        def call(*args: Any) -> Any:
            self.leaves += [a for a in args if isinstance(a, Tensor) and a.is_leaf and a.requires_grad]
            return compiled(*args)

        return call

    def execute(self, graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        is_backward = any(name.startswith("tangents") for name in names)

        def run(*args: Any) -> Any:
            given = dict(zip(names, args, strict=True))
            call = self._forward_of(args) if is_backward else _Call({})
            kept = {name: _kept(value) for name, value in given.items() if not is_backward or _is_tangent(name)}
            call.inputs.update(kept)
            results = fx.Interpreter(graph).run(*args)
            if not is_backward:
                call.addresses = _addresses((args, results))
                self.calls.append(call)
            return results

        return run

    def _forward_of(self, saved: Sequence[Any]) -> _Call:
        """The call whose backward is given ``saved``: of those that wait, the latest that shares most memory."""
        found = _addresses(saved)
        waiting = [call for call in reversed(self.calls) if not call.has_backward]
        call = max(waiting, key=lambda call: len(call.addresses & found))
        call.has_backward = True
        return call


def _is_tangent(name: str) -> bool:
    return name.startswith("tangents")


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _addresses(values: Any) -> frozenset[int]:
    return frozenset(leaf.data_ptr() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
