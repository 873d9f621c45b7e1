"""Workers taking turns in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lowcomm.sync.errors import PeerLost, SyncError
from lowcomm.sync.link import Link
from lowcomm.sync.schedule import check_number
from lowcomm.sync.seam import Group, enter_group
from lowcomm.sync.turns import World

T = TypeVar("T")


def simulate(
    worker: Callable[[int, Group], T], num_workers: int, *, link: Link | None = None
) -> list[T]:
    """Runs `worker(rank, group)` for every rank, in threads that take turns.

    Optimizers built inside find their group by themselves. The turn passes only while
    a worker waits for others, and each worker has random number generators of its own
    (torch, numpy, random; all start where the caller's stand). So a run is
    deterministic, and equals, to the bit, a run of as many gloo processes with the same
    `torch.get_num_threads()`.

    >>> import torch, lowcomm
    >>> def worker(rank, group):
    ...     weight = torch.nn.Parameter(torch.zeros(1))
    ...     opt = lowcomm.LocalSGD(torch.optim.SGD([weight], lr=1.0), sync_every=1)
    ...     weight.grad = torch.full((1,), -float(rank))
    ...     opt.step()
    ...     return weight.item()
    >>> simulate(worker, 3)
    [1.0, 1.0, 1.0]

    Args:
        worker: called with its rank and its group.
        num_workers: how many workers.
        link: a network whose time passes on a virtual clock, `group.now()`; None for
            one that takes no time.

    Returns:
        The workers' results in rank order.

    Raises:
        TypeError: if `worker` cannot be called.
        ValueError: if `num_workers` is less than 1.
        BaseException: a worker's own exception, as it is, with the rank as a note;
            several as an `ExceptionGroup`. A `SyncError` only if there is no other: it
            is what one worker's end causes in the rest.
    """
    if not callable(worker):
        raise TypeError(f"worker must be a function (rank, group), got {worker!r}.")
    check_number("num_workers", num_workers, int, least=1)
    if link is not None and not isinstance(link, Link):
        raise TypeError(f"link must be a lowcomm.Link or None, got {link!r}.")
    world = World(num_workers, link)
    results: list[Any] = [None] * num_workers
    errors: dict[int, BaseException] = {}
    num_threads = torch.get_num_threads()

    def run(rank: int) -> None:
        world.enter(rank)
        try:
            torch.set_num_threads(num_threads)
            group = world.group(rank)
            enter_group(group)
            results[rank] = worker(rank, group)
        except BaseException as error:
            error.add_note(f"in simulated worker {rank} of {num_workers}")
            errors[rank] = error
        finally:
            world.leave(rank)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"worker {rank}", daemon=True)
        for rank in range(num_workers)
    ]
    with world.running(threads):
        for thread in threads:
            thread.join()
    _raise_own(errors)
    return results


def _raise_own(errors: dict[int, BaseException]) -> None:
    own = [e for _, e in sorted(errors.items()) if not isinstance(e, SyncError)]
    if len(own) == 1:
        raise own[0]
    if own:
        raise BaseExceptionGroup("several workers failed", own)
    # Of errors that came from others, the one that tells most.
    for error in sorted(errors.values(), key=lambda e: isinstance(e, PeerLost)):
        raise error
