"""Train a small GPT in fp32, with autocast and with mixprec, and compare what comes out.

The text is the Python standard library's source code, so nothing is downloaded. All three models
start from the same weights, read the same batches and take turns within one process, so that
their step times are measured under the same conditions.

    python examples/train_gpt.py --quick     # a few minutes on a laptop's CPU
    python examples/train_gpt.py             # sizes for a GPU
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
from gpt import Shape, build
from loss_chart import draw, tabulate
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from stdlib_text import Batch, draw_batches, read_stdlib, split
from training import ScaledTrainee, Trainee

import mpcompile
from mpcompile.device import has_native_bf16, has_native_fp16

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NATIVE = {"bf16": has_native_bf16, "fp16": has_native_fp16}
TEXT_BYTES = 2_000_000
LAST_STEPS = 20
"""The final training loss is the mean over this many steps."""
HELD_OUT_ROWS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The sizes of one comparison."""

    steps: int
    layers: int
    width: int
    context: int
    batch: int
    seed: int = 0

    @property
    def shape(self) -> Shape:
        return Shape(layers=self.layers, width=self.width, context=self.context)


QUICK = Settings(steps=100, layers=2, width=96, context=64, batch=8)
FULL = Settings(steps=500, layers=6, width=384, context=256, batch=32)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT in fp32 and in mixprec.")
    parser.add_argument("--quick", action="store_true", help="small sizes, minutes on a CPU")
    for field in fields(Settings):
        text = f"default {getattr(FULL, field.name)}; with --quick {getattr(QUICK, field.name)}"
        parser.add_argument(f"--{field.name}", type=int, help=text)
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto")
    parser.add_argument("--out", type=Path, default=Path("out/train_gpt.png"))
    return parser.parse_args(arguments)


def settle(arguments: argparse.Namespace) -> Settings:
    """Return the chosen sizes, with what the command line says replaced."""
    given = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
    chosen = {name: value for name, value in given.items() if value is not None}
    return replace(QUICK if arguments.quick else FULL, **chosen)


def choose_dtype(name: str, device: torch.device, console: Console) -> str:
    """Choose as mixprec's "auto" does, except that lacking bf16 hardware never means fp32."""
    if name == "auto":
        name = "fp16" if device.type == "cuda" and not has_native_bf16(device) else "bf16"
    if device.type == "cpu" and not NATIVE[name](device):
        console.print(
            f"This CPU has no {name} hardware, so {name} cannot beat fp32 here. The step times only "
            f"compare the two {name} ways with each other: autocast runs emulated {name} kernels, "
            f"mixprec multiplies the {name} values with fp32 instructions. The losses are what counts."
        )
    return name


def enrol(settings: Settings, dtype: str, device: torch.device) -> list[Trainee]:
    """Make the three models: the same weights, compiled in three ways."""
    fp32, autocast, mixprec = (build(settings.shape, settings.seed, device) for _ in range(3))
    steps, low = settings.steps, DTYPES[dtype]
    context = partial(torch.autocast, device.type, low)
    return [
        Trainee(name="fp32", model=fp32, steps=steps),
        ScaledTrainee(name="autocast", model=autocast, steps=steps, dtype=low, context=context),
        Trainee(name="mixprec", model=mixprec, steps=steps, backend="mixprec", options={"dtype": dtype}),
    ]


def train(trainees: Sequence[Trainee], batches: Iterator[Batch], steps: int, console: Console) -> None:
    """Let all trainees take the same steps in turn."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=steps)
        for _ in range(steps):
            batch = next(batches)
            for trainee in trainees:
                if not trainee.losses:
                    progress.update(task, description=f"compiling {trainee.name}")
                trainee.timed_step(batch)
            losses = "  ".join(f"{trainee.name} {trainee.losses[-1]:.3f}" for trainee in trainees)
            progress.update(task, advance=1, description=losses)


def save_chart(trainees: Sequence[Trainee], path: Path, console: Console) -> None:
    try:
        draw(trainees, path)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        console.print("No chart: install matplotlib with  pip install 'mpcompile\\[demo]'")
    else:
        console.print(f"Loss curves: {path}")


def main(arguments: Sequence[str] | None = None) -> None:
    parsed = parse(arguments)
    settings = settle(parsed)
    if parsed.quick:
        torch.set_num_threads(1)  # so small a model gains nothing from more, and times are steadier
    console = Console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainees = enrol(settings, choose_dtype(parsed.dtype, device, console), device)

    text, unseen = (part.to(device) for part in split(read_stdlib(TEXT_BYTES)))
    context, seed = settings.context, settings.seed
    batches = draw_batches(text, rows=settings.batch, context=context, seed=seed)
    held_out = next(draw_batches(unseen, rows=HELD_OUT_ROWS, context=context, seed=seed))

    train(trainees, batches, settings.steps, console)
    console.print(tabulate(trainees, held_out, LAST_STEPS))
    save_chart(trainees, parsed.out, console)
    print(mpcompile.reports(trainees[-1].compiled)[0].summary())


if __name__ == "__main__":
    main()
