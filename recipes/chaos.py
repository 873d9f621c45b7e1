"""Trains a small Llama while workers are killed, stopped, cut off, slowed and replaced.

    python recipes/chaos.py --method diloco --seed 0 --faults 20
    make chaos                                     # two other seeds, all methods

The same run without faults comes after it. Checked at the end: no process has hung or
ended that was not killed; parameters are equal on all; no round was applied by some
and not by others; the loss is that of the run without faults, within 2 %; and how long
the others were without a round after each fault.

Cutting links needs Linux, root and iproute2: without them it is left out, and said so.
"""

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro
from chaos_worker import SMALL_FILES, Spec
from data import load_corpus

from lowcomm.testing import free_port, network, why_no_network

START_S = 120.0  # until all are in; imports take seconds, on a busy machine more
STALL_S = 90.0  # without any event the run counts as hung
POLL_S = 0.02
LARGEST_LOSS_GAP = 0.02
SLACK_S = 3.0  # that a fault may cost beyond timeout_s
# A fault takes some ten seconds, in most of which another worker is starting. Steps
# that take no less than this leave it 16, however fast the machine is.
STEP_S = 0.08
WINDOWS_A_FAULT = 3200

KINDS = (
    "kill", "short stop", "join and leave", "slow", "kill in save", "long stop",
    "full disk", "lighthouse",
)  # fmt: skip

Method = Literal[
    "diloco", "streaming", "desloc", "noloco", "local_sgd", "eager", "mtdao"
]


@dataclass(frozen=True)
class Options:
    """A run under faults."""

    method: Method = "diloco"
    """What is run."""
    seed: int = 0
    """Of the weights, the data, and the faults."""
    faults: int = 20
    """How many."""
    kinds: tuple[str, ...] = ()
    """Which. None: all that this machine can do."""
    workers: int = 4
    """How many begin."""
    windows: int = 0
    """Windows of text that all workers read in all. 0: enough for the faults."""
    timeout_s: float = 6.0
    """For how long a worker is waited for."""
    out: Path = Path("out/chaos")
    """Where logs, checkpoints and report.json go."""
    cache: Path = Path("out/cache")
    """Where tokens are kept between runs."""
    reference: bool = True
    """Run without faults too, and compare the losses."""


# -------------------------------------------------------------------------------------
# What happens in a run


@dataclass
class Worker:
    """A process, and what it has told."""

    name: str
    place: int
    process: subprocess.Popen[str]
    events: list[dict[str, Any]] = field(default_factory=list)
    killed: bool = False

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def is_in(self) -> bool:
        return any(event["event"] == "in" for event in self.events)

    def times(self, kind: str) -> list[float]:
        return [event["at"] for event in self.events if event["event"] == kind]

    @property
    def done(self) -> int:
        return max((event.get("done", 0) for event in self.events), default=0)


@dataclass
class Fault:
    """What was done, and what came of it.

    Args:
        kind: of the fault.
        victim: to whom.
        at: when, on the machine's clock.
        until: when it was over.
        go_on_s: longest time that another worker was without a round, from then on.
        lived: names of those that it was not done to and that were there.
    """

    kind: str
    victim: str
    at: float
    until: float = 0.0
    go_on_s: float = 0.0
    lived: list[str] = field(default_factory=list)


class Stage:
    """The machine's processes: a lighthouse and workers, in networks that can be cut.

    Args:
        options: of the run.
        folder: of this run's files.
        windows: that are read in all.
        step_s: least time of a step, in seconds.
    """

    def __init__(
        self, options: Options, folder: Path, windows: int, step_s: float
    ) -> None:
        self.options, self.folder = options, folder
        self.windows, self.step_s = windows, step_s
        self.workers: list[Worker] = []
        self._stack = ExitStack()
        self._net: Any = None
        self._num_started = 0
        self._lighthouse: subprocess.Popen[str] | None = None
        self._errors: Any = None

    def __enter__(self) -> "Stage":
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "orders").mkdir(parents=True)
        self._errors = self._stack.enter_context(
            (self.folder / "workers.log").open("w")
        )
        self.can_cut = why_no_network() is None
        if self.can_cut:
            self._net = self._stack.enter_context(network(self.options.workers + 2))
        self._port = free_port()
        self.light()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()
        self.douse()
        self._stack.close()

    def _address(self, place: int) -> str:
        return self._net.address(place) if self._net else "127.0.0.1"

    def _within(self, place: int, *command: str) -> list[str]:
        """The command, in the network of a place."""
        name = self._net.names[place] if self._net else None
        return [*(("ip", "netns", "exec", name) if name else ()), *command]

    def light(self) -> None:
        """Starts the lighthouse, at the place after the workers'."""
        place = self.options.workers + 1
        at = f"{self._address(place)}:{self._port}"
        command = (sys.executable, "-m", "lowcomm", "lighthouse", "--bind", at)
        self._lighthouse = subprocess.Popen(
            self._within(place, *command, "--heartbeat-s", "1"),
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        assert self._lighthouse.stdout is not None
        self._lighthouse.stdout.readline()

    def douse(self) -> None:
        if self._lighthouse is not None:
            self._lighthouse.kill()
            self._lighthouse.communicate()

    def start(self, place: int) -> Worker:
        """A new worker at a place."""
        self._num_started += 1
        name = f"worker-{self._num_started}"
        spec = Spec(
            name=name,
            method=self.options.method,
            lighthouse=f"{self._address(self.options.workers + 1)}:{self._port}",
            address=self._address(place),
            folder=str(self.folder),
            cache=str(self.options.cache),
            workers=self.options.workers,
            windows=self.windows,
            timeout_s=self.options.timeout_s,
            seed=self.options.seed,
            step_s=self.step_s,
        )
        script = str(Path(__file__).with_name("chaos_worker.py"))
        command = (sys.executable, script, json.dumps(asdict(spec)))
        process = subprocess.Popen(
            self._within(place, *command),
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL", "OMP_NUM_THREADS": "1"},
        )
        worker = Worker(name, place, process)
        self.workers.append(worker)
        threading.Thread(target=_listen, args=(worker,), daemon=True).start()
        return worker

    def order(self, worker: Worker, **what: Any) -> None:
        """Tells a worker something, which it reads after its step."""
        path = self.folder / "orders" / worker.name
        path.with_suffix(".new").write_text(json.dumps(what))
        path.with_suffix(".new").rename(path)

    def cut(self, worker: Worker) -> None:
        self._net.cut(worker.place)

    def heal(self, worker: Worker) -> None:
        self._net.heal(worker.place)

    @property
    def alive(self) -> list[Worker]:
        """Workers that take part in the run."""
        return [worker for worker in self.workers if worker.is_alive and worker.is_in]

    @property
    def free_places(self) -> list[int]:
        taken = {worker.place for worker in self.workers if worker.is_alive}
        return [p for p in range(self.options.workers + 1) if p not in taken]

    @property
    def done(self) -> int:
        return max((worker.done for worker in self.workers), default=0)

    def wait(self, what: str, condition: Callable[[], bool], limit_s: float) -> None:
        """Returns when it is so; raises if it takes too long, or a worker fails."""
        deadline = time.monotonic() + limit_s
        while not condition():
            for worker in self.workers:
                if not worker.killed and worker.process.poll() not in (None, 0):
                    raise RuntimeError(
                        f"{worker.name} ended with {worker.process.returncode}: see "
                        f"{self.folder / 'workers.log'}"
                    )
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} must come within {limit_s:g} s, got none.")
            time.sleep(POLL_S)


def _listen(worker: Worker) -> None:
    assert worker.process.stdout is not None
    for line in worker.process.stdout:
        if line.startswith("{"):
            worker.events.append(json.loads(line))


# -------------------------------------------------------------------------------------
# Faults: generators, each of which leaves the run as it found it


class Faults:
    """What can be done to a run.

    Args:
        stage: the run.
        random: whose choices are those of the seed.
    """

    def __init__(self, stage: Stage, random: random.Random) -> None:
        self._stage, self._random = stage, random
        self._timeout_s = stage.options.timeout_s

    def play(self, kind: str) -> Fault:
        """Does it, and waits until everybody has rounds again."""
        victim = self._random.choice(self._stage.alive)
        others = [worker for worker in self._stage.alive if worker is not victim]
        fault = Fault(kind, victim.name, time.monotonic())
        getattr(self, "_" + kind.replace(" ", "_"))(victim, fault)
        since = time.monotonic()
        self._stage.wait(
            f"a round of all after {kind!r}",
            lambda: all(_had_round(w, since) for w in self._stage.alive),
            STALL_S,
        )
        fault.until = time.monotonic()
        spared = others if kind != "lighthouse" else [*others, victim]
        fault.lived = [worker.name for worker in spared]
        gaps = [
            _longest_gap(worker, fault.at, fault.until)
            for worker in spared
            if worker.is_alive
        ]
        if not gaps:
            raise RuntimeError(
                f"windows must be enough for all faults, got {self._stage.windows}, of "
                f"which all were read before {kind!r} was over. Raise --windows."
            )
        fault.go_on_s = max(gaps)
        return fault

    def _replace(self, victim: Worker) -> None:
        time.sleep(self._random.uniform(1, 3))
        worker = self._stage.start(victim.place)
        self._stage.wait(f"{worker.name}'s entry", lambda: worker.is_in, START_S)

    def _kill(self, victim: Worker, fault: Fault) -> None:
        victim.killed = True
        victim.process.kill()
        self._replace(victim)

    def _kill_in_save(self, victim: Worker, fault: Fault) -> None:
        folder = self._stage.folder / "checkpoints" / victim.name
        self._stage.wait("a save", lambda: any(folder.glob("*.unfinished")), STALL_S)
        fault.at = time.monotonic()
        self._kill(victim, fault)

    def _stop(self, victim: Worker, seconds: float) -> None:
        victim.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        victim.process.send_signal(signal.SIGCONT)

    def _short_stop(self, victim: Worker, fault: Fault) -> None:
        self._stop(victim, self._random.uniform(0.2, 0.6) * self._timeout_s)

    def _long_stop(self, victim: Worker, fault: Fault) -> None:
        self._stop(victim, self._random.uniform(1.3, 1.8) * self._timeout_s)

    def _short_cut(self, victim: Worker, fault: Fault) -> None:
        self._cut(victim, self._random.uniform(0.2, 0.6) * self._timeout_s)

    def _long_cut(self, victim: Worker, fault: Fault) -> None:
        self._cut(victim, self._random.uniform(1.3, 1.8) * self._timeout_s)

    def _cut(self, victim: Worker, seconds: float) -> None:
        self._stage.cut(victim)
        time.sleep(seconds)
        self._stage.heal(victim)

    def _slow(self, victim: Worker, fault: Fault) -> None:
        self._stage.order(victim, slow_s=self._random.uniform(0.2, 0.4))
        time.sleep(self._random.uniform(3, 5))
        self._stage.order(victim, slow_s=0.0)

    def _full_disk(self, victim: Worker, fault: Fault) -> None:
        before = len(victim.times("not saved"))
        self._stage.order(victim, largest_file=SMALL_FILES)
        self._stage.wait(
            "a failed save", lambda: len(victim.times("not saved")) > before, STALL_S
        )
        self._stage.order(victim, largest_file=None)

    def _join_and_leave(self, victim: Worker, fault: Fault) -> None:
        """One more comes, then another one goes."""
        place = self._stage.free_places[0]
        worker = self._stage.start(place)
        self._stage.wait(f"{worker.name}'s entry", lambda: worker.is_in, START_S)
        self._stage.order(victim, leave=True)
        self._stage.wait(f"{victim.name}'s leave", lambda: not victim.is_alive, STALL_S)

    def _lighthouse(self, victim: Worker, fault: Fault) -> None:
        self._stage.douse()
        time.sleep(4)
        self._stage.light()


def _had_round(worker: Worker, since: float) -> bool:
    rounds = worker.times("round")
    return not worker.is_alive or bool(rounds and rounds[-1] > since)


def _longest_gap(worker: Worker, start: float, end: float) -> float:
    """Longest time without an applied round after a moment."""
    rounds = [start, *(t for t in worker.times("round") if start < t <= end)]
    return max((b - a for a, b in zip(rounds, rounds[1:], strict=False)), default=0.0)


# -------------------------------------------------------------------------------------
# A run, and what is checked of it


def run(options: Options, kinds: list[str] | None, windows: int) -> dict[str, Any]:
    """One run; the report's entry. `kinds` None: without faults."""
    name = "disturbed" if kinds else "undisturbed"
    folder = options.out / f"{options.method}-{options.seed}-{name}"
    since = time.monotonic()
    with Stage(options, folder, windows, STEP_S if kinds else 0.0) as stage:
        for place in range(options.workers):
            stage.start(place)
        stage.wait("all workers", lambda: len(stage.alive) == options.workers, START_S)
        faults = Faults(stage, random.Random(options.seed))
        played = list(_play(faults, kinds or [], stage, windows))
        stage.wait(
            "the end",
            lambda: all(not worker.is_alive for worker in stage.workers),
            STALL_S + windows,
        )
        return {
            "seconds": round(time.monotonic() - since, 1),
            "faults": [asdict(fault) for fault in played],
            **judge(stage.workers),
        }


def _play(
    faults: Faults, kinds: list[str], stage: Stage, windows: int
) -> Iterator[Fault]:
    """The faults, spread over the run."""
    for number, kind in enumerate(kinds):
        share = (number + 0.5) / (len(kinds) + 1)
        stage.wait(
            "progress", lambda share=share: stage.done >= share * windows, STALL_S * 4
        )
        if stage.done > 0.97 * windows:
            raise RuntimeError(
                f"windows must be enough for {len(kinds)} faults, got {windows}, of "
                f"which all were read after {number}. Raise --windows."
            )
        fault = faults.play(kind)
        print(f"  {kind:<15} {fault.victim:<10} {fault.go_on_s:6.2f} s", flush=True)
        yield fault


def judge(workers: list[Worker]) -> dict[str, Any]:
    """What is true of a run that has ended."""
    ends = [e for w in workers for e in w.events if e["event"] == "end"]
    seen: dict[tuple[str, int], set[int]] = defaultdict(set)
    for worker in workers:
        for event in worker.events:
            for stream, (number, agreed) in event.get("applied", {}).items():
                if agreed is not None:
                    seen[stream, number].add(agreed)
    return {
        "ended": len(ends),
        "lost": [w.name for w in workers if not w.killed and w.process.returncode],
        "equal at the end": len({end["print"] for end in ends}) == 1,
        "loss": max((end["loss"] for end in ends), default=float("nan")),
        "rounds compared": len(seen),
        "rounds half applied": [list(k) for k, v in seen.items() if len(v) > 1],
    }


def choose(options: Options, kinds: list[str]) -> list[str]:
    """Kinds of faults, each as often as the others, in the order of the seed."""
    chosen: list[str] = []
    dice = random.Random(options.seed)
    while len(chosen) < options.faults:
        some = kinds.copy()
        dice.shuffle(some)
        chosen += some
    return chosen[: options.faults]


def verdict(
    disturbed: dict[str, Any], reference: dict[str, Any] | None, limit_s: float
) -> list[str]:
    """What was not as it must be."""
    faults = []
    if disturbed["lost"]:
        faults.append(f"workers were lost that nobody killed: {disturbed['lost']}")
    if not disturbed["equal at the end"]:
        faults.append("parameters differ at the end")
    if disturbed["rounds half applied"]:
        faults.append(f"rounds half applied: {disturbed['rounds half applied']}")
    slow = [f for f in disturbed["faults"] if f["go_on_s"] > limit_s]
    if slow:
        faults.append(f"without a round for more than {limit_s:g} s: {slow}")
    if reference is not None:
        gap = disturbed["loss"] / reference["loss"] - 1
        if not gap <= LARGEST_LOSS_GAP:  # it may be no number
            faults.append(f"the loss is {gap:.1%} above that without faults")
    return faults


def main(options: Options) -> int:
    """Runs it, prints a table, and says by its exit status whether all was well."""
    probe = Spec("", options.method, "", "", "", str(options.cache), 0, 0, 0.0, 0, 0.0)
    config = probe.config
    load_corpus(config.data, config.vocab_size, config.cache, make=True)
    kinds = ["short cut", "long cut"] if (reason := why_no_network()) is None else []
    if reason:
        print(f"links are not cut: {reason}")
    kinds = [*(options.kinds or (*KINDS, *kinds))]
    windows = options.windows or WINDOWS_A_FAULT * (options.faults + 2)
    print(f"{options.method}, seed {options.seed}: longest time without a round")
    report = {"disturbed": run(options, choose(options, kinds), windows)}
    if options.reference:
        report["undisturbed"] = run(options, None, windows)
    disturbed, reference = report["disturbed"], report.get("undisturbed")
    times = [fault["go_on_s"] for fault in disturbed["faults"]]
    limit_s = options.timeout_s + SLACK_S
    print(
        f"{len(times)} faults: without a round {statistics.median(times):.2f} s "
        f"(median), {max(times):.2f} s (worst; limit {limit_s:g} s). "
        f"{disturbed['rounds compared']} rounds compared, "
        f"{len(disturbed['rounds half applied'])} half applied. Loss "
        f"{disturbed['loss']:.4f}"
        + (f", without faults {reference['loss']:.4f}." if reference else ".")
    )
    report["problems"] = verdict(disturbed, reference, limit_s)
    path = options.out / f"{options.method}-{options.seed}.json"
    path.write_text(json.dumps(report, indent=1))
    for problem in report["problems"]:
        print("PROBLEM:", problem)
    return bool(report["problems"])


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
