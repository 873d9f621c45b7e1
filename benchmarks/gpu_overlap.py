"""What an exchange costs a training loop on an accelerator: nothing, if it overlaps.

Two gloo workers on one device; seconds for 40 steps with a round every 10, blocking and
overlapped, against the same steps without any exchange.

    python benchmarks/gpu_overlap.py
"""

import time
from typing import Any

import torch
from _report import report

import lowcomm
from lowcomm.testing import run_workers

NAME = "gpu_overlap"
NUM_STEPS = 40


def job(rank: int, settings: dict[str, Any]) -> tuple[float, float]:
    device = torch.device("cuda")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(2048, 2048, device=device) for _ in range(6))
    )
    opt = lowcomm.DiLoCo(model.parameters(), lr=1e-3, fused=True, **settings)
    batch = torch.randn(4096, 2048, device=device)

    def steps(count: int) -> None:
        for _ in range(count):
            opt.zero_grad()
            model(batch).square().mean().backward()
            opt.step()
        torch.cuda.synchronize()

    steps(11)
    exposed = opt.stats.exposed_s
    start = time.perf_counter()
    steps(NUM_STEPS)
    return time.perf_counter() - start, opt.stats.exposed_s - exposed


def main() -> None:
    if not torch.cuda.is_available():
        print('{"benchmark": "gpu_overlap", "skipped": "no CUDA device"}')
        return
    bare = None
    for name, settings in {
        "no_exchange": {"sync_every": 1 << 40},
        "blocking": {"sync_every": 10},
        "overlap_8": {"sync_every": 10, "overlap": 8},
        "overlap_8_int8": {"sync_every": 10, "overlap": 8, "codec": "int8"},
    }.items():
        seconds, exposed = run_workers(job, 2, settings, timeout_s=100)[0]
        bare = bare or seconds
        report(NAME, f"{name}_time", seconds / bare, "of no exchange")
        report(NAME, f"{name}_exposed", exposed, "s")


if __name__ == "__main__":
    main()
