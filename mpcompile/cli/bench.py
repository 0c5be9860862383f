"""``bench``: the time and the memory of one step, against compile + autocast and compile in fp32."""

from __future__ import annotations

import dataclasses
import json
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from mpcompile.cli import arguments as shared
from mpcompile.cli.command import OK, CannotRun, Command

if TYPE_CHECKING:
    from mpcompile.cli.peers import Timing


def _add_arguments(parser: ArgumentParser) -> None:
    shared.add_target(parser)
    shared.add_json(parser)
    parser.add_argument(
        "--rounds", type=shared.count, default=15, metavar="N", help="steps of each, in turns (default 15)"
    )


def _run(arguments: Namespace) -> int:
    import torch

    from mpcompile.cli.peers import race
    from mpcompile.cli.target import load_target
    from mpcompile.options import Options

    options = shared.backend_options(arguments)
    target = load_target(arguments.target, with_loss=True)
    low = Options.parse(options).resolve_policy(target.automatic_dtype()).dtype
    if low is torch.float32:
        raise CannotRun("There is nothing to measure in fp32; give --dtype bf16 or --dtype fp16.")
    timings = race(target, low, options, arguments.rounds)
    name = str(low).removeprefix("torch.")
    data = {"dtype": name, "rounds": arguments.rounds, "peers": [dataclasses.asdict(timing) for timing in timings]}
    if arguments.json != "-":
        _print(timings, f"One step in {name}: medians of {arguments.rounds} interleaved rounds")
    if arguments.json:
        shared.put(arguments, json.dumps(data, indent=1))
    return OK


def _print(timings: list[Timing], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from mpcompile.cli.peers import AUTOCAST

    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("")
    for header in ("step ms", "to autocast", "saved MB", "first step s"):
        table.add_column(header, justify="right")
    (baseline,) = (timing for timing in timings if timing.peer == AUTOCAST)
    for timing in timings:
        saved = "-" if timing.saved_bytes is None else f"{timing.saved_bytes / 1e6:.2f}"
        ratio = f"{timing.step_ms / baseline.step_ms:.2f} x"
        table.add_row(timing.peer, f"{timing.step_ms:.2f}", ratio, saved, f"{timing.first_step_s:.1f}")
    Console(highlight=False).print(table)


COMMAND = Command(
    name="bench",
    summary="time and memory of a step, against compile + autocast and compile in fp32",
    details="Time forward and backward of the model (forward alone where nothing needs a gradient), compiled three "
    "ways through Inductor, in turns.",
    example="bench model.py:make --dtype bf16 --rounds 3",
    add_arguments=_add_arguments,
    run=_run,
)
