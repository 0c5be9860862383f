"""Find the reports of a compiled model, wherever its code came from."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from mpcompile.inspection import store
from mpcompile.inspection.recorder import Recorder
from mpcompile.inspection.report import Report
from mpcompile.torch_compat import Site, compile_call, subject_of

_ATTRIBUTE = "_mixprec_compilations"
"""Of a ``torch.compile`` call: a list of (structure of what was compiled, ``Compilation``)."""
_calls: list[weakref.ref[Any]] = []
"""The ``torch.compile`` calls that have the attribute."""


class Compilation:
    """One Dynamo graph that was compiled, and where its report is."""

    def __init__(self, recorder: Recorder, uuid: tuple[Any, ...], graph: fx.GraphModule, *, cached: bool) -> None:
        """``cached``: whether torch may keep the compiled code, so that another process starts without the passes."""
        self.recorder = recorder
        self.cached = cached
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
    if compilation.cached and not compilation.recorder.is_empty:
        store.save(compilation.key, compilation.recorder.report)
    if site.compiled is None:
        return
    if _ATTRIBUTE not in site.compiled.__dict__:
        site.compiled.__dict__[_ATTRIBUTE] = []
        _calls.append(weakref.ref(site.compiled))
    structure = _structure(site.function if site.root is None else site.root)
    site.compiled.__dict__[_ATTRIBUTE].append((structure, compilation))


def _structure(subject: Any) -> Any:
    """What two models share when Dynamo runs the code of one for the other: classes, names, shapes."""
    if not isinstance(subject, nn.Module):
        return subject
    parameters = subject.named_parameters()
    return (
        *((name, type(module)) for name, module in subject.named_modules()),
        *((name, value.shape, value.dtype, value.requires_grad) for name, value in parameters),
    )


def _shared(call: Any, subject: Any) -> list[tuple[Any, Compilation]]:
    """The compilations of earlier calls with equal options, of a subject of the same structure."""
    _calls[:] = [reference for reference in _calls if reference() is not None]
    equal = [earlier for reference in _calls if (earlier := reference()) == call]
    structure = _structure(subject)
    pairs = [pair for earlier in equal for pair in earlier.__dict__[_ATTRIBUTE] if pair[0] == structure]
    return list({pair[1].key: pair for pair in pairs}.values())  # one for each graph


def reports(compiled: Callable[..., Any]) -> list[Report]:
    """The reports of what was compiled so far, one for each graph Dynamo captured, in order.

    ``compiled`` is what ``torch.compile`` returned, or a module after ``module.compile(...)``. Raises ``TypeError``
    for anything else. An empty list: nothing was captured yet (call it once) or at all. A model for which Dynamo
    runs the code of another one, of the same structure and compiled with equal options, has that one's reports.
    """
    call = compile_call(compiled)
    if call is None:
        raise TypeError(
            "mpcompile.reports needs what torch.compile(..., backend='mixprec') returned, or a module after "
            f"module.compile(backend='mixprec'); got {type(compiled).__name__}."
        )
    found = call.__dict__.get(_ATTRIBUTE) or _shared(call, subject_of(compiled))
    return [compilation.report() for _, compilation in found]
