"""``file.py:factory`` or ``package.module:factory``: load the user's model and its inputs."""

from __future__ import annotations

import copy
import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mpcompile.cli.command import CannotRun
from mpcompile.cli.machine import is_registered
from mpcompile.device import automatic_dtype, main_device

SEED = 0
"""What torch's random numbers start from before the factory is called, so that two runs see the same model."""
_NOT_THE_USERS = (str(Path(__file__).parent), "<frozen importlib", importlib.__file__)
"""Where the files of frames are that come before the user's own in a traceback."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model and what to call it with."""

    name: str
    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    given_loss: Callable[[Any], torch.Tensor] | None = None

    def loss(self, output: Any) -> torch.Tensor:
        """The loss of what the model returned: the factory's, else what ``mpcompile.compare`` takes by default."""
        from mpcompile.analysis.capture import default_loss

        return (self.given_loss or default_loss)(output)

    def automatic_dtype(self) -> torch.dtype:
        """What ``dtype="auto"`` means for the model's device."""
        parameters = self.model.parameters() if isinstance(self.model, nn.Module) else ()
        return automatic_dtype(main_device([*parameters, *tree_leaves((self.args, dict(self.kwargs)))]))

    def copy_model(self) -> Callable[..., Any]:
        """A copy of the model, or the function itself."""
        with users_code("Copying the model raised"):
            return copy.deepcopy(self.model) if isinstance(self.model, nn.Module) else self.model

    def run_once(self, *, with_loss: bool) -> None:
        """Run the model, uncompiled, on a copy: what it raises is the user's to see, not a compiler's to wrap."""
        model = self.copy_model()
        with torch.random.fork_rng():
            with users_code("The model, uncompiled, raised"):
                output = model(*self.args, **self.kwargs)
            with users_code("The loss raised"):
                loss = self.loss(output) if with_loss else None
        if loss is not None and (not isinstance(loss, torch.Tensor) or loss.numel() != 1):
            raise CannotRun(f"TARGET {self.name!r}: the loss must be a tensor of one number, got {_shown(loss)}.")


def load_target(text: str, *, with_loss: bool = False, seed: int = SEED) -> Target:
    """Import the file or module of ``text`` and call the factory, which takes no arguments.

    It returns ``(model, inputs)`` or ``(model, inputs, loss)``; ``inputs`` is a tuple of positional arguments, a dict
    of keyword arguments, or a pair of both; ``loss`` a function of what the model returns. The model, and
    ``with_loss`` the loss, is run once, uncompiled. Raises ``CannotRun``, with the user's own traceback where the
    user's code raises.
    """
    if not is_registered():
        raise CannotRun("torch does not find the backend 'mixprec': install this package (pip install .).")
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise CannotRun(f"TARGET {text!r} is not understood; write file.py:factory or package.module:factory.")
    factory = _factory(_module(where), name, text)
    torch.manual_seed(seed)
    with users_code(f"{name}() of {where!r} raised"):
        made = factory()
    target = _checked(made, text)
    target.run_once(with_loss=with_loss)
    return target


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Turn an exception of the user's code into ``CannotRun`` with the traceback from the user's first line on."""
    try:
        yield
    except Exception as error:
        frames = error.__traceback__
        while frames is not None and _is_not_the_users(frames):
            frames = frames.tb_next
        shown = "".join(traceback.format_exception(type(error), error, frames))
        raise CannotRun(f"{what} {type(error).__name__}: {error}", shown) from error


def _is_not_the_users(frames: TracebackType) -> bool:
    return frames.tb_frame.f_code.co_filename.startswith(_NOT_THE_USERS)


def _module(where: str) -> ModuleType:
    if where.endswith(".py") or not all(part.isidentifier() for part in where.split(".")):
        return _from_file(Path(where))
    if importlib.util.find_spec(where.partition(".")[0]) is None:
        raise CannotRun(
            f"No module {where!r} from here, nor a file; for a file write {where.replace('.', '/')}.py:factory."
        )
    with users_code(f"Importing {where!r} raised"):
        return importlib.import_module(where)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        beside = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, beside, n=1)
        hint = f" Did you mean {str(path.parent / near[0])!r}?" if near else ""
        raise CannotRun(f"There is no file {str(path)!r} (from {Path.cwd()}).{hint}")
    # Under its own name, for those beside it that import it as well, unless that is a library's.
    name = path.stem if path.stem not in sys.modules else f"target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as if it were run as a script: it imports what is beside it
    sys.modules[name] = module  # dataclasses and pickle look their module up
    with users_code(f"Importing {str(path)!r} raised"):
        spec.loader.exec_module(module)
    return module


def _factory(module: ModuleType, name: str, text: str) -> Callable[[], Any]:
    factory = getattr(module, name, None)
    if factory is None:
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(name, own, n=3, cutoff=0.5)
        raise CannotRun(
            f"TARGET {text!r}: there is no {name!r} in {module.__file__}; "
            f"callables there: {', '.join(near or own[:6]) or 'none'}."
        )
    if not callable(factory) or isinstance(factory, nn.Module):
        raise CannotRun(
            f"TARGET {text!r}: {name!r} is a {type(factory).__name__}, no function; write a function without arguments "
            "that returns (model, inputs)."
        )
    return factory  # type: ignore[no-any-return]


def _checked(made: Any, text: str) -> Target:
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise CannotRun(f"TARGET {text!r} returned {_shown(made)}; it must return (model, inputs).")
    model, inputs, loss = (*made, None)[:3]
    if not callable(loss) and loss is not None:
        raise CannotRun(f"TARGET {text!r} returned {_shown(loss)} as its loss; it must be a function of the output.")
    if not callable(model):
        raise CannotRun(f"TARGET {text!r} returned {_shown(model)} as its model; it must be a module or a function.")
    if isinstance(inputs, dict):
        return Target(text, model, (), inputs, loss)
    if not isinstance(inputs, tuple):
        raise CannotRun(
            f"TARGET {text!r} returned {_shown(inputs)} as its inputs; they must be a tuple, (x,) for a single one, "
            "a dict of keyword arguments, or (args, kwargs)."
        )
    if len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict):
        return Target(text, model, *inputs, loss)
    return Target(text, model, inputs, {}, loss)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.numel()} numbers"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"{type(value).__name__} {value!r}" if isinstance(value, (int, str, float)) else f"a {type(value).__name__}"
