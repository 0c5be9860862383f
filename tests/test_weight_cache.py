"""option ``weight_cache``: training is bitwise what it is without, and the report says what is read from the cache."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mpcompile
from mpcompile import torch_compat
from mpcompile.options import Options
from tests.helpers import Net, relative_error
from tests.test_programs import mixprec
from tests.weight_cache_tools import Refreshes, cached, copies, count_of, rounded

X = torch.linspace(-1, 1, 40).view(5, 8)
TOKENS = torch.arange(5)


class Tied(nn.Module):
    """An embedding whose weight is the last layer's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(TOKENS) + x).relu())


class Checkpointed(nn.Module):
    """Two blocks that are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Net(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.one, x, use_reentrant=False)
        return checkpoint(self.two, x, use_reentrant=False)


class Packed(nn.Module):
    """A weight that is read in pieces, transposed, and as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.randn(12, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x @ w.t() for w in self.packed.chunk(3))
        return torch.cat((q + k, v @ self.packed[:4], x @ self.packed.mT), dim=-1) + self.packed.sum()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.back = nn.ConvTranspose2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.norm(self.conv(x[None, None])).relu())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.attend(x[None], x[None], x[None], need_weights=False)
        assert isinstance(out, Tensor)
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "two layers": (Net, 2),
    "tied": (Tied, 2),
    "checkpointed": (Checkpointed, 3),
    "packed": (Packed, 1),
    "convolutions": (Convolutions, 2),
    "attention": (Attention, 2),
}


def train(make: Callable[[], nn.Module], **options: Any) -> tuple[list[Tensor], nn.Module]:
    """Three steps of two micro-batches, with an evaluation between: everything that was computed."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = make()
    compiled = mixprec(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = []
    for _ in range(3):
        for factor in (1.0, 0.5):
            loss = compiled(X * factor).square().mean()
            loss.backward()
            found.append(loss.detach())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(compiled(X).clone())
    return [*found, *(p.detach().clone() for p in model.parameters())], model


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in MODELS),
    *((name, {"dtype": "fp16", "loss_scale": 1024.0}) for name in ("tied", "packed")),
    ("two layers", {"compiler": "reference"}),
]


@pytest.mark.parametrize(("case", "options"), CASES, ids=str)
def test_training_is_bitwise_what_it_is_without(case: str, options: dict[str, Any]) -> None:
    make, count = MODELS[case]
    expected, _ = train(make, **options)
    found, model = train(make, **options, weight_cache=True, strict=True)
    assert len(found) == len(expected) > 12
    assert all(map(torch.equal, found, expected))
    assert count_of(model) == count


def test_an_overflowed_step_is_skipped_and_nothing_is_stale() -> None:
    net = Net()
    compiled = cached(net, dtype="fp16")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for factor in (1.0, 1e30, 1.0):
        (compiled(X).square().mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert mpcompile.runtime(compiled).skipped_steps == 1
    with torch.no_grad():
        assert torch.equal(compiled(X), rounded(net, X, dtype="fp16"))


def test_state_dict_and_parameters_stay_as_they_are() -> None:
    net = Net()
    before, names = list(net.parameters()), list(net.state_dict())
    compiled = cached(net)
    compiled(X).sum().backward()
    assert list(net.state_dict()) == names
    assert all(one is other for one, other in zip(net.parameters(), before, strict=True))
    assert all(p.grad.dtype is torch.float32 for p in net.parameters() if p.grad is not None)
    assert not any(copy.value.requires_grad for copy in copies())


def test_it_is_off_unless_asked_for() -> None:
    assert not Options.parse({}).weight_cache
    net = Net()
    mixprec(net)(X)
    assert count_of(net) == 0
    with pytest.raises(ValueError, match="`weight_cache` must be one of False, True; got 'yes'"):
        Options.parse({"weight_cache": "yes"})


def test_there_is_nothing_to_copy_in_fp32() -> None:
    net = Net()
    mixprec(net, policy="fp32", dtype="auto", weight_cache=True)(X)
    assert count_of(net) == 0


def from_the_cache(report: mpcompile.Report) -> list[str]:
    changes = [change for graph in report.graphs for result in graph.results for change in result.changes]
    return [change.reason for change in changes if "weight cache" in change.reason]


def test_the_report_names_what_is_read_from_the_cache() -> None:
    report = mpcompile.explain(Net(), X, options={"dtype": "bf16", "weight_cache": True})
    assert from_the_cache(report) == [f"low form of {name}.weight, from the weight cache" for name in ("first", "last")]
    assert {cast.parameter for graph in report.graphs for cast in graph.casts} == {"", "first.bias", "last.bias"}
    assert from_the_cache(mpcompile.explain(Net(), X, options={"dtype": "bf16"})) == []


def test_a_rule_that_keeps_an_operation_in_fp32_leaves_its_copy_unread() -> None:
    net = Net()
    compiled = cached(net, fp32=["first"])
    compiled(X)
    assert from_the_cache(mpcompile.reports(compiled)[0]) == ["low form of last.weight, from the weight cache"]
    assert count_of(net) == 1
    with torch.no_grad():
        assert torch.equal(compiled(X), rounded(net, X, fp32=["first"]))


def test_an_operator_rule_as_well() -> None:
    report = mpcompile.explain(Net(), X, options={"dtype": "bf16", "fp32": ["op:addmm", "op:mm"], "weight_cache": True})
    assert from_the_cache(report) == []


def test_a_parameter_beyond_the_range_of_fp16_has_no_copy() -> None:
    net = Net()
    with torch.no_grad():
        net.first.weight[0, 0] = 1e5
    cached(net, dtype="fp16")(X)
    assert count_of(net) == 1


def test_a_region_of_the_other_16_bit_type_does_not_read_the_copy() -> None:
    net = Net()

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            low = net.first(x)
        found = net.first(x) + low.float()
        assert isinstance(found, Tensor)
        return found

    with torch.no_grad():
        found = cached(call)(X)
        assert torch.equal(found, rounded(call, X))


@pytest.mark.parametrize("kind", ["strided", "subclass"])
def test_what_is_no_plain_fp32_parameter_has_no_copy(kind: str) -> None:
    class Marked(nn.Parameter):
        pass

    net = Net()
    if kind == "strided":
        net.first.weight = nn.Parameter(torch.randn(16, 16)[:, ::2])
        net.last.weight = nn.Parameter(torch.randn(1, 16).expand(4, 16), requires_grad=False)
    else:
        net.first.weight, net.last.weight = (Marked(layer.weight.detach()) for layer in (net.first, net.last))
    with torch.no_grad():
        found = cached(net)(X)
        assert count_of(net) == 0
        assert torch.equal(found, rounded(net, X))


def test_dense_weights_of_any_layout_have_a_copy_of_that_layout() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        found = cached(net)(x)
        strides = {copy.value.stride() for copy in copies() if any(map(copy.is_of, net.parameters()))}
        assert strides == {net[0].weight.stride(), net[1].weight.stride()}
        assert torch.equal(found, rounded(net, x))


def test_parameters_made_in_inference_mode_are_rounded_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    refreshes = Refreshes(monkeypatch)
    with torch.inference_mode():
        net = Net()
        assert torch.equal(cached(net)(X), rounded(net, X))
    assert refreshes.sizes == []


def test_a_copy_made_in_inference_mode_serves_training() -> None:
    net = Net()
    compiled = cached(net)
    with torch.inference_mode():
        compiled(X)
    compiled(X).sum().backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    compiled(X).sum().backward()
    assert count_of(net) == 2


@pytest.mark.inductor
def test_generated_code_computes_bitwise_what_it_does_without() -> None:
    expected, _ = train(Net, compiler="inductor")
    found, model = train(Net, compiler="inductor", weight_cache=True)
    if torch_compat.elides_roundings():  # those of weights in each call, but not those of copies
        assert all(relative_error(one, other) < 0.02 for one, other in zip(found, expected, strict=True))
    else:
        assert all(map(torch.equal, found, expected))
    assert count_of(model) == 2
