"""The loss scale is saved and loaded, also as the state of a GradScaler."""

import math

import pytest
import torch

from mpcompile.execution.loss_scale import DynamicLossScale, StaticLossScale
from tests.loss_scale_tools import CLEAN, OVERFLOWED, after, sequence, state


def test_the_saved_keys_are_those_of_a_grad_scaler() -> None:
    expected = torch.amp.GradScaler("cpu").state_dict()
    for scales in (DynamicLossScale(), StaticLossScale(8.0)):
        assert scales.saved(scales.initial()).keys() == expected.keys()
    assert DynamicLossScale().saved(DynamicLossScale().initial()) == expected


def test_what_is_saved_is_plain_numbers() -> None:
    saved = DynamicLossScale().saved(state(32.0, 5))
    assert {key: type(value) for key, value in saved.items()} == {
        "scale": float,
        "growth_factor": float,
        "backoff_factor": float,
        "growth_interval": int,
        "_growth_tracker": int,
    }


def test_a_saved_state_is_continued_at_the_same_step_of_the_interval() -> None:
    scales = DynamicLossScale(growth_interval=3, growth_factor=4.0, backoff_factor=0.25, init_scale=64.0)
    continued, loaded = scales.loaded(scales.saved(state(16.0, 2)))
    assert after(continued, loaded) == (16.0, 2)
    assert after(continued, loaded, CLEAN) == (64.0, 0)
    assert after(continued, loaded, OVERFLOWED) == (4.0, 0)


def test_the_saved_factors_continue_and_floor_and_cap_are_those_of_the_option() -> None:
    saved = DynamicLossScale(growth_interval=3, growth_factor=4.0, backoff_factor=0.25).saved(state(16.0, 0))
    continued, _ = DynamicLossScale(floor=2.0, cap=32.0, init_scale=8.0).loaded(saved)
    assert (continued.growth_interval, continued.growth_factor, continued.backoff_factor) == (3, 4.0, 0.25)
    assert (continued.floor, continued.cap) == (2.0, 32.0)


def test_the_state_of_a_used_grad_scaler_loads() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=4)
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    continued, loaded = DynamicLossScale().loaded(scaler.state_dict())
    assert sequence(continued, loaded, CLEAN, CLEAN, OVERFLOWED) == [1024.0, 1024.0, 512.0]


def test_a_grad_scaler_loads_what_is_saved() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(DynamicLossScale(growth_interval=7).saved(state(128.0, 3)))
    assert scaler.state_dict() == {
        "scale": 128.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 7,
        "_growth_tracker": 3,
    }


@pytest.mark.parametrize(
    ("saved", "loaded"), [(65535.0, 32768.0), (3.0, 2.0), (2.0**30, 2.0**24), (0.3, 1.0), (2.0**-30, 1.0)]
)
def test_a_loaded_scale_becomes_a_power_of_two_between_floor_and_cap(saved: float, loaded: float) -> None:
    start = {**DynamicLossScale().saved(state(1.0, 5)), "scale": saved}
    assert after(*DynamicLossScale().loaded(start)) == (loaded, 5)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_broken_scale_is_not_loaded(scale: float) -> None:
    saved = {**DynamicLossScale().saved(state(1.0)), "scale": scale}
    with pytest.raises(ValueError, match="positive and finite") as error:
        DynamicLossScale().loaded(saved)
    assert str(scale) in str(error.value)


@pytest.mark.parametrize("key", ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"])
def test_a_state_that_lacks_a_key_names_it(key: str) -> None:
    saved = DynamicLossScale().saved(state(1.0))
    del saved[key]
    with pytest.raises(KeyError, match=key):
        DynamicLossScale().loaded(saved)


def test_a_saved_factor_that_would_round_is_not_loaded() -> None:
    saved = torch.amp.GradScaler("cpu", growth_factor=1.5).state_dict()
    with pytest.raises(ValueError, match=r"loss_scale\['growth_factor'\] must be a power of two.*1\.5"):
        DynamicLossScale().loaded(saved)


def test_a_static_scale_stays_what_the_option_says() -> None:
    scales = StaticLossScale(256.0)
    for saved in (scales.saved(scales.initial()), DynamicLossScale().saved(state(4.0, 9))):
        continued, loaded = scales.loaded(saved)
        assert continued == scales
        assert after(continued, loaded) == (256.0, 0)


def test_a_grad_scaler_with_a_static_state_keeps_its_scale_through_growth_and_backoff() -> None:
    scaler = torch.amp.GradScaler("cpu", growth_interval=1)
    scaler.load_state_dict(StaticLossScale(256.0).saved(StaticLossScale(256.0).initial()))
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for factor in (1.0, math.inf):
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 256.0
