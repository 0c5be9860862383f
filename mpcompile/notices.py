"""What mpcompile says when something is not as the user may think; an error with ``strict=True``."""

from __future__ import annotations

import warnings


class MixprecWarning(UserWarning):
    """Something computes in another precision than expected, or work stays outside the compiled graph."""


class MixprecError(RuntimeError):
    """A ``MixprecWarning`` under ``strict=True``, or a construct that cannot be compiled."""


def notify(message: str, *, strict: bool) -> None:
    """Warn, or raise ``MixprecError`` where the user asked for that. The default filter shows each text once."""
    if strict:
        raise MixprecError(message)
    warnings.warn(message, MixprecWarning, stacklevel=2)
