"""The recipes' data from packages that not everybody has: parquet, and streams.

Streams are tested on a stand-in for `datasets`, and on itself where it is installed.
"""

import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lowcomm
from lowcomm.testing import run_workers

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
CONTEXT, NUM_DOCUMENTS = 16, 90

#: `datasets.load_dataset` for directories of JSON lines, and no more.
STAND_IN = """
import json, pathlib

class Stream:
    def __init__(self, files):
        lines = [line for file in files for line in file.read_text().splitlines()]
        self.examples, self.index = [json.loads(line) for line in lines], 0

    def __iter__(self):
        while self.index < len(self.examples):
            self.index += 1
            yield self.examples[self.index - 1]

    def state_dict(self):
        return {"index": self.index, "before": None}

    def load_state_dict(self, state):
        self.index = state["index"]

def load_dataset(path, name, *, split, streaming):
    assert streaming
    return Stream(sorted(pathlib.Path(path).glob(f"{split}-*.jsonl")))
"""


@pytest.fixture
def recipe(monkeypatch):
    """Imports a recipe's file as its neighbours do."""
    monkeypatch.syspath_prepend(RECIPES)
    return importlib.import_module


def document(number):
    """Says its number, so that windows tell what they are of."""
    generator = random.Random(number)
    return f"n{number:03}. " + " ".join(generator.choices(["ba", "do", "ke"], k=20))


def write_stand_in(folder):
    folder.mkdir()
    (folder / "datasets.py").write_text(STAND_IN, encoding="utf-8")
    return folder


def write_json(folder, num_files=3):
    folder.mkdir()
    texts = [document(number) for number in range(NUM_DOCUMENTS)]
    for i in range(num_files):
        some = texts[i * len(texts) // num_files : (i + 1) * len(texts) // num_files]
        lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for text in some)
        (folder / f"train-{i}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def write_parquet(folder):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    rows = [{"text": document(number)} for number in range(NUM_DOCUMENTS)]
    for i in range(3):
        table = pyarrow.Table.from_pylist(rows[30 * i : 30 * i + 30])
        parquet.write_table(table, folder / f"train-{i}.parquet", row_group_size=8)
    return folder


# -------------------------------------------------------------------------------------
# Parquet files


def test_documents_are_the_rows_of_parquet_files(recipe, tmp_path):
    folder = write_parquet(tmp_path / "rows")
    (folder / "a.txt").write_text("a text", encoding="utf-8")
    expected = ["a text"] + [document(number) for number in range(NUM_DOCUMENTS)]
    assert recipe("data").read_documents(str(folder)) == expected


def test_a_parquet_file_without_text_is_named(recipe, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for column in ({"content": ["a"]}, {"text": [1]}):
        parquet.write_table(pyarrow.table(column), tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=r'column "text" of strings.*a\.parquet'):
            recipe("data").read_documents(tmp_path)


@pytest.mark.parametrize("data", ["a.parquet", "hf:some/name"])
def test_a_package_that_is_missing_is_named(recipe, tmp_path, monkeypatch, data):
    for module in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.parquet").touch()
    monkeypatch.chdir(tmp_path)
    load = recipe("stream").load_stream if data[:3] == "hf:" else None
    load = load or recipe("data").load_corpus
    with pytest.raises(ValueError, match=rf"without the .*got {data}.*pip install \w"):
        load(data, 300, tmp_path, make=True)


# -------------------------------------------------------------------------------------
# Streams


@pytest.fixture(params=["stand-in", "json", "parquet"])
def data(request, tmp_path, monkeypatch):
    """The name of a stream of all documents."""
    if request.param == "stand-in":
        monkeypatch.syspath_prepend(write_stand_in(tmp_path / "packages"))
        monkeypatch.delitem(sys.modules, "datasets", raising=False)
        yield f"hf:{write_json(tmp_path / 'rows')}"
        sys.modules.pop("datasets", None)
        return
    pytest.importorskip("datasets")
    write = {"json": write_json, "parquet": write_parquet}[request.param]
    yield f"hf:{write(tmp_path / 'rows')}::train"


@pytest.fixture
def stream(recipe, monkeypatch):
    """recipes/stream.py, with chunks of which there are some in few documents."""
    stream = recipe("stream")
    monkeypatch.setattr(stream, "CHUNK_DOCUMENTS", 20)
    return stream


def batches_of(corpus, rank=0, world=1, batch_size=4, **changed):
    settings = {"context": CONTEXT, "seed": 7, **changed}
    return corpus.batches(rank=rank, world=world, batch_size=batch_size, **settings)


def read(batches, num_steps):
    return [next(batches).tolist() for _ in range(num_steps)]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("hf:a/b:en:test", ("a/b", "en", "test")),
        ("hf:a/b:en", ("a/b", "en", "train")),
        ("hf:a/b", ("a/b", None, "train")),
        ("hf:./b::test", ("./b", None, "test")),
    ],
)
def test_a_name_has_parts(recipe, name, parts):
    assert recipe("stream").source_of(name) == parts


@pytest.mark.parametrize("name", ["hf:", "hf::en", "hf:a:b:c:d"])
def test_a_name_that_is_none_is_refused(recipe, name):
    with pytest.raises(ValueError, match=f"must be hf:NAME:CONFIG:SPLIT, got {name}"):
        recipe("stream").source_of(name)


def test_a_stream_without_text_is_named(stream, tmp_path, data):
    folder = Path(data.split(":")[1])
    for file in folder.iterdir():
        file.unlink()
    (folder / "train-0.jsonl").write_text('{"content": "a"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"'?text\W.*every example, got .*content"):
        stream.load_stream(data, 300, tmp_path / "cache", make=True)


def test_what_is_held_out_is_not_trained_on(stream, tmp_path, data):
    corpus = stream.load_stream(data, 300, tmp_path / "cache", make=True)
    held_out = corpus.tokenizer.decode(corpus.validation)
    assert [document(n) in held_out for n in (0, 20, 80, 1)] == [True] * 3 + [False]
    windows = np.concatenate(read(batches_of(corpus), 200))  # some passes
    text = " ".join(corpus.tokenizer.decode_batch(windows))
    numbers = {int(number) for number in re.findall(r"n(\d{3})\.", text)}
    assert not numbers & {0, 20, 40, 60, 80}
    assert len(numbers) > 0.9 * NUM_DOCUMENTS


def test_workers_share_a_stream_without_overlap(stream, tmp_path, data):
    """And however many they are, a step reads the same windows."""
    corpus = stream.load_stream(data, 300, tmp_path / "cache", make=True)
    alone = read(batches_of(corpus), 30)
    two = [read(batches_of(corpus, rank, 2, 2), 30) for rank in range(2)]
    four = [read(batches_of(corpus, rank, 4, 1), 30) for rank in range(4)]
    for step in range(30):
        together = sorted(alone[step])
        assert sorted(sum((worker[step] for worker in two), [])) == together
        assert sorted(sum((worker[step] for worker in four), [])) == together
    # In the first pass no window comes twice: of 85 documents it has some 120 windows.
    first = [tuple(window) for window in sum(alone[:25], [])]
    assert len(set(first)) == len(first)


def test_a_stream_goes_on_where_it_was(stream, tmp_path, data):
    """From the middle of a chunk, of another pass, and with other workers."""
    corpus = stream.load_stream(data, 300, tmp_path / "cache", make=True)
    uninterrupted = read(batches_of(corpus), 100)
    got, state = [], None
    for num_steps in (3, 20, 37, 40):
        batches = batches_of(corpus)
        if state:
            batches.load_state_dict(json.loads(state))
        got += read(batches, num_steps)
        assert batches.peek().tolist() == batches.peek().tolist()
        state = json.dumps(batches.state_dict())
    assert got == uninterrupted

    two = [batches_of(corpus, rank, 2, 2) for rank in range(2)]
    alone = batches_of(corpus)
    for batches in (alone, *two):
        batches.load_state_dict(json.loads(state))
    together = sorted(sum((read(batches, 1)[0] for batches in two), []))
    assert together == sorted(read(alone, 1)[0])


@pytest.mark.parametrize("changed", [{"seed": 8}, {"context": 5}])
def test_a_position_in_another_stream_is_refused(stream, tmp_path, data, changed):
    corpus = stream.load_stream(data, 300, tmp_path / "cache", make=True)
    state = batches_of(corpus).state_dict()
    with pytest.raises(ValueError, match="must be that of the checkpoint"):
        batches_of(corpus, **changed).load_state_dict(state)


def test_a_tokenizer_is_made_once(stream, tmp_path, data, monkeypatch):
    made = stream.load_stream(data, 300, tmp_path / "cache", make=True)
    monkeypatch.delattr(stream, "train_tokenizer")
    again = stream.load_stream(data, 300, tmp_path / "cache", make=False)
    assert again.key == made.key
    assert again.tokenizer.to_str() == made.tokenizer.to_str()
    assert np.array_equal(again.validation, made.validation)


# -------------------------------------------------------------------------------------
# In a checkpoint, and in a run


def save_and_go_on(rank, folders, data, cache, directory):
    """Two workers save; as many, read on from a checkpoint, go on."""
    sys.path[:0] = folders
    stream = importlib.import_module("stream")
    corpus = stream.load_stream(data, 300, Path(cache), make=False)
    batches = batches_of(corpus, rank, 2, 2)
    read(batches, 12)
    with lowcomm.Checkpointer(directory, batches=batches) as checkpoints:
        checkpoints.save(12)
    expected = read(batches, 5)
    again = batches_of(corpus, rank, 2, 2)
    loaded = lowcomm.Checkpointer(directory, batches=again)
    assert loaded.load() == 12
    assert loaded.report.dropped == []
    return expected == read(again, 5)


@pytest.mark.workers
def test_a_stream_is_saved_with_the_rest(stream, tmp_path, data):
    stream.load_stream(data, 300, tmp_path / "cache", make=True)
    # The fixture's `datasets` is known to this process alone.
    packages = [str(RECIPES), str(tmp_path / "packages")]
    arguments = (packages, data, str(tmp_path / "cache"), str(tmp_path / "saved"))
    assert run_workers(save_and_go_on, 2, *arguments) == [True, True]


@pytest.mark.workers
@pytest.mark.timeout(240)  # two starts
def test_a_run_on_a_stream_resumes_to_the_same_bits(tmp_path):
    write_json(tmp_path / "rows")
    packages = write_stand_in(tmp_path / "packages")
    flags = ("--data", "hf:rows", "--num-steps", "40", "--save-every", "10")

    def run(out, *more):
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        script = (str(RECIPES / "pretrain.py"), "smoke", *flags, "--out", out, *more)
        path = os.pathsep.join([str(ROOT), str(packages)])
        done = subprocess.run(
            [sys.executable, *launcher, *script],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / out / "metrics.jsonl").read_text().splitlines()
        return [
            {k: json.loads(line)[k] for k in ("step", "loss", "val_loss")}
            for line in lines
        ]

    uninterrupted = run("a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for step in ("30", "40"):
        shutil.rmtree(tmp_path / "b" / "checkpoints" / f"step-000000{step}")
    assert run("b", "--resume") == uninterrupted
    assert uninterrupted[-1]["step"] == 40
    assert uninterrupted[-1]["loss"] < uninterrupted[0]["loss"] - 0.3
