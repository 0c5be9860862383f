"""The backend as a user meets it: grad modes, dynamic shapes, modes, what outputs and gradients keep."""

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import mpcompile
from benchmarks.models import GPT
from mpcompile import backend
from tests.helpers import Net
from tests.test_programs import BOUND, error, matmuls, mixprec


def exact(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).double()(x.double())


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_without_gradients(context: Any) -> None:
    model, x = Net(), torch.randn(3, 8)
    compiled = mixprec(model)
    with context():
        output = compiled(x)
    assert not output.requires_grad
    assert {node.precision for node in matmuls(compiled)} == {"low"}
    assert error([output.clone()], [exact(model, x)]) < BOUND


def test_eval_mode_computes_low_and_without_dropout() -> None:
    model, x = nn.Sequential(Net(), nn.Dropout(0.9)), torch.randn(3, 8)
    compiled = mixprec(model.eval())
    output = compiled(x).detach()
    assert {node.precision for node in matmuls(compiled)} == {"low"}
    assert error([output], [exact(model, x)]) < BOUND


def test_one_dynamic_graph_serves_all_batch_sizes() -> None:
    model = Net()
    compiled = mixprec(model, dynamic=True)
    for rows in (3, 5, 64):
        x = torch.randn(rows, 8)
        assert error([compiled(x).detach()], [exact(model, x)]) < BOUND
    assert len(mpcompile.reports(compiled)) == 1
    # Dynamo itself treats a size of 1 apart.
    x = torch.randn(1, 8)
    assert error([compiled(x).detach()], [exact(model, x)]) < BOUND
    assert len(mpcompile.reports(compiled)) <= 2


def test_two_models_do_not_meet() -> None:
    models = [Net(), Net()]
    compiled = [mixprec(models[0]), mixprec(models[1], fp32=["last"])]
    for one in compiled:
        one(torch.randn(3, 8)).sum().backward()
    assert {node.precision for node in matmuls(compiled[0])} == {"low"}
    assert {node.precision for node in matmuls(compiled[1])} == {"low", "fp32"}
    for model in models:
        assert len(gradients(model)) == 4


def views_and_aliases(x: Tensor, w: Tensor) -> tuple[Any, ...]:
    y = x @ w
    return y, y.t(), y[:, ::2], x, x.view(-1), y.detach(), y.argmax(-1), (y * 2).expand(2, 3, 4), 3


def test_outputs_keep_dtype_shape_strides_aliasing_and_requires_grad() -> None:
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    found, expected = mixprec(views_and_aliases)(x, w), views_and_aliases(x, w)
    assert found[-1] == expected[-1] == 3
    assert found[3] is x
    for one, other in zip(found[:-1], expected[:-1], strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert one.requires_grad == other.requires_grad
    storages = [[value.untyped_storage().data_ptr() for value in values[:-1]] for values in (found, expected)]
    shared = [[a == b for a in pointers for b in pointers] for pointers in storages]
    assert shared[0] == shared[1]


def test_gradients_are_fp32_and_laid_out_as_their_parameters() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    mixprec(model)(x).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain(x.detach()).sum().backward()
    for name, parameter in plain.named_parameters():
        one, other = found[name], parameter.grad
        assert one is not None, name
        assert other is not None, name
        assert (one.dtype, one.shape, one.stride()) == (torch.float32, other.shape, other.stride()), name
    assert x.grad is not None
    assert x.grad.dtype is torch.float32


def test_buffers_are_updated_in_place_in_fp32() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    buffers = dict(model.named_buffers())
    twin, x = copy.deepcopy(model).double(), torch.randn(16, 8)
    mixprec(model)(x)
    twin(x.double())
    for name, value in model.named_buffers():
        assert value is buffers[name]
        assert value.dtype is (torch.int64 if name.endswith("tracked") else torch.float32)
        assert torch.allclose(value.double(), twin.get_buffer(name).double(), atol=BOUND), name


def test_parameters_stay_the_masters() -> None:
    model = Net()
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    compiled = mixprec(model)
    compiled(torch.randn(3, 8)).sum().backward()
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert parameter.dtype is torch.float32
        assert torch.equal(parameter, before[name][1])
    assert model.state_dict().keys() == before.keys()


def test_a_mode_needs_inductor() -> None:
    compiled = torch.compile(
        Net(),
        backend=lambda gm, inputs: backend.mixprec(
            gm, inputs, mode="reduce-overhead", options={"dtype": "bf16", "compiler": "aot_eager"}
        ),
    )
    with pytest.raises(BackendCompilerFailed, match="mode='reduce-overhead' is for compiler='inductor' only"):
        compiled(torch.randn(3, 8))


def test_mode_and_options_become_settings_of_inductor() -> None:
    options = backend.Options.parse({"numerics": "strict", "inductor": {"max_autotune": False}})
    settings = backend._inductor(options, "max-autotune")
    assert settings["coordinate_descent_tuning"] is True  # of the mode
    assert settings["max_autotune"] is False  # of the mode, overridden by the user
    assert settings["emulate_precision_casts"] is True
    assert backend._inductor(backend.Options(), None) == {}


def test_an_unknown_option_raises_through_torch_compile() -> None:
    with pytest.raises(BackendCompilerFailed, match="Unknown option 'dtypo' for backend 'mixprec'"):
        mixprec(Net(), dtypo="bf16")(torch.randn(3, 8))


def test_dynamos_own_graph_is_not_edited() -> None:
    class Attention(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)[None, None]
            with torch.autocast("cpu", enabled=False):
                y = self.last(h)
            return nn.functional.scaled_dot_product_attention(y, y, y)

    seen: list[tuple[str, str]] = []

    def watching(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        def text() -> str:
            return (
                f"{gm.graph} {[(n.name, n.meta.get('custom'), n.meta.get('nn_module_stack')) for n in gm.graph.nodes]}"
            )

        before = text()
        compiled = backend.mixprec(gm, inputs, options={"dtype": "bf16", "compiler": "aot_eager"})
        seen.append((before, text()))
        return compiled

    torch.compile(Attention(), backend=watching)(torch.randn(3, 8)).sum().backward()
    ((before, after),) = seen
    assert before == after
    assert "scaled_dot_product_attention" in before


def tiny() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return GPT(vocabulary=16, width=32, layers=1, context=8), (torch.randint(0, 16, (2, 8)),)


def step(compiled: Any, model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    loss = compiled(*inputs)
    loss.backward()
    return [loss.detach(), *gradients(model)]


@pytest.mark.inductor
def test_the_fp32_policy_is_bitwise_inductor() -> None:
    model, inputs = tiny()
    expected = step(torch.compile(model), model, inputs)
    torch._dynamo.reset()
    model, inputs = tiny()
    found = step(mixprec(model, policy="fp32", dtype="auto", compiler="inductor"), model, inputs)
    assert len(found) == len(expected) > 10
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.inductor
def test_mode_and_inductor_settings_reach_the_code_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    compile_fx = backend.compile_with_inductor

    def watching(gm: Any, inputs: Any, joint: Any, settings: dict[str, Any]) -> Any:
        seen.append(settings)
        return compile_fx(gm, inputs, joint, settings)

    monkeypatch.setattr(backend, "compile_with_inductor", watching)
    model, x = Net(), torch.randn(3, 8)

    def with_mode(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        options = {"dtype": "bf16", "inductor": {"trace.enabled": False}}
        return backend.mixprec(gm, inputs, mode="max-autotune-no-cudagraphs", options=options)

    output = torch.compile(model, backend=with_mode)(x)
    assert error([output.detach()], [exact(model, x)]) < BOUND
    assert seen[0]["trace.enabled"] is False
    assert seen[0]["max_autotune"] is True


WITHOUT_IMPORT = """
import sys, torch
assert not any(name.split(".")[0] == "mpcompile" for name in sys.modules)
linear = torch.nn.Linear(8, 4)
def f(x):
    return linear(x)
y = torch.compile(f, backend="mixprec", options={"dtype": "bf16", "compiler": "aot_eager"})(torch.ones(2, 8))
assert y.dtype is torch.float32 and not torch.equal(y, f(torch.ones(2, 8)))
assert "mpcompile.backend" in sys.modules
assert "mixprec" in torch.compiler.list_backends()
"""


def test_it_works_in_a_process_that_never_imports_mpcompile() -> None:
    result = subprocess.run([sys.executable, "-c", WITHOUT_IMPORT], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
