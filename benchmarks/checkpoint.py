"""What a checkpoint costs the training loop, and how long its writing takes.

A save is timed against a memcpy of all that is saved; the first one, which makes the
memory, is left out. A loop of small matrix products is timed while a thread writes and
alone. And the writing itself against writing as many bytes and nothing else.

    python benchmarks/checkpoint.py
"""

import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from _report import ratio, report

import lowcomm

NAME = "checkpoint"


def build(count: int, size: int, method: Any) -> tuple[torch.nn.Module, Any]:
    """A model of that many tensors, and its optimizer after a step."""
    model = torch.nn.Module()
    for i in range(count):
        model.register_parameter(str(i), torch.nn.Parameter(torch.randn(size)))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if method is not None:
        opt = method(opt, sync_every=1000)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    opt.step()
    return model, opt


def tensors_in(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree.detach()]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [t for x in tree for t in tensors_in(x)] if isinstance(tree, list) else []


def wait_and_time(ckpt: lowcomm.Checkpointer) -> float:
    start = time.perf_counter()
    ckpt.wait()
    return time.perf_counter() - start


def write_and_time(path: Path, content: list[torch.Tensor]) -> float:
    start = time.perf_counter()
    with open(path, "wb") as file:
        for tensor in content:
            file.write(tensor.numpy())
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def measure(
    name: str, count: int, size: int, method: Any, repeats: int, **limit: float
) -> None:
    model, opt = build(count, size, method)
    sources = tensors_in([model.state_dict(), opt.state_dict()])
    copies = [torch.empty_like(source) for source in sources]
    saves, memcpys, states, writes, plain_writes = [], [], [], [], []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        ckpt = lowcomm.Checkpointer(folder, keep=2, model=model, optimizer=opt)
        for step in range(1, repeats + 2):
            start = time.perf_counter()
            ckpt.save(step)
            saves.append(time.perf_counter() - start)
            writes.append(wait_and_time(ckpt))
            start = time.perf_counter()
            torch._foreach_copy_(copies, sources)
            memcpys.append(time.perf_counter() - start)
            start = time.perf_counter()
            model.state_dict(), opt.state_dict()
            states.append(time.perf_counter() - start)
            plain_writes.append(write_and_time(Path(folder, "plain"), copies))
    timed = (saves[1:], memcpys[1:])
    shape = f"{name}_{count}x{size}"
    ms = {
        "ms": 1e3 * statistics.median(saves[1:]),
        "memcpy_ms": 1e3 * statistics.median(memcpys[1:]),
        "state_dicts_ms": 1e3 * statistics.median(states[1:]),
        "first_ms": 1e3 * saves[0],
    }
    ms = {key: round(value, 2) for key, value in ms.items()}
    if count * size > 1_000_000:
        report(NAME, f"snapshot_{shape}", ratio(*timed), "memcpys", **ms, **limit)
        write = ratio(writes[1:], plain_writes[1:])
        report(NAME, f"write_{shape}", write, "plain writes", s=writes[-1])
    else:
        report(NAME, f"snapshot_{shape}", ms.pop("ms"), "ms", **ms, **limit)


def measure_loop(count: int, size: int, repeats: int) -> None:
    """How much slower a step is while the thread writes, with a core for it."""
    model, opt = build(count, size, None)
    weight = torch.randn(256, 256)

    def steps(until: threading.Event | None, limit_s: float) -> float:
        """Steps in a second."""
        start, number = time.perf_counter(), 0
        while time.perf_counter() - start < limit_s:
            if until is not None and until.is_set():
                break
            for _ in range(10):
                torch.mm(weight, weight)
            number += 10
        return number / (time.perf_counter() - start)

    alone, beside = [], []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        ckpt = lowcomm.Checkpointer(folder, keep=2, model=model, optimizer=opt)
        for step in range(1, repeats + 1):
            ckpt.save(step)
            written = threading.Event()

            def wait(written: threading.Event = written) -> None:
                ckpt.wait()
                written.set()

            waiter = threading.Thread(target=wait)
            waiter.start()
            beside.append(steps(written, 60.0))
            waiter.join()
            alone.append(steps(None, 0.5))
    value = ratio(alone, beside)
    report(NAME, "step_beside_writing", value, "of a step alone", cores=os.cpu_count())


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    measure("adamw", 50, 1_000_000, None, repeats=3, limit=1.5)
    measure("adamw", 1000, 50_000, None, repeats=3, limit=2)
    measure("adamw", 1000, 10, None, repeats=21)
    measure("diloco", 50, 1_000_000, lowcomm.DiLoCo, repeats=3)
    measure_loop(50, 1_000_000, repeats=2)


if __name__ == "__main__":
    main()
