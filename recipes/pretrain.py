"""Pretrains a small Llama with several workers that seldom talk to each other.

    torchrun --nproc-per-node=2 recipes/pretrain.py demo --method diloco
    python recipes/pretrain.py smoke                    # alone, by the same path

    # saves, and goes on by itself when a worker was lost
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nproc-per-node=2 --max-restarts=3 recipes/pretrain.py demo \\
        --save-every 100 --resume

Runs are in runs.py, methods in methods.py; `--help` lists what can be overridden.
Nothing is downloaded, unless `--data hf:...` asks for it: the model starts from random
weights, the default text is Python's own standard library.
"""

import hashlib
import math
import os
import secrets
import signal
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from baseline import DDPAdamW
from data import Batches, Corpus, load_corpus, validation_windows
from methods import build_inner, build_optimizer
from report import Report
from runs import Config, Launch, configure
from stream import StreamedBatches, StreamedCorpus, is_streamed, load_stream
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from trackers import RunId

import lowcomm

FINAL_LR = 0.1  # of the peak, for a cosine
DECAY_SHARE = 0.1  # of the steps, for wsd
ENDED_BY_SIGTERM = 128 + signal.SIGTERM  # the usual exit status; torchrun starts again

# What may differ when a run is resumed.
MAY_DIFFER = {
    "num_steps", "workers", "init", "data", "cache", "out", "log_every", "eval_every",
    "eval_windows", "save_every", "resume", "wandb", "wandb_per_worker", "tensorboard",
}  # fmt: skip


# -------------------------------------------------------------------------------------
# The parts that a run chooses


def build_model(config: Config) -> nn.Module:
    """A Llama with random weights."""
    if not is_streamed(config.data):
        os.environ["HF_HUB_OFFLINE"] = "1"  # read on import: needs no network
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


def load_weights(config: Config, model: nn.Module) -> None:
    """Takes the weights of the run that this one goes on from."""
    if config.init is None:
        return
    if not config.init.is_file():
        raise ValueError(
            f"init must be a file that exists, got {config.init}. A run writes its "
            "weights to model.pt when it is done."
        )
    model.load_state_dict(torch.load(config.init, weights_only=True))


def build_method(config: Config, model: nn.Module) -> tuple[nn.Module, Any]:
    """What the loop calls forward on, and its optimizer."""
    if config.method != "ddp":
        return model, build_optimizer(config, model)
    network = DistributedDataParallel(model)
    return network, DDPAdamW(network, **build_inner(config, model)[1])


def build_scheduler(config: Config, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Linear warm-up, then what `config.schedule` says."""
    warmup_steps, num_steps = config.warmup_steps, config.num_steps

    def cosine(step: int) -> float:
        done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
        return cosine_at(done)

    def wsd(step: int) -> float:
        done = (step / num_steps - (1 - DECAY_SHARE)) / DECAY_SHARE
        return 1 - math.sqrt(min(1.0, max(0.0, done)))

    after_warmup = {"cosine": cosine, "wsd": wsd}[config.schedule]

    def scale(step: int) -> float:
        return (step + 1) / warmup_steps if step < warmup_steps else after_warmup(step)

    return LambdaLR(optimizer, scale)


def cosine_at(done: float) -> float:
    """From 1 down to `FINAL_LR`, of the share of the way."""
    return FINAL_LR + (1 - FINAL_LR) * (1 + math.cos(math.pi * done)) / 2


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
def sum_losses(
    model: nn.Module, optimizer: Any, windows: Tensor, config: Config
) -> Tensor:
    """The global parameters' losses on this worker's windows: their sum and number."""
    total = torch.zeros(2, dtype=torch.float64, device=windows.device)
    with optimizer.global_parameters():
        model.eval()
        for first in range(0, len(windows), config.batch_size):
            some = windows[first : first + config.batch_size]
            total[0] += loss_of(model, some, config) * len(some)
            total[1] += len(some)
        model.train()
    return total


def evaluate(
    model: nn.Module, optimizer: Any, windows: Tensor, config: Config
) -> float:
    """Validation loss of the global parameters; every worker brings its own windows."""
    total = sum_losses(model, optimizer, windows, config)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# -------------------------------------------------------------------------------------
# Workers and their data


def join_workers() -> torch.device:
    """Joins the workers that torchrun started, or makes a group of one."""
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", local_rank()), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        check_restarts(os.environ)
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def check_restarts(environ: Mapping[str, str]) -> None:
    """Workers that start again must not find addresses of those that have ended.

    https://github.com/pytorch/pytorch/issues/167288
    """
    restarts = int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    if restarts and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ValueError(
            "torchrun must give each start a store of its own, got --max-restarts="
            f"{restarts} with one for all. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
        )


def local_rank() -> int:
    """This worker's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def of_all_workers(value: str) -> list[str]:
    values = [""] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def prepare_corpus(config: Config) -> Corpus | StreamedCorpus:
    """Tokenizes what is new, on one worker of each machine while the others wait."""
    kind = load_stream if is_streamed(config.data) else load_corpus

    def load() -> Corpus | StreamedCorpus:
        return kind(
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


def check_shards_differ(batches: Batches | StreamedBatches) -> None:
    """Workers that read the same data look fine and learn no more than one of them."""
    first = hashlib.sha256(batches.peek().numpy().tobytes()).hexdigest()
    firsts = of_all_workers(first)
    if len(set(firsts)) < len(firsts):
        raise RuntimeError(
            "workers must read different data, got the same first batch on more than "
            f"one: {[digest[:8] for digest in firsts]}, by rank."
        )


# -------------------------------------------------------------------------------------
# What is saved, and when besides every `save_every` steps


class LossSum:
    """The training loss of the steps since the last line of metrics."""

    def __init__(self, device: torch.device) -> None:
        self.value = torch.zeros((), device=device)

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.value.copy_(state["value"])


class Notice:
    """SIGTERM, which comes some time before the machine is taken away."""

    def __init__(self) -> None:
        self._came = False
        signal.signal(signal.SIGTERM, self._take)

    def _take(self, *_: object) -> None:
        self._came = True

    def came_to_anybody(self) -> bool:
        """All workers ask at the same steps, and so save the same one."""
        came = torch.tensor(int(self._came))
        dist.all_reduce(came, dist.ReduceOp.MAX)
        return bool(came)


def check_is_new(directory: Path) -> None:
    steps = sorted(path.name for path in directory.glob("step-*"))
    if steps:
        raise ValueError(
            f"out must hold no checkpoints of an earlier run, got {steps[-1]} in "
            f"{directory}. Go on from it with --resume, or choose another --out."
        )


def settings(config: Config, corpus: Corpus | StreamedCorpus) -> dict[str, Any]:
    """What must be the same when the run is resumed."""
    same = {k: v for k, v in asdict(config).items() if k not in MAY_DIFFER}
    return {"corpus": corpus.key, **same}


# -------------------------------------------------------------------------------------
# The loop


def train(config: Launch, device: torch.device) -> bool:
    """Trains to the end, or until SIGTERM; says whether it was the end."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0 and config.workers not in (None, world):
        print(f"{config.name} is for {config.workers} workers, got {world}.")
    out = config.out or Path("out", config.name, config.method)
    if not config.resume:
        check_is_new(out / "checkpoints")
    notice = Notice() if config.save_every else None

    corpus = prepare_corpus(config)
    batches = corpus.batches(
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
    model = build_model(config)
    load_weights(config, model)
    model.to(device)
    network, optimizer = build_method(config, model)
    scheduler = build_scheduler(config, optimizer)
    torch.manual_seed(config.seed + 1 + rank)  # equal weights, but noise of its own

    loss_sum = LossSum(device)
    run_id = RunId(of_all_workers(secrets.token_hex(4))[0])
    checkpoints = lowcomm.Checkpointer(
        out / "checkpoints",
        config=settings(config, corpus),
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=batches,
        loss=loss_sum,
        run_id=run_id,
    )
    start = checkpoints.load() if config.resume else 0

    report = Report(
        out,
        config,
        rank=rank,
        workers=world,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        start=start,
        run_id=run_id.value,
        stats=optimizer.stats,
    )
    with report, checkpoints:
        for step in range(start + 1, config.num_steps + 1):
            for micro_step in range(1, config.accumulate + 1):
                windows = next(batches).to(device)
                last = micro_step == config.accumulate
                with nullcontext() if last else without_exchange(network):
                    loss = loss_of(network, windows, config) / config.accumulate
                    loss.backward()
                loss_sum.value += loss.detach()
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
                train_loss = loss_sum.value / num_steps
                loss_sum.value.zero_()
                val_loss = None
                if done or (config.eval_every and step % config.eval_every == 0):
                    val_loss = evaluate(model, optimizer, validation, config)
                report.line(step, train_loss, val_loss, lr, optimizer.stats)
            asks = notice is not None and step % config.sync_every == 0
            stops = asks and notice.came_to_anybody()
            if stops or (config.save_every and step % config.save_every == 0):
                checkpoints.save(step)
            if stops:
                return done
    if rank == 0:
        torch.save(model.state_dict(), out / "model.pt")
    return True


def main() -> None:
    config = configure(sys.argv[1:], quiet=os.environ.get("RANK", "0") != "0")
    is_done = train(config, join_workers())
    dist.barrier()  # torchrun ends the others soon after the first one has ended
    dist.destroy_process_group()
    if not is_done:
        sys.exit(ENDED_BY_SIGTERM)


if __name__ == "__main__":
    main()
