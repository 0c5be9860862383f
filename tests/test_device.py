"""What ``dtype="auto"`` means on each device, and that the backend asks about the right one."""

import platform

import pytest
import torch
from torch import nn

import mpcompile
from mpcompile import device
from mpcompile.notices import MixprecWarning

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize(
    ("where", "native", "dtype"),
    [
        (CPU, True, torch.bfloat16),
        (CPU, False, torch.float32),
        (CUDA, True, torch.bfloat16),
        (CUDA, False, torch.float16),
        (torch.device("meta"), False, torch.float32),
    ],
)
def test_automatic_dtype(
    monkeypatch: pytest.MonkeyPatch, where: torch.device, native: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(device, "has_native_bf16", lambda asked: native and asked == where)
    assert device.automatic_dtype(where) is dtype


@pytest.mark.parametrize(("avx512", "amx"), [(False, False), (True, False), (False, True)])
def test_an_x86_cpu_has_bf16_with_either_instruction_set(
    monkeypatch: pytest.MonkeyPatch, avx512: bool, amx: bool
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert device.has_native_bf16(CPU) is (avx512 or amx)


@pytest.mark.parametrize("machine", ["aarch64", "arm64"])
@pytest.mark.parametrize("supported", [True, False])
def test_an_arm_cpu_is_asked_through_onednn(monkeypatch: pytest.MonkeyPatch, machine: str, supported: bool) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: not supported)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported, raising=False)
    assert device.has_native_bf16(CPU) is supported


@pytest.mark.parametrize(("capability", "native"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_an_nvidia_gpu_has_bf16_from_ampere_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], native: bool
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert device.has_native_bf16(CUDA) is native


def test_an_amd_gpu_has_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert device.has_native_bf16(CUDA)


@pytest.mark.parametrize(("kind", "native"), [("mps", True), ("xpu", True), ("meta", False)])
def test_other_devices(kind: str, native: bool) -> None:
    assert device.has_native_bf16(torch.device(kind)) is native


def test_the_private_names_it_asks_are_there() -> None:
    # The tests above replace them.
    assert isinstance(torch.cpu._is_avx512_bf16_supported(), bool)
    assert isinstance(torch.cpu._is_amx_tile_supported(), bool)
    assert torch.ops.mkldnn._is_mkldnn_bf16_supported() in (True, False)


def _train(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> mpcompile.Report:
    monkeypatch.setattr("mpcompile.backend.automatic_dtype", lambda _: dtype)
    model = torch.compile(nn.Linear(8, 4), backend="mixprec", options={"compiler": "aot_eager"})
    model(torch.randn(3, 8)).sum().backward()
    (report,) = mpcompile.reports(model)
    return report


def test_auto_is_bf16_where_it_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    report = _train(torch.bfloat16, monkeypatch)
    assert report.dtype == "bfloat16"
    assert {node.precision for node in report.matmuls()} == {"low"}


def test_auto_is_fp32_with_a_warning_where_nothing_low_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(MixprecWarning, match="does not compute bf16 natively"):
        report = _train(torch.float32, monkeypatch)
    assert report.dtype == "float32"
    assert not report.casts


def test_the_accelerator_among_the_inputs_decides() -> None:
    inputs = [3, torch.empty(2), torch.empty(2, device="meta"), torch.empty(1)]
    assert device.main_device(inputs) == torch.device("meta")
    assert device.main_device(inputs[:2]) == CPU
    assert device.main_device([3]) == CPU
