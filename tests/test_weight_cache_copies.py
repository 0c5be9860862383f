"""Low copies: what they hold, how long they live, who shares them, and writes that leave no trace."""

import gc

import pytest
import torch
from torch import nn

import mpcompile
from mpcompile import MixprecError
from mpcompile.execution import low_copies
from tests.helpers import Net
from tests.weight_cache_tools import cached, copies, count_of, rounded

X = torch.linspace(-1, 1, 40).view(5, 8)


@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32])
def test_a_copy_holds_rounded_values(held: torch.dtype) -> None:
    parameter = nn.Parameter(torch.randn(3, 4))
    one = low_copies.copy_of(parameter, torch.bfloat16, held)
    assert low_copies.copy_of(parameter, torch.bfloat16, held) is one
    low_copies.refresh([one], [parameter])
    assert one.value.dtype is held
    assert torch.equal(one.value.float(), parameter.bfloat16().float())
    assert one.is_fresh(parameter)
    assert one.holds(parameter)


def hidden(net: Net) -> None:
    net.first.weight.data.mul_(1.5)


def test_refresh_by_hand_follows_a_hidden_write() -> None:
    net = Net()
    compiled = cached(net)
    with torch.no_grad():
        before = compiled(X).clone()
        hidden(net)
        assert torch.equal(compiled(X), before)  # what the documentation says
        mpcompile.runtime(compiled).refresh()
        assert torch.equal(compiled(X), rounded(net, X))


@pytest.mark.parametrize("factor", [1.5, 1 + 2.0**-7, float("nan")])
def test_strict_finds_a_hidden_write(factor: float) -> None:
    net = Net()
    compiled = cached(net, strict=True)
    with torch.no_grad():
        compiled(X), compiled(X)
        net.last.weight.data.mul_(factor)
        with pytest.raises(MixprecError, match=r"'last.weight'.*runtime\(compiled\).refresh\(\)"):
            compiled(X)
        mpcompile.runtime(compiled).refresh()
        compiled(X)  # a NaN equals itself here
        assert torch.equal(compiled(X).isnan(), rounded(net, X).isnan())


def test_a_copy_lives_as_long_as_its_parameter_and_a_graph_that_reads_it() -> None:
    net = Net()
    compiled = cached(net)
    torch._dynamo.reset()
    gc.collect()  # what other tests left
    compiled(X)
    old = net.first.weight
    assert len(copies()) == 2
    net.first.weight = nn.Parameter(torch.randn(16, 8))
    compiled(X)
    assert len(copies()) == 3
    del old
    assert count_of(net) == len(copies()) == 2
    del compiled
    torch._dynamo.reset()
    gc.collect()
    assert copies() == []


def test_graphs_and_models_share_the_copy_of_a_parameter() -> None:
    net = Net()
    other = Net()
    other.first = net.first
    compiled, again = cached(net), cached(other)
    compiled(X).sum().backward()  # one graph for training,
    with torch.no_grad():
        compiled(X)  # one for evaluation
    again(X)
    compiled.train(False)
    compiled(X)
    assert sum(copy.is_of(net.first.weight) for copy in copies()) == 1
    assert count_of(net) == count_of(other) == 2
