"""What a user may not expect is said once, in a warning; with ``strict=True`` it is an error."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import mpcompile
from mpcompile import backend
from mpcompile.notices import MixprecError, MixprecWarning, notify
from mpcompile.passes import Policy
from tests.test_programs import mixprec


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.memory(x)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder, self.head = nn.Linear(4, 4), Encoder(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)))


def trained_in_bf16(strict: bool) -> None:
    mixprec(nn.Linear(8, 4).bfloat16(), strict=strict)(torch.randn(3, 8).bfloat16()).sum().backward()


def recurrent(strict: bool) -> None:
    mixprec(Recurrent(), strict=strict)(torch.randn(3, 2, 4)).sum().backward()


def nothing_low(strict: bool) -> None:
    codebook = nn.Parameter(torch.randn(8, 4))
    mixprec(lambda x: (x @ codebook).argmin(-1), strict=strict)(torch.randn(3, 8))


def without_a_matmul(strict: bool) -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    mixprec(lambda x: (x * weight).sum(), strict=strict)(torch.randn(4, 4)).backward()


def automatic(strict: bool) -> None:
    mixprec(nn.Linear(8, 4), dtype="auto", strict=strict)(torch.randn(3, 8))


def ambient(strict: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        mixprec(nn.Linear(8, 4), strict=strict)(torch.randn(3, 8))


CASES = [
    (trained_in_bf16, "2 trained parameters are bfloat16: they have no float32 master copy", "no float32 master copy"),
    (recurrent, "'encoder.memory' run in float32 outside the compiled graph", "'encoder.memory' run in float32"),
    (nothing_low, "No operation of this graph computes in 16 bits: 1 x only compared", "1 x only compared or ranked"),
    (without_a_matmul, "it has no matmul, convolution or attention", "it has no matmul, convolution or attention"),
    (automatic, "leaves this model in float32: its device does not compute bf16", "found no device that computes bf16"),
    (ambient, "torch.autocast is active around a model", "torch.autocast is active around a model"),
]


@pytest.fixture
def no_native_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "automatic_dtype", lambda _: torch.float32)


@pytest.mark.usefixtures("no_native_bf16")
@pytest.mark.parametrize(("case", "warning", "error"), CASES)
def test_warnings_are_errors_when_strict(case: Callable[[bool], None], warning: str, error: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case(False)
    ours = [str(w.message) for w in caught if w.category is MixprecWarning]
    assert any(warning in message for message in ours), ours
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed) as raised:
        case(True)
    assert isinstance(raised.value.inner_exception, MixprecError)
    assert error in str(raised.value.inner_exception)


def quietly(**options: Any) -> Callable[[nn.Module], Any]:
    """Compile so that every warning is an error."""
    return lambda model: mixprec(model, strict=True, **options)


def test_an_ordinary_model_is_compiled_without_a_word() -> None:
    quietly()(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))(torch.randn(3, 8)).sum().backward()


@pytest.mark.parametrize(("dtype", "low"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_low_parameters_whose_gradients_are_accumulated_in_fp32_are_fine(dtype: str, low: torch.dtype) -> None:
    model = nn.Linear(8, 4).to(low)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    quietly(dtype=dtype)(model)(torch.randn(3, 8).to(low)).sum().backward()
    assert [parameter.grad.dtype for parameter in model.parameters()] == [torch.float32] * 2


def test_low_parameters_with_master_weights_are_fine() -> None:
    model = nn.Linear(8, 4).bfloat16()
    mpcompile.master_weights(model, torch.optim.SGD(model.parameters(), lr=0.1))
    quietly()(model)(torch.randn(3, 8).bfloat16()).sum().backward()


@pytest.mark.parametrize(("dtype", "low"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_only_parameters_without_fp32_gradients_are_counted(dtype: str, low: torch.dtype) -> None:
    model = nn.Linear(8, 4).to(low)
    model.bias.grad_dtype = torch.float32
    message = rf"^1 trained parameters are {str(low)[6:]}: .* mpcompile\.master_weights\(model, optimizer\) makes one"
    with pytest.warns(MixprecWarning, match=message):
        mixprec(model, dtype=dtype)(torch.randn(3, 8).to(low))


def test_low_parameters_that_are_not_trained_are_fine() -> None:
    model = nn.Linear(8, 4).bfloat16()
    with torch.no_grad():
        quietly()(model)(torch.randn(3, 8).bfloat16())
    torch._dynamo.reset()
    quietly()(model.requires_grad_(False))(torch.randn(3, 8).bfloat16())


@torch._dynamo.config.patch(allow_rnn=True)
def test_a_captured_lstm_is_fine() -> None:
    quietly()(Recurrent())(torch.randn(3, 2, 4)).sum().backward()


def test_a_graph_without_weight_matrices_is_fine() -> None:
    quietly()(nn.LayerNorm(8))(torch.randn(3, 8)).sum().backward()


def test_policy_fp32_asks_for_what_the_others_warn_of() -> None:
    model = mixprec(nn.Linear(8, 4).bfloat16(), dtype="auto", policy="fp32", strict=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(3, 8)).dtype is torch.bfloat16


def test_a_policy_that_says_fp32_is_taken_at_its_word() -> None:
    quietly(dtype="auto", policy=Policy(dtype=torch.float32))(nn.Linear(8, 4))(torch.randn(3, 8))


def test_reasons_are_counted() -> None:
    codebooks = [nn.Parameter(torch.randn(8, 4)) for _ in range(2)]
    with pytest.warns(MixprecWarning, match="2 x only compared or ranked"):
        mixprec(lambda x: [(x @ codebook).argmin(-1) for codebook in codebooks])(torch.randn(3, 8))


def test_what_the_user_keeps_in_fp32_is_fine() -> None:
    class Pinned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            x = x.float() @ self.weight.float()
            with torch.autocast("cpu", enabled=False):
                return x @ self.weight

    quietly()(Pinned())(torch.randn(3, 8)).sum().backward()
    quietly(fp32=["op:linear"])(nn.Linear(8, 4))(torch.randn(3, 8)).sum().backward()


def test_a_part_that_falls_back_to_eager_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # Dynamo goes on eagerly, in fp32, when a backend raises one of these.
    (kind, *_) = backend.checks.FALLS_BACK_TO_EAGER

    def failing(*_: Any) -> Any:
        raise kind.__new__(kind)

    monkeypatch.setattr(backend, "compile_with_aot_eager", failing)
    with pytest.warns(MixprecWarning, match=r"A part of the model \(.*\) could not be compiled and runs eagerly"):
        output = mixprec(lambda x: x + 1)(torch.zeros(3))
    assert torch.equal(output, torch.ones(3))


def test_notify_warns_or_raises() -> None:
    with pytest.warns(MixprecWarning, match=r"^text$"):
        notify("text", strict=False)
    with pytest.raises(MixprecError, match=r"^text$"):
        notify("text", strict=True)
