"""``explain``: what mixprec would decide for a model, without generating code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from mpcompile.inspection.registry import reports
from mpcompile.inspection.report import Report
from mpcompile.look import compile_apart, looking
from mpcompile.notices import MixprecError


def explain(model: Callable[..., Any], *inputs: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Report:
    """Capture ``model(*inputs, **kwargs)``, run the passes over forward and backward, and report every decision.

    Runs the forward once, without code generation, on a copy of the model: its buffers, gradients and the random
    state stay as they are. Raises what compiling with the same options raises, and ``MixprecError`` where no graph
    was captured.
    """
    options = {**(options or {}), "compiler": "aot_eager"}
    options.pop("inductor", None)
    subject = copy.deepcopy(model) if isinstance(model, nn.Module) else model
    compiled = compile_apart(subject, "mixprec", options)
    with torch.random.fork_rng(), looking():
        compiled(*inputs, **kwargs)
    found = reports(compiled)
    if not found:
        raise MixprecError("Dynamo captured no graph: everything ran eagerly, in float32. See TORCH_LOGS=graph_breaks.")
    return Report(
        dtype=found[0].dtype,
        graphs=tuple(graph for report in found for graph in report.graphs),
        modules=tuple(pair for report in found for pair in report.modules),
        preset=found[0].preset,
    )
