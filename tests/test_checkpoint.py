"""Checkpoints: exact on resume, whole or absent, and what happens to broken ones."""

import contextlib
import functools
import json
import logging
import os
import random
import re
import shutil
import signal
import threading
import time
import warnings
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowcomm
from lowcomm.testing import run_workers, unreliable
from toy import (
    inner_state_of,
    loss_of,
    network,
    parameters_of,
    same,
    snapshot,
    train,
)

PERIOD = 4
METHODS = {
    "LocalSGD": lowcomm.LocalSGD,
    "LocalAdam": functools.partial(lowcomm.LocalSGD, average_states=True),
    "LocalSGD-int8": functools.partial(
        lowcomm.LocalSGD, codec="int8", error_feedback=True, overlap=2
    ),
    "DiLoCo": lowcomm.DiLoCo,
    "overlap": functools.partial(lowcomm.DiLoCo, overlap=3),
    "streaming": functools.partial(lowcomm.DiLoCo, fragments=2, overlap=2),
    "int8": functools.partial(lowcomm.DiLoCo, codec="int8", error_feedback=True),
    "int8-overlap": functools.partial(
        lowcomm.DiLoCo, codec="int8", error_feedback=True, overlap=3
    ),
    "eager": functools.partial(lowcomm.DiLoCo, eager=True),
    "NoLoCo": lowcomm.NoLoCo,
    "NoLoCo-overlap": functools.partial(lowcomm.NoLoCo, gamma=0.4, overlap=2),
    "DESLOC": lowcomm.DESLOC,
    "MTDAO": lowcomm.MTDAO,
}


class Loader:
    """Counts batches, as a loader does."""

    def __init__(self, position=0):
        self.position = position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Part:
    """Holds what it is given."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Run:
    """Everything that a training run has, and the loop over it."""

    def __init__(self, directory, method=lowcomm.DiLoCo, dtype=torch.float32, **extra):
        self.model = nn.Sequential(network(dtype=dtype), nn.Dropout(0.1))
        self.opt = method(self.model.named_parameters(), lr=0.02, sync_every=PERIOD)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.97)
        self.loader = Loader()
        self.ckpt = lowcomm.Checkpointer(
            directory,
            model=self.model,
            optimizer=self.opt,
            scheduler=self.scheduler,
            loader=self.loader,
            **extra,
        )

    def train(self, steps, rank=0):
        for step in steps:
            self.opt.zero_grad()
            loss_of(self.model, step, rank).backward()  # with the dropout's noise
            with torch.no_grad():
                for p in self.model.parameters():
                    p.grad += 0.1 * np.random.rand() * random.random()
            self.opt.step()
            self.scheduler.step()
            self.loader.position += 1

    def everything(self):
        return snapshot(
            [
                parameters_of(self.model),
                inner_state_of(self.opt),
                self.scheduler.state_dict(),
                self.loader.position,
                self.opt.stats.rounds,
                [torch.rand(2), np.random.rand(2).tolist(), random.random()],
            ]
        )


def seed_all(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def saved(directory, *steps, **parts):
    """Saves small parts in a world of one."""
    for step in steps:
        with lowcomm.Checkpointer(directory, **(parts or {"part": Part(step)})) as ckpt:
            ckpt.save(step)


def names_in(directory):
    return sorted(path.name for path in Path(directory).iterdir())


def files_of(directory, step):
    """What is in the files of a checkpoint, read with torch's defaults."""
    folder = Path(directory, f"step-{step:08d}")
    return {path.name: torch.load(path) for path in folder.glob("*.pt")}


@pytest.fixture
def warned(caplog):
    """What was logged as a warning, as one text."""
    caplog.set_level(logging.WARNING, logger="lowcomm")
    return lambda: "\n".join(r.getMessage() for r in caplog.records)


# -------------------------------------------------------------------------------------
# Exact on resume


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alone_a_resumed_run_is_one_that_never_stopped(tmp_path, dtype):
    seed_all(1)
    run = Run(tmp_path, dtype=dtype)
    assert run.ckpt.load() == 0
    assert run.ckpt.report is None
    run.train(range(6))
    with run.ckpt as ckpt:
        ckpt.save(6)
    run.train(range(6, 15))
    straight = run.everything()

    seed_all(2)
    again = Run(tmp_path, dtype=dtype)
    assert again.ckpt.load() == 6
    again.train(range(6, 15))
    assert same(again.everything(), straight)
    assert (again.ckpt.report.step, again.ckpt.report.dropped) == (6, [])


def straight_and_saved(rank, group, directory, method, at):
    seed_all(rank)
    run = Run(directory, method)
    run.train(range(at), rank)
    run.ckpt.save(at)
    run.train(range(at, 17), rank)
    run.ckpt.wait()
    before = run.everything()
    run.opt.finish()
    return before, parameters_of(run.model)


def resumed(rank, group, directory, method, at):
    seed_all(100 + rank)
    run = Run(directory, method)
    assert run.ckpt.load() == at
    run.train(range(at, 17), rank)
    before = run.everything()
    run.opt.finish()
    return before, parameters_of(run.model)


@pytest.mark.parametrize("at", [5, 8])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_method_resumes_to_the_bit_from_the_middle_of_a_round(
    tmp_path, method, at
):
    """At step 5 shares of step 4 are under way with overlap; step 8 ends a round."""
    arguments = {"directory": tmp_path, "method": method, "at": at}
    straight = lowcomm.simulate(functools.partial(straight_and_saved, **arguments), 3)
    again = lowcomm.simulate(functools.partial(resumed, **arguments), 3)
    assert same(again, straight)
    for content in files_of(tmp_path, at).values():
        assert content is not None  # read with weights_only


def test_over_a_network_that_does_its_worst(tmp_path):
    method = METHODS["int8-overlap"]
    arguments = {"directory": tmp_path, "method": method, "at": 6}
    straight = lowcomm.simulate(functools.partial(straight_and_saved, **arguments), 3)
    worker = unreliable(functools.partial(resumed, **arguments), seed=3)
    assert same(lowcomm.simulate(worker, 3), straight)


def test_saving_changes_nothing(tmp_path):
    def worker(rank, group, often):
        seed_all(rank)
        run = Run(tmp_path / str(often), METHODS["int8-overlap"])
        for step in range(12):
            run.train([step], rank)
            if often:
                run.ckpt.save(step + 1)
        run.ckpt.wait()
        return run.everything()

    never, often = (
        lowcomm.simulate(functools.partial(worker, often=often), 2)
        for often in (False, True)
    )
    assert same(never, often)


def save_and_resume(rank, directory):
    """Saves in mid-round with threads for a network, then a second time."""
    seed_all(rank)
    run = Run(directory, METHODS["overlap"])
    first = run.ckpt.load()
    run.train(range(first, first + 6), rank)
    run.ckpt.save(first + 6)
    here = run.everything()
    run.ckpt.wait()
    torch.distributed.barrier()
    other = Run(directory, METHODS["overlap"])
    step = other.ckpt.load()
    assert same(other.everything(), here)
    return first, step


@pytest.mark.workers
def test_processes_find_what_others_have_written(tmp_path):
    assert run_workers(save_and_resume, 3, tmp_path) == [(0, 6)] * 3
    assert run_workers(save_and_resume, 3, tmp_path) == [(6, 12)] * 3
    assert names_in(tmp_path) == ["step-00000006", "step-00000012"]


class Pairing:
    """Several optimizers as one part, in a list."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def state_dict(self):
        return {"all": [opt.state_dict() for opt in self.optimizers]}

    def load_state_dict(self, state):
        for opt, one in zip(self.optimizers, state["all"], strict=True):
            opt.load_state_dict(one)


@pytest.mark.parametrize("as_one_part", [False, True])
def test_several_optimizers_are_parts_of_their_own_or_one(tmp_path, as_one_part):
    """Each one's anchors are in the one file, wherever its state is."""

    def build():
        models = [network(seed) for seed in (1, 2)]
        opts = [
            lowcomm.DiLoCo(model.parameters(), lr=0.02, sync_every=sync_every)
            for model, sync_every in zip(models, (3, 4), strict=True)
        ]
        parts = {"one": models[0], "two": models[1]}
        parts |= {"opts": Pairing(*opts)} if as_one_part else dict(a=opts[0], b=opts[1])
        return models, opts, lowcomm.Checkpointer(tmp_path, **parts)

    def worker(rank, group, steps):
        models, opts, ckpt = build()
        start = ckpt.load()
        for step in range(start, steps):
            for model, opt in zip(models, opts, strict=True):
                train(model, opt, range(step, step + 1), rank)
            if step + 1 == 5:
                ckpt.save(5)
        ckpt.wait()
        return start, [parameters_of(model) for model in models]

    whole = lowcomm.simulate(functools.partial(worker, steps=11), 2)
    again = lowcomm.simulate(functools.partial(worker, steps=11), 2)
    assert [start for start, _ in again] == [5, 5]
    assert same([bits for _, bits in again], [bits for _, bits in whole])
    files = files_of(tmp_path, 5)
    num_values = sum(p.numel() for p in network().parameters())
    # Anchor and momentum, of two models, in float64.
    assert sum(t.numel() for t in tensors_in(files["global.pt"])) == 4 * num_values


class Everything:
    """All types that may be in a state."""

    def __init__(self):
        self.loaded = None

    def state_dict(self):
        base = torch.arange(12.0).reshape(3, 4)
        return {
            "plain": [None, True, 3, 2.5, 1j, "text", b"bytes", (1, (2,)), {1, 2}],
            "torch": [torch.float16, torch.device("cpu"), torch.Size([2, 3])],
            "numpy": (np.float64(0.1), np.int64(7), np.bool_(True)),
            ("a", 1): {2: base, 3.5: base.t(), None: base[:, 1:3], "same": base},
            "kinds": [
                torch.tensor(5),
                torch.zeros(0, 3),
                torch.tensor([True, False]),
                *(complex_ := [torch.randn(3, dtype=torch.complex64)]),
                complex_[0].conj(),
                torch.ones(2, 3).to_sparse(),
                torch.ones(2).expand(4, 2),
                nn.Parameter(torch.ones(2)),
            ],
        }

    def load_state_dict(self, state):
        self.loaded = state


def test_a_state_comes_back_in_its_types(tmp_path):
    torch.manual_seed(3)
    one, two = Everything(), Everything()
    state = one.state_dict()
    torch.manual_seed(3)
    saved(tmp_path, 1, part=one)
    lowcomm.Checkpointer(tmp_path, part=two).load()
    loaded = two.loaded
    assert loaded["plain"] == state["plain"]
    assert loaded["torch"] == state["torch"]
    assert loaded["numpy"] == (0.1, 7, True)
    assert [type(n) for n in loaded["numpy"]] == [float, int, bool]
    pairs = [*zip(state["kinds"], loaded["kinds"], strict=True)]
    pairs += [(state["a", 1][k], loaded["a", 1][k]) for k in state["a", 1]]
    for before, after in pairs:
        before, after = before.detach(), after.detach()
        if before.layout is torch.sparse_coo:
            before, after = before.to_dense(), after.to_dense()
        assert torch.equal(before, after)
        assert before.dtype == after.dtype
    strided = loaded["a", 1]
    assert strided[3.5].stride() == (1, 4)
    assert strided["same"].data_ptr() == strided[2].data_ptr()  # once in the file


def test_a_module_keeps_the_versions_of_its_parts(tmp_path):
    model = nn.BatchNorm1d(2)
    saved(tmp_path, 1, model=model)
    state = files_of(tmp_path, 1)["worker-0.pt"]["parts"]["model"]
    assert state._metadata == model.state_dict()._metadata


def schedulers():
    lr = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    return [
        lr.LambdaLR(optimizer, lambda step: 0.9**step),
        lr.MultiStepLR(optimizer, [2, 4]),
        lr.OneCycleLR(optimizer, 0.1, total_steps=20),
        lr.CyclicLR(optimizer, 0.01, 0.1),
        lr.CosineAnnealingWarmRestarts(optimizer, 3),
        lr.ReduceLROnPlateau(optimizer),
        lr.SequentialLR(
            optimizer,
            [lr.ConstantLR(optimizer), lr.ExponentialLR(optimizer, 0.9)],
            milestones=[2],
        ),
    ]


# SequentialLR's own word on itself, before torch 2.7.
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("number", range(7))
def test_schedulers_of_torch_are_saved(tmp_path, number):
    scheduler, other = schedulers()[number], schedulers()[number]
    metrics = (1.0,) if "Plateau" in type(scheduler).__name__ else ()
    for _ in range(3):
        scheduler.optimizer.step()
        scheduler.step(*metrics)
    saved(tmp_path, 1, scheduler=scheduler, optimizer=scheduler.optimizer)
    parts = {"scheduler": other, "optimizer": other.optimizer}
    lowcomm.Checkpointer(tmp_path, **parts).load()
    for _ in range(3):
        for one in (scheduler, other):
            one.optimizer.step()
            one.step(*metrics)
        assert other.get_last_lr() == scheduler.get_last_lr()


def test_what_is_loaded_is_shared_with_nobody(tmp_path):
    def worker(rank, group):
        run = Run(tmp_path)
        run.train(range(3), rank)
        run.ckpt.save(3)
        run.ckpt.wait()
        pair = [Run(tmp_path), Run(tmp_path)]
        for other in pair:
            assert other.ckpt.load() == 3
        before = snapshot(pair[1].opt.state_dict()["state"])
        pair[0].train(range(3, 6), rank)
        return same(snapshot(pair[1].opt.state_dict()["state"]), before)

    assert lowcomm.simulate(worker, 2) == [True, True]


# -------------------------------------------------------------------------------------
# What is where


@pytest.mark.parametrize(
    ("method", "kinds"),
    [
        (METHODS["LocalSGD"], set()),
        (METHODS["DiLoCo"], {"anchor", "momentum"}),
        (METHODS["LocalSGD-int8"], {"anchor"}),
        (METHODS["int8"], {"anchor", "momentum"}),
        (METHODS["NoLoCo"], set()),
    ],
)
def test_what_workers_agree_on_is_written_once(tmp_path, method, kinds):
    def worker(rank, group):
        run = Run(tmp_path, method)
        run.train(range(6), rank)
        run.ckpt.save(6)
        run.ckpt.wait()

    lowcomm.simulate(worker, 3)
    files = files_of(tmp_path, 6)
    workers = [f"worker-{rank}.pt" for rank in range(3)]
    folder = tmp_path / "step-00000006"
    assert names_in(folder) == ["global.pt", "manifest.json", *workers]
    own = [files[name]["parts"]["optimizer"]["lowcomm"]["sync"] for name in workers]
    found = set()
    if kinds:
        streams = files["global.pt"]["optimizer"]["lowcomm"]["sync"]["streams"]
        found = {kind for s in streams.values() for kind in s["tensors"]}
        names = {n for s in streams.values() for t in s["tensors"].values() for n in t}
        assert names == {name for name, _ in network().named_parameters(prefix="0")}
    assert found == kinds
    for sync in own:
        mine = {kind for s in sync["streams"].values() for kind in s["tensors"]}
        assert not mine & kinds
        assert ("residual" in mine) == ("int8" in repr(method))
    # The parameters differ in mid-round.
    first, second, _ = (files[name]["parts"]["model"] for name in workers)
    assert not same(dict(first), dict(second))


def test_the_manifest_says_what_is_there(tmp_path):
    config = {"lr": 0.1, "sizes": (1, 2)}
    saved_by = lowcomm.Checkpointer(tmp_path, config=config, part=Part(1))
    saved_by.save(12)
    saved_by.wait()
    folder = tmp_path / "step-00000012"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 12
    assert manifest["num_workers"] == 1
    assert manifest["config"] == {"lr": 0.1, "sizes": [1, 2]}
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["files"].keys() == {"global.pt", "worker-0.pt"}
    for name, facts in manifest["files"].items():
        assert facts["bytes"] == (folder / name).stat().st_size


def test_so_many_are_kept(tmp_path):
    with lowcomm.Checkpointer(tmp_path, keep=2, part=Part(0)) as ckpt:
        for step in (1, 2, 10, 11):
            ckpt.save(step)
    assert names_in(tmp_path) == ["step-00000010", "step-00000011"]


def test_broken_ones_do_not_count_as_kept(tmp_path):
    saved(tmp_path, 1, 2, 3)
    (tmp_path / "step-00000003" / "worker-0.pt").unlink()
    with lowcomm.Checkpointer(tmp_path, keep=2, part=Part(0)) as ckpt:
        ckpt.save(4)
    assert names_in(tmp_path) == [f"step-0000000{step}" for step in (2, 3, 4)]


def test_a_warning_that_is_an_error_breaks_no_checkpoint(tmp_path, monkeypatch):
    """An older one would be loaded instead."""
    saved(tmp_path, 1, 2)
    monkeypatch.setattr(
        torch, "load", lambda *_, **__: warnings.warn("look", stacklevel=1)
    )
    with pytest.raises(UserWarning, match="look"):
        lowcomm.Checkpointer(tmp_path, part=Part()).load()


def test_a_step_may_be_saved_again(tmp_path):
    saved(tmp_path, 5, part=Part("first"))
    saved(tmp_path, 5, part=Part("second"))
    assert names_in(tmp_path) == ["step-00000005"]
    part = Part()
    assert lowcomm.Checkpointer(tmp_path, part=part).load() == 5
    assert part.state == "second"


def test_a_kill_while_a_step_is_replaced_leaves_the_one_that_was(tmp_path):
    saved(tmp_path, 5, part=Part("first"))
    os.rename(
        tmp_path / "step-00000005", tmp_path / "step-00000005.0123abcd-1.replaced"
    )
    (tmp_path / "step-00000005.0123abcd-1.unfinished").mkdir()
    part = Part()
    assert lowcomm.Checkpointer(tmp_path, part=part).load() == 5
    assert part.state == "first"
    assert names_in(tmp_path) == ["step-00000005"]


def test_what_earlier_runs_have_left_is_removed_and_nothing_else(tmp_path):
    with lowcomm.Checkpointer(tmp_path, part=Part(1)) as ckpt:
        for name in (
            "step-00000009.feed-3.unfinished",
            "step-00000008.f-old.unfinished",
        ):
            (tmp_path / name).mkdir()
            (tmp_path / name / "worker-0.pt").touch()
        (tmp_path / "probe-0123").touch()
        (tmp_path / "notes.txt").touch()
        (tmp_path / "step-of-mine").mkdir()
        ckpt.save(1)
    assert names_in(tmp_path) == ["notes.txt", "step-00000001", "step-of-mine"]
    assert lowcomm.Checkpointer(tmp_path, part=Part(1)).load() == 1


def test_two_runs_of_one_process_leave_each_other_alone(tmp_path, monkeypatch):
    """Also in one directory, while the other is writing."""
    go_on, fsync = threading.Event(), os.fsync
    one = lowcomm.Checkpointer(tmp_path / "a", part=Part("one"))
    two = lowcomm.Checkpointer(tmp_path / "b", part=Part("two"))
    monkeypatch.setattr(os, "fsync", lambda number: (go_on.wait(10), fsync(number)))
    one.save(1)
    two.save(2)
    late = lowcomm.Checkpointer(tmp_path / "a", part=Part())
    assert late.load() == 0
    go_on.set()
    one.wait()
    two.wait()
    other = Part()
    assert late.load() == lowcomm.Checkpointer(tmp_path / "a", part=other).load() == 1
    assert other.state == "one"
    assert names_in(tmp_path / "b") == ["step-00000002"]


# -------------------------------------------------------------------------------------
# Beside training


def test_what_is_trained_meanwhile_is_not_in_the_checkpoint(tmp_path, monkeypatch):
    go_on, fsync = threading.Event(), os.fsync

    def slow_fsync(number):
        assert go_on.wait(20)
        fsync(number)

    run = Run(tmp_path)
    run.train(range(5))
    monkeypatch.setattr(os, "fsync", slow_fsync)
    seed_all(4)
    run.ckpt.save(5)
    expected = run.everything()
    run.train(range(5, 9))
    for tensor in [
        *run.model.parameters(),
        *run.opt.state[run.model[0][0].weight].values(),
    ]:
        tensor.data.fill_(float("nan"))
    assert not list(tmp_path.glob("step-00000005"))
    go_on.set()
    run.ckpt.wait()
    other = Run(tmp_path)
    assert other.ckpt.load() == 5
    assert same(other.everything(), expected)


def test_one_save_at_a_time(tmp_path, monkeypatch):
    """A second one waits, and the first one's copy is written as it was."""
    now, most, save = [0], [0], torch.save

    def slow_save(*args):
        now[0] += 1
        most[0] = max(most[0], now[0])
        time.sleep(0.02)
        save(*args)
        now[0] -= 1

    monkeypatch.setattr(torch, "save", slow_save)
    part = Part({"value": torch.zeros(1000)})
    with lowcomm.Checkpointer(tmp_path, keep=9, part=part) as ckpt:
        for step in range(1, 5):
            part.state["value"].fill_(step)
            ckpt.save(step)
    for step in range(1, 5):
        value = files_of(tmp_path, step)["worker-0.pt"]["parts"]["part"]["value"]
        assert torch.equal(value, torch.full((1000,), float(step)))
    assert most == [1]


class Copies(TorchDispatchMode):
    """Counts the bytes that this thread copies, and those of new tensors."""

    def __init__(self):
        super().__init__()
        self.copied = self.made = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name == "copy_":
            self.copied += args[0].nbytes
        elif name == "_foreach_copy_":
            self.copied += sum(tensor.nbytes for tensor in args[0])
        elif name.startswith(("empty", "new_empty", "clone", "_to_copy", "zeros")):
            self.made += result.nbytes
            self.copied += result.nbytes * (name in ("clone", "_to_copy"))
        return result


@pytest.mark.parametrize("method", [torch.optim.AdamW, METHODS["int8-overlap"]])
def test_a_save_costs_one_copy_and_the_next_one_no_memory(tmp_path, method):
    model = nn.Linear(300, 300)
    keywords = {} if method is torch.optim.AdamW else {"sync_every": PERIOD}
    opt = method(model.parameters(), lr=0.1, **keywords)
    with lowcomm.Checkpointer(tmp_path, model=model, optimizer=opt) as ckpt:
        for step in (1, 2):
            model(torch.ones(2, 300)).sum().backward()
            opt.step()
            with Copies() as copies:
                ckpt.save(step)
    files = files_of(tmp_path, 2)
    own, agreed = files["worker-0.pt"]["parts"], files["global.pt"]
    num_bytes = sum(t.nbytes for t in tensors_in([own, agreed]))
    assert num_bytes >= 3 * 4 * 300 * 301
    assert num_bytes <= copies.copied <= 1.001 * num_bytes
    # What the optimizer gives away is new, and none else.
    given = tensors_in([own["optimizer"].get("lowcomm", {}), agreed])
    assert copies.made <= sum(t.nbytes for t in given) + 1000


def tensors_in(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [tensor for value in tree for tensor in tensors_in(value)]


def save_and_end(rank, directory):
    """Ends at once; rank 1 saves so late that rank 0 is ending by then."""
    part = Part({"value": torch.full((1000,), float(rank))})
    ckpt = lowcomm.Checkpointer(directory, part=part)
    if rank == 1:
        time.sleep(0.3)
    ckpt.save(3)


@pytest.mark.workers
def test_a_process_that_ends_finishes_what_it_saved(tmp_path):
    run_workers(save_and_end, 2, tmp_path)
    assert names_in(tmp_path) == ["step-00000003"]
    assert len(files_of(tmp_path, 3)) == 3


def save_alone_and_end(rank, directory):
    """Rank 0 is to complete what rank 1 never saves, and ends."""
    lowcomm.checkpoint._LAST_WAIT_S = 0.2
    ckpt = lowcomm.Checkpointer(directory, part=Part(rank))
    if rank == 0:
        ckpt.save(3)
    return time.time()


@pytest.mark.workers
def test_a_process_that_ends_does_not_wait_for_others_for_long(tmp_path):
    began = max(run_workers(save_alone_and_end, 2, tmp_path))
    assert time.time() - began < 10
    (left,) = names_in(tmp_path)
    assert left.endswith(".unfinished")


def test_the_directory_stays_the_same_when_the_process_goes_elsewhere(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with lowcomm.Checkpointer("a/b", part=Part(1)) as ckpt:
        (tmp_path / "c").mkdir()
        monkeypatch.chdir(tmp_path / "c")
        ckpt.save(1)
    assert names_in(tmp_path / "a" / "b") == ["step-00000001"]


def test_waiting_in_a_simulation_lets_others_save(tmp_path):
    """Rank 0 waits for parts that the others have had no turn to write."""

    def worker(rank, group):
        ckpt = lowcomm.Checkpointer(tmp_path, part=Part(rank))
        for step in (1, 2, 3):
            ckpt.save(step)
        ckpt.wait()
        return len(list(tmp_path.glob("step-0000000[123]")))

    assert lowcomm.simulate(worker, 3)[0] == 3


def test_waiting_for_a_worker_that_never_saves_ends_in_an_error(tmp_path):
    def worker(rank, group):
        ckpt = lowcomm.Checkpointer(tmp_path, part=Part(rank), timeout_s=0.5)
        if rank == 0:
            ckpt.save(1)
            with pytest.raises(lowcomm.PeerLost, match="rank 1 will never answer"):
                ckpt.wait()
            ckpt.wait()  # it has been told

    lowcomm.simulate(worker, 2)


def wait_for_one_that_never_saves(rank, directory):
    ckpt = lowcomm.Checkpointer(directory, part=Part(rank), timeout_s=0.5)
    if rank == 0:
        ckpt.save(1)
        with pytest.raises(TimeoutError, match=r"rank 1 did not write.*within 0\.5 s"):
            ckpt.wait()


@pytest.mark.workers
def test_a_wait_in_a_process_is_bounded(tmp_path):
    run_workers(wait_for_one_that_never_saves, 2, tmp_path)


# -------------------------------------------------------------------------------------
# Kills

NUM_VALUES = 1 << 18


def save_until_killed(rank, directory, seed):
    """Says what it loads, then saves one step after another until it dies."""
    generator = random.Random(f"{seed} {rank}")
    fsync = os.fsync
    os.fsync = lambda number: (time.sleep(generator.uniform(0, 0.01)), fsync(number))
    part = Part({"value": torch.zeros(NUM_VALUES)})
    ckpt = lowcomm.Checkpointer(directory / "run", keep=2, part=part)
    step = ckpt.load()
    values = part.state["value"].unique().tolist()
    assert values == [10.0 * step + rank if step else 0.0]
    (directory / f"loaded-{seed}-{rank}").write_text(f"{step}")
    torch.distributed.barrier()
    if seed is not None:
        dies_in_s = generator.uniform(0.05, 0.35)
        die = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
        threading.Timer(dies_in_s, die).start()
        while True:
            step += 1
            part.state["value"].fill_(10.0 * step + rank)
            ckpt.save(step)


@pytest.mark.workers
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    left, loaded = 0, [0]
    for seed in (*range(6), None):
        run_workers(save_until_killed, 2, tmp_path, seed, may_die={0, 1})
        left += len(list(tmp_path.glob("run/*.unfinished")))
        steps = [int((tmp_path / f"loaded-{seed}-{r}").read_text()) for r in (0, 1)]
        assert steps[0] == steps[1]
        loaded.append(steps[0])
    assert loaded == sorted(loaded)
    assert loaded[-1] > 6
    assert left > 2, "kills that hit no save show nothing"


# -------------------------------------------------------------------------------------
# Broken files


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "truncated": ("worker-0.pt", truncate, r"worker-0\.pt has \d+ bytes instead of"),
    "flipped": ("worker-0.pt", flip, r"worker-0\.pt is not as it was written: its sha"),
    "global": ("global.pt", flip, r"global\.pt is not as it was written: its sha256"),
    "missing": ("worker-0.pt", Path.unlink, r"worker-0\.pt cannot be read: No such"),
    "no manifest": ("manifest.json", Path.unlink, r"manifest\.json cannot be read: No"),
    "no JSON": ("manifest.json", truncate, r"manifest\.json is not JSON"),
    "other JSON": (
        "manifest.json",
        lambda path: path.write_text("[1]"),
        r"manifest\.json is not as it was written",
    ),
    "edited": (
        "manifest.json",
        lambda path: path.write_text(
            path.read_text().replace('"step": 2', '"step": 3')
        ),
        r"manifest\.json is not as it was written",
    ),
    "no text": (
        "manifest.json",
        lambda path: path.write_bytes(b"\xff\xfe"),
        r"manifest\.json is not JSON",
    ),
    "half deleted": (
        "",
        lambda path: [file.unlink() for file in path.glob("[mg]*")],
        r"manifest\.json cannot be read",
    ),
    "empty": (
        "",
        lambda path: (shutil.rmtree(path), path.mkdir()),
        r"manifest\.json cannot be read",
    ),
    "a file": (
        "",
        lambda path: (shutil.rmtree(path), path.touch()),
        r"manifest\.json cannot be read: Not a directory",
    ),
    "renamed": (
        "",
        lambda path: os.rename(path, path.with_name("step-00000007")),
        r"manifest\.json is of step 2",
    ),
}


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_a_broken_checkpoint_is_told_and_an_older_one_taken(
    tmp_path, warned, name, damage, words
):
    saved(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002" / name)
    part = Part()
    ckpt = lowcomm.Checkpointer(tmp_path, part=part)
    assert ckpt.load() == part.state == 1
    assert re.search(f"step 1 is loaded: .*{words}", warned())
    ckpt.save(2)  # over the broken one
    ckpt.wait()
    assert lowcomm.Checkpointer(tmp_path, part=Part()).load() in (2, 1)


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_a_broken_checkpoint_without_an_older_one_is_an_error(
    tmp_path, name, damage, words
):
    saved(tmp_path, 2)
    damage(tmp_path / "step-00000002" / name)
    part = Part("mine")
    torch.manual_seed(5)
    with pytest.raises(ValueError, match=f"must be whole.*{words}.*start anew"):
        lowcomm.Checkpointer(tmp_path, part=part).load()
    assert part.state == "mine"
    assert torch.initial_seed() == 5


def test_a_part_that_is_broken_for_one_worker_is_broken_for_all(tmp_path):
    def save(rank, group):
        ckpt = lowcomm.Checkpointer(tmp_path, part=Part(rank))
        for step in (1, 2):
            ckpt.save(step)
        ckpt.wait()

    def load(rank, group):
        return lowcomm.Checkpointer(tmp_path, part=Part()).load()

    lowcomm.simulate(save, 3)
    flip(tmp_path / "step-00000002" / "worker-1.pt")
    assert lowcomm.simulate(load, 3) == [1, 1, 1]
    flip(tmp_path / "step-00000001" / "worker-2.pt")
    with pytest.raises(BaseExceptionGroup) as caught:
        lowcomm.simulate(load, 3)
    messages = [str(error) for error in caught.value.exceptions]
    assert len(messages) == 3
    for message in messages:
        assert "step-00000002/worker-1.pt" in message
        assert "step-00000001/worker-2.pt" in message


def test_a_newer_format_is_refused(tmp_path):
    saved(tmp_path, 1, 2)
    path = tmp_path / "step-00000002" / "manifest.json"
    from lowcomm._folder import seal

    path.write_text(json.dumps(seal(json.loads(path.read_text()) | {"format": 3})))
    with pytest.raises(ValueError, match=r"format .* must be 2, got 3.*lowcomm 0\.1"):
        lowcomm.Checkpointer(tmp_path, part=Part()).load()


# -------------------------------------------------------------------------------------
# Other settings


def test_another_configuration_is_refused_unless_not_strict(tmp_path):
    nan = float("nan")
    config = {"lr": 0.1, "layers": [1, 2], "nothing": nan}
    with lowcomm.Checkpointer(tmp_path, config=config, part=Part(1)) as ckpt:
        ckpt.save(1)
    part = Part()

    def load(config, **strict):
        return lowcomm.Checkpointer(tmp_path, config=config, part=part).load(**strict)

    for key, other in (("lr", 0.2), ("layers", [1]), ("new", 3)):
        with pytest.raises(
            ValueError, match=rf"^{key} must be as in the checkpoint.*1"
        ):
            load({**config, key: other})
    with pytest.raises(ValueError, match="^lr must be.*got lr=None with lr=0.1"):
        load({"layers": [1, 2], "nothing": nan})
    assert part.state is None
    assert load({**config, "layers": (1, 2)}) == load(None) == 1
    assert load({"lr": 7}, strict=False) == part.state == 1


def test_other_parts_are_refused_unless_not_strict(tmp_path):
    saved(tmp_path, 1, one=Part("one"), two=Part("two"))
    one, three = Part(), Part("mine")
    other = lowcomm.Checkpointer(tmp_path, one=one, three=three)
    with pytest.raises(ValueError, match=r"parts must be.*'three'.*'two'"):
        other.load()
    assert one.state is None
    assert other.load(strict=False) == 1
    assert (one.state, three.state) == ("one", "mine")


def test_an_optimizer_with_other_settings_refuses_before_anything_is_changed(tmp_path):
    run = Run(tmp_path)
    run.train(range(3))
    with run.ckpt as ckpt:
        ckpt.save(3)
    other = Run(tmp_path, functools.partial(lowcomm.DiLoCo, outer_lr=0.5))
    before = other.everything()[:4]
    with pytest.raises(ValueError, match="outer_lr must be as in the checkpoint"):
        other.ckpt.load()
    assert same(other.everything()[:4], before)
    assert other.ckpt.load(strict=False) == 3
    assert same(parameters_of(other.model), parameters_of(run.model))


def save_as(rank, group, directory, method=lowcomm.DiLoCo, at=6):
    seed_all(rank)
    run = Run(directory, method)
    run.train(range(at), rank)
    run.loader.position += 100 * rank  # differs between the workers
    run.ckpt.save(at)
    run.ckpt.wait()
    return run.everything()


def load_as(rank, group, directory, method=lowcomm.DiLoCo, at=6):
    seed_all(50)
    run = Run(directory, method)
    assert run.ckpt.load() == at
    loaded = run.everything()
    run.train(range(at, at + 7), rank)
    run.opt.finish()
    return loaded, parameters_of(run.model), run.ckpt.report


RESIZED = {name: METHODS[name] for name in ("LocalAdam", "int8-overlap", "NoLoCo")}


@pytest.mark.parametrize("method", RESIZED.values(), ids=RESIZED)
def test_fewer_workers_go_on_with_their_own_parts(tmp_path, method):
    arguments = {"directory": tmp_path, "method": method}
    before = lowcomm.simulate(functools.partial(save_as, **arguments), 4)
    after = lowcomm.simulate(functools.partial(load_as, **arguments), 2)
    for rank in range(2):
        loaded, ended, report = after[rank]
        assert same(loaded, before[rank])
        assert same(ended, after[0][1])
        assert (report.step, report.num_workers_saved, report.num_workers) == (6, 4, 2)
        lost = [
            "'model'",
            "'optimizer'",
            "'scheduler'",
            "'loader'",
            "random generators",
        ]
        expected = {f"{what} of worker {r}" for what in lost for r in (2, 3)}
        if method is METHODS["int8-overlap"]:
            share, residual = (
                "share under way of 'parameters'",
                "residual of 'parameters'",
            )
            expected |= {f"{share} of worker {r}" for r in range(4)}
            expected |= {f"{residual} of worker {r}" for r in (2, 3)}
        assert set(report.dropped) == expected
        assert len(report.dropped) == len(expected)


@pytest.mark.parametrize("method", RESIZED.values(), ids=RESIZED)
def test_more_workers_begin_with_the_others_models(tmp_path, method, warned):
    arguments = {"directory": tmp_path, "method": method}
    before = lowcomm.simulate(functools.partial(save_as, **arguments), 2)
    after = lowcomm.simulate(functools.partial(load_as, **arguments), 4)
    for rank, (loaded, ended, report) in enumerate(after):
        *state, position, rounds, drawn = loaded
        *their_state, their_position, their_rounds, _ = before[rank % 2]
        assert same(state, their_state)
        assert rounds == their_rounds
        # Loaders have differed: a new worker's is as it was built.
        assert position == (their_position if rank < 2 else 0)
        assert same(ended, after[0][1])
        new = [f"'loader' for worker {r}, which is new" for r in (2, 3)]
        assert [line for line in report.dropped if "new" in line] == new
    draws = [drawn for (*_, drawn), _, _ in after]
    assert same(draws[:2], [worker[-1] for worker in before])
    assert len({tuple(torch_draw.tolist()) for torch_draw, _, _ in draws}) == 4
    assert len({tuple(numpy_draw) for _, numpy_draw, _ in draws}) == 4
    assert len({random_draw for _, _, random_draw in draws}) == 4
    assert "step 6 of 2 workers is loaded by 4, without: " in warned()


def test_a_new_worker_owes_nothing_and_takes_what_all_have_had(tmp_path):
    """Each debt is paid once; a loader's position that all share holds for new ones."""

    def save(rank, group):
        run = Run(tmp_path, METHODS["int8"])
        run.train(range(6), rank)
        run.ckpt.save(6)
        run.ckpt.wait()
        return residuals(run)

    def load(rank, group):
        run = Run(tmp_path, METHODS["int8"])
        run.ckpt.load()
        return residuals(run), run.loader.position, run.ckpt.report.dropped

    before, after = lowcomm.simulate(save, 2), lowcomm.simulate(load, 3)
    assert same([owed for owed, _, _ in after[:2]], before)
    assert all(not tensor.any() for tensor in after[2][0].values())
    assert any(tensor.any() for tensor in before[0].values())
    assert [position for _, position, _ in after] == [6, 6, 6]
    assert [dropped for _, _, dropped in after] == [[], [], []]


def residuals(run):
    streams = run.opt.state_dict()["lowcomm"]["sync"]["streams"].values()
    named = [stream["tensors"].get("residual", {}) for stream in streams]
    return {name: tensor for some in named for name, tensor in some.items()}


def test_with_another_number_of_workers_other_settings_are_refused_too(tmp_path):
    lowcomm.simulate(functools.partial(save_as, directory=tmp_path), 2)
    other = functools.partial(lowcomm.DiLoCo, outer_lr=0.5)
    with pytest.raises(BaseExceptionGroup) as caught:
        lowcomm.simulate(
            functools.partial(load_as, directory=tmp_path, method=other), 3
        )
    for error in caught.value.exceptions:
        assert "outer_lr must be as in the checkpoint" in str(error)


# -------------------------------------------------------------------------------------
# Machines with disks of their own


def on_two_disks(rank, group, directory, steps):
    """Ranks 0 and 1 see one directory, ranks 2 and 3 another one."""
    part = Part()
    ckpt = lowcomm.Checkpointer(directory / str(rank // 2), keep=9, part=part)
    loaded = ckpt.load()
    for step in steps:
        part.state = (step, rank)
        ckpt.save(step)
    ckpt.wait()
    return loaded, part.state


def test_on_two_disks_each_is_whole_and_the_newest_common_step_is_taken(tmp_path):
    worker = functools.partial(on_two_disks, directory=tmp_path)
    save = functools.partial(worker, steps=(1, 2, 3))
    assert [loaded for loaded, _ in lowcomm.simulate(save, 4)] == [0] * 4
    for disk, ranks in (("0", (0, 1)), ("1", (2, 3))):
        names = ["global.pt", *(f"worker-{rank}.pt" for rank in ranks)]
        assert sorted(files_of(tmp_path / disk, 3)) == names

    shutil.rmtree(tmp_path / "1" / "step-00000003")  # as if it had been killed there
    load = functools.partial(worker, steps=())
    assert lowcomm.simulate(load, 4) == [(2, (2, rank)) for rank in range(4)]

    # What one disk has of an earlier run is not mixed with the other's of a later one.
    later = functools.partial(worker, steps=(3,))
    assert [loaded for loaded, _ in lowcomm.simulate(later, 4)] == [2] * 4
    shutil.rmtree(tmp_path / "0" / "step-00000003")
    shutil.copytree(
        tmp_path / "0" / "step-00000002", tmp_path / "0" / "step-00000003"
    )  # broken
    assert lowcomm.simulate(load, 4) == [(2, (2, rank)) for rank in range(4)]


def test_one_step_of_two_runs_is_not_the_same_checkpoint(tmp_path):
    worker = functools.partial(on_two_disks, directory=tmp_path)
    lowcomm.simulate(functools.partial(worker, steps=(1, 2)), 4)
    old = tmp_path / "old"
    shutil.copytree(tmp_path / "0" / "step-00000002", old)
    shutil.rmtree(tmp_path / "1" / "step-00000002")
    lowcomm.simulate(functools.partial(worker, steps=(2,)), 4)
    shutil.rmtree(tmp_path / "0" / "step-00000002")
    shutil.move(old, tmp_path / "0" / "step-00000002")
    loaded = lowcomm.simulate(functools.partial(worker, steps=()), 4)
    assert loaded == [(1, (1, rank)) for rank in range(4)]


def test_a_disk_that_is_missing_is_an_error_but_not_a_first_save_that_was_cut_off(
    tmp_path, warned
):
    worker = functools.partial(on_two_disks, directory=tmp_path)
    lowcomm.simulate(functools.partial(worker, steps=(4,)), 4)
    folder = tmp_path / "1" / "step-00000004"
    saved_as = json.loads((folder / "manifest.json").read_text())["save"]
    load = functools.partial(worker, steps=())

    os.rename(folder, tmp_path / "kept")
    with pytest.raises(BaseExceptionGroup) as caught:
        lowcomm.simulate(load, 4)
    for error in caught.value.exceptions:
        assert "{0: [4], 2: []} in the directories" in str(error)
        assert "Bring back the directory" in str(error)

    os.rename(
        tmp_path / "kept", folder.with_name(f"{folder.name}.{saved_as}.unfinished")
    )
    assert lowcomm.simulate(load, 4) == [(0, None)] * 4


def test_other_workers_cannot_be_served_from_disks_of_their_own(tmp_path):
    worker = functools.partial(on_two_disks, directory=tmp_path)
    lowcomm.simulate(functools.partial(worker, steps=(4,)), 4)
    for num_workers in (2, 6):

        def load(rank, group, half=num_workers // 2):
            directory = tmp_path / str(min(rank // half, 1))
            return lowcomm.Checkpointer(directory, part=Part()).load()

        with pytest.raises(BaseExceptionGroup) as caught:
            lowcomm.simulate(load, num_workers)
        for error in caught.value.exceptions:
            assert re.search("of 4 workers must hold the parts of all 4", str(error))

    def swapped(rank, group):
        return lowcomm.Checkpointer(tmp_path / str(1 - rank // 2), part=Part()).load()

    with pytest.raises(BaseExceptionGroup) as caught:
        lowcomm.simulate(swapped, 4)
    for error in caught.value.exceptions:
        assert re.search(
            "parts of worker 0 to be loaded.*the ranks that it had", str(error)
        )


# -------------------------------------------------------------------------------------
# Errors


def test_a_directory_that_is_replaced_by_a_file_is_named(tmp_path):
    directory = tmp_path / "run"
    ckpt = lowcomm.Checkpointer(directory, part=Part(1))
    ckpt.save(1)
    ckpt.wait()
    shutil.rmtree(directory)
    directory.touch()
    ckpt.save(2)
    with pytest.raises(OSError, match=re.escape(str(directory))):
        ckpt.wait()
    ckpt.save(3)
    with pytest.raises(OSError, match=re.escape(str(directory))):
        while True:
            time.sleep(0.01)
            ckpt.save(4)  # the next save tells it as well
    directory.unlink()
    with contextlib.suppress(OSError):
        ckpt.wait()
    ckpt.save(5)
    ckpt.wait()
    assert names_in(directory) == ["step-00000005"]


def test_a_full_disk_is_named_and_the_checkpoint_before_is_whole(tmp_path, monkeypatch):
    part = Part({"value": torch.zeros(100_000)})
    ckpt = lowcomm.Checkpointer(tmp_path, part=part)
    ckpt.save(1)
    ckpt.wait()
    real = open

    def full(path, *args, **kwargs):
        if Path(path).name == "worker-0.pt":
            return real("/dev/full", *args, **kwargs)
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", full)
        ckpt.save(2)
        with pytest.raises(OSError, match=r"No space left.*worker-0\.pt") as caught:
            ckpt.wait()
    assert any("step 2" in note for note in caught.value.__notes__)
    ckpt.save(3)
    ckpt.wait()
    assert names_in(tmp_path) == ["step-00000001", "step-00000003"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_to_is_named(tmp_path):
    ckpt = lowcomm.Checkpointer(tmp_path, part=Part(1))
    tmp_path.chmod(0o500)
    try:
        ckpt.save(1)
        with pytest.raises(PermissionError, match=re.escape(str(tmp_path))):
            ckpt.wait()
        with pytest.raises(OSError, match="directory must be one that all workers can"):
            lowcomm.Checkpointer(tmp_path, part=Part(1))
    finally:
        tmp_path.chmod(0o700)


def test_a_worker_that_cannot_write_is_named_on_the_one_that_waits(
    tmp_path, monkeypatch
):
    def full(number):
        raise OSError(28, "No space left on device")

    def worker(rank, group):
        ckpt = lowcomm.Checkpointer(tmp_path, part=Part(rank))
        if rank == 1:
            with monkeypatch.context() as patch:
                fsync = [os.fsync]
                calls = []

                def first_fails(number):
                    calls.append(number)
                    return full(number) if len(calls) == 1 else fsync[0](number)

                patch.setattr(os, "fsync", first_fails)
                ckpt.save(1)
                with pytest.raises(OSError, match=r"No space left.*worker-1\.pt"):
                    ckpt.wait()
        else:
            ckpt.save(1)
            with pytest.raises(
                OSError, match=r"rank 1 could not write its part.*space"
            ):
                ckpt.wait()
        ckpt.save(2)
        ckpt.wait()

    lowcomm.simulate(worker, 2)
    assert names_in(tmp_path) == ["step-00000002"]


def test_a_directory_that_one_worker_cannot_make_is_an_error_on_all(tmp_path):
    (tmp_path / "1").touch()

    def worker(rank, group):
        lowcomm.Checkpointer(tmp_path / str(rank), part=Part(rank))

    with pytest.raises(BaseExceptionGroup) as caught:
        lowcomm.simulate(worker, 2)
    for error in caught.value.exceptions:
        assert "must be one that all workers can write to, got rank 1's" in str(error)


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros(3), r"numpy\.ndarray at part\['x'\]\[0\]"),
        (Pair(1, 2), r"Pair at part\['x'\]\[0\]"),
        (object(), r"builtins\.object at part\['x'\]\[0\]"),
        ({Path("a"): 1}, r"PosixPath at part\['x'\]\[0\]\[PosixPath\('a'\)\]"),
        (torch.empty(2, device="meta"), r"meta tensor at part\['x'\]\[0\]"),
        (nn.UninitializedParameter(), r"UninitializedParameter at part"),
        (lambda: 0, r"builtins\.function at part"),
    ],
)
def test_what_torch_would_not_load_is_refused_with_its_place(tmp_path, value, words):
    ckpt = lowcomm.Checkpointer(tmp_path, part=Part({"x": [value]}))
    with pytest.raises(TypeError, match=f"must .*, got a .*{words}"):
        ckpt.save(1)
    ckpt.wait()
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda d: lowcomm.Checkpointer(d), ValueError, "parts must be named"),
        (lambda d: lowcomm.Checkpointer(d, a=3), TypeError, "^a must have.*an? int"),
        (
            lambda d: lowcomm.Checkpointer(d, a=torch.Generator()),
            TypeError,
            "^a must have state_dict and load_state_dict, got a Generator",
        ),
        (
            lambda d: lowcomm.Checkpointer(d, a=Part(), keep=1),
            ValueError,
            "keep.*2, got",
        ),
        (lambda d: lowcomm.Checkpointer(d, a=Part(), keep="2"), TypeError, "keep"),
        (lambda d: lowcomm.Checkpointer(d, a=Part(), timeout_s=-1), ValueError, "time"),
        (lambda d: lowcomm.Checkpointer(d, a=Part(), timeout_s=0), ValueError, "posit"),
        (
            lambda d: lowcomm.Checkpointer(d, a=Part(), config={"x": Path("a")}),
            TypeError,
            r"config must be of plain types, got x=PosixPath\('a'\)",
        ),
        (lambda d: lowcomm.Checkpointer(d, a=Part(), group=3), TypeError, "group must"),
        (lambda d: lowcomm.Checkpointer(d, a=Part(1)).save(0), ValueError, "step.*1"),
        (lambda d: lowcomm.Checkpointer(d, a=Part(1)).save(1.0), TypeError, "step"),
    ],
)
def test_a_wrong_call_says_what_was_wrong(tmp_path, call, error, words):
    with pytest.raises(error, match=words):
        call(tmp_path)


def test_an_error_of_the_loop_is_not_hidden_by_the_checkpoint(tmp_path):
    def worker(rank, group):
        with lowcomm.Checkpointer(tmp_path, part=Part(1), timeout_s=0.2) as ckpt:
            if rank == 0:
                ckpt.save(1)
            raise KeyError("mine")

    with pytest.raises(BaseExceptionGroup) as caught:
        lowcomm.simulate(worker, 2)
    assert {type(error) for error in caught.value.exceptions} == {KeyError}
    for thread in threading.enumerate():
        if thread.name == "checkpoint 1":  # which says that rank 1 is missing
            thread.join()


# -------------------------------------------------------------------------------------
# On an accelerator


@pytest.mark.gpu
def test_on_an_accelerator_the_loop_goes_on_before_the_copy_has_arrived(tmp_path):
    def build(directory):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2000, 2000), nn.Dropout()).cuda()
        opt = lowcomm.DiLoCo(
            model.parameters(), lr=0.1, sync_every=PERIOD, eager=True, fused=True
        )
        return model, opt, lowcomm.Checkpointer(directory, model=model, optimizer=opt)

    def train(model, opt, num_steps):
        for _ in range(num_steps):
            opt.zero_grad()
            model(torch.ones(2, 2000, device="cuda")).square().mean().backward()
            opt.step()

    def everything(model, opt):
        state = [
            parameters_of(model),
            inner_state_of(opt),
            torch.rand(2, device="cuda"),
        ]
        return snapshot(state)

    model, opt, ckpt = build(tmp_path)
    for step in (5, 10):
        train(model, opt, 5)
        ckpt.save(step)
    train(model, opt, 5)
    straight = everything(model, opt)
    ckpt.wait()
    for tensor in tensors_in(files_of(tmp_path, 10)):
        assert tensor.device.type == "cpu"
    model, opt, ckpt = build(tmp_path)
    torch.cuda.manual_seed(7)
    assert ckpt.load() == 10
    train(model, opt, 5)
    assert same(everything(model, opt), straight)
