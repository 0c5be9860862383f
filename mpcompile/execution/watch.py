"""Which tensors have gradients that a loss scale went through: what an optimizer step looks up."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from mpcompile.execution.flags import Flags
    from mpcompile.execution.runtime import Runtime


@dataclass(eq=False, slots=True)
class Watched:
    """A parameter, or another leaf, that a scaled graph computes the gradient of."""

    name: str
    runtimes: list[Runtime]
    """Of the compiled models it is a parameter of; more than one where a model was compiled twice."""
    cleared_before: int = -1
    """Number of the last backward that found no gradient here: flags of older ones speak of what was thrown away."""
    _places: list[tuple[weakref.ref[Flags], int]] = field(default_factory=list)

    def flags(self) -> Iterator[tuple[Flags, int]]:
        """Where its overflow is flagged: flags and slot, for every graph that reads it."""
        for reference, slot in self._places:
            flags = reference()
            if flags is not None:
                yield flags, slot

    def flag_at(self, flags: Flags, slot: int) -> None:
        """Remember one more place, forgetting those of graphs that are gone."""
        self._places = [place for place in self._places if place[0]() is not None]
        self._places.append((weakref.ref(flags), slot))


_watched: dict[int, Watched] = {}


def watch(tensor: Tensor, name: str, runtime: Runtime) -> Watched:
    """Watch a tensor for the optimizers that will step it; the same again returns the same."""
    known = _watched.get(id(tensor))
    if known is None:
        known = _watched[id(tensor)] = Watched(name, [])
        weakref.finalize(tensor, _watched.pop, id(tensor), None).atexit = False
    if runtime not in known.runtimes:
        known.runtimes.append(runtime)
    return known


def watched_among(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Watched]]:
    """The watched ones with what is known of them, in order."""
    return [(tensor, found) for tensor in tensors if (found := _watched.get(id(tensor))) is not None]
