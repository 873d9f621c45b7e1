"""The Trainer of Hugging Face transformers, with DiLoCo between workers.

    python examples/with_trainer.py 0 2 &
    python examples/with_trainer.py 1 2

Each worker is started as if it were alone, so the Trainer neither wraps the model in
DistributedDataParallel nor leaves its checkpoint to rank 0. Trains on sequences that
count in steps of 1 to 4, then once more from a checkpoint in the middle of a round.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)

import lowcomm
from lowcomm.sync import Group, PrivateGroup

NUM_STEPS, SAVE_EVERY = 12, 6


class Counting(Dataset):
    """Other sequences for each worker."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start, step = self._rank + 3 * index, 1 + index % 4
        tokens = (start + step * torch.arange(16)) % 32
        return {"input_ids": tokens, "labels": tokens}


def train(rank: int, group: Group, folder: Path, *, resume: bool) -> list[float]:
    """Trains a small Llama and returns its losses."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )
    opt = lowcomm.DiLoCo(
        model.parameters(), lr=3e-3, sync_every=4, overlap=1, group=group
    )
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(folder),  # a worker's own: all of its state goes there
            max_steps=NUM_STEPS,
            save_steps=SAVE_EVERY,
            logging_steps=1,
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Counting(rank),
        optimizers=(opt, get_cosine_schedule_with_warmup(opt, 2, NUM_STEPS)),
    )
    checkpoint = folder / f"checkpoint-{SAVE_EVERY}"
    trainer.train(resume_from_checkpoint=str(checkpoint) if resume else None)
    opt.finish()  # all workers hold equal parameters: what to evaluate and publish
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def main(rank: int, num_workers: int, address: str, folder: Path) -> None:
    """Trains once, and again from a checkpoint, to the same losses."""
    group = PrivateGroup(address, rank=rank, num_workers=num_workers)
    folder = folder / f"worker-{rank}"
    losses = train(rank, group, folder, resume=False)
    resumed = train(rank, group, folder, resume=True)
    print(f"worker {rank}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"worker {rank}: resumed at step {SAVE_EVERY}, loss {resumed[-1]:.3f}")
    assert resumed == losses


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), "127.0.0.1:29510", Path("out/trainer"))
