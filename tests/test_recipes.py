"""The recipes: their data by itself, then runs, launched as users do.

Whole runs take seconds, nearly all of it imports. So there are few, each checking much.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import lowcomm
from lowcomm.testing import free_port, run_workers

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
TORCHRUN_METHODS = ("ddp", "local_sgd", "diloco")
METHODS = (
    "local_sgd", "local_adam", "diloco", "streaming", "eager", "noloco", "desloc",
    "mtdao", "slowmo",
)  # fmt: skip
TIMES = ("exposed_s", "utilization", "tokens_s", "wall_s")
NUM_STEPS, SYNC_EVERY = 120, 10


@pytest.fixture
def recipe(monkeypatch):
    """Imports a recipe's file as its neighbours do."""
    monkeypatch.syspath_prepend(RECIPES)
    return importlib.import_module


def test_recipes_are_not_a_package():
    with pytest.raises(ModuleNotFoundError, match="never imported"):
        importlib.import_module("recipes")


# -------------------------------------------------------------------------------------
# The command line


def complaint(configure, capsys, arguments):
    """What is printed for wrong arguments, without the box around it."""
    with pytest.raises(SystemExit) as error:
        configure(arguments)
    assert error.value.code == 2
    output = capsys.readouterr()
    return " ".join(re.sub("[─│╭╮╰╯|+]|-{3,}", " ", output.out + output.err).split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Expected one of {smoke, demo, compare, stdlib_small, diloco-150m, "),
        (["no_such_run"], "Unrecognized options: no_such_run Available subcommands"),
        (["smoke", "--method", "sgd"], "invalid choice 'sgd' for argument '--method'"),
        (["smoke", "--sync-evry", "3"], "Unrecognized options: --sync-evry"),
        (["smoke", "--sync-evry", "3"], "Perhaps you meant: --sync-every"),
        (["smoke", "--num-steps", "many"], "Error parsing --num-steps"),
        (["smoke", "--num-steps", "0"], "must be at least 1, got num_steps=0."),
        (
            ["smoke", "--log-every", "4", "--eval-every", "6"],
            "eval_every must be a multiple of log_every, got eval_every=6 with "
            "log_every=4.",
        ),
        (
            ["smoke", "--method", "ddp", "--inner", "adopt"],
            "inner must be adamw with ddp, got inner='adopt'.",
        ),
    ],
)
def test_a_wrong_command_line_is_explained(recipe, capsys, arguments, message):
    assert message in complaint(recipe("runs").configure, capsys, arguments)


def test_one_worker_explains_for_all(recipe, capsys):
    with pytest.raises(SystemExit):
        recipe("runs").configure(["no_such_run"], quiet=True)
    assert capsys.readouterr() == ("", "")


def test_every_run_carries_its_name(recipe):
    runs = recipe("runs")
    for name in runs.all_runs():
        assert runs.configure([name, "--num-steps", "7"]).name == name


def papers(recipe):
    runs = recipe("runs")
    return [run() for run in runs.PAPERS]


def test_parameters_are_counted(recipe):
    config = recipe("runs").smoke()
    model = recipe("pretrain").build_model(config)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert recipe("runs").count_parameters(config) == built


def test_a_paper_run_has_the_size_in_its_name(recipe):
    units = {"m": 1e6, "b": 1e9}
    for config in papers(recipe):
        size = re.search(r"-(\d+\.?\d*)([mb])$", config.name)
        if size:
            count = recipe("runs").count_parameters(config)
            assert 0.9 < count / (float(size[1]) * units[size[2]]) < 1.3, config.name


def test_the_page_on_runs_launches_each_with_its_workers(recipe):
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    launched = re.findall(r"--nnodes (\d+) --nproc-per-node (\d+) .*RUN (\S+)", text)
    workers = {name: int(nodes) * int(each) for nodes, each, name in launched}
    assert workers == {config.name: config.workers for config in papers(recipe)}
    for config in papers(recipe):
        row = rf"\| `{config.name}` \| {config.workers} \|.*every {config.sync_every}\b"
        assert re.search(row, text), config.name
        batch = config.batch_size * config.accumulate
        assert f"| {batch} × {config.context}" in re.search(row + ".*", text)[0]


def test_a_tiny_sibling_keeps_the_ratios(recipe):
    runs = recipe("runs")
    for config in papers(recipe):
        tiny = runs.tiny(config)
        assert tiny.num_steps <= 1500, tiny.name
        rounds = config.num_steps // config.sync_every
        assert tiny.num_steps == rounds * tiny.sync_every
        shares = [c.warmup_steps / c.num_steps for c in (config, tiny)]
        assert shares[1] == pytest.approx(shares[0], rel=0.1, abs=0.001)
        left = [c.slow_beta**c.sync_every for c in (config, tiny)]
        assert left[1] == pytest.approx(left[0])
        for name in ("workers", "method", "outer_lr", "outer_momentum", "codec"):
            assert getattr(tiny, name) == getattr(config, name)


def test_every_tiny_sibling_trains(recipe):
    runs, trials, data = recipe("runs"), recipe("trials"), recipe("data")
    tokens = np.tile(np.arange(600, dtype=np.uint16), 200)
    corpus = data.Corpus("count", tokens, tokens[:2000])
    for config in papers(recipe):
        steps = 2 * runs.tiny(config).sync_every + 1
        tiny = dataclasses.replace(
            runs.tiny(config), workers=2, num_steps=steps, eval_windows=8
        )
        trial = trials.train(tiny, corpus)
        assert trial.final.val_loss < 6.6, tiny.name


# -------------------------------------------------------------------------------------
# Documents and tokens


def words(seed, num_words=60):
    generator = random.Random(seed)
    syllables = ["ba", "do", "ke", "li", "mu", "na", "po", "ri", "se", "tu"]
    return " ".join(
        "".join(generator.choices(syllables, k=generator.randint(1, 3)))
        for _ in range(num_words)
    )


def write_json_lines(file, num_documents):
    lines = [json.dumps({"text": words(seed)}) for seed in range(num_documents)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def test_documents_are_files_and_json_lines_in_order_of_name(recipe, tmp_path):
    (tmp_path / "b.txt").write_text("in b", encoding="utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.py").write_text("in c", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text(
        '{"text": "line 1\\u2028still line 1"}\n\n{"text": "line 3", "more": 1}\n',
        encoding="utf-8",
    )
    (tmp_path / ".hidden").write_bytes(b"\xff")
    (tmp_path / "empty.txt").touch()
    assert recipe("data").read_documents(tmp_path) == [
        "line 1\u2028still line 1",
        "line 3",
        "in b",
        "in c",
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "ok"}\n{"txt": "no"}\n', r"txt.*a\.jsonl, line 2"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": 3}\n', r"a\.jsonl, line 2"),
        ("a.jsonl", b"not JSON\n", r"'not JSON' in .*a\.jsonl, line 1"),
        ("a.txt", b"\xff\xfe", r"UTF-8 text, got .*a\.txt.*Convert or remove"),
        ("a.txt", b" \n", r"must hold some text"),
    ],
)
def test_what_is_no_text_is_named(recipe, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        recipe("data").read_documents(tmp_path / name)


def test_data_that_does_not_exist_is_named(recipe, tmp_path):
    with pytest.raises(ValueError, match="no_such_file"):
        recipe("data").read_documents(tmp_path / "no_such_file")


def test_the_default_is_the_standard_library_without_tests(recipe):
    documents = recipe("data").read_documents(None)
    assert len(documents) > 100
    assert any("class OrderedDict" in document for document in documents)
    assert not any("class TestOrderedDict" in document for document in documents)


def test_the_split_is_by_document_and_always_the_same(recipe):
    split = recipe("data").split
    documents = [words(seed) for seed in range(40)]
    train, validation = split(documents)
    assert sorted(train + validation) == sorted(documents)
    assert len(validation) == 2
    assert split(documents) == (train, validation)


def test_a_lone_document_is_cut_at_a_line(recipe):
    text = "".join(f"line {i}\n" for i in range(100))
    (train,), (validation,) = recipe("data").split([text])
    assert train + validation == text
    assert validation.startswith("line 9")


def test_tokens_are_the_text_with_ends(recipe):
    data = recipe("data")
    documents = ["one\n\ttwo", "drei \u00e4\u00f6\u00fc \U0001f600"]
    tokenizer = data.train_tokenizer(documents * 9, vocab_size=270)
    tokens = data.encode(tokenizer, documents)
    assert tokens.dtype == np.uint16
    text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
    assert text == "".join(text + data.END_OF_DOCUMENT for text in documents)


def test_a_corpus_is_made_once(recipe, tmp_path, monkeypatch):
    data = recipe("data")
    file, cache = write_json_lines(tmp_path / "a.jsonl", 40), tmp_path / "cache"
    made = data.load_corpus(file, 300, cache, make=True)
    monkeypatch.delattr(data, "train_tokenizer")
    for make in (True, False):
        again = data.load_corpus(file, 300, cache, make=make)
        assert again.key == made.key
        assert np.array_equal(again.train, made.train)
        assert np.array_equal(again.validation, made.validation)
    assert [entry.name for entry in cache.iterdir()] == [made.key]


def test_another_text_or_vocabulary_is_another_corpus(recipe):
    key = recipe("data").corpus_key
    keys = [key(["a", "b"], 300), key(["ab"], 300), key(["b", "a"], 300)]
    assert len({*keys, key(["a", "b"], 301)}) == 4


def test_a_corpus_that_another_job_made_first_is_taken(recipe, tmp_path):
    data = recipe("data")
    documents = [words(seed) for seed in range(3)]
    for _ in range(2):
        data.make_cache_entry(tmp_path / "cache" / "key", documents, 300)
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("vocab_size", [256, 2**16 + 1])
def test_a_vocabulary_that_does_not_fit_is_refused(recipe, tmp_path, vocab_size):
    with pytest.raises(ValueError, match=f"from 257 to 65536, got {vocab_size=}"):
        recipe("data").load_corpus(None, vocab_size, tmp_path, make=True)


# -------------------------------------------------------------------------------------
# Who reads what

CONTEXT = 4
NUM_WINDOWS = 23
TOKENS = np.arange(NUM_WINDOWS * CONTEXT + 1, dtype=np.uint16)


def make_batches(data, rank=0, world=2, batch_size=3, **changed):
    settings = {"context": CONTEXT, "seed": 7, **changed}
    return data.Batches(
        TOKENS, rank=rank, world=world, batch_size=batch_size, **settings
    )


def first_tokens(batches, num_steps):
    """The first token of each window, which names the window here."""
    return [next(batches)[:, 0].tolist() for _ in range(num_steps)]


def test_windows_hold_inputs_and_targets(recipe):
    batch = next(make_batches(recipe("data")))
    assert batch.shape == (3, CONTEXT + 1)
    assert batch.dtype == torch.int64
    torch.testing.assert_close(batch[:, 1:], batch[:, :-1] + 1)


def test_workers_share_an_epoch_without_overlap(recipe):
    # 23 windows make 3 steps of 2 workers with 3 windows each; 5 are left out.
    data = recipe("data")
    read = [first_tokens(make_batches(data, rank), 6) for rank in range(2)]
    epochs = [sum(read[0][e : e + 3] + read[1][e : e + 3], []) for e in (0, 3)]
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch) == 18
    assert epochs[0] != epochs[1]


def test_a_step_reads_the_same_windows_however_many_workers_share_it(recipe):
    data = recipe("data")
    alone = first_tokens(make_batches(data, world=1, batch_size=4), 10)
    two, four = (
        [
            first_tokens(make_batches(data, rank, world, batch_size=4 // world), 10)
            for rank in range(world)
        ]
        for world in (2, 4)
    )
    for step in range(10):
        together = sorted(alone[step])
        assert sorted(sum((worker[step] for worker in two), [])) == together
        assert sorted(sum((worker[step] for worker in four), [])) == together


def test_two_resumes_change_nothing(recipe):
    data = recipe("data")
    uninterrupted = first_tokens(make_batches(data), 20)
    read, state = [], None
    for num_steps in (4, 9, 7):  # ends in the middle of epochs
        batches = make_batches(data)
        if state:
            batches.load_state_dict(json.loads(state))
        read += first_tokens(batches, num_steps)
        state = json.dumps(batches.state_dict())
    assert read == uninterrupted


def test_more_workers_go_on_from_the_position_of_fewer(recipe):
    """Of 23 windows one worker has read 18, and 6 for two are not left: a new epoch."""
    data = recipe("data")
    alone = make_batches(data, world=1)
    first_tokens(alone, 6)
    two = [make_batches(data, rank) for rank in range(2)]
    for batches in two:
        batches.load_state_dict(alone.state_dict())
    read = [first_tokens(batches, 1)[0] for batches in two]
    assert [len(batch) for batch in read] == [3, 3]
    first_tokens(alone, 1)
    assert sorted(sum(read, [])) == sorted(sum(first_tokens(alone, 2), []))


def test_peeking_moves_nothing(recipe):
    batches = make_batches(recipe("data"))
    assert torch.equal(batches.peek(), batches.peek())
    assert torch.equal(batches.peek(), next(batches))


@pytest.mark.parametrize("changed", [{"seed": 8}, {"context": 5}])
def test_a_position_in_other_data_is_refused(recipe, changed):
    data = recipe("data")
    state = make_batches(data).state_dict()
    with pytest.raises(ValueError, match="must be that of the checkpoint"):
        make_batches(data, **changed).load_state_dict(state)


def test_too_little_text_is_refused(recipe):
    data = recipe("data")
    make_batches(data, world=1, batch_size=NUM_WINDOWS)
    with pytest.raises(ValueError, match="at least 24 windows.*got 23"):
        make_batches(data, world=1, batch_size=NUM_WINDOWS + 1)
    with pytest.raises(ValueError, match="more than 4 tokens of validation, got 4"):
        data.validation_windows(TOKENS[:4], CONTEXT, 2)


def test_validation_is_spread_over_the_text(recipe):
    spread = recipe("data").validation_windows
    assert spread(TOKENS, CONTEXT, 4)[:, 0].tolist() == [0, 20, 44, 68]
    assert len(spread(TOKENS, CONTEXT, 1000)) == NUM_WINDOWS


def same_shard_twice(rank, recipes):
    sys.path.insert(0, recipes)
    check = importlib.import_module("pretrain").check_shards_differ
    data = importlib.import_module("data")
    check(make_batches(data, rank))
    check(make_batches(data, rank=0))


@pytest.mark.workers
def test_workers_that_read_the_same_are_found_out():
    with pytest.raises(RuntimeError, match="must read different data"):
        run_workers(same_shard_twice, 2, str(RECIPES))


# -------------------------------------------------------------------------------------
# Methods

#: Learns from nothing but the last token, so that one layer is enough.
WALK = np.random.default_rng(0).permutation(300).astype(np.uint16)[:29]


def train_simulated(recipe, num_steps=20, **changed):
    """Losses of rank 0, what was sent, and all workers' weights after `finish`."""
    pretrain, data = recipe("pretrain"), recipe("data")
    changed = {"num_steps": num_steps, "lr": 0.01, "warmup_steps": 2, **changed}
    config = dataclasses.replace(recipe("runs").smoke(), sync_every=5, **changed)
    tokens = np.tile(WALK, 200)

    def worker(rank, group):
        torch.manual_seed(config.seed)
        model = pretrain.build_model(config)
        optimizer = recipe("methods").build_optimizer(config, model)
        scheduler = pretrain.build_scheduler(config, optimizer)
        batches = data.Batches(
            tokens, context=config.context, batch_size=4, rank=rank, world=2, seed=0
        )
        losses = []
        for _ in range(num_steps):
            loss = pretrain.loss_of(model, next(batches), config)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
        optimizer.finish()
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        return losses, optimizer.stats, weights

    (losses, stats, weights), (_, _, others) = lowcomm.simulate(worker, 2)
    assert torch.equal(weights, others)
    return losses, stats, weights


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(recipe, method):
    losses, stats, weights = train_simulated(recipe, method=method)
    assert losses[-1] < losses[0] - 0.1
    # Between two workers a mean, and a pair, are S bytes; moments are as long again.
    # At the end all are made equal: pairs, moments, and fragments in mid-round.
    sizes = {
        "local_adam": 4 * 3,
        "streaming": 4.77,
        "eager": 4 + 1,
        "noloco": 4 + 1,
        "desloc": 4 + 1 + 2,
        "mtdao": 4 * 3,
    }
    expected = sizes.get(method, 4) * 4 * len(weights)
    assert stats.bytes_sent == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    "changed",
    [
        {"method": "local_sgd", "qsr": 0.1, "schedule": "wsd"},
        {"method": "diloco", "codec": "int8", "overlap": 2},
        {"method": "noloco", "outer_lr": 0.4, "outer_momentum": 0.3},
        {"method": "slowmo", "outer_lr": 0.9, "outer_momentum": 0.3},
        {"method": "desloc", "inner": "adopt", "beta2": 0.9999},
        {"method": "mtdao", "inner": "adopt", "beta2": 0.9999, "slow_beta": 0.99},
    ],
    ids=lambda changed: changed["method"],
)
def test_every_setting_reaches_its_method(recipe, changed):
    plain = train_simulated(recipe, method=changed["method"])[2]
    assert not torch.equal(train_simulated(recipe, **changed)[2], plain)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_schedule_warms_up_and_comes_down(recipe, schedule):
    config = dataclasses.replace(
        recipe("runs").smoke(), schedule=schedule, warmup_steps=10, num_steps=100
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = recipe("pretrain").build_scheduler(config, optimizer)
    rates = []
    for _ in range(100):
        rates += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == 1.0
    assert sorted(rates[10:], reverse=True) == rates[10:]
    halfway, last = {"cosine": (0.55, 0.1), "wsd": (1.0, 0.05)}[schedule]
    assert rates[55] == pytest.approx(halfway, abs=0.01)
    assert rates[-1] == pytest.approx(last, abs=0.01)
    assert scheduler.get_last_lr()[0] >= 0


def test_a_run_starts_from_the_weights_of_another(recipe, tmp_path):
    pretrain, config = recipe("pretrain"), recipe("runs").smoke()
    before, model = (pretrain.build_model(config) for _ in range(2))
    file = tmp_path / "model.pt"
    with pytest.raises(ValueError, match="init must be a file that exists, got .*pt"):
        pretrain.load_weights(dataclasses.replace(config, init=file), model)
    torch.save(before.state_dict(), file)
    pretrain.load_weights(dataclasses.replace(config, init=file), model)
    for a, b in zip(before.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


# -------------------------------------------------------------------------------------
# Resuming


def test_a_new_run_leaves_the_checkpoints_of_another_alone(recipe, tmp_path):
    check_is_new = recipe("pretrain").check_is_new
    check_is_new(tmp_path / "not there")
    check_is_new(tmp_path)
    (tmp_path / "step-00000005").mkdir()
    with pytest.raises(ValueError, match="no checkpoints.*step-00000005.*--resume"):
        check_is_new(tmp_path)


def test_restarts_that_would_find_old_addresses_are_refused(recipe):
    check = recipe("pretrain").check_restarts
    shared = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    check({})
    check({**shared, "TORCHELASTIC_MAX_RESTARTS": "0"})
    check({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "False"})
    with pytest.raises(ValueError, match=r"restarts=3.*Set TORCH_DISABLE_SHARE_RDZV"):
        check({**shared, "TORCHELASTIC_MAX_RESTARTS": "3"})


def test_what_makes_a_run_must_be_the_same_when_it_is_resumed(recipe):
    settings, runs, data = recipe("pretrain").settings, recipe("runs"), recipe("data")
    config = runs.smoke()
    corpus = data.Corpus("key", TOKENS, TOKENS)
    mine = settings(config, corpus)
    assert mine == json.loads(json.dumps(mine))
    other = dataclasses.replace(config, out=Path("x"), num_steps=9, resume=True)
    assert settings(other, corpus) == mine
    for changed in ({"lr": 1.0}, {"method": "ddp"}, {"seed": 4}):
        assert settings(dataclasses.replace(config, **changed), corpus) != mine
    assert settings(config, corpus._replace(key="other")) != mine


def test_metrics_after_the_checkpoint_are_written_again(recipe, tmp_path):
    file = tmp_path / "metrics.jsonl"
    keep_lines_until = recipe("report").keep_lines_until
    file.write_text('{"step": 5}\n{"step": 10}\n{"step": 15}\n{"st', encoding="utf-8")
    keep_lines_until(file, 10)
    assert file.read_text(encoding="utf-8") == '{"step": 5}\n{"step": 10}\n'


# -------------------------------------------------------------------------------------
# The demo's page


def made_up_run(demo, val_loss, step_bytes, setup_bytes):
    metrics = [
        {
            "step": step,
            "tokens": step * 1000,
            "loss": val_loss,
            "bytes_sent": step * step_bytes,
            "setup_bytes": setup_bytes,
            "exposed_s": 1.25,
            "wall_s": 2.5,
            "val_loss": val_loss if step % 2 == 0 else None,
        }
        for step in range(1, 5)
    ]
    return demo.Run(metrics, parameters=1000)


def test_the_demo_compares_two_runs(recipe, tmp_path):
    # 1000 parameters are 4000 bytes, sent once by each of two workers in an exchange:
    # 4 exchanges of DDP, 2 of DiLoCo when 4 steps make rounds of 3.
    demo = recipe("demo")
    config = recipe("runs").Config("demo", num_steps=4, sync_every=3)
    ddp = made_up_run(demo, 2.0, 4000, None)
    diloco = made_up_run(demo, 2.1, 2000, 4008)
    assert diloco.series("tokens", "val_loss") == ([2000, 4000], [2.1, 2.1])

    columns = [
        list(column.cells) for column in demo.compare(config, ddp, diloco).columns
    ]
    rows = {
        name.strip(): (left, right) for name, left, right in zip(*columns, strict=True)
    }
    assert rows["validation loss"] == ("2.000", "2.100 (+5.0%)")
    assert rows["bytes sent, each worker"] == ("16.00 kB", "8.00 kB")
    assert rows["by the formula"] == ("16.00 kB", "8.00 kB")
    assert rows["fewer than DDP"] == ("", "2.00 times")
    assert rows["bytes of setup"] == ("not known", "4.01 kB")

    demo.plot(ddp, diloco, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 0


# -------------------------------------------------------------------------------------
# Whole runs


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory of data and of one cache; runs go to its out/smoke/<method>."""
    folder = tmp_path_factory.mktemp("recipes")
    write_json_lines(folder / "words.jsonl", 100)
    return folder


def start(place, launcher, *flags, **environment):
    command = [sys.executable, *launcher, str(RECIPES / "pretrain.py"), "smoke", *flags]
    return subprocess.Popen(
        [*command, "--data", "words.jsonl"],
        cwd=place,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def torchrun(place, *flags):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return end(start(place, launcher, *flags))


def end(process, timeout_s=100):
    """Waits for a run that must succeed, and returns what it printed."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        process.terminate()  # torchrun then ends its workers
    assert process.returncode == 0, output
    return output


def start_workers(place, *flags):
    """The two processes that torchrun would start, at hand to be killed."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        start(
            place,
            (),
            *flags,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            **rendezvous,
        )
        for rank in range(2)
    ]


def metrics_of(folder):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def without_times(metrics):
    return [{k: v for k, v in line.items() if k not in TIMES} for line in metrics]


@pytest.fixture(scope="module")
def whole_run(place):
    """A method's run that nothing stops, once: what it prints, and where it writes."""

    def run(method):
        output = torchrun(place, "--method", method, "--num-steps", str(NUM_STEPS))
        return output, place / "out" / "smoke" / method

    return functools.cache(run)


@pytest.mark.workers
@pytest.mark.parametrize("method", TORCHRUN_METHODS)
def test_a_run_trains_and_tells(recipe, whole_run, method):
    output, out = whole_run(method)
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in output

    facts = json.loads((out / "run.json").read_text(encoding="utf-8"))
    metrics = metrics_of(out)
    assert [line["step"] for line in metrics] == list(range(5, NUM_STEPS + 1, 5))
    documented = recipe("report").Lines.__doc__
    assert all(re.search(rf"^ +{key} ", documented, re.M) for key in metrics[0])

    # Two workers, four windows of 32 tokens each.
    assert all(line["tokens"] == line["step"] * 2 * 4 * 32 for line in metrics)
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.5
    validated = [line["step"] for line in metrics if line["val_loss"] is not None]
    assert validated == list(range(20, NUM_STEPS + 1, 20))
    assert metrics[-1]["val_loss"] == pytest.approx(metrics[-1]["loss"], abs=0.5)

    # A mean of S bytes over two workers sends S from each.
    period = 1 if method == "ddp" else SYNC_EVERY
    for line in metrics:
        expected = line["step"] // period * facts["parameters"] * 4
        assert line["bytes_sent"] == pytest.approx(expected, rel=0.01)
    assert (out / "model.pt").exists()
    assert (metrics[-1]["setup_bytes"] is None) == (method == "ddp")
    assert metrics[-1]["exposed_s"] <= metrics[-1]["wall_s"]


def wait_until(is_so, workers, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert all(worker.poll() is None for worker in workers), workers[
            0
        ].stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.workers
def test_a_killed_run_resumes_to_the_same_bits(place, whole_run):
    flags = ("--method", "diloco", "--num-steps", str(NUM_STEPS), "--save-every", "7")
    killed = place / "killed"
    flags = (*flags, "--out", str(killed))
    workers = start_workers(place, *flags)
    try:
        # Step 14 is in the middle of the second round.
        wait_until((killed / "checkpoints" / "step-00000014").exists, workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert metrics_of(killed)[-1]["step"] < NUM_STEPS

    torchrun(place, *flags, "--resume")
    _, uninterrupted = whole_run("diloco")
    assert without_times(metrics_of(killed)) == without_times(metrics_of(uninterrupted))


def workers_of(torchrun):
    """The processes that it has started and that still run, by rank."""
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text()
    found = {}
    for pid in map(int, children.split()):
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found |= {int(e[5:]): pid for e in environ if e.startswith(b"RANK=")}
    return found


@pytest.mark.workers
@pytest.mark.timeout(240)  # three starts
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_torchrun_resumes_by_itself_after_a_notice_and_after_a_kill(place, whole_run):
    restarted = place / "restarted"
    run = start(
        place,
        ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        + ("--max-restarts=2",),
        *("--method", "diloco", "--num-steps", str(NUM_STEPS), "--save-every", "7"),
        *("--out", str(restarted), "--resume"),
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )

    def newest():
        names = [path.name for path in restarted.glob("checkpoints/step-????????")]
        return max((int(name[5:]) for name in names), default=0)

    try:
        wait_until(lambda: newest() >= 7, [run])
        before = workers_of(run)
        os.kill(before[1], signal.SIGTERM)  # all save the same step, and end
        wait_until(lambda: not {*before.values()} & {*workers_of(run).values()}, [run])
        saved_on_notice = newest()
        assert saved_on_notice % SYNC_EVERY == 0
        wait_until(lambda: newest() > saved_on_notice, [run])
        os.kill(workers_of(run)[0], signal.SIGKILL)
    except BaseException:
        run.terminate()
        print(run.communicate()[0])
        raise
    output = end(run)
    assert f"exitcode: {128 + signal.SIGTERM}" in output
    _, uninterrupted = whole_run("diloco")
    assert without_times(metrics_of(restarted)) == without_times(
        metrics_of(uninterrupted)
    )


@pytest.mark.workers
def test_alone_with_accumulation_in_bfloat16(place):
    flags = ("--num-steps", "20", "--batch-size", "2", "--accumulate", "2", "--bf16")
    end(start(place, (), *flags, "--method", "ddp", "--out", "alone"))
    last = metrics_of(place / "alone")[-1]
    assert last["tokens"] == 20 * 2 * 2 * 32
    assert last["bytes_sent"] == 0
    assert last["val_loss"] < 6
