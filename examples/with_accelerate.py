"""Hugging Face Accelerate, with DiLoCo between workers.

    python examples/with_accelerate.py 0 2 &
    python examples/with_accelerate.py 1 2

Each worker is started as if it were alone, not with `accelerate launch`: `prepare` then
neither wraps the model in DistributedDataParallel nor divides the data, and a scheduler
takes one step for each of the optimizer's. Trains a regression, then once more from a
checkpoint in the middle of a round.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import lowcomm
from lowcomm.sync import Group, PrivateGroup

NUM_STEPS, SAVE_AT = 12, 6
BATCHES_PER_STEP = 2


def data_of(rank: int) -> TensorDataset:
    """Other samples of one function for each worker."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(8 * NUM_STEPS * BATCHES_PER_STEP, 4, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


def train(rank: int, group: Group, folder: Path, *, resume: bool) -> list[float]:
    """Trains a small network and returns its losses."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=BATCHES_PER_STEP)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    diloco = lowcomm.DiLoCo(
        model.parameters(), lr=1e-2, sync_every=4, overlap=1, group=group
    )
    model, opt, scheduler, loader = accelerator.prepare(
        model,
        diloco,
        CosineAnnealingLR(diloco, NUM_STEPS),
        DataLoader(data_of(rank), batch_size=8),
    )
    if resume:
        accelerator.load_state(str(folder))
        done = BATCHES_PER_STEP * diloco.stats.steps
        loader = accelerator.skip_first_batches(loader, done)
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            opt.step()
            scheduler.step()
            opt.zero_grad()
        losses.append(loss.item())
        if accelerator.sync_gradients and diloco.stats.steps == SAVE_AT:
            accelerator.save_state(str(folder))
    diloco.finish()  # all workers hold equal parameters: what to evaluate and publish
    return losses


def main(rank: int, num_workers: int, address: str, folder: Path) -> None:
    """Trains once, and again from a checkpoint, to the same losses."""
    group = PrivateGroup(address, rank=rank, num_workers=num_workers)
    folder = folder / f"worker-{rank}"
    losses = train(rank, group, folder, resume=False)
    resumed = train(rank, group, folder, resume=True)
    print(f"worker {rank}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"worker {rank}: resumed at step {SAVE_AT}, loss {resumed[-1]:.3f}")
    assert resumed == losses[BATCHES_PER_STEP * SAVE_AT :]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), "127.0.0.1:29511", Path("out/accelerate"))
