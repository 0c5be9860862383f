"""What torch says while it compiles: where Dynamo broke the graph, and what a backend raised.

Their form is private to torch; ``test_torch_messages`` watches it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_LOGGER = "torch._dynamo.symbolic_convert.__graph_breaks"
_PLACE = re.compile(r"Graph break in user code at (.+:\d+)")
_REASON = re.compile(r"^(?:Graph Break Reason: )?(.+)\n\s+Explanation:|^Graph Break Reason: (.+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A place where Dynamo left the graph, and went on in Python."""

    source: str
    """``file:line`` of the user's code, or ``""`` where torch does not say."""
    reason: str


@contextmanager
def graph_breaks() -> Iterator[list[GraphBreak]]:
    """Collect the graph breaks of what is compiled in the context; nothing is printed.

    Relies on: Dynamo logs each as one message to the logger of its ``graph_breaks`` artifact at level DEBUG; the
    message begins with the place, and the reason stands above its explanation.
    """
    found: list[GraphBreak] = []
    logger = logging.getLogger(_LOGGER)
    handler = _Collector(found)
    before = (logger.level, logger.propagate)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


class _Collector(logging.Handler):
    def __init__(self, found: list[GraphBreak]) -> None:
        super().__init__(logging.DEBUG)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        place, reasons = _PLACE.search(text), _REASON.findall(text)
        # Where there is an explanation, what it explains says more than the first line.
        reason = next((explained for explained, _ in reasons if explained), reasons[0][1] if reasons else text)
        self._found.append(GraphBreak(place[1] if place else "", reason))


def raised_by_backend(error: Exception) -> Exception:
    """What a backend raised, out of the error that Dynamo makes of it; any other error as it is.

    Relies on: ``BackendCompilerFailed.inner_exception``.
    """
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, Exception) else error
