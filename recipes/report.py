"""What a run shows: lines of JSON for programs, progress for people."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from runs import Config


class Stats(Protocol):
    """What an optimizer has counted on this worker so far."""

    bytes_sent: int
    setup_bytes: int | None
    exposed_s: float


class Report:
    """Writes rank 0's metrics, and shows them as a bar or, to a file, line by line.

    run.json says what is run, and at which steps with how many workers it was started.
    A line of metrics.jsonl has these keys, which mean the same in every method:

        step         optimizer steps of each worker
        tokens       trained on so far, by all workers together
        loss         training loss, mean over workers and the steps since the last line
        lr           learning rate of this step
        bytes_sent   by the exchanges of this worker so far
        setup_bytes  by this worker's checks, broadcasts, evaluations; null: not known
        exposed_s    seconds that this worker has waited for the network
        tokens_s     tokens per second since the last line, of all workers together
        wall_s       seconds since this process began to train
        val_loss     of the global parameters; null: not taken at this step
    """

    def __init__(
        self, out: Path, config: Config, *, workers: int, parameters: int, start: int
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._starts = starts_before(out / "run.json", start)
        self._starts.append((start if self._starts else 0, workers))
        facts = {**asdict(config), "workers": workers, "parameters": parameters}
        facts["starts"] = self._starts
        replace(out / "run.json", json.dumps(facts, default=str, indent=1) + "\n")
        file = out / "metrics.jsonl"
        keep_lines_until(file, start)
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

    def __enter__(self) -> "Report":
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
        self, step: int, loss: float, val_loss: float | None, lr: float, stats: Stats
    ) -> None:
        """Records what has happened since the last line."""
        now = time.perf_counter()
        tokens = self._tokens_until(step)
        tokens_s = (tokens - self._last_tokens) / (now - self._last_time)
        self._last_tokens, self._last_time = tokens, now
        metrics = {
            "step": step,
            "tokens": tokens,
            "loss": loss,
            "lr": lr,
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
            f"loss {loss:.3f}  {tokens_s:,.0f} tokens/s  "
            f"sent {decimal(stats.bytes_sent)}  waited {stats.exposed_s:.1f} s"
        )
        if val_loss is not None:
            text += f"  validation {val_loss:.3f}"
        self._bar.update(self._task, completed=step, description=text)
        if self._bar.disable:
            print(f"step {step}/{self._num_steps}  {text}", flush=True)


def starts_before(file: Path, step: int) -> list[tuple[int, int]]:
    """Steps at which the run was started before, each with the workers from there on.

    Not those from which on all steps are taken again.
    """
    if not file.exists():
        return []
    starts = json.loads(file.read_text(encoding="utf-8")).get("starts", [])
    return [(begin, workers) for begin, workers in starts if begin < step]


def keep_lines_until(file: Path, step: int) -> None:
    """Drops the lines after a step: a run that resumes there writes them again."""
    kept = []
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
            # A kill may have left the last line unfinished; it is after the checkpoint.
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
    replace(file, "".join(kept))


def replace(file: Path, text: str) -> None:
    """Writes a file that a kill leaves as it was or as it is to be."""
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, file)
