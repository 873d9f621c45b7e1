"""Pretrains a small Llama with several workers that seldom talk to each other.

    torchrun --nproc-per-node=2 recipes/pretrain.py demo --method diloco
    python recipes/pretrain.py smoke                    # alone, by the same path

Runs are in runs.py; `--help` lists what can be overridden. Nothing is downloaded: the
model starts from random weights, the default text is Python's own standard library.
"""

import hashlib
import math
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from baseline import DDPAdamW
from checkpoints import Checkpoints
from data import Batches, Corpus, load_corpus, validation_windows
from report import Report
from runs import Config, configure
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import lowcomm

FINAL_LR = 0.1  # of the peak


# -------------------------------------------------------------------------------------
# The parts that a run chooses


def build_model(config: Config) -> nn.Module:
    """A Llama with random weights."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read on import: nothing here needs the network
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.hidden_size * 8 // 3,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            max_position_embeddings=config.context,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )


def build_method(config: Config, model: nn.Module) -> tuple[nn.Module, Any]:
    """What the loop calls forward on, and its optimizer: AdamW in all methods."""
    adamw = {
        "lr": config.lr,
        "betas": (0.9, 0.95),
        "weight_decay": config.weight_decay,
        "fused": True,
    }
    match config.method:
        case "ddp":
            network = DistributedDataParallel(model)
            return network, DDPAdamW(network, **adamw)
        case "local_sgd":
            return model, lowcomm.LocalSGD(
                model.parameters(), sync_every=config.sync_every, **adamw
            )
        case "diloco":
            return model, lowcomm.DiLoCo(
                model.parameters(),
                sync_every=config.sync_every,
                outer_lr=config.outer_lr,
                outer_momentum=config.outer_momentum,
                **adamw,
            )


def build_scheduler(config: Config, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Linear warm-up, then a cosine down to `FINAL_LR` of the peak."""

    def scale(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        decay_steps = max(1, config.num_steps - config.warmup_steps)
        done = (step - config.warmup_steps) / decay_steps
        return FINAL_LR + (1 - FINAL_LR) * (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, scale)


# -------------------------------------------------------------------------------------
# The parts of a step


def loss_of(network: nn.Module, windows: Tensor, config: Config) -> Tensor:
    """Mean cross entropy of each token of the windows but the first."""
    inputs, targets = windows[:, :-1], windows[:, 1:]
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=config.bf16):
        logits = network(input_ids=inputs).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def without_exchange(network: nn.Module) -> AbstractContextManager[None]:
    """For all backward passes of a step but the last: DDP would average after each."""
    if isinstance(network, DistributedDataParallel):
        return network.no_sync()
    return nullcontext()


@torch.no_grad()
def evaluate(
    model: nn.Module, optimizer: Any, windows: Tensor, config: Config
) -> float:
    """Validation loss of the global parameters; every worker brings its own windows."""
    total = torch.zeros(2, dtype=torch.float64, device=windows.device)
    with optimizer.global_parameters():
        model.eval()
        for first in range(0, len(windows), config.batch_size):
            some = windows[first : first + config.batch_size]
            total[0] += loss_of(model, some, config) * len(some)
            total[1] += len(some)
        model.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def mean_over_workers(value: Tensor) -> float:
    """For the log, four bytes; no part of what a method exchanges."""
    value = value.clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


# -------------------------------------------------------------------------------------
# Workers and their data


def join_workers() -> torch.device:
    """Joins the workers that torchrun started, or makes a group of one."""
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", local_rank()), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def local_rank() -> int:
    """This worker's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def of_all_workers(value: str) -> list[str]:
    values = [""] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def prepare_corpus(config: Config) -> Corpus:
    """Tokenizes what is new, on one worker of each machine while the others wait."""

    def load() -> Corpus:
        return load_corpus(
            config.data, config.vocab_size, config.cache, make=local_rank() == 0
        )

    if local_rank() == 0:
        corpus = load()
    dist.barrier()
    if local_rank() != 0:
        corpus = load()
    keys = of_all_workers(corpus.key)
    if len(set(keys)) > 1:
        raise ValueError(
            f"data must be the same on every worker, got the corpora {keys}, by rank. "
            "Copy one --data to all machines: Python's own sources vary with versions."
        )
    return corpus


def check_shards_differ(batches: Batches) -> None:
    """Workers that read the same data look fine and learn no more than one of them."""
    first = hashlib.sha256(batches.peek().numpy().tobytes()).hexdigest()
    firsts = of_all_workers(first)
    if len(set(firsts)) < len(firsts):
        raise RuntimeError(
            "workers must read different data, got the same first batch on more than "
            f"one: {[digest[:8] for digest in firsts]}, by rank."
        )


# -------------------------------------------------------------------------------------
# The loop


def train(config: Config, device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    out = config.out or Path("out", config.name, config.method)
    checkpoints = Checkpoints(out / "checkpoints")
    start = checkpoints.newest
    if start and not config.resume:
        raise ValueError(
            f"out must hold no checkpoints of an earlier run, got one of step {start} "
            f"in {out}. Go on from it with --resume, or choose another --out."
        )

    corpus = prepare_corpus(config)
    batches = Batches(
        corpus.train,
        context=config.context,
        batch_size=config.batch_size,
        rank=rank,
        world=world,
        seed=config.seed,
    )
    check_shards_differ(batches)
    validation = validation_windows(
        corpus.validation, config.context, config.eval_windows
    )[rank::world].to(device)

    torch.manual_seed(config.seed)
    model = build_model(config).to(device)
    network, optimizer = build_method(config, model)
    scheduler = build_scheduler(config, optimizer)
    torch.manual_seed(config.seed + 1 + rank)  # equal weights, but noise of its own

    loss_sum = torch.zeros((), device=device)  # of the steps since the last metrics
    parts = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "batches": batches,
    }
    if start:
        saved = checkpoints.load()
        loss_sum.copy_(saved["loss_sum"])
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    report = None
    if rank == 0:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        report = Report(out, config, workers=world, parameters=parameters, start=start)
    with report or nullcontext():
        for step in range(start + 1, config.num_steps + 1):
            for micro_step in range(1, config.accumulate + 1):
                windows = next(batches).to(device)
                last = micro_step == config.accumulate
                with nullcontext() if last else without_exchange(network):
                    loss = loss_of(network, windows, config) / config.accumulate
                    loss.backward()
                loss_sum += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            lr = scheduler.get_last_lr()[0]
            scheduler.step()

            done = step == config.num_steps
            if done:
                optimizer.finish()
            if done or step % config.log_every == 0:
                num_steps = (step - 1) % config.log_every + 1  # since the last metrics
                train_loss = mean_over_workers(loss_sum / num_steps)
                loss_sum.zero_()
                val_loss = None
                if done or (config.eval_every and step % config.eval_every == 0):
                    val_loss = evaluate(model, optimizer, validation, config)
                if report:
                    report.line(step, train_loss, val_loss, lr, optimizer.stats)
            if config.save_every and step % config.save_every == 0:
                state = {name: part.state_dict() for name, part in parts.items()}
                checkpoints.save(step, {"loss_sum": loss_sum, **state})


def main() -> None:
    config = configure(sys.argv[1:], quiet=os.environ.get("RANK", "0") != "0")
    train(config, join_workers())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
