"""Minimise an energy over yes-or-no choices that pull on each other, exactly, by minimum cuts.

    E(x) = sum of cost[v] * x[v]  +  sum over (v, u, price) of price * x[v] * (1 - x[u])        x[v] in {0, 1}

Energies of this form are submodular: the best assignment is a minimum s-t cut (Kolmogorov and Zabih, "What energy
functions can be minimized via graph cuts?", 2004).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import networkx as nx

V = TypeVar("V", bound=Hashable)
Pulls = Sequence[tuple[V, V, float]]

NEVER = math.inf
"""A cost or a price that no saving is worth."""

_SOURCE, _SINK = "source", "sink"


def energy(cost: Mapping[V, float], pulls: Pulls[V], chosen: set[V]) -> float:
    """The energy of an assignment: that where exactly ``chosen`` are yes."""
    own = sum(amount for choice, amount in cost.items() if choice in chosen)
    return own + sum(price for choice, other, price in pulls if choice in chosen and other not in chosen)


def minimise(cost: Mapping[V, float], pulls: Pulls[V]) -> set[V]:
    """The choices that are yes in the cheapest assignment; among equally cheap ones, that with the fewest.

    ``cost``: what a yes adds (negative where it saves); ``pulls``: ``(v, u, price)``, what a yes of ``v`` adds while
    ``u`` is a no, at least 0. Either may be ``NEVER``. Raises ``KeyError`` where a pull is of a choice without a cost.

    Near-linear where the pulls fall into small groups: what nothing pulls on is settled by its own sign, a group
    without any saving is all no, and every other group is cut by itself.
    """
    groups: nx.Graph = nx.Graph()
    groups.add_nodes_from(cost)
    for choice, other, _ in pulls:
        groups.add_edge(choice, other)
    if unknown := [choice for choice in groups if choice not in cost]:
        raise KeyError(f"no cost is given for {unknown[0]!r}")
    chosen: set[V] = set()
    where = {choice: number for number, group in enumerate(nx.connected_components(groups)) for choice in group}
    members: dict[int, list[V]] = {}
    for choice in cost:  # in the order they were given, so that every run decides alike
        members.setdefault(where[choice], []).append(choice)
    inside: dict[int, list[tuple[V, V, float]]] = {}
    for pull in pulls:
        inside.setdefault(where[pull[0]], []).append(pull)
    for number, group in members.items():
        if any(cost[choice] < 0 for choice in group):
            chosen |= _cut(group, cost, inside.get(number, []))
    return chosen


def _cut(group: list[V], cost: Mapping[V, float], pulls: Pulls[V]) -> set[V]:
    if not pulls:
        return {choice for choice in group if cost[choice] < 0}
    graph: nx.DiGraph = nx.DiGraph()
    for choice in group:
        # The sink's side is yes (networkx returns the smallest one): cut are the costs of a yes, the savings of a no.
        _add(graph, _SOURCE, ("choice", choice), max(cost[choice], 0.0))
        _add(graph, ("choice", choice), _SINK, max(-cost[choice], 0.0))
    for choice, other, price in pulls:
        _add(graph, ("choice", other), ("choice", choice), price)
    _, (_, yes) = nx.minimum_cut(graph, _SOURCE, _SINK)
    return {choice for choice in group if ("choice", choice) in yes}


def _add(graph: nx.DiGraph, start: object, end: object, capacity: float) -> None:
    """Add to an edge's capacity; networkx takes an edge without one for infinite."""
    if math.isinf(capacity):
        graph.add_edge(start, end)
        graph[start][end].pop("capacity", None)  # of a finite price on the same pair
    elif not graph.has_edge(start, end):
        graph.add_edge(start, end, capacity=capacity)
    elif "capacity" in graph[start][end]:
        graph[start][end]["capacity"] += capacity
