"""Tensors to flat buffers and back, in chunks that stay in a core's cache.

A `Layout` places named tensors one after another in flat buffers, one buffer per
dtype and device, and cuts the buffers into chunks. Whatever is computed on a round
is computed chunk by chunk: read once, written once, and no tensor is too large, too
small or too oddly shaped to be in one. Of a sharded tensor, this rank's part is.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lowcomm.sync.fingerprint import number_of
from lowcomm.sync.shard import Sharding, Shards, is_sharded, local_of

#: Values in a chunk: what stays in a core's cache from one operation to the next, and
#: on an accelerator what makes a launch worth its time. Multiples of every vector
#: width: kernels give other bits for the values behind the last whole vector, so a
#: bound in between would make results depend on how they were cut.
_CHUNK_VALUES = {"cpu": 1 << 18}
_CHUNK_VALUES_ACCELERATOR = 1 << 24

#: Smaller buffers are not worth pages of their own.
_HUGE_BYTES = 8 << 20

#: So many calls on pieces of a chunk cost less than one more pass over it.
_FEW = 8


class Chunk(NamedTuple):
    """A range of one flat buffer, and the ranges of tensors that it holds."""

    number: int
    flat: int
    start: int
    stop: int
    pieces: tuple[tuple[int, int, int], ...]  # (run, start, stop)


class Spec(NamedTuple):
    """What a tensor must remain while it has a place in a layout."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


class Verdict(NamedTuple):
    """What the ranks of a worker have found of its share.

    Args:
        finite: whether all of it is.
        norm: its Euclidean length, if that was asked for; else 0.
    """

    finite: bool
    norm: float


def runs_of(tensor: Tensor) -> list[Tensor]:
    """The tensor's memory as one-dimensional views, in an order fixed by its strides.

    One run for a dense tensor of any memory format, several for one with gaps.

    >>> [len(run) for run in runs_of(torch.zeros(2, 3).t())]
    [6]
    >>> [len(run) for run in runs_of(torch.zeros(2, 3)[:, :2])]
    [2, 2]
    """
    if tensor.numel() == 0:
        return []
    if tensor.is_complex():
        return runs_of(torch.view_as_real(tensor))
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    ordered = tensor.permute(by_stride)
    if ordered.is_contiguous():
        return [ordered.view(-1)]
    return [run for row in tensor.unbind(0) for run in runs_of(row)]


def outer_dtype(dtype: torch.dtype) -> torch.dtype:
    """The real dtype in which outer state is kept and shares are summed.

    fp32 for narrower values: in bf16 one thousandth of the weight rounds to nothing.
    """
    real = dtype.to_real()
    return real if real.itemsize >= 4 or not real.is_floating_point else torch.float32


def check_device(name: str, device: object) -> torch.device | None:
    """Returns the device that an argument means, raises in its name if none."""
    if device is None:
        return None
    try:
        return torch.device(device)  # type: ignore[call-overload, no-any-return]
    except (RuntimeError, TypeError):
        raise ValueError(f"{name} must be a device or None, got {device!r}.") from None


def split_by_bytes(tensors: Mapping[str, Tensor], count: int) -> list[list[str]]:
    """Names in order, in `count` runs about as equal as whole tensors allow.

    >>> sizes = {"a": 10, "b": 2, "c": 7, "d": 1}
    >>> split_by_bytes({name: torch.zeros(n) for name, n in sizes.items()}, 2)
    [['a'], ['b', 'c', 'd']]
    """
    if not 1 <= count <= len(tensors):
        raise ValueError(
            "fragments must be at least 1 and at most the number of trainable tensors, "
            f"got fragments={count} with {len(tensors)}."
        )
    names = list(tensors)
    left = sum(tensor.nbytes for tensor in tensors.values())
    parts: list[list[str]] = []
    for remaining in range(count, 0, -1):
        part: list[str] = []
        size, goal = 0, left / remaining
        # A tensor more as long as it brings the part nearer to its goal.
        while len(names) >= remaining and (
            not part or remaining == 1 or size + tensors[names[0]].nbytes / 2 <= goal
        ):
            part.append(name := names.pop(0))
            size += tensors[name].nbytes
            if not names:
                break
        parts.append(part)
        left -= size
    return parts


def split(
    tensors: Mapping[str, Tensor], fragments: int | Sequence[Sequence[Tensor]]
) -> list[list[str]]:
    """The tensors' names in fragments: so many, or as they were listed.

    A tensor that is listed twice, such as a tied weight, belongs to the first list.
    Tensors that are not among `tensors`, such as frozen ones, are passed over.
    """
    if isinstance(fragments, int):
        return split_by_bytes(tensors, fragments)
    names = {id(tensor): name for name, tensor in tensors.items()}
    parts = [
        [names.pop(id(tensor)) for tensor in part if id(tensor) in names]
        for part in fragments
    ]
    if names:
        raise ValueError(
            "fragments must hold every trainable parameter, got lists without "
            f"{', '.join(sorted(names.values()))}."
        )
    return [part for part in parts if part]


class Flats:
    """One flat tensor per dtype and device of a layout, addressed by chunk."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._views: dict[int, Tensor] = {}
        self._pieces: dict[int, Sequence[Tensor]] = {}

    def __getitem__(self, chunk: Chunk) -> Tensor:
        # A slice costs as much as copying four thousand values.
        view = self._views.get(chunk.number)
        if view is None:
            view = self._views[chunk.number] = self._slice(chunk)
        return view

    def pieces(self, chunk: Chunk, sizes: list[int]) -> Sequence[Tensor]:
        """A chunk in pieces, made once: for buffers that are kept."""
        pieces = self._pieces.get(chunk.number)
        if pieces is None:
            pieces = torch.split_with_sizes(self[chunk], sizes)
            self._pieces[chunk.number] = pieces
        return pieces

    def _slice(self, chunk: Chunk) -> Tensor:
        return self.tensors[chunk.flat][chunk.start : chunk.stop]


class _Scratch(Flats):
    """The same memory for every chunk of a buffer: it stays in the cache."""

    def _slice(self, chunk: Chunk) -> Tensor:
        return self.tensors[chunk.flat][: chunk.stop - chunk.start]


#: A buffer's dtype and device, and on how many ranks of a worker its values lie.
_Key: TypeAlias = tuple[torch.dtype, torch.device, int]


class Layout:
    """Where each tensor lies in the flat buffers.

    Args:
        tensors: by name, in the order in which they are placed.
        widen: buffers have the outer dtype of their tensors; else the tensors' own.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, widen: bool = True) -> None:
        self._widen = widen
        self._take_sources(tensors)
        self._shardings = {name: Sharding.of(t) for name, t in tensors.items()}
        self._shards = Shards(s for s in self._shardings.values() if s is not None)
        parts = dict(zip(tensors, self._parts(), strict=True))
        self.specs = {name: Spec.of(part) for name, part in parts.items()}
        self._pointers: list[int] = []
        self._places: dict[str, list[tuple[int, int, int]]] = {}
        #: the tensor that each run belongs to
        self.run_names: list[str] = []

        sizes: dict[_Key, int] = {}
        members: dict[_Key, list[tuple[int, int]]] = {}
        for name, part in parts.items():
            copies = self._shards.copies_of(self._shardings[name])
            key = (self._dtype(part.dtype), part.device, copies)
            for run in runs_of(part.detach()):
                start = sizes.get(key, 0)
                members.setdefault(key, []).append((len(self.run_names), len(run)))
                sizes[key] = start + len(run)
                flat = list(sizes).index(key)
                self._places.setdefault(name, []).append((flat, start, sizes[key]))
                self.run_names.append(name)
        self._shapes = [(size, *key) for key, size in sizes.items()]
        self.chunks: list[Chunk] = []
        for flat, key in enumerate(sizes):
            values = chunk_values(key[1])
            self.chunks += _cut(flat, members[key], values, first=len(self.chunks))
        self._sizes = [
            [stop - start for _, start, stop in chunk.pieces] for chunk in self.chunks
        ]
        self._views: list[list[Tensor]] = []

    def scatter_kept_(self, chunk: Chunk, flats: Flats) -> None:
        """As `scatter_` of `flats[chunk]`, of buffers that are kept."""
        views = self._views[chunk.number]
        if len(views) == 1 or flats[chunk].device != views[0].device:
            self.scatter_(chunk, flats[chunk])
        else:
            pieces = flats.pieces(chunk, self._sizes[chunk.number])
            torch._foreach_copy_(views, list(pieces))

    def _take_sources(self, tensors: Mapping[str, Tensor]) -> None:
        self._sources = list(tensors.values())
        self._is_sharded = any(is_sharded(tensor) for tensor in self._sources)

    def _parts(self) -> list[Tensor]:
        """The tensors as far as they are on this rank."""
        if not self._is_sharded:
            return self._sources
        return [local_of(tensor) for tensor in self._sources]

    @functools.cached_property
    def fingerprint(self) -> int:
        """A number for the tensors, their kinds and their order."""
        # Without the device's number: two workers may share a machine.
        lines = [(n, *s[:3], s.device.type) for n, s in self.specs.items()]
        cuts = [s and s.spell() for s in self._shardings.values()]
        return number_of(f"{lines} {cuts}")

    @property
    def num_bytes(self) -> int:
        """Size of the tensors, of sharded ones in all, in the buffers' dtypes."""
        total = 0
        for name, spec in self.specs.items():
            sharding = self._shardings[name]
            shape = spec.shape if sharding is None else sharding.shape
            total += math.prod(shape) * self._like_dtype(spec.dtype).itemsize
        return total

    def judge(
        self, finite: bool, squares: Iterable[tuple[Chunk, float]] = ()
    ) -> Verdict:
        """What all ranks of a worker find of its share. All of them must call it.

        Args:
            finite: whether this rank's part is.
            squares: the part's sums of squares, by chunk, if its length is wanted.
        """
        square = sum(value / self._shapes[chunk.flat][3] for chunk, value in squares)
        num_bad, square = self._shards.add_up([float(not finite), square])
        return Verdict(not num_bad, math.sqrt(square))

    def device_of(self, chunk: Chunk) -> torch.device:
        """Where the chunk's tensors live."""
        return self._shapes[chunk.flat][2]

    @torch.inference_mode(False)  # other threads write to it
    def new(self, device: torch.device | None = None) -> Flats:
        """Flat buffers of zeros, on another device than their tensors' if given."""
        flats = self.empty(device)
        for flat in flats.tensors:
            flat.zero_()
        return flats

    @torch.inference_mode(False)  # other threads write to it
    def empty(self, device: torch.device | None = None) -> Flats:
        """Flat buffers of anything, on another device than their tensors' if given."""
        return Flats(
            [_empty(n, dtype, device or own) for n, dtype, own, _ in self._shapes]
        )

    @torch.inference_mode(False)  # other threads write to it
    def scratch(self) -> Flats:
        """Room for one chunk at a time."""
        return _Scratch(
            [
                torch.empty(min(n, chunk_values(dev)), dtype=dtype, device=dev)
                for n, dtype, dev, _ in self._shapes
            ]
        )

    def extended(self, tensors: Mapping[str, Tensor]) -> Layout:
        """A layout of these and further tensors, behind them."""
        mine = dict(zip(self.specs, self._sources, strict=True))
        return Layout({**mine, **tensors}, widen=self._widen)

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes other tensors of the same kind for the same places."""
        self._take_sources({name: tensors[name] for name in self.specs})

    def refresh(self) -> None:
        """Follows tensors whose memory was replaced since the last call.

        Raises:
            ValueError: if a tensor is no longer of the kind that was laid out.
        """
        parts = self._parts()
        pointers = [part.data_ptr() for part in parts]
        if pointers == self._pointers and self._views:
            return
        for (name, spec), tensor in zip(self.specs.items(), parts, strict=True):
            if (now := Spec.of(tensor)) != spec:
                raise ValueError(
                    f"{name!r} must stay what it was when the optimizer was built, "
                    f"got {now} instead of {spec}. Build the optimizer again."
                )
        runs = [run for part in parts for run in runs_of(part.detach())]
        self._views = [
            [runs[run][start:stop] for run, start, stop in chunk.pieces]
            for chunk in self.chunks
        ]
        self._pointers = pointers

    def gather_(self, chunk: Chunk, out: Tensor) -> Tensor:
        """Copies the chunk's tensor values into `out`, which is updated."""
        views = self._views[chunk.number]
        if len(views) == 1:
            return out.copy_(views[0])
        if out.device != views[0].device:
            return out.copy_(torch.cat(views))
        return torch.cat(views, out=out)

    def subtract_from_(self, chunk: Chunk, minuend: Tensor, out: Tensor) -> None:
        """Writes `minuend` minus the chunk's tensor values into `out`."""
        views = self._views[chunk.number]
        minuend = minuend.to(out.device)
        if len(views) <= _FEW:  # one pass less; many small calls would cost more
            sizes = self._sizes[chunk.number]
            for view, left, difference in zip(
                views,
                torch.split_with_sizes(minuend, sizes),
                torch.split_with_sizes(out, sizes),
                strict=True,
            ):
                torch.sub(left, view, out=difference)
        else:
            torch.sub(minuend, self.gather_(chunk, out), out=out)

    def scatter_(self, chunk: Chunk, values: Tensor) -> None:
        """Copies `values` into the chunk's tensors, which are updated."""
        views = self._views[chunk.number]
        if len(views) == 1:
            views[0].copy_(values)
        else:
            values = values.to(views[0].device)
            sizes = self._sizes[chunk.number]
            torch._foreach_copy_(views, torch.split_with_sizes(values, sizes))

    def is_finite(self) -> bool:
        """Whether the tensors hold no inf and no NaN, on all ranks of the worker."""
        return self.judge(self._is_finite()).finite

    def _is_finite(self) -> bool:
        scratch, sums = self.scratch(), []
        for chunk in self.chunks:
            views = self._views[chunk.number]
            if not views[0].is_floating_point():
                continue
            if len(views) > _FEW:
                views = [self.gather_(chunk, scratch[chunk])]
            sums += [view.sum() for view in views]
        # A sum hides neither and reads memory once; over finite values it may overflow.
        if all(math.isfinite(total) for total in map(float, sums)):
            return True
        return all(
            bool(self.gather_(chunk, scratch[chunk]).isfinite().all())
            for chunk in self.chunks
        )

    def gather_all_(self, flats: Flats) -> Flats:
        """Copies all tensors' values as they are now into `flats`, which is updated."""
        self.refresh()
        for chunk in self.chunks:
            self.gather_(chunk, flats[chunk])
        return flats

    def scatter_all_(self, flats: Flats) -> None:
        """Copies `flats` into all tensors, which are updated."""
        self.refresh()
        for chunk in self.chunks:
            self.scatter_(chunk, flats[chunk])

    def read(self, flats: Flats) -> dict[str, Tensor]:
        """Copies of the buffers' values by name, shaped and sharded as the tensors."""
        result = {}
        for name, spec in self.specs.items():
            tensor = self._like(spec)
            places = self._places.get(name, [])
            for run, (flat, start, stop) in zip(runs_of(tensor), places, strict=True):
                run.copy_(flats.tensors[flat][start:stop])
            sharding = self._shardings[name]
            result[name] = tensor if sharding is None else sharding.join(tensor)
        return result

    def write_(self, flats: Flats, tensors: Mapping[str, Tensor]) -> None:
        """Copies tensors into their places in the buffers, which are updated.

        Args:
            flats: the buffers.
            tensors: by name; for a sharded one the whole, or one that lies alike.
        """
        for name, spec in self.specs.items():
            if name not in tensors:
                continue
            sharding, given = self._shardings[name], tensors[name]
            shape = spec.shape if sharding is None else sharding.shape
            if tuple(given.shape) != shape:
                raise ValueError(
                    f"{name!r} must have the shape that it has in the model, got "
                    f"{tuple(given.shape)} with {shape}."
                )
            if sharding is not None:
                given = sharding.cut(name, given)
            tensor = self._like(spec).copy_(given)
            places = self._places.get(name, [])
            for run, (flat, start, stop) in zip(runs_of(tensor), places, strict=True):
                flats.tensors[flat][start:stop].copy_(run)

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return outer_dtype(dtype) if self._widen else dtype.to_real()

    def _like(self, spec: Spec) -> Tensor:
        """An empty tensor of the spec's shape and strides, in the buffers' dtype."""
        return torch.empty_strided(
            spec.shape,
            spec.stride,
            dtype=self._like_dtype(spec.dtype),
            device=spec.device,
        )

    def _like_dtype(self, dtype: torch.dtype) -> torch.dtype:
        wide = self._dtype(dtype)
        return wide.to_complex() if dtype.is_complex else wide


def _empty(num_values: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for so many values, in huge pages where the system has them.

    A buffer for one round is new memory: in pages of 4 kB the system takes six times as
    long to provide it as a copy takes to fill it.
    """
    size = num_values * dtype.itemsize
    if device.type != "cpu" or size < _HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_values, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Not where the kernel is built without them.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def chunk_values(device: torch.device) -> int:
    """How many values a whole chunk has on a device."""
    return _CHUNK_VALUES.get(device.type, _CHUNK_VALUES_ACCELERATOR)


def _cut(
    flat: int, runs: list[tuple[int, int]], values: int, *, first: int
) -> Iterator[Chunk]:
    """Cuts one buffer, given its (run, length) in order, into chunks."""
    pieces: list[tuple[int, int, int]] = []
    start = filled = 0
    index = first
    for run, length in runs:
        done = 0
        while done < length:
            take = min(length - done, values - filled)
            pieces.append((run, done, done + take))
            done += take
            filled += take
            if filled == values:
                yield Chunk(index, flat, start, start + filled, tuple(pieces))
                pieces, start, filled, index = [], start + filled, 0, index + 1
    if filled:
        yield Chunk(index, flat, start, start + filled, tuple(pieces))
