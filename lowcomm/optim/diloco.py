"""DiLoCo: many local steps, then one Nesterov step on the mean displacement.

Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models,
2023. https://arxiv.org/abs/2311.08105
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lowcomm.optim._outer import heavy_ball_, nesterov_, plain_
from lowcomm.optim._states import States
from lowcomm.optim._streams import Anchored, Eager
from lowcomm.optim._wrapper import OuterRateWrapper
from lowcomm.sync.flat import Layout, split
from lowcomm.sync.schedule import check_decay, check_period, staggered
from lowcomm.sync.stream import Stream


class DiLoCo(OuterRateWrapper):
    r"""Moves a common anchor by the workers' mean progress every `sync_every` steps.

    .. math::

        \Delta &= \frac{1}{M} \sum_j (\theta - \theta_j) \\
        m      &\leftarrow \mu m + \Delta \\
        \theta &\leftarrow \theta - \eta (\Delta + \mu m), \qquad
        \theta_j \leftarrow \theta

    after inner steps :math:`H, 2H, 3H, \dots` The inner optimizer's states persist and
    are never sent. Anchor and momentum are fp32 for narrower parameters.

    Cost: two copies of the parameters (one without momentum); each worker sends
    :math:`2 S (M-1)/M` bytes in a round, :math:`S` the size of the anchor.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> opt = DiLoCo(model.parameters(), lr=1e-3, sync_every=100)
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> opt.step()

    Args:
        params: what `torch.optim.AdamW` takes, a built optimizer, or a list of them.
        sync_every: inner steps between exchanges, :math:`H`.
        outer_lr: outer learning rate, :math:`\eta`; may be set during a run, on all
            workers alike.
        outer_momentum: outer momentum decay, :math:`\mu`. The paper's 0.9 needs many
            rounds: in the long run the outer step is :math:`\eta/(1-\mu)`, seven times
            the mean displacement. Take less for a few dozen rounds.
        nesterov: Nesterov momentum; else heavy ball.
        fragments: how many parts of the parameters are exchanged by themselves, each
            every `sync_every` steps, evenly staggered (streaming DiLoCo); or the parts,
            as lists of parameters.
        local_mix: weight of a worker's own parameters when it takes the anchor's,
            :math:`\alpha`. 0 takes the anchor's, 1 keeps its own; None is 0 when
            blocking and 0.5 with `overlap`.
        eager: apply the own share at once and the others' a round later, so that the
            exchange has the whole round; one copy more. Take a lower `outer_lr`.
        common: `group`, `overlap`, `codec`, `weight` and others of `AbstractWrapper`,
            and keywords of AdamW.

    Raises:
        ValueError: if a setting is out of its range.
        PeerMismatch: if workers were built differently, or start from other values.
    """

    def __init__(
        self,
        params: Any,
        *,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        fragments: int | Sequence[Sequence[Tensor]] = 1,
        local_mix: float | None = None,
        eager: bool = False,
        **common: Any,
    ) -> None:
        self.sync_every = check_period("sync_every", sync_every)
        self.outer_lr = outer_lr
        self.outer_momentum = check_decay("outer_momentum", outer_momentum)
        self.nesterov = nesterov
        if local_mix is not None and not 0 <= local_mix <= 1:
            raise ValueError(f"local_mix must be from 0 to 1, got {local_mix=}.")
        self.local_mix = local_mix
        if eager and (common.get("overlap") or local_mix is not None):
            raise ValueError(
                f"eager must be False with overlap or local_mix, got {eager=} with "
                f"overlap={common.get('overlap', 0)} and {local_mix=}: its exchange "
                "has the whole round, and its own share is applied at once."
            )
        self.eager = eager
        if not isinstance(fragments, int):
            fragments = [list(part) for part in fragments]
        self.fragments = fragments
        super().__init__(params, **common)

    def _config(self) -> dict[str, Any]:
        fragments = self.fragments
        return {
            "sync_every": self.sync_every,
            "outer_lr": self._first_outer_lr,
            "outer_momentum": self.outer_momentum,
            "nesterov": self.nesterov,
            "fragments": fragments if isinstance(fragments, int) else len(fragments),
            "local_mix": self.local_mix,
            "eager": self.eager,
        }

    def _streams(self, params: dict[str, Tensor], states: States) -> list[Stream]:
        parts = self._parts or split(params, self.fragments)
        overlap = self.sync_every if self.eager else self._overlap
        schedules = staggered(self.sync_every, len(parts), overlap)
        mix = 0.5 if self.local_mix is None and self._overlap else self.local_mix or 0.0
        return [
            (Eager if self.eager else Anchored)(
                self._outer_,
                "parameters" if len(parts) == 1 else f"fragment {i}",
                Layout({name: params[name] for name in part}),
                schedule,
                has_momentum=self.outer_momentum > 0,
                local_mix=mix,
                device=self._anchor_device,
                codec=self._codec,
            )
            for i, (part, schedule) in enumerate(zip(parts, schedules, strict=True))
        ]

    def _outer_(self, anchor: Tensor, delta: Tensor, momentum: Tensor | None) -> None:
        lr, beta = self.outer_lr, self.outer_momentum
        if momentum is None:
            plain_(anchor, delta, lr=lr)
        elif self.nesterov:
            nesterov_(anchor, delta, momentum, lr=lr, beta=beta)
        else:
            heavy_ball_(anchor, delta, momentum, lr=lr, beta=beta)
