"""NoLoCo: DiLoCo without a collective; in each round workers meet in pairs.

Kolehmainen et al., NoLoCo: No-all-reduce Low Communication Training Method for Large
Models, 2025. https://arxiv.org/abs/2506.10911
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowcomm.optim._outer import heavy_ball_
from lowcomm.optim._states import States
from lowcomm.optim._streams import OwnAnchored
from lowcomm.optim._wrapper import OuterRateWrapper
from lowcomm.sync.flat import Chunk, Flats, Layout
from lowcomm.sync.peers import Listed, Pairs
from lowcomm.sync.schedule import (
    Periodic,
    check_decay,
    check_number,
    check_period,
)
from lowcomm.sync.stream import Landing, Stream


class NoLoCo(OuterRateWrapper):
    r"""Moves each worker's own anchor by its pair's progress, and towards its partner.

    .. math::

        \delta_i &\leftarrow \alpha \delta_i
            + \frac{\beta}{2} \sum_{j \in \{i, p\}} (\theta_j - \phi_j)
            + \gamma \Big( \frac{1}{2} \sum_{j \in \{i, p\}} \phi_j - \phi_i \Big) \\
        \phi_i   &\leftarrow \phi_i + \delta_i, \qquad \theta_i \leftarrow \phi_i

    after inner steps :math:`H, 2H, 3H, \dots`, with a partner :math:`p` from a random
    matching of each round; of an odd number of workers, one takes its step alone. There
    is no collective before `finish()`. A partner that is late costs `timeout_s`, one
    that is lost nothing; the step is taken alone.

    Workers stay together for :math:`0 < \gamma < 2 (1 - \alpha^2)`, whatever their
    number. With many of them it is the limit: beyond it, differences in directions
    without curvature grow from round to round. (Few tolerate a little more. For
    :math:`\alpha > 0.5` the range in the paper is wider, and diverges in part.)

    Cost: two copies of the parameters. In a round each worker sends :math:`S` bytes to
    its partner if :math:`\beta = \gamma`, since then :math:`\theta` says all; else, and
    with a codec, the anchor and the progress: up to :math:`2S`. :math:`S` is the size
    of the anchor. In an exchange there are two copies more for each.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> opt = NoLoCo(model.parameters(), lr=1e-3, sync_every=50)
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> opt.step()

    Args:
        params: what `torch.optim.AdamW` takes, a built optimizer, or a list of them.
        sync_every: inner steps between exchanges, :math:`H`.
        outer_lr: weight of the pair's progress, :math:`\beta`; may be set during a run,
            on all workers alike.
        outer_momentum: decay of the outer momentum, :math:`\alpha`.
        gamma: pull towards the pair's mean anchor, :math:`\gamma`. None, or the value
            of `outer_lr`, follows `outer_lr`.
        seed: of the pairings.
        peers: instead of random pairs, a function of the round (0, 1, ...) that lists
            groups of ranks, the same on all workers; who is in none stays alone.
        common: `group`, `overlap`, `codec` (of the progress alone: anchors are sent as
            they are), `weight`, `timeout_s` (which a late partner costs: take less than
            the ten minutes) and others of `AbstractWrapper`, and keywords of AdamW.

    Raises:
        ValueError: if a setting is out of its range.
        PeerMismatch: if workers were built differently.
    """

    def __init__(
        self,
        params: Any,
        *,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.5,
        gamma: float | None = None,
        seed: int = 0,
        peers: Callable[[int], Sequence[Sequence[int]]] | None = None,
        **common: Any,
    ) -> None:
        self.sync_every = check_period("sync_every", sync_every)
        self.outer_momentum = check_decay("outer_momentum", outer_momentum)
        if gamma is not None:
            check_number("gamma", gamma, float)
        self.gamma = None if gamma == outer_lr else gamma
        self.outer_lr = outer_lr
        if self.gamma is not None:
            self._check_gamma(self.gamma, f"{gamma=}")
        check_number("seed", seed, int, least=-math.inf)
        self.seed = seed
        if peers is not None and not callable(peers):
            raise TypeError(
                f"peers must be a function of the round or None, got {peers!r}."
            )
        self.peers = peers
        super().__init__(params, **common)

    def _check_outer_lr(self, outer_lr: float) -> None:
        if self.gamma is None:
            self._check_gamma(outer_lr, f"{outer_lr=}, which gamma follows")

    def _check_gamma(self, gamma: float, got: str) -> None:
        limit = 2 * (1 - self.outer_momentum**2)
        if not 0 < gamma < limit:
            raise ValueError(
                f"gamma must be above 0 and below 2 (1 - outer_momentum^2) = {limit:g},"
                f" got {got} with outer_momentum={self.outer_momentum}. Beyond, what "
                "many workers differ by grows from round to round: take a smaller "
                "gamma or a smaller outer_momentum."
            )

    def _config(self) -> dict[str, Any]:
        return {
            "sync_every": self.sync_every,
            "outer_lr": self._first_outer_lr,
            "outer_momentum": self.outer_momentum,
            "gamma": self.gamma,
            "seed": self.seed,
            "peers": "pairs" if self.peers is None else "a function",
        }

    def _streams(self, params: dict[str, Tensor], states: States) -> list[Stream]:
        kind = _Towards if self.gamma is None and self._codec is None else _Moved
        stream = kind(
            self,
            self._outer_,
            "parameters",
            Layout(params),
            Periodic(self.sync_every, overlap=self._overlap),
            peers=Pairs(self.seed) if self.peers is None else Listed(self.peers),
            goes_alone=True,
            codec=self._codec,
            has_momentum=True,
            local_mix=0.5 if self._overlap else 0.0,
            device=self._anchor_device,
        )
        return [stream] if isinstance(stream, _Towards) else [stream.anchors, stream]

    def _outer_(self, anchor: Tensor, delta: Tensor, momentum: Tensor | None) -> None:
        assert momentum is not None
        heavy_ball_(anchor, delta, momentum, lr=1.0, beta=self.outer_momentum)


class _Towards(OwnAnchored):
    r"""What workers exchange if :math:`\beta = \gamma`: their parameters.

    .. math:: \delta_i \leftarrow \alpha \delta_i + \gamma (\bar\theta - \phi_i)
    """

    compares = False

    def __init__(self, method: NoLoCo, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._method = method

    def share_(self, chunk: Chunk, out: Tensor) -> None:
        self.layout.gather_(chunk, out)

    def _outer_step_(self, chunk: Chunk, delta: Tensor) -> None:
        mean, anchor = delta.to(self.anchor[chunk].device), self.anchor[chunk]
        torch.sub(anchor, mean, out=mean).mul_(self._method.outer_lr)
        super()._outer_step_(chunk, mean)


class _Moved(OwnAnchored):
    """The displacements, which are applied with the anchors that come before them."""

    def __init__(self, method: NoLoCo, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._method = method
        self.anchors = _Anchors(self)

    def launched_(self, shares: Flats, num_workers: int, *, finite: bool) -> bool:
        self.anchors.pulls.clear()  # of a round that was not applied
        return super().launched_(shares, num_workers, finite=finite)

    def _outer_step_(self, chunk: Chunk, delta: Tensor) -> None:
        delta = delta.to(self.anchor[chunk].device).mul_(self._method.outer_lr)
        pull = self.anchors.pulls.pop(chunk.number, None)
        if pull is not None:
            gamma = self._method.gamma
            delta.add_(pull, alpha=self._method.outer_lr if gamma is None else gamma)
        super()._outer_step_(chunk, delta)

    def extend_(
        self, tensors: Mapping[str, Tensor], starts: Mapping[str, Tensor]
    ) -> None:
        super().extend_(tensors, starts)
        self.anchors.layout = self.layout


class _Anchors(Stream):
    """The anchors themselves, as they are."""

    is_round = False

    def __init__(self, moved: _Moved) -> None:
        super().__init__(
            "anchors",
            moved.layout,
            moved.schedule,
            peers=moved.peers,
            goes_alone=moved.goes_alone,
        )
        self._moved = moved
        self.last = moved.last
        #: by chunk, the own anchor minus the mean one
        self.pulls: dict[int, Tensor] = {}

    def share_(self, chunk: Chunk, out: Tensor) -> None:
        out.copy_(self._moved.anchor[chunk])

    def apply_(self, chunk: Chunk, result: Tensor, landing: Landing) -> None:
        anchor = self._moved.anchor[chunk]
        mean = result.to(anchor.device)
        self.pulls[chunk.number] = torch.sub(anchor, mean, out=mean)
