"""Reports are found from what ``torch.compile`` gave, for every way to compile and wherever the code came from."""

import gc

import pytest
import torch
from torch import Tensor, nn

import mpcompile
from mpcompile.inspection import registry
from mpcompile.inspection.recorder import Recorder
from mpcompile.inspection.registry import Compilation
from mpcompile.passes import Policy
from tests.test_programs import mixprec

OPTIONS = {"dtype": "bf16", "compiler": "aot_eager"}


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_nothing_is_reported_before_the_first_call() -> None:
    compiled = mixprec(Net())
    assert mpcompile.reports(compiled) == []
    compiled(torch.randn(3, 8))
    assert len(mpcompile.reports(compiled)) == 1


def test_a_module_compiled_in_place() -> None:
    model = Net()
    model.compile(backend="mixprec", options=OPTIONS)
    model(torch.randn(3, 8))
    (report,) = mpcompile.reports(model)
    assert [node.module for node in report.matmuls()] == ["layer", "layer"]


def test_a_plain_function() -> None:
    w = nn.Parameter(torch.randn(8, 4))

    @torch.compile(backend="mixprec", options=OPTIONS)
    def product(x: Tensor) -> Tensor:
        return x @ w

    product(torch.randn(3, 8))
    assert [node.op for node in mpcompile.reports(product)[0].matmuls()] == ["aten.mm.default", "aten.mm.default"]


def test_each_model_has_its_own_reports() -> None:
    first, second = mixprec(Net(4)), mixprec(Net(6))
    first(torch.randn(3, 8))
    second(torch.randn(3, 8))
    (one,), (other,) = mpcompile.reports(first), mpcompile.reports(second)
    assert "f32[4, 8]" in one.graphs[0].before
    assert "f32[6, 8]" in other.graphs[0].before


def test_a_model_that_runs_the_code_of_its_twin_has_its_reports() -> None:
    first, second = mixprec(Net()), mixprec(Net())
    first(torch.randn(3, 8))
    second(torch.randn(3, 8))
    assert mpcompile.reports(second) == mpcompile.reports(first) != []


def test_a_model_of_another_structure_or_other_options_does_not_borrow_reports() -> None:
    compiled = mixprec(Net())
    compiled(torch.randn(3, 8))
    assert mpcompile.reports(mixprec(Net(5))) == []
    assert mpcompile.reports(mixprec(Net(), fp32=["layer"])) == []
    assert mpcompile.reports(mixprec(nn.Sequential(nn.Linear(8, 4)))) == []


def test_graphs_come_in_the_order_they_were_compiled() -> None:
    class Broken(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            torch._dynamo.graph_break()
            return x.cos() @ self.layer.weight

    compiled = mixprec(Broken())
    compiled(torch.randn(3, 8))
    first, second = mpcompile.reports(compiled)
    assert "cos" not in first.graphs[0].before
    assert "cos" in second.graphs[0].before


def test_a_recompilation_adds_a_report() -> None:
    compiled = mixprec(Net(), dynamic=False)
    for rows in (3, 5, 3):
        compiled(torch.randn(rows, 8))
    assert len(mpcompile.reports(compiled)) == 2


@pytest.mark.parametrize("thing", [Net(), len, 3, torch.compile(Net(), backend="eager")])
def test_what_is_not_compiled_with_a_backend_of_ours_is_refused(thing: object) -> None:
    if isinstance(thing, torch._dynamo.OptimizedModule):
        assert mpcompile.reports(thing) == []
        return
    with pytest.raises(TypeError, match=r"needs what torch.compile.* returned.*; got"):
        mpcompile.reports(thing)  # type: ignore[arg-type]


def test_compilations_do_not_outlive_their_model() -> None:
    compiled = mixprec(Net())
    compiled(torch.randn(3, 8))
    alive = [reference for reference in registry._calls if reference() is not None]
    torch._dynamo.reset()
    del compiled
    gc.collect()
    assert len([reference for reference in registry._calls if reference() is not None]) < len(alive)


def test_a_report_that_is_gone_raises_with_the_way_to_another(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    graph = torch.fx.symbolic_trace(nn.Identity())
    compilation = Compilation(Recorder(Policy(), ()), ("key",), graph, cached=True)
    with pytest.raises(LookupError, match=r"stored report is gone.*mpcompile.explain"):
        compilation.report()
