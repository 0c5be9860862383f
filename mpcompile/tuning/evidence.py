"""What a tuned policy says of itself."""

from __future__ import annotations

from mpcompile.tuning.scale_advice import LOST
from mpcompile.tuning.search import Evaluation, Outcome


def evidence(found: Outcome, before: Evaluation, tolerance: float, objective: str, count: int) -> tuple[str, ...]:
    """The lines that go into the policy's file as comments: measured errors, one line for each rule, the loss scale."""
    lines = [
        "Found by mpcompile.tune: relative error of loss and gradients against fp64, largest of the batches.",
        f"tolerance {tolerance:.2e}, objective {objective}, {count} measurements",
        f"without rules of its own: {before.error:.2e}",
    ]
    if found.rules:
        plural = "s" if len(found.rules) > 1 else ""
        lines.append(f"with {len(found.rules)} rule{plural}: {found.evaluation.error:.2e}")
    else:
        lines.append("Nothing needs fp32.")
    lines += [f"  {rule}: {_alone(rule, found)}" for rule in found.rules]
    if found.evaluation.scales is not None:
        lines.append(_advice(*found.evaluation.scales))
    return tuple(lines)


def _alone(rule: str, found: Outcome) -> str:
    error = found.without.get(rule)
    return "not tried without it" if error is None else f"without it {error:.2e}"


def _advice(lowest: float, highest: float) -> str:
    if lowest > highest:
        return (
            f"loss scale: above {highest:g} gradients overflow, below {lowest:g} more than {LOST:.0%} of the values of "
            "backward vanish: no scale suits all; dtype='bf16' needs none."
        )
    return (
        f"loss scale: from {lowest:g} (below, more than {LOST:.0%} of the values of backward vanish) to {highest:g} "
        "(above, gradients overflow)"
    )
