"""Master weights that are refused or not needed, and the warning where they are missing."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import mpcompile
from mpcompile import MixprecError, MixprecWarning
from tests.master_weights_tools import (
    BF16,
    FP16,
    FP32,
    NO_MASTERS,
    Net,
    assert_all_moved,
    assert_fp32_masters,
    assert_same,
    backward,
    batch,
    both_dtypes,
    everything,
    masters_of,
    train,
    values,
)
from tests.test_programs import mixprec


def test_masters_are_made_once() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model)
    train(model, optimizer, range(2))
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match="has master weights already"):
        mpcompile.master_weights(model, optimizer)
    assert_same(everything(model, optimizer), before)
    train(model, optimizer, (2,))
    assert_fp32_masters(model.state_dict(), masters)


def test_a_parameter_of_another_model_is_refused_and_nothing_done() -> None:
    model, other = Net().bfloat16(), nn.Linear(3, 2).bfloat16()
    optimizer = SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"bfloat16 parameter of shape \(2, 3\) that is not among model.parameters"):
        mpcompile.master_weights(model, optimizer)
    assert {parameter.grad_dtype for parameter in model.parameters()} == {BF16}
    assert {value.dtype for value in model.state_dict().values()} == {BF16}
    assert len(mpcompile.master_weights(nn.ModuleList([model, other]), optimizer)) == 6


def test_an_fp32_parameter_of_another_model_is_fine() -> None:
    model, other = Net().bfloat16(), nn.Linear(3, 2)
    optimizer = SGD([*model.parameters(), *other.parameters()], lr=0.5)
    mpcompile.master_weights(model, optimizer)
    before = values(other.parameters())
    other(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    assert_same(
        values(other.parameters()), [old - 0.5 * p.grad for old, p in zip(before, other.parameters(), strict=True)]
    )


def test_an_fp32_model_is_left_alone() -> None:
    model = Net()
    twin = copy.deepcopy(model)
    optimizer, reference = AdamW(model.parameters(), lr=1e-3), AdamW(twin.parameters(), lr=1e-3)
    masters = mpcompile.master_weights(model, optimizer)
    assert dict(masters) == {}
    train(model, optimizer, range(3), FP32)
    train(twin, reference, range(3), FP32)
    assert_same(everything(model, optimizer), everything(twin, reference))
    places = [value.data_ptr() for value in model.state_dict().values()]
    assert places == [parameter.data_ptr() for parameter in model.parameters()]


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_a_closure_is_refused_and_nothing_done(how: str) -> None:
    model = Net().bfloat16()
    optimizer, _ = masters_of(model)
    backward(model, BF16)
    before = everything(model, optimizer)

    def closure() -> float:
        raise AssertionError

    with pytest.raises(MixprecError, match=r"optimizer.step\(closure\)"):
        optimizer.step(closure) if how == "positional" else optimizer.step(closure=closure)
    assert_same(everything(model, optimizer), before)
    optimizer.step(None)
    assert_all_moved(model.state_dict().values(), before[1].values())


def test_the_warning_of_missing_masters_names_the_remedy() -> None:
    with pytest.warns(MixprecWarning, match=rf"4 trained parameters are float16: they have {NO_MASTERS}.*") as caught:
        mixprec(Net().half(), dtype="fp16")(batch(FP16))
    assert any("mpcompile.master_weights(model, optimizer)" in str(warning.message) for warning in caught)


@both_dtypes
def test_a_model_with_masters_is_compiled_without_a_word(dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    masters_of(model)
    # Warnings are errors when strict.
    backward(mixprec(model, dtype="bf16" if dtype is BF16 else "fp16", strict=True), dtype)


def test_masters_of_a_part_do_not_hide_what_the_rest_lacks() -> None:
    model = Net().bfloat16()
    mpcompile.master_weights(model, SGD(model.body[0].parameters(), lr=0.1))
    with pytest.warns(MixprecWarning, match=f"2 trained parameters are bfloat16: they have {NO_MASTERS}"):
        mixprec(model)(batch(BF16))
