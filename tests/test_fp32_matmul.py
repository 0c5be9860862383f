"""What an fp32 matmul means is set around a compiled model's forward and backward, and put back."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpcompile import joint_pass
from mpcompile.execution.backward_node import backward_nodes
from mpcompile.execution.fp32_matmul import fp32_matmul_precision, with_fp32_matmul
from tests.test_programs import mixprec


def settings() -> list[str]:
    return [torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision]


SEEN: list[list[str]] = []


@pytest.fixture(autouse=True)
def before() -> Iterator[list[str]]:
    """The process's settings, which must be the same after every test."""
    found = settings()
    yield found
    assert settings() == found


@pytest.mark.parametrize("backend", [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul])
def test_a_setting_of_one_backend_alone_is_in_the_cache_key(backend: Any) -> None:
    before = joint_pass._reduced_precision_flags()
    precision = backend.fp32_precision
    backend.fp32_precision = "tf32"  # torch.get_float32_matmul_precision() raises from here on
    try:
        assert joint_pass._reduced_precision_flags() != before
        mixprec(nn.Linear(4, 4))(torch.randn(2, 4)).sum().backward()
    finally:
        backend.fp32_precision = precision


@torch.library.custom_op("mpcompile_tests::note_settings", mutates_args=())
def note(x: Tensor) -> Tensor:
    """Note the settings in force where it runs, forward and backward."""
    SEEN.append(settings())
    return x.clone()


note.register_fake(torch.empty_like)
note.register_autograd(lambda ctx, gradient: note(gradient))


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_the_context_sets_and_restores(precision: str, before: list[str]) -> None:
    with fp32_matmul_precision(precision):
        assert settings() == [precision, precision]
    assert settings() == before


def test_the_context_restores_after_an_error(before: list[str]) -> None:
    with pytest.raises(ZeroDivisionError), fp32_matmul_precision("tf32"):
        raise ZeroDivisionError
    assert settings() == before


def test_inherit_changes_nothing() -> None:
    def compiled() -> None: ...

    with fp32_matmul_precision("tf32"), fp32_matmul_precision("inherit"):
        assert settings() == ["tf32", "tf32"]
    assert with_fp32_matmul(compiled, "inherit") is compiled


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_forward_and_backward_of_a_compiled_model_run_under_it(precision: str, before: list[str]) -> None:
    linear, x = nn.Linear(8, 4), torch.randn(3, 8)
    compiled = mixprec(lambda x: note(linear(x)), fp32_matmul=precision)
    SEEN.clear()
    output = compiled(x)
    assert settings() == before
    assert [[precision, precision]] == SEEN
    output.sum().backward()
    assert settings() == before
    assert [[precision, precision]] * 2 == SEEN


def test_settings_are_back_when_two_models_with_their_own_run_backward_together(before: list[str]) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    outputs = [mixprec(nn.Linear(8, size), fp32_matmul=p)(x) for size, p in ((4, "ieee"), (5, "tf32"))]
    sum(output.sum() for output in outputs).backward()
    assert settings() == before


def test_a_second_backward_runs_under_it_too(before: list[str]) -> None:
    linear = nn.Linear(8, 4)
    output = mixprec(lambda x: note(linear(x)), fp32_matmul="tf32")(torch.randn(3, 8))
    SEEN.clear()
    output.sum().backward(retain_graph=True)
    output.sum().backward()
    assert SEEN == [["tf32", "tf32"]] * 2
    assert settings() == before


def test_outputs_without_a_gradient_need_no_hook(before: list[str]) -> None:
    with torch.no_grad():
        assert mixprec(nn.Linear(8, 4), fp32_matmul="tf32")(torch.randn(3, 8)).grad_fn is None
    assert settings() == before


def test_only_the_compiled_function_is_found_below_views() -> None:
    x = torch.randn(3, requires_grad=True)
    assert backward_nodes([(x * 2).view(-1), None, 3]) == set()
    output = mixprec(lambda x: (x * 2)[None])(x)
    (node,) = backward_nodes([output.t().view(-1), output])
    assert "CompiledFunction" in node.name()
