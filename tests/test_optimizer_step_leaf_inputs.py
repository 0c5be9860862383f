"""A trained tensor that is an input of the model is judged and stepped like a parameter."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpcompile.execution.watch import watched_among
from tests.optimizer_step_tools import HUGE, SCALE, Training, everything, training


class Prompted(nn.Module):
    """Reads a trained tensor that is an input and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(3, 2)

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        return self.down(torch.sin(x + prompt))


def prompted() -> tuple[Training, Tensor]:
    prompt = torch.zeros(3, requires_grad=True)
    return training(lambda p: torch.optim.SGD([*p, prompt], 0.1, momentum=0.9), Prompted()), prompt


def test_a_leaf_input_is_stepped_with_the_parameters() -> None:
    t, prompt = prompted()
    t.compiled(torch.ones(1, 3), prompt).sum().backward()
    assert prompt.grad is not None
    expected = -0.1 * prompt.grad
    t.optimizer.step()
    assert torch.equal(prompt.detach(), expected)
    assert t.runtime.skipped_steps == 0


def test_a_leaf_input_that_overflows_skips_the_parameters() -> None:
    t, prompt = prompted()
    t.compiled(torch.ones(1, 3), prompt).sum().backward()
    before = everything(t.optimizer)
    assert prompt.grad is not None
    prompt.grad[0] = float("inf")
    t.optimizer.step()
    assert everything(t.optimizer) == before
    assert t.runtime.overflowed == ("l_prompt_",)


def test_a_leaf_input_is_skipped_with_the_parameters() -> None:
    t, prompt = prompted()
    (t.compiled(torch.ones(1, 3), prompt).sum() * HUGE).backward()
    for parameter in (*t.model.parameters(), prompt):
        assert parameter.grad is not None
        parameter.grad.nan_to_num_(0, 0, 0)
    before = everything(t.optimizer)
    t.optimizer.step()
    assert everything(t.optimizer) == before


def test_an_optimizer_of_a_leaf_input_alone_is_judged() -> None:
    t, prompt = prompted()
    optimizer = torch.optim.SGD([prompt], 0.1)
    (t.compiled(torch.ones(1, 3), prompt).sum() * HUGE).backward()
    optimizer.step()
    assert prompt.tolist() == [0.0] * 3
    assert (t.runtime.scale, t.runtime.skipped_steps) == (SCALE / 2, 1)


def test_a_hidden_overflow_of_a_leaf_input_is_judged() -> None:
    t, prompt = prompted()
    optimizer = torch.optim.SGD([prompt], 0.1)
    (t.compiled(torch.ones(1, 3), prompt).sum() * HUGE).backward()
    assert prompt.grad is not None
    prompt.grad.nan_to_num_(1, 1, 1)
    optimizer.step()
    assert prompt.tolist() == [0.0] * 3


def two_prompts() -> tuple[Training, list[Tensor], list[Optimizer]]:
    t, _ = prompted()
    prompts = [torch.zeros(3, requires_grad=True) for _ in range(2)]
    for prompt, factor in zip(prompts, (HUGE, 1.0), strict=True):
        (t.compiled(torch.ones(1, 3), prompt).sum() * factor).backward()
        assert prompt.grad is not None
        prompt.grad.nan_to_num_(1, 1, 1)
    return t, prompts, [torch.optim.SGD([prompt], 1.0) for prompt in prompts]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_leaf_inputs_of_one_model_the_one_that_overflowed_is_skipped(order: tuple[int, int]) -> None:
    _, prompts, optimizers = two_prompts()
    for index in order:
        optimizers[index].step()
    assert [bool(prompt.any()) for prompt in prompts] == [False, True]


def test_leaf_inputs_that_take_turns_do_not_let_anything_pile_up() -> None:
    t, prompts, optimizers = two_prompts()
    sizes = []
    for _ in range(10):
        for prompt, optimizer in zip(prompts, optimizers, strict=True):
            optimizer.zero_grad()
            t.compiled(torch.ones(1, 3), prompt).sum().backward()
            optimizer.step()
        sizes.append([len(list(watched.flags())) for _, watched in watched_among(prompts)])
    assert sizes[-1] == sizes[0]
