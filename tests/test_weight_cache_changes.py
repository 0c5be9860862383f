"""The weight cache follows every change of a parameter, and always the parameters of the call."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mpcompile import backend
from tests.helpers import Net
from tests.test_programs import mixprec
from tests.weight_cache_tools import Refreshes, cached, count_of, rounded

X = torch.linspace(-1, 1, 40).view(5, 8)


def in_place(net: Net) -> None:
    with torch.no_grad():
        net.first.weight.mul_(1.5)


def copied_into(net: Net) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter))


def copied_in_inference_mode(net: Net) -> None:
    with torch.inference_mode():
        net.first.weight.copy_(torch.randn(16, 8))


def data_replaced(net: Net) -> None:
    net.first.weight.data = torch.randn(16, 8)


def data_replaced_while_the_old_lives(net: Net) -> None:
    net.__dict__["kept"] = net.first.weight.data
    net.first.weight.data = torch.randn(16, 8)


def parameter_replaced(net: Net) -> None:
    net.first.weight = nn.Parameter(torch.randn(16, 8))


def parameter_wrapped_again(net: Net) -> None:
    memory = net.first.weight.data.mul_(1.5)
    del net.first.weight
    net.first.weight = nn.Parameter(memory)


def loaded(net: Net) -> None:
    net.load_state_dict(copy.deepcopy(Net().state_dict()))


def assigned(net: Net) -> None:
    net.load_state_dict(copy.deepcopy(Net().state_dict()), assign=True)


def moved_there_and_back(net: Net) -> None:
    net.double()
    in_place(net)
    net.float()


def swapped_through_data(net: Net) -> None:
    for parameter in net.parameters():
        parameter.data = torch.randn_like(parameter)


def stepped(kind: type[torch.optim.Optimizer], **settings: Any) -> Callable[[Net], None]:
    def change(net: Net) -> None:
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        kind(net.parameters(), lr=0.1, **settings).step()  # type: ignore[call-arg]

    return change


class ThroughData(torch.optim.Optimizer):
    """Writes where no version moves."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])


CHANGES: dict[str, Callable[[Net], None]] = {
    "nothing": lambda net: None,
    "in place": in_place,
    "copy_": copied_into,
    "copy_ in inference mode": copied_in_inference_mode,
    "data replaced": data_replaced,
    "data replaced, the old kept": data_replaced_while_the_old_lives,
    "parameter replaced": parameter_replaced,
    "parameter wrapped again": parameter_wrapped_again,
    "load_state_dict": loaded,
    "load_state_dict(assign=True)": assigned,
    "to fp64 and back": moved_there_and_back,
    "all swapped through data": swapped_through_data,
    "SGD": stepped(torch.optim.SGD),
    "AdamW": stepped(torch.optim.AdamW),
    "fused AdamW": stepped(torch.optim.AdamW, fused=True),
    "an optimizer that writes through data": stepped(ThroughData),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_is_followed(case: str) -> None:
    net = Net()
    compiled = cached(net)
    with torch.no_grad():
        before = compiled(X).clone()
        CHANGES[case](net)
        found = compiled(X)
        assert torch.equal(found, before) == (case == "nothing")
        assert torch.equal(found, rounded(net, X))


def test_other_memory_at_the_same_address_is_a_change() -> None:
    net, memory = Net(), np.random.default_rng(0).random((16, 8), dtype=np.float32)
    net.first.weight.data = torch.from_numpy(memory)
    address = net.first.weight.data_ptr()
    compiled = cached(net)
    with torch.no_grad():
        compiled(X)
        net.first.weight.data = torch.empty(0)  # the memory is given back,
        memory *= 2  # used for something else,
        net.first.weight.data = torch.from_numpy(memory)  # and given out again
        assert net.first.weight.data_ptr() == address
        assert torch.equal(compiled(X), rounded(net, X))


def test_two_models_of_one_structure_share_code_and_no_copy() -> None:
    nets = [Net() for _ in range(3)]
    compiled = [cached(net) for net in nets]
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        found = [[call(X) for call in compiled] for _ in range(2)]
        for net, one, again in zip(nets, *found, strict=True):
            assert torch.equal(one, again)
            assert count_of(net) == 2
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        expected = [rounded(net, X) for net in nets]
    assert all(map(torch.equal, found[0], expected))
    assert not torch.equal(expected[0], expected[1])


def test_a_moving_average_is_swapped_in_and_out() -> None:
    net, average = Net(), Net()
    compiled, own = cached(net), [p.detach().clone() for p in net.parameters()]
    with torch.no_grad():
        first = compiled(X)
        for parameter, other in zip(net.parameters(), average.parameters(), strict=True):
            parameter.copy_(other)
        swapped = compiled(X)
        for parameter, other in zip(net.parameters(), own, strict=True):
            parameter.copy_(other)
        assert torch.equal(compiled(X), first)
        assert torch.equal(swapped, rounded(average, X))


def test_functional_call_reads_what_it_is_given() -> None:
    net, other = Net(), Net()

    def call(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        found = torch.func.functional_call(net, parameters, x)
        assert isinstance(found, Tensor)
        return found

    compiled = cached(call)
    given = [dict(net.named_parameters()), dict(other.named_parameters())]
    given.append({name: value.detach() * 2 for name, value in given[0].items()})
    given.append({**given[0], "first.weight": nn.Parameter(given[0]["first.weight"].detach() * 3)})
    with torch.no_grad():
        found = [compiled(parameters, X) for parameters in (*given, *given)]
        for index, parameters in enumerate(given):
            assert torch.equal(found[index], found[index + 4])
            assert torch.equal(found[index], rounded(call, parameters, X))


def test_a_plain_tensor_in_place_of_a_parameter_is_rounded_for_the_call() -> None:
    weight = nn.Parameter(torch.randn(8, 3))
    graphs: list[Any] = []

    def keep(gm: Any, inputs: Any) -> Any:
        options = {"dtype": "bf16", "compiler": "aot_eager", "weight_cache": True}
        graphs.append(backend.mixprec(gm, inputs, options=options))
        return graphs[-1]

    with torch.no_grad():
        torch.compile(lambda x: x @ weight, backend=keep)(X)
        (graph,) = graphs
        position = next(cached.position for cached in graph._cached)
        with graph._examples[0].fake_mode as mode:  # as DDP calls it, to compile the next graph
            fakes = [mode.from_tensor(value) for value in ((weight, X) if position == 0 else (X, weight))]
            assert isinstance(graph(*fakes)[0], FakeTensor)
        for value in (torch.randn(8, 3), nn.Parameter(torch.randn(3, 8)).t(), nn.Parameter(torch.randn(8, 3))):
            args = [value, X] if position == 0 else [X, value]
            (found,) = graph(*args)
            assert torch.equal(found, (X.bfloat16() @ value.bfloat16()).float())


def test_weights_that_the_graph_itself_changes() -> None:
    def changing(net: Net) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            before = net.last(net.first(x))
            with torch.no_grad():
                net.first.weight.mul_(1.25)
            found = before + net.last(net.first(x))
            assert isinstance(found, Tensor)
            return found

        return call

    nets = [Net()]
    nets.append(copy.deepcopy(nets[0]))
    with torch.no_grad():
        one, other = cached(changing(nets[0])), mixprec(changing(nets[1]))
        for _ in range(3):
            assert torch.equal(one(X), other(X))
        assert torch.equal(nets[0].first.weight, nets[1].first.weight)
        assert torch.equal(cached(nets[0])(X), rounded(nets[1], X))


def test_all_stale_copies_of_a_graph_are_made_in_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    net, refreshes = Net(), Refreshes(monkeypatch)
    compiled = cached(net)
    compiled(X), compiled(X)
    assert refreshes.sizes == [2]
    in_place(net)
    compiled(X), compiled(X)
    assert refreshes.sizes == [2, 1]
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):  # micro-batches
        compiled(X).sum().backward()
    assert refreshes.sizes == [2, 1]
    optimizer.step()
    compiled(X), compiled(X)
    assert refreshes.sizes == [2, 1, 2]


def test_an_optimizer_step_elsewhere_refreshes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    net, other = Net(), Net()
    compiled = cached(net)
    compiled(X)
    refreshes = Refreshes(monkeypatch)
    stepped(torch.optim.SGD)(other)
    compiled(X)
    assert refreshes.sizes == []
