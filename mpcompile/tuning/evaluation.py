"""Measure a model's error under a set of rules, and what every further rule would save."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mpcompile.analysis.attribution import attribute
from mpcompile.analysis.capture import Batch, Loss, capture
from mpcompile.analysis.compared import Compared
from mpcompile.analysis.nonfinite import explain_origin, track
from mpcompile.analysis.scale import adapts
from mpcompile.analysis.targets import loss_scale_input
from mpcompile.notices import MixprecError
from mpcompile.tuning.cost import added, costs
from mpcompile.tuning.rules import rule_for
from mpcompile.tuning.scale_advice import exponents_of, scale_range
from mpcompile.tuning.search import Evaluation, Rules


@dataclass(frozen=True, slots=True)
class Trial:
    """A model with batches to measure it on."""

    model: Callable[..., Any]
    batches: Sequence[Batch]
    options: Mapping[str, Any]
    loss: Loss | None
    objective: str

    def evaluate(self, rules: Rules) -> Evaluation:
        """Measure under ``rules``, in addition to the options' own: the largest error over the batches.

        One call of a graph is held in all precisions at a time.
        """
        options = {**self.options, "fp32": [*self.options.get("fp32", ()), *rules]}
        tallies = [_Tally() for _ in self.batches]
        exponents: Counter[int] = Counter()
        prices: dict[str, float] = {}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            calls = capture(self.model, self.batches, options, self.loss)
            torch.manual_seed(0)  # the same dropout in every trial, whatever was drawn before
            for call in calls:
                with torch.no_grad():
                    each = Compared.of(call, call.batch, adapting=adapts(options))
                    if broken := _broken(each):
                        return Evaluation(math.inf, {}, prices, broken)
                    tallies[call.batch].add(each)
                exponents += exponents_of(each)
                if call.batch == 0:
                    prices = added(prices, costs(each, self.objective))
        return Evaluation(
            error=max(tally.error for tally in tallies),
            contributions=_mean([tally.contributions for tally in tallies]),
            costs=prices,
            scales=scale_range(exponents),
        )


@dataclass(slots=True)
class _Tally:
    """The errors of one batch, over the graphs it went through."""

    total: float = 0.0
    """Of relative errors of outputs and gradients."""
    count: int = 0
    largest: float = 0.0
    """Relative error of an output."""
    sizes: dict[str, float] = field(default_factory=dict)

    def add(self, each: Compared) -> None:
        part = attribute(each.runs, each.local, each.target("all"), damped=False)
        self.total += part.measured
        self.count += len(each.everything)
        outputs = [result for result in each.everything if not result.is_gradient]
        self.largest = max([self.largest, *map(each.error_of, outputs)])
        nodes = {node.name: node for node in each.runs.gm.graph.nodes}
        for name, value in part.rounding.items():
            if rule := rule_for(nodes[name]):
                self.sizes[rule] = self.sizes.get(rule, 0.0) + value

    @property
    def error(self) -> float:
        return max(self.total / max(self.count, 1), self.largest)

    @property
    def contributions(self) -> dict[str, float]:
        return {rule: size / max(self.count, 1) for rule, size in self.sizes.items()}


def _mean(given: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in given:
        found = added(found, each)
    return {rule: size / len(given) for rule, size in found.items()}


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
