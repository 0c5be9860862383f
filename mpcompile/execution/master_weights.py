"""fp32 master weights for a model that was loaded in 16 bits."""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpcompile.execution.optimizer_step import install
from mpcompile.execution.stand_in import assigned_in, parameters_of, set_substitute
from mpcompile.notices import MixprecError

_LOW = (torch.bfloat16, torch.float16)


def master_weights(model: nn.Module, optimizer: Optimizer) -> MasterWeights:
    """Give the 16-bit parameters of ``model`` that ``optimizer`` trains fp32 masters.

    From then on gradients are accumulated in fp32, ``optimizer.step()`` steps the masters with fp32 optimizer state
    and rounds them into the model's parameters, and ``model.state_dict()`` holds the masters: checkpoints are fp32.
    The training loop, the parameters and the optimizer's groups stay as they are. A write into a parameter from
    outside becomes its master. fp32 parameters are their own masters; a model that has no others is left alone.

    Call it after the optimizer is made and before the first backward; a model that is compiled is given as it was
    before ``torch.compile``, or as it is after. Raises ``ValueError`` for a 16-bit parameter that is not the model's
    and for an optimizer that has masters already.
    """
    install()
    return MasterWeights(getattr(model, "_orig_mod", model), optimizer)


class MasterWeights(Mapping[str, Tensor]):
    """The fp32 masters of a model's 16-bit parameters, by parameter name; what ``master_weights`` returns."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        # The model holds this object; a strong reference back would keep it until a garbage collection.
        self._model = weakref.ref(model)
        names = {parameter: name for name, parameter in model.named_parameters()}
        low = [parameter for parameter in parameters_of(optimizer) if parameter.dtype in _LOW]
        for parameter in low:
            if parameter not in names:
                raise ValueError(
                    f"The optimizer holds a {str(parameter.dtype)[6:]} parameter of shape {tuple(parameter.shape)} "
                    "that is not among model.parameters(); master_weights needs the model it belongs to."
                )
        self._names = {parameter: names[parameter] for parameter in low}
        self._places = [
            (name, parameter)
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if parameter in self._names
        ]
        self._masters: dict[Tensor, nn.Parameter] = {
            parameter: nn.Parameter(parameter.detach().float()) for parameter in low
        }
        for parameter in low:
            _accumulate_in_fp32(parameter)
            _widen_state(optimizer.state.get(parameter, {}))
        self._versions: dict[Tensor, int] = {}
        self._stashed: dict[str, Any] = {}
        set_substitute(optimizer, self)
        self._hook(model, optimizer)

    def __getitem__(self, name: str) -> Tensor:
        for parameter, own in self._names.items():
            if own == name:
                self.absorb()
                return self._masters[parameter].detach()
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names.values())

    def __len__(self) -> int:
        return len(self._names)

    def prepare(self, optimizer: Optimizer) -> dict[str, Any]:
        """The attributes with which the optimizer steps the masters: groups and state with masters for parameters."""
        self._require_own_parameters()
        for parameter in parameters_of(optimizer):
            if parameter.dtype in _LOW and parameter not in self._masters:
                raise MixprecError(
                    f"A {str(parameter.dtype)[6:]} parameter of shape {tuple(parameter.shape)} was added to the "
                    "optimizer after master_weights() and has no master. Add all parameter groups before."
                )
        self.absorb()
        for parameter, master in self._masters.items():
            self._versions[parameter] = parameter._version
            master.grad = None if parameter.grad is None else parameter.grad.float()
        groups = [
            {**group, "params": [self._master(parameter) for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        state: defaultdict[Any, Any] = defaultdict(dict)
        for key, value in optimizer.state.items():
            state[self._master(key)] = value
        return {"param_groups": groups, "state": state}

    def _master(self, parameter: Any) -> Any:
        """What the optimizer steps in place of a parameter (or has as another key of its state)."""
        return self._masters.get(parameter, parameter)

    @torch.no_grad()
    def commit(self, optimizer: Optimizer, stepped: Optimizer) -> None:
        """Take over what a step did: round the masters into the parameters, keep state and settings."""
        parameters: dict[Any, Any] = {master: parameter for parameter, master in self._masters.items()}
        for key, value in stepped.state.items():
            optimizer.state[parameters.get(key, key)] = value
        if any(parameter._version != self._versions[parameter] for parameter in self._masters):
            raise MixprecError(
                "This optimizer's step wrote into the 16-bit parameters themselves, past their masters: it steps "
                "another optimizer. Give that inner optimizer to master_weights()."
            )
        optimizer.__dict__.update(assigned_in(stepped))
        for group, own in zip(stepped.param_groups, optimizer.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
        for parameter, master in self._masters.items():
            parameter.copy_(master)
            master.grad = None

    @torch.no_grad()
    def absorb(self) -> None:
        """Take over what was written into the parameters from outside: where they are not their rounded masters."""
        for parameter, master in self._masters.items():
            master.copy_(torch.where(parameter == master.to(parameter.dtype), master, parameter.float()))

    def _require_own_parameters(self) -> None:
        model = self._model()
        if model is None:  # only the optimizer is left: nothing can be replaced
            return
        present = dict(model.named_parameters())
        for parameter, name in self._names.items():
            if present.get(name) is not parameter:
                raise MixprecError(
                    f"Parameter {name!r} of the model was replaced (load_state_dict(assign=True), .to(), or an "
                    "assignment), and the optimizer still holds the old one. Make the optimizer and its "
                    "master_weights anew, or load with assign=False."
                )

    def _hook(self, model: nn.Module, optimizer: Optimizer) -> None:
        model.register_state_dict_post_hook(_Hook(self, "_save"))
        model.register_load_state_dict_pre_hook(_Hook(self, "_load"))
        handle = optimizer.register_step_post_hook(self._after_step)
        # Before the user's own hooks, which may look at the stepped parameters or write into them.
        hooks = optimizer._optimizer_step_post_hooks
        assert isinstance(hooks, OrderedDict)
        hooks.move_to_end(handle.id, last=False)
        optimizer.register_load_state_dict_pre_hook(self._stash_state)
        optimizer.register_load_state_dict_post_hook(self._restore_state)

    def _present(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        """The parameters that ``module`` still holds, under all their names."""
        held = dict(module.named_parameters(remove_duplicate=False))
        return [(name, parameter) for name, parameter in self._places if held.get(name) is parameter]

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], _: Any) -> None:
        if args[0] is not optimizer and parameters_of(args[0]):
            self.commit(optimizer, args[0])

    def _save(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        self.absorb()
        for name, parameter in self._present(module):
            if prefix + name in state:
                state[prefix + name] = self._masters[parameter].detach()

    @torch.no_grad()
    def _load(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in self._present(module):
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                self._masters[parameter].copy_(value)

    def _stash_state(self, _: Optimizer, state: dict[str, Any]) -> None:
        self._stashed = state

    def _restore_state(self, optimizer: Optimizer) -> None:
        """Put back the fp32 state that ``Optimizer.load_state_dict`` rounded to the parameters' dtype."""
        saved, self._stashed = self._stashed, {}
        order = [index for group in saved["param_groups"] for index in group["params"]]
        for index, parameter in zip(order, parameters_of(optimizer), strict=True):
            if parameter not in self._masters:
                continue
            for key, value in saved["state"].get(index, {}).items():
                old = optimizer.state[parameter].get(key)
                if isinstance(value, Tensor) and isinstance(old, Tensor) and old.dtype in _LOW:
                    wide = torch.float32 if value.dtype in _LOW else value.dtype
                    optimizer.state[parameter][key] = value.to(old.device, wide, copy=True)


class _Hook:
    """A method as a hook that pickles with its module, and then does nothing: masters are not pickled."""

    def __init__(self, masters: MasterWeights | None, method: str) -> None:
        self._masters = masters
        self._method = method

    def __call__(self, *arguments: Any) -> None:
        if self._masters is not None:
            getattr(self._masters, self._method)(*arguments)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_masters": None}


def _accumulate_in_fp32(parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    parameter.grad_dtype = torch.float32
    if gradient is not None:
        parameter.grad = gradient.float()


def _widen_state(state: dict[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dtype in _LOW:
            state[key] = value.float()
