"""A weight that changes between forward and backward: torch's error or the old weights, never silently the new."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import Net
from tests.weight_cache_tools import cached

X = torch.linspace(-1, 1, 40).view(5, 8)


class Views(nn.Module):
    """Weights read through views of several kinds, two layers deep, so that backward reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.packed = nn.Parameter(torch.randn(8, 4))
        self.conv = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.first(x).relu()).tanh()
        one, two = self.packed.chunk(2)
        x = (x @ one).tanh() @ two.mT + (x @ self.packed[2:6].t()).tanh() @ self.packed[4:]
        return self.conv(x.t()[None]).tanh().sum(1)


def change(model: nn.Module, how: str) -> None:
    if how == "hidden":
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD(model.parameters(), 0.1, fused=True).step()
        model.zero_grad()
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)


CASES: list[Any] = [
    (Views, "hidden", {}),
    (Views, "in place", {}),
    (Net, "hidden", {"compiler": "reference"}),
    (Views, "hidden", {"dtype": "fp16"}),
    pytest.param((Net, "hidden", {"compiler": "inductor"}), marks=pytest.mark.inductor),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward_after_a_change_raises(case: tuple[type[nn.Module], str, dict[str, Any]]) -> None:
    model, how, options = case
    net = model()
    compiled = cached(net, **options)
    loss = compiled(X).square().sum()
    change(net, how)
    with torch.no_grad():
        compiled(X)  # refreshes the copies in place
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("model", [Net, Views])
def test_backward_after_no_change_does_not(model: type[nn.Module]) -> None:
    net = model()
    compiled = cached(net)
    compiled(X).square().sum().backward()
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    loss = compiled(X).square().sum()
    with torch.no_grad():
        compiled(X)
    compiled(X)
    loss.backward()
    again = [p.grad for p in net.parameters() if p.grad is not None]
    assert all(map(torch.equal, gradients, again))


@pytest.mark.parametrize("model", [Net, Views])
def test_a_change_that_no_call_followed_leaves_backward_the_old_weights(model: type[nn.Module]) -> None:
    """As in eager mode with a fused optimizer, except that there backward reads the new ones."""
    net = model()
    compiled = cached(net)
    compiled(X).square().sum().backward()
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    loss = compiled(X).square().sum()
    for parameter in net.parameters():
        parameter.data.add_(1.0)
    loss.backward()
    matrices = [(one, p) for one, p in zip(gradients, net.parameters(), strict=True) if p.dim() > 1]
    assert all(torch.equal(one, p.grad) for one, p in matrices if p.grad is not None)
