"""How the loss scale starts, moves, and is saved and loaded."""

import math
from typing import Any

import pytest
import torch

from mpcompile.execution.loss_scale import (
    DynamicLossScale,
    LossScale,
    ScaleState,
    StaticLossScale,
    parse_loss_scale,
    power_of_two_below,
)

CLEAN, OVERFLOWED, SKIPPED_FOR_ANOTHER = (False, False), (True, True), (False, True)
"""What became of a step: whether gradients of this scale overflowed, and whether the step was left out."""


def state(scale: float, tracker: int = 0) -> ScaleState:
    return ScaleState(torch.tensor(scale), torch.tensor(tracker))


def after(loss_scale: LossScale, start: ScaleState, *steps: tuple[bool, bool]) -> tuple[float, int]:
    """Scale and tracker after ``steps``."""
    for overflowed, skipped in steps:
        start = loss_scale.adjust(start, torch.tensor(overflowed), torch.tensor(skipped))
    assert start.scale.dtype is torch.float32
    assert start.tracker.dtype is torch.int64
    assert start.scale.shape == start.tracker.shape == ()
    return float(start.scale), int(start.tracker)


def sequence(loss_scale: LossScale, start: ScaleState, *steps: tuple[bool, bool]) -> list[float]:
    """The scale after each of ``steps``."""
    return [after(loss_scale, start, *steps[: count + 1])[0] for count in range(len(steps))]


def test_the_dynamic_scale_starts_at_two_to_the_sixteenth() -> None:
    assert after(DynamicLossScale(), DynamicLossScale().initial()) == (2.0**16, 0)


def test_the_dynamic_scale_starts_where_it_is_told() -> None:
    assert after(DynamicLossScale(init_scale=8.0), DynamicLossScale(init_scale=8.0).initial()) == (8.0, 0)


def test_a_clean_step_counts_and_moves_nothing() -> None:
    assert after(DynamicLossScale(), state(1024.0, 7), CLEAN) == (1024.0, 8)


def test_the_scale_doubles_at_the_two_thousandth_clean_step_and_not_before() -> None:
    scales = DynamicLossScale()
    assert after(scales, state(1024.0, 1998), CLEAN) == (1024.0, 1999)
    assert after(scales, state(1024.0, 1999), CLEAN) == (2048.0, 0)


def test_two_thousand_clean_steps_from_the_start() -> None:
    scales, now = DynamicLossScale(), DynamicLossScale().initial()
    no = torch.tensor(False)
    seen = []
    for _ in range(4000):
        now = scales.adjust(now, no, no)
        seen.append(float(now.scale))
    assert seen == [2.0**16] * 1999 + [2.0**17] * 2000 + [2.0**18]


def test_an_overflow_halves_the_scale_and_starts_the_count_again() -> None:
    assert after(DynamicLossScale(), state(1024.0, 1999), OVERFLOWED) == (512.0, 0)


def test_an_overflow_moves_growth_to_a_whole_interval_later() -> None:
    scales = DynamicLossScale(growth_interval=3)
    found = sequence(scales, state(16.0), CLEAN, CLEAN, OVERFLOWED, CLEAN, CLEAN, CLEAN, CLEAN)
    assert found == [16.0, 16.0, 8.0, 8.0, 8.0, 16.0, 16.0]


def test_a_step_skipped_for_another_model_changes_nothing() -> None:
    assert after(DynamicLossScale(), state(1024.0, 1999), SKIPPED_FOR_ANOTHER) == (1024.0, 1999)


def test_a_step_skipped_for_another_model_does_not_count_towards_growth() -> None:
    scales = DynamicLossScale(growth_interval=2)
    assert sequence(scales, state(4.0), CLEAN, SKIPPED_FOR_ANOTHER, CLEAN) == [4.0, 4.0, 8.0]


def test_a_step_skipped_for_another_model_changes_nothing_even_where_growth_is_overdue() -> None:
    # Reached by loading the state of a GradScaler after its set_growth_interval.
    assert after(DynamicLossScale(growth_interval=3), state(1024.0, 5), SKIPPED_FOR_ANOTHER) == (1024.0, 5)


def test_growth_stops_at_the_cap_of_two_to_the_twenty_fourth() -> None:
    scales = DynamicLossScale(growth_interval=1)
    assert sequence(scales, state(2.0**22), CLEAN, CLEAN, CLEAN, CLEAN) == [2.0**23, 2.0**24, 2.0**24, 2.0**24]


def test_falling_stops_at_the_floor_of_one() -> None:
    assert sequence(DynamicLossScale(), state(4.0), *[OVERFLOWED] * 4) == [2.0, 1.0, 1.0, 1.0]


def test_ten_thousand_overflows_leave_the_floor_and_never_zero() -> None:
    scales, now, yes = DynamicLossScale(), DynamicLossScale().initial(), torch.tensor(True)
    for _ in range(10_000):
        now = scales.adjust(now, yes, yes)
    assert (float(now.scale), int(now.tracker)) == (1.0, 0)


def test_the_scale_grows_again_from_the_floor() -> None:
    assert after(DynamicLossScale(growth_interval=2), state(2.0), OVERFLOWED, CLEAN, CLEAN) == (2.0, 0)


def test_every_setting_is_used() -> None:
    scales = DynamicLossScale(
        init_scale=16.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2, floor=2.0, cap=128.0
    )
    found = sequence(scales, scales.initial(), CLEAN, CLEAN, CLEAN, CLEAN, *[OVERFLOWED] * 4)
    assert found == [16.0, 64.0, 64.0, 128.0, 32.0, 8.0, 2.0, 2.0]


def test_a_factor_that_jumps_over_floor_and_cap_lands_on_them() -> None:
    scales = DynamicLossScale(growth_factor=2.0**10, backoff_factor=2.0**-10, growth_interval=1)
    assert after(scales, state(2.0**20), CLEAN) == (2.0**24, 0)
    assert after(scales, state(2.0**9), OVERFLOWED) == (1.0, 0)


@pytest.mark.parametrize("step", [CLEAN, OVERFLOWED, SKIPPED_FOR_ANOTHER])
def test_adjusting_leaves_the_given_state_as_it_was(step: tuple[bool, bool]) -> None:
    # A backward may still hold the scale that its forward was run with.
    given = state(1024.0, 1999)
    DynamicLossScale().adjust(given, torch.tensor(step[0]), torch.tensor(step[1]))
    assert (float(given.scale), int(given.tracker)) == (1024.0, 1999)


@pytest.mark.parametrize("step", [CLEAN, OVERFLOWED, SKIPPED_FOR_ANOTHER])
def test_the_static_scale_never_moves(step: tuple[bool, bool]) -> None:
    assert sequence(StaticLossScale(256.0), StaticLossScale(256.0).initial(), *[step] * 3) == [256.0] * 3


def test_the_static_scale_cannot_fall_to_its_floor() -> None:
    assert StaticLossScale(2.0**-20).floor < 2.0**-20


# What the option means.


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


# Saving and loading.


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
