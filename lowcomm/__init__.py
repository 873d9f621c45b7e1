"""Low-communication optimizers for PyTorch.

A worker trains for some steps by itself, then exchanges something small with the
others. Take `torch.optim.AdamW` out, put `lowcomm.DiLoCo` in, launch with `torchrun`.
"""

from lowcomm.optim.diloco import DiLoCo
from lowcomm.optim.local_sgd import LocalSGD
from lowcomm.simulate import simulate
from lowcomm.sync.errors import PeerLost, PeerMismatch, SyncError
from lowcomm.sync.link import Link

__all__ = [
    "DiLoCo",
    "Link",
    "LocalSGD",
    "PeerLost",
    "PeerMismatch",
    "SyncError",
    "simulate",
]
