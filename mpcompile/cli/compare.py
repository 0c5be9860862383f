"""``compare``: where a model's error comes from."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

import mpcompile
from mpcompile.cli import arguments as shared
from mpcompile.cli.command import FINDING, OK, CannotRun, Command

if TYPE_CHECKING:
    from mpcompile import Comparison


def _add_arguments(parser: ArgumentParser) -> None:
    shared.add_target(parser)
    shared.add_json(parser)
    parser.add_argument("--plot", metavar="FILE", help="draw error and contribution by depth; needs matplotlib")


def _run(arguments: Namespace) -> int:
    from mpcompile.cli.target import load_target

    options = shared.backend_options(arguments)
    target = load_target(arguments.target, with_loss=True)
    comparison = mpcompile.compare(target.model, *target.args, options=options, loss=target.given_loss, **target.kwargs)
    shared.show(arguments, str(comparison), comparison.to_json())
    if arguments.plot is not None:
        with shared.writing(arguments.plot):
            _plot(comparison, arguments.plot)
    return OK if comparison.first_nonfinite() is None else FINDING


def _plot(comparison: Comparison, path: str) -> None:
    try:
        comparison.plot(path)
    except (ImportError, ValueError) as error:  # no matplotlib, or a file type that it does not know
        raise CannotRun(str(error)) from error


COMMAND = Command(
    name="compare",
    summary="where the error of loss and gradients comes from",
    details="Run the same graphs in mixed precision, fp32 and fp64, node by node, and share the error out over the "
    "operations that made it. Ends with 1 where an operation is not finite though it is in fp64.",
    example="compare model.py:make --dtype bf16",
    add_arguments=_add_arguments,
    run=_run,
)
