"""The state of a runtime is saved and loaded, and that of a GradScaler is continued."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mpcompile import MixprecError, MixprecWarning, Runtime
from mpcompile.execution.loss_scale import DynamicLossScale
from mpcompile.passes import Policy
from tests.runtime_tools import CLEAN, OVERFLOW, Training, judged

GRAD_SCALER_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
OWN_KEYS = {"skipped_steps", "steps_skipped_in_a_row", "policy"}


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


@pytest.mark.parametrize("changed", [{"fp32": ["layer"]}, {"low": ["op:tanh"]}, {"policy": "accurate"}])
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


def test_the_same_policy_said_in_another_way_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('dtype = "fp16"\nfp32 = ["layer"]\n')
    state = Training(fp32=["layer"]).runtime.state_dict()
    assert state["policy"] == Policy(dtype=torch.float16, fp32=("layer",)).digest
    for policy in (str(path), Policy.from_toml(path)):
        Training(policy=policy, dtype="auto").runtime.load_state_dict(state)  # a warning would be an error here


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
