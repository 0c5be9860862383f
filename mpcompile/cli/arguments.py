"""Arguments that several commands share, and the backend options they stand for."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpcompile.cli.command import CannotRun


def add_target(parser: ArgumentParser, *, optional: bool = False) -> None:
    """``TARGET``, and the options of the backend."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="?" if optional else None,
        help="file.py:factory or package.module:factory; the factory takes no arguments and returns (model, inputs) "
        "or (model, inputs, loss): inputs is a tuple, a dict of keyword arguments, or (args, kwargs); loss is a "
        "function of the output (default: the output where it is one number, else the mean of its squares)",
    )
    group = parser.add_argument_group("options of the backend")
    group.add_argument("--dtype", metavar="TYPE", help="low type: auto (default), bf16 or fp16")
    group.add_argument("--policy", metavar="POLICY", help="default, accurate, fast, torch, fp32, or a TOML file")
    rules = {"fp32": "keep in fp32: layers.*.norm, op:softmax, param:*.bias", "low": "compute in the low type"}
    for name, meaning in rules.items():
        text = f"{meaning}; may be repeated"
        group.add_argument(f"--{name}", metavar="RULE", action="append", help=text)


def add_json(parser: ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument("--json", metavar="FILE", help="write it as JSON too; - prints only that")


def count(text: str) -> int:
    """The ``type`` of an argument that is a number of things, at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no count; give 1 or more")
    return int(text)


def backend_options(arguments: Namespace) -> dict[str, Any]:
    """The options that were given; raises ``CannotRun`` for what the backend would refuse."""
    from mpcompile.options import Options

    names = ("dtype", "policy", "fp32", "low")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    try:
        Options.parse(given)
    except (ValueError, TypeError, OSError) as error:
        raise CannotRun(str(error)) from error
    return given


def show(arguments: Namespace, text: str, data: str) -> None:
    """Print ``text``, and put ``data`` where ``--json`` says; with ``-`` only the data is printed."""
    if arguments.json != "-":
        print(text)
    if arguments.json is not None:
        put(arguments, data)


def put(arguments: Namespace, data: str) -> None:
    """Write ``data`` to the file that ``--json`` names, and say so on stderr; print it for ``-``."""
    if arguments.json == "-":
        print(data, file=arguments.stdout)
    else:
        with writing(arguments.json):
            Path(arguments.json).write_text(data, encoding="utf-8")


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Say on stderr that a file was written; ``CannotRun`` where it cannot be."""
    try:
        yield
    except OSError as error:
        raise CannotRun(f"{path!r} cannot be written: {error.strerror}.") from error
    print(f"wrote {path}", file=sys.stderr)
