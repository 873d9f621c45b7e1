"""Buffers on their way between an accelerator and the memory that the wire reads."""

from __future__ import annotations

import torch
from torch import Tensor

from lowcomm.sync.flat import Flats


class Staged:
    """Copies of buffers where the wire can read them, made beside the compute stream.

    The copy waits for what the compute stream has been given so far, by an event; the
    compute stream does not wait for the copy. The exchange's thread calls `wait` before
    it reads the copies; `flats` must be kept until then.

    Args:
        flats: the buffers.
        device: of the copies.
        rank: of this worker.
    """

    def __init__(self, flats: Flats, device: torch.device, rank: int) -> None:
        self.peer = rank
        self.time = 0.0
        self._events: list[torch.Event] = []
        self.flats = Flats([self._copy(flat, device) for flat in flats.tensors])

    def _copy(self, flat: Tensor, device: torch.device) -> Tensor:
        if flat.device.type == device.type:
            return flat.clone()
        if flat.device.type == "cpu":
            return flat.to(device)
        side = torch.Stream(flat.device)
        side.wait_stream(torch.accelerator.current_stream(flat.device))
        # Pinned: else the copy would block, and go through pinned memory all the same.
        copy = torch.empty(
            flat.shape, dtype=flat.dtype, device=device, pin_memory=device.type == "cpu"
        )
        with side:
            copy.copy_(flat, non_blocking=True)
        self._events.append(side.record_event())
        return copy

    def ready(self) -> bool:
        """Waits, as turn-taking workers have nothing else to wait for."""
        self.wait()
        return True

    def wait(self) -> None:
        """Returns when the copies may be read."""
        for event in self._events:
            event.synchronize()
