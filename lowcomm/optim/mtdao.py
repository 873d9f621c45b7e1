"""MT-DAO: slow momenta that survive between exchanges, mixed with the fresh gradient.

Iacob et al., MT-DAO: Multi-Timescale Distributed Adaptive Optimizers with Local
Updates, 2026. https://arxiv.org/abs/2510.05361
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowcomm.optim._periods import PARAMS, check_periods, periods_of, state_streams
from lowcomm.optim._states import States
from lowcomm.optim._streams import parameter_mean
from lowcomm.optim._wrapper import AbstractWrapper
from lowcomm.optim.qh_adamw import QHAdamW
from lowcomm.sync.flat import Layout
from lowcomm.sync.schedule import Periodic, check_positive
from lowcomm.sync.stream import Stream

#: The state that a warm start takes over, with its counter.
_SQUARE = "exp_avg_sq"
_RATES = ("lr", "initial_lr")


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
        common: `group`, `overlap`, `codec` (of the parameters alone), `weight` and
            others of `AbstractWrapper`, and keywords of `QHAdamW`.

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

    @torch.no_grad()
    def warm_start(
        self, state_dict: Mapping[str, Any], *, lr_factor: float = 1.0
    ) -> None:
        r"""Goes on from a plain optimizer's run: second moments, counters and rates.

        Copies `exp_avg_sq` and `step` of every parameter. Sets the learning rate of
        each group, and `initial_lr` where the checkpoint has it, to the checkpoint's
        times `lr_factor`. Momenta stay zero; all other settings are this optimizer's.
        Parameters correspond by groups and positions, as in torch; one without state in
        the checkpoint starts anew. The parameters' values are not in it: load the model
        first.

        Every worker calls it with the same checkpoint, before the first step and before
        a scheduler is built. The checkpoint may be of AdamW, `ADOPT`, `QHAdamW` or a
        method over them. In the paper the run before has betas of (0.9, 0.95) and no
        gradient beside its momentum. At the switch momenta are reset and the rate is
        multiplied by 4, or by 2 with three momenta.

        The counters go on, so momenta are hardly corrected for their start: the first
        updates have a weight of about :math:`1 - \omega`, a built-in warm-up. If second
        moments decay otherwise here than in the run before, that should have lasted a
        few times `half_life(betas[1])`: their correction goes by the counters too.

        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> plain = torch.optim.AdamW([weight], lr=0.01, betas=(0.9, 0.95))
        >>> weight.grad = torch.tensor([2.0])
        >>> plain.step()
        >>> opt = MTDAO([weight], betas=(0.999, 0.999), omega=0.98, sync_every=32)
        >>> opt.warm_start(plain.state_dict(), lr_factor=4.0)
        >>> opt.param_groups[0]["lr"], opt.state[weight]["exp_avg_sq"]
        (0.04, tensor([0.2000]))

        Args:
            state_dict: of the optimizer of the run before; left as it is, nothing in it
                is shared.
            lr_factor: what learning rates are multiplied by.

        Raises:
            ValueError: if `lr_factor` is not positive and finite, or if groups, shapes
                or states of the checkpoint do not fit; nothing has changed then.
            RuntimeError: if a step has been taken, or there is state already.
            PeerMismatch: if workers have other counters or rates.
        """
        check_positive("lr_factor", lr_factor)
        steps = self._rounds.stats.steps
        if self._rounds.started or any(self.state.values()):
            raise RuntimeError(
                "warm_start must be called on a new optimizer, got one with a state "
                f"after {steps} steps. Build it again over the parameters."
            )
        saved = self._saved_states(state_dict)
        rates = [
            {key: float(group[key]) * lr_factor for key in _RATES if key in group}
            for group in state_dict["param_groups"]
        ]
        counters = {f"step of {name}": int(own["step"]) for name, own in saved.items()}
        named_rates = {f"rates of group {i}": own for i, own in enumerate(rates)}
        self._engine.talk.agree(self._plan() | counters | named_rates)

        params = {name: self._params[name] for name in saved}
        for name, square in self._states.tensors(_SQUARE, params).items():
            square.copy_(saved[name][_SQUARE])
            state = self.state[params[name]]
            if "step" in state:
                state["step"] = _in_kind_of(state["step"], int(saved[name]["step"]))
        for group, own in zip(self.param_groups, rates, strict=True):
            for key, rate in own.items():
                group[key] = _in_kind_of(group.get(key), rate)

    def _saved_states(self, state_dict: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The checkpoint's states of parameters by name; raises if they do not fit."""
        if not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError(
                "state_dict must have 'state' and 'param_groups', got "
                f"{sorted(state_dict)}. Give what an optimizer's state_dict() returned."
            )
        groups, states = state_dict["param_groups"], state_dict["state"]
        lengths = [len(group["params"]) for group in groups]
        if lengths != [len(group["params"]) for group in self.param_groups]:
            raise ValueError(
                "state_dict must have groups of as many parameters as there are here, "
                f"got {lengths} with "
                f"{[len(group['params']) for group in self.param_groups]} here. Build "
                "the optimizer over the groups of the checkpoint."
            )
        for i, group in enumerate(groups):
            if "lr" not in group:
                raise ValueError(
                    "state_dict must have an 'lr' in every group, got "
                    f"{sorted(group)} in group {i}."
                )
        indices = [index for group in groups for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        named = {id(param): name for name, param in self._params.items()}
        wanted = self._states.names(self._params).get(_SQUARE, {})
        saved: dict[str, dict[str, Any]] = {}
        for index, param in zip(indices, params, strict=True):
            name = named.get(id(param))
            if name not in wanted or not states.get(index):
                continue
            saved[name] = states[index]
            square = saved[name].get(_SQUARE)
            if not isinstance(square, Tensor) or "step" not in states[index]:
                raise ValueError(
                    f"state_dict must have {_SQUARE!r} and 'step' of a parameter, got "
                    f"{sorted(saved[name])} for {name!r}. Give the checkpoint of an "
                    "optimizer with second moments, such as AdamW."
                )
            if square.shape != param.shape:
                raise ValueError(
                    f"state_dict must have tensors of the parameters' shapes, got "
                    f"{tuple(square.shape)} with {tuple(param.shape)} of {name!r}. "
                    "Give the parameters in the order of the checkpoint."
                )
        if not saved:
            raise ValueError(
                f"state_dict must have second moments {_SQUARE!r} that the inner "
                f"optimizer keeps too, got states of {len(states)} parameters, with "
                f"{len(wanted)} here that keep them. Give the checkpoint of an "
                "optimizer that has taken steps."
            )
        return saved


def _in_kind_of(old: Any, value: float) -> Any:
    """The value as a tensor where the old one is a tensor, else as it is."""
    return torch.full_like(old, value) if isinstance(old, Tensor) else value
