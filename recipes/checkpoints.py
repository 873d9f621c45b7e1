"""Checkpoints: one file per worker and step, whole or absent."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

KEEP = 2


class Checkpoints:
    """The states of all workers in one directory; `newest` is a step that all have.

    A step of 0 means that there is none.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        rank, world = dist.get_rank(), dist.get_world_size()
        self._suffix = f"-rank{rank}of{world}.pt"
        for file in directory.glob("step*.pt"):
            if not file.stem.endswith(f"of{world}"):
                raise ValueError(
                    "the number of workers must be that of the checkpoints, got "
                    f"{world} with {file}. Start as many, or choose another --out."
                )
        steps: list[list[int]] = [[]] * world
        dist.all_gather_object(steps, self._steps())
        self.newest = max(set.intersection(*map(set, steps)), default=0)
        for step in self._steps():
            if step > self.newest:  # of a run that ended before all had saved
                self._path(step).unlink()

    def _steps(self) -> list[int]:
        files = self._directory.glob("step*" + self._suffix)
        prefix, suffix = len("step"), len(self._suffix)
        return sorted(int(file.name[prefix:-suffix]) for file in files)

    def _path(self, step: int) -> Path:
        return self._directory / f"step{step}{self._suffix}"

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Writes this worker's state; a kill at any moment leaves the previous one."""
        self._directory.mkdir(parents=True, exist_ok=True)
        unfinished = self._path(step).with_suffix(".unfinished")
        with open(unfinished, "wb") as file:
            torch.save({**state, "rng": rng_state()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, self._path(step))
        # Only when all workers have the new one is an older one of no use to anybody.
        dist.barrier()
        for old in self._steps()[:-KEEP]:
            self._path(old).unlink()

    def load(self) -> dict[str, Any]:
        """Reads this worker's newest state and puts its random generators back."""
        state = torch.load(self._path(self.newest), weights_only=True)
        set_rng_state(state["rng"])
        return state


def rng_state() -> dict[str, Any]:
    """The generators' states as tensors and plain types, which torch loads safely."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "random": random.getstate(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["random"])
