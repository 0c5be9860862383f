"""``explain``: what would be decided for a model."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

import mpcompile
from mpcompile.cli import arguments as shared
from mpcompile.cli.command import OK, Command


def _add_arguments(parser: ArgumentParser) -> None:
    shared.add_target(parser)
    shared.add_json(parser)


def _run(arguments: Namespace) -> int:
    from mpcompile.cli.target import load_target

    options = shared.backend_options(arguments)
    target = load_target(arguments.target)
    report = mpcompile.explain(target.model, *target.args, options=options, **target.kwargs)
    shared.show(arguments, str(report), report.to_json())
    return OK


COMMAND = Command(
    name="explain",
    summary="what computes in which precision, and who decided it",
    details="Capture the model, run the passes over forward and backward, and show every decision. Generates no code.",
    example="explain model.py:make --dtype bf16 --fp32 head",
    add_arguments=_add_arguments,
    run=_run,
)
