"""What one DiLoCo exchange costs without the wire: take the share, step, write back.

In a world of one, where an exchange is just that, against a memcpy of the parameters.
torch's own SGD-Nesterov over as many values, which is only a part of it, stands beside.

    python benchmarks/outer_step.py
"""

import statistics
from typing import Any

import torch
from _report import in_turns, ratio, report
from step_overhead import Nothing

import lowcomm

NAME = "outer_step"


def measure(count: int, size: int, repeats: int) -> None:
    params = [torch.nn.Parameter(torch.randn(size)) for _ in range(count)]
    copies = [torch.empty(size) for _ in range(count)]
    opt = lowcomm.DiLoCo(Nothing(params), sync_every=1)
    rounds = opt.stats.rounds

    def exchange() -> None:
        opt.step()

    def memcpy() -> None:
        for copy, param in zip(copies, params, strict=True):
            copy.copy_(param.detach())

    sgds = []
    for fused in (True, False):
        weights = [torch.nn.Parameter(torch.zeros(size)) for _ in range(count)]
        for weight, copy in zip(weights, copies, strict=True):
            weight.grad = copy
        args: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
        sgds.append(torch.optim.SGD(weights, fused=fused, **args))
    times, base, fused, loop = in_turns(
        exchange, memcpy, sgds[0].step, sgds[1].step, repeats=repeats
    )
    assert opt.stats.rounds - rounds == repeats + 1, "every step was an exchange"

    shape = f"{count}x{size}"
    milliseconds = 1e3 * statistics.median(times)
    large = count * size > 1_000_000
    limits = ({"limit": 4}, {}) if large else ({}, {"limit": 2.5})
    report(NAME, f"exchange_{shape}", ratio(times, base), "memcpys", **limits[0])
    report(NAME, f"exchange_{shape}", milliseconds, "ms", **limits[1])
    report(NAME, f"memcpy_{shape}", 1e3 * statistics.median(base), "ms")
    report(NAME, f"sgd_nesterov_fused_{shape}", ratio(fused, base), "memcpys")
    report(NAME, f"sgd_nesterov_loop_{shape}", ratio(loop, base), "memcpys")


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    measure(1000, 50_000, repeats=11)
    measure(50, 1_000_000, repeats=11)
    measure(1000, 10, repeats=51)


if __name__ == "__main__":
    main()
