"""Parse the command line, run one command, and end with its exit code."""

from __future__ import annotations

import sys
import textwrap
import warnings
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout

from mpcompile.cli import bench, compare, doctor, explain, tune
from mpcompile.cli.command import FINDING, USAGE, CannotRun, Command
from mpcompile.notices import MixprecError, MixprecWarning
from mpcompile.torch_messages import raised_by_backend

COMMANDS: tuple[Command, ...] = (doctor.COMMAND, explain.COMMAND, compare.COMMAND, tune.COMMAND, bench.COMMAND)
_EXIT_CODES = "exit codes: 0 done; 1 something was found that needs a look; 2 bad usage, target or option"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m mpcompile`` with ``arguments`` (those of the process by default); returns the exit code."""
    parsed = _parser().parse_args(arguments)
    command: Command = parsed.command
    parsed.stdout = sys.stdout
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("default", MixprecWarning)
        warnings.showwarning = _show_warning  # type: ignore[assignment]
        if getattr(parsed, "json", None) == "-":
            stack.enter_context(redirect_stdout(sys.stderr))  # what the model prints is no JSON
        return _run(command, parsed)


def _run(command: Command, parsed: Namespace) -> int:
    try:
        return command.run(parsed)
    except CannotRun as error:
        if error.user_traceback:
            print(error.user_traceback, file=sys.stderr)
        return _fail(command, error, USAGE)
    except Exception as error:
        cause = raised_by_backend(error)
        if isinstance(cause, MixprecError):
            return _fail(command, cause, FINDING)
        if isinstance(cause, ValueError) and cause is not error:  # a rule that matches nothing
            return _fail(command, cause, USAGE)
        raise


def _fail(command: Command, error: BaseException, code: int) -> int:
    print(f"mpcompile {command.name}: {error}", file=sys.stderr)
    return code


def _show_warning(message: Warning | str, category: type[Warning], *_: object) -> None:
    print(f"{category.__name__}: {message}", file=sys.stderr)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m mpcompile",
        description="Mixed precision for torch.compile, seen from a terminal.",
        epilog=f"{_EXIT_CODES}\nmore: python -m mpcompile COMMAND --help",
        formatter_class=RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        own = commands.add_parser(
            command.name,
            help=command.summary,
            description=textwrap.fill(command.details, 79),
            epilog=f"{_EXIT_CODES}\nexample: python -m mpcompile {command.example}",
            formatter_class=RawDescriptionHelpFormatter,
        )
        command.add_arguments(own)
        own.set_defaults(command=command)
    return parser
