"""Find the reports of a compiled model, wherever its code came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mpcompile.inspection import store
from mpcompile.inspection.report import Recorder, Report
from mpcompile.torch_compat import Site, compile_call

_ATTRIBUTE = "_mixprec_compilations"


class Compilation:
    """One Dynamo graph that was compiled, and where its report is."""

    def __init__(self, recorder: Recorder, uuid: tuple[Any, ...], graph: fx.GraphModule) -> None:
        self.recorder = recorder
        inputs = graph.graph.find_nodes(op="placeholder")
        self.key = store.key_of(
            (
                str(uuid),
                str(graph.graph),
                *(str(node.meta.get("example_value")) for node in inputs),
                str(torch.is_grad_enabled()),
                torch.__version__,
            )
        )

    def report(self) -> Report:
        """The report; raises ``LookupError`` where the code came from a cache and its report is gone."""
        if not self.recorder.is_empty:
            return self.recorder.report()
        stored = store.load(self.key)
        if stored is None:
            raise LookupError(
                "This graph was loaded from torch's compile cache and its stored report is gone. "
                "mpcompile.explain(model, *inputs) makes a new one without compiling."
            )
        return stored


def remember(site: Site, compilation: Compilation) -> None:
    """Attach a compilation to the ``torch.compile`` call it belongs to, and store its report beside torch's cache."""
    if not compilation.recorder.is_empty:
        store.save(compilation.key, compilation.recorder.report)
    if site.compiled is not None:
        site.compiled.__dict__.setdefault(_ATTRIBUTE, []).append(compilation)


def reports(compiled: Callable[..., Any]) -> list[Report]:
    """The reports of what was compiled so far, one for each graph Dynamo captured, in order.

    ``compiled`` is what ``torch.compile`` returned, or a module after ``module.compile(...)``. Raises ``TypeError``
    for anything else. An empty list: nothing was captured yet (call it once) or at all.
    """
    call = compile_call(compiled)
    if call is None:
        raise TypeError(
            "mpcompile.reports needs what torch.compile(..., backend='mixprec') returned, or a module after "
            f"module.compile(backend='mixprec'); got {type(compiled).__name__}."
        )
    return [compilation.report() for compilation in call.__dict__.get(_ATTRIBUTE, [])]
