"""Time what the kernels of a step do with every element: ``python -m benchmarks.kernel_costs``.

To move bytes is what most of their time goes to, a rounding next to nothing. On a CPU, masks are the exception: where a
kernel stores or reads Booleans it goes through the lanes one by one, which is why ``mpcompile.passes.mask_bytes`` is
there; 8-bit integers are converted at once.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx
from torch._inductor import config

from benchmarks.stopwatch import Stopwatch
from mpcompile.measurement import interleaved
from mpcompile.passes.fusion import fuses
from mpcompile.passes.graph import LOW_DTYPES, dtype_of, is_cast
from mpcompile.passes.saved_values import elements
from mpcompile.passes.traffic import bytes_moved_by_fused

_ROUNDS = 301
_SHAPE = (512, 512)


def relu(x: Tensor) -> Tensor:
    """What moves 8 bytes an element and computes next to nothing."""
    return x.relu()


def rounded(x: Tensor) -> Tensor:
    """The same, rounded to bf16."""
    return x.relu().bfloat16().float()


def stored_as_booleans(x: Tensor) -> tuple[Tensor, Tensor]:
    """A relu and its mask."""
    y = x.relu()
    return y, y <= 0


def stored_as_integers(x: Tensor) -> tuple[Tensor, Tensor]:
    """A relu and its mask, converted as the pass does it."""
    y, mask = stored_as_booleans(x)
    return y, mask.float().to(torch.uint8)


def centred(gradient: Tensor) -> Tensor:
    """What backward of a norm does: a sum, and then with its result every element again."""
    return gradient - gradient.mean(0)


def read_as_booleans(mask: Tensor, gradient: Tensor) -> Tensor:
    """What backward of a relu behind a norm does; it reads the mask twice."""
    return centred(torch.where(mask, 0.0, gradient))


def read_as_integers(mask: Tensor, gradient: Tensor) -> Tensor:
    """The same, from what ``stored_as_integers`` stored."""
    return read_as_booleans(mask.float() != 0, gradient)


def nanoseconds(rounds: int = _ROUNDS) -> dict[str, float]:
    """Median nanoseconds per element, by the name of each of the functions above."""
    x, gradient = torch.randn(_SHAPE), torch.randn(_SHAPE)
    mask = x <= 0
    work: list[tuple[Callable[..., Any], tuple[Tensor, ...]]] = [
        (relu, (x,)),
        (rounded, (x,)),
        (stored_as_booleans, (x,)),
        (stored_as_integers, (x,)),
        (centred, (gradient,)),
        (read_as_booleans, (mask, gradient)),
        (read_as_integers, (mask.to(torch.uint8), gradient)),
    ]
    watch = Stopwatch()
    steps: dict[str, Callable[[], None]] = {}
    taken: dict[str, list[float]] = {fn.__name__: [] for fn, _ in work}
    for fn, inputs in work:
        call = functools.partial(torch.compile(fn), *inputs)
        with watch.on_new_kernels(), config.patch(emulate_precision_casts=True):  # or nothing is rounded
            call()
        steps[fn.__name__] = functools.partial(_time, call, watch, taken[fn.__name__])
    interleaved(steps, rounds, torch.device("cpu"))
    return {name: statistics.median(seconds) * 1e9 / x.numel() for name, seconds in taken.items()}


def _time(call: Callable[[], Any], watch: Stopwatch, taken: list[float]) -> None:
    taken.append(watch.during(call))


@dataclass(frozen=True, slots=True)
class Costs:
    """Nanoseconds that kernels spend on this machine."""

    byte: float
    """On a byte that they read or write."""
    rounding: float
    """On rounding an element to 16 bits, apart from what is moved."""
    boolean: float
    """On storing a Boolean in forward and reading it in backward, apart from its two bytes."""
    integer: float
    """On the same with a mask that is saved as 8-bit integers."""

    @classmethod
    def measure(cls) -> Costs:
        """Measure them."""
        return cls.of(nanoseconds())

    @classmethod
    def of(cls, took: dict[str, float]) -> Costs:
        """The costs in what ``nanoseconds`` returns."""
        byte = took["relu"] / 8

        def mask(stored: str, read: str) -> float:
            return max(took[stored] - took["relu"] + took[read] - took["centred"] - 2 * byte, 0.0)

        return cls(
            byte=byte,
            rounding=max(took["rounded"] - took["relu"], 0.0),
            boolean=mask("stored_as_booleans", "read_as_booleans"),
            integer=mask("stored_as_integers", "read_as_integers"),
        )

    def __str__(self) -> str:
        return (
            f"a byte {self.byte:.2f} ns, a rounding {self.rounding:.2f}; "
            f"a mask in forward and backward {self.boolean:.1f} as a Boolean, {self.integer:.1f} as an integer"
        )

    def seconds(self, graph: fx.Graph) -> float:
        """What the fused kernels of a graph will take that is compiled by itself, as forward is after partitioning."""
        roundings = sum(elements(node) for node in graph.nodes if is_cast(node) and dtype_of(node) in LOW_DTYPES)
        saved = [node for node in graph.output_node().all_input_nodes if fuses(node)]
        booleans = sum(elements(node) for node in saved if dtype_of(node) is torch.bool)
        integers = sum(elements(node) for node in saved if dtype_of(node) is torch.uint8)
        return 1e-9 * (
            self.byte * bytes_moved_by_fused(graph)
            + self.rounding * roundings
            + self.boolean * booleans
            + self.integer * integers
        )


def main() -> None:
    """Measure and print the table."""
    torch.set_num_threads(1)
    found = nanoseconds()
    table = Table("kernel", "ns per element", title="Kernels generated by Inductor")
    for name, took in found.items():
        table.add_row(name.replace("_", " "), f"{took:.2f}")
    console = Console()
    console.print(table)
    console.print(str(Costs.of(found)))


if __name__ == "__main__":
    main()
