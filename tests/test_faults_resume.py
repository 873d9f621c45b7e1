"""Faults of checkpoints and of data that systems of this kind have had, by name.

Every test says in its docstring which kind of fault it would find. Half-written and
damaged checkpoints, other numbers of workers and other settings are in
test_checkpoint.py; states by themselves in test_dropin.py.
"""

import functools
import importlib
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import lowcomm
from lowcomm.testing import run_workers
from toy import (
    inner_state_of,
    network,
    parameters_of,
    same,
    scalar,
    slide,
    snapshot,
    train,
)

RECIPES = Path(__file__).parent.parent / "recipes"


@pytest.fixture
def recipe(monkeypatch):
    """Imports a recipe's file as its neighbours do."""
    monkeypatch.syspath_prepend(RECIPES)
    return importlib.import_module


class Part:
    """Holds what it is given, and gives away what it holds."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def save(directory, step, **parts):
    with lowcomm.Checkpointer(directory, **parts) as ckpt:
        ckpt.save(step)


def load(directory, **parts):
    return lowcomm.Checkpointer(directory, **parts).load()


def tensors_at(directory, step, file):
    """A file of a checkpoint, read as torch reads what it does not trust."""
    path = Path(directory, f"step-{step:08d}", file)
    return torch.load(path, weights_only=True)


# -------------------------------------------------------------------------------------
# What the next step depends on


def one_value(value=0.0, **settings):
    x = scalar(value)
    return x, lowcomm.DiLoCo(torch.optim.SGD([x], lr=1.0), outer_lr=0.5, **settings)


class Values(nn.Module):
    """A parameter as a module."""

    def __init__(self, value):
        super().__init__()
        self.value = value


def test_the_outer_momentum_and_the_anchor_are_in_the_checkpoint(tmp_path):
    """Model, optimizer, rate and data are saved, and the outer state is forgotten."""
    x, opt = one_value(sync_every=1, outer_momentum=0.5, nesterov=False)
    # The momentum is the sum of displacements of 1 from each anchor, halved each time:
    #   m = 1     x = 0 - .5 * 1    = -.5
    #   m = 1.5   x = -.5 - .5 * 1.5 = -1.25
    slide(x, opt)
    slide(x, opt)
    assert x.item() == -1.25
    save(tmp_path, 2, model=Values(x), optimizer=opt)
    y, resumed = one_value(sync_every=1, outer_momentum=0.5, nesterov=False)
    load(tmp_path, model=Values(y), optimizer=resumed)
    #   m = 1.75  x = -1.25 - .5 * 1.75 = -2.125; without the momentum -1.75
    slide(y, resumed)
    assert y.item() == -2.125


def test_a_resume_in_mid_round_keeps_the_anchor_and_the_local_step(tmp_path):
    """An optimizer that is built at the local weights takes those for the anchor."""
    x, opt = one_value(sync_every=10, outer_momentum=0.0)
    for _ in range(7):
        slide(x, opt)
    save(tmp_path, 7, model=Values(x), optimizer=opt)
    y, resumed = one_value(100.0, sync_every=10, outer_momentum=0.0)
    load(tmp_path, model=Values(y), optimizer=resumed)
    assert y.item() == -7.0
    for _ in range(3):
        slide(y, resumed)
    # Half of the way from the anchor 0 to -10; from an anchor of -7 it would be -8.5,
    # and with a round that begins with the resume there would be none yet.
    assert y.item() == -5.0


def test_moments_are_there_before_the_first_step_after_a_load(tmp_path):
    """What is loaded into the state of a fresh optimizer, which is empty, is lost."""
    model = network()
    opt = lowcomm.DiLoCo(model.parameters(), lr=0.1, sync_every=3)
    train(model, opt, range(4))
    save(tmp_path, 4, model=model, optimizer=opt)
    other = network(seed=1)
    resumed = lowcomm.DiLoCo(other.parameters(), lr=0.1, sync_every=3)
    assert not resumed.state
    load(tmp_path, model=other, optimizer=resumed)
    assert len(resumed.state) == 4
    assert same(inner_state_of(resumed), inner_state_of(opt))


def test_parameters_that_are_frozen_or_never_used_are_as_they_were(tmp_path):
    """Only parameters with a gradient, or only those with a full state, are saved."""

    def build(seed):
        model = nn.Sequential(network(seed), network(seed + 1), network(seed + 2))
        model[0].requires_grad_(False)
        return model, lowcomm.DiLoCo(model.parameters(), lr=0.1, sync_every=3)

    def go(model, opt, steps):
        train(model[1], opt, steps)  # and the last of the three is never used

    model, opt = build(0)
    go(model, opt, range(4))
    save(tmp_path, 4, model=model, optimizer=opt)
    other, resumed = build(10)
    load(tmp_path, model=other, optimizer=resumed)
    assert same(parameters_of(other), parameters_of(model))
    assert [p in resumed.state for p in other.parameters()] == [
        p in opt.state for p in model.parameters()
    ]
    for one in ((model, opt), (other, resumed)):
        go(*one, range(4, 8))
    assert same(parameters_of(other), parameters_of(model))
    assert same(parameters_of(other[0]), parameters_of(network(0)))


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_the_second_save_has_the_rate_of_its_step(tmp_path, kind):
    """Memory that is used again has fresh tensors and the first save's rate."""

    def build():
        model = network()
        opt = lowcomm.LocalSGD(
            torch.optim.AdamW(model.parameters(), lr=kind(0.1)), sync_every=3
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        parts = {"model": model, "optimizer": opt, "scheduler": scheduler}
        return parts, lowcomm.Checkpointer(tmp_path, **parts)

    parts, ckpt = build()
    for step in (1, 2, 3):
        train(parts["model"], parts["optimizer"], range(step, step + 1))
        parts["scheduler"].step()
        ckpt.save(step)
    ckpt.wait()
    again, other = build()
    assert other.load() == 3
    (group,) = again["optimizer"].param_groups
    assert float(group["lr"]) == pytest.approx(0.1 * 0.5**3)
    assert float(again["scheduler"].get_last_lr()[0]) == float(group["lr"])


@pytest.mark.parametrize(
    "position", [lambda n: {"at": n}, lambda n: [n], lambda n: {"a": {"b": [{"c": n}]}}]
)
def test_a_loader_that_goes_on_during_the_save_is_saved_as_of_the_step(
    tmp_path, monkeypatch, position
):
    """The loader's state is written later than the model's, and is newer."""
    go_on, fsync = [False], os.fsync

    def slow_fsync(number):
        while not go_on[0]:
            torch.zeros(1)
        fsync(number)

    def change(state, number):
        """In place, as a loader does whose state_dict gives away its own."""
        for key, value in state.items() if isinstance(state, dict) else [(0, state[0])]:
            if isinstance(value, int):
                state[key] = number
            else:
                change(value, number)

    loader, value = Part(position(5)), torch.tensor(5)
    ckpt = lowcomm.Checkpointer(tmp_path, loader=loader, model=Part({"value": value}))
    monkeypatch.setattr(os, "fsync", slow_fsync)
    ckpt.save(5)
    change(loader.state, 9)
    value.fill_(9)
    assert loader.state == position(9)
    go_on[0] = True
    ckpt.wait()
    model, other = Part(), Part()
    assert load(tmp_path, loader=other, model=model) == 5
    assert (other.state, model.state["value"].item()) == (position(5), 5)


GENERATORS = {
    "torch": lambda: torch.rand(3).tolist(),
    "numpy": lambda: np.random.rand(3).tolist(),
    "random": lambda: [random.random() for _ in range(3)],
    "numpy, half a pair": lambda: np.random.randn(3).tolist(),
    "random, half a pair": lambda: [random.gauss(0, 1) for _ in range(3)],
}


@pytest.mark.parametrize("draw", GENERATORS.values(), ids=GENERATORS)
def test_noise_goes_on_where_it_was(tmp_path, draw):
    """A generator's state that torch.load refuses is passed over, or half of it kept.

    Normal numbers are drawn in pairs, of which the second waits for the next call.
    """
    draw()
    save(tmp_path, 1, part=Part(1))
    noise = draw()
    draw()
    load(tmp_path, part=Part())
    assert draw() == noise
    assert tensors_at(tmp_path, 1, "worker-0.pt")["rng"].keys() >= {"torch", "numpy"}


# -------------------------------------------------------------------------------------
# Names


STATEFULS = {
    "ADOPT": lambda p: lowcomm.ADOPT(p, lr=0.1),
    "QHAdamW": lambda p: lowcomm.QHAdamW(p, lr=0.1),
    "DESLOC": lambda p: lowcomm.DESLOC(p, lr=0.1, sync_every=2),
    "DiLoCo": lambda p: lowcomm.DiLoCo(
        p, lr=0.1, sync_every=3, overlap=2, codec="int8", error_feedback=True
    ),
    "LocalSGD": lambda p: lowcomm.LocalSGD(p, lr=0.1, sync_every=2),
    "MTDAO": lambda p: lowcomm.MTDAO(p, lr=0.1, sync_every=2),
    "NoLoCo": lambda p: lowcomm.NoLoCo(p, lr=0.1, sync_every=2),
    "SlowMo": lambda p: lowcomm.SlowMo(p, lr=0.1, sync_every=2),
}


def test_no_public_class_with_a_state_is_left_out():
    stateful = {
        name
        for name in lowcomm.__all__
        if {"state_dict", "load_state_dict"} <= {*dir(getattr(lowcomm, name))}
    }
    assert stateful == STATEFULS.keys()


@pytest.mark.parametrize("name", STATEFULS)
def test_what_is_written_under_a_key_is_read_under_it(tmp_path, name):
    """A key is written and another one read: what is loaded keeps its first value."""

    def build(seed):
        model = network(seed)
        return model, STATEFULS[name](model.parameters())

    def worker(rank, group):
        model, opt = build(0)
        train(model, opt, range(5), rank)
        parts = {"model": model, "optimizer": opt}
        with lowcomm.Checkpointer(tmp_path, **parts) as ckpt:
            ckpt.save(5)
        states = snapshot([part.state_dict() for part in parts.values()])
        model, opt = build(1)
        lowcomm.Checkpointer(tmp_path, model=model, optimizer=opt).load()
        return same([model.state_dict(), opt.state_dict()], states)

    assert lowcomm.simulate(worker, 2) == [True, True]


def compiled(model):
    return torch.compile(model, backend="eager")


def blocks_compiled(model):
    model[0], model[2] = compiled(model[0]), compiled(model[2])
    return model


WRAPPED = {
    "plain": lambda model: model,
    "compiled": compiled,
    "blocks": blocks_compiled,
    "DataParallel": nn.DataParallel,
    "compiled DataParallel": lambda model: compiled(nn.DataParallel(model)),
}


class Doubled(nn.Linear):
    """A layer with a version, in the first of which its weight was half as large."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if metadata.get("version") != 2:
            state[f"{prefix}weight"] = 2 * state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def a_network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Doubled(4, 2))


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("plain", "compiled"),
        ("compiled", "plain"),
        ("compiled", "compiled"),
        ("blocks", "plain"),
        ("plain", "blocks"),
        ("compiled", "blocks"),
        ("blocks", "blocks"),
        ("DataParallel", "plain"),
        ("compiled DataParallel", "blocks"),
    ],
)
def test_what_was_saved_compiled_is_loaded_plain(tmp_path, before, after, named):
    """Every name begins with `_orig_mod.` or `module.`, and none is found."""

    def build(kind):
        plain = a_network()
        model = WRAPPED[kind](plain)
        of = plain if "DataParallel" in kind else model
        params = of.named_parameters() if named else of.parameters()
        opt = lowcomm.DiLoCo(
            params, lr=0.1, sync_every=4, overlap=2, codec="int8", error_feedback=True
        )
        return model, opt

    def go(model, opt, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            opt.zero_grad()
            model(torch.randn(5, 3, generator=generator)).square().sum().backward()
            opt.step()

    def worker(rank, group):
        model, opt = build(before)
        go(model, opt, range(9))  # the second round's share is under way
        with lowcomm.Checkpointer(tmp_path, model=model, optimizer=opt) as ckpt:
            ckpt.save(9)
        other, resumed = build(after)
        lowcomm.Checkpointer(tmp_path, model=other, optimizer=resumed).load()
        for one in ((model, opt), (other, resumed)):
            go(*one, range(9, 15))
        ends = [[*m.state_dict().values()] for m in (model, other)]
        return same(*map(snapshot, ends)) and same(
            inner_state_of(opt), inner_state_of(resumed)
        )

    with torch.compiler.set_stance("force_eager"):  # nothing but names is of interest
        assert lowcomm.simulate(worker, 1) == [True]


# -------------------------------------------------------------------------------------
# Several workers, one directory


def save_and_list_what_was_done(rank, directory):
    """The names of the checkpoints' directories that this worker has touched."""
    touched = []

    def noting(function):
        def noted(path, *rest, **options):
            if Path(path).parent == directory:
                touched.append(Path(path).name.partition(".")[0])
            return function(path, *rest, **options)

        return noted

    os.rename, shutil.rmtree = noting(os.rename), noting(shutil.rmtree)
    ckpt = lowcomm.Checkpointer(directory, keep=2, part=Part(rank))
    ckpt.load()
    for step in range(1, 7):
        ckpt.save(step)
    ckpt.wait()
    return touched


@pytest.mark.workers
def test_of_workers_with_one_directory_one_publishes_and_removes(tmp_path):
    """Each machine's first worker removes old ones, also where all have one disk."""
    first, *others = run_workers(save_and_list_what_was_done, 3, tmp_path)
    assert others == [[], []]
    assert {f"step-0000000{step}" for step in range(1, 7)} == {*first}
    steps = sorted(path.name for path in tmp_path.iterdir())
    assert steps == ["step-00000005", "step-00000006"]


# -------------------------------------------------------------------------------------
# Data

CONTEXT, BATCH_SIZE = 4, 3


def batches_of(data, rank, num_workers, num_windows):
    tokens = np.arange(num_windows * CONTEXT + 1, dtype=np.uint16)
    return data.Batches(
        tokens,
        context=CONTEXT,
        batch_size=BATCH_SIZE,
        rank=rank,
        world=num_workers,
        seed=7,
    )


def windows_of(batches, num_steps):
    """The windows that are read, each as its epoch and its number."""
    read = []
    for _ in range(num_steps):
        epoch = batches.state_dict()["epoch"]
        read += [(epoch, int(n)) for n in next(batches)[:, 0] // CONTEXT]
    return read


def read_on(data, directory, num_workers, num_windows, num_steps, step):
    """What each worker reads from the newest checkpoint on, and saves."""

    def worker(rank, group):
        batches = batches_of(data, rank, num_workers, num_windows)
        with lowcomm.Checkpointer(directory, batches=batches) as ckpt:
            assert ckpt.load() == step
            read = windows_of(batches, num_steps)
            ckpt.save(step + num_steps)
        return read

    return lowcomm.simulate(worker, num_workers)


def test_a_second_resume_goes_on_from_the_first_one(recipe, tmp_path):
    """A position that no longer moves after a resume: the second one starts anew."""
    data = recipe("data")
    straight = [windows_of(batches_of(data, rank, 2, 40), 17) for rank in range(2)]
    read, step = [[], []], 0
    for num_steps in (5, 4, 8):  # six make an epoch
        parts = read_on(data, tmp_path, 2, 40, num_steps, step)
        read = [mine + more for mine, more in zip(read, parts, strict=True)]
        step += num_steps
    assert read == straight


@pytest.mark.parametrize("steps", [(3, 4, 2), (1, 1, 1), (5, 1, 40), (2, 25, 3)])
def test_no_example_comes_twice_in_an_epoch_when_the_workers_change(
    recipe, tmp_path, steps
):
    """Shards fixed by rank: what a lost worker had is never seen, or a second time.

    Three workers, then two, then three, through checkpoints; also across epochs.
    """
    data, num_windows = recipe("data"), 100
    read, step = [], 0
    for num_workers, num_steps in zip((3, 2, 3), steps, strict=True):
        parts = read_on(data, tmp_path, num_workers, num_windows, num_steps, step)
        read += sum(parts, [])
        step += num_steps
    assert len(set(read)) == len(read)
    # Nor is one left out before the last of an epoch, which fill no step of three.
    last_epoch, _ = max(read)
    for epoch in range(last_epoch):
        num_read = len([n for of, n in read if of == epoch])
        assert num_windows - 3 * BATCH_SIZE < num_read <= num_windows


def metrics_of(folder):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


class NoStats:
    bytes_sent, setup_bytes, exposed_s = 0, None, 0.0


def test_tokens_are_those_of_the_workers_that_have_read_them(recipe, tmp_path):
    """All steps are counted as if there had always been as many workers as now."""
    make = functools.partial(recipe("report").Lines, tmp_path, recipe("runs").smoke())
    of_one = 4 * 32  # windows of a step, and their tokens

    def run(workers, start, *steps):
        with make({"workers": workers}, start) as lines:
            for step in steps:
                lines.line(step, {"loss": 0.0}, None, 0.1, NoStats())
        assert json.loads((tmp_path / "run.json").read_text())["workers"] == workers

    run(3, 0, 5, 10)
    run(2, 7)  # killed before its first line
    run(2, 7, 10, 15)
    run(4, 9, 10, 15)  # from an older checkpoint: 10 is taken again
    tokens = [line["tokens"] for line in metrics_of(tmp_path)]
    assert tokens == [
        5 * 3 * of_one,
        (7 * 3 + 2 * 2 + 1 * 4) * of_one,
        (7 * 3 + 2 * 2 + 6 * 4) * of_one,
    ]
    run(1, 0, 5)  # another run in the same place
    assert [line["tokens"] for line in metrics_of(tmp_path)] == [5 * of_one]
    (tmp_path / "run.json").unlink()  # as on another machine
    run(2, 5, 10)
    assert metrics_of(tmp_path)[-1]["tokens"] == 10 * 2 * of_one


def until_its_data_ends(rank, num_batches, finishes):
    model = network()
    opt = lowcomm.DiLoCo(model.parameters(), lr=0.1, sync_every=4, timeout_s=20)
    train(model, opt, range(num_batches[rank]), rank)
    if finishes:
        opt.finish()
    return parameters_of(model)


def test_a_worker_whose_data_ends_in_mid_round_serves_the_others_until_all_finish():
    """It leaves the loop, and the others wait for it in the next round."""

    def worker(rank, group):
        return until_its_data_ends(rank, (7, 12), finishes=True)

    one, two = lowcomm.simulate(worker, 2)
    assert same(one, two)


def test_a_worker_whose_data_ends_without_finish_is_missed_and_not_waited_for():
    """An error of a loader on one worker is a hang on all others."""

    def worker(rank, group):
        return until_its_data_ends(rank, (7, 12), finishes=False)

    with pytest.raises(lowcomm.PeerLost, match="rank 0 will never answer"):
        lowcomm.simulate(worker, 2)
