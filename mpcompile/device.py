"""What a device computes natively, and what ``dtype="auto"`` means on it."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from typing import Any

import torch


def main_device(values: Iterable[Any]) -> torch.device:
    """The device where a computation on ``values`` takes place: the first accelerator among them, else the CPU."""
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    accelerators = [device for device in devices if device.type != "cpu"]
    return (accelerators or devices or [torch.device("cpu")])[0]


def has_native_bf16(device: torch.device) -> bool:
    """Whether matmuls in bf16 have hardware on ``device`` (elsewhere they are emulated, and slow)."""
    if device.type == "cuda":
        if torch.version.hip:
            return True
        return torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere
    if device.type == "cpu":
        if platform.machine() in ("aarch64", "arm64"):
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        # oneDNN also "supports" bf16 on AVX512 without the instructions, at less than fp32 speed.
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device.type in ("xpu", "mps", "hpu")


def has_native_fp16(device: torch.device) -> bool:
    """Whether matmuls in fp16 have hardware on ``device``."""
    if device.type == "cpu":
        if platform.machine() in ("aarch64", "arm64"):
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
        return torch.cpu._is_amx_fp16_supported()
    return device.type in ("cuda", "xpu", "mps", "hpu")


def automatic_dtype(device: torch.device) -> torch.dtype:
    """bf16 where it is native, else fp16 on CUDA, else fp32 (nothing to gain)."""
    if has_native_bf16(device):
        return torch.bfloat16
    return torch.float16 if device.type == "cuda" else torch.float32
