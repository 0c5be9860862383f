"""The search for rules, on made-up models whose errors are sums."""

import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpcompile.tuning.search import Evaluation, OutOfBudget, Rules, Unreachable, search


class Sum:
    """A model whose error is a floor and what every rule that is not given adds."""

    def __init__(
        self, sizes: Mapping[str, float], floor: float = 0.0, costs: Mapping[str, float] | None = None, limit: int = 99
    ) -> None:
        self.sizes, self.floor, self.costs, self.limit = sizes, floor, costs or {}, limit
        self.measured: list[Rules] = []

    def evaluate(self, rules: Rules) -> Evaluation:
        key = tuple(sorted(rules))
        if key not in self.measured:
            if len(self.measured) == self.limit:
                raise OutOfBudget
            self.measured.append(key)
        left = {rule: size for rule, size in self.sizes.items() if rule not in rules}
        return Evaluation(self.floor + sum(left.values()), left, self.costs)


def test_three_among_two_hundred() -> None:
    sizes = {f"layer.{i}": 1e-5 for i in range(200)} | {"layer.17": 0.1, "layer.90": 0.04, "layer.150": 0.06}
    model = Sum(sizes)
    found = search(model.evaluate, 0.03)
    assert set(found.rules) == {"layer.17", "layer.90", "layer.150"}
    assert all(error > 0.03 for error in found.without.values())
    assert set(found.without) == set(found.rules)
    assert len(model.measured) <= 25


def test_nothing_is_needed() -> None:
    model = Sum({"a": 0.01, "b": 0.01})
    assert search(model.evaluate, 0.03).rules == ()
    assert len(model.measured) == 1


@settings(max_examples=60, deadline=None)
@given(sizes=st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.floats(1e-4, 1), max_size=12))
def test_what_is_found_meets_the_tolerance_and_no_rule_is_idle(sizes: dict[str, float]) -> None:
    model = Sum(sizes)
    found = search(model.evaluate, 0.25)
    assert found.evaluation.error <= 0.25
    for rule in found.rules:
        assert model.evaluate(tuple(r for r in found.rules if r != rule)).error > 0.25


def test_of_two_that_do_as_much_the_dear_one_goes() -> None:
    class Either(Sum):
        def evaluate(self, rules: Rules) -> Evaluation:
            found = super().evaluate(rules)
            return Evaluation(0.0 if {"a", "b"} & set(rules) else 1.0, {"a": 0.6, "b": 0.6}, found.costs)

    for dear, cheap in (("a", "b"), ("b", "a")):
        model = Either({"a": 0.6, "b": 0.6}, costs={dear: 100.0, cheap: 1.0})
        assert search(model.evaluate, 0.5).rules == (cheap,)


def test_contributions_that_are_wrong_are_corrected_by_measuring() -> None:
    class Lying(Sum):
        def evaluate(self, rules: Rules) -> Evaluation:
            found = super().evaluate(rules)
            return Evaluation(
                found.error, {r: 0.2 if r == "harmless" else s for r, s in found.contributions.items()}, {}
            )

    model = Lying({"harmless": 0.0, "harmful": 0.15})
    assert search(model.evaluate, 0.1).rules == ("harmful",)


def test_what_is_not_finite_comes_first() -> None:
    def evaluate(rules: Rules) -> Evaluation:
        if "broken" not in rules:
            return Evaluation(math.inf, {}, {}, "broken")
        return Evaluation(0.2 if "b" not in rules else 0.0, {"b": 0.2}, {})

    found = search(evaluate, 0.1)
    assert found.rules == ("broken", "b")
    assert found.without["broken"] == math.inf


def test_a_tolerance_out_of_reach() -> None:
    with pytest.raises(Unreachable) as error:
        search(Sum({"a": 0.1}, floor=0.5).evaluate, 0.3)
    assert error.value.evaluation.error == 0.5
    stuck = Evaluation(math.inf, {}, {}, "broken")
    with pytest.raises(Unreachable):
        search(lambda _: stuck, 0.3)


def test_measurements_that_run_out() -> None:
    sizes = {name: 0.1 for name in "abcdefgh"}
    with pytest.raises(OutOfBudget):
        search(Sum(sizes, limit=1).evaluate, 0.15)
    found = search(Sum(sizes, limit=3).evaluate, 0.15)
    assert found.evaluation.error <= 0.15
