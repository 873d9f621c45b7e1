"""Workers that look for each other, before anything is known to work."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lowcomm.doctor.machine import Machine, look
from lowcomm.sync.errors import PeerLost, SyncError
from lowcomm.sync.group import TorchGroup

# torch's types know less of these than there is.
_dist: Any = dist

#: How long it may take until a listener sees that it is over.
_NOTICE_S = 0.1
#: A connection takes one way there and back; a firewall that drops says nothing.
_PROBE_S = 2.0
_CONNECT_S = 5.0


class Meeting:
    """A store that all workers reach.

    Args:
        rank: of this worker.
        size: how many there are.
        timeout_s: how long others are waited for, in seconds.
    """

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        host, port = environ("MASTER_ADDR"), environ_number("MASTER_PORT")
        # torchrun has one already, which outlives the workers.
        is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_master = rank == 0 and not is_hosted
        try:
            store = _dist.TCPStore(
                host,
                port,
                is_master=is_master,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            raise SyncError(_no_store(rank, f"{host}:{port}", is_master)) from error
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = _dist.PrefixStore(f"lowcomm doctor {attempt}", store)
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s

    def tell(self, key: str, value: Any) -> None:
        """Writes what others may read."""
        self.store.set(key, json.dumps(value))

    def ask(self, key: str, timeout_s: float) -> Any:
        """What another one has written; None if it has not in time."""
        deadline = time.monotonic() + timeout_s
        while not self.store.check([key]):  # a wait of its own would outlast Ctrl+C
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        return json.loads(self.store.get(key))

    def corner(self, name: str) -> Any:
        """A part of the store for some of the workers."""
        return _dist.PrefixStore(name, self.store)

    def gather(self, what: str, mine: Any) -> dict[int, Any]:
        """What each worker says, by rank."""
        self.tell(f"{what} {self.rank}", mine)
        deadline = time.monotonic() + self._timeout_s
        values = {
            rank: self.ask(f"{what} {rank}", max(0.0, deadline - time.monotonic()))
            for rank in range(self.size)
        }
        if missing := [rank for rank, value in values.items() if value is None]:
            raise PeerLost(
                f"{self.size} workers must come within {self._timeout_s:g} s, got none "
                f"of ranks {missing} on rank {self.rank}. See that WORLD_SIZE is right "
                "and that they were started, or raise --timeout-s.",
                missing[0],
            )
        return values


def _no_store(rank: int, place: str, is_master: bool) -> str:
    if is_master:
        return (
            f"MASTER_PORT must be free on rank 0, got {place} on {_here()}. Take "
            "another port, and for MASTER_ADDR an address of this machine."
        )
    return (
        f"MASTER_ADDR must lead to rank 0, got {place}, which rank {rank} on {_here()} "
        "does not reach. See that rank 0 was started, that the address is one of its "
        "machine's, and that the port is open there."
    )


def _here() -> str:
    machine = look()
    addresses = ", ".join(machine.outside.values()) or "without an address"
    return f"{machine.host} ({addresses})"


def environ(name: str) -> str:
    """What the launcher has set.

    Raises:
        SyncError: if it has not.
    """
    try:
        return os.environ[name]
    except KeyError:
        raise SyncError(
            f"{name} must be set with WORLD_SIZE={os.environ.get('WORLD_SIZE')}, got "
            "nothing. Start the workers with torchrun."
        ) from None


def environ_number(name: str) -> int:
    """The same, as a number.

    Raises:
        ValueError: if it is none.
    """
    text = environ(name)
    if not text.isdecimal():
        raise ValueError(
            f"{name} must be a whole number, got {text!r}. Start the workers with "
            "torchrun."
        )
    return int(text)


class Answering:
    """Says who is here to whoever connects, at every address of this machine.

    One machine's 127.0.0.1, or 172.17.0.1, is another one's too: that something
    answers there does not mean that it is the worker that was looked for.
    """

    def __init__(self, token: str) -> None:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._socket = socket.create_server(
            ("", 0),
            family=family,
            backlog=512,
            dualstack_ipv6=family == socket.AF_INET6,
        )
        # Only Linux ends an accept when another thread shuts the socket down.
        self._socket.settimeout(_NOTICE_S)
        self._is_over = threading.Event()
        self.port: int = self._socket.getsockname()[1]
        self._token = token.encode()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        while not self._is_over.is_set():
            try:
                connection, _ = self._socket.accept()
                with connection:
                    connection.sendall(self._token)
            except (TimeoutError, ConnectionError):  # nobody asks, or who did is gone
                continue
            except OSError:
                return

    def close(self) -> None:
        """Answers nobody any more."""
        self._is_over.set()
        self._thread.join()
        self._socket.close()


def _answers(address: str, machine: Machine) -> bool:
    """Whether a worker is there at this one of its addresses."""
    heard = b""
    try:
        place = (address, machine.port)
        with socket.create_connection(place, _PROBE_S) as connection:
            while more := connection.recv(64):
                heard += more
    except OSError:
        return False
    return heard == machine.token.encode()


def reached_from(rank: int, machines: Mapping[int, Machine]) -> dict[int, list[str]]:
    """Addresses at which this worker reaches the others, by rank."""
    trials = [
        (other, address)
        for other, machine in machines.items()
        if other != rank
        for address in machine.candidates
    ]
    with ThreadPoolExecutor(max_workers=64) as pool:
        found = pool.map(lambda trial: _answers(trial[1], machines[trial[0]]), trials)
    reached: dict[int, list[str]] = {other: [] for other in machines if other != rank}
    for (other, address), answers in zip(trials, found, strict=True):
        if answers:
            reached[other].append(address)
    return reached


class Two(TorchGroup):
    """A gloo connection between two workers, as torch makes it."""

    def __init__(self, store: Any, ranks: Sequence[int], rank: int) -> None:
        limit = timedelta(seconds=_CONNECT_S)
        group = _dist.ProcessGroupGloo(store, ranks.index(rank), 2, limit)
        self._over(group, ranks, rank, is_gloo=True)

    def close(self) -> None:
        self._abort()
