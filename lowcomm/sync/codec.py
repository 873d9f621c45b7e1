"""Floats to bytes and back: fewer bytes on the wire, for a rounding error.

A codec is its settings and nothing else: what `encode` writes depends on the values
alone, not on how they are cut, on the device, the thread or an earlier call. Blocks of
`Codec.block` values are coded by themselves, so slices that begin at multiples of it
may be coded one by one. All numbers in a message are little-endian, as they lie in the
memory of x86, ARM and GPUs.

Codecs are for finite values. They do not look for others, and hide none either: each
class says what becomes of a NaN or an inf.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_FLOAT32_MAX = torch.finfo(torch.float32).max
_FLOAT32_LEAST = 2.0**-149  # above zero

#: Values with one scale in `Int8` and `Int4`.
_SCALED_BLOCK = 512


class Codec(ABC):
    """Turns float32 values into bytes and back.

    A codec of your own says in `wire_bytes`, `encode_` and `decode_` what it does.
    `repr` must tell its settings, since workers compare them, and it must survive
    `copy` and `pickle`. Several threads may use it at once.
    """

    #: what messages and settings call it
    name: str
    #: values that are coded together; larger inputs may be cut at multiples of it
    block: int

    @abstractmethod
    def wire_bytes(self, n: int) -> int:
        """The bytes that `n` values become, exactly."""

    def of_mean(self, num_workers: int) -> Codec:
        """The codec of the mean of so many workers' values."""
        del num_workers
        return self

    @abstractmethod
    def encode_(self, flat: Tensor, wire: Tensor) -> None:
        """Writes the code of `flat`; as `encode`, with arguments that were checked.

        Args:
            flat: the values, float32, shape `(n,)`, contiguous.
            wire: uint8, shape `(wire_bytes(n),)`, contiguous; updated.
        """

    @abstractmethod
    def decode_(self, wire: Tensor, flat: Tensor) -> None:
        """Writes the values of `wire`; as `decode`, with arguments that were checked.

        Args:
            wire: as `encode_` left it.
            flat: float32, shape `(n,)`, contiguous; updated.
        """

    @torch.no_grad()
    def encode(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """The values as bytes.

        Args:
            flat: the values, float32, shape `(n,)`, contiguous.
            out: takes the bytes and is returned, if given; updated.

        Returns:
            uint8, shape `(wire_bytes(n),)`, on the values' device.

        Raises:
            ValueError: if a tensor is of another kind, or both share memory.
        """
        n = flat.numel() if isinstance(flat, Tensor) else 0
        _check("flat", flat, torch.float32, n, None, "Pass flat.float().flatten().")
        size = self.wire_bytes(n)
        if out is None:
            out = torch.empty(size, dtype=torch.uint8, device=flat.device)
        _check("out", out, torch.uint8, size, flat, "Leave it out to get a new one.")
        self.encode_(flat, out)
        return out

    @torch.no_grad()
    def decode(self, wire: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        """The values that `encode` made bytes of, up to rounding.

        Args:
            wire: what `encode` returned, uint8, shape `(wire_bytes(n),)`.
            n: number of values.
            out: takes the values and is returned, if given; updated.

        Returns:
            float32, shape `(n,)`, on the device of `wire`.

        Raises:
            ValueError: if `n` is negative, a tensor is of another kind, or both share
                memory.
        """
        if n < 0:
            raise ValueError(f"n must be a number of values, at least 0, got {n=}.")
        size = self.wire_bytes(n)
        way_out = f"Pass what {self!r}.encode returned for {n=} values."
        _check("wire", wire, torch.uint8, size, None, way_out)
        if out is None:
            out = torch.empty(n, dtype=torch.float32, device=wire.device)
        _check("out", out, torch.float32, n, wire, "Leave it out to get a new one.")
        self.decode_(wire, out)
        return out


@dataclass(frozen=True)
class BF16(Codec):
    r"""The nearest bfloat16, ties to even: 16 bits a value.

    .. math:: |\hat x - x| \le 2^{-8} |x|

    for what is in bfloat16's normal range, from 1.2e-38 to 3.39e38; an error of at most
    4.6e-41 below it, and an inf above it. NaN and inf stay what they are.

    >>> codec = BF16()
    >>> codec.decode(codec.encode(torch.tensor([1.0, 1.01])), 2)
    tensor([1.0000, 1.0078])

    On the wire: the values.
    """

    name = "bf16"
    block = 1

    def wire_bytes(self, n: int) -> int:
        """Two for each value."""
        return 2 * n

    def encode_(self, flat: Tensor, wire: Tensor) -> None:
        """Rounds."""
        if wire.storage_offset() % 2 == 0:
            wire.view(torch.bfloat16).copy_(flat)
        else:  # no tensor of two-byte values begins at an odd byte
            wire.copy_(flat.bfloat16().view(torch.uint8))

    def decode_(self, wire: Tensor, flat: Tensor) -> None:
        """Widens."""
        if wire.storage_offset() % 2 == 0:
            flat.copy_(wire.view(torch.bfloat16))
        else:
            flat.copy_(_typed(wire, torch.bfloat16))


@dataclass(frozen=True)
class Int8(Codec):
    r"""Whole numbers up to 127 and one scale for 512 values: 8.0625 bits a value.

    .. math::

        s = \max |x| / 127, \qquad q = \mathrm{round}(x / s), \qquad \hat x = s q

    with the maximum over the block and ties to even, so that the error is at most
    :math:`s / 2` and has no bias. A block of zeros stays one. One value that is NaN or
    inf makes its whole block NaN.

    >>> codec = Int8()
    >>> codec.decode(codec.encode(torch.tensor([127.0, -3.4, 0.6])), 3)
    tensor([127.,  -3.,   1.])

    On the wire: float32 scales of all blocks, then an int8 for each value. The last
    block may be short.
    """

    name = "int8"
    block = _SCALED_BLOCK

    def wire_bytes(self, n: int) -> int:
        """One for each value, four for each block."""
        return 4 * _num_blocks(n) + n

    def encode_(self, flat: Tensor, wire: Tensor) -> None:
        """Scales and rounds, block by block."""
        scales = flat.new_empty(_num_blocks(flat.numel()))
        for values, scale, code in _scaled_rows(flat, scales, wire):
            _quantize(values, 127, scale, code.view(torch.int8))
        wire[: scales.nbytes].copy_(scales.view(torch.uint8))

    def decode_(self, wire: Tensor, flat: Tensor) -> None:
        """Multiplies, block by block."""
        scales = _typed(wire[: 4 * _num_blocks(flat.numel())], torch.float32)
        for values, scale, code in _scaled_rows(flat, scales, wire):
            values.copy_(code.view(torch.int8)).mul_(scale)


@dataclass(frozen=True)
class Int4(Codec):
    r"""Whole numbers up to 7 and one scale for 512 values: 4.0625 bits a value.

    .. math::

        s = \max |x| / 7, \qquad q = \mathrm{round}(x / s), \qquad \hat x = s q

    with the maximum over the block and ties to even, so that the error is at most
    :math:`s / 2` and has no bias. A block of zeros stays one. One value that is NaN or
    inf makes its whole block NaN.

    >>> codec = Int4()
    >>> codec.decode(codec.encode(torch.tensor([7.0, -3.4, 0.6])), 3)
    tensor([ 7., -3.,  1.])

    On the wire: float32 scales of all blocks, then a byte for two values of a block,
    :math:`(q_i + 8) + 16 (q_{i + h} + 8)` with :math:`h` = 256. In a last block of
    :math:`m` < 512 values :math:`h = \lceil m / 2 \rceil`, and an odd one lacks
    the partner of its last byte, whose upper half is then 8.
    """

    name = "int4"
    block = _SCALED_BLOCK

    def wire_bytes(self, n: int) -> int:
        """One for two values of a block, four for each block."""
        return 4 * _num_blocks(n) + (n + 1) // 2

    def encode_(self, flat: Tensor, wire: Tensor) -> None:
        """Scales, rounds and packs, block by block."""
        scales = flat.new_empty(_num_blocks(flat.numel()))
        for values, scale, packed in _scaled_rows(flat, scales, wire, self.block // 2):
            half = packed.shape[1]
            code = _scratch(values, torch.int8)
            _quantize(values, 7, scale, code)
            # First q + 16 q', from -119 to 119; then modulo 256.
            signed = packed.view(torch.int8).copy_(code[:, :half])
            signed[:, : code.shape[1] - half].add_(code[:, half:], alpha=16)
            packed.add_(8 + 16 * 8)
        wire[: scales.nbytes].copy_(scales.view(torch.uint8))

    def decode_(self, wire: Tensor, flat: Tensor) -> None:
        """Unpacks and multiplies, block by block."""
        scales = _typed(wire[: 4 * _num_blocks(flat.numel())], torch.float32)
        for values, scale, packed in _scaled_rows(flat, scales, wire, self.block // 2):
            half = packed.shape[1]
            code = _scratch(values, torch.uint8)
            lower, upper = code[:, :half], code[:, half:]
            torch.bitwise_and(packed, 15, out=lower)
            torch.bitwise_right_shift(packed[:, : upper.shape[1]], 4, out=upper)
            values.copy_(code.view(torch.int8).sub_(8)).mul_(scale)


@dataclass(frozen=True)
class TopK(Codec):
    r"""The largest magnitudes of every 4096 values, in bfloat16; the others become 0.

    Of :math:`m` values (4096, fewer in the last block) the :math:`\lceil density \cdot
    m \rceil` largest are kept, of equal ones the first. 32 bits a kept value: 0.5 bits
    a value at the default density of 1/64. Most of the input is lost each time: use it
    with error feedback.

    NaN counts as the largest and inf as the next: both are kept, as they are. What is
    kept is rounded as by `BF16`.

    >>> codec = TopK(density=0.5)
    >>> codec.decode(codec.encode(torch.tensor([3.0, -1.0, 0.0, -4.0])), 4)
    tensor([ 3.,  0.,  0., -4.])

    On the wire: for all kept values the place in the block, int16, ascending in each
    block, then the bfloat16 values in the same order.

    Args:
        density: the part of the values that is kept, :math:`0 < density \le 1`.

    Raises:
        ValueError: if `density` is not in that range.
    """

    density: float = 1 / 64

    name = "topk"
    block = 4096

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(
                "density must be above 0 and at most 1, "
                f"got density={self.density}. It is a part of the values."
            )

    def of_mean(self, num_workers: int) -> Codec:
        """Room for all that the workers have kept: they need not keep the same."""
        return TopK(min(1.0, self.density * num_workers))

    def wire_bytes(self, n: int) -> int:
        """Four for each kept value."""
        blocks, rest = divmod(n, self.block)
        return 4 * (blocks * self._kept(self.block) + self._kept(rest))

    def encode_(self, flat: Tensor, wire: Tensor) -> None:
        """Chooses, block by block."""
        count = wire.numel() // 4
        places = torch.empty(count, dtype=torch.int16, device=flat.device)
        values = torch.empty(count, dtype=torch.bfloat16, device=flat.device)
        for given, place, value in self._rows(flat, places, values):
            # Bits of magnitudes are ordered as they are, NaN above inf. With the place
            # behind them no two keys are equal, so there is one choice everywhere.
            magnitude = _scratch(given, torch.int32)
            torch.bitwise_and(given.view(torch.int32), 0x7FFFFFFF, out=magnitude)
            last = given.shape[1] - 1
            behind = torch.arange(last, -1, -1, device=flat.device)
            key = _scratch(given, torch.int64).copy_(magnitude)
            key.mul_(self.block).add_(behind)
            chosen = key.topk(place.shape[1], dim=1, sorted=False).indices
            chosen = chosen.sort(dim=1).values
            place.copy_(chosen)
            value.copy_(given.gather(1, chosen))
        half = 2 * count
        wire[:half].copy_(places.view(torch.uint8))
        wire[half:].copy_(values.view(torch.uint8))

    def decode_(self, wire: Tensor, flat: Tensor) -> None:
        """Puts what was kept into zeros."""
        half = wire.numel() // 2
        places = _typed(wire[:half], torch.int16)
        values = _typed(wire[half:], torch.bfloat16)
        flat.zero_()
        for given, place, value in self._rows(flat, places, values):
            given.scatter_(1, place.long(), value.float())

    def _kept(self, m: int) -> int:
        """How many of `m` values in a block are kept."""
        return math.ceil(m * self.density)

    def _rows(
        self, flat: Tensor, places: Tensor, values: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Values, the kept places and the kept values, a row for each block."""
        n, kept = flat.numel(), self._kept(self.block)
        return zip(
            _rows(flat, n, self.block, self.block),
            _rows(places, n, self.block, kept),
            _rows(values, n, self.block, kept),
            strict=True,
        )


_CODECS: dict[str, type[Codec]] = {
    "bf16": BF16,
    "int8": Int8,
    "int4": Int4,
    "topk": TopK,
}


def make_codec(spec: str | Codec | None) -> Codec | None:
    """The codec that an argument means.

    >>> make_codec("int8")
    Int8()
    >>> make_codec(TopK(density=0.01))
    TopK(density=0.01)

    Args:
        spec: "bf16", "int8", "int4", "topk" (of density 1/64), a codec or None.

    Raises:
        ValueError: if it is anything else.
    """
    if spec is None or isinstance(spec, Codec):
        return spec
    if isinstance(spec, str) and spec in _CODECS:
        return _CODECS[spec]()
    names = ", ".join(map(repr, _CODECS))
    raise ValueError(f"codec must be one of {names}, a Codec or None, got {spec!r}.")


# --------------------------------------------------------------------------------------
# Blocks as rows of matrices


def _num_blocks(n: int) -> int:
    return -(-n // _SCALED_BLOCK)


def _rows(flat: Tensor, n: int, block: int, width: int) -> Iterator[Tensor]:
    """What belongs to `n` values as matrices with a row for each block.

    Few enough rows at a time to stay in a core's cache, and a last matrix for a last
    short block.

    Args:
        flat: `width` elements for each whole block, then those of a short one.
        n: number of values.
        block: values in a block.
        width: elements that belong to a block.
    """
    blocks, rest = divmod(n, block)
    if blocks:
        whole = flat[: blocks * width].view(blocks, width)
        yield from torch.split(whole, _chunk_values(flat) // block)
    if rest:
        yield flat[blocks * width :].view(1, -1)


def _scaled_rows(
    flat: Tensor, scales: Tensor, wire: Tensor, width: int = _SCALED_BLOCK
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Values, scales and bytes of codes, `width` a block, a row for each block."""
    n = flat.numel()
    return zip(
        _rows(flat, n, _SCALED_BLOCK, _SCALED_BLOCK),
        _rows(scales, n, _SCALED_BLOCK, 1),
        _rows(wire[scales.nbytes :], n, _SCALED_BLOCK, width),
        strict=True,
    )


def _typed(message: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of bytes as numbers, which cannot begin at any byte."""
    return message.clone().view(dtype)


def _chunk_values(tensor: Tensor) -> int:
    """How many values are coded at a time on the tensor's device.

    Twice the engine's chunks on a CPU: there are more small operations here, on scales.
    """
    return 1 << 19 if tensor.device.type == "cpu" else 1 << 24


_threads = threading.local()


def _scratch(like: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix of anything, of the shape of `like`: one for each thread and dtype.

    On a CPU the memory is the same each time, since it is in the cache then. On an
    accelerator it is the allocator's: only that knows which stream still uses it.
    """
    if like.device.type != "cpu":
        return torch.empty_like(like, dtype=dtype)
    rooms: dict[torch.dtype, Tensor] = _threads.__dict__.setdefault("rooms", {})
    if dtype not in rooms:
        with torch.inference_mode(False):  # else of no use outside of it
            rooms[dtype] = torch.empty(_chunk_values(like), dtype=dtype, device="cpu")
    return rooms[dtype][: like.numel()].view(like.shape)


def _quantize(values: Tensor, levels: int, scale: Tensor, code: Tensor) -> None:
    r"""Rounds each row to multiples of its own scale.

    .. math:: s = \max |x| / levels, \qquad q = \mathrm{round}(x / s)

    Args:
        values: float32, shape `(rows, width)`.
        levels: largest code.
        scale: float32, shape `(rows, 1)`; updated. 1 for a row of zeros; NaN for a row
            with a value that is not finite, whose codes mean nothing.
        code: int8, shape `(rows, width)`; updated.
    """
    ratio = _scratch(values, torch.float32)
    peak = torch.abs(values, out=ratio).amax(1, keepdim=True)
    # On tensors, not numbers: a GPU would multiply by a rounded 1 / levels.
    divisor = values.new_full((1, 1), levels)
    least = values.new_full((1, 1), _FLOAT32_LEAST)
    # The smallest float on top rounds up those scales that are too small to be precise,
    # or ratios would exceed `levels`; to others it is nothing. Zero times inf is NaN.
    torch.addcdiv(least.add(peak, alpha=0), peak, divisor, out=scale)
    # The largest ratio times the scale must not round to inf.
    scale.clamp_(max=_FLOAT32_MAX / levels * (1 - 2**-23))
    scale.masked_fill_(peak == 0, 1.0)
    code.copy_(torch.div(values, scale, out=ratio).round_())


# --------------------------------------------------------------------------------------
# Checks


def _check(
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    size: int,
    beside: Tensor | None,
    way_out: str,
) -> None:
    """Raises unless the tensor is of the kind that is needed, apart from another."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}.")
    device = tensor.device if beside is None else beside.device
    if (
        tensor.dtype != dtype
        or tensor.shape != (size,)
        or not tensor.is_contiguous()
        or tensor.device != device
    ):
        layout = "contiguous" if tensor.is_contiguous() else "non-contiguous"
        raise ValueError(
            f"{name} must be contiguous {dtype} of shape {(size,)} on {device}, got "
            f"{layout} {tensor.dtype} of shape {tuple(tensor.shape)} on "
            f"{tensor.device}. {way_out}"
        )
    if beside is not None and _overlap(tensor, beside):
        raise ValueError(f"{name} must not share memory with the input. {way_out}")


def _overlap(a: Tensor, b: Tensor) -> bool:
    starts = a.data_ptr(), b.data_ptr()
    return max(starts) < min(starts[0] + a.nbytes, starts[1] + b.nbytes)
