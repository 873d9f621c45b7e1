"""MT-DAO: slow momenta that survive between exchanges, mixed with the fresh gradient.

Iacob et al., MT-DAO: Multi-Timescale Distributed Adaptive Optimizers with Local
Updates, 2026. https://arxiv.org/abs/2510.05361
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lowcomm.optim._periods import PARAMS, check_periods, periods_of, state_streams
from lowcomm.optim._states import States
from lowcomm.optim._streams import parameter_mean
from lowcomm.optim._wrapper import AbstractWrapper
from lowcomm.optim.qh_adamw import QHAdamW
from lowcomm.sync.flat import Layout
from lowcomm.sync.schedule import Periodic
from lowcomm.sync.stream import Stream


class MTDAO(AbstractWrapper):
    r"""Averages parameters, momenta and second moments of a quasi-hyperbolic optimizer.

    A momentum that decays by 0.9 in a step has forgotten the last exchange after a few
    dozen: :math:`\beta^K` of it is left. A slow one has not, and keeps the workers on
    one way; the inner step mixes it with the fresh gradient. Over parameters the inner
    optimizer is `QHAdamW`; or build another one, such as `ADOPT` with `omega` below 1.
    With :math:`\omega = 1` it is DES-LOC.

    Cost: no copies besides those of further momenta; the bytes of Local SGD times
    :math:`1 + \sum_j K/K_j + K/K_v`, three for one integer and one momentum.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> opt = MTDAO(model.parameters(), lr=1e-3, betas=(0.999, 0.999), sync_every=32)
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> opt.step()

    Args:
        params: what `QHAdamW` takes, a built optimizer, or a list of them.
        sync_every: one period for the parameters and every state, or all of them by
            name, as in `{"params": 32, "exp_avg": 32, "exp_avg_sq": 64}`; 0, and what
            is not named, is never averaged.
        common: `group`, `overlap`, `weight` and others of `AbstractWrapper`, and
            keywords of `QHAdamW`.

    Raises:
        ValueError: if a setting is out of its range.
        PeerMismatch: if workers were built differently.
    """

    _inner_class = QHAdamW

    def __init__(
        self, params: Any, *, sync_every: int | Mapping[str, int], **common: Any
    ) -> None:
        self.sync_every = check_periods(sync_every)
        super().__init__(params, **common)

    def _config(self) -> dict[str, Any]:
        return {"sync_every": self.sync_every}

    def _streams(self, params: dict[str, Tensor], states: States) -> list[Stream]:
        own = self.sync_every
        period = own[PARAMS] if isinstance(own, dict) else own

        def periods(names: Mapping[str, Any]) -> dict[str, int]:
            every = dict.fromkeys([PARAMS, *names], period)
            return periods_of(own if isinstance(own, dict) else every, names)

        schedule = Periodic(period, overlap=self._overlap)
        return [
            parameter_mean(Layout(params), schedule, self._codec, self._anchor_device),
            *state_streams(periods, params, states, self._overlap),
        ]
