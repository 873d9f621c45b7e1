"""From files to token windows: the corpus, its tokenizer, and who reads what."""

import hashlib
import json
import os
import shutil
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from extras import load_extra
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

END_OF_DOCUMENT = "<|endoftext|>"
SPLIT_SEED = 0  # not the run's seed: runs with different seeds stay comparable
VALIDATION_SHARE = 0.05
SMALLEST_VOCAB = 257  # the bytes and the end of a document
LARGEST_VOCAB = 2**16  # token ids are stored as uint16
DOCUMENTS_AT_ONCE = 64  # encodings are large; a whole corpus of them is too much


class Corpus(NamedTuple):
    """A tokenized corpus; of the same `key`, the same one."""

    key: str
    train: np.ndarray  # (tokens,) uint16, mapped from the cache
    validation: np.ndarray

    def batches(self, **shares: int) -> "Batches":
        return Batches(self.train, **shares)


# -------------------------------------------------------------------------------------
# Documents


def read_documents(data: str | Path | None) -> list[str]:
    """Reads the documents of `data`, in an order that only the files decide."""
    if data is None:
        return standard_library()
    data = Path(data)
    if not data.exists():
        raise ValueError(f"data must be a file or a directory that exists, got {data}.")
    files = (
        [data] if data.is_file() else sorted(p for p in data.rglob("*") if visible(p))
    )
    documents = [document for file in files for document in read_file(file)]
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise ValueError(f"data must hold some text, got none in {data}.")
    return documents


def standard_library() -> list[str]:
    """The sources of the running Python, without tests, which not every system has."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    documents = []
    for file in sorted(root.rglob("*.py")):
        if left_out.isdisjoint(file.relative_to(root).parts):
            with tokenize.open(file) as source:  # heeds the encoding that it declares
                documents.append(source.read())
    return [document for document in documents if document.strip()]


def visible(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".")


def read_file(file: Path) -> list[str]:
    """One document of a text file, one per line of JSON lines, one per parquet row."""
    if file.suffix == ".parquet":
        return read_parquet(file)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data must be UTF-8 text, got {file}: {error}. Convert or remove the file."
        ) from None
    return read_json_lines(text, file) if file.suffix == ".jsonl" else [text]


def read_json_lines(text: str, file: Path) -> list[str]:
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
        except (json.JSONDecodeError, KeyError, TypeError):
            document = None
        if not isinstance(document, str):
            raise ValueError(
                'every JSON line must be an object with a string at key "text", '
                f"got {line[:60]!r} in {file}, line {number}."
            )
        documents.append(document)
    return documents


def read_parquet(file: Path) -> list[str]:
    parquet = load_extra(
        "pyarrow.parquet", f"data must be text without the package pyarrow, got {file}"
    )
    schema = parquet.read_schema(file)
    kind = str(schema.field("text").type) if "text" in schema.names else None
    if kind not in ("string", "large_string", "string_view"):
        raise ValueError(
            'every parquet file must have a column "text" of strings, got '
            f"{dict(zip(schema.names, map(str, schema.types), strict=True))} in {file}."
        )
    rows = parquet.read_table(file, columns=["text"])["text"].to_pylist()
    return [row for row in rows if row is not None]


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Divides documents into training and validation; cuts a lone one near its end."""
    if len(documents) == 1:
        (text,) = documents
        cut = text.rfind("\n", 0, int(len(text) * (1 - VALIDATION_SHARE))) + 1
        return [text[:cut]], [text[cut:]]
    shuffled = np.random.default_rng(SPLIT_SEED).permutation(len(documents))
    num_held_out = max(1, round(len(documents) * VALIDATION_SHARE))
    held_out = set(shuffled[:num_held_out].tolist())
    train = [document for i, document in enumerate(documents) if i not in held_out]
    return train, [documents[i] for i in sorted(held_out)]


# -------------------------------------------------------------------------------------
# Tokens


def load_corpus(
    data: str | Path | None, vocab_size: int, cache: Path, *, make: bool
) -> Corpus:
    """Takes a corpus from the cache.

    Args:
        data: where the text is, see `read_documents`.
        vocab_size: tokens of the tokenizer.
        cache: directory of all tokenized corpora.
        make: tokenize what is not there yet. One worker of each machine does, the
            others wait for it before they call.
    """
    if not SMALLEST_VOCAB <= vocab_size <= LARGEST_VOCAB:
        raise ValueError(
            f"vocab_size must be from {SMALLEST_VOCAB} to {LARGEST_VOCAB}, "
            f"got {vocab_size=}."
        )
    documents = read_documents(data)
    key = corpus_key(documents, vocab_size)
    entry = cache / key
    if make and not entry.exists():
        make_cache_entry(entry, documents, vocab_size)
    train, validation = (
        np.load(entry / f"{part}.npy", mmap_mode="r")
        for part in ("train", "validation")
    )
    return Corpus(key, train, validation)


def corpus_key(documents: list[str], vocab_size: int) -> str:
    """A name that differs whenever the text or the tokenizer would."""
    digest = hashlib.sha256(f"{vocab_size} {SPLIT_SEED} {VALIDATION_SHARE}".encode())
    for document in documents:
        content = document.encode()
        digest.update(f" {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def make_cache_entry(entry: Path, documents: list[str], vocab_size: int) -> None:
    """Writes tokenizer and tokens."""
    train, validation = split(documents)
    tokenizer = train_tokenizer(train, vocab_size)
    with new_entry(entry) as unfinished:
        tokenizer.save(str(unfinished / "tokenizer.json"))
        np.save(unfinished / "train.npy", encode(tokenizer, train))
        np.save(unfinished / "validation.npy", encode(tokenizer, validation))


@contextmanager
def new_entry(entry: Path) -> Iterator[Path]:
    """A directory to write to; the entry appears whole or not at all."""
    unfinished = entry.with_name(f"unfinished-{uuid4().hex}")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        os.rename(unfinished, entry)
    except OSError:
        # Another job on this machine may have been faster: its entry is the same.
        if not entry.exists():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer, length=len(documents))
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """The tokens of all documents, each followed by the token that ends a document."""
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    parts = []
    for first in range(0, len(documents), DOCUMENTS_AT_ONCE):
        some = documents[first : first + DOCUMENTS_AT_ONCE]
        for encoding in tokenizer.encode_batch_fast(some, add_special_tokens=False):
            parts.append(np.array([*encoding.ids, end], dtype=np.uint16))
    return np.concatenate(parts)


# -------------------------------------------------------------------------------------
# Windows


class Batches:
    """Endless batches of token windows, of which each worker reads its own share.

    An epoch is one seeded order of all windows. Of its next `world * batch_size` ones
    worker `rank` takes every `world`-th, so no two workers read the same window in an
    epoch, and together they read the same ones however many they are. The position
    counts windows over all workers: the whole state, and the same on every worker.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        context: int,
        batch_size: int,
        rank: int,
        world: int,
        seed: int,
    ) -> None:
        self._tokens = tokens
        self._context = context
        self._batch_size = batch_size
        self._seed = seed
        self._num_windows = count_windows(tokens, context)
        self._share(rank, world)
        if self._num_windows < self._stride:
            raise ValueError(
                f"data must hold at least {self._stride} windows to train on, got "
                f"{self._num_windows} with {context=}, {batch_size=}, {world=}. Give "
                "more text, or reduce context or batch_size."
            )
        self._start_at(epoch=0, index=0)

    def _share(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._stride = world * self._batch_size

    @property
    def position(self) -> tuple[int, int]:
        """Epoch, and windows of it that all workers together have read."""
        return self._epoch, self._index

    def regroup(self, rank: int, world: int, position: Sequence[int]) -> None:
        """Goes on among other workers, where all of them go on.

        Args:
            rank: this worker's place among them, counted from 0.
            world: how many they are.
            position: the furthest of all of theirs, so that nothing is read twice.
        """
        self._share(rank, world)
        self._start_at(*position)
        self._end_epoch()

    def _start_at(self, epoch: int, index: int) -> None:
        self._epoch, self._index = epoch, index
        generator = np.random.default_rng((self._seed, epoch))
        self._order = generator.permutation(self._num_windows)

    def peek(self) -> Tensor:
        """The batch that comes next, (batch_size, context + 1) int64."""
        shared = self._order[self._index : self._index + self._stride]
        return windows(self._tokens, shared[self._rank :: self._world], self._context)

    def __next__(self) -> Tensor:
        batch = self.peek()
        self._index += self._stride
        self._end_epoch()
        return batch

    def _end_epoch(self) -> None:
        """Leaves out the last windows, if they do not make a step of every worker."""
        if self._index + self._stride > self._num_windows:
            self._start_at(self._epoch + 1, index=0)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "index": self._index, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        check_same_data(state, self._identity())
        self._start_at(state["epoch"], state["index"])
        self._end_epoch()  # with more workers a step takes more windows

    def _identity(self) -> dict[str, int]:
        """What a position means nothing without."""
        return {
            "num_windows": self._num_windows,
            "context": self._context,
            "seed": self._seed,
        }


def check_same_data(state: Mapping[str, Any], identity: Mapping[str, int]) -> None:
    """Refuses a position in other data."""
    for name, mine in identity.items():
        if state[name] != mine:
            raise ValueError(
                f"{name} must be that of the checkpoint to go on with the same "
                f"data, got {mine} with {state[name]} in the checkpoint."
            )


def count_windows(tokens: np.ndarray, context: int) -> int:
    return max(0, len(tokens) - 1) // context


def windows(tokens: np.ndarray, numbers: np.ndarray, context: int) -> Tensor:
    """Windows by number, (len(numbers), context + 1): inputs, and targets one later."""
    offsets = numbers[:, None] * context + np.arange(context + 1)
    return torch.from_numpy(tokens[offsets].astype(np.int64))


def validation_windows(tokens: np.ndarray, context: int, num_windows: int) -> Tensor:
    """The same windows in every run, evenly spread; fewer if there are not so many."""
    available = count_windows(tokens, context)
    if available == 0:
        raise ValueError(
            f"data must hold more than {context} tokens of validation, got "
            f"{len(tokens)}. Give more text, or reduce context."
        )
    num_windows = min(num_windows, available)
    return windows(tokens, np.arange(num_windows) * available // num_windows, context)
