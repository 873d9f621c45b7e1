"""Local SGD: local steps, then the mean of the workers' parameters.

Stich, Local SGD Converges Fast and Communicates Little, 2019.
https://arxiv.org/abs/1805.09767
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from lowcomm.optim._states import States
from lowcomm.optim._streams import AverageState, parameter_mean
from lowcomm.optim._wrapper import AbstractWrapper
from lowcomm.sync.errors import PeerMismatch
from lowcomm.sync.flat import Layout
from lowcomm.sync.group import ranks_of
from lowcomm.sync.peers import Peers, Sites, everyone
from lowcomm.sync.schedule import (
    QSR,
    ByLearningRate,
    Nested,
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
        levels: shorter periods for parts of the workers, as in `[(site, 2)]`: pairs of
            this worker's site, as ranks, a process group or a mesh, and its period. Of
            the periods that are due, the longest wins. For sites with a fast network
            inside and a slow one in between; without a codec.
        common: `group`, `overlap`, `codec`, `weight` and others of `AbstractWrapper`,
            and keywords of AdamW.

    Raises:
        ValueError: if a period is less than 1, or settings exclude each other.
        PeerMismatch: if workers were built differently, or their sites overlap.
    """

    def __init__(
        self,
        params: Any,
        *,
        sync_every: int | QSR,
        average_states: bool = False,
        warmup_steps: int = 0,
        levels: Iterable[tuple[Any, int]] | None = None,
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
        self.levels = self._check_levels(list(levels or ()), common.get("codec"))
        if self.levels and getattr(common.get("group"), "is_elastic", False):
            raise ValueError(
                "levels must be None with workers that come and go, got "
                f"{self.levels}: sites are of fixed ranks."
            )
        super().__init__(params, **common)
        if self.levels:
            self._check_sites(
                self._engine.talk.gather([site for site, _ in self.levels])
            )

    def _check_levels(
        self, levels: list[tuple[Any, int]], codec: Any
    ) -> list[tuple[Any, int]]:
        """Returns the levels in order of their periods."""
        if not levels:
            return []
        if isinstance(self.sync_every, QSR) or codec is not None:
            raise ValueError(
                f"levels must be None beside a QSR or a codec, got {levels=}: a code "
                "is of the displacement from what all agree on, and sites do not."
            )
        for i, level in enumerate(levels):
            if not isinstance(level, Sequence) or len(level) != 2:
                raise TypeError(
                    f"levels[{i}] must be a site and its period, got {level!r}. Write "
                    "levels=[((0, 1), 2)] for ranks 0 and 1 every 2 steps."
                )
            check_period(f"levels[{i}][1]", level[1])
        periods = [period for _, period in levels]
        if len({*periods, self.sync_every}) <= len(periods) or (
            max(periods) > self.sync_every
        ):
            raise ValueError(
                "levels must have different periods shorter than that of all workers, "
                f"got {periods} with sync_every={self.sync_every}."
            )
        return sorted(((site, period) for site, period in levels), key=lambda x: x[1])

    def _check_sites(self, sites: dict[int, list[list[int]]]) -> None:
        """Raises on all workers unless those of a site say the same of it."""
        for rank, mine in sites.items():
            for level, site in enumerate(mine):
                for other in (*site, rank):
                    if rank not in site or sites[other][level] != site:
                        raise PeerMismatch(
                            f"levels must divide the workers into sites, got {site} on "
                            f"rank {rank} and {sites[other][level]} on rank {other} "
                            f"for the period {self.levels[level][1]}."
                        )

    def _config(self) -> dict[str, Any]:
        rule = self.sync_every
        return {
            "sync_every": repr(rule) if isinstance(rule, QSR) else rule,
            "average_states": self.average_states,
            "warmup_steps": self.warmup_steps,
            "levels": [period for _, period in self.levels],
        }

    def _lr(self) -> float:
        return float(self.param_groups[0]["lr"])

    def _streams(self, params: dict[str, Tensor], states: States) -> list[Stream]:
        schedule: Schedule
        peers: Peers = everyone
        if isinstance(self.sync_every, QSR):
            schedule = ByLearningRate(self.sync_every, self._lr, self._overlap)
        elif self.levels:
            # As ranks, which can be copied and compared.
            self.levels = [(ranks_of(s, self._group), p) for s, p in self.levels]
            sites, periods = zip(*self.levels, strict=True)
            schedule = Nested(
                (*periods, self.sync_every), self._overlap, self.warmup_steps
            )
            peers = Sites(sites, schedule.level)
        else:
            schedule = Periodic(
                self.sync_every, overlap=self._overlap, warmup=self.warmup_steps
            )
        device, codec = self._anchor_device, self._codec
        layout = Layout(params)
        streams = [parameter_mean(layout, schedule, codec, device, peers=peers)]
        if self.average_states:
            streams += [
                AverageState(
                    name, states, params, Layout(examples), schedule, peers=peers
                )
                for name, examples in states.names(params).items()
            ]
        return streams
