"""Known faults of systems whose workers come and go, each by its name.

Most are tested where the part is: a peer that dies beside the steps, a result that
comes too late to count, a straggler, a newcomer at any moment, donors, retries without
end, two of one name in test_elastic.py; the lighthouse's end in test_roll.py and
test_chaos.py; uneven data, another order of parameters, odd numbers of workers in
test_processes.py, test_contract.py and test_noloco.py; exits in test_exit.py; a worker
that sends nonsense in test_robust.py; disks in test_checkpoint.py.
"""

import ast
import contextlib
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import fleet as fleets
import lowcomm
from fleet import build, one_step, training
from lowcomm.__main__ import main
from lowcomm.sync.errors import PeerLost
from lowcomm.sync.group import TorchGroup
from lowcomm.testing import free_port
from toy import train

ROOT = Path(__file__).parent.parent


@pytest.fixture
def fleet(monkeypatch):
    with fleets.made(monkeypatch) as made:
        yield made


# A backend that cannot be ended from outside


def channels(num):
    """Connected channels, of which each has one of the ranks 10, 11, ..."""
    store, made = dist.HashStore(), {}

    def connect(place):
        limit = timedelta(seconds=20)
        backend = dist.ProcessGroupGloo(store, place, num, limit)
        channel = TorchGroup.__new__(TorchGroup)
        members = range(10, 10 + num)
        channel._over(backend, members, members[place], is_gloo=True)
        made[place] = channel

    threads = [threading.Thread(target=connect, args=(i,)) for i in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[i] for i in range(num)]


@pytest.mark.parametrize("dead", [None, 11])
def test_whoever_gives_up_ends_all_waits_for_him_at_once(dead):
    first, second, third = channels(3)
    if dead:  # a wait for one that is lost fails at once, and closes nothing
        second._abort()
    waits = [third.recv(10, torch.zeros(4), 7), first.recv(12, torch.zeros(4), 7)]
    since = time.monotonic()
    first._abort()
    for wait in waits:
        with pytest.raises(PeerLost):
            wait.wait()
    assert time.monotonic() - since < 5


def test_others_go_on_when_one_gives_up():
    first, second, third = channels(3)
    first._abort()
    sent = second.send(12, torch.tensor([3.0]), 1)
    third.recv(11, came := torch.zeros(1), 1).wait()
    sent.wait()
    assert came == 3


# Timeouts in the wrong order


def test_all_waits_follow_from_one_number(fleet):
    def work(worker):
        build(worker)
        worker.seen = worker.opt._timeout_s, worker.group._roll.entry.patience_s

    fleet.start("worker-0", work, start_with=1, timeout_s=2.5)
    fleet.join()
    assert fleet[0].seen == (2.5, 2.5)


def test_an_optimizer_may_wait_for_another_time_than_its_group(fleet):
    def work(worker):
        build(worker, timeout_s=7.0)
        worker.seen = worker.opt._timeout_s

    fleet.start("worker-0", work, start_with=1, timeout_s=2.5)
    fleet.join()
    assert fleet[0].seen == 7.0
    alone = lowcomm.LocalSGD([torch.nn.Parameter(torch.zeros(1))], sync_every=1)
    assert alone._timeout_s == 600


# Heartbeats that compare the clocks of two machines


def test_no_wait_depends_on_the_time_of_day():
    for path in (ROOT / "lowcomm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("time", "time"), path


# Ctrl+C is ignored, and processes are left


WAITS = """
import sys, torch, lowcomm
from lowcomm.sync import ElasticGroup
group = ElasticGroup(sys.argv[1], timeout_s=30.0)
print("waits", flush=True)
lowcomm.LocalSGD([torch.nn.Parameter(torch.zeros(3))], group=group, sync_every=2)
"""


@pytest.mark.workers
def test_ctrl_c_ends_a_worker_that_waits_for_others():
    pytest.importorskip("torchft")
    command = [sys.executable, "-c", WAITS, f"127.0.0.1:{free_port()}"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        while process.stdout.readline() != "waits\n":
            assert process.poll() is None
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert "KeyboardInterrupt" in error
    assert "FATAL" not in error and process.returncode in (1, -signal.SIGINT)


# A lone worker, whose means are of nothing


def test_a_lone_worker_learns_as_it_does_without_a_group(monkeypatch):
    alone = SimpleNamespace(group=None, number=0)
    build(alone, "LocalSGD")
    for step in range(9):
        train(alone.model, alone.opt, range(step, step + 1), 0)
    with fleets.made(monkeypatch) as fleet:
        fleet.start("worker-0", training("LocalSGD", 9), start_with=1)
        fleet.join()
        pairs = zip(fleet[0].model.parameters(), alone.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


# One that comes loads an older state than it was given


def test_a_state_is_loaded_before_the_first_step_only(fleet):
    def work(worker):
        build(worker)
        state = worker.opt.state_dict()
        worker.opt.load_state_dict(state)
        for _ in range(5):
            one_step(worker)
        with pytest.raises(ValueError, match="^state_dict must be loaded"):
            worker.opt.load_state_dict(state)
        with pytest.raises(ValueError, match="^group must be of fixed"):
            lowcomm.Checkpointer("unused", group=worker.group, model=worker.model)

    fleet.start("worker-0", work, start_with=1)
    fleet.join()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lighthouse": None}, "lighthouse must be a string"),
        ({"lighthouse": "here:1", "name": 3}, "name must be a string"),
        ({"lighthouse": "here:1", "address": "0.0.0.0"}, "address must be one that"),
        ({"lighthouse": "nowhere.invalid:1"}, "lighthouse must be at a host that this"),
        ({"lighthouse": "127.0.0.1:1", "run": 3}, "run must be a string"),
        ({"lighthouse": "127.0.0.1:1", "token": 3}, "token must be a string"),
        ({"lighthouse": "127.0.0.1:1", "tell": 3}, "tell must be a function or None"),
    ],
)
def test_addresses_and_words_that_others_cannot_use_are_refused(settings, words):
    with pytest.raises((TypeError, ValueError), match=words):
        lowcomm.sync.ElasticGroup(**settings)


def test_a_lighthouse_that_takes_all_for_dead_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["lighthouse", "--heartbeat-s", "0"])
    assert "heartbeat_s must be positive, got heartbeat_s=0" in capsys.readouterr().err


def test_sites_are_refused_where_workers_come_and_go(fleet):
    def work(worker):
        with pytest.raises(ValueError, match="^levels must be None with workers that"):
            build(worker, "LocalSGD", levels=[((0, 1), 2)])

    fleet.start("worker-0", work, start_with=1)
    fleet.join()
