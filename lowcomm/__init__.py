"""Low-communication optimizers for PyTorch.

A worker trains for some steps by itself, then exchanges something small with the
others. Take `torch.optim.AdamW` out, put `lowcomm.DiLoCo` in, launch with `torchrun`.
"""

from lowcomm.checkpoint import Checkpointer
from lowcomm.optim.adopt import ADOPT
from lowcomm.optim.desloc import DESLOC, half_life
from lowcomm.optim.diloco import DiLoCo
from lowcomm.optim.local_sgd import LocalSGD
from lowcomm.optim.mtdao import MTDAO
from lowcomm.optim.noloco import NoLoCo
from lowcomm.optim.qh_adamw import QHAdamW
from lowcomm.optim.slowmo import SlowMo
from lowcomm.plan import plan
from lowcomm.simulate import simulate
from lowcomm.sync.errors import PeerLost, PeerMismatch, SyncError
from lowcomm.sync.link import Link
from lowcomm.sync.schedule import QSR

__all__ = [
    "ADOPT",
    "Checkpointer",
    "DESLOC",
    "DiLoCo",
    "Link",
    "LocalSGD",
    "MTDAO",
    "NoLoCo",
    "PeerLost",
    "PeerMismatch",
    "QHAdamW",
    "QSR",
    "SlowMo",
    "SyncError",
    "half_life",
    "plan",
    "simulate",
]
