"""Train in fp16 where unscaled fp16 cannot: gradients below 2^-24 are zero in fp16.

A small network learns a surface: it maps a position to a height. Everything is in metres and the waves are a
millimetre high, so the squared error is of the order of 1e-6 and its gradient, a mean over all positions, smaller
still. Three runs from the same weights, with the same loop:

    fp32                      the truth
    fp16, loss_scale=None     learns nothing: its gradients round to zero
    fp16                      scaled inside the compiled graph; the loop knows nothing of it

In the last run one step is spoiled: its loss is multiplied so that scaled gradients overflow. The step is skipped, and
the runtime says which parameters overflowed.

    python examples/train_fp16.py            # a minute on a laptop's CPU
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import mpcompile

MILLIMETRE = 1e-3
SIDE = 64
WIDTH = 64
STEPS = 200
SPOILED_STEP = 120
SPOIL = 1e12
LAST_STEPS = 10
"""The final loss is the mean over this many steps."""


def surface(side: int) -> tuple[Tensor, Tensor]:
    """Positions [side^2, 2] in -1..1 and heights [side^2, 1] of rings and waves, all in metres."""
    axis = torch.linspace(-1, 1, side)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    height = torch.sin(6 * (x.square() + y.square()).sqrt()) + torch.cos(4 * x + y)
    return torch.stack((x, y), -1).view(-1, 2), MILLIMETRE * height.view(-1, 1)


class Surface(nn.Module):
    """Positions [N, 2] -> heights [N, 1], in metres."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.waves = nn.Linear(2, width)
        self.hidden = nn.Linear(width, width)
        self.height = nn.Linear(width, 1)
        nn.init.normal_(self.waves.weight, std=3.0)

    def forward(self, at: Tensor, height: Tensor) -> Tensor:
        """The mean squared error of the heights, in square metres."""
        found = MILLIMETRE * self.height(F.gelu(self.hidden(torch.sin(self.waves(at)))))
        return (found - height).square().mean()


@dataclass(kw_only=True)
class Run:
    """One way of training, and the losses it arrived at."""

    name: str
    backend: str = "mixprec"
    options: dict[str, Any] | None = None
    spoiled_step: int | None = None
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Surface(WIDTH)
        self.compiled = torch.compile(self.model, backend=self.backend, options=self.options)
        # eps far below the gradients, which are of the order of 1e-7.
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3, eps=1e-15)

    def step(self, at: Tensor, height: Tensor) -> None:
        """Take one step of the ordinary loop."""
        loss = self.compiled(at, height)
        spoiled = len(self.losses) == self.spoiled_step
        (loss * SPOIL if spoiled else loss).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def final_loss(self) -> float:
        """The mean loss of the last steps."""
        tail = self.losses[-LAST_STEPS:]
        return sum(tail) / len(tail)


def tabulate(runs: Sequence[Run]) -> Table:
    """The final loss and the skipped steps of every run."""
    table = Table("run", "first loss", "final loss", "skipped steps", title=f"{len(runs[0].losses)} steps")
    for run in runs:
        skipped = "-" if run.backend != "mixprec" else str(mpcompile.runtime(run.compiled).skipped_steps)
        table.add_row(run.name, f"{run.losses[0]:.2e}", f"{run.final_loss():.2e}", skipped)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args(arguments).steps
    torch.set_num_threads(1)  # so small a model gains nothing from more
    console = Console()
    at, height = surface(SIDE)
    runs = [
        Run(name="fp32", backend="inductor"),
        Run(name="fp16, loss_scale=None", options={"dtype": "fp16", "loss_scale": None}),
        Run(name="fp16", options={"dtype": "fp16"}, spoiled_step=min(SPOILED_STEP, steps - 1)),
    ]
    for run in runs:
        for step in track(range(steps), f"{run.name:22}", console=console):
            run.step(at, height)
            if step == run.spoiled_step:
                runtime = mpcompile.runtime(run.compiled)
                console.print(
                    f"step {step} skipped: {runtime.last_step_skipped}; not finite: {', '.join(runtime.overflowed)}; "
                    f"scale now {runtime.scale:g}"
                )
    console.print(tabulate(runs))


if __name__ == "__main__":
    main()
