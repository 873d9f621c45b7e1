"""The baseline: AdamW on gradients that DDP averages at each step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class Stats(NamedTuple):
    """What DDP's exchanges cost this worker, named as in lowcomm's `opt.stats`."""

    bytes_sent: int
    setup_bytes: None  # DDP's own broadcast of the weights passes no hook: unknown
    exposed_s: float
    streams: dict[str, Any]  # gradients are no displacements: nothing to compare


class DDPAdamW(torch.optim.AdamW):
    """AdamW with the verbs that lowcomm's optimizers add, so that one loop fits both.

    Bytes are counted where they are sent, in DDP's communication hook: a mean of S
    bytes over n workers sends 2 S (n - 1) / n from each. Waiting is the time from the
    launch of the last bucket, when backward has no more to compute, to its arrival.
    """

    def __init__(self, network: DistributedDataParallel, **adamw: Any) -> None:
        super().__init__(network.parameters(), **adamw)
        self._bytes_sent = 0
        self._exposed_s = 0.0
        network.register_comm_hook(None, self._average)

    def _average(
        self, _: None, bucket: dist.GradBucket
    ) -> torch.futures.Future[Tensor]:
        world = dist.get_world_size()
        flat = bucket.buffer()
        self._bytes_sent += 2 * flat.nbytes * (world - 1) // world
        launched = time.perf_counter()

        def arrive(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            if bucket.is_last():
                self._exposed_s += time.perf_counter() - launched
            return future.value()[0]

        work = dist.all_reduce(flat.div_(world), async_op=True)
        return work.get_future().then(arrive)

    @property
    def stats(self) -> Stats:
        return Stats(self._bytes_sent, None, self._exposed_s, {})

    def finish(self) -> None:
        """Nothing is ever left to exchange."""

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Every worker holds the global parameters at any time."""
        yield

    def state_dict(self) -> dict[str, Any]:
        counters = {"bytes_sent": self._bytes_sent, "exposed_s": self._exposed_s}
        return {**super().state_dict(), "counters": counters}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._bytes_sent = state_dict["counters"]["bytes_sent"]
        self._exposed_s = state_dict["counters"]["exposed_s"]
