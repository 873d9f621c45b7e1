"""Workers that come and go, each in a thread of its own, over real connections.

A stand-in for torchft's lighthouse hands out sheets much faster. A worker that is
killed ends in the middle of whatever it does: its connections close, and it says
nothing more to the lighthouse.
"""

import contextlib
import hashlib
import itertools
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

import lowcomm
from lowcomm.sync import company, engine, mean, roll, rounds
from lowcomm.sync.elastic import ElasticGroup
from lowcomm.sync.roll import Entry
from toy import snapshot, tensors_of, train

#: A test that waits longer for anything has failed.
LONGEST_S = 30.0

METHODS = {
    "LocalSGD": (lowcomm.LocalSGD, {}),
    "DiLoCo": (lowcomm.DiLoCo, {}),
    "streaming": (lowcomm.DiLoCo, {"fragments": 2, "overlap": 1}),
    "int8": (
        lowcomm.DiLoCo,
        {"codec": "int8", "error_feedback": True, "overlap": 2},
    ),
    "eager": (lowcomm.DiLoCo, {"eager": True, "outer_lr": 0.4}),
    "DESLOC": (lowcomm.DESLOC, {"sync_every": 2}),
    "MTDAO": (lowcomm.MTDAO, {}),
    "NoLoCo": (lowcomm.NoLoCo, {}),
}


class Killed(BaseException):
    """What ends a worker; nothing may catch it."""


class Lighthouse:
    """Gives all who ask the same sheet, when all who are alive have asked."""

    WAIT_S = 0.3  # for who is alive and does not ask
    SILENT_S = 0.5  # who says nothing for so long is not alive

    def __init__(self):
        self._news = threading.Condition()
        self._asking = {}
        self._beats = {}
        self._killed = set()
        self._sheets = []
        self._since = 0.0
        self.is_away = False

    def client(self, url, timeout):
        address = url.removeprefix("http://")

        def heartbeat(name, timeout):
            self._beat(address, name)

        def quorum(name, timeout, data):
            return self._ask(address, name, data)

        return SimpleNamespace(heartbeat=heartbeat, quorum=quorum)

    def kill(self, address, name):
        with self._news:
            self._killed.add(address)
            self._asking.pop(name, None)
            self._beats.pop(name, None)
            self._news.notify_all()

    def await_sheet(self, holds):
        """Returns when a sheet says so, as entries by name."""
        with self._news:
            assert self._news.wait_for(
                lambda: self._sheets and holds(self.sheet()), LONGEST_S
            ), self.sheet()

    def sheet(self):
        participants = self._sheets[-1].participants if self._sheets else ()
        return {p.replica_id: Entry(**p.data) for p in participants}

    def _beat(self, address, name):
        with self._news:
            if address in self._killed or self.is_away:
                raise RuntimeError("connection refused")
            self._beats[name] = time.monotonic()

    def _ask(self, address, name, data):
        self._beat(address, name)
        with self._news:
            number = len(self._sheets)
            if not self._asking:
                self._since = time.monotonic()
            self._asking[name] = data
            while len(self._sheets) == number:
                if self._is_complete():
                    self._give_out()
                else:
                    self._news.wait(0.02)
                if address in self._killed or self.is_away:
                    raise RuntimeError("connection refused")
            return self._sheets[number]

    def _is_complete(self):
        now = time.monotonic()
        alive = {n for n, beat in self._beats.items() if now - beat < self.SILENT_S}
        return alive <= self._asking.keys() or now - self._since > self.WAIT_S

    def _give_out(self):
        participants = [
            SimpleNamespace(replica_id=name, data=data)
            for name, data in sorted(self._asking.items())
        ]
        created = SimpleNamespace(seconds=len(self._sheets), nanos=0)
        self._sheets.append(SimpleNamespace(participants=participants, created=created))
        self._asking.clear()
        self._news.notify_all()


class MortalGroup(ElasticGroup):
    """A group whose worker may have been killed in another thread."""

    is_dead = False

    def _check_alive(self):
        if self.is_dead:
            raise Killed

    def tick(self):
        self._check_alive()

    def channel(self):
        self._check_alive()
        return super().channel()

    def reform(self, rounds):
        self._check_alive()
        super().reform(rounds)


class Given(NamedTuple):
    """A state that was handed over: from whom, to whom, and what."""

    donor: int
    taker: int
    state: Any


class Worker(threading.Thread):
    """One worker of a fleet.

    Args:
        fleet: that it belongs to.
        name: of the worker.
        work: what it does, a function of the worker.
        settings: of its group.
    """

    def __init__(self, fleet, name, work, settings):
        super().__init__(name=name, daemon=True)
        self.fleet = fleet
        self.number = int(name.rpartition("-")[2])
        self.work = work
        self.settings = settings
        self.group = self.model = self.opt = self.error = self.result = None
        self.trap = None  # (what it is about to do, in which round; None for any)
        self.landed = {}  # (stream, round, among whom) -> whose shares, and the bits
        self.agreed = {}  # (stream, round) -> the bits of what all agree on then
        self.changes = []
        self.councils = []
        self.holds = False

    def run(self):
        try:
            self.address = f"127.0.0.1:{next(self.fleet.ports)}"
            usual = {"name": self.name, "timeout_s": 3.0, "address": "127.0.0.1"}
            self.group = MortalGroup(self.address, **usual | self.settings)
            self.group.register_change_hook(self.changes.append)
            self.result = self.work(self)
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        finally:
            if self.error is not None:  # its process would end
                self.stop()

    def stop(self):
        """Closes all that the end of its process would close."""
        self.fleet.lighthouse.kill(self.address, self.name)
        if self.group is not None:
            self.group.is_dead = True
            self.group._roll.close()
            self.group._drop_channel()

    def die(self):
        self.stop()
        raise Killed

    def reached(self, what, round):
        if self.is_trapped(what, round):
            self.trap = None
            self.die()

    def is_trapped(self, what, round):
        return self.trap in ((what, round), (what, None))

    @property
    def is_ready(self):
        """Whether it waits for all to be settled anew."""
        return self.group is not None and self.group._roll.entry.ready

    @property
    def steps(self):
        return self.opt.stats.steps if self.opt is not None else -1


class Fleet:
    """Starts workers, and sees what they do.

    Args:
        patch: pytest's monkeypatch.
    """

    def __init__(self, patch):
        self.lighthouse = Lighthouse()
        self.workers = {}
        self.ports = itertools.count(1)
        self.given = []
        patch.setattr(roll, "client_class", lambda: self.lighthouse.client)
        for name, seconds in (
            ("_BEAT_S", 0.03),
            ("_ASK_S", 0.01),
            ("_MISSING_S", 0.05),
            ("_OUTAGE_S", 1.5),
            ("_RETURN_S", 0.2),
        ):
            patch.setattr(roll, name, seconds)
        self._patch_exchanges(patch)
        self._patch_engine(patch)

    def start(self, called, work, **settings):
        self.workers[called] = worker = Worker(self, called, work, settings)
        worker.start()
        return worker

    def __getitem__(self, number):
        return self.workers[f"worker-{number}"]

    def forget(self, called):
        """Keeps nothing of a worker that has ended."""
        del self.workers[called]

    def await_hold(self, *numbers):
        """Returns when these workers are between two steps, and stay there."""
        wait_for(lambda: all(self[number].holds for number in numbers))

    def join(self, *numbers):
        """Waits for the end of workers, all if none is named; raises their errors."""
        deadline = time.monotonic() + LONGEST_S
        chosen = [self[number] for number in numbers] or [*self.workers.values()]
        for worker in chosen:
            worker.join(max(0.0, deadline - time.monotonic()))
            if worker.error is not None:
                raise worker.error
            assert not worker.is_alive(), f"{worker.name} hangs"
        return [worker.result for worker in chosen]

    def close(self):
        for worker in self.workers.values():
            if worker.group is not None:
                worker.stop()

    # ------------------------------------------------------------------ traps

    def _owner(self, channel):
        for worker in self.workers.values():
            if worker.group is not None and worker.group._channel is channel:
                return worker
        raise Killed  # of an exchange that its worker has given up

    def _reached(self, what, wire):
        if wire in self._rounds:
            self._owner(wire.group).reached(what, self._rounds[wire])

    def _patch_exchanges(self, patch):
        self._rounds = weakref.WeakKeyDictionary()  # by wire
        mean_, reduce = engine.mean_, mean._Pipeline._reduce
        prepare, confirm = mean.Wire.prepare, mean._confirm
        give, take = company.give, company.take

        def noted_mean_(wire, job, header):
            self._rounds[wire] = header.round
            self._reached("greet", wire)
            return (yield from mean_(wire, job, header))

        def noted_reduce(pipeline, bucket, *args):
            yield from reduce(pipeline, bucket, *args)
            self._reached("share", pipeline._wire)

        def noted_prepare(wire, outcome):
            self._reached("prepare", wire)
            prepare(wire, outcome)
            self._reached("confirm", wire)

        def noted_confirm(wire):
            worker = self._owner(wire.group)
            if worker.is_trapped("confirm to some", self._rounds.get(wire)):
                word = torch.zeros(1, dtype=torch.uint8)
                yield wire.send(wire.others[0], word, wire.confirm_tag)
                for peer in wire.others:  # who then have told all that they hold it
                    yield wire.recv(peer, torch.empty_like(word), wire.confirm_tag)
                worker.die()
            yield from confirm(wire)
            self._reached("land", wire)

        def noted_give(wire, peer, state, *args):
            worker = self._owner(wire.group)
            self.given.append(Given(wire.group.rank, peer, snapshot(state)))
            messages = give(wire, peer, state, *args)
            for number, message in enumerate(messages):
                yield message
                worker.reached("give", number)

        def noted_take(wire, peer):
            worker = self._owner(wire.group)
            messages = take(wire, peer)
            number = 0
            while True:
                try:
                    yield next(messages)
                except StopIteration as stop:
                    return stop.value
                worker.reached("take", number)
                number += 1

        patch.setattr(engine, "mean_", noted_mean_)
        patch.setattr(mean._Pipeline, "_reduce", noted_reduce)
        patch.setattr(mean.Wire, "prepare", noted_prepare)
        patch.setattr(mean, "_confirm", noted_confirm)
        patch.setattr(company, "give", noted_give)
        patch.setattr(company, "take", noted_take)

    def _patch_engine(self, patch):
        launch, land = engine.Engine._launch, rounds.Rounds.land
        meet = company.ComeAndGo._meet

        def worker_in(group):
            return next((w for w in self.workers.values() if w.group is group), None)

        def noted_launch(engine_, progress, *args):
            worker_in(engine_.group).reached("launch", progress.round)
            launch(engine_, progress, *args)

        def noted_land(rounds_, pending, outcome, *args, **kwargs):
            worker = worker_in(rounds_._group)
            stream, round = pending.progress.stream, pending.progress.round
            if outcome is not None:
                key = (stream.name, round, pending.wire.members)
                assert key not in worker.landed, f"{key} has landed before"
                included, results = outcome.included, digest(pending.results.tensors)
                worker.landed[key] = included, results
            land(rounds_, pending, outcome, *args, **kwargs)
            if stream.agreed is not None:
                worker.agreed[stream.name, round] = digest(tensors_of(stream.state()))

        def noted_meet(company_):
            worker = worker_in(company_._group)
            worker.reached("meet", len(worker.changes))
            council = meet(company_)
            worker.councils.append(council)
            worker.reached("met", len(worker.changes))
            return council

        patch.setattr(engine.Engine, "_launch", noted_launch)
        patch.setattr(rounds.Rounds, "land", noted_land)
        patch.setattr(company.ComeAndGo, "_meet", noted_meet)


def digest(tensors):
    hashed = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        hashed.update(flat.view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:12]


@contextlib.contextmanager
def made(patch):
    fleet = Fleet(patch)
    try:
        yield fleet
    finally:
        fleet.close()


# What workers do

SYNC_EVERY = 4
NUM_STEPS = 16


def build(worker, method="DiLoCo", **more):
    """242 values: six buckets of the smallest size for three workers."""
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2)).double()
    generator = torch.Generator().manual_seed(worker.number)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    kind, keywords = METHODS[method]
    keywords = {"lr": 0.01, "sync_every": SYNC_EVERY, "bucket_bytes": 384} | keywords
    worker.model = model
    worker.opt = kind(model.named_parameters(), group=worker.group, **keywords | more)


def one_step(worker):
    step = worker.steps
    train(worker.model, worker.opt, range(step, step + 1), worker.number)


def training(
    method="DiLoCo", num_steps=NUM_STEPS, *, at=None, trap=None, last_trap=None, **more
):
    """Trains to the end.

    Args:
        method: of METHODS.
        num_steps: inner steps of the run.
        at: by step, what is called before it, with the worker.
        trap: where the worker is killed.
        last_trap: where it is killed in `finish`.
        more: of the optimizer.
    """

    def work(worker):
        worker.trap = trap
        build(worker, method, **more)
        while worker.steps < num_steps:
            if at and worker.steps in at:
                at[worker.steps](worker)
            one_step(worker)
        worker.trap = worker.trap or last_trap
        worker.opt.finish()
        result = state_of(worker)
        worker.group.close()
        return result

    return work


def state_of(worker):
    """Parameters, and what the workers agree on, by stream."""
    streams = worker.opt.state_dict()["lowcomm"]["sync"]["streams"]
    outer = {
        name: {kind: t for kind, t in s["tensors"].items() if kind != "residual"}
        for name, s in streams.items()
        if s["agreed"]
    }
    return snapshot([list(worker.model.parameters()), outer])


def until_awaited(worker):
    """Holds a worker until it has heard of somebody who wants to be let in."""
    worker.holds = True
    wait_for(lambda: worker.group.awaited)
    worker.holds = False


def wait_for(holds, *, every_s=0.002, longest_s=LONGEST_S):
    """Returns when something holds; it must, sooner or later."""
    deadline = time.monotonic() + longest_s
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(every_s)
