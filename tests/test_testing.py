import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from lowcomm.testing import free_port, run_workers

pytestmark = pytest.mark.workers


class Pair(NamedTuple):
    weight: torch.Tensor
    name: str


class Unpicklable(Exception):
    """Pickles, but cannot be made again: pickle calls it with the message alone."""

    def __init__(self, rank, reason):
        super().__init__(f"rank {rank}: {reason}")


def is_running(pid):
    return Path(f"/proc/{pid}").exists()


def pids_in(folder):
    return [int(file.name) for file in folder.iterdir()]


def notes_of(error):
    return "\n".join(error.__notes__)


@pytest.fixture
def pids(tmp_path):
    """A folder in which workers leave their pids; at the end none may be running."""
    folder = tmp_path / "pids"
    folder.mkdir()
    yield folder
    assert [pid for pid in pids_in(folder) if is_running(pid)] == []
    assert multiprocessing.active_children() == []


def leave_pid(folder):
    (folder / str(os.getpid())).touch()


# Results


def sum_and_rank(rank, offset):
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return rank, dist.get_rank(), dist.get_world_size(), total.item()


def test_results_come_in_rank_order():
    assert run_workers(sum_and_rank, 4, 10) == [(r, r, 4, 46) for r in range(4)]


def returns_early_or_late(rank):
    time.sleep(0.3 * (2 - rank))
    return rank


def test_rank_order_is_not_the_order_of_arrival():
    assert run_workers(returns_early_or_late, 3) == [0, 1, 2]


def test_one_worker_is_a_group_of_one():
    assert run_workers(sum_and_rank, 1, 5) == [(0, 0, 1, 5)]


def structure(rank, tensors):
    weight = tensors["weight"] + rank
    weight.requires_grad_()
    return {"pair": Pair(weight, "w"), "half": weight.detach().bfloat16(), "none": None}


def test_tensors_travel_both_ways_inside_structures():
    weight = torch.arange(6.0).reshape(2, 3).t()
    for rank, result in enumerate(run_workers(structure, 2, {"weight": weight})):
        assert isinstance(result["pair"], Pair)
        assert result["pair"].weight.requires_grad
        torch.testing.assert_close(result["pair"].weight.detach(), weight + rank)
        torch.testing.assert_close(result["half"], (weight + rank).bfloat16())


def big(rank, offset):
    return offset + rank


def test_arguments_and_results_of_many_megabytes():
    offset = torch.arange(4_000_000, dtype=torch.float64)  # 32 MB
    results = run_workers(big, 3, offset)
    assert all(torch.equal(results[rank], offset + rank) for rank in range(3))


# Surroundings


def surroundings(rank):
    return (
        torch.get_num_threads(),
        os.environ.get("LOWCOMM_TEST"),
        os.environ["GLOO_SOCKET_IFNAME"],
    )


def test_environment_threads_and_loopback(monkeypatch):
    run_workers(pow, 1, 2)  # now the fork server runs, with an older environment
    monkeypatch.setenv("LOWCOMM_TEST", "1")
    (seen,) = run_workers(surroundings, 1)
    assert seen[:2] == (1, "1")
    assert seen[2].startswith("lo")
    assert run_workers(surroundings, 1, num_threads=2)[0][0] == 2
    monkeypatch.delenv("LOWCOMM_TEST")
    assert run_workers(surroundings, 1)[0][1] is None


def test_main_is_not_run_again(monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise RuntimeError('run in a worker')")
    main = ModuleType("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert run_workers(pow, 2, 2) == [0, 1]
    assert sys.modules["__main__"] is main


# A worker that raises


def one_raises(rank, error, pids):
    leave_pid(pids)
    if rank == 1:
        raise error
    dist.barrier()  # never completes


@pytest.mark.parametrize(
    "error", [KeyError("missing"), ValueError("bad"), OSError(2, "no")]
)
def test_exception_keeps_its_type_and_says_where(error, pids):
    started = time.monotonic()
    with pytest.raises(type(error)) as caught:
        run_workers(one_raises, 3, error, pids)
    assert time.monotonic() - started < 15  # the others did not run into a timeout
    assert caught.value.args == error.args
    assert "on rank 1" in caught.value.__notes__
    assert "in one_raises\n" in notes_of(caught.value)
    assert "rank 0" not in notes_of(caught.value)
    assert len(pids_in(pids)) == 3


def test_exception_that_cannot_be_pickled_becomes_a_runtime_error(pids):
    with pytest.raises(RuntimeError, match=r"Unpicklable: rank 1: why") as caught:
        run_workers(raise_unpicklable, 2, pids)
    assert "on rank 1" in caught.value.__notes__
    assert "in raise_unpicklable\n" in notes_of(caught.value)


def raise_unpicklable(rank, pids):
    one_raises(rank, Unpicklable(rank, "why"), pids)


def exits(rank, pids):
    one_raises(rank, SystemExit(3), pids)


def test_system_exit_does_not_end_the_caller(pids):
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        run_workers(exits, 2, pids)


def all_raise(rank, types, pids):
    leave_pid(pids)
    dist.barrier()
    raise types[rank](f"from {rank}")


def test_different_exceptions_leave_as_a_group(pids):
    with pytest.raises(ExceptionGroup, match=r"ranks \[0, 1, 2\] failed") as caught:
        run_workers(all_raise, 3, [ValueError, KeyError, ValueError], pids)
    errors = caught.value.exceptions
    assert [type(error) for error in errors] == [ValueError, KeyError, ValueError]
    assert [error.args for error in errors] == [("from 0",), ("from 1",), ("from 2",)]
    assert all(f"on rank {rank}" in e.__notes__ for rank, e in enumerate(errors))


def test_several_of_one_type_are_one_with_notes(pids):
    with pytest.raises(ValueError, match="from 0") as caught:
        run_workers(all_raise, 3, [ValueError] * 3, pids)
    assert "on rank 0" in caught.value.__notes__
    assert "rank 1 raised ValueError: from 1" in caught.value.__notes__
    assert "rank 2 raised ValueError: from 2" in caught.value.__notes__


def test_result_that_cannot_be_pickled_is_an_error_of_its_rank():
    with pytest.raises(Exception, match="pickle") as caught:
        run_workers(return_lambda, 1)
    assert "on rank 0" in caught.value.__notes__


def return_lambda(rank):
    return lambda: rank


def test_worker_that_cannot_be_pickled_is_refused_at_once():
    with pytest.raises(Exception, match="pickle") as caught:
        run_workers(lambda rank: rank, 2)
    assert "run_workers pickles the worker and its arguments." in caught.value.__notes__


@pytest.mark.parametrize("num_workers", [0, -1])
def test_number_of_workers_is_checked(num_workers):
    with pytest.raises(ValueError, match=f"at least 1, got {num_workers=}"):
        run_workers(pow, num_workers, 2)


# A worker that is late


def hang_or_stop(rank, pids):
    leave_pid(pids)
    if rank == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        time.sleep(1000)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)


def test_timeout_names_the_late_and_kills_all(pids):
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] .* timeout_s=3") as caught:
        run_workers(hang_or_stop, 4, pids, timeout_s=3)
    assert "rank 1 was here:" in notes_of(caught.value)
    assert "in hang_or_stop\n" in notes_of(caught.value)
    assert "rank 3 was here:" not in notes_of(caught.value)
    assert len(pids_in(pids)) == 4


def wait_for_the_other(rank, pids):
    leave_pid(pids)
    if rank == 0:
        dist.recv(torch.zeros(1), src=1)
    time.sleep(1000)


def test_group_timeout_ends_a_wait_for_a_worker(pids):
    with pytest.raises(RuntimeError, match=r"(?i)timed out") as caught:
        run_workers(wait_for_the_other, 2, pids, group_timeout_s=1)
    assert "on rank 0" in caught.value.__notes__


def leave_thread(rank, pids):
    leave_pid(pids)
    threading.Thread(target=time.sleep, args=(1000,)).start()


def test_worker_that_cannot_end_is_late(pids):
    with pytest.raises(TimeoutError, match=r"ranks \[0\]"):
        run_workers(leave_thread, 1, pids, timeout_s=3)


# A worker that dies


def die(rank, victim, how, pids):
    leave_pid(pids)
    dist.barrier()
    if rank == victim:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), how)
    with contextlib.suppress(RuntimeError):  # its partner is gone
        dist.recv(torch.zeros(1), src=victim)
    return rank


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (signal.SIGKILL, "rank 1 was killed by SIGKILL"),
        (signal.SIGSEGV, "rank 1 was killed by SIGSEGV"),
        ("exit", "rank 1 exited with code 7"),
    ],
)
def test_death_names_the_rank_and_the_signal(how, message, pids):
    with pytest.raises(RuntimeError, match=message) as caught:
        run_workers(die, 3, 1, how, pids)
    if how is signal.SIGSEGV:
        assert "in die\n" in notes_of(caught.value)


@pytest.mark.parametrize("how", [signal.SIGKILL, "exit"])
def test_rank_that_may_die_has_no_result(how, pids):
    assert run_workers(die, 3, 1, how, pids, may_die=[1]) == [0, None, 2]


def test_only_the_ranks_named_may_die(pids):
    with pytest.raises(RuntimeError, match="rank 2 was killed by SIGKILL"):
        run_workers(die, 3, 2, signal.SIGKILL, pids, may_die=[0, 1])


def die_and_fail(rank, pids):
    leave_pid(pids)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_failures_that_a_death_causes_are_notes(pids):
    with pytest.raises(RuntimeError, match="rank 1 was killed by SIGKILL") as caught:
        run_workers(die_and_fail, 2, pids)
    assert "rank 0 raised RuntimeError" in notes_of(caught.value)


# Nothing stays behind


def interrupt_caller(rank, caller, pids):
    leave_pid(pids)
    dist.barrier()
    if rank == 0:
        os.kill(caller, signal.SIGINT)
    time.sleep(1000)


def test_interrupt_leaves_nothing_behind(pids):
    with pytest.raises(KeyboardInterrupt):
        run_workers(interrupt_caller, 3, os.getpid(), pids)
    assert len(pids_in(pids)) == 3


SCRIPT = """
    import os, pathlib, sys, time
    from lowcomm.testing import run_workers

    def worker(rank, folder):
        (folder / str(os.getpid())).touch()
        time.sleep(1000)

    if __name__ == "__main__":
        print(run_workers(pow, 2, 2), flush=True)
        run_workers(worker, 2, pathlib.Path(sys.argv[1]))
"""


def test_a_script_and_the_death_of_the_caller(pids, monkeypatch):
    script = pids.parent / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with subprocess.Popen(
        [sys.executable, script, pids], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as caller:
        assert caller.stdout.readline() == b"[0, 1]\n"
        while len(pids_in(pids)) < 2:
            assert caller.poll() is None, caller.stderr.read().decode()
            time.sleep(0.05)
        caller.kill()
        assert caller.communicate() == (b"", b"")
    while any(is_running(pid) for pid in pids_in(pids)):  # else the test's own timeout
        time.sleep(0.05)


def test_start_up_is_fast():
    times = []
    for _ in range(3):
        started = time.perf_counter()
        run_workers(pow, 4, 2)
        times.append(time.perf_counter() - started)
    print("4 workers:", ", ".join(f"{seconds:.2f} s" for seconds in times))


def test_free_port_is_free():
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True)
    store.set("key", "value")
    assert store.get("key") == b"value"
