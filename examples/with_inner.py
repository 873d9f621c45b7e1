"""Inner optimizers of several kinds: fused, in 8 bits, and two as one.

    torchrun --nproc-per-node 2 examples/with_inner.py

What is inside is any torch optimizer, or a list of them over different parameters. Each
is trained, saved in the middle of a round, and resumed. The 8-bit one is left out where
bitsandbytes is not installed.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import lowcomm

NUM_STEPS, SAVE_AT = 12, 6


def fused(model: nn.Module) -> Optimizer:
    """One kernel for all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    """Muon for the matrices, AdamW for the rest."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]


def eight_bits(model: nn.Module) -> Optimizer:
    """Moments in 8 bits, which stay with their worker: only parameters are averaged."""
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=64)


KINDS = [fused, muon_and_adamw]
if importlib.util.find_spec("bitsandbytes") is not None:
    KINDS.append(eight_bits)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Other samples of one function for each worker."""
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    inputs = torch.randn(8, 4, generator=generator)
    return inputs, inputs.sin().sum(1, keepdim=True)


def train(make: Callable, file: Path, *, resume: bool) -> list[float]:
    """Trains a small network and returns its losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    opt = lowcomm.DiLoCo(make(model), sync_every=4, overlap=1)
    if resume:
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
    losses = []
    for step in range(opt.stats.steps + 1, NUM_STEPS + 1):
        inputs, targets = batch_of(step)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        if step == SAVE_AT and not resume:
            torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    opt.finish()
    return losses


def main(folder: Path) -> None:
    """Trains with each kind once, and again from what was saved, to the same losses."""
    folder.mkdir(parents=True, exist_ok=True)
    for make in KINDS:
        name, rank = make.__name__, dist.get_rank()
        file = folder / f"{name}-{rank}.pt"
        losses = train(make, file, resume=False)
        resumed = train(make, file, resume=True)
        print(f"worker {rank}, {name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        print(f"worker {rank}, {name}: resumed at step {SAVE_AT}, {resumed[-1]:.3f}")
        assert resumed == losses[SAVE_AT:]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path("out/inner"))
    dist.destroy_process_group()
