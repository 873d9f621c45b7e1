"""Numbers by which workers see that they hold the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def number_of(text: str) -> int:
    """A positive 63-bit number for a text, the same in every process."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1 or 1


def fingerprint(values: Sequence[Tensor]) -> int:
    """A 63-bit number that changes with (nearly) any bit of any value."""
    sums = [part.sum(dtype=torch.int64) for value in values for part in _words(value)]
    number = 1
    for part in torch.stack(sums).tolist() if sums else ():
        number = (number * 1_000_003 + part) & (1 << 63) - 1
    return number


def mark(values: Iterable[Tensor]) -> int:
    """A 32-bit number, never 0, that changes with any value and with its place.

    >>> mark([torch.tensor([1.0, 2.0])]) == mark([torch.tensor([2.0, 1.0])])
    False
    """
    sums = [
        int((words * (2 * torch.arange(len(words), device=words.device) + 1)).sum())
        for value in values
        for words in _words(value)
    ]
    return number_of(repr(sums)) & (1 << 32) - 1 or 1


def _words(value: Tensor) -> list[Tensor]:
    """A chunk's bits as integers; of 64 bits, which are summed fastest."""
    narrow = value.view(torch.int32)
    even = len(narrow) // 2 * 2
    words = [narrow[:even].view(torch.int64)]
    return words if even == len(narrow) else [*words, narrow[even:]]
