"""The order of the passes, and the runner that applies them to any functional ATen graph."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from mpcompile.passes.casts import fold_casts, insert_casts
from mpcompile.passes.compute_plan import require_matches
from mpcompile.passes.graph import is_cast, is_partial_view, is_tuple_view, is_view, subgraphs
from mpcompile.passes.mask_bytes import save_masks_as_bytes
from mpcompile.passes.policy import Policy
from mpcompile.passes.result import PassResult
from mpcompile.passes.scaling import insert_loss_scaling
from mpcompile.passes.statistics import keep_statistics_finite
from mpcompile.passes.storage import store_low
from mpcompile.passes.verifier import signature, verify
from mpcompile.passes.wide_gradients import widen_gradients

AUTOCAST = "mixprec_autocast"
"""Key of ``gm.meta`` of a graph that was traced under ``torch.autocast``: the preset ``"torch"`` asks for it."""

Pass = Callable[[fx.GraphModule, Policy], PassResult]

PASSES: tuple[Pass, ...] = (
    # Before loss scaling: what leaves in fp32 is unscaled in fp32, and not rounded in between.
    widen_gradients,
    # Before the casts: S comes before the first narrowing of backward, 1/S after the last widening.
    insert_loss_scaling,
    keep_statistics_finite,
    # Carries out the compute plan; every later pass works on the casts it made.
    insert_casts,
    # Before storing: a cast that folds away leaves no low copy.
    fold_casts,
    # Only what is still narrowed is worth storing low once.
    store_low,
    # Last: a mask that is read off a low form is not saved at all.
    save_masks_as_bytes,
)

_DECIDE = (insert_casts, fold_casts, store_low)
"""What is left out where torch.autocast has decided."""


def run_passes(gm: fx.GraphModule, policy: Policy, passes: tuple[Pass, ...] = PASSES) -> tuple[PassResult, ...]:
    """Rewrite ``gm`` in place for mixed precision and return what every pass changed.

    ``gm`` is any functional ATen graph whose nodes carry fake values in ``meta["val"]``: a joint graph from
    AOTAutograd, the result of ``make_fx``, or ``torch.export.export(...).run_decompositions().graph_module``.
    Subgraphs of higher-order ops are rewritten too; what enters and leaves them keeps its dtype. Running it again
    changes nothing. Raises ``PassError`` where a graph would no longer keep its promises (see ``verifier``), and
    ``ValueError`` for the preset ``"torch"`` and a graph that was not traced under ``torch.autocast``.
    """
    if policy.is_fp32:
        return ()
    _require_values(gm)
    if policy.preset == "torch":
        _require_autocast(gm)
        passes = tuple(apply for apply in passes if apply not in _DECIDE)
    require_matches(gm, policy)
    return _rewrite(gm, policy, passes)


def _rewrite(gm: fx.GraphModule, policy: Policy, passes: tuple[Pass, ...]) -> tuple[PassResult, ...]:
    inner = [result for _, child in subgraphs(gm) for result in _rewrite(child, policy, passes)]
    return (*_run(gm, policy, passes), *inner)


def _run(gm: fx.GraphModule, policy: Policy, passes: tuple[Pass, ...]) -> tuple[PassResult, ...]:
    results = []
    for apply in passes:
        before = signature(gm)
        result = apply(gm, policy)
        results.append(result)
        _erase_unused(gm)  # also what a pass made before it found that it had to refuse
        if result.changed:
            verify(before, gm, result.name)
            gm.recompile()
    return tuple(results)


def _erase_unused(gm: fx.GraphModule) -> None:
    """Drop the casts and views nobody reads any more."""
    for node in reversed(gm.graph.nodes):
        movable = is_view(node) or is_partial_view(node) or is_tuple_view(node) or is_cast(node)
        if not node.users and node.op == "call_function" and movable:
            gm.graph.erase_node(node)


def _require_autocast(gm: fx.GraphModule) -> None:
    if AUTOCAST not in gm.meta:
        raise ValueError(
            "Policy(preset='torch') takes the dtypes that torch.autocast gives while a graph is traced; this graph was "
            "traced before. Use torch.compile(model, backend='mixprec', options={'policy': 'torch'}), trace the graph "
            "under torch.autocast yourself and run no passes, or choose another preset."
        )


def _require_values(gm: fx.GraphModule) -> None:
    calls = gm.graph.find_nodes(op="placeholder")
    if calls and not any("val" in node.meta for node in gm.graph.nodes):
        raise ValueError(
            "The graph's nodes have no meta['val']; run_passes needs a graph with fake values, from "
            "make_fx(tracing_mode='fake' or 'symbolic'), torch.export or AOTAutograd."
        )
