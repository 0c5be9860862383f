"""Reports on disk, beside torch's compile cache: a second process that starts warm has its reports too."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from torch._inductor import config
from torch._inductor.runtime.runtime_utils import cache_dir

from mpcompile.inspection.report import Report


def key_of(parts: Iterable[str]) -> str:
    """A file name for what decides a report: the cache key of the pass and the captured graph."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def save(key: str, report: Callable[[], Report]) -> None:
    """Write a report, unless torch's caches are off."""
    if config.force_disable_caches or not config.fx_graph_cache:
        return
    path = _path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed, so that processes that compile the same model at once never read half a file.
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(report().to_json())
    Path(temporary).replace(path)


def load(key: str) -> Report | None:
    """Read a report, or None where there is none."""
    path = _path(key)
    return Report.from_json(path.read_text()) if path.exists() else None


def _path(key: str) -> Path:
    return Path(cache_dir()) / "mixprec_reports" / f"{key}.json"
