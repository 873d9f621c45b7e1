"""A worker of recipes/chaos.py: trains, and tells what happens as lines of JSON."""

import json
import logging
import math
import os
import resource
import sys
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from data import Batches, Corpus, load_corpus, validation_windows
from methods import build_optimizer
from pretrain import build_model, loss_of
from runs import Config, compare
from torch import Tensor, nn

import lowcomm
from lowcomm.sync import Change, ElasticGroup

WARMUP_SHARE, FINAL_LR = 0.05, 0.1
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

    @property
    def config(self) -> Config:
        """The run that is disturbed."""
        return replace(
            compare(),
            method=self.method,
            batch_size=4,
            seed=self.seed,
            cache=Path(self.cache),
        )


def corpus_of(config: Config, *, make: bool = False) -> Corpus:
    return load_corpus(config.data, config.vocab_size, config.cache, make=make)


def tell(event: str, **facts: Any) -> None:
    """One line of JSON; the clock is the machine's, the same for all processes."""
    print(json.dumps({"event": event, "at": time.monotonic(), **facts}), flush=True)


class Run:
    """One worker's part of a run."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.config = spec, spec.config
        self.corpus = corpus_of(self.config)
        self.batches = Batches(
            self.corpus.train,
            context=self.config.context,
            batch_size=self.config.batch_size,
            rank=0,
            world=1,
            seed=spec.seed,
        )
        torch.manual_seed(spec.seed)
        self.model = build_model(self.config)
        self.rounds: dict[str, int] = {}
        self.group = ElasticGroup(
            spec.lighthouse,
            name=spec.name,
            run="chaos",
            address=spec.address,
            start_with=spec.workers,
            timeout_s=spec.timeout_s,
            tell=lambda: self.batches.position,
        )
        self.group.register_change_hook(self._changed)
        self.optimizer = build_optimizer(self.config, self.model, self.group)
        self.optimizer.register_round_hook(lambda _: self._tell_rounds())
        self.saves = lowcomm.Checkpointer(
            Path(spec.folder, "checkpoints", spec.name),
            keep=2,
            model=self.model,
            optimizer=self.optimizer,
            batches=self.batches,
        )

    @property
    def done(self) -> int:
        """Windows that all workers together have read."""
        epoch, index = self.batches.position
        return epoch * (len(self.corpus.train) // self.config.context) + index

    def train(self) -> None:
        """To the end, or until an order to leave."""
        orders = Path(self.spec.folder, "orders", self.spec.name)
        tell("in", step=self.optimizer.stats.steps, done=self.done)
        while self.done < self.spec.windows:
            if orders.exists():
                if self._follow(json.loads(orders.read_text())):
                    tell("left")
                    return
                orders.unlink()
            self._step()
            if self.optimizer.stats.steps % SAVE_EVERY == 0:
                self._save()
        self.optimizer.finish(timeout_s=4 * self.spec.timeout_s)
        tell("end", loss=self._validate(), print=fingerprint(self.model.state_dict()))

    def _step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * schedule(self.done / self.spec.windows)
        loss = loss_of(self.model, next(self.batches), self.config)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        time.sleep(self._slow_s)

    _slow_s = 0.0

    def _follow(self, order: dict[str, Any]) -> bool:
        """Does as it is told; is it to leave?"""
        self._slow_s = order.get("slow_s", self._slow_s)
        if "largest_file" in order:
            size = order["largest_file"] or resource.RLIM_INFINITY
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
        return bool(order.get("leave"))

    def _save(self) -> None:
        try:
            self.saves.save(self.optimizer.stats.steps)
        except (OSError, RuntimeError) as error:
            tell("not saved", why=str(error)[:200])

    def _changed(self, change: Change) -> None:
        position = max(tuple(position) for position in change.told.values())
        place = change.members.index(self.group.rank)
        self.batches.regroup(place, len(change.members), position)
        tell("change", members=change.members, rank=self.group.rank)

    def _tell_rounds(self) -> None:
        """Which rounds were applied, and a fingerprint of what all agree on since."""
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
        is_mean = self.spec.method in ("local_sgd", "local_adam", "desloc")
        if is_mean and name == "parameters":
            return fingerprint(self.model.state_dict())
        return None

    @torch.no_grad()
    def _validate(self) -> float:
        windows = validation_windows(
            self.corpus.validation, self.config.context, self.config.eval_windows
        )
        self.model.eval()
        parts = windows.split(self.config.batch_size)
        losses = [float(loss_of(self.model, part, self.config)) for part in parts]
        sizes = [len(part) for part in parts]
        weighted = [a * b for a, b in zip(losses, sizes, strict=True)]
        return sum(weighted) / len(windows)


def schedule(done: float) -> float:
    """The share of the peak rate, of how much of the data has been read."""
    if done < WARMUP_SHARE:
        return (done + 0.01) / (WARMUP_SHARE + 0.01)
    cosine = (1 + math.cos(math.pi * min(done, 1.0))) / 2
    return FINAL_LR + (1 - FINAL_LR) * cosine


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
    run, is_over = Run(spec), False
    try:
        with run.saves:
            run.train()
            is_over = True
    except OSError as error:  # of the last save
        if not is_over:
            raise
        tell("not saved", why=str(error)[:200])
    run.group.close()


if __name__ == "__main__":
    main()
