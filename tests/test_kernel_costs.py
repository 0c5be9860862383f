"""benchmarks.kernel_costs: what is timed does what its name says, and what a graph will take is summed by hand."""

from dataclasses import astuple

import pytest
import torch
from torch import Tensor

from benchmarks import kernel_costs
from benchmarks.kernel_costs import Costs, nanoseconds
from tests.helpers import trace

X, GRADIENT = torch.randn(5, 7), torch.randn(5, 7)
TIMES = {
    "relu": 1.6,
    "rounded": 1.7,
    "stored_as_booleans": 11.6,
    "stored_as_integers": 2.6,
    "centred": 3.0,
    "read_as_booleans": 8.4,
    "read_as_integers": 4.4,
}


def test_masks_are_the_same_however_they_are_stored() -> None:
    (y, mask), (same, integers) = kernel_costs.stored_as_booleans(X), kernel_costs.stored_as_integers(X)
    assert (mask.dtype, integers.dtype) == (torch.bool, torch.uint8)
    assert torch.equal(y, same)
    read = kernel_costs.read_as_integers(integers, GRADIENT)
    assert torch.equal(read, kernel_costs.read_as_booleans(mask, GRADIENT))
    assert torch.equal(read, kernel_costs.centred(GRADIENT.where(X > 0, torch.tensor(0.0))))


def test_costs_are_what_a_kernel_takes_beyond_moving_its_bytes() -> None:
    byte, rounding, boolean, integer = astuple(Costs.of(TIMES))
    assert byte == pytest.approx(0.2)  # of 8 read and written
    assert rounding == pytest.approx(0.1)
    assert boolean == pytest.approx((11.6 - 1.6) + (8.4 - 3.0) - 0.4)
    assert integer == pytest.approx((2.6 - 1.6) + (4.4 - 3.0) - 0.4)


def test_times_and_costs_are_told_in_nanoseconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_costs, "nanoseconds", lambda: TIMES)
    kernel_costs.main()
    told = " ".join(capsys.readouterr().out.split())
    assert "stored as booleans │ 11.60" in told
    assert told.endswith(
        "a byte 0.20 ns, a rounding 0.10; a mask in forward and backward 15.0 as a Boolean, 2.0 as an integer"
    )


def test_no_cost_is_negative_however_noisy_the_times_are() -> None:
    assert astuple(Costs.of(TIMES | {"rounded": 1.5, "stored_as_integers": 0.5}))[1::2] == (0.0, 0.0)


def test_a_graph_takes_what_it_moves_and_what_it_rounds_and_saves() -> None:
    def forward(x: Tensor) -> tuple[Tensor, ...]:
        return x.relu(), (x + 1).bfloat16(), x <= 0, (x > 1).to(torch.uint8)

    graph = trace(forward, X).graph
    each = {"byte": 4 + 4 + 2 + 1 + 1, "rounding": 1, "boolean": 1, "integer": 1}
    for name, count in each.items():
        costs = Costs(**{other: 2.0 if other == name else 0.0 for other in each})
        assert costs.seconds(graph) == pytest.approx(2e-9 * count * X.numel()), name


@pytest.mark.inductor
def test_every_kernel_is_timed() -> None:
    found = nanoseconds(3)
    assert list(found) == list(TIMES)
    assert min(found.values()) > 0
