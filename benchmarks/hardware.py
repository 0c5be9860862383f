"""What the figures were made on: versions, processor, low types it computes natively."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

import mpcompile
from mpcompile.device import has_native_bf16, has_native_fp16


def versions() -> dict[str, str]:
    """Of Python, torch and mpcompile."""
    return {"python": platform.python_version(), "torch": torch.__version__, "mpcompile": mpcompile.__version__}


def describe(device: torch.device) -> dict[str, Any]:
    """Processor, threads, GPU, and whether ``device`` multiplies in bf16 and fp16 natively."""
    return {
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "fp32_matmul": torch.get_float32_matmul_precision(),  # "highest": true fp32, also on a GPU with TF32
        "native_bf16": has_native_bf16(device),
        "native_fp16": has_native_fp16(device),
    }


def caveat(dtype: str, hardware: dict[str, Any]) -> str | None:
    """What to say of times where the low type is not native; None where it is."""
    if hardware[f"native_{dtype}"]:
        return None
    return (
        f"This machine has no {dtype} instructions. Autocast and the {dtype} model run torch's slow {dtype} kernels "
        "here; mixprec rounds operands to it and multiplies in fp32. Ratios of time say little about other machines; "
        "saved bytes, casts and errors do."
    )


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # platform.processor() is empty on Linux
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
