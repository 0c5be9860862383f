"""How the loss scale starts and moves."""

import pytest
import torch

from mpcompile.execution.loss_scale import DynamicLossScale, StaticLossScale
from tests.loss_scale_tools import CLEAN, OVERFLOWED, SKIPPED_FOR_ANOTHER, after, sequence, state


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
