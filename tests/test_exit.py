"""How a program ends: with its own exit code, whatever is still under way."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lowcomm.testing import free_port

ROOT = Path(__file__).parent.parent

PROGRAM = """
import os, signal, sys
import torch, torch.distributed as dist
import lowcomm

rank, port, method, ending = int(sys.argv[1]), *sys.argv[2:]
address = f"tcp://127.0.0.1:{port}"
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
weight = torch.nn.Parameter(torch.zeros(4))
weight.grad = torch.ones(4)
inner = torch.optim.SGD([weight], lr=0.1)
opt = getattr(lowcomm, method)(inner, sync_every=1, timeout_s=1.0)
opt.step()
print("ready", flush=True)
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    for _ in range(3):
        opt.step()
except lowcomm.PeerLost:
    print("lost", flush=True)
if ending == "raise":
    raise KeyError
if ending == "exit":
    sys.exit(3)
"""


@pytest.mark.workers
@pytest.mark.parametrize("method", ["NoLoCo", "DiLoCo"])
@pytest.mark.parametrize(("ending", "code"), [("return", 0), ("exit", 3), ("raise", 1)])
def test_the_exit_code_is_the_program_s_own(method, ending, code):
    """With an exchange under way that the other, who stands still, never joins."""
    port = str(free_port())
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), port, method, ending],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    )
    try:
        output, errors = first.communicate(timeout=60)
    finally:
        for process in (first, second):
            process.send_signal(signal.SIGKILL)
            process.communicate()
    assert first.returncode == code, errors
    assert ("lost" in output) == (method == "DiLoCo")
