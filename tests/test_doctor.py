"""What the doctor says of a machine, and of links whose rates are known."""

import collections
import contextlib
import fcntl
import glob
import io
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

import lowcomm
from lowcomm import doctor
from lowcomm.__main__ import main
from lowcomm.doctor import Machine, Pair, Report
from lowcomm.sync.errors import SyncError
from lowcomm.sync.measure import measure
from lowcomm.testing import free_port, network, run_workers, why_no_network

LINUX = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="interfaces are read on Linux"
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def said_by_doctor(*arguments):
    """What it prints, its exit status and how long it takes."""
    out, status, start = io.StringIO(), 0, time.monotonic()
    with contextlib.redirect_stdout(out):
        try:
            main(["doctor", *arguments])
        except SystemExit as end:
            status = end.code
    return out.getvalue(), status, time.monotonic() - start


# Measuring, on a clock


@pytest.mark.parametrize("gbit_s", [0.0001, 0.02, 3.0])
@pytest.mark.parametrize("latency_s", [0.0, 0.1])
def test_rate_and_latency_are_those_of_the_link(gbit_s, latency_s):
    def worker(rank, group):
        start = group.now()
        limits = {"seconds": 1.0, "max_bytes": 1 << 24, "timeout_s": 30.0}
        return measure(group, 1 - rank, **limits), group.now() - start

    link = lowcomm.Link(gbit_s=gbit_s, latency_s=latency_s, step_s=0.0)
    (one, took_s), (other, _) = lowcomm.simulate(worker, 2, link=link)
    assert one == other
    assert one.gbit_s == pytest.approx(gbit_s, rel=1e-6)
    assert one.back_gbit_s == pytest.approx(gbit_s, rel=1e-6)
    on_the_wire_s = 8 * 8e-9 / gbit_s  # of a number, which is what goes to and fro
    assert one.latency_s == pytest.approx(latency_s + on_the_wire_s)
    # Both directions, to and fro before them, and a first volley of 8 kB that is due.
    assert took_s < 2 * (1.0 + 10 * latency_s + 1.1 * (8e-6 * 8.2 / gbit_s)) + 2.5


def test_no_more_is_sent_than_is_allowed():
    def worker(rank, group):
        start = group.now()
        measure(group, 1 - rank, seconds=100.0, max_bytes=500_000, timeout_s=30.0)
        return group.now() - start

    link = lowcomm.Link(gbit_s=0.008, latency_s=0.0, step_s=0.0)  # 1 MB/s
    assert max(lowcomm.simulate(worker, 2, link=link)) < 1.001


def test_one_that_goes_away_is_named():
    def worker(rank, group):
        if rank == 0:
            measure(group, 1, seconds=1.0, max_bytes=1 << 20, timeout_s=5.0)

    with pytest.raises(lowcomm.PeerLost, match="rank 1 "):
        lowcomm.simulate(worker, 2)


# One machine


def listening():
    """Addresses at which this process listens, by the kernel's tables."""
    inodes = set()
    for file in glob.glob("/proc/self/fd/*"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(file))
    found = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        cells = line.split()
        if cells[3] == "0A" and f"socket:[{cells[9]}]" in inodes:
            packed = bytes.fromhex(cells[1].partition(":")[0])[::-1]
            found.append(socket.inet_ntoa(packed))
    return found


@LINUX
@pytest.mark.parametrize("name", [None, "lo", "another"])
def test_gloo_listens_where_the_doctor_says(name, monkeypatch):
    if name == "another":
        names = [n for n in doctor.look().outside if "." in doctor.look().outside[n]]
        if not names:
            pytest.skip("no interface but lo")
        (name, *_) = names
    if name is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    said = doctor.look().listens
    before = listening()
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    now = listening()
    for address in before:
        now.remove(address)
    del group
    assert now == [said]


def test_alone_it_says_what_there_is():
    text, status, _ = said_by_doctor()
    assert status == 0
    for words in ("torch 2", "lowcomm 0", "backends: gloo", "torchrun", "listens at"):
        assert words in text
    found = json.loads(said_by_doctor("--json")[0])
    assert found["is_well"] and found["pairs"] == [] and len(found["machines"]) == 1


@LINUX
def test_an_interface_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none9")
    text, status, _ = said_by_doctor()
    assert status == 1
    assert (
        "GLOO_SOCKET_IFNAME must name an interface of each machine, got none9" in text
    )


def test_a_host_name_that_leads_to_this_machine_only_is_said(monkeypatch):
    local = replace(doctor.look(), listens="127.0.1.1", interfaces=INTERFACES)
    text = "\n".join(doctor.lines(Report((local,), {0: {}}, ())))
    assert "! Other machines do not reach 127.0.1.1, and the host name" in text
    assert "    export GLOO_SOCKET_IFNAME=eth0" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seconds", "0"], "seconds must be"),
        (["--mbytes", "-1"], "mbytes must be"),
        (["--num-params", "1e6"], "num_params and step_s must be given together"),
        (["--num-params", "0", "--step-s", "1"], "num_params must be"),
    ],
)
def test_arguments_are_checked(arguments, words, capsys):
    assert said_by_doctor(*arguments)[1] == 2
    assert words in capsys.readouterr().err


# What is said of several

INTERFACES = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "wg0": "10.9.0.1"}


def report_of(rates, **changes):
    """Of three machines, with so many Gbit/s between each two, there and back."""
    machines = tuple(
        Machine(
            rank=rank,
            host=f"host{rank}",
            versions={"python": "3", "torch": "2.13", "lowcomm": "1"},
            backends=["gloo"],
            device="cpu",
            listens=f"10.0.0.{rank}",
            interfaces={"eth0": f"10.0.0.{rank}", "wg0": f"10.9.0.{rank}"},
            asked=None,
        )
        for rank in range(3)
    )
    pairs = tuple(Pair(r, 0.01, *rate) for r, rate in rates.items())
    reached = {
        a: {b: machines[b].candidates for b in range(3) if b != a} for a in range(3)
    }
    return replace(Report(machines, reached, pairs), **changes)


def test_the_slowest_pair_is_that_of_the_slowest_direction():
    rates = {(0, 1): (0.5, 0.5), (0, 2): (0.4, 0.4), (1, 2): (0.9, 0.3)}
    report = report_of(rates)
    assert report.slowest.ranks == (1, 2) and report.slow_worker is None
    text = "\n".join(doctor.lines(report))
    assert "slowest: rank 1 on host1 and rank 2 on host2, 300 Mbit/s." in text


def test_a_worker_that_is_slow_towards_all_is_named():
    rates = {(0, 1): (0.1, 0.9), (0, 2): (0.9, 0.9), (1, 2): (0.8, 0.1)}
    report = report_of(rates)
    assert report.slow_worker == 1
    assert "It is rank 1 on host1 that is slow" in "\n".join(doctor.lines(report))


def test_versions_that_differ_are_said():
    report = report_of({(0, 1): (1, 1), (0, 2): (1, 1), (1, 2): (1, 1)})
    other = replace(report.machines[2], versions={**VERSIONS, "torch": "2.6"})
    report = replace(report, machines=(*report.machines[:2], other))
    words = "torch must be the same everywhere, got 2.13 on rank 0 and 2.6 on rank 2"
    assert words in "\n".join(doctor.lines(report))


VERSIONS = {"python": "3", "torch": "2.13", "lowcomm": "1"}


def test_interfaces_that_have_other_names_are_said_for_each_machine():
    report = report_of({(0, 1): (1, 1), (0, 2): (1, 1)})
    apart = Pair((1, 2), error="neither reaches the other")
    reached = {
        0: {1: ["10.9.0.1"], 2: ["10.0.0.2"]},
        1: {0: ["10.9.0.0"], 2: ["10.0.0.2"]},
        2: {0: ["10.9.0.0"], 1: ["10.9.0.1"]},
    }
    report = replace(report, pairs=(*report.pairs, apart), reached=reached)
    text = "\n".join(doctor.lines(report))
    assert not report.is_well
    assert "rank 1 on host1 at 10.0.0.1 and rank 2 on host2 at 10.0.0.2 do not" in text
    assert "export GLOO_SOCKET_IFNAME=wg0  # on rank 0" in text
    assert "export GLOO_SOCKET_IFNAME=eth0  # on rank 2" in text


# Workers that do not meet


def environment(monkeypatch, rank, size=2, port=None):
    for name, value in (
        ("RANK", rank),
        ("WORLD_SIZE", size),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", free_port() if port is None else port),
    ):
        monkeypatch.setenv(name, str(value))


def test_workers_that_do_not_come_are_named(monkeypatch):
    environment(monkeypatch, 0, size=3)
    _, status, seconds = said_by_doctor("--timeout-s", "0.5")
    assert "3 workers must come within 0.5 s, got none of ranks [1, 2]" in status
    assert seconds < 5


def test_a_first_worker_that_is_not_reached_is_named(monkeypatch):
    environment(monkeypatch, 1)
    _, status, seconds = said_by_doctor("--timeout-s", "1")
    assert status.startswith("MASTER_ADDR must lead to rank 0, got 127.0.0.1:")
    assert f"rank 1 on {socket.gethostname()}" in status and seconds < 10


def test_a_port_that_is_taken_is_named(monkeypatch):
    with socket.create_server(("", 0)) as taken:
        environment(monkeypatch, 0, port=taken.getsockname()[1])
        with pytest.raises(SyncError, match="MASTER_PORT must be free on rank 0"):
            doctor.examine(timeout_s=1.0)


def test_a_launch_that_is_incomplete_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SyncError, match="RANK must be set with WORLD_SIZE=2"):
        doctor.examine()
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ValueError, match="RANK must be from 0 to WORLD_SIZE - 1 = 1"):
        doctor.examine()
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match="RANK must be a whole number, got 'first'"):
        doctor.examine()


# Links whose rates are known


def examined(rank, net, runs):
    """What the doctor says in each of several runs, of a worker in a namespace."""
    results = []
    for number, (arguments, ifname, apart) in enumerate(runs):
        dist.barrier()
        if apart and rank == 0:
            net.part(*apart)
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(len(net.names)),
            MASTER_ADDR=net.address(0),
            MASTER_PORT=str(29600 + number),
            GLOO_SOCKET_IFNAME=ifname,
        )
        results.append(said_by_doctor(*arguments))
    return results


@pytest.mark.workers
def test_over_links_of_known_rates():
    if reason := why_no_network():
        pytest.skip(reason)
    short = ["--seconds", "0.6"]
    runs = [
        ([*short, "--json", "--num-params", "3e6", "--step-s", "0.1"], "eth0", ()),
        ([], "lo", ()),
        (["--seconds", "0.05"], "eth0", (1, 2)),  # the last, for it stays so
    ]
    with network(3, mbit_s=80) as net:
        net.limit(2, 20)
        told = run_workers(examined, 3, net, runs, network=net)
    measured, trap, apart = told[0]
    for silent in told[1:]:
        assert [text for text, _, _ in silent] == ["", "", ""]
        assert [status for _, status, _ in silent] == [0, 0, 0]

    # The rate, the pair and the plan.
    assert measured[1] == 0
    report = json.loads(measured[0])
    for pair in report["pairs"]:
        expected = 0.02 if 2 in pair["ranks"] else 0.08
        assert pair["gbit_s"] == pytest.approx(expected, rel=0.15), pair
        assert pair["back_gbit_s"] == pytest.approx(expected, rel=0.15), pair
        assert pair["latency_s"] < 0.05, pair
    assert 2 in report["slowest"] and report["slow_worker"] == 2
    in_fp32 = report["plan"][0]  # 2 * 12 MB * 2/3 at 20 Mbit/s
    assert in_fp32["exchange_s"] == pytest.approx(6.4, rel=0.2)
    assert in_fp32["smallest_overlap"] == pytest.approx(64, rel=0.2)

    # An address that is every machine's own.
    text, status, seconds = trap
    assert status == 1 and seconds < 8
    assert "at 127.0.0.1 and rank 2" in text and "do not exchange" in text
    assert "    export GLOO_SOCKET_IFNAME=eth0" in text

    # Two that do not reach each other, at any address.
    text, status, seconds = apart
    assert status == 1 and seconds < 12
    assert f"rank 1 on {socket.gethostname()} at 10.77.0.2 and rank 2 on" in text
    assert "Not all reach rank 1" in text and "firewalls" in text
    assert "0 - 1" in text and "1 - 2" not in text


class Delay(threading.Thread):
    """Joins two namespaces by a link on which every packet takes its time."""

    def __init__(self, net, seconds):
        super().__init__(daemon=True)
        self._seconds = seconds
        self._ends = []
        self._is_over = threading.Event()
        for place, name in enumerate(net.names):
            opening = threading.Thread(target=self._open, args=(net, place))
            opening.start()  # in a thread, which does not come back from there
            opening.join()
            for words in (
                ["address", "add", f"10.78.0.{place + 1}/24", "dev", "tun0"],
                ["link", "set", "tun0", "up"],
            ):
                subprocess.run(["ip", "-n", name, *words], check=True)

    def _open(self, net, place):
        net.enter(place)
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        # TUNSETIFF, with IFF_TUN and IFF_NO_PI
        fcntl.ioctl(end, 0x400454CA, struct.pack("16sH22x", b"tun0", 0x1001))
        self._ends.append(end)

    def run(self):
        under_way = collections.deque()
        while not self._is_over.is_set():
            now = time.monotonic()
            while under_way and under_way[0][0] <= now:
                _, end, packet = under_way.popleft()
                with contextlib.suppress(OSError):  # lost, as packets may be
                    os.write(end, packet)
            left = under_way[0][0] - now if under_way else 0.1
            for end in select.select(self._ends, [], [], min(0.1, max(0.0, left)))[0]:
                packet, other = os.read(end, 65536), self._ends[end == self._ends[0]]
                under_way.append((time.monotonic() + self._seconds, other, packet))

    def end(self):
        self._is_over.set()
        self.join()
        for end in self._ends:
            os.close(end)


@pytest.mark.workers
def test_over_a_link_of_known_latency():
    if reason := why_no_network():
        pytest.skip(reason)
    if not os.access("/dev/net/tun", os.W_OK):
        pytest.skip("a link with a delay needs /dev/net/tun")
    with network(2) as net:
        delay = Delay(net, seconds=0.03)
        delay.start()
        run = (["--json", "--seconds", "0.2", "--mbytes", "0.2"], "tun0", ())
        try:
            told = run_workers(examined, 2, net, [run], network=net)
        finally:
            delay.end()
    ((text, status, _),), _ = told
    assert status == 0
    (pair,) = json.loads(text)["pairs"]
    # A way in this machine, and turns of its processors, take some of it too.
    assert 0.03 <= pair["latency_s"] < 0.04


def examined_beside_an_agent(rank, port):
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    return said_by_doctor("--json", "--mbytes", "1")


@pytest.mark.workers
def test_beside_the_store_that_torchrun_has():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (text, status, _), (nothing, *_) = run_workers(
        examined_beside_an_agent, 2, store.port
    )
    assert status == 0 and nothing == ""
    report = json.loads(text)
    assert report["is_well"] and report["slowest"] == [0, 1]
    assert report["pairs"][0]["gbit_s"] > 0.1
