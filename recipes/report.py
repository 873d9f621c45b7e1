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

    run.json says what is run. A line of metrics.jsonl has these keys, which mean the
    same in every method:

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
        facts = {"workers": workers, "parameters": parameters, **asdict(config)}
        (out / "run.json").write_text(json.dumps(facts, default=str, indent=1) + "\n")
        file = out / "metrics.jsonl"
        keep_lines_until(file, start)
        self._file = open(file, "a", encoding="utf-8")
        self._step_tokens = (
            workers * config.accumulate * config.batch_size * config.context
        )
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
        self._last_step = start
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

    def line(
        self, step: int, loss: float, val_loss: float | None, lr: float, stats: Stats
    ) -> None:
        """Records what has happened since the last line."""
        now = time.perf_counter()
        tokens = (step - self._last_step) * self._step_tokens
        tokens_s = tokens / (now - self._last_time)
        self._last_step, self._last_time = step, now
        metrics = {
            "step": step,
            "tokens": step * self._step_tokens,
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


def keep_lines_until(file: Path, step: int) -> None:
    """Drops the lines after a step: a run that resumes there writes them again."""
    kept = []
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
            # A kill may have left the last line unfinished; it is after the checkpoint.
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text("".join(kept), encoding="utf-8")
    os.replace(unfinished, file)
