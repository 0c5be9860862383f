"""A runtime tells once of a training that cannot succeed, with the parameters that are to blame."""

import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from mpcompile import MixprecError, MixprecWarning, Runtime
from mpcompile.execution.loss_scale import DynamicLossScale, StaticLossScale
from tests.runtime_tools import Net, Training, judged


class Broken(Net):
    """The gradient of ``poisoned`` alone is infinite, whatever the loss scale."""

    def __init__(self) -> None:
        super().__init__()
        self.poisoned = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.sqrt(self.poisoned)


def caught(runtime: Runtime, steps: Sequence[Sequence[bool]]) -> list[tuple[int, str]]:
    """The warnings of ``steps``, each with the number of its step, from 1."""
    found = []
    for number, bad in enumerate(steps, 1):
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            judged(runtime, *bad)
        found += [(number, str(warning.message)) for warning in record]
        assert all(warning.category is MixprecWarning for warning in record)
    return found


def test_twenty_skipped_steps_in_a_row_are_told_once_with_the_names() -> None:
    ((number, text),) = caught(Runtime(StaticLossScale(8.0), "policy"), [[False, True, False]] * 50)
    assert number == 20
    assert "20 optimizer steps in a row" in text
    assert "Not finite: p1." in text


def test_the_number_of_steps_before_the_warning_can_be_set() -> None:
    runtime = Runtime(StaticLossScale(8.0), "policy")
    runtime.skips_before_warning = 3
    ((number, text),) = caught(runtime, [[True]] * 10)
    assert number == 3
    assert "3 optimizer steps in a row" in text


def test_an_overflow_at_the_floor_is_told_once() -> None:
    runtime = Runtime(DynamicLossScale(init_scale=4.0), "policy")
    ((number, text),) = caught(runtime, [[False, True]] * 19)
    # The scale is 4, 2, 1, 1, ...: the third overflow is the first at the floor, and may yet be the last.
    assert number == 3
    assert "floor of 1" in text
    assert "p1" in text


def test_reaching_the_floor_is_no_overflow_at_the_floor() -> None:
    assert caught(Runtime(DynamicLossScale(init_scale=2.0), "policy"), [[True], [False], [False]]) == []


def test_a_permanent_infinity_gives_two_warnings_and_a_scale_of_one() -> None:
    runtime = Runtime(DynamicLossScale(), "policy")
    found = caught(runtime, [[True, False]] * 100)
    assert len(found) == 2
    assert sum("floor of 1" in text for _, text in found) == 1
    assert [number for number, text in found if "in a row" in text] == [20]
    assert all("Not finite: p0." in text for _, text in found)
    assert (runtime.scale, runtime.skipped_steps) == (1.0, 100)


def test_a_success_between_starts_the_count_again() -> None:
    runtime = Runtime(StaticLossScale(8.0), "policy")
    assert caught(runtime, [*[[True]] * 19, [False], *[[True]] * 19, [False]]) == []
    assert [number for number, _ in caught(runtime, [*[[True]] * 25, [False], *[[True]] * 25])] == [20, 46]


def test_a_healthy_run_warns_of_nothing() -> None:
    # The search for the scale at the start, and an overflow now and then.
    steps = [*[[True]] * 12, *([[False]] * 40 + [[True]]) * 5]
    assert caught(Runtime(DynamicLossScale(growth_interval=20), "policy"), steps) == []


def test_no_more_than_eight_names_are_told() -> None:
    runtime = Runtime(StaticLossScale(8.0), "policy")
    runtime.skips_before_warning = 1
    ((_, text),) = caught(runtime, [[True] * 10])
    assert "p0, p1, p2, p3, p4, p5, p6, p7, ..." in text
    assert "p8" not in text
    assert len(runtime.overflowed) == 10


def test_an_overflow_on_another_process_is_told_as_such() -> None:
    runtime = Runtime(StaticLossScale(8.0), "policy")
    runtime.skips_before_warning = 1
    with pytest.warns(MixprecWarning, match="another process"):
        judged(runtime, False, elsewhere=True)
    assert runtime.overflowed == ()


def test_under_strict_it_is_an_error() -> None:
    runtime = Runtime(StaticLossScale(8.0), "policy", strict=True)
    for _ in range(19):
        judged(runtime, True)
    with pytest.raises(MixprecError, match="20 optimizer steps in a row"):
        judged(runtime, True)


def test_a_model_that_cannot_be_trained_is_told_with_the_parameter_that_is_to_blame() -> None:
    t = Training(Broken())
    found: dict[int, list[str]] = {}
    for number in range(1, 31):
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            t.step()
        if record:
            found[number] = [str(warning.message) for warning in record]
    assert t.runtime.overflowed == ("poisoned",)
    assert (t.runtime.scale, t.runtime.skipped_steps) == (1.0, 30)
    assert sum(map(len, found.values())) == 2
    assert "20 optimizer steps in a row" in found[20][0]
    assert all("Not finite: poisoned." in text for texts in found.values() for text in texts)


def test_a_resumed_run_goes_on_counting_steps_skipped_in_a_row() -> None:
    first, second = (Runtime(StaticLossScale(8.0), "policy") for _ in range(2))
    assert caught(first, [[True]] * 15) == []
    second.load_state_dict(first.state_dict())
    assert [number for number, _ in caught(second, [[True]] * 10)] == [5]
