"""TARGET: what is loaded, and what each mistake is answered with."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mpcompile.cli.command import CannotRun
from mpcompile.cli.target import load_target
from tests.cli_tools import MODEL, folder_with

FORMS = """
import torch
from torch import nn
from beside import SIZE

model = nn.Linear(SIZE, 4)
x = torch.ones(2, 8)

def positional(): return model, (x,)
def keyword(): return model, {"input": x}
def both(): return (lambda x, scale: model(x) * scale), ((x,), {"scale": 2.0})
def pair_of_tensors(): return (lambda x, y: x + y), (x, x)
def with_loss(): return model, (x,), lambda output: output.abs().max()
def random(): return (lambda x: x), (torch.randn(3),)
"""

WRONG = """
import torch
from torch import nn

model = nn.Linear(3, 3)
def three(): return 3
def alone(): return model
def no_model(): return 3, (torch.ones(3),)
def no_tuple(): return model, torch.ones(3)
def listed(): return model, [torch.ones(3)]
def four(): return model, (torch.ones(3),), None, None
def no_loss(): return model, (torch.ones(3),), 3
def two_losses(): return model, (torch.ones(3),), lambda output: output
def bad_loss(): return model, (torch.ones(3),), lambda output: output.nope
def integers(): return (lambda x: x.argmax()), (torch.ones(3),)
def raises():
    return helper()
def helper():
    raise KeyError("deep down")
def wrong_shape():
    return nn.Sequential(model), (torch.ones(2, 4),)
"""

FILES = {
    "model.py": MODEL,
    "forms.py": FORMS,
    "beside.py": "SIZE = 8\n",
    "wrong.py": WRONG,
    "broken.py": "import torch\nx = torch.nope\n",
    "syntax.py": "def make(:\n",
    "random_.py": "",
    "package/__init__.py": "",
    "package/models.py": MODEL,
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> Iterator[None]:
    with folder_with(FILES, tmp_path):
        yield


def test_the_forms_of_inputs() -> None:
    assert load_target("forms.py:positional").args[0].shape == (2, 8)
    assert load_target("forms.py:keyword").kwargs.keys() == {"input"}
    target = load_target("forms.py:both")
    assert (len(target.args), dict(target.kwargs)) == (1, {"scale": 2.0})
    assert len(load_target("forms.py:pair_of_tensors").args) == 2


def test_the_loss_of_the_factory_or_the_default() -> None:
    output = torch.tensor([1.0, -3.0])
    assert float(load_target("forms.py:with_loss", with_loss=True).loss(output)) == 3.0
    assert float(load_target("forms.py:positional", with_loss=True).loss(output)) == 5.0  # mean of squares
    load_target("wrong.py:integers")  # no loss is needed


def test_a_module_of_a_package_and_a_file_elsewhere(tmp_path: Path) -> None:
    assert type(load_target("package.models:make").model).__name__ == "Net"
    assert type(load_target(f"{tmp_path}/package/models.py:make").model).__name__ == "Net"


def test_a_file_named_as_a_library_does_not_replace_it(tmp_path: Path) -> None:
    Path("json.py").write_text(MODEL)
    assert type(load_target("json.py:make").model).__name__ == "Net"
    import json

    assert json.loads("1") == 1


def test_the_same_model_each_time() -> None:
    torch.manual_seed(7)
    first, second = load_target("forms.py:random"), load_target("forms.py:random")
    assert torch.equal(first.args[0], second.args[0])
    assert not torch.equal(first.args[0], load_target("forms.py:random", seed=1).args[0])


def test_loading_leaves_the_model_as_the_factory_made_it() -> None:
    Path("counted.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make(): return nn.Sequential(nn.BatchNorm1d(3), nn.Dropout()), (torch.ones(4, 3),)\n"
    )
    model = load_target("counted.py:make").model
    assert int(model[0].num_batches_tracked) == 0


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "list_backends", lambda: ["inductor"])
    with pytest.raises(CannotRun, match=r"does not find the backend 'mixprec': install this package"):
        load_target("model.py:make")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("model.py", r"'model\.py' is not understood; write file\.py:factory"),
        (":make", "is not understood"),
        ("modle.py:make", r"no file 'modle\.py' .*Did you mean 'model\.py'\?"),
        ("nowhere/model.py:make", r"no file 'nowhere/model\.py'"),
        ("model.py:mak", r"no 'mak' in .*model\.py; callables there: make"),
        ("wrong.py:model", "'model' is a Linear, no function"),
        ("nothing.here:make", r"No module 'nothing\.here' from here, nor a file; for a file write nothing/here\.py"),
        ("..:make", r"no file '\.\.'"),
        ("wrong.py:three", r"returned int 3; it must return \(model, inputs\)"),
        ("wrong.py:alone", r"returned a Linear; it must return \(model, inputs\)"),
        ("wrong.py:no_model", "returned int 3 as its model"),
        (
            "wrong.py:no_tuple",
            r"returned a tensor of 3 numbers as its inputs; .* a tuple, \(x,\) for a single one",
        ),
        ("wrong.py:listed", "returned a list as its inputs"),
        ("wrong.py:four", "returned a tuple of 4; it must return"),
        ("wrong.py:no_loss", "returned int 3 as its loss; it must be a function of the output"),
        ("wrong.py:two_losses", "the loss must be a tensor of one number, got a tensor of 3 numbers"),
    ],
)
def test_mistakes_are_named(target: str, message: str) -> None:
    with pytest.raises(CannotRun, match=message) as raised:
        load_target(target, with_loss=True)
    assert raised.value.user_traceback == ""


@pytest.mark.parametrize(
    ("target", "message", "lines"),
    [
        ("wrong.py:raises", "raises\\(\\) of 'wrong.py' raised KeyError", ["return helper()", "deep down"]),
        ("wrong.py:wrong_shape", "The model, uncompiled, raised RuntimeError", ["shapes cannot be multiplied"]),
        ("wrong.py:bad_loss", "The loss raised AttributeError", ["output.nope"]),
        ("wrong.py:integers", "The loss raised ValueError: The model returns no floating-point tensor", []),
        ("broken.py:make", "Importing 'broken.py' raised AttributeError", ["x = torch.nope"]),
        ("syntax.py:make", "Importing 'syntax.py' raised SyntaxError", ["def make(:"]),
        ("package.missing:make", r"Importing 'package\.missing' raised ModuleNotFoundError", []),
    ],
)
def test_the_users_exceptions_come_with_the_users_traceback(target: str, message: str, lines: list[str]) -> None:
    with pytest.raises(CannotRun, match=message) as raised:
        load_target(target, with_loss=True)
    shown = raised.value.user_traceback
    assert all(line in shown for line in lines)
    assert "mpcompile/cli" not in shown
    assert "importlib" not in shown
