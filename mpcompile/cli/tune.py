"""``tune``: the fewest rules for fp32 that keep a model within a tolerance."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mpcompile
from mpcompile.cli import arguments as shared
from mpcompile.cli.command import OK, CannotRun, Command

if TYPE_CHECKING:
    from mpcompile.cli.target import Target


def _add_arguments(parser: ArgumentParser) -> None:
    shared.add_target(parser)
    parser.add_argument("--tolerance", type=_fraction, default=0.02, metavar="X", help="relative error (default 0.02)")
    parser.add_argument("--objective", choices=("time", "memory"), default="time", help="what rules should cost least")
    parser.add_argument(
        "--batches",
        type=shared.count,
        default=1,
        metavar="N",
        help="batches to measure on (default 1): the factory is called again, with the seeds 1, 2, ..., for its inputs",
    )
    parser.add_argument("--out", metavar="FILE", help="write the policy: a TOML file for --policy")
    parser.add_argument("--state", metavar="FILE", help="keep measurements here, to go on after an interruption")


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise ArgumentTypeError(f"{text!r} is no relative error; give a number between 0 and 1")
    return value


def _run(arguments: Namespace) -> int:
    from mpcompile.cli.target import load_target

    options = shared.backend_options(arguments)
    targets = [load_target(arguments.target, with_loss=True, seed=seed) for seed in range(arguments.batches)]
    try:
        policy = mpcompile.tune(
            targets[0].model,
            [_batch(target) for target in targets],
            tolerance=arguments.tolerance,
            objective=arguments.objective,
            options=options,
            loss=targets[0].given_loss,
            state=arguments.state,
            progress=sys.stderr.isatty(),
        )
    except ValueError as error:  # a policy that no rule can be added to
        raise CannotRun(str(error)) from error
    print(policy.to_toml(), end="")
    if arguments.out is not None:
        with shared.writing(arguments.out):
            Path(arguments.out).write_text(policy.to_toml(), encoding="utf-8")
    return OK


def _batch(target: Target) -> Any:
    if target.args and target.kwargs:
        raise CannotRun(f"tune takes positional inputs or keyword inputs; TARGET {target.name!r} returned both.")
    return dict(target.kwargs) if target.kwargs else target.args


COMMAND = Command(
    name="tune",
    summary="the fewest fp32 rules that keep loss and gradients within a tolerance",
    details="Find the fewest rules for fp32 that keep the error of loss and gradients against fp64 within a tolerance, "
    "and print the policy, with what was measured as comments. Ends with 1 where no rules are enough.",
    example="tune model.py:make --dtype bf16 --tolerance 0.02 --out policy.toml",
    add_arguments=_add_arguments,
    run=_run,
)
