"""What a run shows: lines of JSON for programs, progress for people."""

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from runs import Config, Launch
from torch import Tensor
from trackers import open_trackers


class Stats(Protocol):
    """What an optimizer has counted on this worker so far."""

    bytes_sent: int
    setup_bytes: int | None
    exposed_s: float
    streams: Mapping[str, Any]  # see lowcomm.sync.stats.StreamStats


class Report:
    """One worker's part in showing a run: worker 0 writes, all are asked.

    Args:
        out: the run's directory.
        config: the run.
        rank: this worker's.
        workers: how many they are.
        parameters: of the model.
        start: the step that it goes on from; lines after it are dropped.
        run_id: its name for Weights & Biases.
        stats: what the optimizer has counted up to there.
    """

    def __init__(
        self,
        out: Path,
        config: Launch,
        *,
        rank: int,
        workers: int,
        parameters: int,
        start: int,
        run_id: str,
        stats: Stats,
    ) -> None:
        self._meter = Meter(stats)
        facts = {**plain(config), "workers": workers, "parameters": parameters}
        self._lines = Lines(out, config, facts, start) if rank == 0 else None
        self._trackers = open_trackers(
            config,
            out,
            facts,
            rank=rank,
            start=start,
            run_id=run_id,
            before=self._lines.kept if self._lines else (),
        )

    def __enter__(self) -> "Report":
        if self._lines:
            self._lines.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._lines:
            self._lines.__exit__(kind, error, traceback)
        for tracker in self._trackers:
            tracker.close(failed=error is not None)

    def line(
        self, step: int, loss: Tensor, val_loss: float | None, lr: float, stats: Stats
    ) -> None:
        """Records what has happened since the last line; all workers call.

        Args:
            step: the one that was just taken.
            loss: of this worker, mean over the steps since the last line.
            val_loss: of all workers; None if it was not taken.
            lr: learning rate of this step.
            stats: what the optimizer has counted.
        """
        shared, own = self._meter.measure(loss.item(), stats)
        metrics = {}
        if self._lines:
            metrics = self._lines.line(step, shared, val_loss, lr, stats)
        own |= {"bytes_sent": stats.bytes_sent, "exposed_s": stats.exposed_s}
        mine = {f"worker/{name}": value for name, value in own.items()}
        for tracker in self._trackers:
            tracker.log(step, {**metrics, **mine})


# -------------------------------------------------------------------------------------
# What is measured


class Meter:
    """What workers have to tell each other for a line: seven numbers, added up once."""

    def __init__(self, stats: Stats) -> None:
        self._last_time, self._last_exposed_s = time.perf_counter(), stats.exposed_s

    def measure(
        self, loss: float, stats: Stats
    ) -> tuple[dict[str, float | None], dict[str, float | None]]:
        """Metrics of all workers, and of this one; all workers call."""
        now, exposed_s = time.perf_counter(), stats.exposed_s
        waited = (exposed_s - self._last_exposed_s) / (now - self._last_time)
        self._last_time, self._last_exposed_s = now, exposed_s
        own = {"loss": loss, "utilization": 1 - waited, **likeness(stats)}
        sums = terms_of(own)
        dist.all_reduce(sums)
        return over_workers(sums, dist.get_world_size()), own


def likeness(stats: Stats) -> dict[str, float | None]:
    """Of this worker's last pseudo-gradient to the mean, as if of one stream."""
    known = [s for s in stats.streams.values() if s.cosine is not None]
    if not known:
        return {"delta_norm": None, "delta_mean_norm": None, "delta_cosine": None}
    share = math.hypot(*(s.share_norm for s in known))
    mean = math.hypot(*(s.mean_norm for s in known))
    dot = sum(s.cosine * s.share_norm * s.mean_norm for s in known)
    cosine = dot / (share * mean) if share * mean else 0.0
    return {"delta_norm": share, "delta_mean_norm": mean, "delta_cosine": cosine}


def terms_of(own: Mapping[str, Any]) -> Tensor:
    """What of one worker's metrics is summed over all."""
    share, mean = own["delta_norm"], own["delta_mean_norm"]
    compared = (0.0, 0.0, 0.0, 0.0)
    if share is not None:
        compared = (1.0, share**2, mean**2, own["delta_cosine"])
    loss = own["loss"]
    # float64: of squares little is left when their mean is taken off.
    return torch.tensor(
        [loss, loss**2, own["utilization"], *compared], dtype=torch.float64
    )


def over_workers(sums: Tensor, workers: int) -> dict[str, float | None]:
    """All workers' metrics, from the sums of their terms."""
    loss, loss_square, utilization = (sums[:3] / workers).tolist()
    metrics: dict[str, float | None] = {
        "loss": loss,
        "loss_std": root(loss_square - loss**2),
        "utilization": round(utilization, 4),
        "delta_norm": None,
        "delta_mean_norm": None,
        "delta_cosine": None,
        "spread": None,
    }
    compared = sums[3].item()
    if compared:
        share, mean, cosine = (sums[4:] / compared).tolist()
        metrics["delta_norm"], metrics["delta_mean_norm"] = root(share), root(mean)
        metrics["delta_cosine"] = cosine
        # Workers stand at the anchor less their pseudo-gradients.
        metrics["spread"] = root(share - mean)
    return metrics


def root(square: float) -> float:
    """The square root of what rounding may have made negative."""
    return 0.0 if square < 0 else math.sqrt(square)


# -------------------------------------------------------------------------------------
# Worker 0's files and screen


class Lines:
    """Writes metrics, and shows them as a bar or, to a file, line by line.

    run.json says what is run, and at which steps with how many workers it was started.
    A line of metrics.jsonl has these keys, which mean the same in every method:

        step         optimizer steps of each worker
        tokens       trained on so far, by all workers together
        loss         training loss, mean over workers and the steps since the last line
        loss_std     standard deviation of that loss over workers
        lr           learning rate of this step
        workers      that take part
        bytes_sent   by the exchanges of worker 0 so far
        setup_bytes  by its checks, broadcasts and evaluations; null: not known
        exposed_s    seconds that worker 0 has waited for the network
        utilization  share of the time since the last line that workers did not so wait
        tokens_s     tokens per second since the last line, of all workers together
        wall_s       seconds since this process began to train
        val_loss     of the global parameters; null: not taken at this step

    These are of the last exchange, and null where no pseudo-gradients are exchanged:

        delta_norm       length of the workers' pseudo-gradients, root mean square
        delta_mean_norm  length of what they come to, the mean
        delta_cosine     between the two, mean over workers; 1: all go the same way
        spread           distance of the workers' parameters from their mean, likewise

    Weights & Biases and TensorBoard have the same names, and under `worker/` what a
    worker has measured of itself.
    """

    def __init__(
        self, out: Path, config: Config, facts: Mapping[str, Any], start: int
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._starts = starts_before(out / "run.json", start)
        self._workers = facts["workers"]
        self._starts.append((start if self._starts else 0, self._workers))
        facts = {**facts, "starts": self._starts}
        replace(out / "run.json", json.dumps(facts, indent=1) + "\n")
        file = out / "metrics.jsonl"
        self.kept = keep_lines_until(file, start)
        self._file = open(file, "a", encoding="utf-8")
        self._worker_tokens = config.accumulate * config.batch_size * config.context
        self._num_steps = config.num_steps
        console = Console()
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=config.num_steps, completed=start)
        self._last_tokens = self._tokens_until(start)
        self._began = self._last_time = time.perf_counter()

    def __enter__(self) -> "Lines":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
        self._file.close()

    def _tokens_until(self, step: int) -> int:
        """Each step's are of as many workers as there were then."""
        ends = [begin for begin, _ in self._starts[1:]] + [step]
        steps = [
            (end - begin) * workers
            for (begin, workers), end in zip(self._starts, ends, strict=True)
        ]
        return sum(steps) * self._worker_tokens

    def line(
        self,
        step: int,
        shared: Mapping[str, float | None],
        val_loss: float | None,
        lr: float,
        stats: Stats,
    ) -> dict[str, Any]:
        """Writes what has happened since the last line, and returns it.

        Args:
            step: the one that was just taken.
            shared: of all workers, see `over_workers`.
            val_loss: of all workers; None if it was not taken.
            lr: learning rate of this step.
            stats: what the optimizer has counted.
        """
        now = time.perf_counter()
        tokens = self._tokens_until(step)
        tokens_s = (tokens - self._last_tokens) / (now - self._last_time)
        self._last_tokens, self._last_time = tokens, now
        metrics = {
            "step": step,
            "tokens": tokens,
            **shared,
            "lr": lr,
            "workers": self._workers,
            "bytes_sent": stats.bytes_sent,
            "setup_bytes": stats.setup_bytes,
            "exposed_s": round(stats.exposed_s, 3),
            "tokens_s": round(tokens_s),
            "wall_s": round(now - self._began, 3),
            "val_loss": val_loss,
        }
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()
        text = (
            f"loss {shared['loss']:.3f}  {tokens_s:,.0f} tokens/s  "
            f"sent {decimal(stats.bytes_sent)}  waited {stats.exposed_s:.1f} s"
        )
        if val_loss is not None:
            text += f"  validation {val_loss:.3f}"
        self._bar.update(self._task, completed=step, description=text)
        if self._bar.disable:
            print(f"step {step}/{self._num_steps}  {text}", flush=True)
        return metrics


def plain(config: Config) -> dict[str, Any]:
    """A configuration in the types of JSON."""
    facts: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    return facts


def starts_before(file: Path, step: int) -> list[tuple[int, int]]:
    """Steps at which the run was started before, each with the workers from there on.

    Not those from which on all steps are taken again.
    """
    if not file.exists():
        return []
    starts = json.loads(file.read_text(encoding="utf-8")).get("starts", [])
    return [(begin, workers) for begin, workers in starts if begin < step]


def keep_lines_until(file: Path, step: int) -> list[dict[str, Any]]:
    """Drops the lines after a step: a run that resumes there writes them again."""
    kept, metrics = [], []
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
            # A kill may have left the last line unfinished; it is after the checkpoint.
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
                metrics.append(json.loads(line))
    replace(file, "".join(kept))
    return metrics


def replace(file: Path, text: str) -> None:
    """Writes a file that a kill leaves as it was or as it is to be."""
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, file)
