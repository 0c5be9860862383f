"""The search for a small set of rules: a sensitivity for each from one measurement, then measurements to confirm.

Knows nothing of models: it is given a function that measures the error under a set of rules.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Rules = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured under a set of rules."""

    error: float
    """Infinite where something is not finite."""
    contributions: Mapping[str, float]
    """By rule: how much of ``error`` would be gone with it, to first order."""
    costs: Mapping[str, float]
    """By rule: what it costs, in units of the objective."""
    broken: str = ""
    """The rule for the first value that is not finite."""
    scales: tuple[float, float] | None = None
    """The smallest and the largest loss scale that the gradients allow; None where nothing is scaled."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The rules that were found."""

    rules: Rules
    evaluation: Evaluation
    """With these rules."""
    without: Mapping[str, float]
    """By rule: the error measured with all the others and without it; of those that were tried."""


class OutOfBudget(Exception):
    """No more measurements are allowed."""


class Unreachable(Exception):
    """No rule is left that would lower the error."""

    def __init__(self, rules: Rules, evaluation: Evaluation) -> None:
        super().__init__()
        self.rules = rules
        self.evaluation = evaluation


def search(evaluate: Callable[[Rules], Evaluation], tolerance: float) -> Outcome:
    """The smallest set of rules found with an error of at most ``tolerance``.

    .. code-block:: text

        while the error is above the tolerance:
            add the rules with the largest contributions, of those about as large the cheapest, as many as bring it
            below by their sum; measure
        for groups of them, halved until they are single, those that contribute least for their cost first:
            measure without the group, unless it contributes too much; drop it where the error stays within

    Raises ``Unreachable``, and ``OutOfBudget`` where ``evaluate`` does before the tolerance is met; once it is met,
    a set that could not be made smaller for want of measurements is returned as it is.
    """
    rules: Rules = ()
    found = evaluate(rules)
    sizes, costs = dict(found.contributions), found.costs
    while found.error > tolerance:
        more = _to_add(found, rules, tolerance)
        if not more:
            raise Unreachable(rules, found)
        rules += more
        found = evaluate(rules)
        sizes.update({rule: size for rule, size in found.contributions.items() if rule not in rules})
    order = sorted(rules, key=lambda rule: (sizes.get(rule, 0.0) / (costs.get(rule) or 1.0), rule))
    pruning = _Pruning(evaluate, tolerance, sizes, set(rules), {})
    with contextlib.suppress(OutOfBudget):  # what is kept by then meets the tolerance
        pruning.prune(order)
    kept = tuple(rule for rule in rules if rule in pruning.kept)
    return Outcome(kept, evaluate(kept), {rule: e for rule, e in pruning.without.items() if rule in kept})


def _to_add(found: Evaluation, rules: Rules, tolerance: float) -> Rules:
    if found.broken:
        return () if found.broken in rules else (found.broken,)
    candidates = [(size, rule) for rule, size in found.contributions.items() if rule not in rules and size > 0]
    added: Rules = ()
    left = found.error
    for size, rule in sorted(candidates, key=lambda pair: (_step(pair[0]), found.costs.get(pair[1], 0.0), pair[1])):
        if added and left <= tolerance:
            break
        added += (rule,)
        left -= size
    return added


def _step(size: float) -> int:
    """Which of four steps to an octave a size is on, downwards: those on one step are about as large."""
    return -round(4 * math.log2(size))


@dataclass(slots=True)
class _Pruning:
    evaluate: Callable[[Rules], Evaluation]
    tolerance: float
    sizes: Mapping[str, float]
    kept: set[str]
    without: dict[str, float]

    def prune(self, group: list[str]) -> None:
        """Drop what of ``group`` is not needed."""
        if len(group) == 1 or sum(self.sizes.get(rule, math.inf) for rule in group) <= self.tolerance:
            error = self.evaluate(tuple(sorted(self.kept - set(group)))).error
            if error <= self.tolerance:
                self.kept -= set(group)
                return
            if len(group) == 1:
                self.without[group[0]] = error
        if len(group) > 1:
            self.prune(group[: len(group) // 2])
            self.prune(group[len(group) // 2 :])
