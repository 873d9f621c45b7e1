"""torch.compile, of the model and of the inner optimizer's step.

    torchrun --nproc-per-node 2 examples/with_compile.py

An exchange is no graph of operators: also where the whole step is compiled, lowcomm's
own part of it runs as it is. Trains a regression, then once more from a checkpoint in
the middle of a round.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import lowcomm

NUM_STEPS, SAVE_AT = 12, 6


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Other samples of one function for each worker."""
    generator = torch.Generator().manual_seed(2 * step + rank)
    inputs = torch.randn(8, 4, generator=generator)
    return inputs, inputs.sin().sum(1, keepdim=True)


def train(folder: Path, backend: str) -> list[float]:
    """Trains a small network, from the newest checkpoint, and returns its losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    compiled = torch.compile(model, backend=backend)
    # A number would be part of the graph, and each rate of the scheduler a new graph.
    rate = torch.tensor(1e-2)
    inner = torch.optim.AdamW(model.parameters(), lr=rate)
    inner.step = torch.compile(inner.step, backend=backend)
    opt = lowcomm.DiLoCo(inner, sync_every=4, overlap=1)
    scheduler = CosineAnnealingLR(opt, NUM_STEPS)
    ckpt = lowcomm.Checkpointer(folder, model=model, opt=opt, scheduler=scheduler)
    losses = []
    for step in range(ckpt.load() + 1, NUM_STEPS + 1):
        inputs, targets = batch_of(step, dist.get_rank())
        loss = nn.functional.mse_loss(compiled(inputs), targets)
        loss.backward()
        opt.step()
        scheduler.step()
        opt.zero_grad()
        losses.append(loss.item())
        if step == SAVE_AT:
            ckpt.save(step)
    opt.finish()
    ckpt.wait()
    return losses


def main(folder: Path, backend: str = "inductor") -> None:
    """Trains once, and again from a checkpoint, to the same losses."""
    losses = train(folder, backend)
    dist.barrier()  # the checkpoint is whole
    resumed = train(folder, backend)
    rank = dist.get_rank()
    print(f"worker {rank}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"worker {rank}: resumed at step {SAVE_AT}, loss {resumed[-1]:.3f}")
    assert resumed == losses[-len(resumed) :]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path("out/compile"))
    dist.destroy_process_group()
