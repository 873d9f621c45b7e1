"""Trains one small model twice, with DDP and with DiLoCo, and compares the two.

    python recipes/demo.py

Each time two workers on this machine, one core each, read the same tokens. Prints a
table, and writes the metrics, the logs and loss.png to out/demo/.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from runs import Config, demo

OUT = Path("out/demo")
NUM_WORKERS = 2
LOG_TAIL = 30  # lines of a log that are shown when a run fails
TORCHRUN_REPORT = "failed (exitcode"  # begins a page that does not name the reason


class Run(NamedTuple):
    """What one run has left behind."""

    metrics: list[dict[str, Any]]
    parameters: int

    @property
    def final(self) -> dict[str, Any]:
        return self.metrics[-1]

    def series(self, x: str, y: str) -> tuple[list[float], list[float]]:
        """The pairs of two metrics, where both were taken."""
        lines = [line for line in self.metrics if line[y] is not None]
        return [line[x] for line in lines], [line[y] for line in lines]


def show(console: Console, text: str) -> None:
    """Prints what a run has printed, as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def launch(method: str, console: Console) -> Run:
    """Trains with one method and shows its progress."""
    out = OUT / method
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", str(NUM_WORKERS)),
        *(str(Path(__file__).with_name("pretrain.py")), demo.__name__),
        *("--method", method, "--out", str(out)),
    ]
    console.print(f"\n[bold]{method}[/bold], {NUM_WORKERS} workers")
    log_file = out / "log.txt"
    with open(log_file, "a", encoding="utf-8") as log:
        torchrun = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl+C reaches us alone, and we pass it on
        )
        try:
            for line in torchrun.stdout or ():
                show(console, "  " + line.rstrip())
                log.write(line)
                log.flush()
            status = torchrun.wait()
        finally:
            # Workers run in sessions of their own: torchrun alone knows them, and on
            # this signal ends them before itself.
            torchrun.terminate()
            torchrun.wait()
    if status != 0:
        text = log_file.read_text(encoding="utf-8")
        workers_own, _, _ = text.partition(TORCHRUN_REPORT)
        show(console, "\n".join(workers_own.splitlines()[-LOG_TAIL:]))
        console.print(
            f"[red]{method} failed with exit status {status}.[/red] Above are the "
            f"workers' last lines, in {log_file} is all."
        )
        sys.exit(1)
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    facts = json.loads((out / "run.json").read_text(encoding="utf-8"))
    return Run([json.loads(line) for line in lines], facts["parameters"])


def compare(config: Config, ddp: Run, diloco: Run) -> Table:
    """A table of what each run reached and what it cost."""
    table = Table(title="At equal tokens", title_justify="left")
    table.add_column("")
    table.add_column("DDP", justify="right")
    table.add_column("DiLoCo", justify="right")

    a, b = ddp.final, diloco.final
    change = b["val_loss"] / a["val_loss"] - 1
    # A mean of S bytes over n workers sends 2 S (n - 1) / n from each of them.
    message = 4 * ddp.parameters * 2 * (NUM_WORKERS - 1) // NUM_WORKERS
    rounds = -(-config.num_steps // config.sync_every)
    seconds = "{:.1f} s".format
    size = partial(decimal, precision=2)

    row = table.add_row
    row("tokens", f"{a['tokens']:,}", f"{b['tokens']:,}")
    row("exchanges", f"{config.num_steps:,}", f"{rounds:,}")
    row(
        "validation loss",
        f"{a['val_loss']:.3f}",
        f"{b['val_loss']:.3f} ({change:+.1%})",
    )
    row("bytes sent, each worker", size(a["bytes_sent"]), size(b["bytes_sent"]))
    row("  by the formula", size(config.num_steps * message), size(rounds * message))
    row("  fewer than DDP", "", f"{a['bytes_sent'] / b['bytes_sent']:.2f} times")
    row("bytes of setup", "not known", size(b["setup_bytes"]))
    row("waited for the network", seconds(a["exposed_s"]), seconds(b["exposed_s"]))
    row("training took", seconds(a["wall_s"]), seconds(b["wall_s"]))
    return table


def plot(ddp: Run, diloco: Run, file: Path) -> None:
    """Draws the losses against tokens and against bytes."""
    import matplotlib

    matplotlib.use("Agg")  # draws to files: needs no display
    import matplotlib.pyplot as plt

    figure, (by_tokens, by_bytes) = plt.subplots(
        1, 2, figsize=(10, 4), sharey=True, layout="constrained"
    )
    for run, name, color in ((ddp, "DDP", "C0"), (diloco, "DiLoCo", "C1")):
        by_tokens.plot(
            *run.series("tokens", "loss"),
            color=color,
            alpha=0.4,
            label=f"{name}, training",
        )
        for axes, x in ((by_tokens, "tokens"), (by_bytes, "bytes_sent")):
            axes.plot(
                *run.series(x, "val_loss"),
                color=color,
                marker="o",
                markersize=3,
                label=f"{name}, validation",
            )
    by_tokens.set(xlabel="tokens, all workers", ylabel="loss")
    by_bytes.set(xlabel="bytes sent by each worker", xscale="log")
    for axes in (by_tokens, by_bytes):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=150)


def end_on_signal(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    signal.signal(signal.SIGTERM, end_on_signal)  # as Ctrl+C: leave no workers behind
    config, console = demo(), Console()
    ddp = launch("ddp", console)
    diloco = launch("diloco", console)
    plot(ddp, diloco, OUT / "loss.png")
    console.print()
    console.print(compare(config, ddp, diloco))
    console.print(
        f"\nDiLoCo here: H = {config.sync_every} steps, outer learning rate "
        f"{config.outer_lr}, outer momentum {config.outer_momentum}.\n"
        "The paper: 500, 0.7 and 0.9, for 128 exchanges after 24,000 ordinary steps.\n"
        "In the long run a momentum of 0.9 makes ten of one step. From random weights\n"
        "the direction still turns, and that overshoots: recipes/runs.py has losses.\n"
        f"\nThe plot, loss.png, the metrics and the logs are in {OUT}/.",
        highlight=False,
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # the shell's status for it
