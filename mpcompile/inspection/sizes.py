"""Bytes for people."""

from __future__ import annotations


def show_bytes(count: int) -> str:
    """``1.42 MB``: three significant digits, powers of 1000.

    >>> show_bytes(1424000)
    '1.42 MB'
    """
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
