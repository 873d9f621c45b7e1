"""What the package needs of the system: nothing that only Linux has."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# torch is of this platform, so it is imported before the platform becomes another one.
ELSEWHERE = """
import mmap, multiprocessing, os, pathlib, signal, socket, subprocess, sys
import tempfile, uuid
import numpy, torch, torch._dynamo, torch.distributed.checkpoint

sys.platform = sys.argv[1]
for module, names in {
    mmap: ["MADV_HUGEPAGE"],
    os: ["sched_getaffinity", "posix_fadvise", "posix_fallocate", "copy_file_range",
         "sendfile", "memfd_create", "pidfd_open", "eventfd", "setns", "unshare"],
    signal: ["pthread_sigmask", "sigtimedwait", "SIGRTMIN"],
    socket: ["SO_BINDTODEVICE", "SO_MARK", "TCP_USER_TIMEOUT", "AF_NETLINK"],
}.items():
    for name in names:
        vars(module).pop(name, None)
if sys.platform == "win32":
    sys.modules["fcntl"] = sys.modules["resource"] = None
    for name in ("register_at_fork", "fork", "geteuid", "getuid"):
        vars(os).pop(name, None)
    for name in ("SIGUSR1", "SIGKILL", "SIGHUP"):
        vars(signal).pop(name, None)

# Nothing is there of these, from here on; whatever opens them all the same fails.
special = ("/proc", "/sys", "/run", "/dev/shm")
exists = pathlib.Path.exists
pathlib.Path.exists = lambda p: not str(p).startswith(special) and exists(p)

def forbid(event, args):
    if event == "open" and str(args[0]).startswith(special):
        raise AssertionError(f"opens {args[0]}")

sys.addaudithook(forbid)

import lowcomm, lowcomm.__main__, lowcomm.doctor, lowcomm.sync, lowcomm.testing

assert "Linux" in lowcomm.testing.why_no_network()
machine = lowcomm.doctor.look()
assert machine.listens and machine.versions["torch"]
lowcomm.__main__.main(["doctor"])

def train(rank, group):
    model = torch.nn.Linear(1000, 2000)  # of more than a huge page
    opt = lowcomm.DiLoCo(model.parameters(), lr=0.1, sync_every=2)
    for _ in range(4):
        opt.zero_grad()
        model(torch.ones(1, 1000) + rank).square().mean().backward()
        opt.step()
    return model, opt

models, opts = zip(*lowcomm.simulate(train, 2))
assert torch.equal(models[0].weight, models[1].weight)
"""

# Where a file's name may be another one's in large letters.
SAVED = """
with tempfile.TemporaryDirectory() as folder:
    model, opt = train(0, None)
    with lowcomm.Checkpointer(folder, model=model, optimizer=opt) as ckpt:
        ckpt.save(1)
        ckpt.save(2)
        ckpt.wait()
        names = [path.name for path in pathlib.Path(folder).rglob("*")]
        assert ckpt.load() == 2
    assert names and all(name == name.lower() for name in names), names
"""


@pytest.mark.parametrize(
    ("platform", "code"),
    [("darwin", ELSEWHERE + SAVED), ("win32", ELSEWHERE)],
    ids=["macOS", "Windows"],
)
def test_nothing_is_needed_that_only_linux_has(platform, code):
    """On Windows it can be imported and simulated; nothing more is promised there."""
    command = [sys.executable, "-c", code, platform]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
