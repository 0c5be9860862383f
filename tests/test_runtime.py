"""``mpcompile.runtime``: the loss scale of a compiled model and the account of its steps."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcompile
from mpcompile import Runtime
from mpcompile.backend import mixprec as backend
from mpcompile.execution.loss_scale import (
    DynamicLossScale,
)
from tests.runtime_tools import CLEAN, OVERFLOW, Net, Training, judged
from tests.test_programs import mixprec


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
