"""The runs: one function each, returning a complete configuration.

`python recipes/pretrain.py NAME` launches one of them, and every field is also a flag
that overrides it: `demo --method ddp --num-steps 200`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro
from extras import is_installed

Method = Literal[
    "ddp", "local_sgd", "local_adam", "diloco", "streaming", "eager", "noloco",
    "desloc", "mtdao", "slowmo",
]  # fmt: skip


@dataclass(frozen=True)
class Config:
    """One run of recipes/pretrain.py."""

    name: tyro.conf.Suppress[str]
    """Names the run's directory; not a flag."""

    # --- Method: how the workers come to one model

    method: Method = "diloco"
    """ddp averages gradients in each step, the others something every
    `sync_every`. The settings of methods say nothing to ddp."""
    sync_every: int = 20
    """Steps between two exchanges of the parameters, H in the papers."""
    outer_lr: float | None = None
    """Outer learning rate of diloco, streaming, eager, noloco; slow one of slowmo.
    None: the method's own, 0.7, or 1 for slowmo."""
    outer_momentum: float | None = None
    """Outer momentum of the same. None: 0.9, or 0.5 for noloco and slowmo."""
    fragments: int = 4
    """Parts in which streaming exchanges the parameters."""
    overlap: int | None = None
    """Steps from launching an exchange to applying its result.
    None: a tenth of `sync_every` for streaming, 0 for the others."""
    codec: Literal["bf16", "int8", "int4", "topk"] | None = None
    """In which the parameters, or their displacement, are sent. None: float32."""
    qsr: float = 0.0
    """local_sgd: above 0, rounds grow to (qsr / learning rate)^2 steps."""
    first_periods: int = 3
    """Of desloc: first moments are averaged every so many periods of the parameters.
    With AdamW and batches that leave much of a gradient at zero, 4 for these and the
    second ones; see docs/methods/desloc.md."""
    second_periods: int = 6
    """The same of its second moments."""
    slow_beta: float = 0.999
    """Decay of mtdao's momentum, in the place of `beta1`."""
    omega: float = 0.9
    """Weight of that momentum in a step; the fresh gradient has the rest."""
    workers: int | None = None
    """Workers that these settings are for; torchrun starts them. None: any number."""

    # --- Data

    data: str | None = None
    """A text, JSON-lines (.jsonl) or parquet file, or a directory of such; text is at
    key "text". Or hf:NAME:CONFIG:SPLIT, a dataset that is read while it is trained on,
    see stream.py. None: the sources of the running Python's standard library."""
    vocab_size: int = 1024
    """Tokens of the byte-level BPE that is trained on the data."""
    context: int = 128
    """Tokens a window predicts."""
    cache: Path = Path("out/cache")
    """Where tokenizers and tokens are kept between runs."""

    # --- Model: a Llama with random weights

    hidden_size: int = 128
    """Width of the model; its feed-forward layers are 8/3 as wide."""
    num_layers: int = 2
    """Transformer blocks."""
    num_heads: int = 4
    """Attention heads of each block."""

    # --- Training

    num_steps: int = 1000
    """Optimizer steps of each worker."""
    init: Path | None = None
    """model.pt of another run, to start from its weights."""
    batch_size: int = 8
    """Windows in one forward pass of one worker."""
    accumulate: int = 1
    """Forward passes whose gradients make one step."""
    inner: Literal["adamw", "adopt"] = "adamw"
    """What each worker trains with by itself."""
    lr: float = 3e-3
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment; ADOPT takes 0.9999."""
    warmup_steps: int = 50
    """Steps of linear warm-up."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up: cosine goes to a tenth of the peak; wsd stays there, and goes
    to zero in the last tenth of the steps."""
    weight_decay: float = 0.1
    """Weight decay."""
    clip_norm: float = 1.0
    """Largest norm of a worker's gradient."""
    bf16: bool = False
    """Compute in bfloat16 by autocast; weights and exchanges stay float32."""
    seed: int = 0
    """Seed of the weights and of the order of the data."""

    # --- Output

    out: Path | None = None
    """Where metrics and checkpoints go. None: out/<name>/<method>."""
    log_every: int = 20
    """Steps between two lines of metrics."""
    eval_every: int = 100
    """Steps between two validations, taken at lines of metrics; 0: only the last."""
    eval_windows: int = 256
    """Windows of one validation, over all workers."""
    save_every: int = 0
    """Steps between two checkpoints; 0: none."""
    resume: bool = False
    """Go on from the newest checkpoint that every worker has."""

    def __post_init__(self) -> None:
        at_least_one = (
            "sync_every", "fragments", "context", "hidden_size", "num_layers",
            "num_heads", "num_steps", "batch_size", "accumulate", "log_every",
            "eval_windows",
        )  # fmt: skip
        for name in at_least_one:
            if getattr(self, name) < 1:
                value = getattr(self, name)
                raise ValueError(f"{name} must be at least 1, got {name}={value}.")
        if self.eval_every % self.log_every:
            raise ValueError(
                "eval_every must be a multiple of log_every, got "
                f"eval_every={self.eval_every} with log_every={self.log_every}. A "
                "validation is part of a line of metrics."
            )
        if self.method == "ddp" and self.inner != "adamw":
            raise ValueError(
                f"inner must be adamw with ddp, got inner={self.inner!r}. The baseline "
                "is AdamW's: give --inner adamw, and its rate and decays."
            )


@dataclass(frozen=True)
class Launch(Config):
    """A run as it is launched: also where its metrics are shown.

    Apart from `Config`, as it says nothing about what is trained.
    """

    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases: one run, of worker 0, in the project lowcomm or WANDB_PROJECT.
    offline writes it to `out`/wandb, and `wandb sync` sends it. online does the same
    where nobody is logged in."""
    wandb_per_worker: bool = False
    """A run for each worker with its own loss, bytes and waiting, in one group."""
    tensorboard: bool = False
    """TensorBoard, to `out`/tensorboard."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wandb != "off" and not is_installed("wandb"):
            raise ValueError(
                f"wandb must be off without the package wandb, got {self.wandb}. "
                "Install it: pip install wandb."
            )
        if self.tensorboard and not is_installed("tensorboard"):
            raise ValueError(
                "tensorboard must be off without the package tensorboard, got "
                "tensorboard=True. Install it: pip install tensorboard."
            )
        if self.wandb_per_worker and self.wandb == "off":
            raise ValueError(
                "wandb must be offline or online with wandb_per_worker, got off. Give "
                "--wandb offline."
            )


def smoke() -> Config:
    """Everything once, in seconds."""
    return Config(
        "smoke",
        sync_every=10,
        vocab_size=300,
        context=32,
        hidden_size=32,
        num_heads=2,
        num_steps=60,
        batch_size=4,
        warmup_steps=10,
        log_every=5,
        eval_every=20,
        eval_windows=32,
    )


def demo() -> Config:
    """What recipes/demo.py trains, with DDP and with DiLoCo; minutes on two cores."""
    # Outer values of a short run, not the paper's. Validation losses with two workers:
    #
    #   DDP                           3.182     at a learning rate of 3e-3: 3.163
    #   DiLoCo, H = 20, 0.7 / 0.3     3.317
    #                   0.7 / 0.6     3.272     H = 40: 3.293
    #                   0.7 / 0.9     3.585     the paper's
    return Config(
        "demo",
        sync_every=20,
        outer_lr=0.7,
        outer_momentum=0.6,
        num_steps=1200,
        batch_size=4,
        warmup_steps=100,
        lr=2e-3,
        log_every=40,
        eval_every=120,
    )


def compare() -> Config:
    """What recipes/compare.py trains many times: 0.14 million parameters, a minute."""
    return Config(
        "compare",
        workers=4,
        sync_every=10,
        outer_momentum=0.3,  # for 60 rounds; the papers' 0.9 needs more of them
        slow_beta=0.95,  # half of it is new after a round; 0.99 loses half a nat
        vocab_size=640,
        context=64,
        hidden_size=64,
        num_heads=2,
        num_steps=600,
        lr=1e-2,
        log_every=60,
        eval_every=60,
        eval_windows=512,
    )


def stdlib_small() -> Config:
    """3.7 million parameters, exchanged every 50 steps; about an hour on two cores."""
    return Config(
        "stdlib_small",
        sync_every=50,
        outer_lr=0.7,
        outer_momentum=0.6,
        vocab_size=2048,
        context=256,
        hidden_size=256,
        num_layers=4,
        num_heads=8,
        num_steps=2000,
        warmup_steps=200,
        lr=1e-3,
        eval_every=200,
        save_every=100,
    )


# -------------------------------------------------------------------------------------
# The papers' runs, each worker a GPU
#
# Methods, periods, rates, decays, warm-up and batches are the papers'. Shapes of models
# and lengths are ours where docs/recipes.md says so. Each has a sibling for a CPU, with
# `-tiny` behind its name.


ON_GPUS: dict[str, Any] = {"bf16": True, "eval_every": 500, "save_every": 1000}


def diloco_150m() -> Config:
    """DiLoCo: 8 workers, rounds of 500 steps; begin from 24 000 steps of ddp."""
    return Config(
        "diloco-150m",
        workers=8,
        method="diloco",
        sync_every=500,
        outer_lr=0.7,
        outer_momentum=0.9,
        vocab_size=32_000,
        context=1024,
        hidden_size=896,
        num_layers=12,
        num_heads=16,
        batch_size=16,
        accumulate=32,
        num_steps=88_000,
        lr=4e-4,
        warmup_steps=1000,
        **ON_GPUS,
    )


def opendiloco_150m() -> Config:
    """OpenDiLoCo: DiLoCo's settings from random weights, and half of the bytes."""
    return replace(
        diloco_150m(), name="opendiloco-150m", codec="bf16", hidden_size=1024
    )


def opendiloco_1b() -> Config:
    """OpenDiLoCo: 4 workers, rounds of 125 steps, 2 million tokens a worker."""
    return replace(
        opendiloco_150m(),
        name="opendiloco-1b",
        workers=4,
        sync_every=125,
        hidden_size=2048,
        num_layers=22,
        num_heads=32,
        accumulate=128,
    )


def streaming_1b() -> Config:
    """Streaming DiLoCo: 8 fragments of three layers, 4 bits, rounds of 100 steps."""
    return Config(
        "streaming-1b",
        workers=2,
        method="streaming",
        sync_every=100,
        fragments=8,
        overlap=5,
        codec="int4",
        outer_lr=0.4,
        outer_momentum=0.9,
        vocab_size=32_000,
        context=2048,
        hidden_size=2048,
        num_layers=24,
        num_heads=16,
        batch_size=8,
        accumulate=32,
        num_steps=24_000,
        lr=2.5e-4,
        beta2=0.99,
        warmup_steps=1000,
        **ON_GPUS,
    )


def noloco_small() -> Config:
    """NoLoCo: 8 workers in pairs, 125 million parameters, rounds of 50 steps."""
    return Config(
        "noloco-small",
        workers=8,
        method="noloco",
        sync_every=50,
        outer_lr=0.7,
        outer_momentum=0.5,
        vocab_size=50_000,
        context=1024,
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        batch_size=16,
        accumulate=4,
        num_steps=25_000,
        lr=6e-4,
        warmup_steps=1000,
        **ON_GPUS,
    )


def noloco_medium() -> Config:
    """NoLoCo: the same with 1.3 billion parameters and a million tokens in a batch."""
    return replace(
        noloco_small(),
        name="noloco-medium",
        hidden_size=2048,
        num_layers=24,
        num_heads=32,
        accumulate=8,
        lr=2e-4,
    )


def desloc_135m() -> Config:
    """DES-LOC: 4 workers, ADOPT, periods of 32, 96 and 192 steps, 6.4 B tokens."""
    return Config(
        "desloc-135m",
        workers=4,
        method="desloc",
        sync_every=32,
        vocab_size=49_152,
        context=2048,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        batch_size=16,
        accumulate=16,
        num_steps=3072,
        inner="adopt",
        lr=2.1e-3,
        beta1=0.95,
        beta2=0.9999,
        warmup_steps=512,
        schedule="wsd",
        weight_decay=0.0,
        **ON_GPUS,
    )


def desloc_720m() -> Config:
    """DES-LOC: the same with 720 million parameters."""
    return replace(
        desloc_135m(),
        name="desloc-720m",
        vocab_size=32_000,
        hidden_size=1536,
        num_layers=24,
        num_heads=12,
        num_steps=8192,
        warmup_steps=2048,
    )


def desloc_1700m() -> Config:
    """DES-LOC: 40 B tokens with the least traffic, periods of 256, 768 and 1536."""
    return replace(
        desloc_135m(),
        name="desloc-1.7b",
        sync_every=256,
        hidden_size=2048,
        num_layers=32,
        num_heads=32,
        num_steps=19_200,
        warmup_steps=2048,
    )


def mtdao_16m() -> Config:
    """MT-DAO: 4 workers, ADOPT with a momentum of 0.999, everything every 32 steps."""
    return Config(
        "mtdao-16m",
        workers=4,
        method="mtdao",
        sync_every=32,
        slow_beta=0.999,
        omega=0.9,
        vocab_size=32_000,
        context=2048,
        hidden_size=256,
        num_layers=10,
        num_heads=4,
        batch_size=16,
        accumulate=16,
        num_steps=8192,
        inner="adopt",
        lr=2e-3,
        beta2=0.9999,
        warmup_steps=2048,
        schedule="wsd",
        weight_decay=0.0,
        **ON_GPUS,
    )


def mtdao_125m() -> Config:
    """MT-DAO: the same with 125 million parameters."""
    return replace(
        mtdao_16m(),
        name="mtdao-125m",
        vocab_size=50_000,
        hidden_size=768,
        num_layers=12,
        num_heads=12,
    )


def mtdao_720m() -> Config:
    """MT-DAO: the same with 720 million parameters."""
    return replace(
        mtdao_16m(),
        name="mtdao-720m",
        hidden_size=1536,
        num_layers=24,
        num_heads=12,
    )


def intellect_1() -> Config:
    """INTELLECT-1's rounds, 100 steps and int8, for a model that one GPU holds."""
    return replace(
        opendiloco_1b(),
        name="intellect-1",
        workers=8,
        sync_every=100,
        codec="int8",
        context=2048,
        batch_size=8,
        accumulate=16,
        num_steps=40_000,
    )


TINY_STEPS = 800  # about; and rounds are of two steps at least


def tiny(run: Config) -> Config:
    """A run's sibling for minutes on a CPU: the same method, workers and rounds.

    There are as many rounds, and warm-up is the same part of the run. A slow momentum
    keeps as much of itself over a round. Model, windows and inner rate are `compare`'s.
    """
    rounds = run.num_steps // run.sync_every
    every = max(2, TINY_STEPS // rounds)
    shorter = every / run.sync_every
    kept = (
        "workers", "method", "outer_lr", "outer_momentum", "fragments", "codec",
        "omega", "inner", "beta1", "beta2", "schedule", "weight_decay", "clip_norm",
    )  # fmt: skip
    return replace(
        compare(),
        name=f"{run.name}-tiny",
        sync_every=every,
        num_steps=every * rounds,
        warmup_steps=max(1, round(run.warmup_steps * shorter)),
        overlap=None if run.overlap is None else max(1, round(run.overlap * shorter)),
        slow_beta=run.slow_beta ** (1 / shorter),
        log_every=20,
        eval_every=100,
        **{name: getattr(run, name) for name in kept},
    )


PAPERS = (
    diloco_150m, opendiloco_150m, opendiloco_1b, streaming_1b, noloco_small,
    noloco_medium, desloc_135m, desloc_720m, desloc_1700m, mtdao_16m, mtdao_125m,
    mtdao_720m, intellect_1,
)  # fmt: skip


def all_runs() -> dict[str, tuple[str, Launch]]:
    """Descriptions and configurations of all runs, by name."""
    runs: dict[str, tuple[str, Launch]] = {}
    for run in (smoke, demo, compare, stdlib_small, *PAPERS):
        config, description = run(), run.__doc__ or ""
        runs[config.name] = description, Launch(**vars(config))
        if run in PAPERS:
            small = Launch(**vars(tiny(config)))
            runs[small.name] = f"{config.name} for minutes on a CPU.", small
    return runs


def count_parameters(config: Config) -> int:
    """Values of the Llama that pretrain.py builds: embeddings, blocks, norms."""
    width, inside = config.hidden_size, config.hidden_size * 8 // 3
    block = 4 * width**2 + 3 * width * inside + 2 * width
    return config.vocab_size * width + config.num_layers * block + width


def configure(arguments: Sequence[str], *, quiet: bool = False) -> Launch:
    """The configuration that a command line asks for: a run's name, then overrides.

    Args:
        arguments: what follows the script's name on the command line.
        quiet: print neither help nor errors; another worker does.
    """
    return tyro.extras.overridable_config_cli(
        all_runs(), prog="pretrain.py", args=arguments, console_outputs=not quiet
    )
