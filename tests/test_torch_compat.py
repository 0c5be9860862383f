"""Private names of torch around autocast, fallbacks and recurrent modules: each test fails when torch moves one."""

from typing import Any

import pytest
import torch
from torch import fx, nn

from mpcompile import torch_compat
from tests.torch_compat_tools import Seen


def test_tracing_without_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with torch_compat.tracing_without_autocast(forward=True):
            assert torch_compat.enabled_autocasts() == []
            assert torch._functorch.config.backward_pass_autocast == "off"
        with torch_compat.tracing_without_autocast(forward=False):
            assert torch_compat.enabled_autocasts() == ["cpu"]
            assert torch._functorch.config.backward_pass_autocast == "off"
        assert torch_compat.enabled_autocasts() == ["cpu"]
    assert torch._functorch.config.backward_pass_autocast == "same_as_forward"


def test_enabled_autocasts() -> None:
    assert torch_compat.enabled_autocasts() == []
    with torch.autocast("cpu", torch.float16):
        assert torch_compat.enabled_autocasts() == ["cpu"]
        with torch.autocast("cpu", enabled=False):
            assert torch_compat.enabled_autocasts() == []


def test_running_without_autocast() -> None:
    x = torch.randn(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with torch_compat.running_without_autocast():
            assert (x @ x).dtype is torch.float32
        assert (x @ x).dtype is torch.bfloat16


def test_exceptions_that_fall_back() -> None:
    kinds = torch_compat.exceptions_that_fall_back()
    assert kinds
    assert all(issubclass(kind, Exception) for kind in kinds)

    def failing(gm: fx.GraphModule, inputs: Any) -> Any:
        raise kinds[0].__new__(kinds[0])

    # Dynamo swallows it and runs eagerly.
    assert torch.equal(torch.compile(lambda x: x + 1, backend=failing)(torch.zeros(2)), torch.ones(2))


@pytest.mark.parametrize("allowed", [True, False])
def test_captures_recurrent_modules(allowed: bool) -> None:
    seen = Seen()
    with torch._dynamo.config.patch(allow_rnn=allowed):
        assert torch_compat.captures_recurrent_modules() is allowed
        torch.compile(nn.GRU(4, 4), backend=seen)(torch.randn(2, 1, 4))
    assert bool(seen.graphs) is allowed
