"""What a machine has for training over a network."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from lowcomm.sync.roll import address_towards

#: Names the interface, as torch reads it.
IFNAME = "GLOO_SOCKET_IFNAME"

#: The system's number for an interface's address of IPv4, by platform.
_SIOCGIFADDR = {"linux": 0x8915, "darwin": 0xC0206921}


@dataclass(frozen=True)
class Machine:
    """What a worker says of itself.

    Args:
        rank: of the worker.
        host: name of its machine.
        versions: of Python and what is installed; None for what is not.
        backends: of `torch.distributed`.
        device: "cpu", or the kind of accelerator and how many.
        listens: the address at which gloo would listen; None if it could not.
        interfaces: addresses that gloo would take, by interface.
        asked: the interface that is asked for in GLOO_SOCKET_IFNAME, if any.
        port: where it answers while workers look for each other.
        token: what it answers.
    """

    rank: int
    host: str
    versions: dict[str, str | None]
    backends: list[str]
    device: str
    listens: str | None
    interfaces: dict[str, str]
    asked: str | None
    port: int = 0
    token: str = ""

    @property
    def is_local(self) -> bool:
        """Whether gloo would listen where only this machine reaches it."""
        return self.listens is not None and _is_loopback(self.listens)

    @property
    def outside(self) -> dict[str, str]:
        """Addresses that other machines may reach, by interface."""
        return {n: a for n, a in self.interfaces.items() if not _is_loopback(a)}

    @property
    def candidates(self) -> list[str]:
        """Addresses at which others may try to reach it."""
        others = list(self.outside.values())
        return [*dict.fromkeys(([self.listens] if self.listens else []) + others)]


def look(rank: int = 0) -> Machine:
    """This machine.

    >>> machine = look()
    >>> "gloo" in machine.backends, machine.versions["torch"] == torch.__version__
    (True, True)
    """
    interfaces = _interfaces()
    return Machine(
        rank=rank,
        host=socket.gethostname(),
        versions=_versions(),
        backends=_backends(),
        device=_device(),
        listens=_gloo_address(interfaces),
        interfaces=interfaces,
        asked=os.environ.get(IFNAME) or None,
    )


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    names = ["torch", "numpy", "lowcomm"]
    try:
        needed = importlib.metadata.requires("lowcomm") or []
    except importlib.metadata.PackageNotFoundError:
        needed = []
    for requirement in needed:
        if re.search(r"extra == ['\"](elastic|recipes)['\"]", requirement):
            names += re.findall(r"^[\w.-]+", requirement)
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    # The one that is imported, which may be another than the one that is installed.
    return versions | {"torch": str(torch.__version__)}


def _backends() -> list[str]:
    return [
        name
        for name in ("gloo", "nccl", "mpi", "ucc", "xccl")
        if getattr(dist, f"is_{name}_available", lambda: False)()
    ]


def _device() -> str:
    if not torch.accelerator.is_available():
        return "cpu"
    accelerator = torch.accelerator.current_accelerator()
    return f"{torch.accelerator.device_count()} x {accelerator}"


def _interfaces() -> dict[str, str]:
    """Each interface's address that gloo would take: of IPv4 if it has one.

    Of IPv6 on Linux only; on Windows nothing is known.
    """
    found: dict[str, str] = {}
    number = _SIOCGIFADDR.get(sys.platform)
    if number is None:
        return found
    import fcntl  # which Windows lacks

    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        digits, _, _, scope, _, name = line.split()
        if scope != "20":  # of one wire only
            packed = bytes.fromhex(digits)
            found.setdefault(name, socket.inet_ntop(socket.AF_INET6, packed))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking.fileno(), number, request)
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _gloo_address(interfaces: Mapping[str, str]) -> str | None:
    """Where gloo listens, by the rule of torch's `ProcessGroupGloo`."""
    if asked := os.environ.get(IFNAME):
        return interfaces.get(asked.split(",")[0])
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as trial:
            try:
                trial.bind(address)
            except OSError:  # of another machine
                continue
            return str(address[0])
    return "127.0.0.1"


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def outward(machine: Machine) -> str | None:
    """This machine's interface on the way out, if there is one; nothing is sent."""
    try:
        address = address_towards("192.0.2.1", 9)
    except OSError:
        return None
    for name, own in machine.outside.items():
        if own == address:
            return name
    return None
