"""Parameters written, replaced or copied outside the optimizer's step take their masters along."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from mpcompile import MixprecError
from tests.master_weights_tools import (
    BF16,
    Net,
    assert_same,
    backward,
    both_dtypes,
    everything,
    masters_of,
    train,
    values,
)


def write_in_place(parameter: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def write_element(parameter: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        for i, element in enumerate(value.flatten()):
            parameter.view(-1)[i] = element


def write_data(parameter: nn.Parameter, value: Tensor) -> None:
    parameter.data.copy_(value)


def replace_data(parameter: nn.Parameter, value: Tensor) -> None:
    parameter.data = value.clone()


@pytest.mark.parametrize("write", [write_in_place, write_element, write_data, replace_data])
@both_dtypes
def test_a_write_from_outside_becomes_the_master(write: Callable[..., None], dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    optimizer, masters = masters_of(model, functools.partial(SGD, lr=0.5))
    train(model, optimizer, range(2), dtype)
    weight, others = model.body[2].weight, copy.deepcopy(dict(masters))
    # Far from what is there: an element that is written as it was keeps its master.
    new = torch.rand(4, 16).add(4).to(dtype)
    write(weight, new)
    assert_same(model.state_dict()["body.2.weight"], new.float())
    assert_same(dict(masters), {**others, "body.2.weight": new.float()})
    optimizer.zero_grad()
    backward(model, dtype)
    optimizer.step()
    assert_same(masters["body.2.weight"], new.float() - 0.5 * weight.grad)


def test_a_write_straight_before_a_step_is_stepped_from() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model, functools.partial(SGD, lr=0.5))
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    backward(model, BF16)
    new = torch.rand(4).add(4).bfloat16()
    write_in_place(model.body[2].bias, new)
    optimizer.step()
    assert_same(masters["body.2.bias"], new.float() - 0.5 * model.body[2].bias.grad)


def test_a_write_into_some_elements_leaves_the_others_exact() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model)
    train(model, optimizer, range(2))
    expected = masters["body.0.weight"].clone()
    with torch.no_grad():
        model.body[0].weight[3].fill_(0.125)
    expected[3] = 0.125
    assert_same(model.state_dict()["body.0.weight"], expected)


def test_a_mapping_read_after_a_write_sees_it() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model)
    train(model, optimizer, range(2))
    new = torch.rand(4).add(4).bfloat16()
    write_in_place(model.body[2].bias, new)
    assert_same(masters["body.2.bias"], new.float())


def test_a_write_of_what_is_there_already_keeps_the_master() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model)
    train(model, optimizer, range(2))
    before = copy.deepcopy(dict(masters))
    for parameter in model.parameters():
        write_in_place(parameter, parameter.clone())
    assert_same(dict(model.state_dict()), before)


def test_values_beyond_fp16_keep_their_master() -> None:
    # The parameter rounds to infinity, which must not be taken for a write.
    model = nn.Linear(8, 4).half()
    optimizer, masters = masters_of(model, functools.partial(SGD, lr=1.0))
    model.bias.grad = torch.full((4,), -1e6)
    optimizer.step()
    assert bool(torch.isinf(model.bias).all())
    assert_same(model.state_dict()["bias"], masters["bias"])
    model.bias.grad = torch.full((4,), 1e6)
    optimizer.step()
    # 1e6 - 1e6: what is left is the bias of the beginning, to fp32's 2^-5 at 1e6, and no infinity.
    assert float(masters["bias"].abs().amax()) < 1.0
    assert_same(model.bias.detach(), masters["bias"].half())


def test_a_nan_written_from_outside_is_not_hidden() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model)
    with torch.no_grad():
        model.body[2].bias[1] = torch.nan
    backward(model, BF16)
    optimizer.step()
    assert masters["body.2.bias"].isnan().tolist()[1]


def test_weights_clipped_by_a_step_hook_stay_clipped() -> None:
    model = Net().bfloat16()
    optimizer, _ = masters_of(model, functools.partial(SGD, lr=0.5))

    @torch.no_grad()
    def clip(*_: Any) -> None:
        for parameter in model.parameters():
            parameter.clamp_(-0.25, 0.25)

    optimizer.register_step_post_hook(clip)
    train(model, optimizer, range(2))
    for value in (*values(model.parameters()), *model.state_dict().values()):
        assert float(value.abs().amax()) <= 0.25  # nearly all of them were beyond


def test_a_step_hook_sees_the_parameters_as_stepped() -> None:
    model = Net().bfloat16()
    optimizer, _ = masters_of(model, functools.partial(SGD, lr=0.5))
    seen: list[list[Tensor]] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(values(model.parameters())))
    train(model, optimizer, (0,))
    assert_same(seen, [values(model.parameters())])


def test_a_replaced_parameter_is_an_error_at_the_next_step() -> None:
    model = Net().bfloat16()
    optimizer, _ = masters_of(model)
    train(model, optimizer, (0,))
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(MixprecError, match=r"Parameter 'body.0.weight' of the model was replaced.*assign=False"):
        optimizer.step()


def test_what_was_loaded_with_assign_is_what_is_saved_next() -> None:
    model, other = Net().bfloat16(), Net().bfloat16()
    masters_of(model)
    loaded = {name: parameter.detach().float() for name, parameter in other.named_parameters()}
    model.load_state_dict(loaded, assign=True)
    assert_same(dict(model.state_dict()), loaded)


def test_a_copy_of_the_model_is_a_model_of_its_own() -> None:
    model = Net().bfloat16()
    optimizer, _ = masters_of(model)
    train(model, optimizer, range(2))
    twin = copy.deepcopy(model)
    before = everything(model, optimizer)
    # As for an average of the weights: written by copying, and by loading.
    for parameter in twin.parameters():
        write_in_place(parameter, parameter / 2)
    saved = values(value.float() for value in twin.state_dict().values())
    assert_same(saved, [parameter.float() for parameter in values(twin.parameters())])
    twin.load_state_dict({name: value * 0 for name, value in twin.state_dict().items()})
    assert not any(bool(value.any()) for value in (*values(twin.parameters()), *twin.state_dict().values()))
    assert_same(everything(model, optimizer), before)
