"""The loss scale moves once for an optimizer step, and that of the model that overflowed."""

import torch

import mpcompile
from tests.optimizer_step_tools import HUGE, SCALE, Net, everything, training
from tests.test_programs import mixprec


def test_the_scale_moves_once_for_a_step_of_several_backwards() -> None:
    t = training()
    for seed in range(3):
        t.backward(HUGE, seed)
    t.optimizer.step()
    assert (t.runtime.scale, t.runtime.skipped_steps) == (SCALE / 2, 1)


def test_backwards_without_a_step_move_nothing() -> None:
    t = training(loss_scale={"init_scale": SCALE, "growth_interval": 1})
    for factor in (1.0, HUGE, 1.0):
        t.backward(factor)
        assert (t.runtime.scale, t.runtime.skipped_steps) == (SCALE, 0)


def test_growth_counts_optimizer_steps_not_backwards() -> None:
    t = training(loss_scale={"init_scale": SCALE, "growth_interval": 3})
    seen = []
    for _ in range(4):
        t.optimizer.zero_grad()
        t.backward(seed=0)
        t.backward(seed=1)
        t.optimizer.step()
        seen.append(t.runtime.scale)
    assert seen == [SCALE, SCALE, 2 * SCALE, 2 * SCALE]


def test_one_optimizer_of_two_models_skips_both_and_lowers_the_scale_of_one() -> None:
    first, second = training(), training(model=Net(width=5), loss_scale={"init_scale": SCALE, "growth_interval": 2})
    optimizer = torch.optim.SGD([*first.model.parameters(), *second.model.parameters()], 0.1, momentum=0.9)
    first.backward()
    second.backward()
    optimizer.step()
    before = everything(optimizer)
    optimizer.zero_grad()
    first.backward(HUGE)
    second.backward()
    optimizer.step()
    assert everything(optimizer) == before
    assert [(t.runtime.scale, t.runtime.last_step_skipped) for t in (first, second)] == [(512.0, True), (1024.0, True)]
    assert (first.runtime.overflowed != (), second.runtime.overflowed) == (True, ())
    # The step skipped for the first is no clean step of the second, whose next one is its second.
    optimizer.zero_grad()
    first.backward()
    second.backward()
    optimizer.step()
    assert [t.runtime.scale for t in (first, second)] == [512.0, 2048.0]
    assert everything(optimizer) != before


def test_an_infinity_put_into_a_gradient_lowers_the_scale_of_its_own_model() -> None:
    first, second = training(), training(model=Net(width=5))
    optimizer = torch.optim.SGD([*first.model.parameters(), *second.model.parameters()], 0.1)
    first.backward()
    second.backward()
    second.gradients[0].fill_(float("inf"))
    optimizer.step()
    assert [t.runtime.scale for t in (first, second)] == [SCALE, SCALE / 2]
    assert [t.runtime.overflowed for t in (first, second)] == [(), ("up.weight",)]


def test_a_model_compiled_twice_blames_the_graph_that_overflowed() -> None:
    t = training()
    other = mixprec(t.model, dtype="fp16", loss_scale={"init_scale": 64.0})
    t.step()
    t.optimizer.zero_grad()
    (other(torch.ones(1, 3)).sum() * HUGE).backward()
    t.optimizer.step()
    assert (t.runtime.scale, mpcompile.runtime(other).scale) == (SCALE, 32.0)
