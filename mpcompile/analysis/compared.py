"""One call of a graph, run in every precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mpcompile.analysis.attribution import Local, Target, error_of_loss, errors_of, local_errors
from mpcompile.analysis.capture import GraphCall
from mpcompile.analysis.evaluate import Values, run
from mpcompile.analysis.measure import distance, norm, ratio
from mpcompile.analysis.runs import Runs
from mpcompile.analysis.scale import settle
from mpcompile.analysis.targets import Result, loss_scale_input, results_of


@dataclass(frozen=True, slots=True)
class Compared:
    """One call of a graph, in every precision."""

    index: int
    """Given by whoever asked."""
    low: torch.dtype
    runs: Runs
    truth: Values
    """In fp64, of the graph before the passes; they have no part in it."""
    local: Mapping[str, Local]
    results: Sequence[Result]
    draws: Values
    """The results of random operations."""
    scale: float | None
    """The loss scale; None where nothing is scaled."""

    @classmethod
    def of(cls, call: GraphCall, index: int, *, adapting: bool) -> Compared:
        """Run one call; ``adapting``: at the loss scale that training would fall to."""
        results = results_of(call.before, call.after)
        draws: Values = {}
        inputs, mixed = settle(call, draws) if adapting else (call.inputs, run(call.after, call.inputs, None, draws))
        runs = Runs(
            call.after,
            mixed,
            run(call.after, inputs, torch.float32, draws),
            run(call.after, inputs, torch.float64, draws),
        )
        truth = run(call.before, inputs, torch.float64, draws)
        name = loss_scale_input(call.after)
        scale = float(inputs[name]) if name else None
        return cls(index, call.dtype, runs, truth, local_errors(runs), results, draws, scale)

    @property
    def everything(self) -> list[Result]:
        """What the ranking goes by: outputs that the loss depends on and gradients, or all outputs without backward."""
        chosen = [r for r in self.results if r.is_gradient or r.tangent]
        return chosen if any(r.is_gradient for r in chosen) else list(self.results)

    def error_of(self, result: Result) -> float:
        """The relative error of one result in mixed precision, against fp64."""
        truth = [self.truth[result.was.name]]
        return ratio(distance([self.runs.mixed[result.node.name]], truth), norm(truth))

    def target(self, name: str) -> Target:
        """What is shared out under this name; ``KeyError`` where there is no such result."""
        if name == "all":
            return errors_of(self.runs, self.everything, relative=True)
        if name == "loss":
            return error_of_loss(self.runs, self.results)
        return errors_of(self.runs, [r for r in self.results if r.name == name], relative=False)
