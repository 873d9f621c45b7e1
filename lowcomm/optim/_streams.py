"""What a share is and what a result does: the two kinds that methods are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowcomm.optim._states import States
from lowcomm.sync.engine import Stream
from lowcomm.sync.flat import Chunk, Flats

#: (anchor, mean pseudo-gradient, outer momentum or None) -> None, in place.
OuterUpdate = Callable[[Tensor, Tensor, Tensor | None], None]


class Average(Stream):
    """Tensors that the workers' mean replaces."""

    def share_(self, chunk: Chunk, out: Tensor) -> None:
        self.layout.gather_(chunk, out)

    def apply_(self, chunk: Chunk, result: Tensor, *, keep: bool) -> None:
        # Progress that is not in this mean stays, to be in the next one.
        if not keep:
            self.layout.scatter_(chunk, result)


class AverageParameters(Average):
    """Parameters that the workers' mean replaces."""

    has_parameters = True


class AverageState(Average):
    """State tensors of the inner optimizer that the workers' mean replaces.

    Looks them up in each round: they appear with the first step, and loading a
    checkpoint replaces them.

    Args:
        state_name: the inner optimizer's name for them.
        states: the inner optimizer's states.
        params: all synchronized parameters by name; may grow.
        args, kwargs: of `Stream`.
    """

    def __init__(
        self,
        state_name: str,
        states: States,
        params: Mapping[str, Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(state_name, *args, **kwargs)
        self.state_name = state_name
        self._states = states
        self._params = params

    def locate(self) -> None:
        params = {name: self._params[name] for name in self.layout.specs}
        self.layout.bind(self._states.tensors(self.state_name, params))
        super().locate()


class FirstWorkers(Average):
    """Tensors that the first worker's replace, bit by bit."""

    takes_first = True
    is_round = False


class Accompanying(Average):
    """Tensors that are averaged beside a round."""

    is_round = False


class Anchored(Stream):
    """Parameters that return to an anchor, which the mean displacement moves.

    Keeps the anchor, and the outer momentum where the update has one: two copies of the
    parameters, in fp32 or wider.

    Args:
        update: the outer update.
        has_momentum: whether it uses an outer momentum.
        device: where anchor and momentum live; beside the parameters if None.
        args, kwargs: of `Stream`.
    """

    has_parameters = True

    def __init__(
        self,
        update: OuterUpdate,
        has_momentum: bool,
        device: torch.device | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._update = update
        self._device = device
        self.agreed = self.anchor = self.layout.new(device)
        self.momentum = self.layout.new(device) if has_momentum else None

    def start_(self) -> None:
        for chunk in self.layout.chunks:
            self.layout.gather_(chunk, self.anchor[chunk])

    def share_(self, chunk: Chunk, out: Tensor) -> None:
        self.layout.subtract_from_(chunk, self.anchor[chunk], out)

    def apply_(self, chunk: Chunk, result: Tensor, *, keep: bool) -> None:
        anchor = self.anchor[chunk]
        momentum = None if self.momentum is None else self.momentum[chunk]
        result = result.to(anchor.device)
        if keep:
            own = self.layout.gather_(chunk, anchor.clone()).sub_(anchor)
            self._update(anchor, result, momentum)
            self.layout.scatter_(chunk, own.add_(anchor))
        else:
            self._update(anchor, result, momentum)
            self.layout.scatter_(chunk, anchor)

    def extend_(self, tensors: Mapping[str, Tensor]) -> None:
        state = self.state()
        super().extend_(tensors)
        self.agreed = self.anchor = self.layout.new(self._device)
        if self.momentum is not None:
            self.momentum = self.layout.new(self._device)
        self.locate()
        self.load_(state)

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {kind: self.layout.read(flats) for kind, flats in self._kept().items()}

    def load_(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.start_()  # for what the state lacks, from here
        for kind, flats in self._kept().items():
            self.layout.write_(flats, state.get(kind, {}))

    def _kept(self) -> dict[str, Flats]:
        kept = {"anchor": self.anchor, "momentum": self.momentum}
        return {kind: flats for kind, flats in kept.items() if flats is not None}
