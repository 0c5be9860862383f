"""What torch says while it compiles: each test fails when torch says it in another way."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from mpcompile.torch_messages import GraphBreak, graph_breaks, raised_by_backend


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRU(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        if x.sum() > 0:
            x = x + 1
        return self.memory(x)[0]


def line_of(text: str) -> str:
    with open(__file__) as file:
        number = next(number for number, line in enumerate(file, 1) if line.strip() == text)
    return f"{__file__}:{number}"


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_graph_breaks_say_where_and_why(capfd: pytest.CaptureFixture[str]) -> None:
    above, heard = logging.getLogger("torch._dynamo"), Heard()
    above.addHandler(heard)
    try:
        with graph_breaks() as found:
            torch.compile(Broken(), backend="eager")(torch.ones(3, 4))
    finally:
        above.removeHandler(heard)
    assert not any("Graph break in user code" in message for message in heard.messages)
    assert found == [
        GraphBreak(line_of("torch._dynamo.graph_break()"), "Call to `torch._dynamo.graph_break()`"),
        GraphBreak(line_of("if x.sum() > 0:"), "Data-dependent branching"),
        GraphBreak(line_of("return self.memory(x)[0]"), "Attempted to wrap RNN, GRU, or LSTM"),
    ]
    assert capfd.readouterr() == ("", "")


def test_a_model_in_one_graph_has_none() -> None:
    with graph_breaks() as found:
        torch.compile(nn.Linear(4, 4), backend="eager")(torch.ones(3, 4))
    assert found == []


def test_logging_is_as_before() -> None:
    logger = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    before = (logger.level, logger.propagate, list(logger.handlers))
    with pytest.raises(RuntimeError, match="inside"), graph_breaks():
        raise RuntimeError("inside")
    assert (logger.level, logger.propagate, logger.handlers) == before


def test_what_a_backend_raised() -> None:
    def failing(gm: fx.GraphModule, inputs: Any) -> Any:
        raise KeyError("its own")

    with pytest.raises(Exception, match="its own") as raised:
        torch.compile(lambda x: x + 1, backend=failing)(torch.ones(2))
    assert not isinstance(raised.value, KeyError)
    assert isinstance(raised_by_backend(raised.value), KeyError)
    plain = KeyError("plain")
    assert raised_by_backend(plain) is plain
