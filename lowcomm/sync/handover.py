"""A worker's state from one worker to another: a description in JSON, and raw bytes.

Nothing is unpickled: what comes from another worker is read as numbers and plain types.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowcomm.sync.mean import DEPTH, Wire
from lowcomm.sync.seam import Exchange, Handle

_DTYPES = {
    str(dtype): dtype
    for name in dir(torch)
    if isinstance(dtype := getattr(torch, name), torch.dtype)
}


def give(
    wire: Wire,
    peer: int,
    state: Any,
    bucket_bytes: int,
    note: Callable[[], None] = lambda: None,
) -> Exchange:
    """Sends a state to a member.

    Args:
        wire: the exchange's messages.
        peer: the member.
        state: tensors and plain types in dictionaries, lists and tuples.
        bucket_bytes: largest message.
        note: called when some of it has left.

    Raises:
        TypeError: at once, if there is anything else in the state.
    """
    return _give(wire, peer, *describe(state), bucket_bytes, note)


def _give(
    wire: Wire,
    peer: int,
    text: bytes,
    tensors: Sequence[Tensor],
    bucket_bytes: int,
    note: Callable[[], None],
) -> Exchange:
    data = _as_bytes(tensors)
    # The taker's messages may have another size, be it by mistake: a backend that gets
    # a message of another length than it expects ends the process.
    sizes = torch.tensor([len(text), len(data), bucket_bytes])
    yield wire.send(peer, sizes, wire.tag(0, 0))
    under_way: list[Handle] = []
    for flat, tag in ((_of_text(text), wire.tag(0, 1)), (data, wire.tag(1, 0))):
        for part in _parts(flat, bucket_bytes):
            under_way.append(wire.send(peer, part, tag))
            if len(under_way) == DEPTH:
                yield under_way.pop(0)
                note()
    yield from under_way


def take(wire: Wire, peer: int) -> Generator[Handle, None, Any]:
    """Receives what a member gives; tensors lie on the CPU."""
    sizes = torch.empty(3, dtype=torch.int64)
    yield wire.recv(peer, sizes, wire.tag(0, 0))
    *lengths, bucket_bytes = map(int, sizes)
    text, data = (torch.empty(length, dtype=torch.uint8) for length in lengths)
    for flat, tag in ((text, wire.tag(0, 1)), (data, wire.tag(1, 0))):
        for part in _parts(flat, bucket_bytes):
            yield wire.recv(peer, part, tag)
    return rebuild(text.numpy().tobytes(), data)


def describe(state: Any) -> tuple[bytes, list[Tensor]]:
    """A state's form, and the tensors in it in the order of the form.

    >>> text, tensors = describe({"state": {0: {"step": torch.ones(2)}}, "lr": 0.5})
    >>> len(tensors)
    1
    >>> rebuild(text, torch.ones(2).view(torch.uint8))
    {'state': {0: {'step': tensor([1., 1.])}}, 'lr': 0.5}
    """
    tensors: list[Tensor] = []

    def form(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value.detach())
            return {"tensor": [str(value.dtype), list(value.shape)]}
        if isinstance(value, Mapping):
            return {"dict": [[form(key), form(item)] for key, item in value.items()]}
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [form(item) for item in value]}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TypeError(
            "a state must consist of tensors and plain types to be given to another "
            f"worker, got a {type(value).__name__}."
        )

    return json.dumps(form(state)).encode(), tensors


def rebuild(text: bytes, data: Tensor) -> Any:
    """The state of that form."""
    parts = _Reader(data)

    def value(form: Any) -> Any:
        if not isinstance(form, dict):
            return form
        ((kind, content),) = form.items()
        match kind:
            case "tensor":
                dtype, shape = content
                return parts.next(_DTYPES[dtype], shape)
            case "dict":
                return {value(key): value(item) for key, item in content}
            case "list":
                return [value(item) for item in content]
            case "tuple":
                return tuple(value(item) for item in content)
        raise ValueError(f"a state's form must be known, got {kind!r}.")

    return value(json.loads(text))


class _Reader:
    def __init__(self, data: Tensor) -> None:
        self._data = data
        self._at = 0

    def next(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        part = self._data[self._at : self._at + num_bytes]
        self._at += _padded(num_bytes)
        # A view would keep the whole message, for as long as any part of it is used.
        return part.clone().view(dtype).reshape(tuple(shape))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16  # so that each tensor is aligned


def _as_bytes(tensors: Sequence[Tensor]) -> Tensor:
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    ends = itertools.accumulate(map(_padded, sizes))
    data = torch.zeros(sum(map(_padded, sizes)), dtype=torch.uint8)
    for tensor, size, end in zip(tensors, sizes, ends, strict=True):
        start = end - _padded(size)
        # Bytes are seen as values, as not all strides let values be seen as bytes.
        room = data[start : start + size].view(tensor.dtype)
        room.copy_(tensor.reshape(-1))
    return data


def _parts(data: Tensor, size: int) -> Iterator[Tensor]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def _of_text(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
