"""ADOPT: Adam that divides by the second moment of before, with any decay.

Taniguchi et al., ADOPT: Modified Adam Can Converge with Any β2 with the Optimal Rate,
2024. https://arxiv.org/abs/2411.02853. With `omega` below 1 it is QHADOPT, an inner
optimizer of MT-DAO: Iacob et al., 2025. https://arxiv.org/abs/2510.05361
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowcomm.optim._momenta import MomentaOptimizer, Slots, as_tuple, decay_, mix


class ADOPT(MomentaOptimizer):
    r"""ADOPT, whose step may mix the scaled gradient with slow momenta.

    .. math::

        q   &= \operatorname{clip}\left(
                \frac{g}{\max(\sqrt{v}, \epsilon)}, \pm t^{1/4} \right) \\
        m_j &\leftarrow \beta_j m_j + (1 - \beta_j) q \\
        x   &\leftarrow (1 - \eta \lambda) x - \eta \left(
                (1 - \textstyle\sum_j \omega_j) q + \sum_j \omega_j m_j \right) \\
        v   &\leftarrow \beta' v + (1 - \beta') g^2

    The first step only sets :math:`v = g^2`; :math:`t` counts from the second one.
    Nothing is corrected for its start: with a slow momentum the first steps are short.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> opt = ADOPT([weight], lr=0.1)
    >>> for _ in range(2):
    ...     weight.grad = torch.tensor([2.0])
    ...     opt.step()
    >>> weight.data  # q = 1, m = 0.1
    tensor([0.9900])

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
        betas: tuple[float | Sequence[float], float] = (0.9, 0.9999),
        omega: float | Sequence[float] = 1.0,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
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
        if slots.step > 1:
            decay_(slots, group)
            root = torch._foreach_sqrt(squares)
            torch._foreach_clamp_min_(root, group["eps"])
            scaled = list(torch._foreach_div(grads, root))
            bound = (slots.step - 1) ** 0.25
            torch._foreach_clamp_max_(scaled, bound)
            torch._foreach_clamp_min_(scaled, -bound)
            for momentum, decay in zip(slots.momenta, decays, strict=True):
                torch._foreach_lerp_(momentum, scaled, 1 - decay)
            ones = [1.0] * len(decays)
            direction = mix(scaled, slots.momenta, group["omega"], ones)
            torch._foreach_add_(slots.params, direction, alpha=-group["lr"])
        # The first step takes the square as it is.
        torch._foreach_mul_(squares, decay2 if slots.step > 1 else 0.0)
        share = 1 - decay2 if slots.step > 1 else 1.0
        torch._foreach_addcmul_(squares, grads, grads, value=share)
