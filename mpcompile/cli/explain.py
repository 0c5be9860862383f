"""``explain``: what would be decided for a model."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

import mpcompile
from mpcompile.cli import arguments as shared
from mpcompile.cli.command import OK, CannotRun, Command

if TYPE_CHECKING:
    from mpcompile import Report


def _add_arguments(parser: ArgumentParser) -> None:
    shared.add_target(parser)
    shared.add_json(parser)
    parser.add_argument("--html", metavar="FILE", help="write it as one HTML file too")
    parser.add_argument("--module", metavar="GLOB", help="only what belongs to these modules: layers.3, layers.*.norm")
    parser.add_argument("--diff", action="store_true", help="show how the passes changed the graphs, not the tables")


def _run(arguments: Namespace) -> int:
    from mpcompile.cli.target import load_target

    options = shared.backend_options(arguments)
    target = load_target(arguments.target)
    report = mpcompile.explain(target.model, *target.args, options=options, **target.kwargs)
    if arguments.module is not None:
        report = _within(report, arguments.module)
    shared.show(arguments, report.diff() if arguments.diff else str(report), report.to_json())
    if arguments.html is not None:
        with shared.writing(arguments.html):
            report.to_html(arguments.html)
    return OK


def _within(report: Report, pattern: str) -> Report:
    try:
        return report.within(pattern)
    except ValueError as error:
        raise CannotRun(str(error)) from error


COMMAND = Command(
    name="explain",
    summary="what computes in which precision, and who decided it",
    details="Capture the model, run the passes over forward and backward, and show every decision. Generates no code.",
    example="explain model.py:make --dtype bf16 --fp32 head",
    add_arguments=_add_arguments,
    run=_run,
)
