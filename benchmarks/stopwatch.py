"""Time the kernels that Inductor makes for a CPU, one by one, inside what calls them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CodeCacheFuture


class Stopwatch:
    """Sums the seconds that are spent in generated kernels: no products, no allocation, nothing of the host."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_new_kernels(self) -> contextlib.AbstractContextManager[Any]:
        """Time the kernels that are loaded meanwhile, whenever they run.

        Relies on: Inductor loads every C++ kernel by ``AsyncCompile.cpp_pybinding``, at once or as a future.
        """
        load = AsyncCompile.cpp_pybinding

        def loaded(compiler: AsyncCompile, *arguments: Any) -> Callable[..., None]:
            found = load(compiler, *arguments)
            return self._timed(found.result() if isinstance(found, CodeCacheFuture) else found)

        return mock.patch.object(AsyncCompile, "cpp_pybinding", loaded)

    def during(self, call: Callable[[], Any]) -> float:
        """Call, and return the seconds that kernels took meanwhile."""
        before = self.seconds
        call()
        return self.seconds - before

    def _timed(self, kernel: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            start = time.perf_counter()
            kernel(*arguments)
            self.seconds += time.perf_counter() - start

        return run
