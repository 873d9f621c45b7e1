"""A worker of recipes/chaos.py: trains, and tells what happens as lines of JSON."""

import json
import logging
import os
import resource
import sys
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from elastic import Run
from runs import Config, compare
from torch import Tensor

import lowcomm
from lowcomm.sync import Change

SAVE_EVERY = 25  # steps
SMALL_FILES = 64 << 10  # bytes; a checkpoint is larger


@dataclass(frozen=True)
class Spec:
    """What a worker is told when it starts.

    Args:
        name: of the worker.
        method: of the run, with `overlap` as chaos.py says.
        lighthouse, address: see `ElasticGroup`.
        folder: where its checkpoints go, and its orders come from.
        cache: of tokens.
        workers: so many begin.
        windows: so many are read by all workers together; then the run ends.
        timeout_s: of the group.
        seed: of the weights and the data.
        step_s: least time of a step, in seconds.
    """

    name: str
    method: str
    lighthouse: str
    address: str
    folder: str
    cache: str
    workers: int
    windows: int
    timeout_s: float
    seed: int
    step_s: float

    @property
    def config(self) -> Config:
        """The run that is disturbed."""
        return replace(
            compare(),
            method=self.method,
            batch_size=4,
            first_periods=4,  # so small a batch has few of the tokens
            second_periods=4,
            seed=self.seed,
            cache=Path(self.cache),
        )


def tell(event: str, **facts: Any) -> None:
    """One line of JSON; the clock is the machine's, the same for all processes."""
    print(json.dumps({"event": event, "at": time.monotonic(), **facts}), flush=True)


class Disturbed(Run):
    """A run that tells what happens, and does what it is ordered."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.rounds: dict[str, int] = {}
        self.slow_s = 0.0
        self.orders = Path(spec.folder, "orders", spec.name)
        super().__init__(
            spec.config,
            spec.windows,
            lighthouse=spec.lighthouse,
            name=spec.name,
            run="chaos",
            address=spec.address,
            start_with=spec.workers,
            timeout_s=spec.timeout_s,
        )
        self.saves = lowcomm.Checkpointer(
            Path(spec.folder, "checkpoints", spec.name),
            keep=2,
            model=self.model,
            optimizer=self.optimizer,
            batches=self.batches,
        )

    def step(self) -> None:
        began = time.monotonic()
        super().step()
        rest_s = began + self.spec.step_s - time.monotonic()
        time.sleep(max(rest_s, 0) + self.slow_s)
        if self.optimizer.stats.steps % SAVE_EVERY == 0:
            try:
                self.saves.save(self.optimizer.stats.steps)
            except OSError as error:
                tell("not saved", why=str(error)[:200])

    def is_to_stop(self) -> bool:
        if not self.orders.exists():
            return False
        order = json.loads(self.orders.read_text())
        self.orders.unlink()
        self.slow_s = order.get("slow_s", self.slow_s)
        if "largest_file" in order:
            size = order["largest_file"] or resource.RLIM_INFINITY
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
        return bool(order.get("leave"))

    def changed(self, change: Change) -> None:
        super().changed(change)
        tell("change", members=change.members, rank=self.group.rank)

    def applied(self) -> None:
        """Tells which rounds, and a fingerprint of what all agree on since."""
        streams = self.optimizer.state_dict()["lowcomm"]["sync"]["streams"]
        new = {
            name: stream
            for name, stream in streams.items()
            if stream["round"] != self.rounds.get(name, 0)
        }
        self.rounds |= {name: stream["round"] for name, stream in new.items()}
        applied = {
            name: [stream["round"], self._agreed(name, stream)]
            for name, stream in new.items()
        }
        tell("round", done=self.done, applied=applied)

    def _agreed(self, name: str, stream: dict[str, Any]) -> int | None:
        if stream["agreed"]:
            return fingerprint(stream["tensors"]["anchor"])
        is_mean = self.config.method in ("local_sgd", "local_adam", "desloc")
        if is_mean and name == "parameters":
            return fingerprint(self.model.state_dict())
        return None


def fingerprint(tensors: dict[str, Tensor]) -> int:
    crc = 0
    for tensor in tensors.values():
        crc = zlib.crc32(tensor.detach().contiguous().view(torch.uint8).numpy(), crc)
    return crc


def main() -> None:
    spec = Spec(**json.loads(sys.argv[1]))
    logging.basicConfig(format=f"{spec.name}: %(message)s", level=logging.WARNING)
    torch.set_num_threads(1)
    os.nice(1)
    run, is_over = Disturbed(spec), False
    tell("in", step=run.optimizer.stats.steps, done=run.done)
    try:
        with run.saves:
            if run.train():
                tell(
                    "end",
                    loss=run.validate(),
                    print=fingerprint(run.model.state_dict()),
                )
            is_over = True
    except OSError as error:  # of the last save
        if not is_over:
            raise
        tell("not saved", why=str(error)[:200])
    run.group.close()


if __name__ == "__main__":
    main()
