"""Put the loss scale into a captured graph, and find the runtime that holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from mpcompile.device import automatic_dtype, main_device
from mpcompile.execution.optimizer_step import install
from mpcompile.execution.runtime import Runtime
from mpcompile.execution.scaled_graph import Owner, ScaledGraph, make_probe
from mpcompile.graph_inputs import GraphInputs
from mpcompile.options import Options
from mpcompile.torch_compat import add_input, compile_call, running_call, subject_of

_ATTRIBUTE = "_mixprec_runtime"
"""Of a ``torch.compile`` call: its ``Runtime``."""


def runtime(compiled: Callable[..., Any]) -> Runtime:
    """The runtime of a compiled model: its loss scale, skipped steps, overflowed parameters, and their state to save.

    ``compiled`` is what ``torch.compile(model, backend="mixprec", ...)`` returned, or a module after
    ``module.compile(...)``; it need not have run yet. Raises ``TypeError`` for anything else.
    """
    call = compile_call(compiled)
    if call is None or call.compiler_name != "mixprec":
        raise TypeError(
            "mpcompile.runtime needs what torch.compile(..., backend='mixprec') returned, or a module after "
            f"module.compile(backend='mixprec'); got {type(compiled).__name__}."
        )
    return runtime_of(call, subject_of(compiled))


def runtime_of(call: Any, subject: Any) -> Runtime:
    """The runtime of a ``torch.compile`` call for the model or function ``subject``."""
    if _ATTRIBUTE not in call.__dict__:
        options = Options.parse(call.kwargs.get("options"))
        tensors = subject.parameters() if isinstance(subject, nn.Module) else ()
        policy = options.resolve_policy(automatic_dtype(main_device(tensors)))
        call.__dict__[_ATTRIBUTE] = Runtime(options.scaling(policy.dtype), policy.digest, strict=options.strict)
    found: Runtime = call.__dict__[_ATTRIBUTE]
    return found


@dataclass(frozen=True, slots=True)
class LossScaling:
    """Loss scaling of one graph that is being compiled."""

    slots: Mapping[int, str]
    call: Any
    """The ``torch.compile`` call that asked for the graph."""
    state: tuple[torch.Tensor, ...]
    """Examples of the loss scale and the probe, to compile with; none where nothing is scaled."""

    @classmethod
    def attach(cls, graph: fx.GraphModule, inputs: GraphInputs, device: torch.device, call: Any) -> LossScaling:
        """Give ``graph`` the inputs that scaling needs: the loss scale and the probe, whose gradient is the flags."""
        if not inputs.slots:
            return cls({}, call, ())
        scale = add_input(graph, "loss_scale", torch.ones((), device=device))
        probe = add_input(graph, "overflow_probe", make_probe(len(inputs.slots), device))
        return cls(inputs.slots, call, (scale, probe))

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Call the compiled graph with the present loss scale, and watch its backward."""
        if not self.state:
            return compiled
        install()
        scale, probe = self.state
        return ScaledGraph(compiled, self.slots, (scale, probe), self._find_owner)

    def _find_owner(self) -> Owner:
        """The runtime of the model being called: Dynamo may run this code for another of equal structure."""
        call, root = running_call()
        return runtime_of(call if call == self.call else self.call, root), root
