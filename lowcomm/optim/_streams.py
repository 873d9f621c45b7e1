"""What a share is and what a result does: the kinds that methods are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowcomm.optim._outer import plain_
from lowcomm.optim._states import States, is_second_moment
from lowcomm.sync.codec import Codec
from lowcomm.sync.flat import Chunk, Flats, Layout
from lowcomm.sync.peers import Peers, everyone
from lowcomm.sync.schedule import Periodic, Schedule
from lowcomm.sync.stream import Landing, Stream

#: (anchor, mean pseudo-gradient, outer momentum or None) -> None, in place.
OuterUpdate = Callable[[Tensor, Tensor, Tensor | None], None]


class Average(Stream):
    r"""Tensors that the workers' mean replaces.

    Landing later than it was launched, it takes the place of what was sent, and the
    progress since stays on top:

    .. math:: x \leftarrow x + (\bar x_0 - x_0)
    """

    def share_(self, chunk: Chunk, out: Tensor) -> None:
        self.layout.gather_(chunk, out)

    def apply_(self, chunk: Chunk, result: Tensor, landing: Landing) -> None:
        if landing.keep:  # to be in the next mean
            return
        if landing.late and landing.share is not None:
            self._catch_up_(chunk, result, landing.share[chunk], landing.late)
        self.layout.scatter_(chunk, result)

    def _catch_up_(self, chunk: Chunk, mean: Tensor, share: Tensor, late: int) -> None:
        """Turns the mean as of the launch into the one for now."""
        del late
        mean.sub_(share).add_(self.layout.gather_(chunk, torch.empty_like(mean)))


class AverageParameters(Average):
    """Parameters that the workers' mean replaces."""

    has_parameters = True


class AverageState(Average):
    r"""State tensors of the inner optimizer that the workers' mean replaces.

    Looks them up in each round: they appear with the first step, and loading a
    checkpoint replaces them. Of a moment that decays by :math:`\beta` in a step, what
    is left of the difference after :math:`\tau` steps is

    .. math:: s \leftarrow s + \beta^\tau (\bar s_0 - s_0)

    which is exact for an exponential average, and never negative where all moments are
    not. Of other states the mean itself is taken.

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
        self._decays = self._states.decays(self.state_name, params)
        super().locate()

    def _catch_up_(self, chunk: Chunk, mean: Tensor, share: Tensor, late: int) -> None:
        now = self.layout.gather_(chunk, torch.empty_like(mean))
        start = 0
        for run, first, stop in chunk.pieces:
            end = start + stop - first
            decay = self._decays[self.layout.run_names[run]]
            if decay is not None:
                piece = mean[start:end]
                piece.sub_(share[start:end]).mul_(decay**late).add_(now[start:end])
                if is_second_moment(self.state_name):
                    piece.clamp_min_(0)  # rounding alone could make it negative
            start = end


class FirstWorkers(Average):
    """Counters and the like, which the first worker's replace, bit by bit."""

    is_round = False
    is_judged = False

    def counts(self, rank: int, members: Sequence[int]) -> bool:
        return rank == members[0]

    def _catch_up_(self, chunk: Chunk, mean: Tensor, share: Tensor, late: int) -> None:
        if mean.dtype != torch.bool:
            super()._catch_up_(chunk, mean, share, late)


class Accompanying(Average):
    """Tensors that are averaged beside a round.

    Landing late, the mean is taken as it is: a running variance plus a difference could
    become negative.
    """

    is_round = False

    def _catch_up_(self, chunk: Chunk, mean: Tensor, share: Tensor, late: int) -> None:
        pass


class Anchored(Stream):
    r"""Parameters that return to an anchor, which the mean displacement moves.

    .. math:: \theta_m \leftarrow \alpha \theta_m + (1 - \alpha) \theta

    Keeps the anchor, and the outer momentum where the update has one: two copies of the
    parameters, in fp32 or wider.

    Args:
        update: the outer update.
        has_momentum: whether it uses an outer momentum.
        local_mix: weight of a worker's own parameters, :math:`\alpha`.
        device: where anchor and momentum live; beside the parameters if None.
        args, kwargs: of `Stream`.
    """

    has_parameters = True
    holds_global = True
    compares = True

    def __init__(
        self,
        update: OuterUpdate,
        *args: Any,
        has_momentum: bool,
        local_mix: float,
        device: torch.device | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._update = update
        self._local_mix = local_mix
        self._device = device
        self._has_momentum = has_momentum
        self._make_()

    def start_(self) -> None:
        self.layout.gather_all_(self.anchor)

    def share_(self, chunk: Chunk, out: Tensor) -> None:
        self.layout.subtract_from_(chunk, self.anchor[chunk], out)

    def apply_(self, chunk: Chunk, result: Tensor, landing: Landing) -> None:
        anchor = self.anchor[chunk]
        before = anchor.clone() if landing.keep else anchor
        self._outer_step_(chunk, result)
        if landing.keep:
            own = self.layout.gather_(chunk, torch.empty_like(anchor))
            self.layout.scatter_(chunk, own.sub_(before).add_(anchor))
        elif landing.settle or self._local_mix == 0:
            self.layout.scatter_kept_(chunk, self.anchor)
        else:
            own = self.layout.gather_(chunk, torch.empty_like(anchor))
            self.layout.scatter_(chunk, torch.lerp(anchor, own, self._local_mix))

    def _outer_step_(self, chunk: Chunk, delta: Tensor) -> None:
        anchor = self.anchor[chunk]
        momentum = None if self.momentum is None else self.momentum[chunk]
        self._update(anchor, delta.to(anchor.device), momentum)

    def extend_(
        self, tensors: Mapping[str, Tensor], starts: Mapping[str, Tensor]
    ) -> None:
        state = self.state()
        super().extend_(tensors, starts)
        state["anchor"] |= starts
        self._make_()
        self.load_(state)

    def _make_(self) -> None:
        """Makes room for what is kept."""
        self.agreed = self.anchor = self.layout.new(self._device)
        self.momentum = self.layout.new(self._device) if self._has_momentum else None

    def follow_(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        if self.peers is not everyone:  # anchors of one's own are nobody else's
            return
        own = self.layout.empty()
        for chunk in self.layout.chunks:
            self.layout.gather_(chunk, own[chunk])
            own[chunk].sub_(self.anchor[chunk].to(own[chunk].device))
        for kind, flats in self._kept().items():
            self.layout.write_(flats, state.get(kind, {}))
        for chunk in self.layout.chunks:
            own[chunk].add_(self.anchor[chunk].to(own[chunk].device))
            self.layout.scatter_(chunk, own[chunk])

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {kind: self.layout.read(flats) for kind, flats in self._kept().items()}

    def load_(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        for flats in self._kept().values():
            for flat in flats.tensors:
                flat.zero_()
        self.start_()  # for what the state lacks, from here
        for kind, flats in self._kept().items():
            self.layout.write_(flats, state.get(kind, {}))

    def _kept(self) -> dict[str, Flats]:
        kept = {"anchor": self.anchor, "momentum": self.momentum}
        return {kind: flats for kind, flats in kept.items() if flats is not None}


class AnchoredAverage(Anchored):
    r"""Parameters that the workers' mean replaces, sent as displacements from the last.

    What a codec needs: weights have too many bits to be coded, their displacements do
    not. Landing late, the progress since the launch stays on top:

    .. math:: x \leftarrow x + (\bar x_0 - x_0)

    Keeps one copy, of the last mean.
    """

    holds_global = False
    compares = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(_replace_, *args, has_momentum=False, local_mix=0.0, **kwargs)

    def apply_(self, chunk: Chunk, result: Tensor, landing: Landing) -> None:
        if landing.late and landing.share is not None:
            own = self.layout.gather_(chunk, torch.empty_like(result))
            own.add_(landing.share[chunk])
            if self.residual is not None:  # in the share, but not in the parameters
                own.sub_(self.residual[chunk])
            own.sub_(self.anchor[chunk].to(own.device))
            self._outer_step_(chunk, result)
            self.layout.scatter_(chunk, own.add_(self.anchor[chunk].to(own.device)))
        else:
            super().apply_(chunk, result, landing)


def _replace_(anchor: Tensor, delta: Tensor, momentum: Tensor | None) -> None:
    plain_(anchor, delta, lr=1.0)


def parameter_mean(
    layout: Layout,
    schedule: Schedule,
    codec: Codec | None,
    device: torch.device | None,
    *,
    peers: Peers = everyone,
) -> Stream:
    """The stream that replaces parameters by their mean; with a codec, by an anchor."""
    if codec is None:
        return AverageParameters("parameters", layout, schedule, peers=peers)
    assert peers is everyone, "some would move their anchors, and others not"
    return AnchoredAverage("parameters", layout, schedule, device=device, codec=codec)


class OwnAnchored(Anchored):
    """Anchors that differ from worker to worker, until the last round's plain mean."""

    holds_global = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.last = self._mean = _LastMean(self)

    def restart_(self, chunk: Chunk, mean: Tensor) -> None:
        """Takes the workers' mean as the common starting point."""
        self.anchor[chunk].copy_(mean)

    def extend_(
        self, tensors: Mapping[str, Tensor], starts: Mapping[str, Tensor]
    ) -> None:
        super().extend_(tensors, starts)
        self._mean.layout = self.layout

    def _make_(self) -> None:
        super()._make_()
        self.agreed = None


class Eager(OwnAnchored):
    r"""An anchor of one's own, moved by the own share now and the others' last ones.

    .. math::

        d_m = \tfrac{1}{M} \Delta_m
            + \left( \bar\Delta' - \tfrac{1}{M} \Delta'_m \right)

    where a prime marks the round before, whose mean has just come. Workers' anchors
    differ between rounds; in the last one the mean of their parameters is taken.

    Keeps one copy more, of what the others' last shares add.
    """

    def restart_(self, chunk: Chunk, mean: Tensor) -> None:
        super().restart_(chunk, mean)
        self.correction[chunk].zero_()

    def _make_(self) -> None:
        super()._make_()
        self.correction = self.layout.new(self._device)

    def apply_(self, chunk: Chunk, result: Tensor, landing: Landing) -> None:
        if landing.keep:
            return
        if landing.share is not None:  # of which this part was applied at the launch
            result.sub_(landing.share[chunk], alpha=1 / landing.num_workers)
        self.correction[chunk].copy_(result)

    def launched_(self, shares: Flats, num_workers: int, *, finite: bool) -> bool:
        for chunk in self.layout.chunks:
            delta = self.correction[chunk]
            if finite:
                delta.add_(shares[chunk].to(delta.device), alpha=1 / num_workers)
            self._outer_step_(chunk, delta)
            delta.zero_()
            self.layout.scatter_(chunk, self.anchor[chunk])
        return True

    def _kept(self) -> dict[str, Flats]:
        return super()._kept() | {"correction": self.correction}


class _LastMean(Average):
    """The mean of the parameters, from which anchors of one's own start anew."""

    def __init__(self, anchored: OwnAnchored) -> None:
        super().__init__(f"last {anchored.name}", anchored.layout, Periodic(0))
        self._anchored = anchored

    def apply_(self, chunk: Chunk, result: Tensor, landing: Landing) -> None:
        super().apply_(chunk, result, landing)
        self._anchored.restart_(chunk, result)
