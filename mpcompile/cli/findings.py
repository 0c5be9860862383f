"""What a model would lose: whatever keeps work in fp32, outside the graphs, or out of the low type's range."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import mpcompile
from mpcompile.cli.eager_matmuls import matmuls_outside
from mpcompile.cli.target import Target
from mpcompile.inspection.report import NodeRecord, Report
from mpcompile.inspection.terminal import runs_low
from mpcompile.notices import MixprecError, MixprecWarning
from mpcompile.passes.op_classes import OpClass
from mpcompile.torch_messages import GraphBreak, graph_breaks

_LARGEST = torch.finfo(torch.float16).max
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a model that its owner may not expect."""

    topic: str
    """``warning``, ``graph break``, ``outside``, ``parameters``, ``fp32``, ``operators`` or ``not finite``."""
    text: str
    way_out: str = ""
    is_note: bool = False
    """Whether it is as it should be, or may not matter: the exit code does not say it."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found, and the report it was found in; no report where nothing could be captured."""

    findings: tuple[Finding, ...]
    report: Report | None


def examine(target: Target, options: Mapping[str, Any]) -> Diagnosis:
    """Capture the model as ``explain`` does, run it once, and look for what is lost.

    Raises what compiling with ``options`` raises, for rules that match nothing.
    """
    report = None
    with warnings.catch_warnings(record=True) as caught, graph_breaks() as breaks:
        warnings.simplefilter("always")
        try:
            report = mpcompile.explain(target.model, *target.args, options=options, **target.kwargs)
        except MixprecError as error:  # nothing was captured
            warnings.warn(str(error), MixprecWarning, stacklevel=1)
    said = dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, MixprecWarning))
    captured = report or Report("", ())
    findings = (
        *(Finding("warning", text) for text in said),
        *_breaks(breaks),
        *_outside(target, captured),
        *_parameters(target.model, captured.dtype),
        *_kept(captured),
        *_opaque(captured),
        *(_not_finite(target, options) if captured.matmuls() and captured.dtype != "float32" else ()),
    )
    return Diagnosis(findings, report)


def _breaks(breaks: list[GraphBreak]) -> Iterator[Finding]:
    for found in breaks:
        yield Finding(
            "graph break",
            f"{found.source or 'unknown line'}: {found.reason}",
            "what is between two graphs runs uncompiled, and no decision crosses it; TORCH_LOGS=graph_breaks says more",
        )


def _outside(target: Target, report: Report) -> Iterator[Finding]:
    for matmul in matmuls_outside(target.copy_model(), target.args, target.kwargs, report):
        where = ", ".join(filter(None, (matmul.module or "the model itself", matmul.source)))
        yield Finding("outside", f"a matmul, convolution or attention runs uncompiled in fp32: {where}")


def _parameters(model: Any, dtype: str) -> Iterator[Finding]:
    if not isinstance(model, nn.Module):
        return
    floating = {name: p.detach() for name, p in model.named_parameters() if p.is_floating_point() and p.numel()}
    broken = [name for name, value in floating.items() if not bool(value.isfinite().all())]
    if broken:
        yield Finding("parameters", f"not finite: {_few(broken)}", "no precision repairs that")
    largest = {name: float(value.abs().max()) for name, value in floating.items() if name not in broken}
    wide = [f"{name} (up to {size:g})" for name, size in largest.items() if size > _LARGEST]
    if wide:
        yield Finding(
            "parameters",
            f"beyond fp16's range of {_LARGEST:g}: {_few(wide)}",
            "in fp16 what multiplies by them stays in fp32; bf16 holds them",
            is_note=dtype != "float16",
        )


def _kept(report: Report) -> Iterator[Finding]:
    """Matmuls that were not kept in fp32 by the user, by reason."""
    kept = [node for node in report.matmuls() if not runs_low(node) and node.rule in ("shape", "range guard", "class")]
    for (rule, reason), count in Counter((node.rule, node.reason) for node in kept).most_common():
        where = [_where(node) for node in kept if node.reason == reason]
        text = f"{count} of {len(report.matmuls())} products stay in fp32: {reason} ({_few(where)})"
        yield Finding("fp32", text, is_note=rule != "range guard")


def _opaque(report: Report) -> Iterator[Finding]:
    nodes = [node for node in report.nodes if node.op_class == OpClass.OPAQUE.value and "float32" in node.inputs]
    for op, count in Counter(node.op for node in nodes if "." in node.op).most_common():
        yield Finding(
            "operators",
            f"{count} x {op} has no known low form and sees fp32 as traced",
            f"if it has: mpcompile.register_op({op.rpartition('.')[0].replace('.', '::')!r}, 'low')",
            is_note=True,
        )


def _not_finite(target: Target, options: Mapping[str, Any]) -> Iterator[Finding]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MixprecWarning)  # said already
        found = mpcompile.find_nonfinite(
            target.model, *target.args, options=options, loss=lambda output: _loss(target, output), **target.kwargs
        )
    if found is not None:
        # A loss scale falls until every gradient is finite: then all is as it should be.
        yield Finding("not finite", str(found), is_note=found.finite_at is not None)


def _loss(target: Target, output: Any) -> Tensor:
    floating = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return target.loss(output) if target.given_loss or floating else torch.zeros(())


def _where(node: NodeRecord) -> str:
    return f"{node.module or node.name}, {node.direction}"


def _few(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return "; ".join(names[:_SHOWN]) + more
