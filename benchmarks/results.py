"""What was measured, as data; ratios and means over it; written as JSON and read back."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import BASELINE


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one peer needs for one step of one workload. None: cannot be had for this peer, device or workload."""

    step_ms: float
    """Median wall time, milliseconds."""
    first_step_s: float
    """Wall time of the first step, seconds, compile caches as they were."""
    saved_bytes: int | None
    """Kept between forward and backward, apart from parameters, buffers and inputs."""
    peak_bytes: int | None
    """The most that the step needs at once, on a GPU."""
    errors: tuple[float, ...]
    """Relative error against fp64, of the gradient of all parameters or in inference of the output; one per seed."""
    casts: int | None
    """Of one forward and backward."""
    cast_bytes: int | None
    cold_start_s: float | None = None
    """From ``torch.compile`` to the end of the first step, in a new process without caches."""
    warm_start_s: float | None = None
    """The same with the caches filled."""

    @property
    def error(self) -> float:
        """Geometric mean of the errors over the seeds."""
        return geometric_mean(self.errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One workload under all peers."""

    workload: str
    training: bool
    peers: dict[str, Measurement]
    gemm_fp32_ms: float
    """The workload's matmuls, convolutions and attentions alone, in fp32."""
    gemm_low_ms: float
    """The same in the low type."""

    def ratio(self, quantity: str, peer: str, against: str = BASELINE) -> float | None:
        """``quantity`` (an attribute of ``Measurement``) of one peer over another's; None where either has none."""
        ours, theirs = (getattr(self.peers[name], quantity) for name in (peer, against))
        return None if ours is None or not theirs else ours / theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One call of the benchmark: what ran, on what, and what came out."""

    command: str
    dtype: str
    preset: str
    device: str
    rounds: int
    seeds: list[int]
    """Errors are of all of them, everything else of the first."""
    versions: dict[str, str]
    hardware: dict[str, Any]
    results: list[Result] = field(default_factory=list)

    def mean_ratio(self, quantity: str, peer: str) -> float | None:
        """Geometric mean over the training workloads of a ratio against the baseline; None where there is none."""
        ratios = [result.ratio(quantity, peer) for result in self.results if result.training]
        known = [ratio for ratio in ratios if ratio is not None]
        return geometric_mean(known) if known else None

    def write(self, path: Path) -> None:
        """Write JSON that ``Run.read`` reads; a figure that is infinite or no number is written as a string."""
        path.write_text(json.dumps(_plain(dataclasses.asdict(self)), indent=1, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read what ``write`` wrote."""
        data = json.loads(path.read_text())
        return cls(**{**data, "results": [_result(result) for result in data["results"]]})


def geometric_mean(values: Iterable[float]) -> float:
    """The n-th root of the product; 0 if a value is 0. Raises ``ValueError`` where there is none, or a negative one."""
    values = list(values)
    if not values or min(values) < 0:
        raise ValueError(f"A geometric mean needs values that are not negative, got {values}.")
    return 0.0 if 0 in values else math.exp(math.fsum(map(math.log, values)) / len(values))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _result(data: dict[str, Any]) -> Result:
    peers = {
        name: Measurement(**{**figures, "errors": tuple(map(float, figures["errors"]))})
        for name, figures in data["peers"].items()
    }
    return Result(**{**data, "peers": peers})
