"""Workers that meet by themselves, so that no framework takes them for its own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lowcomm.sync.errors import SyncError
from lowcomm.sync.group import TorchGroup, split_address
from lowcomm.sync.schedule import check_number, check_positive

# torch's types know less of these than there is.
_dist: Any = dist


class PrivateGroup(TorchGroup):
    """A group over gloo beside `torch.distributed`, which knows nothing of it.

    What a framework finds in torch.distributed it takes for one worker: it wraps the
    model in `DistributedDataParallel`, divides the data, steps schedulers several times
    and saves on rank 0 alone. So each worker is started as if there were no other, with
    a `torchrun` of its own where it has several processes, and meets the others here.

    >>> import torch
    >>> group = PrivateGroup("127.0.0.1:0", rank=0, num_workers=1)
    >>> group.members(0), torch.distributed.is_initialized()
    ((0,), False)

    Args:
        address: as "host:29510", of a port at which the worker of rank 0 listens. With
            several processes a worker, one port for the first of each, one for the
            second and so on.
        rank: of this worker.
        num_workers: how many there are.
        timeout_s: bound of the wait until all are there, in seconds.

    Raises:
        ValueError: if the address or the rank cannot be one.
        SyncError: if not all workers have come.
    """

    def __init__(
        self, address: str, *, rank: int, num_workers: int, timeout_s: float = 600.0
    ) -> None:
        check_number("num_workers", num_workers, int, least=1)
        check_number("rank", rank, int, least=0)
        check_positive("timeout_s", timeout_s)
        if rank >= num_workers:
            raise ValueError(
                f"rank must be less than num_workers, got {rank=} with {num_workers=}."
            )
        place = split_address(address)
        if place is None:
            raise ValueError(
                f"address must be one like 'host:29510', got {address!r}. Name the "
                "machine of rank 0 and a port of it that is free."
            )
        limit = timedelta(seconds=timeout_s)
        try:
            # Kept: it ends with its owner, and others may still be on their way to it.
            self._store = _dist.TCPStore(
                *place,
                num_workers,
                is_master=rank == 0,
                wait_for_workers=True,
                timeout=limit,
            )
            group = _dist.ProcessGroupGloo(self._store, rank, num_workers, limit)
        except RuntimeError as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise SyncError(
                f"{num_workers} workers must meet at {address} within {timeout_s:g} s, "
                f"got on rank {rank}: {reason}. See that each was started, with a rank "
                "of its own, and that the port of rank 0 is free there and open."
            ) from error
        self._over(group, range(num_workers), rank, is_gloo=True)
