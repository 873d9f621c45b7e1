"""Kills at any moment: what is lost, and whether a resumed run has the same bits.

Two processes train with streaming DiLoCo, so that shares are under way at every save,
with a schedule, dropout and data of their own. A seeded schedule kills both at once
with SIGKILL, every other time while a checkpoint is being written. What is on disk then
is resumed to the end twice, from a copy each time; the run itself goes on from it to
the next kill. All must end as the run that was never stopped: with the same parameters,
inner state, outer state, rates, position in the data and random numbers.

    python benchmarks/kills.py

A kill ends processes, not machines: it does not show what a disk keeps without power.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _report import report
from torch import Tensor, nn

import lowcomm
from lowcomm.testing import run_workers

NAME = "kills"
NUM_WORKERS = 2
SYNC_EVERY = 10
SAVE_EVERY = 13  # at another place in the round each time
LONGEST_DELAY_S = 0.03  # longer than a save takes here


# -------------------------------------------------------------------------------------
# A training run


class Data:
    """A stream of batches for each worker, with a position."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._position = 0

    def __next__(self) -> tuple[Tensor, Tensor]:
        seed = NUM_WORKERS * self._position + self._rank
        inputs = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
        self._position += 1
        return inputs, inputs[:, :8].sin()

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]


class Run:
    """All that a run has, from the same weights whenever it is built."""

    def __init__(self, directory: Path, rank: int, num_steps: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(64, 256),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(256, 8),
        )
        self.optimizer = lowcomm.DiLoCo(
            self.model.parameters(),
            lr=1e-3,
            sync_every=SYNC_EVERY,
            fragments=3,
            overlap=4,
            codec="int8",
            error_feedback=True,
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, num_steps
        )
        self.data = Data(rank)
        self.checkpoints = lowcomm.Checkpointer(
            directory,
            keep=2,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            data=self.data,
        )

    def step(self) -> None:
        inputs, targets = next(self.data)
        (self.model(inputs) - targets).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def bits(self) -> dict[str, str]:
        """A digest of each thing that must be as it would have been."""
        state = self.optimizer.state_dict()
        outer = state.pop("lowcomm")
        stats = outer["sync"].pop("stats")  # in which there are times, too
        outer["counts"] = [stats["steps"], stats["rounds"], stats["bytes_sent"]]
        return {
            "parameters": digest(self.model.state_dict()),
            "inner": digest(state),
            "outer": digest(outer),
            "scheduler": digest(self.scheduler.state_dict()),
            "data": digest(self.data.state_dict()),
            "random": digest(torch.get_rng_state()),
        }


def digest(tree: Any) -> str:
    """A text that equal states have in common, and no others."""
    text = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, Tensor):
            text.update(f"{value.dtype} {tuple(value.shape)}".encode())
            text.update(value.detach().contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            feed([*value.items()])
        elif isinstance(value, list | tuple):
            text.update(f"{len(value)} of ".encode())
            for item in value:
                feed(item)
        else:
            text.update(f"{value!r}, ".encode())

    feed(tree)
    return text.hexdigest()


class Progress:
    """Where each worker is, in memory that all processes share."""

    def __init__(self, folder: Path) -> None:
        file = folder / "progress"
        if not file.exists():
            file.write_bytes(bytes(2 * NUM_WORKERS * np.dtype(np.int64).itemsize))
        self.pids, self.steps = np.memmap(file, np.int64, "r+", shape=(2, NUM_WORKERS))


def work(rank: int, folder: Path, num_steps: int, ending: str) -> Any:
    """Goes on from what is on disk; returns the step it began with, and how it ended.

    Args:
        ending: "stays" until it is killed, "returns", or has "never stopped".
    """
    progress = Progress(folder)
    run = Run(folder / "checkpoints", rank, num_steps)
    first = run.checkpoints.load()
    if first == 0:
        torch.manual_seed(1 + rank)  # noise of its own
    progress.pids[rank], progress.steps[rank] = os.getpid(), first
    for step in range(first + 1, num_steps + 1):
        run.step()
        progress.steps[rank] = step
        if step % SAVE_EVERY == 0 and ending != "never stopped":
            run.checkpoints.save(step)
    while ending == "stays":
        time.sleep(1)
    run.checkpoints.wait()
    return first, run.bits()


# -------------------------------------------------------------------------------------
# Kills


class Kill(NamedTuple):
    """When all workers are killed."""

    step: int  # not before one of them has taken so many
    in_a_save: bool  # then not before a checkpoint is being written
    delay_s: float  # and then so much later; less if that save was over


def schedule(num_kills: int, num_steps: int, seed: int) -> list[Kill]:
    """Kills at random steps; at every other one a save is waited for."""
    generator = random.Random(seed)
    last = num_steps - 5 * SAVE_EVERY  # so that there is a save to wait for
    steps = sorted(generator.sample(range(1, last), num_kills))
    return [
        Kill(step, number % 2 == 1, generator.uniform(0, LONGEST_DELAY_S))
        for number, step in enumerate(steps)
    ]


def saves_under_way(folder: Path) -> list[Path]:
    """What is neither a whole checkpoint nor gone."""
    return [*folder.glob("checkpoints/*.unfinished")] + [
        *folder.glob("checkpoints/*.replaced")
    ]


def kill_all(folder: Path, kill: Kill, is_over: threading.Event) -> None:
    """Kills the workers when it is time."""
    progress = Progress(folder)

    def wait_until(is_so: Callable[[], Any]) -> None:
        while not is_so() and not is_over.is_set():
            time.sleep(1e-4)

    wait_until(lambda: progress.pids.all() and progress.steps.max() >= kill.step)
    delay_s = kill.delay_s
    time.sleep(delay_s)
    while kill.in_a_save and not is_over.is_set():
        wait_until(lambda: saves_under_way(folder))
        time.sleep(delay_s)
        if saves_under_way(folder):
            break
        delay_s /= 2  # it was over sooner: the next one
    if not is_over.is_set():  # else they have failed, and the processes are gone
        # Who is killed leaves connections that break, and the other would see it.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in progress.pids:
                os.kill(pid, number)


def run_until_killed(folder: Path, num_steps: int, kill: Kill) -> int:
    """Returns how many steps had been taken when the workers were killed."""
    progress = Progress(folder)
    progress.pids[:] = progress.steps[:] = 0
    is_over = threading.Event()
    killer = threading.Thread(target=kill_all, args=(folder, kill, is_over))
    killer.start()
    everybody = range(NUM_WORKERS)
    try:
        run_workers(work, NUM_WORKERS, folder, num_steps, "stays", may_die=everybody)
    finally:
        is_over.set()
        killer.join()
    return int(progress.steps.max())


def resume(folder: Path, copy: Path, num_steps: int) -> list[Any]:
    """Runs to the end from a copy of what is on disk."""
    shutil.copytree(folder, copy)
    ends = run_workers(work, NUM_WORKERS, copy, num_steps, "returns")
    shutil.rmtree(copy)
    return ends


class Outcome(NamedTuple):
    """What came of a kill."""

    kill: Kill
    in_a_save: bool  # whether something unfinished was left
    shares: int  # under way in the checkpoint that was resumed, on all workers
    lost: int  # steps that had been taken and were taken again
    differences: list[list[str]]  # of each resumed run: what it did not have equal


def shares_in(checkpoint: Path) -> int:
    if not checkpoint.exists():  # killed before the first save
        return 0
    manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    return sum(len(worker["shares"]) for worker in manifest["workers"].values())


def kill_and_resume(
    folder: Path, num_kills: int, num_steps: int, seed: int
) -> list[Outcome]:
    """Kills a run so often, and resumes it twice each time."""
    straight, killed = folder / "straight", folder / "killed"
    straight.mkdir()
    killed.mkdir()
    expected = run_workers(work, NUM_WORKERS, straight, num_steps, "never stopped")
    outcomes = []
    for kill in schedule(num_kills, num_steps, seed):
        taken = run_until_killed(killed, num_steps, kill)
        in_a_save = bool(saves_under_way(killed))
        firsts, differences = set(), []
        for number in (1, 2):
            ends = resume(killed, folder / f"copy-{number}", num_steps)
            firsts |= {first for first, _ in ends}
            differences.append(
                [
                    f"{name} of worker {rank}"
                    for rank, ((_, bits), (_, right)) in enumerate(
                        zip(ends, expected, strict=True)
                    )
                    for name in right
                    if bits[name] != right[name]
                ]
            )
        (first,) = firsts
        shares = shares_in(killed / "checkpoints" / f"step-{first:08d}")
        outcomes.append(Outcome(kill, in_a_save, shares, taken - first, differences))
    return outcomes


def main() -> None:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        outcomes = kill_and_resume(Path(folder), num_kills=20, num_steps=400, seed=0)
    lost = [outcome.lost for outcome in outcomes]
    resumed = [names for outcome in outcomes for names in outcome.differences]
    report(NAME, "kills", len(outcomes), "kills", workers=NUM_WORKERS)
    in_saves = sum(outcome.in_a_save for outcome in outcomes)
    report(NAME, "kills_inside_a_save", in_saves, f"of {len(outcomes)}")
    in_round = sum(outcome.shares > 0 for outcome in outcomes)
    report(NAME, "resumed_with_shares_under_way", in_round, f"of {len(outcomes)}")
    equal = sum(not names for names in resumed)
    report(NAME, "resumes_bit_equal", equal, f"of {len(resumed)}")
    report(NAME, "steps_lost", statistics.median(lost), "steps", save_every=SAVE_EVERY)
    report(NAME, "steps_lost_worst", max(lost), "steps", save_every=SAVE_EVERY)
    if equal < len(resumed):
        sys.exit(f"not equal: {[names for names in resumed if names]}")


if __name__ == "__main__":
    main()
