"""QHAdamW: AdamW whose step mixes the gradient with one or several slow momenta.

Ma and Yarats, Quasi-hyperbolic momentum and Adam for deep learning, 2019.
https://arxiv.org/abs/1810.06801. With averaged states it is the inner optimizer of
MT-DAO: Iacob et al., 2025. https://arxiv.org/abs/2510.05361
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lowcomm.optim._momenta import MomentaOptimizer, Slots, as_tuple, decay_, mix


class QHAdamW(MomentaOptimizer):
    r"""AdamW with a quasi-hyperbolic step.

    .. math::

        u_j &\leftarrow \beta_j u_j + (1 - \beta_j) g, \qquad
        \hat u_j = u_j / (1 - \beta_j^t) \\
        v   &\leftarrow \beta' v + (1 - \beta') g^2, \qquad
        \hat v = v / (1 - \beta'^t) \\
        x   &\leftarrow (1 - \eta \lambda) x - \eta
            \frac{(1 - \sum_j \omega_j) g + \sum_j \omega_j \hat u_j}
                 {\sqrt{\hat v} + \epsilon}

    With :math:`\omega = 1` it is AdamW. Momenta are corrected for their start before
    they are mixed; the gradient needs no correction.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> opt = QHAdamW([weight], lr=0.1, weight_decay=0.0)
    >>> weight.grad = torch.tensor([2.0])
    >>> opt.step()
    >>> weight.data
    tensor([0.9000])

    Args:
        params: parameters, named parameters or groups.
        lr: learning rate, :math:`\eta`.
        betas: :math:`(\beta, \beta')`; several momenta as :math:`((\beta_0, \dots),
            \beta')`, whose states are then `exp_avg_0`, `exp_avg_1`, ...
        omega: :math:`\omega`, or one for each momentum.
        eps: :math:`\epsilon`.
        weight_decay: :math:`\lambda`, decoupled.
        foreach: update all tensors of a group by one call for each operation; None for
            yes, where they are on an accelerator.

    Raises:
        ValueError: if a setting is out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float | Sequence[float], float] = (0.999, 0.999),
        omega: float | Sequence[float] = 0.9,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        foreach: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            omega=omega,
            eps=eps,
            weight_decay=weight_decay,
            foreach=foreach,
        )

    def _update_(self, slots: Slots, group: dict[str, Any]) -> None:
        decays, decay2 = as_tuple(group["betas"][0]), group["betas"][1]
        grads, squares = slots.grads, slots.squares
        decay_(slots, group)
        for momentum, decay in zip(slots.momenta, decays, strict=True):
            torch._foreach_lerp_(momentum, grads, 1 - decay)
        torch._foreach_mul_(squares, decay2)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - decay2)
        corrections = [1 - decay**slots.step for decay in decays]
        direction = mix(grads, slots.momenta, group["omega"], corrections)
        root = torch._foreach_sqrt(squares)
        torch._foreach_div_(root, math.sqrt(1 - decay2**slots.step))
        torch._foreach_add_(root, group["eps"])
        torch._foreach_addcdiv_(slots.params, direction, root, value=-group["lr"])
