"""What a pass returns and what it raises: plain data, no live graph nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """One edit a pass made to a graph."""

    node: str
    """Name of the node that was inserted, replaced or rewritten."""
    op: str
    """Its operator, e.g. ``aten.mm.default``."""
    before: str
    """What it was, in dtypes: ``float32``; empty for a node that was not there."""
    after: str
    """What it is now; empty for a node that is gone."""
    reason: str
    """Why, in one sentence."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """The account of one run of one pass over one graph."""

    name: str
    changes: tuple[Change, ...]

    @property
    def changed(self) -> bool:
        """Whether the graph is different now."""
        return bool(self.changes)


class PassError(RuntimeError):
    """A graph broke one of the invariants that every pass must keep."""
