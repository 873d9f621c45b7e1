"""Local SGD: local steps, then the mean of the workers' parameters.

Stich, Local SGD Converges Fast and Communicates Little, 2019.
https://arxiv.org/abs/1805.09767
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowcomm.optim._states import States
from lowcomm.optim._streams import AverageState, parameter_mean
from lowcomm.optim._wrapper import AbstractWrapper
from lowcomm.sync.flat import Layout
from lowcomm.sync.schedule import (
    QSR,
    ByLearningRate,
    Periodic,
    Schedule,
    check_period,
)
from lowcomm.sync.stream import Stream


class LocalSGD(AbstractWrapper):
    r"""Averages parameters over the workers every `sync_every` inner steps.

    .. math:: \theta_m \leftarrow \frac{1}{M} \sum_j \theta_j

    after inner steps :math:`H, 2H, 3H, \dots` Over AdamW this is Local AdamW; with
    `average_states` it is Local Adam. Step counters are never averaged.

    Cost: no copies beyond the exchange's buffer; each worker sends
    :math:`2 S (M-1)/M` bytes in a round, :math:`S` the size of the parameters (three
    times that with Adam's averaged states).

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> opt = LocalSGD(model.parameters(), lr=1e-3, sync_every=8)
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> opt.step()

    Args:
        params: what `torch.optim.AdamW` takes, a built optimizer, or a list of them.
        sync_every: inner steps between exchanges, :math:`H`; or a `QSR`, by which they
            grow as the learning rate falls.
        average_states: whether the inner optimizer's state tensors are averaged too.
        warmup_steps: so many rounds of one step come first (post-local SGD).
        common: `group`, `overlap`, `codec`, `weight` and others of `AbstractWrapper`,
            and keywords of AdamW.

    Raises:
        ValueError: if `sync_every` is less than 1.
        PeerMismatch: if workers were built differently.
    """

    def __init__(
        self,
        params: Any,
        *,
        sync_every: int | QSR,
        average_states: bool = False,
        warmup_steps: int = 0,
        **common: Any,
    ) -> None:
        if isinstance(sync_every, QSR) and warmup_steps:
            raise ValueError(
                f"warmup_steps must be 0 beside a QSR, got {warmup_steps=}. The rule "
                "has its own."
            )
        self.sync_every = (
            sync_every
            if isinstance(sync_every, QSR)
            else check_period("sync_every", sync_every)
        )
        self.warmup_steps = check_period("warmup_steps", warmup_steps, least=0)
        if common.get("anchor_device") is not None and common.get("codec") is None:
            raise ValueError(
                "anchor_device must be None without a codec, got "
                f"{common['anchor_device']!r}: there is no anchor."
            )
        self.average_states = average_states
        super().__init__(params, **common)

    def _config(self) -> dict[str, Any]:
        rule = self.sync_every
        return {
            "sync_every": repr(rule) if isinstance(rule, QSR) else rule,
            "average_states": self.average_states,
            "warmup_steps": self.warmup_steps,
        }

    def _lr(self) -> float:
        return float(self.param_groups[0]["lr"])

    def _streams(self, params: dict[str, Tensor], states: States) -> list[Stream]:
        schedule: Schedule
        if isinstance(self.sync_every, QSR):
            schedule = ByLearningRate(self.sync_every, self._lr, self._overlap)
        else:
            schedule = Periodic(
                self.sync_every, overlap=self._overlap, warmup=self.warmup_steps
            )
        device, codec = self._anchor_device, self._codec
        streams = [parameter_mean(Layout(params), schedule, codec, device)]
        if self.average_states:
            streams += [
                AverageState(name, states, params, Layout(examples), schedule)
                for name, examples in states.names(params).items()
            ]
        return streams
