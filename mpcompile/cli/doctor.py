"""``doctor``: what this machine computes natively, and what a model would lose here."""

from __future__ import annotations

import dataclasses
import itertools
import json
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from mpcompile.cli import arguments as shared
from mpcompile.cli.command import FINDING, OK, Command

if TYPE_CHECKING:
    from rich.table import Table

    from mpcompile.cli.findings import Diagnosis
    from mpcompile.cli.machine import Fact
    from mpcompile.cli.target import Target


def _add_arguments(parser: ArgumentParser) -> None:
    shared.add_target(parser, optional=True)
    shared.add_json(parser)


def _run(arguments: Namespace) -> int:
    import torch

    from mpcompile.cli.findings import examine
    from mpcompile.cli.machine import facts, is_supported
    from mpcompile.cli.target import load_target

    options = shared.backend_options(arguments)
    target = load_target(arguments.target) if arguments.target else None
    machine = facts()
    diagnosis = examine(target, _with_a_dtype(target, options)) if target else None
    data = {
        "machine": [dataclasses.asdict(fact) for fact in machine],
        "findings": [dataclasses.asdict(finding) for finding in diagnosis.findings] if diagnosis else None,
    }
    if arguments.json != "-":
        _print(machine, diagnosis)
    if arguments.json:
        shared.put(arguments, json.dumps(data, indent=1))
    found = diagnosis is not None and any(not finding.is_note for finding in diagnosis.findings)
    return FINDING if found or not is_supported(torch.__version__) else OK


def _with_a_dtype(target: Target, options: dict[str, Any]) -> dict[str, Any]:
    """Look at the model in bf16 where ``auto`` would leave it in fp32, and there would be nothing to see."""
    import torch

    if options.keys() & {"dtype", "policy"} or target.automatic_dtype() is not torch.float32:
        return options
    return {**options, "dtype": "bf16"}


def _print(machine: list[Fact], diagnosis: Diagnosis | None) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    for topic in dict.fromkeys(fact.topic for fact in machine):
        console.print(_table(topic, [fact for fact in machine if fact.topic == topic]))
    if diagnosis is None:
        return
    if diagnosis.report is not None:
        console.print(f"model\n{diagnosis.report.summary()}\n")
    findings = diagnosis.findings
    for finding, following in itertools.zip_longest(findings, findings[1:]):
        first, *others = finding.text.splitlines()
        console.print(f"{'note' if finding.is_note else 'LOOK'}  {finding.topic}: {first}", soft_wrap=True)
        for line in others:
            console.print(f"      {line.strip()}", soft_wrap=True)
        if finding.way_out and (following is None or following.way_out != finding.way_out):
            console.print(f"      {finding.way_out}", style="dim", soft_wrap=True)
    if not findings:
        console.print("Nothing is lost.")


def _table(topic: str, facts: list[Fact]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, title=topic, title_justify="left", show_header=False)
    table.add_column(overflow="fold")
    for fact in facts:
        table.add_row(f"  {fact.name}", fact.value, fact.comment)
    return table


COMMAND = Command(
    name="doctor",
    summary="what this machine computes natively; with TARGET, what the model would lose",
    details="Show versions, devices with their native low types, and the settings in force. With TARGET, capture the "
    "model as explain does, and list what keeps work in fp32 or outside the graphs.",
    example="doctor model.py:make --dtype fp16",
    add_arguments=_add_arguments,
    run=_run,
)
