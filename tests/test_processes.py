"""What only real processes show: the wire, a kill, a wait that must end."""

import functools
import logging
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import lowcomm
from lowcomm.sync import PrivateGroup
from lowcomm.testing import free_port, run_workers
from toy import (
    inner_state_of,
    network,
    parameters_of,
    same,
    scalar,
    slide,
    train,
)

pytestmark = pytest.mark.workers

SYNC_EVERY = 3
METHODS = {
    "LocalSGD": lowcomm.LocalSGD,
    "LocalSGD-states": functools.partial(lowcomm.LocalSGD, average_states=True),
    "DiLoCo": lowcomm.DiLoCo,
    "NoLoCo": lowcomm.NoLoCo,
    "NoLoCo-two": functools.partial(lowcomm.NoLoCo, gamma=0.4),
}


def built(**settings):
    """A model and an optimizer for every method, from unequal seeds of every worker."""
    fleet = {}
    for i, (name, make) in enumerate(METHODS.items()):
        model = network(seed=i, dtype=torch.float32)
        fleet[name] = (
            model,
            make(
                model.named_parameters(),
                lr=0.05,
                sync_every=SYNC_EVERY,
                bucket_bytes=128,
                **settings,
            ),
        )
    return fleet


def bits_of(fleet):
    return {
        name: [parameters_of(model), inner_state_of(opt), opt.stats.rounds]
        for name, (model, opt) in fleet.items()
    }


def three_rounds(rank):
    fleet = built()
    sent = {}
    for name, (model, opt) in fleet.items():
        train(model, opt, range(3 * SYNC_EVERY), rank)
        sent[name] = opt.stats.bytes_sent
    after_rounds = bits_of(fleet)
    for model, opt in fleet.values():
        with opt.global_parameters():
            pass
        train(model, opt, range(3 * SYNC_EVERY, 3 * SYNC_EVERY + 1 + rank), rank)
        opt.finish()
    return after_rounds, bits_of(fleet), sent


def test_processes_have_the_bits_of_simulated_workers():
    """Parameters and inner state, after whole rounds and after an uneven end."""
    simulated = lowcomm.simulate(lambda rank, group: three_rounds(rank), 4)
    real = run_workers(three_rounds, 4)
    for rank in range(4):
        assert same(real[rank], simulated[rank]), f"rank {rank}"
        for name in METHODS:
            after_rounds, ended, _ = real[rank]
            if not name.startswith("NoLoCo"):  # whose workers differ until the end
                assert same(after_rounds[name][0], real[0][0][name][0])
            assert same(ended[name][0], real[0][1][name][0])


# A group of their own


def beside_torch(rank, ports):
    """Two sites of two processes each, which torch.distributed takes for one group."""
    site, place = divmod(rank, 2)
    model = network(seed=rank)
    address = f"127.0.0.1:{ports[place]}"
    group = PrivateGroup(address, rank=site, num_workers=2)
    opt = lowcomm.DiLoCo(model.parameters(), lr=0.05, sync_every=3, group=group)
    train(model, opt, range(7), rank)
    opt.finish()
    return parameters_of(model)


def test_workers_meet_beside_torchs_own_group():
    def two(first, second):
        def worker(rank, group):
            model = network(seed=(first, second)[rank])
            opt = lowcomm.DiLoCo(model.parameters(), lr=0.05, sync_every=3)
            train(model, opt, range(7), (first, second)[rank])
            opt.finish()
            return parameters_of(model)

        return lowcomm.simulate(worker, 2)

    results = run_workers(beside_torch, 4, [free_port(), free_port()])
    assert same(results[0::2], two(0, 2))
    assert same(results[1::2], two(1, 3))


def without_torch(rank, port):
    torch.distributed.destroy_process_group()
    group = PrivateGroup(f"127.0.0.1:{port}", rank=rank, num_workers=2)
    x = scalar(float(rank))
    opt = lowcomm.LocalSGD(torch.optim.SGD([x], lr=1.0), sync_every=1, group=group)
    slide(x, opt)
    return x.item(), torch.distributed.is_initialized()


def test_workers_meet_without_torchs_own_group():
    assert run_workers(without_torch, 2, free_port()) == [(-1.0, False)] * 2


@pytest.mark.parametrize(
    ("address", "rank", "num_workers", "message"),
    [
        ("host", 0, 2, "address must be one like 'host:29510', got 'host'"),
        ("host:port", 0, 2, "address must be one like"),
        ("host:1", 2, 2, "rank must be less than num_workers, got rank=2"),
        ("host:1", 0, 0, "num_workers must be .* at least 1"),
    ],
)
def test_a_private_group_that_cannot_be_is_refused(address, rank, num_workers, message):
    with pytest.raises(ValueError, match=message):
        PrivateGroup(address, rank=rank, num_workers=num_workers)


def test_a_private_group_of_which_not_all_have_come_says_where():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        words = rf"2 workers must meet at {address} within 5 s, got on rank 0: .*in use"
        with pytest.raises(lowcomm.SyncError, match=words):
            PrivateGroup(address, rank=0, num_workers=2, timeout_s=5.0)
    with pytest.raises(lowcomm.SyncError, match="got on rank 0: .*1/2 clients"):
        PrivateGroup("127.0.0.1:0", rank=0, num_workers=2, timeout_s=0.5)


# Data parallelism, over the same workers and within them


class Heard(logging.Handler):
    """What the package has said."""

    def __init__(self):
        super().__init__()
        self.messages = []
        logging.getLogger("lowcomm").addHandler(self)

    def emit(self, record):
        self.messages.append(record.getMessage())


def in_ddp(rank, within):
    """Wraps the model over the ranks of each list, lowcomm goes across the lists."""
    heard = Heard()
    sites = [torch.distributed.new_group(ranks) for ranks in within]
    across = [torch.distributed.new_group(list(r)) for r in zip(*within, strict=True)]
    (mine,) = (i for i, ranks in enumerate(within) if rank in ranks)
    group = across[within[mine].index(rank)] if len(within) > 1 else None
    model = DistributedDataParallel(
        network(dtype=torch.float32), process_group=sites[mine]
    )
    opts = {
        "DiLoCo": lowcomm.DiLoCo(model.parameters(), sync_every=2, group=group),
        "LocalSGD": lowcomm.LocalSGD(model.parameters(), sync_every=2, group=group),
    }
    said = {}
    for name, opt in opts.items():
        heard.messages.clear()
        train(model, opt, range(4), rank)
        said[name] = [m for m in heard.messages if "gradients must differ" in m]
    return said, parameters_of(model)


def test_ddp_over_the_same_workers_is_found():
    for said, _ in run_workers(in_ddp, 2, [[0, 1]]):
        for messages in said.values():
            (message,) = messages
            assert "ranks [0, 1]" in message
            assert "DistributedDataParallel" in message


def test_ddp_within_a_worker_is_none_of_our_business():
    results = run_workers(in_ddp, 4, [[0, 1], [2, 3]])
    for said, parameters in results:
        assert said == {"DiLoCo": [], "LocalSGD": []}
        assert same(parameters, results[0][1])


# Kill and resume


NUM_STEPS = 11


def train_and_save(rank, folder, first_step, victim, last_step_of_victim):
    """Saves each step; the victim kills itself in mid-round, others report the loss."""
    fleet = built(timeout_s=10)
    if first_step:
        states = torch.load(Path(folder, f"{rank}-{first_step}.pt"), weights_only=True)
        for name, (model, opt) in fleet.items():
            model.load_state_dict(states[name][0])
            opt.load_state_dict(states[name][1])
    local = {}
    for name, (model, opt) in fleet.items():
        opt.inner.register_step_post_hook(
            lambda *_, name=name, model=model: local.update(
                {name: parameters_of(model)}
            )
        )
    for step in range(first_step, NUM_STEPS):
        for name, (model, opt) in fleet.items():
            began = time.monotonic()
            try:
                train(model, opt, range(step, step + 1), rank)
            except lowcomm.PeerLost as lost:
                intact = same(parameters_of(model), local[name])
                return step, str(lost), intact, time.monotonic() - began
        states = {
            name: [model.state_dict(), opt.state_dict()]
            for name, (model, opt) in fleet.items()
        }
        # Written beside and renamed: a kill in between leaves no half of a file.
        torch.save(states, Path(folder, f"{rank}.part"))
        os.replace(Path(folder, f"{rank}.part"), Path(folder, f"{rank}-{step + 1}.pt"))
        if rank == victim and step + 1 == last_step_of_victim:
            os.kill(os.getpid(), signal.SIGKILL)
    for _, opt in fleet.values():
        opt.finish()
    return bits_of(fleet)


def never_stopped(rank, group):
    fleet = built()
    for model, opt in fleet.values():
        train(model, opt, range(NUM_STEPS), rank)
        opt.finish()
    return bits_of(fleet)


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_killed_twice_and_resumed_is_never_stopped(num_workers, tmp_path):
    """Survivors name the dead worker, keep their parameters, and do not hang."""
    expected = lowcomm.simulate(never_stopped, num_workers)
    first_step = 0
    # In the second round after one of its steps; in the third after two.
    for victim, last_step in ((num_workers - 1, 4), (0, 8)):
        results = run_workers(
            train_and_save,
            num_workers,
            str(tmp_path),
            first_step,
            victim,
            last_step,
            may_die={victim},
        )
        assert results[victim] is None
        for rank, result in enumerate(results):
            if rank == victim:
                continue
            step, message, intact, seconds = result
            # The loss shows at the exchange that the victim did not reach.
            assert step == last_step // SYNC_EVERY * SYNC_EVERY + SYNC_EVERY - 1
            assert re.search(rf"\b(rank|worker)s? {victim}\b", message), message
            assert intact
            assert seconds < 11
        first_step = min(
            max(int(file.stem.split("-")[1]) for file in tmp_path.glob(f"{rank}-*.pt"))
            for rank in range(num_workers)
        )
        assert first_step == last_step
    results = run_workers(
        train_and_save, num_workers, str(tmp_path), first_step, None, None
    )
    for rank in range(num_workers):
        assert same(results[rank], expected[rank]), f"rank {rank}"


# Workers that differ, that are late, that never come


def differ_then_late_then_absent(rank):
    outcome = {}
    parameters = network().named_parameters
    for setting in ("sync_every", "order"):
        ps = list(parameters())
        if setting == "order" and rank == 1:
            ps.reverse()
        try:
            lowcomm.DiLoCo(
                ps, lr=0.1, sync_every=2 + (rank == 1 and setting == "sync_every")
            )
        except lowcomm.PeerMismatch as mismatch:
            outcome[setting] = str(mismatch)

    # The group is still whole: a late worker is waited for.
    x = scalar(float(rank))
    opt = lowcomm.LocalSGD(
        torch.optim.SGD([x], lr=1.0), sync_every=1, init_sync=False, timeout_s=10
    )
    if rank == 1:
        time.sleep(1.0)
    slide(x, opt)
    outcome["late"] = (x.item(), opt.stats.exposed_s)

    # And one that never comes is not.
    y = scalar(5.0)
    opt = lowcomm.DiLoCo(torch.optim.SGD([y], lr=1.0), sync_every=2, timeout_s=1.5)
    if rank == 1:
        return outcome
    slide(y, opt)
    began = time.monotonic()
    try:
        slide(y, opt)
    except lowcomm.PeerLost as lost:
        outcome["absent"] = (str(lost), time.monotonic() - began, y.item())
    began = time.monotonic()
    try:
        opt.finish()
    except lowcomm.SyncError:
        outcome["after a loss"] = time.monotonic() - began
    return outcome


def test_workers_that_differ_are_late_or_never_come_end_in_an_error_not_a_hang():
    outcomes = run_workers(differ_then_late_then_absent, 3)
    for rank, outcome in enumerate(outcomes):
        assert re.search("sync_every", outcome["sync_every"])
        assert re.search(r"0\.weight|2\.bias", outcome["order"])
        for setting in ("sync_every", "order"):
            assert re.search(r"\b(rank|worker)s? 1\b", outcome[setting])
        # Mean of 0, 1, 2 after a step of 1.
        value, exposed_s = outcome["late"]
        assert value == 0.0
        if rank != 1:
            assert 0.5 < exposed_s < 5
            message, seconds, y = outcome["absent"]
            assert re.search(r"\b(rank|worker)s? 1\b", message), message
            assert 1.0 < seconds < 8
            assert y == 3.0  # its own two steps, nothing half averaged
            # Nothing can follow on that group, and nobody waits for it again.
            assert outcome["after a loss"] < 1.0
        else:
            assert "absent" not in outcome


def one_small_group(rank):
    """Three of four workers average; the fourth is none of their members."""
    group = torch.distributed.new_group([0, 1, 3])
    if rank == 2:
        return None
    x = scalar(float(rank))
    opt = lowcomm.LocalSGD(
        torch.optim.SGD([x], lr=1.0), sync_every=1, init_sync=False, group=group
    )
    slide(x, opt, 0.0)
    return x.item()


def test_a_process_group_of_some_divides_by_its_own_members():
    first, second, outsider, last = run_workers(one_small_group, 4)
    assert outsider is None
    assert [first, second, last] == pytest.approx([(0 + 1 + 3) / 3] * 3)
