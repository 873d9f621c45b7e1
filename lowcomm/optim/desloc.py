"""DES-LOC: parameters and inner states averaged on periods of their own.

Iacob et al., DES-LOC: Desynced Low Communication Adaptive Optimizers for Training
Foundation Models, 2026. https://arxiv.org/abs/2505.22549
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lowcomm.optim._outer import nesterov_
from lowcomm.optim._periods import PARAMS, check_periods, periods_of, state_streams
from lowcomm.optim._states import States
from lowcomm.optim._streams import Anchored, parameter_mean
from lowcomm.optim._wrapper import AbstractWrapper
from lowcomm.sync.flat import Layout
from lowcomm.sync.schedule import Periodic, check_decay, check_number
from lowcomm.sync.stream import Stream


class DESLOC(AbstractWrapper):
    r"""Averages parameters, first and second moments over the workers, each in time.

    After inner step :math:`t`, for each state :math:`s` with period :math:`K_s`:

    .. math:: s_m \leftarrow \frac{1}{M} \sum_j s_j \quad \text{if } t \bmod K_s = 0

    Slow states need few exchanges: about one in each half-life, `half_life(beta)`. With
    all periods equal it is Local Adam, with those of the states 0 Local AdamW. Step
    counters are never averaged.

    Where Adam's gradients are often zero, as in the embedding of rare tokens, average
    both moments in the same steps, for the same bytes: `{"params": K, "exp_avg": 4 * K,
    "exp_avg_sq": 4 * K}`. A first moment alone may come to a worker whose second moment
    is almost zero, and is then divided by it.

    Cost: no copies (two with `outer_lr`); the bytes of Local SGD times
    :math:`1 + K/K_u + K/K_v`, 1.5 for one integer.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> opt = DESLOC(model.parameters(), lr=1e-3, sync_every=16)  # moments: 48 and 96
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> opt.step()

    Args:
        params: what `torch.optim.AdamW` takes, a built optimizer, or a list of them.
        sync_every: the parameters' period, :math:`K`; first moments then have
            :math:`3K`, second moments :math:`6K`. Or all of them, as in
            `{"params": 16, "exp_avg": 48, "exp_avg_sq": 96}`; 0, and what is not named,
            is never averaged.
        outer_lr: instead of replacing parameters, take an outer Nesterov step with this
            rate along their mean displacement; None for no outer step.
        outer_momentum: of that step.
        common: `group`, `overlap`, `codec` (of the parameters alone), `weight` and
            others of `AbstractWrapper`, and keywords of AdamW.

    Raises:
        ValueError: if a setting is out of its range, or one integer is given for an
            inner optimizer whose states are not known to be first or second moments.
        PeerMismatch: if workers were built differently.
    """

    def __init__(
        self,
        params: Any,
        *,
        sync_every: int | Mapping[str, int],
        outer_lr: float | None = None,
        outer_momentum: float = 0.9,
        **common: Any,
    ) -> None:
        self.sync_every = check_periods(sync_every)
        if outer_lr is not None:
            check_number("outer_lr", outer_lr, float)
        self.outer_lr = outer_lr
        self.outer_momentum = check_decay("outer_momentum", outer_momentum)
        super().__init__(params, **common)

    def _config(self) -> dict[str, Any]:
        return {
            "sync_every": self.sync_every,
            "outer_lr": self.outer_lr,
            "outer_momentum": self.outer_momentum,
        }

    def _streams(self, params: dict[str, Tensor], states: States) -> list[Stream]:
        def periods(names: Mapping[str, Any]) -> dict[str, int]:
            return periods_of(self.sync_every, names, first=3, second=6)

        own = self.sync_every
        period = own[PARAMS] if isinstance(own, dict) else own
        schedule, layout = Periodic(period, overlap=self._overlap), Layout(params)
        device, codec = self._anchor_device, self._codec
        first = (
            parameter_mean(layout, schedule, codec, device)
            if self.outer_lr is None
            else Anchored(
                self._outer_,
                "parameters",
                layout,
                schedule,
                has_momentum=True,
                local_mix=0.5 if self._overlap else 0.0,
                device=device,
                codec=codec,
            )
        )
        return [first, *state_streams(periods, params, states, self._overlap)]

    def _outer_(self, anchor: Tensor, delta: Tensor, momentum: Tensor | None) -> None:
        assert momentum is not None and self.outer_lr is not None
        nesterov_(anchor, delta, momentum, lr=self.outer_lr, beta=self.outer_momentum)


def half_life(beta: float) -> float:
    r"""Steps after which half of an exponential average is new.

    .. math:: \ln \tfrac12 / \ln \beta

    A state need not be averaged more often.

    >>> [round(half_life(beta)) for beta in (0.95, 0.99, 0.999)]
    [14, 69, 693]

    Args:
        beta: decay in a step, :math:`0 < \beta < 1`.

    Raises:
        ValueError: if `beta` is not between 0 and 1.
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta must be between 0 and 1, got {beta=}.")
    return math.log(0.5) / math.log(beta)
