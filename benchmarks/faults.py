"""What a fault costs a run: workers killed and stopped, and the lighthouse killed.

Three workers train a model of a million parameters on one machine, in windows of 20
inner steps of 30 ms, and average after each. A schedule of faults, the same for every
system, is played once for each seed:

- `kill_between`: SIGKILL of a worker between two exchanges;
- `kill_inside`: SIGKILL of a worker inside an exchange;
- `join`: the killed worker is started again, after each of the two;
- `stop_between`, `stop_inside`: SIGSTOP, and SIGCONT four seconds later;
- `lighthouse`: SIGKILL of the process that says who is there; another begins on the
  same port four seconds later.

What was thrown away is counted, not asked for. The model has one more parameter, with a
value for each worker, to which that worker adds one in each inner step. The outer step
takes the plain mean, so the parameter says how many of a worker's steps have reached
the others; `steps_lost` are those that never did, `steps_twice` those that count twice
because another worker brought them along as its own. After `rounds_that_differ` the
workers held different values of it: then the counts of steps say little.

`torchft` may ask five times for a quorum; `torchft_defaults` asks once, as it does
unless told otherwise.

    pip install torchft==0.2.0
    python benchmarks/faults.py [SYSTEM ...]
"""

import collections
import contextlib
import importlib.util
import json
import logging
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _link import skip
from _report import report

import lowcomm

NAME = "faults"
SEEDS = range(3)
NUM_WORKERS = 3
SYNC_EVERY = 20
STEP_S = 0.03
TIMEOUT_S = 10.0
AWAY_S = 4.0  # of a stopped worker, and of the lighthouse
DELAYS_S = (0.001, 0.008)  # into an exchange
# Of the lighthouse. With a join timeout shorter than a window, torchft's workers may
# end up in pairs that alternate, where one takes over the other's state each time.
HEARTBEAT_TIMEOUT_MS = 1000
JOIN_TIMEOUT_MS = 2000
DEADLINE_S = 40.0  # after a fault, until all take part again


# --------------------------------------------------------------------------------------
# A worker's side


class Line(NamedTuple):
    """One line of a worker's log.

    Args:
        event: "ready" to begin; "step", before each `opt.step()`; "exchange", just
            before it begins; "round", just after one was applied.
        at: time of day, in seconds.
        step: inner steps that this process has taken.
        round: number of the round applied, the same for all its workers.
        workers: how many took part in it.
        counts: the parameter that counts the steps of each worker.
    """

    event: str
    at: float
    step: int
    round: int
    workers: int
    counts: list[float]


class Worker(NamedTuple):
    """What a worker's process is told."""

    system: str
    id: int
    address: str  # of the lighthouse
    folder: str
    log: str
    parent: int


class Model(torch.nn.Module):
    """A million parameters, and the count of steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(256, 1024),
            torch.nn.GELU(),
            torch.nn.Linear(1024, 512),
            torch.nn.GELU(),
            torch.nn.Linear(512, 256),
        )
        # It never has a gradient, so inner optimizers leave it alone.
        self.counts = torch.nn.Parameter(torch.zeros(NUM_WORKERS))


class Training:
    """A worker's model, loop and log."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.model = Model()
        self.steps = 0
        self.file = os.open(worker.log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def log(self, event: str, round: int = 0, workers: int = 0) -> None:
        counts = self.model.counts.tolist()
        line = Line(event, time.time(), self.steps, round, workers, counts)
        os.write(self.file, json.dumps(line).encode() + b"\n")

    def inner(self) -> torch.optim.Optimizer:
        inner = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        inner.register_step_pre_hook(self.count)
        return inner

    def run(self, step: Callable[[], Any]) -> None:
        """Trains until whoever started this process is gone."""
        self.log("ready")
        while not Path(self.worker.folder, "go").exists():
            time.sleep(0.005)
        data = torch.Generator().manual_seed(self.worker.id)
        while os.getppid() == self.worker.parent:
            end = time.perf_counter() + STEP_S
            batch = torch.randn(8, 256, generator=data)
            self.model.zero_grad()
            (self.model.layers(batch) - batch).square().mean().backward()
            time.sleep(max(0.0, end - time.perf_counter()))
            step()

    @torch.no_grad()
    def count(self, *_: Any) -> None:
        """Called before each inner step."""
        self.model.counts[self.worker.id] += 1
        self.steps += 1
        self.log("step")


def work(worker: Worker) -> None:
    torch.set_num_threads(1)
    try:
        SYSTEMS[worker.system].work(Training(worker))
    except BaseException:
        # Or threads that wait for somebody would keep the process.
        traceback.print_exc()
        os._exit(1)


# --------------------------------------------------------------------------------------
# The systems


def torchft_worker(training: Training, quorum_retries: int = 5) -> None:
    """Trains with torchft's DiLoCo; a replica group of one process."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    class LoggedManager(Manager):  # type: ignore[misc]
        def start_quorum(self, *args: Any, **kwargs: Any) -> None:
            super().start_quorum(*args, **kwargs)
            training.log("exchange")

    logging.disable()  # or it logs a traceback for each tensor
    model, inner = training.model, training.inner()
    outer = torch.optim.SGD(model.parameters(), lr=1.0)

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "inner": inner.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    timeout = timedelta(seconds=TIMEOUT_S)
    manager = LoggedManager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timeout,
        quorum_timeout=timeout,
        connect_timeout=timeout,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://{training.worker.address}",
        hostname="127.0.0.1",
        replica_id=f"worker_{training.worker.id}",
        init_sync=False,  # all begin with the same parameters
        quorum_retries=quorum_retries,
    )
    # It steps when a round is applied, and then only.
    outer.register_step_post_hook(
        lambda *_: training.log(
            "round", manager.current_step(), manager.num_participants()
        )
    )
    with DiLoCo(manager, [model], inner, outer, sync_every=SYNC_EVERY):
        training.run(inner.step)


def torchft_defaults_worker(training: Training) -> None:
    torchft_worker(training, quorum_retries=0)


def lowcomm_worker(training: Training) -> None:
    """Trains with lowcomm's DiLoCo over workers that come and go."""
    group = lowcomm.sync.ElasticGroup(
        training.worker.address,
        name=f"worker-{training.worker.id}-{os.getpid()}",
        start_with=1 if Path(training.worker.folder, "go").exists() else NUM_WORKERS,
        timeout_s=TIMEOUT_S,
    )
    training.log("ready")  # the optimizer is built when the others are there
    inner = training.inner()
    opt = lowcomm.DiLoCo(
        inner,
        group=group,
        sync_every=SYNC_EVERY,
        outer_lr=1.0,
        outer_momentum=0.0,
    )

    def sync() -> dict[str, Any]:
        return dict(opt.state_dict()["lowcomm"]["sync"])

    def log_exchange(*_: Any) -> None:
        state = sync()
        if state["clock"] + 1 >= state["streams"]["parameters"]["due"]:
            training.log("exchange")

    inner.register_step_post_hook(log_exchange)
    opt.register_round_hook(
        lambda _: training.log(
            "round", sync()["streams"]["parameters"]["round"], len(group.members())
        )
    )
    training.run(opt.step)


class System(NamedTuple):
    work: Callable[[Training], None]
    kinds: tuple[str, ...]  # of faults


KINDS = ("kill_between", "kill_inside", "stop_between", "stop_inside", "lighthouse")
SYSTEMS = {
    "lowcomm": System(lowcomm_worker, KINDS),
    "torchft": System(torchft_worker, KINDS),
    "torchft_defaults": System(torchft_defaults_worker, ("lighthouse",)),
}


# --------------------------------------------------------------------------------------
# Processes


class Broken(Exception):
    """A worker is gone that should not be, or something took too long."""


class Process:
    """A process in a group of its own, and what it has logged."""

    def __init__(self, *args: str, log: Path, **pipes: Any) -> None:
        self.log = log
        self.lines: list[Line] = []
        self.offset = 0
        with open(log.with_suffix(".txt"), "ab") as output:
            self.popen = subprocess.Popen(
                [sys.executable, __file__, *args],
                env={**os.environ, "RUST_LOG": "off", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
                **{"stdin": subprocess.DEVNULL, "stdout": output, **pipes},
                stderr=output,
            )

    def read(self) -> None:
        """Takes in the lines written since; not one that is being written."""
        with open(self.log, "ab+") as file:
            file.seek(self.offset)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self.offset += len(text)
        self.lines += [Line(*json.loads(line)) for line in text.splitlines()]

    def rounds(self, since: float = 0.0) -> list[Line]:
        return [x for x in self.lines if x.event == "round" and x.at > since]

    def output(self) -> str:
        """The end of all else that it has printed."""
        return self.log.with_suffix(".txt").read_text()[-300:].strip()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.popen.wait()


class Cluster:
    """The workers of one system, and their lighthouse."""

    def __init__(self, system: str, folder: Path) -> None:
        self.system = system
        self.folder = folder
        self.address = f"127.0.0.1:{quiet_port()}"
        self.processes: list[Process] = []  # all there ever were
        self.workers: dict[int, Process] = {}
        self.lighthouse = self.prepare_lighthouse()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()

    def prepare_lighthouse(self) -> Process:
        """A process that has imported all it needs, and begins when told to."""
        log = self.folder / f"lighthouse-{len(self.processes)}.jsonl"
        process = Process("lighthouse", self.address, log=log, stdin=subprocess.PIPE)
        self.processes.append(process)
        return process

    def begin_lighthouse(self) -> None:
        assert self.lighthouse.popen.stdin is not None
        self.lighthouse.popen.stdin.write(b"\n")
        self.lighthouse.popen.stdin.flush()

    def begin(self) -> None:
        self.begin_lighthouse()
        for i in range(NUM_WORKERS):
            self.start(i)
        self.wait_for(lambda: all(p.lines for p in self.workers.values()))
        (self.folder / "go").touch()

    def start(self, i: int) -> Process:
        log = self.folder / f"worker-{len(self.processes)}.jsonl"
        worker = Worker(
            self.system, i, self.address, str(self.folder), str(log), os.getpid()
        )
        process = Process("worker", json.dumps(worker), log=log)
        self.processes.append(process)
        self.workers[i] = process
        return process

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            for i, worker in self.workers.items():
                worker.read()
                if worker.popen.poll() is not None:
                    raise Broken(f"worker {i} ended:\n{worker.output()}")
            if time.monotonic() > deadline:
                raise Broken(f"not done in {DEADLINE_S} s")
            time.sleep(0.001)

    def settle(self, since: float, rounds: int = 2) -> int:
        """Waits until all have taken part in rounds together; returns the last."""

        def settled() -> bool:
            return all(
                sum(r.workers == len(self.workers) for r in p.rounds(since)) >= rounds
                for p in self.workers.values()
            )

        self.wait_for(settled)
        return self.last_round()

    def last_round(self) -> int:
        """The last round that all have applied."""
        applied = [{x.round for x in p.rounds()} for p in self.workers.values()]
        return max(set.intersection(*applied))

    def wait_inside_window(self, i: int, steps: int) -> None:
        """Waits until that worker has taken some steps since its last round."""
        worker, old = self.workers[i], len(self.workers[i].lines)

        def there() -> bool:
            events = [x.event for x in worker.lines[-steps:]]
            return len(worker.lines) > old and events == ["step"] * steps

        self.wait_for(there)

    def wait_inside_exchange(self, i: int) -> None:
        worker, old = self.workers[i], len(self.workers[i].lines)
        self.wait_for(lambda: any(x.event == "exchange" for x in worker.lines[old:]))


def quiet_port() -> int:
    """A free port that no outgoing connection takes while the lighthouse is away."""
    for port in range(29510, 29610):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free between 29510 and 29609")


def serve(address: str) -> None:
    """The lighthouse: begins at the first line of its input, ends with the input."""
    from torchft.coordination import LighthouseServer

    sys.stdin.readline()
    server = LighthouseServer(
        address,
        min_replicas=1,
        join_timeout_ms=JOIN_TIMEOUT_MS,
        quorum_tick_ms=100,
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
    )
    sys.stdin.read()
    server.shutdown()


# --------------------------------------------------------------------------------------
# What the lines say


def rounds_after(workers: Collection[Process], first: int) -> list[list[Line]]:
    """The lines of each round from `first` on, by number and then by time."""
    rounds: dict[int, list[Line]] = collections.defaultdict(list)
    for line in sorted(line for p in workers for line in p.rounds()):
        rounds[line.round].append(line)
    return [rounds[number] for number in sorted(rounds) if number >= first]


def lost_and_twice(
    workers: dict[int, Process], i: int, first: int, last: int
) -> tuple[int, int]:
    """Inner steps of worker i that reached nobody, and those that count twice.

    Args:
        workers: all that are there now.
        i: the worker; its steps count from its round `first`, or from its start.
        first: number of a round that the others applied.
        last: number of a round that all applied.
    """
    lines = workers[i].lines
    at = {x.round: n for n, x in enumerate(lines) if x.event == "round"}
    taken = sum(x.event == "step" for x in lines[at.get(first, 0) : at[last]])
    once = twice = 0
    for (before, *_), (after, *_) in pairwise(rounds_after(workers.values(), first)):
        if after.round > last:
            break
        reached = after.workers * (after.counts[i] - before.counts[i])
        mine = [x.counts[i] for x in lines if x.event == "step" and x.at < after.at]
        brought = mine[-1] - before.counts[i] if mine else 0.0
        share = max(0.0, min(reached, brought))
        once += round(share)
        twice += round(reached - share)
    return taken - once, twice


def steps_and_rounds(
    workers: dict[int, Process], others: Collection[int], first: int, last: int
) -> dict[str, float]:
    """What became of the steps of the others, and whether all have the same."""
    counts = [lost_and_twice(workers, i, first, last) for i in others]
    differ = [
        len({tuple(round(x, 2) for x in line.counts) for line in lines}) > 1
        for lines in rounds_after(workers.values(), first)
    ]
    return {
        "steps_lost": sum(lost for lost, _ in counts),
        "steps_twice": sum(twice for _, twice in counts),
        "rounds_that_differ": sum(differ),
    }


# --------------------------------------------------------------------------------------
# The faults


class Fault(NamedTuple):
    """A fault of the schedule.

    Args:
        kind: one of KINDS.
        victim: the worker that it hits; it says when the lighthouse is hit, too.
        steps: of the victim's window before the fault.
        delay_s: from the beginning of the victim's exchange to a fault inside.
    """

    kind: str
    victim: int
    steps: int
    delay_s: float


def schedule(seed: int, kinds: Collection[str]) -> list[Fault]:
    draw = random.Random(seed)
    faults = [
        Fault(
            kind,
            draw.randrange(NUM_WORKERS),
            draw.randint(3, SYNC_EVERY - 4),
            draw.uniform(*DELAYS_S),
        )
        for kind in KINDS
    ]
    return [fault for fault in faults if fault.kind in kinds]


Note = Callable[[str, dict[str, float]], None]  # takes figures by name


def play(cluster: Cluster, fault: Fault, note: Note) -> None:
    """Plays one fault, and the join after it.

    Raises:
        Broken: if not all take part again in the end; it has been noted.
    """
    kind, victim, workers = fault.kind, fault.victim, cluster.workers
    process = workers[victim]
    if kind.endswith("inside"):
        cluster.wait_inside_exchange(victim)
        time.sleep(fault.delay_s)
    else:
        cluster.wait_inside_window(victim, fault.steps)
    first = cluster.last_round()
    others = [i for i in workers if i != victim or kind == "lighthouse"]
    at = back_at = time.time()
    try:
        if kind.startswith("kill"):
            process.kill()
            process.read()
            del workers[victim]
        elif kind.startswith("stop"):
            process.signal(signal.SIGSTOP)
            time.sleep(AWAY_S)
            process.read()
            back_at = time.time()
            process.signal(signal.SIGCONT)
        else:
            cluster.lighthouse.kill()
            cluster.lighthouse = cluster.prepare_lighthouse()
            time.sleep(AWAY_S)
            cluster.begin_lighthouse()
        if kind.endswith("inside"):
            note(kind, {"hits": process.lines[-1].event == "exchange"})
        last = cluster.settle(back_at)
    except Broken:
        went_on = [
            workers[i].popen.poll() is None and bool(workers[i].rounds(at))
            for i in others
        ]
        note(kind, {"survivors": statistics.fmean(went_on)})
        raise
    next_round_s = max(workers[i].rounds(at)[0].at - at for i in others)
    figures = {"survivors": 1.0, "next_round_s": next_round_s}
    note(kind, figures | steps_and_rounds(workers, others, first, last))
    if kind.startswith("stop"):
        back_s = process.rounds(back_at)[0].at - back_at
        lost, _ = lost_and_twice(workers, victim, first, last)
        note(kind, {"victim_back_s": back_s, "victim_steps_lost": lost})
    if kind.startswith("kill"):
        play_join(cluster, victim, note)


def play_join(cluster: Cluster, joiner: int, note: Note) -> None:
    first, others, at = cluster.last_round(), list(cluster.workers), time.time()
    process = cluster.start(joiner)
    workers = cluster.workers
    try:
        last = cluster.settle(at)
    except Broken:
        note("join", {"joined": 0.0})
        raise
    joined_at = process.rounds()[0].at
    lost, _ = lost_and_twice(workers, joiner, first, last)
    gaps = [b.at - a.at for i in others for a, b in pairwise(workers[i].rounds(at))]
    figures = {
        "joined": 1.0,
        "in_round_s": joined_at - at,
        "in_round_after_ready_s": joined_at - process.lines[0].at,
        "joiner_steps_lost": lost,
        "longest_round_s": max(gaps),
    }
    note("join", figures | steps_and_rounds(workers, others, first, last))


def play_quiet(cluster: Cluster, note: Note) -> None:
    """Some rounds without a fault, to compare with."""
    at = time.time()
    cluster.settle(at, rounds=5)
    for process in cluster.workers.values():
        rounds = process.rounds(at)
        seconds = [b.at - a.at for a, b in pairwise(rounds)]
        begins = [x.at for x in process.lines if x.event == "exchange"]
        exchanges = [r.at - max(x for x in begins if x < r.at) for r in rounds]
        note("quiet", {"round_s": statistics.median(seconds)})
        note("quiet", {"exchange_s": statistics.median(exchanges)})


def play_all(system: str, faults: Collection[Fault], note: Note) -> None:
    """Plays the faults one after the other; with new workers after a fatal one."""
    left = collections.deque(faults)
    while left:
        with (
            tempfile.TemporaryDirectory() as folder,
            Cluster(system, Path(folder)) as cluster,
        ):
            cluster.begin()
            play_quiet(cluster, note)
            try:
                while left:
                    play(cluster, left.popleft(), note)
            except Broken as broken:
                print(f"{system}: {broken}", file=sys.stderr)


UNITS = {"survivors": "of survivors", "joined": "of joiners", "hits": "of runs"}


def report_system(name: str) -> None:
    figures: dict[tuple[str, str], list[float]] = collections.defaultdict(list)

    def note(kind: str, values: dict[str, float]) -> None:
        for figure, value in values.items():
            figures[kind, figure].append(round(value, 3))

    for seed in SEEDS:
        play_all(name, schedule(seed, SYSTEMS[name].kinds), note)
    for (kind, figure), values in figures.items():
        middle = statistics.fmean if figure in UNITS else statistics.median
        unit = "s" if figure.endswith("_s") else figure.split("_")[0]
        unit = UNITS.get(figure, unit if "steps" not in figure else "steps")
        more = {"system": name, "runs": values}
        report(NAME, f"{kind}_{figure}", middle(values), unit, **more)


def main(systems: Collection[str]) -> None:
    if importlib.util.find_spec("torchft") is None:
        skip(NAME, "torchft is not installed (pip install torchft==0.2.0)")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for name in systems:
        report_system(name)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["worker", told]:
            work(Worker(*json.loads(told)))
        case ["lighthouse", address]:
            serve(address)
        case names:
            main(names or list(SYSTEMS))
