"""Tensors that are made of others, as of codes and their scales.

A library may have taught its own no more than its optimizer asks of them: neither to be
copied nor to be filled. What they are made of is plain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowcomm.sync.shard import local_of


def is_coded(tensor: Tensor) -> bool:
    """Whether a tensor is made of others: codes and scales of an 8-bit one.

    A sharded one is not: what it is made of has a mesh too, and torch can copy it.
    """
    return is_traceable_wrapper_subclass(tensor) and local_of(tensor) is tensor


def is_loaded_safely(tensor: Tensor) -> bool:
    """Whether `torch.load` makes one of its kind, with its safe defaults."""
    known = torch.serialization.get_safe_globals()
    kinds = [one[0] if isinstance(one, tuple) else one for one in known]
    return type(tensor) in kinds


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor is made of, of a sharded one this rank's."""
    tensor = local_of(tensor)
    if not is_coded(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = [getattr(tensor, name) for name in names]
    return [p for part in parts if isinstance(part, Tensor) for p in parts_of(part)]


def rebuilt(tensor: Tensor, of: Callable[[Any], Any]) -> Tensor:
    """One of the same kind, made of what `of` makes of its parts."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: of(getattr(tensor, name)) for name in names}
    whole: Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
        parts, context, tensor.shape, tensor.stride()
    )
    return whole
