"""``find_nonfinite``: the operation at which a model stops being finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from mpcompile.analysis.capture import Batch, GraphCall, Loss, capture
from mpcompile.analysis.evaluate import Values, run
from mpcompile.analysis.nonfinite import NonFinite, explain_origin, track
from mpcompile.analysis.scale import adapts, are_finite, settle
from mpcompile.analysis.targets import loss_scale_input, results_of


def find_nonfinite(
    model: Callable[..., Any],
    *inputs: Any,
    options: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    **kwargs: Any,
) -> NonFinite | None:
    """The first operation, forward or backward, whose result is not finite although what it read was; None: none.

    Runs ``model(*inputs, **kwargs)`` and backward from ``loss`` as ``compare`` does, on a copy. Only infinities and
    NaNs that reach a result count: one that a mask or a clamp removes is no fault. With a loss scale that adapts, and
    falls far enough, it is what overflows last on the way down: what keeps the scale from being larger than
    ``finite_at``. Raises what ``compare`` raises.
    """
    with torch.random.fork_rng():
        calls = capture(model, [Batch(inputs, kwargs)], options, loss)
        found = (_find(call, adapting=adapts(options)) for call in calls)
        return next((each for each in found if each is not None), None)


def _find(call: GraphCall, *, adapting: bool) -> NonFinite | None:
    draws: Values = {}
    name = loss_scale_input(call.after)
    with torch.no_grad():
        inputs, values = call.inputs, run(call.after, call.inputs, None, draws)
        origin = track(call.after, values).origin(call.after)
        if origin is None:
            return None
        finite_at = None
        if name and adapting:
            settled, last = settle(call, draws)
            gradients = [result for result in results_of(call.before, call.after) if result.is_gradient]
            if are_finite(gradients, last):
                finite_at = float(settled[name])
                inputs = {**call.inputs, name: settled[name] * 2}
            else:
                inputs = settled
            values = run(call.after, inputs, None, draws)
            origin = track(call.after, values).origin(call.after) or origin
        return replace(explain_origin(call.after, origin, values, inputs, draws, name), finite_at=finite_at)
