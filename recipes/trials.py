"""Training runs with all workers in one process, each kept in a file of its own.

A trial is a run's settings and the losses and bytes that it came to. Its file is named
by a hash of the settings, so a trial is trained once, whoever asks for it, and a killed
comparison goes on where it was: only the trial under way is lost.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from data import Batches, Corpus, validation_windows
from methods import build_optimizer
from pretrain import build_model, build_scheduler, loss_of, sum_losses
from runs import Config, Method
from torch import nn

import lowcomm
from lowcomm.plan import mean_bytes

FORMAT = 1  # of a file; raise it when the same settings come to other numbers

# What changes no number of a trial.
SAYS_NOTHING = {
    "name", "init", "data", "cache", "out", "log_every", "save_every", "resume",
}  # fmt: skip
# What says something to these methods alone.
ROUNDS = set(get_args(Method)) - {"ddp"}
OUTER = {"diloco", "streaming", "eager", "noloco", "slowmo"}
SAYS_TO = {
    "sync_every": ROUNDS,
    "overlap": ROUNDS,
    "codec": ROUNDS,
    "outer_lr": OUTER,
    "outer_momentum": OUTER,
    "fragments": {"streaming"},
    "qsr": {"local_sgd"},
    "first_periods": {"desloc"},
    "second_periods": {"desloc"},
    "slow_beta": {"mtdao"},
    "omega": {"mtdao"},
}
DEFAULTS = {field.name: field.default for field in fields(Config)}


class Point(NamedTuple):
    """Where a trial was at a validation."""

    step: int
    tokens: int  # of all workers together
    bytes_sent: float  # by each worker, on average
    val_loss: float


class Trial(NamedTuple):
    """What has become of a run."""

    config: Config
    parameters: int
    points: list[Point]

    @property
    def final(self) -> Point:
        return self.points[-1]


# -------------------------------------------------------------------------------------
# One trial


class Seen(NamedTuple):
    """What one worker has seen of a validation."""

    step: int
    bytes_sent: int
    loss_sum: float
    num_windows: float


def train(config: Config, corpus: Corpus) -> Trial:
    """Trains `config.workers` simulated workers."""
    workers = config.workers or 1
    # The mean of the workers' gradients is the gradient of all their windows: to train
    # alone on these is DDP, without its network.
    num = 1 if config.method == "ddp" else workers
    seen = lowcomm.simulate(partial(train_worker, config, corpus, num), num)
    parameters = sum(p.numel() for p in build_model(config).parameters())
    step_tokens = workers * config.batch_size * config.context
    points = []
    for of_workers in zip(*seen, strict=True):
        step = of_workers[0].step
        bytes_sent = sum(s.bytes_sent for s in of_workers) / num
        if config.method == "ddp":
            bytes_sent = step * mean_bytes(parameters, workers)
        num_windows = sum(s.num_windows for s in of_workers)
        val_loss = sum(s.loss_sum for s in of_workers) / num_windows
        points.append(Point(step, step * step_tokens, bytes_sent, val_loss))
    return Trial(config, parameters, points)


def train_worker(
    config: Config, corpus: Corpus, num: int, rank: int, group: Any
) -> list[Seen]:
    """pretrain.py's loop without its launch, checkpoints and metrics."""
    batches = Batches(
        corpus.train,
        context=config.context,
        batch_size=config.batch_size * (config.workers or 1) // num,
        rank=rank,
        world=num,
        seed=config.seed,
    )
    validation = validation_windows(
        corpus.validation, config.context, config.eval_windows
    )[rank::num]
    torch.manual_seed(config.seed)
    model = build_model(config)
    alone = replace(config, method="local_sgd", qsr=0.0, codec=None, overlap=None)
    optimizer = build_optimizer(alone if config.method == "ddp" else config, model)
    scheduler = build_scheduler(config, optimizer)
    seen = []
    for step in range(1, config.num_steps + 1):
        loss_of(model, next(batches), config).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        done = step == config.num_steps
        if done:
            optimizer.finish()
        if done or (config.eval_every and step % config.eval_every == 0):
            total = sum_losses(model, optimizer, validation, config).tolist()
            seen.append(Seen(step, optimizer.stats.bytes_sent, *total))
    return seen


# -------------------------------------------------------------------------------------
# All that there are


def settings_of(config: Config) -> dict[str, Any]:
    """What the numbers of a trial depend on, besides the corpus."""
    idle = {n: DEFAULTS[n] for n, who in SAYS_TO.items() if config.method not in who}
    settings = asdict(replace(config, **idle))
    return {k: v for k, v in settings.items() if k not in SAYS_NOTHING}


@dataclass
class Store:
    """Trials by their settings; trains what is not there, while there is time.

    Args:
        folder: where the files are.
        corpus: what all trials are trained on.
        trains: whether a trial that is not there is trained; else it is None.
        deadline: of the clock `time.monotonic`, after which no trial is begun.
    """

    folder: Path
    corpus: Corpus
    trains: bool = True
    deadline: float = float("inf")
    missing: dict[Path, Config] = field(default_factory=dict)

    def trial(self, config: Config) -> Trial | None:
        """The trial of a configuration; None if it is not there, and is not made."""
        file = self._file({"corpus": self.corpus.key, **settings_of(config)})
        kept = self._read(file)
        if kept is not None:
            points = [Point(*point) for point in kept["points"]]
            return Trial(config, kept["parameters"], points)
        self.missing.setdefault(file, config)
        if not self._may_begin():
            return None
        began = time.process_time()  # of the core: others may be on the machine
        trial = train(config, self.corpus)
        seconds = time.process_time() - began
        kept = {**trial._asdict(), "config": settings_of(config), "seconds": seconds}
        self._write(file, kept)
        loss = trial.final.val_loss
        print(f"{describe(config)}: {loss:.4f} after {seconds:.0f} s", flush=True)
        return trial

    def toy(self, toy: Callable[..., Any], **settings: Any) -> Any:
        """What a small experiment with these settings returns, in JSON's types."""
        file = self._file({"toy": toy.__name__, **settings})
        kept = self._read(file)
        if kept is None and self._may_begin():
            kept = {"settings": settings, "result": toy(**settings)}
            self._write(file, kept)
        return None if kept is None else kept["result"]

    def _may_begin(self) -> bool:
        return self.trains and time.monotonic() < self.deadline

    def _file(self, settings: dict[str, Any]) -> Path:
        text = json.dumps({"format": FORMAT, **settings}, sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def _read(self, file: Path) -> Any:
        if not file.exists():
            return None
        return json.loads(file.read_text(encoding="utf-8"))

    def _write(self, file: Path, kept: dict[str, Any]) -> None:
        """A file is whole or absent."""
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}.unfinished")
        unfinished.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, file)
        self.missing.pop(file, None)


def describe(config: Config) -> str:
    """A trial in one line."""
    told = ("workers", "sync_every", "codec", "qsr", "lr", "outer_lr", "seed")
    if config.method == "ddp":
        told = ("workers", "lr", "seed")
    if config.method == "desloc":
        told += ("first_periods", "second_periods")
    values = {name: getattr(config, name) for name in told}
    return config.method + "".join(
        f" {name}={value}" for name, value in values.items() if value or name == "seed"
    )
