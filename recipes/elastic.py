"""Pretrains a small Llama with workers that come and go, each started by hand.

    pip install '.[elastic]'
    python -m lowcomm lighthouse --bind 10.0.0.1:29510            # on one machine
    python recipes/elastic.py --lighthouse 10.0.0.1:29510 --start-with 2 demo
                                                     # on each, now or at any later time

The run is over when all workers together have read what `start-with` of them would read
in `num-steps`. A worker that comes takes the state from another one, and the place in
the data from all; the rate follows what has been read.
"""

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from data import Batches, load_corpus, validation_windows
from methods import build_optimizer
from pretrain import build_model, cosine_at, loss_of, sum_losses
from runs import Config, configure
from torch import nn

from lowcomm.sync import Change, ElasticGroup


class Run:
    """One worker's part of a run.

    Args:
        config: the run.
        windows: of text that all workers read in all.
        group: settings of the `ElasticGroup`, with the lighthouse.
    """

    def __init__(self, config: Config, windows: int, **group: Any) -> None:
        self.config, self.windows = config, windows
        self.corpus = load_corpus(
            config.data, config.vocab_size, config.cache, make=True
        )
        self.batches = Batches(
            self.corpus.train,
            context=config.context,
            batch_size=config.batch_size,
            rank=0,
            world=1,
            seed=config.seed,
        )
        torch.manual_seed(config.seed)
        self.model = build_model(config)
        self.group = ElasticGroup(**group, tell=lambda: self.batches.position)
        self.group.register_change_hook(self.changed)
        self.optimizer = build_optimizer(config, self.model, self.group)
        self.optimizer.register_round_hook(lambda _: self.applied())
        self.is_told = False
        signal.signal(signal.SIGTERM, self.take_notice)

    def take_notice(self, *_: object) -> None:
        self.is_told = True

    @property
    def done(self) -> int:
        """Windows that all workers together have read."""
        epoch, index = self.batches.position
        return epoch * (len(self.corpus.train) // self.config.context) + index

    def train(self) -> bool:
        """To the end; or until it is to stop, when the others go on. Was it the end?"""
        while self.done < self.windows:
            if self.is_to_stop():
                return False
            self.step()
        # Others may have to take some steps more, and are served until they are there.
        self.optimizer.finish(timeout_s=10 * self.group.timeout_s)
        return True

    def step(self) -> None:
        """One inner step, and what it launches or lands."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * self.schedule(self.done / self.windows)
        self.loss = loss_of(self.model, next(self.batches), self.config)
        self.optimizer.zero_grad()
        self.loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()

    def schedule(self, done: float) -> float:
        """The share of the peak rate, of the share of the data that has been read."""
        warmup = max(self.config.warmup_steps / self.config.num_steps, 1e-9)
        if done < warmup:
            return (done + 0.1 * warmup) / (1.1 * warmup)
        left = (done - warmup) / (1 - warmup)
        return cosine_at(min(left, 1))

    def changed(self, change: Change) -> None:
        """All go on from where the furthest was, so that nothing is read twice."""
        position = max(tuple(position) for position in change.told.values())
        place = change.members.index(self.group.rank)
        self.batches.regroup(place, len(change.members), position)

    def applied(self) -> None:
        """Called after each round."""

    def is_to_stop(self) -> bool:
        """Asked before each step: the machine may be taken away."""
        return self.is_told

    def validate(self) -> float:
        """Loss of the global parameters at the end, over the same windows on all."""
        windows = validation_windows(
            self.corpus.validation, self.config.context, self.config.eval_windows
        )
        total, number = sum_losses(self.model, self.optimizer, windows, self.config)
        return (total / number).item()


class Talking(Run):
    """A run that prints a line of JSON now and then."""

    def applied(self) -> None:
        line = {
            "step": self.optimizer.stats.steps,
            "read": round(self.done / self.windows, 4),
            "loss": round(float(self.loss.detach()), 4),
            "workers": self.group.members(),
        }
        print(json.dumps(line), flush=True)

    def changed(self, change: Change) -> None:
        super().changed(change)
        print(json.dumps({"rank": self.group.rank, **change._asdict()}), flush=True)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s --lighthouse HOST:PORT [options] RUN [options of the run]",
        epilog="Runs and their options: those of pretrain.py, see its --help.",
    )
    parser.add_argument("--lighthouse", required=True, help="its address, host:port")
    parser.add_argument("--start-with", type=int, default=1, help="so many begin (1)")
    parser.add_argument("--name", help="of this worker; made up unless given")
    parser.add_argument("--address", help="of this machine, for the others")
    parser.add_argument("--token", help="that all workers share")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="(60)")
    mine, rest = parser.parse_known_args(argv)
    config = configure(rest)
    out = config.out or Path("out", config.name, config.method)
    windows = config.num_steps * config.batch_size * mine.start_with
    run = Talking(config, windows, run=config.name, **vars(mine))
    with run.group:
        if not run.train():
            return  # the others go on
        print(json.dumps({"validation": run.validate()}), flush=True)
        if run.group.rank == min(run.group.members()):
            out.mkdir(parents=True, exist_ok=True)
            torch.save(run.model.state_dict(), out / "model.pt")


if __name__ == "__main__":
    main(sys.argv[1:])
