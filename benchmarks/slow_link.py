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


# --------------------------------------------------------------------------------------
# What is said


def rate_for(blocking: float, step_s: float, size: int, sync_every: int) -> float:
    """The rate in Mbit/s at which a blocking exchange leaves so much for computing."""
    exchange_s = sync_every * step_s * (1 / blocking - 1)
    return 8e-6 * size / (PAYLOAD * exchange_s)


def report_way(workers: list[dict[str, Any]], link: str, mbit_s: float) -> None:
    way, first = workers[0]["way"], workers[0]
    alone = min(w["alone_step_s"] * w["steps"] / w["wall_s"] for w in workers)
    more = {"alone": alone, "mbit_s": mbit_s, "steps": first["steps"]}
    more |= {"wall_s": first["wall_s"], "megabytes": 1e-6 * first["bytes"]}
    if way == "ddp":  # its exchange is a part of the backward pass
        report(NAME, f"utilization_{way}_{link}", alone, "of the time", **rounded(more))
        return
    more |= {name: first[name] for name in ("exposed_s", "finish_s", "loss")}
    value = min(w["compute_s"] / w["wall_s"] for w in workers)
    figure = f"utilization_{way}_{link}"
    report(NAME, figure, value, "of the time", **rounded(more), **bound(way, link))


def rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: round(number, 4) for name, number in numbers.items()}


def bound(way: str, link: str) -> dict[str, float]:
    """What is claimed of a utilization: `limit` from above, `at_least` from below."""
    if way == "diloco":
        return {"limit": {"link_1": 0.65, "link_2": 0.50}[link]}
    return {} if way == "local_sgd" else {"at_least": 0.95}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--sync-every", type=int, default=20)
    parser.add_argument("--fragments", type=int, default=10)
    parser.add_argument("--overlap", type=int, default=3)
    parser.add_argument(
        "--mbit-s", type=float, nargs=2, help="the two rates; None: see above"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if reason := missing():
        skip(NAME, reason)
        return
    options = {
        "sync_every": args.sync_every,
        "fragments": args.fragments,
        "overlap": args.overlap,
    }

    def run(ways: list[tuple[str, int]], mbit_s: float | None) -> Any:
        by_rank = run_over_link(work, 2, ways, options, mbit_s=mbit_s, timeout_s=600)
        return {workers[0]["way"]: workers for workers in zip(*by_rank, strict=True)}

    ddp = run([("ddp", args.steps)], None)["ddp"][0]
    step_s = ddp["alone_step_s"]
    report(NAME, "step", 1e3 * step_s, "ms", parameters=ddp["parameters"])
    report(NAME, "loss_ddp", ddp["loss"], "nats a byte")
    bytes_of, uncounted = {}, []
    for i, link, ways in (
        (0, "link_1", ("local_sgd", "diloco", "streaming")),
        (1, "link_2", ("diloco", "streaming_int8", "streaming_int4")),
    ):
        size = 4 * ddp["parameters"]
        mbit_s = (
            args.mbit_s[i]
            if args.mbit_s
            else rate_for(BLOCKING[i], step_s, size, args.sync_every)
        )
        results = run([("ddp", 6), *((way, args.steps) for way in ways)], mbit_s)
        for workers in results.values():
            report_way(workers, link, mbit_s)
        for way in ways:
            first = results[way][0]
            bytes_of[way] = first["bytes"]
            uncounted.append(abs(first["bytes"] / first["stats_bytes"] - 1))
            if way.startswith("streaming"):
                loss = results["diloco"][0]["loss"]
                more = {} if way == "streaming_int4" else {"limit": 0.01}
                difference = abs(first["loss"] / loss - 1)
                figure = f"loss_{way}_{link}"
                report(NAME, figure, difference, "from diloco's", **more)
    report(NAME, "uncounted_bytes", max(uncounted), "of opt.stats", limit=0.05)
    ratio = bytes_of["streaming"] / bytes_of["streaming_int4"]
    report(NAME, "int4", ratio, "times fewer bytes", at_least=8 * 0.97)


if __name__ == "__main__":
    main()
