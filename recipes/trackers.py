"""Metrics outside of metrics.jsonl: Weights & Biases, TensorBoard."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from extras import load_extra
from runs import Launch

Metrics = Mapping[str, Any]  # numbers, and None for what is not known


class RunId:
    """Names a run outside of its directory; a checkpoint has it, so it stays the same.

    Args:
        value: of a new run, the same on all workers.
    """

    def __init__(self, value: str) -> None:
        self.value = value

    def state_dict(self) -> dict[str, str]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.value = state["value"]


class Tracker(Protocol):
    """What is told the metrics of a worker."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Takes what has happened up to a step, and leaves out what is None."""

    def close(self, *, failed: bool) -> None:
        """Ends the run, which an error may have stopped."""


class WandB:
    """A run of Weights & Biases.

    Its own steps are the optimizer's, so that a step is in it once. A run that goes on
    from a checkpoint tells it again what it has not got: a worker that is killed takes
    along what was not written, and offline each start writes to a folder of its own.

    Args:
        config: says whether something is sent. A run that should be and cannot be, as
            nobody is logged in or no server answers, is written to `out` instead.
        out: the run's directory.
        facts: what the run is.
        run_id: of a run that it goes on with, if there is one.
        name: for people.
        group: of runs that belong together.
        before: metrics of the steps before.
    """

    def __init__(
        self,
        config: Launch,
        out: Path,
        facts: Metrics,
        *,
        run_id: str,
        name: str,
        group: str | None = None,
        before: Sequence[Metrics] = (),
    ) -> None:
        wandb: Any = load_extra("wandb", "wandb must be off without the package wandb")
        about = {
            "project": os.environ.get("WANDB_PROJECT", "lowcomm"),
            "dir": out,
            "id": run_id,
            "name": name,
            "group": group,
            "resume": "allow",
            "config": dict(facts),
        }
        self._run = begin_online(wandb, about) if config.wandb == "online" else None
        self._run = self._run or wandb.init(mode="offline", **about)
        self._first = self._run.step  # that it has not got yet
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        for metrics in before:
            self.log(metrics["step"], metrics)

    def log(self, step: int, metrics: Metrics) -> None:
        if step >= self._first:
            self._run.log({**known(metrics), "step": step}, step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def begin_online(wandb: Any, about: dict[str, Any]) -> Any:
    """A run that is sent; None if that cannot be. Never waits for somebody to type."""
    try:
        if wandb.login(prompt=False, verify=False):
            return wandb.init(mode="online", **about)
        why = "nobody is logged in (wandb login)"
    except wandb.Error as error:
        why = str(error)
    print(f"wandb is offline: {why}. `wandb sync` sends {about['dir']}/wandb later.")
    return None


class TensorBoard:
    """Scalars in a directory; what broke off has left after `start` is hidden."""

    def __init__(self, out: Path, start: int) -> None:
        tensorboard: Any = load_extra(
            "torch.utils.tensorboard",
            "tensorboard must be off without the package tensorboard",
        )
        self._writer = tensorboard.SummaryWriter(
            str(out / "tensorboard"), purge_step=start + 1
        )

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in known(metrics).items():
            if name != "step":
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        del failed
        self._writer.close()


def known(metrics: Metrics) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if value is not None}


def open_trackers(
    config: Launch,
    out: Path,
    facts: Metrics,
    *,
    rank: int,
    start: int,
    run_id: str,
    before: Sequence[Metrics],
) -> list[Tracker]:
    """What a worker's metrics go to, besides metrics.jsonl.

    Args:
        config: the run.
        out: its directory.
        facts: what it is.
        rank: this worker's.
        start: the step that it goes on from.
        run_id: its name for Weights & Biases.
        before: its metrics up to there, if this worker has them.
    """
    trackers: list[Tracker] = []
    name = f"{config.name}-{config.method}"
    if config.wandb_per_worker:
        trackers.append(
            WandB(
                config,
                out,
                {**facts, "rank": rank},
                run_id=f"{run_id}-{rank}",
                name=f"{name}-{rank}",
                group=run_id,
                before=before,
            )
        )
    elif config.wandb != "off" and rank == 0:
        trackers.append(
            WandB(config, out, facts, run_id=run_id, name=name, before=before)
        )
    if config.tensorboard and rank == 0:
        trackers.append(TensorBoard(out, start))
    return trackers
