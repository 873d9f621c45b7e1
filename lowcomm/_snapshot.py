"""States as they are at one moment: copies in host memory, and random generators.

An engine's state is known by its form, wherever it is in a state: it says which of its
tensors all workers agree on, so that these are written once.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lowcomm.sync.coded import is_coded, is_loaded_safely, rebuilt
from lowcomm.sync.rounds import RESIDUAL, without_debts
from lowcomm.sync.shard import is_sharded, local_of, pack

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_ALSO_LOADED = (torch.dtype, torch.device, torch.layout, torch.Size)


class Memory(NamedTuple):
    """Copies that a snapshot has made, in the order in which it came to the tensors."""

    buffers: list[Tensor]
    strides: list[tuple[int, ...]]  # of what they are copies of

    def at(self, number: int, like: Tensor) -> Tensor | None:
        """The buffer of that number, if it has room for a tensor and no more."""
        if number < len(self.buffers) and self.strides[number] == like.stride():
            buffer = self.buffers[number]
            if buffer.shape == like.shape and buffer.dtype == like.dtype:
                return buffer
        return None


class Snapshot:
    """States as they are now, in host memory that nobody else writes to.

    Args:
        states: tensors and plain types in dictionaries, lists and tuples. Of a sharded
            tensor this rank's part is copied, in a dictionary that says where it was.
        memory: of the snapshot before, which is written over where shapes agree.
        with_agreed: whether what all workers agree on is wanted too.

    Raises:
        TypeError: if there is anything else in the states.
    """

    def __init__(
        self, states: Mapping[str, Any], memory: Memory | None, *, with_agreed: bool
    ) -> None:
        #: what all workers agree on, under the keys that lead to it
        self.agreed: dict[Any, Any] = {}
        #: streams with a share under way, and with something owed to the next share
        self.shares: list[str] = []
        self.residuals: list[str] = []
        #: for the next snapshot
        self.memory = Memory([], [])
        self._before = memory or Memory([], [])
        self._with_agreed = with_agreed
        self._is_given = False  # whether the tensors below belong to nobody else
        self._place: list[Any] = []  # the keys that lead to the value below
        self._sources: list[Tensor] = []
        self._seen: dict[int, int] = {}  # by address, which source it is
        #: everything else
        self.own: dict[str, Any] = self._of(dict(states))
        self._events = _copy_(self.memory.buffers, self._sources)
        self._sources, self._seen, self._before = [], {}, self.memory

    def wait(self) -> None:
        """Returns when the copies may be read."""
        for event in self._events:
            event.synchronize()

    def _of(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if kind in _PLAIN or isinstance(value, _ALSO_LOADED):
            return value
        if isinstance(value, np.generic):
            return self._of(value.item())
        if kind in (list, tuple, set):
            return kind(self._at(i, item) for i, item in enumerate(value))
        if kind in (dict, OrderedDict, Counter):
            if is_sync(value):
                return self._sync(value)
            copy: Any = kind()
            for key, item in value.items():
                if type(key) not in _PLAIN:
                    key = self._at(key, key)
                copy[key] = self._at(key, item)
            if kind is OrderedDict:  # where a module has the versions of its parts
                for name, item in vars(value).items():
                    setattr(copy, name, self._at(name, item))
            return copy
        raise TypeError(
            "a state must consist of tensors and plain types, got a "
            f"{kind.__module__}.{kind.__qualname__} at {self._spell_place()}. Convert "
            "it in the part's state_dict, and back in its load_state_dict."
        )

    def _at(self, key: Any, value: Any) -> Any:
        self._place.append(key)
        copy = self._of(value)
        self._place.pop()
        return copy

    def _sync(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """An engine's state. It gives copies away, which need not be copied again."""
        was_given, self._is_given = self._is_given, True
        streams = {}
        for name, stream in value["streams"].items():
            own, agreed = dict(stream["tensors"]), {}
            if stream["agreed"]:
                agreed = {k: own.pop(k) for k in stream["tensors"] if k != RESIDUAL}
            if agreed and self._with_agreed:
                branch = self.agreed
                for key in (*self._place, "streams", name):
                    branch = branch.setdefault(key, {})
                branch["tensors"] = self._of(agreed)
            if RESIDUAL in own:
                self.residuals.append(name)
            streams[name] = {**stream, "tensors": own}
        self.shares += [pending["stream"] for pending in value["pending"]]
        rest = {**value, "streams": streams}
        copy = {key: self._at(key, item) for key, item in rest.items()}
        self._is_given = was_given
        return copy

    def _tensor(self, tensor: Tensor) -> Any:
        if is_sharded(tensor):
            return pack(tensor, self._tensor(local_of(tensor)))
        if is_coded(tensor):
            if not is_loaded_safely(tensor):  # or it could not be resumed from
                raise TypeError(
                    "tensors must be of kinds that torch.load knows, got a "
                    f"{type(tensor).__qualname__} at {self._spell_place()}. Call "
                    "torch.serialization.add_safe_globals with its class."
                )
            return rebuilt(tensor, self._of)
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
            kind = "meta tensor" if tensor.is_meta else type(tensor).__qualname__
            raise TypeError(
                f"tensors must be plain or sharded, and in memory, got a {kind} at "
                f"{self._spell_place()}. Convert it in the part's state_dict."
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor.detach().cpu().clone()
        is_elsewhere = tensor.device.type != "cpu"
        if self._is_given and not is_elsewhere:
            return tensor
        buffers, strides = self.memory
        number, stride = len(buffers), tensor.stride()
        same = self._seen.setdefault(tensor.data_ptr(), number)
        if same != number and _are_alike(self._sources[same], tensor):
            return buffers[same]  # tied weights are one tensor, also in the file
        buffer = self._before.at(number, tensor)
        if buffer is None or (is_elsewhere and not buffer.is_pinned()):
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=is_elsewhere)
        buffers.append(buffer)
        strides.append(stride)
        self._sources.append(tensor)
        return buffer

    def _spell_place(self) -> str:
        first, *keys = self._place
        return f"{first}" + "".join(f"[{key!r}]" for key in keys)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors at one address are the same."""

    def form(tensor: Tensor) -> tuple[Any, ...]:
        flags = tensor.is_conj(), tensor.is_neg()
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, flags

    return one.numel() > 0 and form(one) == form(other)


def _copy_(buffers: list[Tensor], sources: list[Tensor]) -> list[torch.Event]:
    """Copies to host memory; what was elsewhere has arrived with the events."""
    pairs = [*zip(buffers, sources, strict=True)]
    here = [pair for pair in pairs if pair[1].device.type == "cpu"]
    if here:
        torch._foreach_copy_([to for to, _ in here], [source for _, source in here])
    devices = set()
    for to, source in pairs if len(here) < len(pairs) else ():
        if source.device.type != "cpu":
            # Behind what has been queued, before what the next step queues.
            to.copy_(source, non_blocking=True)
            devices.add(source.device)
    return [torch.accelerator.current_stream(d).record_event() for d in devices]


# --- engines' states ------------------------------------------------------------------


def is_sync(value: Any) -> bool:
    """Whether it is an engine's state."""
    if not isinstance(value, dict) or "pending" not in value:
        return False
    streams = value.get("streams")
    return isinstance(streams, dict) and {True} == {
        isinstance(stream, dict) and {"agreed", "tensors"} <= stream.keys()
        for stream in streams.values()
    }


def has_sync(state: Any) -> bool:
    """Whether an engine's state is in it."""
    return any(True for _ in _syncs({"state": state}))


def _syncs(state: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """All engines' states in a state, each with the dictionary that it is in."""
    if isinstance(state, dict):
        for value in state.values():
            if is_sync(value):
                yield state, value
            else:
                yield from _syncs(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _syncs(value)


def merge_(own: Any, agreed: Mapping[Any, Any]) -> None:
    """Puts what all workers agree on back into a worker's own states, in place."""
    for key, value in agreed.items():
        if isinstance(own, dict) and key not in own:
            own[key] = value
        else:
            merge_(own[key], value)


def adapt_(state: Any, saved: int, num_workers: int, *, is_new: bool) -> None:
    """Makes the state of an optimizer fit another number of workers, in place.

    Args:
        state: of any part.
        saved: how many there were.
        num_workers: how many there are now.
        is_new: whether it is that of another worker.
    """
    for outside, sync in _syncs({"state": state}):
        sync |= without_debts(sync, keeps_residuals=not is_new)
        config = outside.get("config")
        if isinstance(config, dict) and config.get("workers") is not None:
            # Several processes may be one of the optimizer's workers.
            config["workers"] = config["workers"] * num_workers // saved


def digest_of(state: Any) -> str:
    """A text that is the same for equal states, and for no others."""
    digest = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}, ".encode())
            value = value if value.layout is torch.strided else value.to_dense()
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
        elif isinstance(value, dict):
            feed([*value.items()])
        elif isinstance(value, list | tuple):
            digest.update(f"{len(value)} of ".encode())
            for item in value:
                feed(item)
        else:
            digest.update(f"{value!r}, ".encode())

    feed(state)
    return digest.hexdigest()


# --- names ----------------------------------------------------------------------------

#: What torch.compile puts into the names of all that is in a module that it makes.
_COMPILED = "_orig_mod."


def inside(part: Any) -> Any:
    """What torch.compile or DistributedDataParallel was given; else the part itself."""
    while isinstance(part, nn.Module):
        if isinstance(part, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            part = part.module
        elif (original := part._modules.get("_orig_mod")) is not None:
            part = original
        else:
            break
    return part


def rename_(state: Any, part: nn.Module | torch.optim.Optimizer) -> None:
    """Gives what is in a part's state the names that it has in the part, in place.

    They differ where only one of two was compiled, in whole or in part.
    """
    if isinstance(part, nn.Module):
        names, own = _names_in_module(state), _names_in_module(part.state_dict())
    else:
        names = _names_in_groups(state["param_groups"])
        own = _names_in_groups(part.param_groups)
    if names == own or not any(_COMPILED in f"{name}." for name in (*names, *own)):
        return
    places = {_plain_name(name): name for name in own}

    def rename(name: str) -> str:
        return places.get(_plain_name(name), _plain_name(name))

    if isinstance(part, nn.Module):
        _rename_keys_(state, rename)
        _rename_keys_(getattr(state, "_metadata", {}), rename)
    else:
        _rename_in_optimizer_(state, rename)


def _plain_name(name: str) -> str:
    return f"{name}.".replace(_COMPILED, "")[:-1]


def _names_in_module(state: Any) -> list[str]:
    """Of tensors, and of the modules that are in it."""
    return [*state, *getattr(state, "_metadata", ())]


def _names_in_groups(groups: Any) -> list[str]:
    """Of an optimizer's parameters, if they were given with names."""
    return [name for group in groups for name in group.get("param_names", ())]


def _rename_keys_(named: dict[str, Any], rename: Callable[[str], str]) -> None:
    items = [*named.items()]
    named.clear()
    named.update((rename(name), value) for name, value in items)


def _rename_in_optimizer_(state: Any, rename: Callable[[str], str]) -> None:
    for group in state["param_groups"]:
        if "param_names" in group:
            group["param_names"] = [*map(rename, group["param_names"])]
    for _, sync in _syncs({"state": state}):
        for stream in sync["streams"].values():
            stream["names"] = [*map(rename, stream["names"])]
            for named in stream["tensors"].values():
                _rename_keys_(named, rename)
        for pending in sync["pending"]:
            _rename_keys_(pending["share"], rename)


# --- random generators ----------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """The generators' states as tensors and plain types."""
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, *rest = numpy_state
    state = {
        "torch": torch.get_rng_state(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "random": random.getstate(),
    }
    if (device := _accelerator()) is not None:
        module = torch.get_device_module(device)
        if getattr(module, "is_initialized", lambda: True)():  # or it is not in use
            state[device.type] = module.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Puts the generators back."""
    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["random"])
    device = _accelerator()
    if device is not None and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])


def seed_anew(state: Mapping[str, Any], rank: int) -> None:
    """Gives a worker generators of its own, made from another one's states."""
    digest = hashlib.sha256(state["torch"].numpy().tobytes() + str(rank).encode())
    seed = int.from_bytes(digest.digest()[:8]) >> 1
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _accelerator() -> torch.device | None:
    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_accelerator()
