"""The inner optimizer, or several that are stepped as one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, MutableMapping
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lowcomm.sync.coded import is_coded, rebuilt
from lowcomm.sync.shard import Sharding


class JoinedState(MutableMapping[Tensor, Any]):
    """The states of several optimizers, each parameter's in its own optimizer."""

    def __init__(self, inners: tuple[Optimizer, ...]) -> None:
        self._inners = inners

    def _home(self, param: Tensor) -> dict[Tensor, Any]:
        for inner in self._inners:
            if any(param is p for g in inner.param_groups for p in g["params"]):
                return inner.state
        raise KeyError(param)

    def __getitem__(self, param: Tensor) -> Any:
        return self._home(param)[param]

    def __setitem__(self, param: Tensor, value: Any) -> None:
        self._home(param)[param] = value

    def __delitem__(self, param: Tensor) -> None:
        del self._home(param)[param]

    def __contains__(self, param: object) -> bool:
        return any(param in inner.state for inner in self._inners)

    def __iter__(self) -> Iterator[Tensor]:
        return chain.from_iterable(inner.state for inner in self._inners)

    def __len__(self) -> int:
        return sum(len(inner.state) for inner in self._inners)


def build_inner(
    params: Any,
    keywords: dict[str, Any],
    inner: type[Optimizer],
    wrapper: type[Optimizer],
    outermost: type[Optimizer],
) -> Optimizer | tuple[Optimizer, ...]:
    """The inner optimizer that a wrapper's first argument and keywords stand for.

    Args:
        params: parameters, an optimizer or several.
        keywords: for the inner optimizer's constructor.
        inner: what is built over parameters.
        wrapper: named in errors.
        outermost: what an inner optimizer must not be.
    """
    method = wrapper.__name__
    given = params if isinstance(params, (list, tuple)) else [params]
    if any(isinstance(item, Optimizer) for item in given):
        for item in given:
            if not isinstance(item, Optimizer) or isinstance(item, outermost):
                raise TypeError(
                    "params must be parameters, an optimizer or a list of optimizers, "
                    f"got {type(item).__name__} among them."
                )
        if keywords:
            raise TypeError(
                f"{method}() got {', '.join(sorted(keywords))} beside a built "
                "optimizer. Give them to that optimizer."
            )
        owners = [
            id(p) for o in given for g in o.param_groups for p in set(g["params"])
        ]
        if len(owners) != len(set(owners)):
            raise ValueError(
                "params must be disjoint, got a parameter in two optimizers."
            )
        return tuple(given) if isinstance(params, (list, tuple)) else given[0]
    known = inspect.signature(inner).parameters
    for keyword in keywords:
        if keyword not in known:
            raise TypeError(
                f"{method}() got an unexpected keyword argument {keyword!r}: neither "
                f"{method} nor {inner.__name__} has it."
            )
    return inner(params, **keywords)


def unscale_(inner: Optimizer, scale: Tensor) -> None:
    """Divides gradients by the loss scale, as `GradScaler.unscale_` does."""
    inverse = scale.double().reciprocal().float()
    for group in inner.param_groups:
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                param.grad = param.grad.coalesce()
                param.grad._values().mul_(inverse.to(param.grad.device))
            else:
                param.grad.mul_(inverse.to(param.grad.device))


def like_parameter(name: str, value: Tensor, param: Tensor) -> Tensor:
    """A state tensor sharded as its parameter is, if it has its shape."""
    sharding = Sharding.of(param)
    if sharding is None or tuple(value.shape) != sharding.shape:
        return value
    return sharding.join(sharding.cut(name, value))


def _copied(value: Any) -> Any:
    """A copy of nested state; tensors that are made of others need not know how."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if not isinstance(value, Tensor) or not is_coded(value):
        return copy.deepcopy(value)
    return rebuilt(value, _copied)


def load_inner_(
    inner: Optimizer, state: dict[Any, Any], param_groups: list[dict[str, Any]]
) -> None:
    """Loads copies, and keeps dtypes: torch casts state to that of the parameter."""
    saved = _copied(state)
    params = [param for group in inner.param_groups for param in group["params"]]
    for index, values in saved.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, Tensor):
                values[key] = like_parameter(key, value, params[index])
    inner.load_state_dict({"state": saved, "param_groups": param_groups})
    for index, values in saved.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            # What it saves under one key it may keep under others.
            loaded = inner.state[params[index]].get(key)
            if (
                isinstance(value, Tensor)
                and isinstance(loaded, Tensor)
                and loaded.dtype != value.dtype
            ):
                inner.state[params[index]][key] = value.to(loaded.device)
