"""Measure a model's error under a set of rules, and what every further rule would save."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpcompile.analysis.attribution import attribute
from mpcompile.analysis.capture import Loss, capture
from mpcompile.analysis.compared import Compared
from mpcompile.analysis.nonfinite import explain_origin, track
from mpcompile.analysis.scale import adapts
from mpcompile.analysis.targets import loss_scale_input
from mpcompile.notices import MixprecError
from mpcompile.tuning.cost import costs
from mpcompile.tuning.rules import rule_for
from mpcompile.tuning.scale_advice import scale_range
from mpcompile.tuning.search import Evaluation, Rules


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one call of the model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, given: Any) -> Batch:
        """From a tuple or list of arguments, a dict of keyword arguments, or the only argument."""
        if isinstance(given, Mapping):
            return cls((), given)
        return cls(tuple(given), {}) if isinstance(given, (tuple, list)) else cls((given,), {})


@dataclass(frozen=True, slots=True)
class Trial:
    """A model with batches to measure it on."""

    model: Callable[..., Any]
    batches: Sequence[Batch]
    options: Mapping[str, Any]
    loss: Loss | None
    objective: str

    def compared(self, rules: Rules) -> list[Compared]:
        """Every call of every graph, in all precisions, under ``rules`` in addition to the options' own."""
        options = {**self.options, "fp32": [*self.options.get("fp32", ()), *rules]}
        adapting = adapts(options)
        found = []
        with torch.random.fork_rng():
            for seed, batch in enumerate(self.batches):
                torch.manual_seed(seed)  # the same dropout in every trial
                calls = capture(self.model, batch.args, batch.kwargs, options, self.loss)
                with torch.no_grad():
                    found += [Compared.of(call, seed, adapting=adapting) for call in calls]
        return found

    def evaluate(self, rules: Rules) -> Evaluation:
        """Measure: the largest error over the batches, and contributions by rule."""
        compared = self.compared(rules)
        broken = next(filter(None, map(_broken, compared)), "")
        if broken:
            return Evaluation(float("inf"), {}, costs(compared, self.objective), broken)
        errors, sizes = [], defaultdict[str, float](float)
        with torch.no_grad():
            for batch in range(len(self.batches)):
                of_batch = [each for each in compared if each.index == batch]
                errors.append(_error(of_batch, sizes))
        return Evaluation(max(errors), dict(sizes), costs(compared, self.objective), scales=scale_range(compared))


def _broken(each: Compared) -> str:
    """The rule for what is not finite in one call; ``""`` where all results are as finite as in fp64."""
    mixed, wide = each.runs.mixed, each.runs.wide
    if all(torch.equal(mixed[r.node.name].isfinite(), wide[r.node.name].isfinite()) for r in each.results):
        return ""
    gm = each.runs.gm
    origin = track(gm, mixed).origin(gm)
    assert origin is not None
    inputs = {node.name: mixed[node.name] for node in gm.graph.find_nodes(op="placeholder")}
    found = explain_origin(gm, origin, mixed, inputs, each.draws, loss_scale_input(gm))
    if not found.rule:
        raise MixprecError(f"No set of rules makes this model finite.\n{found}")
    return found.rule


def _error(compared: Sequence[Compared], sizes: dict[str, float]) -> float:
    """The error of one batch; contributions are added to ``sizes``."""
    count = sum(len(each.everything) for each in compared)
    total, largest = 0.0, 0.0
    for each in compared:
        part = attribute(each.runs, each.local, each.target("all"), damped=False)
        total += part.measured
        for result in each.everything:
            if not result.is_gradient:
                largest = max(largest, each.error_of(result))
        nodes = {node.name: node for node in each.runs.gm.graph.nodes}
        for name, value in part.rounding.items():
            if rule := rule_for(nodes[name]):
                sizes[rule] += value / max(count, 1)
    return max(total / max(count, 1), largest)
