"""Data that is read while it is trained on: datasets that the package `datasets` opens.

`hf:NAME:CONFIG:SPLIT` names one, such as `hf:allenai/c4:en:train`. CONFIG and SPLIT may
be left out; the split is then `train`. NAME is one of the Hugging Face hub's or a local
directory of parquet or JSON files. Only what is read is downloaded.

Of the first documents some are for validation, the others make the tokenizer.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from data import (
    check_same_data,
    corpus_key,
    count_windows,
    encode,
    new_entry,
    train_tokenizer,
    windows,
)
from extras import load_extra
from tokenizers import Tokenizer
from torch import Tensor

PREFIX = "hf:"
SAMPLE_DOCUMENTS = 10_000  # the first ones: for the tokenizer and the validation
HELD_OUT_EVERY = 20  # of the first documents, for the validation
CHUNK_DOCUMENTS = 1024  # tokenized at once, their windows in a random order


class Source(NamedTuple):
    """What is to be opened."""

    path: str
    name: str | None
    split: str


def is_streamed(data: object) -> bool:
    return str(data).startswith(PREFIX)


def source_of(data: str) -> Source:
    """Takes a name apart.

    >>> source_of("hf:allenai/c4:en:train")
    Source(path='allenai/c4', name='en', split='train')
    >>> source_of("hf:roneneldan/TinyStories")
    Source(path='roneneldan/TinyStories', name=None, split='train')
    """
    parts = data.removeprefix(PREFIX).split(":")
    if len(parts) > 3 or not parts[0]:
        raise ValueError(
            f"data must be hf:NAME:CONFIG:SPLIT, got {data}. CONFIG and SPLIT may be "
            "left out."
        )
    path, name, split = parts + [""] * (3 - len(parts))
    return Source(path, name or None, split or "train")


def open_stream(data: str) -> Any:
    """An iterable of examples, with `state_dict` and `load_state_dict`."""
    datasets = load_extra(
        "datasets", f"data must be files without the package datasets, got {data}"
    )
    path, name, split = source_of(data)
    return datasets.load_dataset(path, name, split=split, streaming=True)


def text_of(example: dict[str, Any], data: str) -> str:
    text = example.get("text")
    if not isinstance(text, str):
        raise ValueError(
            'data must have a string at key "text" in every example, got the keys '
            f"{sorted(example)} in {data}."
        )
    return text


def is_held_out(number: int) -> bool:
    """Whether a document is for validation, by its place in the stream."""
    return number < SAMPLE_DOCUMENTS and number % HELD_OUT_EVERY == 0


# -------------------------------------------------------------------------------------
# The corpus


class StreamedCorpus(NamedTuple):
    """What is known of a stream beforehand; of the same `key`, the same."""

    key: str
    data: str
    tokenizer: Tokenizer
    validation: np.ndarray  # (tokens,) uint16

    def batches(self, **shares: int) -> "StreamedBatches":
        return StreamedBatches(self.data, self.tokenizer, **shares)


def load_stream(
    data: str, vocab_size: int, cache: Path, *, make: bool
) -> StreamedCorpus:
    """Reads the first documents, and takes the tokenizer from the cache.

    Args:
        data: its name, see the top of this file.
        vocab_size: tokens of the tokenizer.
        cache: directory of all tokenizers.
        make: train a tokenizer that is not there yet. One worker of each machine does,
            the others wait for it before they call.
    """
    examples = islice(open_stream(data), SAMPLE_DOCUMENTS)
    sample = [text_of(example, data) for example in examples]
    if not any(text.strip() for text in sample[1:]):
        raise ValueError(
            f"data must hold at least two documents, got {len(sample)} in {data}."
        )
    key = corpus_key(["streamed", *sample], vocab_size)
    entry = cache / key
    if make and not entry.exists():
        make_entry(entry, sample, vocab_size)
    tokenizer = Tokenizer.from_file(str(entry / "tokenizer.json"))
    return StreamedCorpus(key, data, tokenizer, np.load(entry / "validation.npy"))


def make_entry(entry: Path, sample: list[str], vocab_size: int) -> None:
    train = [text for i, text in enumerate(sample) if not is_held_out(i)]
    held_out = [text for i, text in enumerate(sample) if is_held_out(i)]
    tokenizer = train_tokenizer(train, vocab_size)
    with new_entry(entry) as unfinished:
        tokenizer.save(str(unfinished / "tokenizer.json"))
        np.save(unfinished / "validation.npy", encode(tokenizer, held_out))


# -------------------------------------------------------------------------------------
# Windows


class Place(NamedTuple):
    """Where a chunk begins."""

    chunk: int  # its number
    document: int  # the number of its first one in this pass over the data
    stream: Any  # the state of the stream there
    left: list[int]  # tokens from before, too few for a window


class StreamedBatches:
    """Endless batches of token windows, of which each worker takes its own share.

    Documents come in the order of the data, and the windows of each 1024 of them in a
    seeded one. Of the next `world * batch_size` windows worker `rank` takes every
    `world`-th: no two workers read the same one, and together they read the same ones
    however many they are. The position is the same on every worker, and any number of
    workers can go on from it.

    That is simple and costs something: every worker reads and tokenizes all of the
    data. Where that is too much, give files: they are tokenized once on each machine.
    """

    def __init__(
        self,
        data: str,
        tokenizer: Tokenizer,
        *,
        context: int,
        batch_size: int,
        rank: int,
        world: int,
        seed: int,
    ) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._context = context
        self._rank, self._world = rank, world
        self._stride = world * batch_size
        self._seed = seed
        self._stream = open_stream(data)
        self._first = self._stream.state_dict()
        self._go_to(Place(0, 0, self._first, []), index=0)

    def _go_to(self, place: Place, index: int) -> None:
        self._document = place.document
        self._stream.load_state_dict(place.stream)
        self._texts = self._read_texts()
        self._read_chunk(place)
        self._index = index

    def _read_texts(self) -> Iterator[str]:
        """The documents from here on, over and over, without those held out."""
        while True:
            for example in self._stream:
                self._document += 1
                text = text_of(example, self._data)
                if text.strip() and not is_held_out(self._document - 1):
                    yield text
            self._document = 0
            self._stream.load_state_dict(self._first)

    def _read_chunk(self, place: Place) -> None:
        texts = list(islice(self._texts, CHUNK_DOCUMENTS))
        left = np.array(place.left, dtype=np.uint16)
        tokens = np.concatenate([left, encode(self._tokenizer, texts)])
        count = count_windows(tokens, self._context)
        order = np.random.default_rng((self._seed, place.chunk)).permutation(count)
        self._windows = windows(tokens, order, self._context)
        self._left = tokens[count * self._context :].tolist()
        self._place, self._index = place, 0

    def _next_window(self) -> Tensor:
        while self._index == len(self._windows):
            here = self._stream.state_dict()
            number = self._place.chunk + 1
            self._read_chunk(Place(number, self._document, here, self._left))
        self._index += 1
        return self._windows[self._index - 1]

    def __next__(self) -> Tensor:
        """(batch_size, context + 1) int64."""
        shared = [self._next_window() for _ in range(self._stride)]
        return torch.stack(shared[self._rank :: self._world])

    def peek(self) -> Tensor:
        """The batch that comes next; may read a part of the data twice."""
        place, index = self._place, self._index
        batch = next(self)
        if self._place is place:
            self._index = index
        else:
            self._go_to(place, index)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {**self._place._asdict(), "index": self._index, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_same_data(state, self._identity())
        place = Place(*(state[name] for name in Place._fields))
        self._go_to(place, state["index"])

    def _identity(self) -> dict[str, int]:
        """What a position means nothing without."""
        return {"context": self._context, "seed": self._seed}
