"""Reports to show: of models, made up, and of a given size."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import mpcompile
from mpcompile.inspection.report import CastRecord, GraphReport, NodeRecord, Report, ValueRecord


class Layer(nn.Module):
    """A norm and two linear layers in a residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Stack(nn.Module):
    """Layers that are alike, and a head."""

    def __init__(self, layers: int = 3, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@functools.cache
def stack_report(dtype: str = "bf16", **options: Any) -> Report:
    """The report of a ``Stack`` trained on a batch of 256 rows."""
    torch.manual_seed(0)
    return mpcompile.explain(Stack(), torch.randn(256, 64), options={"dtype": dtype, **options})


def value(name: str, **fields: Any) -> ValueRecord:
    """One operation, low, that reads nothing, but for ``fields``."""
    plain: dict[str, Any] = {
        "kind": "operation",
        "op": "aten.mm.default",
        "dtype": "bfloat16",
        "shape": (4, 4),
        "bytes": 32,
        "reads": (),
        "module": "",
        "direction": "forward",
        "rounds": True,
        "saved_bytes": 0,
        "saved_bytes_fp32": 0,
        "note": "",
    }
    return ValueRecord(name=name, **{**plain, **fields})


def decision(of: ValueRecord, **fields: Any) -> NodeRecord:
    """The decision about an operation that runs low, but for ``fields``."""
    plain: dict[str, Any] = {
        "user_op": of.op,
        "op_class": "low",
        "inputs": ("bfloat16", "bfloat16"),
        "output": of.dtype,
        "precision": "low",
        "rule": "class",
        "reason": "matmul, convolution or attention",
        "source": "model.py:7",
    }
    place = {"name": of.name, "op": of.op, "module": of.module, "direction": of.direction}
    return NodeRecord(**{**place, **plain, **fields})


def report_of(*values: ValueRecord, casts: tuple[CastRecord, ...] = (), **fields: Any) -> Report:
    """A report of one graph of these values, with a decision for every operation."""
    nodes = tuple(decision(value) for value in values if value.kind == "operation")
    return Report("bfloat16", (GraphReport(nodes, casts, (), "", "", values, **fields),))


def large_report(count: int) -> Report:
    """A report of ``count`` operations in 50 layers, forward and then backward, each reading the one before."""
    values, before = [], "start"
    values.append(value("start", kind="input", op="", dtype="float32"))
    for i in range(count):
        direction = "forward" if i < count // 2 else "backward"
        layer = (i if direction == "forward" else count - i) * 100 // count
        low = i % 3 == 0
        values.append(
            value(
                f"node_{i}",
                op="aten.mm.default" if low else "aten.add.Tensor",
                dtype="bfloat16" if low else "float32",
                reads=(before,),
                module=f"layers.{layer}.part_{i % 4}",
                direction=direction,
                rounds=low,
            )
        )
        before = f"node_{i}"
    return report_of(*values)


HOSTILE = "</script><img src=x onerror=alert(1)>"
"""What a page must show as it is."""


def hostile_report() -> Report:
    """A report in which every text is HTML that would run."""
    first = value(HOSTILE, kind="input", op="", dtype=HOSTILE, shape=(HOSTILE,), module=HOSTILE, note=HOSTILE)
    second = value(HOSTILE + "2", op=HOSTILE, reads=(HOSTILE,), module=f"{HOSTILE}.{HOSTILE}", note=HOSTILE)
    words = dict.fromkeys(("user_op", "rule", "reason", "source", "precision"), HOSTILE)
    node = decision(second, inputs=("bfloat16", HOSTILE), **words)
    third = value("c", kind="cast", reads=(second.name, "outside" + HOSTILE), module=HOSTILE, note=HOSTILE)
    cast = CastRecord("c", second.name, HOSTILE, HOSTILE, None, HOSTILE, HOSTILE, "forward")
    graph = GraphReport((node,), (cast,), (), HOSTILE, HOSTILE, (first, second, third))
    return Report(HOSTILE, (graph, graph), preset=HOSTILE)
