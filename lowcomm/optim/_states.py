"""The inner optimizer's state tensors, by name, made in time."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lowcomm.sync.coded import is_coded, parts_of
from lowcomm.sync.shard import local_of

#: Where a parameter group says by how much a state decays in a step.
_DECAYS: dict[str, tuple[tuple[str, int | None], ...]] = {
    "exp_avg": (("betas", 0),),
    "exp_avg_sq": (("betas", 1),),
    "momentum_buffer": (("momentum", None),),
    "square_avg": (("alpha", None), ("rho", None)),
    "grad_avg": (("alpha", None),),
    "acc_delta": (("rho", None),),
}
#: Sums of squares, which do not decay at all.
_SUMS = {"sum"}
_SECOND_MOMENTS = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum"}


def is_first_moment(state_name: str) -> bool:
    """Whether the state is an average of gradients."""
    return _several(state_name)[0] in {"exp_avg", "momentum_buffer"}


def is_second_moment(state_name: str) -> bool:
    """Whether the state is an average of squares, so that it is never negative."""
    return state_name in _SECOND_MOMENTS


def _several(state_name: str) -> tuple[str, int | None]:
    """The kind and number of one of several states, as in `exp_avg_1`."""
    kind, _, number = state_name.rpartition("_")
    return (kind, int(number)) if number.isdecimal() else (state_name, None)


class States:
    """Finds the state tensors that belong to parameters, also before they exist.

    Args:
        inners: the inner optimizers.
    """

    def __init__(self, inners: Sequence[Optimizer]) -> None:
        self._inners = inners

    def names(self, params: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Examples of the parameters' state tensors: state name -> parameter name.

        Only tensors that have the parameter's shape count, so no step counters.

        Raises:
            ValueError: if the inner optimizer does not show its states in a step with
                gradients of zero.
        """
        owners = self._owners()
        examples: dict[Any, dict[str, Any]] = {}
        found: dict[str, dict[str, Tensor]] = {}
        for name, param in params.items():
            inner, group = owners[id(param)]
            kind = (id(group), param.dim(), param.dtype, param.device)
            if kind not in examples:
                examples[kind] = _example(inner, group, _tiny(param))
            for state_name, value in examples[kind].items():
                if _belongs(value, _trial_shape(param)):
                    _check_values(inner, state_name, value)
                    found.setdefault(state_name, {})[name] = torch.empty_like(
                        param.detach(), dtype=value.dtype
                    )
        return found

    def tensors(
        self, state_name: str, params: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The state tensors as they are now; zeros where there were none.

        An optimizer takes a parameter with any state for one that it has seen before,
        so whatever else belongs to its state is made too. The step counter is its
        neighbours': a first step's bias correction would blow up an average over many.
        """
        owners = self._owners()
        result = {}
        for name, param in params.items():
            inner, group = owners[id(param)]
            state = inner.state[param]
            if not isinstance(state.get(state_name), Tensor):
                trial = _tiny(param)
                for key, value in _example(inner, group, trial).items():
                    if state.get(key) is None:
                        neighbour = _step_of(inner, group, key)
                        state[key] = _like_new(value, trial, param, neighbour)
            value = result[name] = inner.state[param][state_name]
            _check_values(inner, state_name, local_of(value))
        return result

    def fresh(self, param: Tensor) -> dict[str, Any]:
        """The state that a parameter has before its first step, as zeros."""
        inner, group = self._owners()[id(param)]
        # Of its own size, as there may be sums over rows and columns too.
        trial = torch.zeros_like(param.detach())
        return {
            key: _like_new(value, trial, param, None)
            for key, value in _example(inner, group, trial).items()
        }

    def decays(
        self, state_name: str, params: Mapping[str, Tensor]
    ) -> dict[str, float | None]:
        """The factor by which a parameter's state decays in a step; None if unknown."""
        owners = self._owners()
        return {
            name: _decay(state_name, owners[id(param)][1])
            for name, param in params.items()
        }

    def heal_(self) -> None:
        """Sets state values that are not finite to zero."""
        for inner in self._inners:
            for state in inner.state.values():
                for value in state.values() if isinstance(state, dict) else ():
                    for part in parts_of(value) if isinstance(value, Tensor) else ():
                        if part.is_floating_point():
                            torch.nan_to_num_(part, nan=0.0, posinf=0.0, neginf=0.0)

    def _owners(self) -> dict[int, tuple[Optimizer, dict[str, Any]]]:
        return {
            id(param): (inner, group)
            for inner in self._inners
            for group in inner.param_groups
            for param in group["params"]
        }


def _tiny(param: Tensor) -> Tensor:
    """A tiny parameter of the same kind."""
    return torch.zeros(_trial_shape(param), dtype=param.dtype, device=param.device)


def _example(inner: Optimizer, group: dict[str, Any], trial: Tensor) -> dict[str, Any]:
    """The state that a first step with a zero gradient leaves behind.

    Taken by a copy of the optimizer, on `trial`, which is updated.
    """
    trial.requires_grad_().grad = torch.zeros_like(trial)
    clone = object.__new__(type(inner))
    clone.__dict__.update(inner.__dict__)
    clone.__dict__.pop("step", None)  # a scheduler's, bound to the original
    clone.state = type(inner.state)(dict)
    clone.param_groups = [{**group, "params": [trial]}]
    for hooks in [key for key in clone.__dict__ if key.endswith("_hooks")]:
        clone.__dict__[hooks] = OrderedDict()
    try:
        clone.step()
    except Exception as error:
        raise ValueError(
            f"states of {type(inner).__name__} must come of a step with gradients of "
            f"zero, got {error!r}. Average parameters only, and save with state_dict() "
            "in place of portable()."
        ) from error
    return dict(clone.state[trial])


def _decay(state_name: str, group: Mapping[str, Any]) -> float | None:
    if state_name in _SUMS:
        return 1.0
    kind, number = _several(state_name)
    for key, index in _DECAYS.get(kind, ()):
        value = group.get(key)
        if value is not None and index is not None:
            value = value[index]
        if value is not None and number is not None:
            value = value[number]
        if value is not None:
            return float(value)
    return None


def _trial_shape(param: Tensor) -> tuple[int, ...]:
    # Unequal sides, so that row and column statistics are told from whole tensors.
    return tuple(2 + i for i in range(max(param.dim(), 1)))


def _belongs(value: Any, shape: tuple[int, ...]) -> bool:
    return (
        isinstance(value, Tensor)
        and tuple(value.shape) == shape
        and (value.is_floating_point() or value.is_complex())
    )


def _check_values(inner: Optimizer, state_name: str, value: Tensor) -> None:
    """Raises if a state has codes of its values, of which there is no mean."""
    if not is_coded(value) and (value.is_floating_point() or value.is_complex()):
        return
    raise ValueError(
        f"states of {type(inner).__name__} must be floating-point tensors to be "
        f"averaged, got {state_name!r} as {type(value).__name__} of {value.dtype}. "
        "Average parameters only."
    )


def _step_of(inner: Optimizer, group: dict[str, Any], key: str) -> Any:
    """What another parameter of the group has under `key`, None if none has it."""
    params: Iterable[Tensor] = group["params"]
    for param in params:
        if param in inner.state and key in inner.state[param]:
            return inner.state[param][key]
    return None


def _like_new(value: Any, trial: Tensor, param: Tensor, neighbour: Any) -> Any:
    """The value of a state before the first step, given that of an example."""
    if _belongs(value, tuple(trial.shape)):
        part = local_of(value).flatten()
        first = part[0].item() if len(part) else 0  # a step size does not begin at zero
        return torch.full_like(param.detach(), first, dtype=value.dtype)
    if neighbour is not None:
        return copy.deepcopy(neighbour)
    return torch.zeros_like(value) if isinstance(value, Tensor) else value
