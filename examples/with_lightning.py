"""PyTorch Lightning, with DiLoCo between workers.

    python examples/with_lightning.py 0 2 &
    python examples/with_lightning.py 1 2

Each worker is started as if it were alone, with `devices=1`: Lightning then neither
wraps the module in DistributedDataParallel nor divides the data. Trains a regression,
then once more from a checkpoint in the middle of a round.
"""

import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import lowcomm
from lowcomm.sync import Group, PrivateGroup

NUM_EPOCHS, EPOCH_STEPS = 2, 6


def data_of(rank: int) -> TensorDataset:
    """Other samples of one function for each worker."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(8 * EPOCH_STEPS, 4, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


class Regression(lightning.LightningModule):
    """A small network whose optimizer knows the other workers."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        self.losses: list[float] = []
        self._group = group

    def configure_optimizers(self) -> dict[str, Any]:
        opt = lowcomm.DiLoCo(
            self.parameters(),
            lr=1e-2,
            sync_every=4,
            overlap=1,
            group=self._group,
            # Lightning has loaded the weights by now: they are to stay this worker's.
            init_sync=self.trainer.ckpt_path is None,
        )
        scheduler = CosineAnnealingLR(opt, NUM_EPOCHS * EPOCH_STEPS)
        return {
            "optimizer": opt,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def training_step(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.network(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def on_train_end(self) -> None:
        # All workers then hold equal parameters: what to evaluate and publish.
        self.trainer.optimizers[0].finish()


def train(rank: int, group: Group, folder: Path, *, resume: bool) -> list[float]:
    """Trains a small network and returns its losses."""
    torch.manual_seed(0)
    module = Regression(group)
    checkpoints = ModelCheckpoint(
        folder, "{epoch}", save_top_k=-1, enable_version_counter=False
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=NUM_EPOCHS,
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    path = str(folder / "epoch=0.ckpt") if resume else None
    trainer.fit(module, DataLoader(data_of(rank), batch_size=8), ckpt_path=path)
    return module.losses


def main(rank: int, num_workers: int, address: str, folder: Path) -> None:
    """Trains once, and again from a checkpoint, to the same losses."""
    group = PrivateGroup(address, rank=rank, num_workers=num_workers)
    folder = folder / f"worker-{rank}"
    losses = train(rank, group, folder, resume=False)
    resumed = train(rank, group, folder, resume=True)
    print(f"worker {rank}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"worker {rank}: resumed at step {EPOCH_STEPS}, loss {resumed[-1]:.3f}")
    assert resumed == losses[EPOCH_STEPS:]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), "127.0.0.1:29512", Path("out/lightning"))
