"""SlowMo: local steps, then a slow momentum step on the mean displacement.

Wang et al., SlowMo: Improving Communication-Efficient Distributed SGD with Slow
Momentum, 2020. https://arxiv.org/abs/1910.00643
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowcomm.optim._outer import slow_momentum_
from lowcomm.optim._states import States
from lowcomm.optim._streams import Anchored
from lowcomm.optim._wrapper import AbstractWrapper
from lowcomm.sync.flat import Layout
from lowcomm.sync.schedule import (
    Periodic,
    check_decay,
    check_number,
    check_period,
)
from lowcomm.sync.stream import Stream


class SlowMo(AbstractWrapper):
    r"""Moves a common anchor by a momentum of the workers' mean displacement.

    .. math::

        u      &\leftarrow \beta u + \frac{1}{\gamma} (\theta - \bar\theta) \\
        \theta &\leftarrow \theta - \alpha \gamma u, \qquad \theta_j \leftarrow \theta

    with :math:`\gamma` the inner learning rate of the first parameter group now. With
    :math:`\beta = 0, \alpha = 1` it is Local SGD.

    Cost: two copies of the parameters; each worker sends :math:`2 S (M-1)/M` bytes in a
    round, :math:`S` the size of the anchor.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> opt = SlowMo(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=12)
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> opt.step()

    Args:
        params: what `torch.optim.AdamW` takes, a built optimizer, or a list of them.
        sync_every: inner steps between exchanges.
        slow_lr: :math:`\alpha`.
        slow_momentum: :math:`\beta`.
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
        slow_lr: float = 1.0,
        slow_momentum: float = 0.5,
        **common: Any,
    ) -> None:
        self.sync_every = check_period("sync_every", sync_every)
        check_number("slow_lr", slow_lr, float)
        self.slow_lr = slow_lr
        self.slow_momentum = check_decay("slow_momentum", slow_momentum)
        super().__init__(params, **common)

    def _config(self) -> dict[str, Any]:
        return {
            "sync_every": self.sync_every,
            "slow_lr": self.slow_lr,
            "slow_momentum": self.slow_momentum,
        }

    def _streams(self, params: dict[str, Tensor], states: States) -> list[Stream]:
        return [
            Anchored(
                self._outer_,
                "parameters",
                Layout(params),
                Periodic(self.sync_every, overlap=self._overlap),
                has_momentum=True,
                local_mix=0.5 if self._overlap else 0.0,
                device=self._anchor_device,
                codec=self._codec,
            )
        ]

    def _outer_(self, anchor: Tensor, delta: Tensor, momentum: Tensor | None) -> None:
        assert momentum is not None
        slow_momentum_(
            anchor,
            delta,
            momentum,
            lr=float(self.param_groups[0]["lr"]),
            slow_lr=self.slow_lr,
            beta=self.slow_momentum,
        )
