"""What a wrapped step without an exchange costs more than a bare one.

The fixed cost is measured over an inner optimizer that does nothing, since over a real
one it is lost in noise: two bare optimizers on other tensors differ by 5 per cent.
About 11 microseconds of it are torch's hooks around `step` of any Optimizer subclass.

    python benchmarks/step_overhead.py
"""

import statistics
from typing import Any

import torch
from _report import in_turns, ratio, report

import lowcomm

NAME = "step_overhead"
NEVER = 1 << 60


class Nothing(torch.optim.Optimizer):
    """An optimizer whose step does nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        pass


def tensors(count: int, size: int) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.randn(size)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(size)
    return params


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)

    opt = lowcomm.DiLoCo(Nothing(tensors(100, 100)), sync_every=NEVER)
    bare, wrapped = in_turns(opt.inner.step, opt.step, repeats=51, number=200)
    fixed = 1e6 * (statistics.median(wrapped) - statistics.median(bare))
    report(NAME, "fixed_cost", fixed, "us", limit=15)
    report(NAME, "hooked_empty_step", 1e6 * statistics.median(bare), "us")

    for count, size, repeats in ((100, 100, 201), (100, 100_000, 21)):
        for fused in (False, True):
            inner = torch.optim.AdamW(tensors(count, size), lr=1e-3, fused=fused)
            opt = lowcomm.DiLoCo(inner, sync_every=NEVER)
            number = max(1, 10_000 // size)
            bare, wrapped = in_turns(
                opt.inner.step, opt.step, repeats=repeats, number=min(number, 10)
            )
            figure = f"adamw{'_fused' if fused else ''}_{count}x{size}"
            more = {"limit": 1.03} if (size, fused) == (100, False) else {}
            bare_us = 1e6 * statistics.median(bare)
            report(
                NAME, figure, ratio(wrapped, bare), "of bare", bare_us=bare_us, **more
            )


if __name__ == "__main__":
    main()
