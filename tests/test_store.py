"""Reports on disk: written whole, read back equal, where torch's cache is, and not where caches are off."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import config

import mpcompile
from mpcompile.inspection import store
from mpcompile.inspection.report import Report
from tests.test_programs import mixprec


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where reports go."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "mixprec_reports"


@pytest.fixture
def report() -> Report:
    return mpcompile.explain(nn.Linear(8, 4), torch.randn(3, 8), options={"dtype": "bf16"})


def test_a_report_is_read_back_equal(folder: Path, report: Report) -> None:
    store.save("name", lambda: report)
    assert store.load("name") == report
    assert all(path.suffix == ".json" for path in folder.iterdir())  # no half-written file is left


def test_one_that_is_not_there_is_none(folder: Path) -> None:
    assert store.load("name") is None
    assert not folder.exists()


def test_saving_again_replaces(folder: Path, report: Report) -> None:
    store.save("name", lambda: Report("float16", ()))
    store.save("name", lambda: report)
    assert store.load("name") == report
    assert [path.name for path in folder.iterdir() if path.name.startswith("name")] == ["name.json"]


@pytest.mark.parametrize("switch", [{"force_disable_caches": True}, {"fx_graph_cache": False}])
def test_nothing_is_written_or_made_where_caches_are_off(folder: Path, switch: dict[str, bool]) -> None:
    with config.patch(switch):
        store.save("name", lambda: pytest.fail("the report was made"))
    assert not folder.exists()


@pytest.mark.inductor
def test_compiling_stores_the_report(folder: Path) -> None:
    compiled = mixprec(nn.Linear(8, 4), compiler="inductor")
    compiled(torch.randn(3, 8))
    (path,) = folder.iterdir()
    assert Report.from_json(path.read_text()) == mpcompile.reports(compiled)[0]


def test_nothing_is_stored_where_torch_keeps_no_code(folder: Path) -> None:
    compiled = mixprec(nn.Linear(8, 4))
    compiled(torch.randn(3, 8))
    assert mpcompile.reports(compiled)[0].matmuls()
    assert not folder.exists()


def test_the_key_depends_on_every_part_and_on_their_order() -> None:
    keys = [store.key_of(parts) for parts in (("a", "b"), ("b", "a"), ("ab",), ("a", "b", ""), ("a",))]
    assert len(set(keys)) == len(keys)
    assert store.key_of(["a", "b"]) == keys[0]
    assert keys[0].isalnum()
