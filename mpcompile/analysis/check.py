"""Option ``check``: run the rewritten graphs one operation at a time and name the first value that is not finite.

An error, but for gradients under a loss scale that can still fall: there an overflow is how the scale finds its place,
so the step is left to be skipped, with a warning and ``runtime.first_nonfinite``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mpcompile.analysis.evaluate import Values, is_random
from mpcompile.analysis.nonfinite import NonFinite, Tracker, explain_origin
from mpcompile.analysis.targets import loss_scale_input
from mpcompile.execution.loss_scale import DynamicLossScale
from mpcompile.execution.runtime import Runtime
from mpcompile.notices import MixprecError, notify
from mpcompile.options import Options


@dataclass(frozen=True, slots=True)
class Check:
    """Runs the graphs of one Dynamo graph and looks at every value."""

    settings: Options
    find_runtime: Callable[[], Runtime]

    def execute(self, graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        """What runs one of AOTAutograd's graphs."""
        names = [node.name for node in graph.graph.find_nodes(op="placeholder")]

        def run(*args: Any) -> Any:
            watched = _Watched(graph)
            results = watched.run(*args)
            origin = watched.tracker.origin(graph)
            if origin is not None:
                inputs = dict(zip(names, args, strict=True))
                scale = loss_scale_input(graph)
                with torch.no_grad():
                    self._report(explain_origin(graph, origin, watched.tracker.values, inputs, watched.draws, scale))
            return results

        return run

    def _report(self, found: NonFinite) -> None:
        scaling = self.settings.scaling(torch.float16)
        may_fall = isinstance(scaling, DynamicLossScale) and (found.loss_scale or 0) > scaling.floor
        if found.direction == "forward" or not may_fall:
            raise MixprecError(str(found))
        if not self.find_runtime().note_nonfinite(found):
            return
        skipped = (
            f"  That is at a loss scale of {found.loss_scale:g}: the optimizer step is skipped, and the scale falls."
        )
        notify(f"{found}\n{skipped}", strict=self.settings.strict)


class _Watched(fx.Interpreter):
    """The reference execution, with a look at every value."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.tracker = Tracker()
        self.draws: Values = {}

    def run_node(self, n: fx.Node) -> Any:
        given: Mapping[str, Any] = {source.name: self.env[source] for source in n.all_input_nodes}
        value = super().run_node(n)
        if n.op != "output":
            self.tracker.see(n, value, given)
        if is_random(n):
            self.draws[n.name] = value
        return value
