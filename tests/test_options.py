"""The options a user gives: what is accepted, what is refused and in which words, what they decide."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpcompile.execution.loss_scale import DynamicLossScale, LossScale, StaticLossScale
from mpcompile.notices import MixprecWarning
from mpcompile.options import Options
from mpcompile.passes import Policy
from tests.test_programs import mixprec

POLICIES = "'default', 'accurate', 'fast', 'torch', 'fp32', a mpcompile.Policy, a .toml file"
VALUES = [
    ("dtype", "float16", "'auto', 'bf16', 'fp16'"),
    ("dtype", torch.bfloat16, "'auto', 'bf16', 'fp16'"),
    ("policy", "fats", POLICIES),
    ("policy", "", POLICIES),
    ("policy", ["default"], POLICIES),
    ("policy", None, POLICIES),
    ("loss_scale", "sometimes", "'auto', 'dynamic', None, 'external'"),
    ("loss_scale", True, "'auto', 'dynamic', None, 'external', a power of two, or a dict of DynamicLossScale's fields"),
    (
        "loss_scale",
        [1024],
        "'auto', 'dynamic', None, 'external', a power of two, or a dict of DynamicLossScale's fields",
    ),
    ("fp32_matmul", "high", "'inherit', 'ieee', 'tf32'"),
    ("numerics", "exact", "'fast', 'strict'"),
    ("strict", 1, "False, True"),
    ("strict", "yes", "False, True"),
    ("compiler", "eager", "'inductor', 'aot_eager', 'reference'"),
]


@pytest.mark.parametrize(("name", "value", "accepted"), VALUES)
def test_a_value_that_is_not_accepted_raises_with_those_that_are(name: str, value: Any, accepted: str) -> None:
    with pytest.raises(ValueError, match="Option") as caught:
        Options.parse({name: value})
    assert f"`{name}` must be one of {accepted}" in str(caught.value)
    assert f"got {value!r}" in str(caught.value)


def test_an_unknown_option_raises_with_the_nearest_and_all_names() -> None:
    with pytest.raises(ValueError, match="Unknown option 'dtyp'") as caught:
        Options.parse({"dtyp": "bf16"})
    message = str(caught.value)
    assert "Did you mean 'dtype'?" in message
    for name in ("dtype", "policy", "fp32", "low", "loss_scale", "fp32_matmul", "numerics", "strict", "inductor"):
        assert name in message.partition("Accepted:")[2], name


def test_an_option_like_no_other_raises_without_a_guess() -> None:
    with pytest.raises(ValueError, match="Unknown option 'zzz'") as caught:
        Options.parse({"zzz": 1})
    assert "Did you mean" not in str(caught.value)


CONTRADICTIONS = [
    ({"policy": Policy(), "dtype": "bf16"}, "either options `dtype`, `fp32` and `low` or a Policy"),
    ({"policy": Policy(), "fp32": ["a"]}, "either options `dtype`, `fp32` and `low` or a Policy"),
    ({"policy": Policy(), "low": ["a"]}, "either options `dtype`, `fp32` and `low` or a Policy"),
    ({"policy": "fp32", "dtype": "bf16"}, "contradicts options `dtype` and `low`"),
    ({"policy": "fp32", "low": ["a"]}, "contradicts options `dtype` and `low`"),
    ({"inductor": {"max_autotune": True}, "compiler": "aot_eager"}, "needs compiler='inductor', got .*'aot_eager'"),
    ({"fp32": ["a"], "low": ["a"]}, "Rule 'a' is in both `fp32` and `low`"),
]


@pytest.mark.parametrize(("options", "message"), CONTRADICTIONS)
def test_contradictions_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options.parse(options)


LOSS_SCALES = ["dynamic", "external", 1024, 1.0, {"init_scale": 4.0}]
UNSCALED: list[dict[str, Any]] = [
    {"dtype": "bf16"},
    {"policy": "fp32"},
    {"policy": Policy(dtype=torch.bfloat16)},
    {"policy": Policy(dtype=torch.float32)},
]


@pytest.mark.parametrize("loss_scale", LOSS_SCALES)
@pytest.mark.parametrize("options", UNSCALED)
def test_a_loss_scale_contradicts_bf16_and_fp32(options: dict[str, Any], loss_scale: Any) -> None:
    with pytest.raises(ValueError, match="is for dtype='fp16'; bf16 and fp32 need no loss scale") as caught:
        Options.parse({**options, "loss_scale": loss_scale})
    assert f"loss_scale={loss_scale!r}" in str(caught.value)


@pytest.mark.parametrize("loss_scale", ["auto", None])
@pytest.mark.parametrize("options", UNSCALED)
def test_no_loss_scale_and_the_default_go_with_every_dtype(options: dict[str, Any], loss_scale: Any) -> None:
    assert Options.parse({**options, "loss_scale": loss_scale}).scaling(torch.bfloat16) is None


@pytest.mark.parametrize("loss_scale", LOSS_SCALES)
@pytest.mark.parametrize("options", [{}, {"dtype": "fp16"}, {"policy": Policy(dtype=torch.float16)}])
def test_a_loss_scale_goes_with_fp16_and_with_what_may_become_fp16(options: dict[str, Any], loss_scale: Any) -> None:
    assert Options.parse({**options, "loss_scale": loss_scale}).loss_scale == loss_scale


SCALES: list[tuple[Any, LossScale | None]] = [
    ("auto", DynamicLossScale()),
    ("dynamic", DynamicLossScale()),
    ({}, DynamicLossScale()),
    ({"init_scale": 8.0, "growth_interval": 3}, DynamicLossScale(init_scale=8.0, growth_interval=3)),
    (1024, StaticLossScale(1024.0)),
    (0.25, StaticLossScale(0.25)),
    (1, StaticLossScale(1.0)),
    ("external", None),
    (None, None),
]


@pytest.mark.parametrize(("given", "scale"), SCALES)
def test_the_loss_scale_that_is_put_into_fp16_graphs(given: Any, scale: LossScale | None) -> None:
    options = Options.parse({"loss_scale": given})
    assert options.scaling(torch.float16) == scale
    assert options.scaling(torch.bfloat16) is options.scaling(torch.float32) is None


def test_the_default_is_a_loss_scale_that_adapts() -> None:
    scale = Options().scaling(torch.float16)
    assert isinstance(scale, DynamicLossScale)
    assert (scale.init_scale, scale.growth_interval) == (2.0**16, 2000)


NO_SCALES = [
    (1000, "Option loss_scale must be a power of two, so that scaling rounds nothing; got 1000.*between 512 and 1024"),
    (0, "Option loss_scale must be a positive power of two, got 0"),
    (-2.0, "Option loss_scale must be a positive power of two, got -2"),
    (float("inf"), "Option loss_scale must be a positive power of two, got inf"),
    (float("nan"), "Option loss_scale must be a positive power of two, got nan"),
    ({"init": 4.0}, "Unknown key 'init' in option `loss_scale`. Accepted: init_scale, growth_factor, backoff_factor"),
    ({"init_scale": 3.0}, r"loss_scale\['init_scale'\] must be a power of two.*got 3.0, between 2 and 4"),
    ({"cap": "high"}, r"loss_scale\['cap'\] must be a positive power of two, got 'high'"),
    ({"growth_factor": 1.0}, "needs growth_factor > 1 > backoff_factor"),
    ({"backoff_factor": 2.0}, "needs growth_factor > 1 > backoff_factor"),
    ({"growth_interval": 0}, r"loss_scale\['growth_interval'\] must be a positive int, got 0"),
    ({"growth_interval": 2.5}, r"loss_scale\['growth_interval'\] must be a positive int, got 2.5"),
    ({"init_scale": 2.0, "floor": 4.0}, "needs floor <= init_scale <= cap"),
    ({"cap": 4.0}, "needs floor <= init_scale <= cap"),
]


@pytest.mark.parametrize(("given", "message"), NO_SCALES)
def test_a_loss_scale_that_is_none_raises_with_what_is_wrong(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options.parse({"loss_scale": given})


def test_policy_fp32_may_come_with_fp32_rules() -> None:
    assert Options.parse({"policy": "fp32", "fp32": ["a"]}).resolve_policy(torch.bfloat16).is_fp32


@pytest.mark.parametrize("key", ["fp32", "low"])
@pytest.mark.parametrize("value", ["op:softmax", [1], [["a"]]])
def test_rules_must_be_a_list_of_strings(key: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"Option `{key}` must be a list of strings"):
        Options.parse({key: value})


@pytest.mark.parametrize("rule", ["layer:a", "op:", "op:  ", ""])
def test_a_rule_that_is_no_rule_raises_with_the_forms_there_are(rule: str) -> None:
    with pytest.raises(ValueError, match="is not understood; write a module path such as 'layers"):
        Options.parse({"fp32": [rule]})


def test_inductor_settings_must_be_a_dict() -> None:
    with pytest.raises(TypeError, match="Option `inductor` must be a dict"):
        Options.parse({"inductor": ["max_autotune"]})


def test_lists_and_tuples_of_rules_are_the_same() -> None:
    as_list = Options.parse({"fp32": ["a", "op:softmax"], "low": ["b"]})
    assert as_list == Options.parse({"fp32": ("a", "op:softmax"), "low": ("b",)})
    assert as_list.fp32 == ("a", "op:softmax")


def test_no_options_are_the_defaults() -> None:
    assert Options.parse(None) == Options.parse({}) == Options()


def test_the_given_dict_is_not_kept() -> None:
    given = {"inductor": {"max_autotune": True}}
    options = Options.parse(given)
    given["inductor"]["max_autotune"] = False
    assert options.inductor["max_autotune"] is True
    with pytest.raises(TypeError, match="does not support item assignment"):
        options.inductor["max_autotune"] = False  # type: ignore[index]


@pytest.mark.parametrize("preset", ["default", "accurate", "fast"])
def test_rules_and_a_dtype_combine_with_a_preset(preset: str) -> None:
    options = Options.parse({"policy": preset, "dtype": "fp16", "fp32": ["a@wgrad"], "low": ["op:add"]})
    policy = Policy(dtype=torch.float16, preset=preset, fp32=("a@wgrad",), low=("op:add",))
    assert options.resolve_policy(torch.bfloat16) == policy


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_torch_preset_takes_a_dtype_and_no_rules(dtype: str) -> None:
    policy = Options.parse({"policy": "torch", "dtype": dtype}).resolve_policy(torch.float32)
    assert (policy.preset, str(policy.dtype)) == ("torch", {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[dtype])
    with pytest.raises(ValueError, match="Rule 'a' contradicts preset 'torch'"):
        Options.parse({"policy": "torch", "dtype": dtype, "low": ["a"]})


def test_a_policy_that_is_almost_a_name_raises_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"got 'acurate'\. Did you mean 'accurate'\?"):
        Options.parse({"policy": "acurate"})


@pytest.mark.parametrize("kind", [str, Path])
def test_a_policy_may_be_a_file(kind: Any, tmp_path: Path) -> None:
    policy = Policy(dtype=torch.float16, preset="fast", fp32=("a",))
    path = tmp_path / "policy.toml"
    path.write_text(policy.to_toml())
    assert Options.parse({"policy": kind(path)}).resolve_policy(torch.float32) == policy
    with pytest.raises(ValueError, match="either options `dtype`, `fp32` and `low` or a Policy"):
        Options.parse({"policy": kind(path), "dtype": "fp16"})
    with pytest.raises(FileNotFoundError, match=r"missing\.toml"):
        Options.parse({"policy": kind(tmp_path / "missing.toml")})


def test_a_preset_on_a_device_without_a_low_type_stays_in_fp32_and_says_so() -> None:
    resolved = Options.parse({"policy": "accurate"}).resolve_policy(torch.float32)
    assert resolved == Policy(dtype=torch.float32, preset="accurate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpcompile.backend.automatic_dtype", lambda _: torch.float32)
        with pytest.warns(MixprecWarning, match="leaves this model in float32"):
            mixprec(nn.Linear(8, 4), dtype="auto", policy="accurate")(torch.randn(3, 8))


RESOLVED = [
    ({}, torch.float16),
    ({"dtype": "bf16"}, torch.bfloat16),
    ({"dtype": "fp16"}, torch.float16),
    ({"policy": "fp32"}, torch.float32),
    ({"policy": Policy(dtype=torch.bfloat16, fp32=("op:mm",))}, torch.bfloat16),
]


@pytest.mark.parametrize(("options", "dtype"), RESOLVED)
def test_the_policy_has_the_chosen_dtype(options: dict[str, Any], dtype: torch.dtype) -> None:
    assert Options.parse(options).resolve_policy(automatic=torch.float16).dtype is dtype


def test_rules_reach_the_policy() -> None:
    options = Options.parse({"dtype": "bf16", "fp32": ["a"], "low": ["op:add"]})
    assert options.resolve_policy(torch.float32) == Policy(dtype=torch.bfloat16, fp32=("a",), low=("op:add",))


def test_a_policy_is_taken_as_it_is() -> None:
    policy = Policy(dtype=torch.float16, fp32=("op:mm",))
    assert Options.parse({"policy": policy}).resolve_policy(torch.float32) is policy


def test_the_key_is_strings_that_pickle() -> None:
    key = Options.parse({"loss_scale": None}).key()
    assert all(isinstance(part, str) for part in key)
    assert pickle.loads(pickle.dumps(key)) == key


def _train(**options: Any) -> nn.Module:
    model = nn.Linear(8, 4)
    mixprec(model, dtype="fp16", **options)(torch.randn(3, 8)).mean().backward()
    return model


@pytest.mark.parametrize("loss_scale", ["external", "auto", "dynamic", 1024, {"init_scale": 8.0}])
def test_gradients_are_the_same_whatever_the_loss_scale(loss_scale: Any) -> None:
    # Powers of two, far from both ends of fp16's range: not a bit differs from a model that scales nothing.
    torch.manual_seed(0)
    gradient = _train(loss_scale=loss_scale).weight.grad
    torch.manual_seed(0)
    assert torch.equal(gradient, _train(loss_scale=None).weight.grad)
    assert bool(gradient.any())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_in_fp16_needs_no_loss_scale(context: Any) -> None:
    with context():
        output = mixprec(nn.Linear(8, 4), dtype="fp16")(torch.randn(3, 8))
    assert output.dtype is torch.float32


def test_a_frozen_model_needs_no_loss_scale_in_fp16() -> None:
    output = mixprec(nn.Linear(8, 4).requires_grad_(False), dtype="fp16")(torch.randn(3, 8))
    assert output.dtype is torch.float32
