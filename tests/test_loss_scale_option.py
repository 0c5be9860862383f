"""What the option ``loss_scale`` means, and which of its values are refused."""

import math
from typing import Any

import pytest
import torch

from mpcompile.execution.loss_scale import DynamicLossScale, StaticLossScale, parse_loss_scale, power_of_two_below


@pytest.mark.parametrize("value", ["auto", "dynamic", {}])
def test_these_mean_the_dynamic_scale(value: Any) -> None:
    assert parse_loss_scale(value) == DynamicLossScale()


@pytest.mark.parametrize("value", [None, "external"])
def test_these_mean_no_scaling_in_the_graph(value: Any) -> None:
    assert parse_loss_scale(value) is None


@pytest.mark.parametrize("value", [1, 1024, 65536.0, 0.25])
def test_a_power_of_two_is_a_static_scale(value: float) -> None:
    assert parse_loss_scale(value) == StaticLossScale(float(value))


def test_a_dict_sets_what_it_names_and_leaves_the_rest() -> None:
    parsed = parse_loss_scale({"growth_interval": 3, "init_scale": 1024})
    assert parsed == DynamicLossScale(growth_interval=3, init_scale=1024)
    assert isinstance(parsed, DynamicLossScale)
    assert (parsed.growth_factor, parsed.backoff_factor, parsed.floor, parsed.cap) == (2.0, 0.5, 1.0, 2.0**24)


@pytest.mark.parametrize("value", ["Dynamic", "1024", "none", True, False, [1024], 1j, torch.tensor(1024.0)])
def test_what_is_no_loss_scale_is_refused_with_what_is(value: Any) -> None:
    with pytest.raises(ValueError, match="loss_scale") as error:
        parse_loss_scale(value)
    for part in ("'auto'", "'dynamic'", "None", "'external'", "a power of two", "dict", repr(value)):
        assert part in str(error.value)


def test_an_unknown_key_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="Unknown key 'growth_intervall' in option `loss_scale`") as error:
        parse_loss_scale({"growth_intervall": 3})
    for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "floor", "cap"):
        assert name in str(error.value)


@pytest.mark.parametrize("value", [3, 1000.0, 65535.0, 0.3])
def test_a_static_scale_that_would_round_is_refused_with_its_neighbours(value: float) -> None:
    below = 2.0 ** math.floor(math.log2(value))
    with pytest.raises(ValueError, match="power of two") as error:
        parse_loss_scale(value)
    for part in ("loss_scale", repr(float(value)), f"{below:g}", f"{2 * below:g}"):
        assert part in str(error.value)


@pytest.mark.parametrize("value", [0, 0.0, -1024.0, math.inf, -math.inf, math.nan])
def test_a_static_scale_that_is_not_positive_and_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="loss_scale must be a positive power of two") as error:
        parse_loss_scale(value)
    assert repr(float(value)) in str(error.value)


@pytest.mark.parametrize("exponent", [128, -150])
def test_a_scale_that_fp32_cannot_hold_is_refused(exponent: int) -> None:
    # 2^128 is infinite in fp32, 2^-150 is zero, and S is an fp32 tensor.
    with pytest.raises(ValueError, match="loss_scale"):
        parse_loss_scale(2.0**exponent)


@pytest.mark.parametrize("key", ["init_scale", "growth_factor", "backoff_factor", "floor", "cap"])
@pytest.mark.parametrize("value", [3.0, 0.0, -2.0, math.inf, math.nan, "2", None, True])
def test_every_factor_must_be_a_power_of_two(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match="power of two") as error:
        parse_loss_scale({key: value})
    assert f"loss_scale[{key!r}]" in str(error.value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("value", [0, -1, 2000.0, "3", None, True])
def test_the_growth_interval_must_be_a_positive_int(value: Any) -> None:
    with pytest.raises(ValueError, match=r"loss_scale\['growth_interval'\] must be a positive int") as error:
        parse_loss_scale({"growth_interval": value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(("key", "value"), [("growth_factor", 1.0), ("growth_factor", 0.5), ("backoff_factor", 1.0)])
def test_factors_that_would_not_move_the_scale_are_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match="growth_factor > 1 > backoff_factor") as error:
        parse_loss_scale({key: value})
    assert f"{value:g}" in str(error.value)


@pytest.mark.parametrize(("key", "value"), [("init_scale", 0.5), ("init_scale", 2.0**25), ("floor", 2.0**17)])
def test_a_start_outside_floor_and_cap_is_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match="floor <= init_scale <= cap") as error:
        parse_loss_scale({key: value})
    assert repr(value) in str(error.value) or f"{value:g}" in str(error.value)


@pytest.mark.parametrize(
    ("value", "below"),
    [(1.0, 1.0), (1.5, 1.0), (2.0, 2.0), (65535.0, 32768.0), (65536.0, 65536.0), (0.75, 0.5), (2.0**-140, 2.0**-140)],
)
def test_power_of_two_below(value: float, below: float) -> None:
    assert power_of_two_below(value) == below
