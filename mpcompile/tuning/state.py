"""Measurements on disk, so that a search that was interrupted goes on where it was."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpcompile.tuning.search import Evaluation, OutOfBudget, Rules


class Measurements:
    """Measures each set of rules once: what was measured before, in this process or an earlier one, is remembered."""

    def __init__(
        self,
        measure: Callable[[Rules], Evaluation],
        *,
        path: Path | None,
        key: str,
        limit: int,
        advance: Callable[[Evaluation], None],
    ) -> None:
        """``path``: the file to remember in; ``key``: what was measured, so that a file of something else is refused;
        ``limit``: of measurements in all; ``advance``: told of each.

        Raises ``ValueError`` for a file that is of another model, or no such file at all.
        """
        self._measure = measure
        self._path = path
        self._key = key
        self._limit = limit
        self._advance = advance
        self._known = {} if path is None or not path.exists() else _read(path, key)

    @property
    def count(self) -> int:
        """How many sets were measured."""
        return len(self._known)

    def evaluate(self, rules: Rules) -> Evaluation:
        """The error under ``rules``; raises ``OutOfBudget`` beyond the limit."""
        known = tuple(sorted(rules))
        if known not in self._known:
            if self.count >= self._limit:
                raise OutOfBudget
            self._known[known] = self._measure(known)
            if self._path is not None:
                _write(self._path, self._key, self._known)
            self._advance(self._known[known])
        return self._known[known]


def _read(path: Path, key: str) -> dict[Rules, Evaluation]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        measured = {tuple(each["rules"]): _evaluation(each) for each in data["measured"]}
        known = data["key"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{str(path)!r} is no state of mpcompile.tune: {error!r}. Delete it, or name another."
        ) from error
    if known != key:
        raise ValueError(
            f"{str(path)!r} is the state of another model, other batches or options. Delete it, or name another."
        )
    return measured


def _evaluation(data: dict[str, Any]) -> Evaluation:
    scales = data["scales"]
    return Evaluation(
        error=float(data["error"]),  # an infinite one is a string
        contributions=dict(data["contributions"]),
        costs=dict(data["costs"]),
        broken=data["broken"],
        scales=None if scales is None else (scales[0], scales[1]),
    )


def _write(path: Path, key: str, known: dict[Rules, Evaluation]) -> None:
    measured = [
        {**dataclasses.asdict(each), "rules": rules, "error": each.error if math.isfinite(each.error) else "inf"}
        for rules, each in known.items()
    ]
    temporary = path.with_name(f"{path.name}.new")  # renamed when it is whole
    temporary.write_text(json.dumps({"key": key, "measured": measured}), encoding="utf-8")
    temporary.replace(path)
