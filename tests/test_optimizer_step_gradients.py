"""Gradients that are missing, empty or sparse are judged by the values they have."""

import torch
from torch import Tensor, nn

from tests.optimizer_step_tools import HUGE, SCALE, Net, bits, everything, training


def test_without_any_gradient_nothing_moves() -> None:
    t = training(loss_scale={"init_scale": SCALE, "growth_interval": 2})
    t.step()
    before = everything(t.optimizer)
    t.optimizer.zero_grad()
    t.optimizer.step()
    assert everything(t.optimizer) == before
    assert t.runtime.scale == SCALE  # growing now would mean that the empty step was counted
    t.step()
    assert t.runtime.scale == 2 * SCALE


def test_parameters_without_a_gradient_are_not_judged() -> None:
    t = training()
    t.backward()
    t.model.up.weight.grad = None
    before = bits(t.model.up.weight)
    t.optimizer.step()
    assert (bits(t.model.up.weight), t.runtime.skipped_steps) == (before, 0)


class WithEmpty(Net):
    """A parameter without elements, as the rest of a split may be."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.empty.sum(0)


def test_an_empty_parameter_is_finite() -> None:
    t = training(model=WithEmpty())
    t.step()
    assert t.model.empty.grad is not None
    assert t.runtime.skipped_steps == 0
    t.step(HUGE)
    assert t.runtime.skipped_steps == 1
    assert "empty" not in t.runtime.overflowed


def test_a_sparse_gradient_in_the_same_optimizer_is_skipped_and_stepped_with_the_others() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    model = Net()
    t = training(lambda p: torch.optim.SGD([*p, *embedding.parameters()], 0.1), model)

    def step(factor: float) -> None:
        t.optimizer.zero_grad()
        (t.compiled(embedding(torch.tensor([0, 2, 2]))).square().mean() * factor).backward()
        assert embedding.weight.grad is not None
        assert embedding.weight.grad.is_sparse
        t.optimizer.step()

    before = everything(t.optimizer)
    step(HUGE)
    assert everything(t.optimizer) == before
    step(1.0)
    changed = embedding.weight.detach() != torch.frombuffer(bytearray(before[0][-1][2]), dtype=torch.float32).view(5, 3)
    assert changed.any(1).tolist() == [True, False, True, False, False]


def test_a_sparse_gradient_is_judged_by_its_values() -> None:
    t = training(lambda p: torch.optim.SGD(p, 0.1))
    places = torch.tensor([[0, 1], [0, 2]])
    for value, skipped in ((1.0, False), (float("nan"), True), (float("inf"), True)):
        gradient = torch.sparse_coo_tensor(places, [value, 1.0], (4, 3), check_invariants=True)
        for sparse in (gradient, gradient.coalesce()):
            t.optimizer.zero_grad()
            t.backward()
            t.model.up.weight.grad = sparse
            t.optimizer.step()
            assert t.runtime.last_step_skipped == skipped


def test_a_sparse_gradient_without_values_is_finite() -> None:
    t = training(lambda p: torch.optim.SGD(p, 0.1))
    t.backward()
    t.model.up.weight.grad = torch.sparse_coo_tensor(size=(4, 3), check_invariants=True)
    t.optimizer.step()
    assert t.runtime.skipped_steps == 0
