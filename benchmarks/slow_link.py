"""Training two workers over a slow link: how much of the time they compute.

A small Llama learns the bytes of Python's standard library. Each worker is a process
of one thread in a network namespace of its own (see `_link.py`). Two rates are chosen
from the time of a step, so that DiLoCo, which waits for its exchanges, computes 62 and
45 per cent of the time; then the same steps are taken in other ways at the same rate.

`utilization` is the time spent in forward, backward and inner step over wall clock, of
the slower worker. Exchanges take processor time too and slow these down, so `alone`
puts a step's time without any traffic in its place, measured before and after the run;
both workers' steps without traffic differ by a few per cent from one time to the next.
Bytes are the interfaces', with what `opt.stats` says beside. The exchanges of
`finish()` are counted among the bytes, not in the time.

DDP takes a few steps at each rate, and all of them on a link without a limit.

    python benchmarks/slow_link.py
    python benchmarks/slow_link.py --steps 300 --sync-every 50 --mbit-s 40 20
"""

import argparse
import math
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _link import missing, run_over_link, sent_bytes, skip
from _report import report
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import lowcomm

NAME = "slow_link"

BATCH, CONTEXT = 2, 96
CORPUS_BYTES = 4 << 20
LEARNING_RATE = 2e-3
# A run of a few rounds takes less of the outer momentum than the paper's.
OUTER = {"outer_lr": 0.8, "outer_momentum": 0.3}

# The parts of the time that a blocking exchange leaves for computing, at two rates.
BLOCKING = (0.62, 0.45)
# What a link carries of its rate, without headers and acknowledgements.
PAYLOAD = 0.95


# --------------------------------------------------------------------------------------
# What is learned


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to learn from, and bytes to judge by."""
    text = bytearray()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += file.read_bytes()
    data = torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8)
    split = len(data) * 15 // 16
    return data[:split], data[split:]


def windows(data: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - CONTEXT, (count, 1), generator=generator)
    return data[starts + torch.arange(CONTEXT)].long()


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
        )
    )


def learning_rates(num_steps: int) -> Any:
    """Factors of a short warm-up and a cosine down to nearly zero."""
    return lambda step: min(
        (step + 1) / 10, 0.02 + 0.49 * (1 + math.cos(math.pi * step / num_steps))
    )


# --------------------------------------------------------------------------------------
# A worker


class Clock:
    """Adds up the seconds between starts and stops."""

    def __init__(self) -> None:
        self.total = 0.0

    def start(self, *_: Any) -> None:
        self._since = time.perf_counter()

    def stop(self, *_: Any) -> None:
        self.total += time.perf_counter() - self._since


def build_optimizer(
    way: str, inner: torch.optim.Optimizer, options: dict[str, int]
) -> Any:
    """The optimizer of one way to train; all but DDP's exchange every so many steps."""
    sync_every = options["sync_every"]
    # Not wanted here: all start from the same seed.
    common: dict[str, Any] = {"sync_every": sync_every, "init_sync": False}
    streaming = common | {
        "fragments": options["fragments"],
        "overlap": options["overlap"],
    }
    if way == "ddp":
        return inner
    if way == "local_sgd":
        return lowcomm.LocalSGD(inner, **common)
    if way == "diloco":
        return lowcomm.DiLoCo(inner, **common, **OUTER)
    codec = {"streaming": None, "streaming_int8": "int8", "streaming_int4": "int4"}[way]
    return lowcomm.DiLoCo(inner, **streaming, **OUTER, codec=codec)


def train(
    rank: int, way: str, num_steps: int, options: dict[str, int]
) -> dict[str, Any]:
    """Trains one model; returns seconds, bytes and the loss."""
    train_data, judge_data = corpus()
    model = build_model()
    inner = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    compute = Clock()
    inner.register_step_pre_hook(compute.start)
    inner.register_step_post_hook(compute.stop)
    network = DistributedDataParallel(model) if way == "ddp" else model
    opt = build_optimizer(way, inner, options)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, learning_rates(num_steps))
    dist.barrier()
    bytes_before = sent_bytes()
    start = time.perf_counter()
    for step in range(num_steps):
        batch = windows(train_data, BATCH, seed=2 * step + rank)
        compute.start()
        network(input_ids=batch, labels=batch).loss.backward()
        compute.stop()
        opt.step()
        opt.zero_grad()
        schedule.step()
    wall_s = time.perf_counter() - start
    result = {"wall_s": wall_s, "steps": num_steps, "parameters": opt_size(model)}
    if way != "ddp":
        opt.finish()
        result |= {
            "compute_s": compute.total,
            "finish_s": time.perf_counter() - start - wall_s,
            "stats_bytes": opt.stats.bytes_sent + opt.stats.setup_bytes,
            "exposed_s": opt.stats.exposed_s,
        }
    dist.barrier()
    result["bytes"] = sent_bytes() - bytes_before
    with torch.no_grad():
        batch = windows(judge_data, 128, seed=-1)
        result["loss"] = float(model(input_ids=batch, labels=batch).loss)
    return result


def opt_size(model: torch.nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def time_alone(num_steps: int) -> list[float]:
    """Seconds of steps without traffic, on all workers at a time."""
    train_data, _ = corpus()
    model = build_model()
    opt = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    dist.barrier()
    seconds = []
    for step in range(num_steps):
        start = time.perf_counter()
        batch = windows(train_data, BATCH, seed=step)
        model(input_ids=batch, labels=batch).loss.backward()
        opt.step()
        opt.zero_grad()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def work(
    rank: int, ways: list[list[Any]], options: dict[str, int]
) -> list[dict[str, Any]]:
    """Trains in all ways, one after another, with steps without traffic in between."""
    results = []
    before = time_alone(10)
    for way, num_steps in ways:
        result = train(rank, way, num_steps, options)
        after = time_alone(10)
        result |= {"way": way, "alone_step_s": statistics.median(before + after)}
        results.append(result)
        before = after
    return results
