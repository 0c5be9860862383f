"""What this machine and this process compute with: versions, devices, settings of fp32, and what is installed."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

import mpcompile
from mpcompile.device import automatic_dtype, has_native_bf16, has_native_fp16

OLDEST_TORCH = (2, 11)
_OPTIONAL = {"matplotlib": "charts", "triton": "code for GPUs"}


@dataclass(frozen=True, slots=True)
class Fact:
    """One line about the machine."""

    topic: str
    """``versions``, ``devices``, ``settings`` or ``installed``."""
    name: str
    value: str
    comment: str = ""


def facts() -> list[Fact]:
    """Everything there is to say, in the order it is shown."""
    return [*_versions(), *_devices(), *_settings(), *_installed()]


def is_supported(torch_version: str) -> bool:
    """Whether a version of torch is new enough.

    >>> is_supported("2.13.0+cpu"), is_supported("2.9.1")
    (True, False)
    """
    numbers = re.findall(r"\d+", torch_version)
    return tuple(map(int, numbers[:2])) >= OLDEST_TORCH


def devices() -> list[torch.device]:
    """The CPU, and every accelerator."""
    found = [torch.device("cpu")]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        found += [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]
    return found


def is_registered() -> bool:
    """Whether torch finds the backend ``mixprec``, by the entry point that installing the package makes."""
    return "mixprec" in torch.compiler.list_backends()


def _versions() -> Iterator[Fact]:
    oldest = ".".join(map(str, OLDEST_TORCH))
    fits = "supported" if is_supported(torch.__version__) else "too old"
    yield Fact("versions", "torch", torch.__version__, f"{fits}: {oldest} or newer is needed")
    yield Fact("versions", "mpcompile", mpcompile.__version__)
    yield Fact("versions", "python", platform.python_version())


def _devices() -> Iterator[Fact]:
    for device in devices():
        native = {"bf16": has_native_bf16(device), "fp16": has_native_fp16(device)}
        how = ", ".join(f"{name} {'native' if there else 'emulated'}" for name, there in native.items())
        automatic = automatic_dtype(device)
        if automatic is torch.float32:
            advice = "dtype='auto' stays in fp32: 16 bits save memory here, not time"
        else:
            advice = f"dtype='auto' is {'bf16' if automatic is torch.bfloat16 else 'fp16'}"
        yield Fact("devices", f"{device} ({_model(device)})", how, advice)


def _model(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, capability {major}.{minor}"
    return device.type


def _settings() -> Iterator[Fact]:
    matmul = torch.backends.cuda.matmul
    precisions = {
        "cuda.matmul.fp32_precision": matmul.fp32_precision,
        "cudnn.conv.fp32_precision": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        "mkldnn.matmul.fp32_precision": torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
    }
    for name, precision in precisions.items():
        meaning = "true fp32" if precision in ("none", "ieee") else "fp32 is rounded"
        yield Fact("settings", name, precision, meaning)
    reductions = {
        "cuda.matmul.allow_bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "cuda.matmul.allow_fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
        "cuda.matmul.allow_fp16_accumulation": matmul.allow_fp16_accumulation,
    }
    for name, allowed in reductions.items():
        yield Fact("settings", name, str(allowed), "sums in 16 bits" if allowed else "fp32 sums")


def _installed() -> Iterator[Fact]:
    yield Fact("installed", "entry point", "yes" if is_registered() else "no", "torch finds backend='mixprec' by it")
    for name, use in _OPTIONAL.items():
        try:
            yield Fact("installed", name, version(name), use)
        except PackageNotFoundError:
            yield Fact("installed", name, "no", use)
    compiler = os.environ.get("CXX", "g++")
    yield Fact("installed", "C++ compiler", shutil.which(compiler) or "no", "Inductor's code for CPUs")
