"""An optimizer's step runs on a stand-in: it works on what the stand-in has, and the optimizer stays as it was."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from mpcompile.execution.stand_in import (
    is_stand_in,
    parameters_of,
    set_substitute,
    stand_in,
    substitute_of,
    without_parameters,
)


class Counting(SGD):
    """Counts its steps in an attribute and in its groups."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["steps"] = self.steps
        return super().step(closure)


class Substitution:
    """A substitute that does nothing."""

    def prepare(self) -> dict[str, Any]:
        return {}

    def commit(self, stepped: Optimizer) -> None: ...


def with_gradient(*values: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.tensor(values))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def contents(optimizer: Optimizer) -> dict[str, Any]:
    """A copy of everything a step could change: the state by parameter, settings, values, gradients."""
    parameters = parameters_of(optimizer)
    return {
        "values": [parameter.detach().clone() for parameter in parameters],
        "gradients": [parameter.grad.clone() for parameter in parameters],
        "saved": copy.deepcopy(optimizer.state_dict()),
        "attributes": dict(optimizer.__dict__),
    }


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_parameters_come_in_the_order_of_the_groups() -> None:
    a, b, c = (with_gradient(float(i)) for i in range(3))
    optimizer = SGD([{"params": [c]}, {"params": [a, b], "lr": 0.5}], lr=0.1)
    assert [id(parameter) for parameter in parameters_of(optimizer)] == [id(c), id(a), id(b)]
    optimizer.add_param_group({"params": [d := with_gradient(4.0)]})
    assert parameters_of(optimizer)[-1] is d


def test_parameters_are_those_the_optimizer_has_now() -> None:
    optimizer = SGD([with_gradient(1.0)], lr=0.1)
    optimizer.param_groups[0]["params"] = []
    assert parameters_of(optimizer) == []


def test_it_is_an_optimizer_of_the_same_class_and_not_the_same_one() -> None:
    optimizer = Counting([with_gradient(1.0)], lr=0.1)
    twin = stand_in(optimizer)
    assert type(twin) is Counting
    assert twin is not optimizer
    assert (is_stand_in(twin), is_stand_in(optimizer)) == (True, False)


def test_it_is_made_without_the_class_s_own_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SGD([with_gradient(1.0)], lr=0.1)
    monkeypatch.setattr(SGD, "__init__", None)
    assert stand_in(optimizer).defaults is optimizer.defaults


def test_state_and_groups_are_shared_so_that_its_step_is_the_optimizer_s() -> None:
    parameter, alone = with_gradient(1.0, -2.0), with_gradient(1.0, -2.0)
    optimizer, reference = Adam([parameter], lr=0.1), Adam([alone], lr=0.1)
    for _ in range(3):
        stand_in(optimizer).step()
        reference.step()
    assert_same(parameter.detach(), alone.detach())
    assert_same(optimizer.state_dict(), reference.state_dict())


def test_given_attributes_take_the_place_of_the_optimizer_s() -> None:
    parameter, other = with_gradient(1.0), with_gradient(5.0)
    optimizer = Adam([parameter], lr=0.25)
    state: dict[Tensor, Any] = {other: {}}
    twin = stand_in(optimizer, param_groups=[{**optimizer.param_groups[0], "params": [other]}], state=state)
    twin.step()
    # A first step of Adam is lr long, but for eps = 1e-8.
    assert_same(parameter.detach(), torch.tensor([1.0]))
    torch.testing.assert_close(other.detach(), torch.tensor([4.75]), rtol=0, atol=1e-6)
    assert list(optimizer.state) == []
    assert_same(state[other]["exp_avg"], torch.tensor([0.1]))


def test_attributes_may_be_new_ones() -> None:
    optimizer = SGD([with_gradient(1.0)], lr=0.1)
    assert stand_in(optimizer, found_inf=3).found_inf == 3
    assert not hasattr(optimizer, "found_inf")


def test_what_a_step_assigns_stays_in_the_stand_in() -> None:
    optimizer = Counting([with_gradient(1.0)], lr=0.1)
    twin = stand_in(optimizer)
    twin.step()
    assert (twin.steps, optimizer.steps) == (1, 0)
    # Groups are not attributes: they are shared.
    assert optimizer.param_groups[0]["steps"] == 1


def test_a_stand_in_of_a_stand_in_is_one() -> None:
    optimizer = Counting([with_gradient(1.0)], lr=0.1)
    twin = stand_in(stand_in(optimizer, steps=5), kept=True)
    assert is_stand_in(twin)
    assert (twin.steps, twin.kept) == (5, True)


@pytest.mark.parametrize("make", [SGD, Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, Counting])
def test_a_step_without_parameters_changes_nothing(make: Any) -> None:
    first, second = with_gradient(1.0, 2.0), with_gradient(3.0)
    optimizer = make([{"params": [first]}, {"params": [second], "lr": 0.01}], lr=0.1)
    optimizer.step()
    before = contents(optimizer)
    without_parameters(optimizer).step()
    after = contents(optimizer)
    for part in ("values", "gradients", "saved"):
        assert_same(after[part], before[part])
    assert after["attributes"].keys() == before["attributes"].keys()
    assert all(after["attributes"][name] is value for name, value in before["attributes"].items())


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, SGD])
def test_a_fused_step_without_parameters_changes_nothing(optimizer: Any) -> None:
    parameter = with_gradient(1.0, 2.0)
    fused = optimizer([parameter], lr=0.1, fused=True)
    fused.step()
    before = contents(fused)
    without_parameters(fused).step()
    assert_same(contents(fused)["saved"], before["saved"])
    assert_same([parameter.detach()], before["values"])


def test_without_parameters_every_group_is_there_with_its_settings() -> None:
    optimizer = SGD([{"params": [with_gradient(1.0)]}, {"params": [with_gradient(2.0)], "lr": 0.5}], lr=0.1)
    groups = without_parameters(optimizer).param_groups
    assert [(group["params"], group["lr"]) for group in groups] == [([], 0.1), ([], 0.5)]
    groups[0]["lr"] = 9.0
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_an_optimizer_has_the_substitute_it_was_given() -> None:
    optimizer, other = (SGD([with_gradient(1.0)], lr=0.1) for _ in range(2))
    assert substitute_of(optimizer) is None
    set_substitute(optimizer, first := Substitution())
    assert substitute_of(optimizer) is first
    assert substitute_of(other) is None
    # The step of a stand-in is one of the optimizer's own: it has the same substitute.
    assert substitute_of(stand_in(optimizer)) is first


def test_a_second_substitute_is_refused_and_the_first_stays() -> None:
    optimizer = SGD([with_gradient(1.0)], lr=0.1)
    set_substitute(optimizer, first := Substitution())
    for again in (Substitution(), first):
        with pytest.raises(ValueError, match="has master weights already"):
            set_substitute(optimizer, again)
    assert substitute_of(optimizer) is first


def test_a_substitute_is_not_part_of_what_is_saved() -> None:
    optimizer = SGD([with_gradient(1.0)], lr=0.1, momentum=0.9)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    set_substitute(optimizer, Substitution())
    assert_same(optimizer.state_dict(), before)
