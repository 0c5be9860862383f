"""minimum_cut: the cheapest of all assignments, the fewest yeses among equals, and how the work grows."""

import random
from collections.abc import Iterator
from itertools import chain, combinations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpcompile.passes import minimum_cut
from mpcompile.passes.minimum_cut import NEVER, energy, minimise

Cost = dict[int, float]
Pulls = list[tuple[int, int, float]]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Cost, Pulls]:
    """Up to eight choices. Multiples of 1/4, so that sums are exact and many assignments are equally cheap."""
    count = draw(st.integers(1, 8))
    amounts = st.integers(-12, 12).map(lambda n: n / 4) | st.sampled_from([NEVER, 0.0])
    prices = st.integers(0, 12).map(lambda n: n / 4) | st.just(NEVER)
    choices = st.integers(0, count - 1)
    pull = st.tuples(choices, choices, prices).filter(lambda p: p[0] != p[1])
    cost = dict(enumerate(draw(st.lists(amounts, min_size=count, max_size=count))))
    return cost, draw(st.lists(pull, max_size=16)) if count > 1 else []


def subsets(choices: Cost) -> Iterator[set[int]]:
    found = chain.from_iterable(combinations(choices, size) for size in range(len(choices) + 1))
    return map(set, found)


@settings(max_examples=150, deadline=None)
@given(problems())
def test_no_assignment_is_cheaper_and_no_smaller_one_as_cheap(problem: tuple[Cost, Pulls]) -> None:
    cost, pulls = problem
    chosen = minimise(cost, pulls)
    best = min(energy(cost, pulls, assignment) for assignment in subsets(cost))
    assert energy(cost, pulls, chosen) == best
    cheapest = [assignment for assignment in subsets(cost) if energy(cost, pulls, assignment) == best]
    assert all(chosen <= assignment for assignment in cheapest)  # the one that all the others contain


def test_energy_is_the_sum_of_costs_and_of_prices_that_are_not_avoided() -> None:
    cost, pulls = {"a": -5.0, "b": 2.0, "c": 1.0}, [("a", "b", 4.0), ("b", "c", 0.5), ("c", "a", 8.0)]
    found = {"".join(sorted(s)): energy(cost, pulls, s) for s in map(set, ("", "a", "ab", "abc", "b", "c"))}
    assert found == {"": 0.0, "a": -1.0, "ab": -2.5, "abc": -2.0, "b": 2.5, "c": 9.0}
    assert minimise(cost, pulls) == {"a", "b"}


@pytest.mark.parametrize(
    ("cost", "pulls", "chosen"),
    [
        ({}, [], set()),
        ({"a": 0.0}, [], set()),
        ({"a": -1.0}, [], {"a"}),
        ({"a": NEVER, "b": -1.0}, [("b", "a", NEVER)], set()),
        ({"a": NEVER, "b": -1.0}, [("b", "a", 0.5)], {"b"}),
        ({"a": -NEVER, "b": 7.0}, [("a", "b", NEVER)], {"a", "b"}),
        ({"a": -1.0, "b": 1.0}, [("a", "b", NEVER)], set()),
        ({"a": -1.0, "b": 0.0}, [("a", "b", 3.0)], {"a", "b"}),
        ({"a": -1.0, "b": 5.0}, [("a", "b", 0.25), ("a", "b", 0.5)], {"a"}),
        ({"a": -1.0, "b": 5.0}, [("a", "b", 0.5), ("a", "b", 0.5)], set()),
    ],
)
def test_small_problems(cost: dict[str, float], pulls: list[tuple[str, str, float]], chosen: set[str]) -> None:
    assert minimise(cost, pulls) == chosen


@pytest.mark.parametrize("pull", [("a", "b", 1.0), ("b", "a", 1.0)])
def test_a_choice_without_a_cost_is_refused(pull: tuple[str, str, float]) -> None:
    with pytest.raises(KeyError, match="no cost is given for 'b'"):
        minimise({"a": -1.0}, [pull])


def random_problem(seed: int, count: int) -> tuple[Cost, Pulls]:
    """Savings and losses of similar size, some forbidden, with two pulls per choice."""
    rng = random.Random(seed)
    cost = {n: rng.choice((rng.uniform(-4, 3), rng.uniform(-4, 3), 0.0)) for n in range(count)}
    ends = [rng.sample(range(count), 2) for _ in range(2 * count)]
    return cost, [(a, b, rng.choice((rng.uniform(0, 4), rng.uniform(0, 4), NEVER))) for a, b in ends]


def flip_greedily(cost: Cost, pulls: Pulls) -> set[int]:
    """From nothing chosen, flip the choice that lowers the energy most, until none does."""
    chosen: set[int] = set()
    while True:
        best = min((chosen ^ {choice} for choice in cost), key=lambda flipped: energy(cost, pulls, flipped))
        if energy(cost, pulls, best) >= energy(cost, pulls, chosen):
            return chosen
        chosen = best


def test_never_worse_than_flipping_greedily_and_often_better() -> None:
    better = 0
    for seed in range(12):
        cost, pulls = random_problem(seed, 60)
        greedy, best = (energy(cost, pulls, solve(cost, pulls)) for solve in (flip_greedily, minimise))
        assert best <= greedy + 1e-9
        better += best < greedy - 1e-9
    assert better >= 6


def test_the_order_of_the_pulls_changes_nothing() -> None:
    cost, pulls = random_problem(3, 60)
    first = minimise(cost, pulls)
    rng = random.Random(0)
    for _ in range(5):
        order = rng.sample(list(cost), len(cost))
        assert minimise({choice: cost[choice] for choice in order}, rng.sample(pulls, len(pulls))) == first


def test_small_groups_are_cut_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[int] = []
    solve = nx.minimum_cut

    def counted(graph: nx.DiGraph, source: str, sink: str) -> object:
        cut.append(len(graph))
        return solve(graph, source, sink)

    monkeypatch.setattr(minimum_cut.nx, "minimum_cut", counted)
    count = 10_000  # in chains of five: the first saves, each asks for the next, every other chain is worth it
    cost = {n: (-4.0 if n % 10 == 0 else -2.0) if n % 5 == 0 else 0.75 for n in range(count)}
    pulls = [(n, n + 1, NEVER) for n in range(count) if n % 5 != 4]
    chosen = minimise(cost, pulls)
    assert chosen == {n for n in range(count) if n % 10 < 5}
    assert cut == [7] * (count // 5)  # with the source and the sink


def test_a_group_without_a_saving_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minimum_cut.nx, "minimum_cut", None)  # a call would raise
    cost = {n: float(n % 3) for n in range(100)}
    assert minimise(cost, [(n, n + 1, 1.0) for n in range(99)]) == set()
    assert minimise({1: -1.0, 2: 1.0, 3: -NEVER}, []) == {1, 3}
