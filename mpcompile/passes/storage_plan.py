"""The storage plan: which values are kept in the low type where they cross memory or wait for backward.

Pure: reads a graph and a policy, changes nothing; ``storage`` carries the plan out. For every value there are two
choices, of which the first implies the second: all its readers read the low form (``STORED``), its readers in backward
do (``SAVED``). The bytes they save are weighed against the roundings they cost over the whole graph at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from mpcompile.passes.compute_plan import plan_compute
from mpcompile.passes.cost_model import PRESETS, CostModel, Value
from mpcompile.passes.exactness import sources
from mpcompile.passes.minimum_cut import NEVER, minimise
from mpcompile.passes.policy import Policy
from mpcompile.passes.readers import readers_below

STORED, SAVED, EXACT = "stored", "saved", "exact"

Choice = tuple[str, fx.Node]
"""``STORED`` or ``SAVED`` of a value, or ``EXACT``: all that it is a selection of is stored low."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The energy of all plans for one graph: see ``minimum_cut``."""

    values: dict[fx.Node, Value]
    cost: dict[Choice, float]
    pulls: list[tuple[Choice, Choice, float]]


def plan_storage(gm: fx.GraphModule, policy: Policy) -> dict[Value, str]:
    """The values to keep low and how, ``"stored"`` or ``"saved"``, in the order of the graph.

    ``gm``: a joint or inference graph after ``insert_casts``. The plan has the least energy of all.
    """
    problem = storage_problem(gm, policy)
    chosen = minimise(problem.cost, problem.pulls)
    plan: dict[Value, str] = {}
    for node, value in problem.values.items():
        if (STORED, node) in chosen and value.sooner:
            plan[value] = STORED
        elif (SAVED, node) in chosen:
            plan[value] = SAVED
    return plan


def storage_problem(gm: fx.GraphModule, policy: Policy) -> Problem:
    """Weigh every value of a graph."""
    kept = {node for node, decision in plan_compute(gm, policy).items() if decision.precision == "fp32"}
    model = CostModel(gm.graph, policy.dtype, PRESETS[policy.preset], kept)
    found = ((node, model.value(node)) for node in gm.graph.nodes)
    values = {node: value for node, value in found if value is not None}
    problem = Problem(values, {}, [])
    for node, value in values.items():
        stored, saved, exact = (STORED, node), (SAVED, node), (EXACT, node)
        below = sources(node, policy.dtype)
        is_selection = below is not None and all(_reads(node, values.get(source)) for source in below)
        problem.cost[stored] = value.for_sooner
        problem.cost[saved] = value.for_later
        problem.cost[exact] = 0.0 if is_selection else NEVER
        problem.pulls.extend(
            [
                (stored, saved, NEVER),
                (stored, exact, value.rounding),
                (saved, exact if is_selection else stored, value.rounding_later),
                *((exact, (STORED, source), NEVER) for source in (below or ()) if is_selection),
            ]
        )
    return problem


def _reads(node: fx.Node, source: Value | None) -> bool:
    """Whether ``node`` reads the low form of ``source`` where that is stored so."""
    return source is not None and any(node in readers_below(reader) for reader in (*source.sooner, *source.later))
