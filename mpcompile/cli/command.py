"""What a command is, and how it ends."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

OK, FINDING, USAGE = 0, 1, 2
"""Exit codes: done; done, and something was found that the user must look at; the request cannot be carried out."""


class CannotRun(Exception):
    """The request cannot be carried out: a bad target, option or file. Its text is for the user."""

    def __init__(self, message: str, user_traceback: str = "") -> None:
        super().__init__(message)
        self.user_traceback = user_traceback
        """Traceback of an exception in the user's own code, without our frames; ``""`` where that is not the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One word after ``python -m mpcompile``."""

    name: str
    summary: str
    """One line, for the list of commands."""
    details: str
    """What ``--help`` says above the options."""
    example: str
    """Arguments of a call that works, shown at the end of ``--help``."""
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    """Carry it out; returns the exit code, or raises ``CannotRun``."""
