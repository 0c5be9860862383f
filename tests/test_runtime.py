"""``mpcompile.runtime``: the loss scale of a compiled model, the account of its steps, and their state to save."""

import copy
import json
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcompile
from mpcompile import MixprecError, MixprecWarning, Runtime
from mpcompile.backend import mixprec as backend
from mpcompile.execution.loss_scale import DynamicLossScale, StaticLossScale
from tests.test_programs import mixprec

HUGE = 1e30
"""A factor on the loss with which gradients are finite in fp32 and infinite in fp16."""
CLEAN, OVERFLOW = 1.0, HUGE
GRAD_SCALER_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
OWN_KEYS = {"skipped_steps", "steps_skipped_in_a_row", "policy"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Broken(Net):
    """The gradient of ``poisoned`` alone is infinite, whatever the loss scale."""

    def __init__(self) -> None:
        super().__init__()
        self.poisoned = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.sqrt(self.poisoned)


class Training:
    """A compiled model in training."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        self.model = Net() if model is None else model
        options = {"dtype": "fp16", "loss_scale": {"init_scale": 1024.0}, **options}
        self.compiled = mixprec(self.model, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    @property
    def runtime(self) -> Runtime:
        return mpcompile.runtime(self.compiled)

    def step(self, factor: float = 1.0) -> float:
        """One step of the ordinary loop; returns the scale after it."""
        self.optimizer.zero_grad()
        (self.compiled(torch.ones(4, 3)).square().mean() * factor).backward()
        self.optimizer.step()
        return self.runtime.scale

    def steps(self, factors: Sequence[float]) -> list[float]:
        return [self.step(factor) for factor in factors]


def judged(runtime: Runtime, *bad: bool, elsewhere: bool = False) -> None:
    """Tell a runtime of a step of parameters ``p0``, ``p1``, ...; ``elsewhere``: another process overflowed."""
    overflowed = torch.tensor(any(bad) or elsewhere)
    runtime.judged(tuple(f"p{i}" for i in range(len(bad))), torch.tensor(bad), overflowed, overflowed)
    runtime.warn()


def test_before_compilation_it_is_what_the_options_say() -> None:
    runtime = Training().runtime
    assert (runtime.scale, runtime.skipped_steps, runtime.last_step_skipped, runtime.overflowed) == (1024, 0, False, ())
    assert Training(loss_scale="auto").runtime.scale == 65536.0
    assert Training(loss_scale=256).runtime.scale == 256.0


def test_it_is_the_same_object_before_and_after_compilation() -> None:
    t = Training()
    before = t.runtime
    t.step(OVERFLOW)
    assert t.runtime is before
    assert before.skipped_steps == 1


def test_it_can_be_asked_for_after_compilation_as_well() -> None:
    t = Training()
    t.compiled(torch.ones(4, 3)).sum().backward()
    t.optimizer.step()
    assert (t.runtime.scale, t.runtime.skipped_steps) == (1024.0, 0)
    assert t.step(OVERFLOW) == 512.0


def test_it_tells_of_the_last_step() -> None:
    t = Training()
    seen = []
    for factor in (CLEAN, OVERFLOW, OVERFLOW, CLEAN):
        t.step(factor)
        runtime = t.runtime
        seen.append(
            (runtime.scale, runtime.skipped_steps, runtime.last_step_skipped, "layer.weight" in runtime.overflowed)
        )
    assert seen == [(1024, 0, False, False), (512, 1, True, True), (256, 2, True, True), (256, 2, False, False)]


def test_it_names_the_parameters_whose_gradients_were_not_finite() -> None:
    t = Training()
    t.step()
    for infinite in ("layer.bias", "layer.weight"):
        gradient = t.model.get_parameter(infinite).grad
        assert gradient is not None
        t.optimizer.zero_grad(set_to_none=False)
        gradient[0] = float("inf")
        t.optimizer.step()
        assert t.runtime.overflowed == (infinite,)


def test_the_default_halves_until_it_fits() -> None:
    # The derivative of a sum is 1, which S = 2^16 takes beyond fp16's largest number and S = 2^15 does not.
    t = Training(loss_scale="auto")
    seen = []
    for _ in range(3):
        t.optimizer.zero_grad()
        for parameter in t.model.parameters():
            nn.init.zeros_(parameter)  # tanh is steepest there: its derivative is 1 as well
        t.compiled(torch.zeros(4, 3)).sum().backward()
        t.optimizer.step()
        seen.append((t.runtime.scale, t.runtime.last_step_skipped))
    assert seen == [(32768.0, True), (32768.0, False), (32768.0, False)]


def test_a_static_scale_stays_and_skips_all_the_same() -> None:
    t = Training(loss_scale=256)
    before = [p.detach().clone() for p in t.model.parameters()]
    assert t.steps([OVERFLOW, OVERFLOW]) == [256.0, 256.0]
    assert t.runtime.skipped_steps == 2
    assert all(map(torch.equal, before, t.model.parameters()))
    assert t.step(CLEAN) == 256.0
    assert not any(map(torch.equal, before, t.model.parameters()))


@pytest.mark.parametrize(
    "options", [{"dtype": "bf16", "loss_scale": "auto"}, {"loss_scale": None}, {"loss_scale": "external"}]
)
def test_where_nothing_is_scaled_there_is_no_state(options: dict[str, Any]) -> None:
    t = Training(**options)
    assert (t.runtime.scale, t.runtime.state_dict()) == (1.0, {})
    assert t.steps([CLEAN, CLEAN]) == [1.0, 1.0]
    assert t.runtime.state_dict() == {}
    t.runtime.load_state_dict({})
    t.runtime.load_state_dict(Training().runtime.state_dict())
    assert (t.runtime.scale, t.runtime.skipped_steps, t.runtime.overflowed) == (1.0, 0, ())


class Other(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def test_what_is_not_compiled_is_refused() -> None:
    for value in (Other(), nn.Linear(2, 2), lambda x: x, torch.sin, None, 3, "model"):
        with pytest.raises(TypeError, match=r"torch\.compile") as error:
            mpcompile.runtime(value)  # type: ignore[arg-type]
        assert type(value).__name__ in str(error.value)


def test_what_another_backend_compiled_is_refused() -> None:
    with pytest.raises(TypeError, match="OptimizedModule"):
        mpcompile.runtime(torch.compile(Other(), backend="eager"))
    in_place = Other()
    in_place.compile(backend="aot_eager")
    with pytest.raises(TypeError, match="Other"):
        mpcompile.runtime(in_place)


def test_the_backend_may_be_given_itself_instead_of_its_name() -> None:
    compiled = torch.compile(Net(), backend=backend, options={"dtype": "fp16", "loss_scale": 64})
    assert mpcompile.runtime(compiled).scale == 64.0


def test_a_model_compiled_in_place() -> None:
    t = Training()
    t.compiled = t.model
    t.model.compile(
        backend="mixprec", options={"dtype": "fp16", "compiler": "aot_eager", "loss_scale": {"init_scale": 64.0}}
    )
    assert t.runtime.scale == 64.0
    assert t.steps([CLEAN, OVERFLOW]) == [64.0, 32.0]
    assert "layer.weight" in t.runtime.overflowed


def test_a_compiled_function() -> None:
    net = Net()
    compiled = mixprec(lambda x: net(x).sum(), dtype="fp16", loss_scale={"init_scale": 64.0})
    runtime, optimizer = mpcompile.runtime(compiled), torch.optim.SGD(net.parameters(), 0.1)
    assert runtime.scale == 64.0
    for factor in (CLEAN, OVERFLOW):
        (compiled(torch.ones(4, 3)) * factor).backward()
        optimizer.step()
    assert (runtime.scale, runtime.skipped_steps) == (32.0, 1)
    assert any("weight" in name for name in runtime.overflowed)


def test_two_functions_of_plain_tensors_have_runtimes_of_their_own() -> None:
    # The two calls share code in Dynamo, and there is no parameter to tell them apart by.
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    compiled = [mixprec(product, dtype="fp16", loss_scale={"init_scale": 64.0}) for _ in range(2)]
    weights = [torch.ones(3, 2, requires_grad=True) for _ in range(2)]
    for call, weight, factor in zip(compiled, weights, (CLEAN, OVERFLOW), strict=True):
        (call(torch.ones(4, 3), weight).sum() * factor).backward()
        torch.optim.SGD([weight], 0.1).step()
    assert [mpcompile.runtime(call).scale for call in compiled] == [64.0, 32.0]


def test_two_models_of_one_structure_have_runtimes_names_and_flags_of_their_own() -> None:
    first, second = Training(), Training()
    assert first.runtime is not second.runtime
    second.step(OVERFLOW)
    first.step(CLEAN)
    second.step(OVERFLOW)
    assert [t.runtime.scale for t in (first, second)] == [1024.0, 256.0]
    assert [t.runtime.skipped_steps for t in (first, second)] == [0, 2]
    assert [t.runtime.last_step_skipped for t in (first, second)] == [False, True]
    assert [t.runtime.overflowed == () for t in (first, second)] == [True, False]
    assert (first.step(OVERFLOW), second.step(CLEAN)) == (512.0, 256.0)
    assert [t.runtime.overflowed == () for t in (first, second)] == [False, True]


def test_models_of_one_structure_nested_in_others_have_the_names_they_have_there() -> None:
    class Outer(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name
            self.add_module(name, Net())

        def forward(self, x: Tensor) -> Tensor:
            return self.get_submodule(self.name)(x)

    found = []
    for name in ("encoder", "decoder"):
        t = Training(Outer(name))
        t.step(OVERFLOW)
        found.append(t.runtime.overflowed)
    assert [names[0] for names in found] == ["encoder.layer.weight", "decoder.layer.weight"]
    assert all(len(names) <= 2 for names in found)


def test_a_copy_of_a_model_is_a_model_of_its_own() -> None:
    first = Training()
    first.step(OVERFLOW)
    second = Training(copy.deepcopy(first.model))
    assert second.steps([CLEAN, OVERFLOW, OVERFLOW]) == [1024.0, 512.0, 256.0]
    assert first.step(CLEAN) == 512.0


# Saving and loading.


def test_the_state_has_the_keys_of_a_grad_scaler_and_counters_and_the_policy() -> None:
    t = Training()
    assert t.runtime.state_dict().keys() == GRAD_SCALER_KEYS | OWN_KEYS
    t.steps([CLEAN, OVERFLOW, CLEAN, OVERFLOW, OVERFLOW, CLEAN, CLEAN])
    state = t.runtime.state_dict()
    policy = state.pop("policy")
    assert state == {
        "scale": 128.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 2,
        "skipped_steps": 3,
        "steps_skipped_in_a_row": 0,
    }
    assert json.loads(json.dumps(t.runtime.state_dict())) == {**state, "policy": policy}


def test_the_state_of_skipped_steps_in_a_row_is_saved_and_loaded() -> None:
    first, second = (Runtime(DynamicLossScale(), "policy") for _ in range(2))
    for _ in range(3):
        judged(first, True)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.state_dict()["steps_skipped_in_a_row"] == 3


GROWING = {"loss_scale": {"init_scale": 1024.0, "growth_interval": 3}}
FACTORS = [CLEAN, CLEAN, OVERFLOW, CLEAN, CLEAN, CLEAN, CLEAN, OVERFLOW, CLEAN, CLEAN, CLEAN, CLEAN]
SCALES = [1024.0] * 2 + [512.0] * 3 + [1024.0] * 2 + [512.0] * 3 + [1024.0] * 2


def test_a_run_resumed_before_compilation_has_the_scales_of_one_that_was_not_interrupted() -> None:
    whole = Training(**GROWING)
    assert whole.steps(FACTORS) == SCALES
    for k in range(len(FACTORS)):
        first = Training(**GROWING)
        first.steps(FACTORS[:k])
        second = Training(**GROWING)
        second.runtime.load_state_dict(first.runtime.state_dict())
        assert second.runtime.scale == first.runtime.scale
        assert second.steps(FACTORS[k:]) == SCALES[k:], k
        assert second.runtime.state_dict() == whole.runtime.state_dict()


def test_a_run_resumed_after_compilation_has_them_too() -> None:
    for k in range(len(FACTORS)):
        first, second = Training(**GROWING), Training(**GROWING)
        first.steps(FACTORS[:k])
        second.steps([OVERFLOW, CLEAN])  # compiles, and moves the scale that is about to be loaded over
        second.runtime.load_state_dict(first.runtime.state_dict())
        assert second.steps(FACTORS[k:]) == SCALES[k:], k
        assert second.runtime.skipped_steps == 2


def test_a_checkpoint_of_model_optimizer_and_runtime_continues_bit_by_bit(tmp_path: Any) -> None:
    first = Training(**GROWING)
    first.optimizer = torch.optim.Adam(first.model.parameters(), 0.1)
    first.steps(FACTORS[:5])
    parts = (first.model, first.optimizer, first.runtime)
    torch.save([part.state_dict() for part in parts], tmp_path / "checkpoint")
    second = Training(**GROWING)
    second.optimizer = torch.optim.Adam(second.model.parameters(), 0.1)
    saved = torch.load(tmp_path / "checkpoint", weights_only=True)
    for part, state in zip((second.model, second.optimizer, second.runtime), saved, strict=True):
        part.load_state_dict(state)
    assert first.steps(FACTORS[5:]) == second.steps(FACTORS[5:])
    assert all(map(torch.equal, first.model.parameters(), second.model.parameters()))


def test_a_loaded_scale_is_the_one_that_gradients_are_scaled_by() -> None:
    # With the scale of the option this gradient is far beyond fp16, with the loaded one it is not.
    t = Training(loss_scale={"init_scale": 2.0**24})
    t.step()
    assert t.runtime.last_step_skipped
    t.runtime.load_state_dict({**t.runtime.state_dict(), "scale": 1.0})
    t.step()
    assert not t.runtime.last_step_skipped


def test_the_state_of_a_grad_scaler_is_continued() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=2)
    t = Training()
    t.runtime.load_state_dict(scaler.state_dict())
    assert t.steps([CLEAN, CLEAN, OVERFLOW]) == [128.0, 256.0, 128.0]


def test_the_empty_state_of_a_disabled_grad_scaler_changes_nothing() -> None:
    t = Training()
    t.step(OVERFLOW)
    before = t.runtime.state_dict()
    t.runtime.load_state_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())
    assert t.runtime.state_dict() == before


def test_a_grad_scaler_loads_the_state() -> None:
    t = Training()
    t.steps([CLEAN, OVERFLOW, CLEAN])
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(t.runtime.state_dict())
    assert scaler.state_dict() == {key: t.runtime.state_dict()[key] for key in GRAD_SCALER_KEYS}


def test_a_static_scale_loads_the_counters_and_keeps_its_scale() -> None:
    t = Training(loss_scale=256)
    t.step(OVERFLOW)
    resumed = Training(loss_scale=512)
    resumed.runtime.load_state_dict(t.runtime.state_dict())
    assert (resumed.runtime.scale, resumed.runtime.skipped_steps) == (512.0, 1)


@pytest.mark.parametrize("changed", [{"fp32": ["layer"]}, {"low": ["op:tanh"]}])
def test_the_state_of_another_policy_is_loaded_with_a_warning(changed: dict[str, Any]) -> None:
    state = {**Training().runtime.state_dict(), "scale": 32.0}
    runtime = Training(**changed).runtime
    with pytest.warns(MixprecWarning, match="another precision policy"):
        runtime.load_state_dict(state)
    assert runtime.scale == 32.0


def test_the_state_of_another_policy_is_refused_under_strict_and_not_loaded() -> None:
    state = {**Training().runtime.state_dict(), "scale": 32.0}
    runtime = Training(fp32=["layer"], strict=True).runtime
    with pytest.raises(MixprecError, match="another precision policy"):
        runtime.load_state_dict(state)
    assert runtime.scale == 1024.0


@pytest.mark.parametrize(
    "changed", [{"loss_scale": 8}, {"numerics": "strict"}, {"compiler": "reference"}, {"strict": True}]
)
def test_options_that_are_no_part_of_the_policy_may_differ(changed: dict[str, Any]) -> None:
    state = Training().runtime.state_dict()
    runtime = Training(**changed).runtime
    runtime.load_state_dict(state)  # a warning would be an error here
    assert runtime.state_dict()["policy"] == state["policy"]


def test_a_state_that_is_none_is_refused_and_changes_nothing() -> None:
    t = Training()
    t.step(OVERFLOW)
    before = t.runtime.state_dict()
    for broken, error in (
        ({"scale": 4.0}, KeyError),
        ({**before, "scale": 0.0}, ValueError),
        ({**before, "scale": 4.0, "skipped_steps": "many"}, ValueError),
        ({**before, "scale": 4.0, "growth_factor": 3.0}, ValueError),
    ):
        with pytest.raises(error):
            t.runtime.load_state_dict(broken)
        assert t.runtime.state_dict() == before


# Warnings.


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


# The scale as an input of graphs.


def test_the_scale_given_to_a_graph_is_replaced_and_not_written_to() -> None:
    # A backward that has not run yet unscales by the tensor its forward was given.
    runtime, cpu = Runtime(DynamicLossScale(init_scale=64.0), "policy"), torch.device("cpu")
    given = runtime.scale_on(cpu)
    assert runtime.scale_on(cpu) is given
    judged(runtime, True)
    assert (float(given), float(runtime.scale_on(cpu))) == (64.0, 32.0)
    runtime.load_state_dict({**runtime.state_dict(), "scale": 8.0})
    assert (float(given), float(runtime.scale_on(cpu))) == (64.0, 8.0)


def test_a_step_skipped_for_another_model_is_counted_as_skipped_and_moves_nothing() -> None:
    runtime = Runtime(DynamicLossScale(init_scale=64.0, growth_interval=2), "policy")
    judged(runtime, False)
    runtime.judged(("p0",), torch.tensor([False]), torch.tensor(False), torch.tensor(True))
    assert (runtime.scale, runtime.skipped_steps, runtime.last_step_skipped, runtime.overflowed) == (64.0, 1, True, ())
    judged(runtime, False)
    assert runtime.scale == 128.0
