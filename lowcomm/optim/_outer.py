"""Outer updates: the papers' equations, on plain tensors, in place."""

from __future__ import annotations

import torch
from torch import Tensor


def nesterov_(
    anchor: Tensor, delta: Tensor, momentum: Tensor, *, lr: float, beta: float
) -> None:
    r"""Moves the anchor along the mean pseudo-gradient with Nesterov momentum.

    .. math::

        m      &\leftarrow \beta m + \Delta \\
        \theta &\leftarrow \theta - \eta (\Delta + \beta m)

    As `torch.optim.SGD(nesterov=True)` without dampening: the first :math:`m` is
    :math:`\Delta`, so that the first step is :math:`\eta (1 + \beta) \Delta`.

    >>> import torch
    >>> anchor, momentum = torch.tensor([3.0]), torch.zeros(1)
    >>> nesterov_(anchor, torch.ones(1), momentum, lr=0.5, beta=0.5)
    >>> anchor, momentum
    (tensor([2.2500]), tensor([1.]))

    Args:
        anchor: parameters at the last synchronization, :math:`\theta`; updated.
        delta: mean over workers of anchor minus local parameters, :math:`\Delta`, of
            the anchor's shape and dtype.
        momentum: outer momentum, :math:`m`, of the anchor's shape and dtype; updated.
        lr: outer learning rate, :math:`\eta`.
        beta: outer momentum decay, :math:`\beta`.
    """
    _sgd_(anchor, delta, momentum, lr=lr, beta=beta, nesterov=True)


def heavy_ball_(
    anchor: Tensor, delta: Tensor, momentum: Tensor, *, lr: float, beta: float
) -> None:
    r"""Moves the anchor along the mean pseudo-gradient with heavy-ball momentum.

    .. math::

        m      &\leftarrow \beta m + \Delta \\
        \theta &\leftarrow \theta - \eta m

    Args: as `nesterov_`.
    """
    _sgd_(anchor, delta, momentum, lr=lr, beta=beta, nesterov=False)


def plain_(anchor: Tensor, delta: Tensor, *, lr: float) -> None:
    r"""Moves the anchor along the mean pseudo-gradient.

    .. math:: \theta \leftarrow \theta - \eta \Delta

    Args: as `nesterov_`.
    """
    anchor.sub_(delta, alpha=lr)


def slow_momentum_(
    anchor: Tensor,
    delta: Tensor,
    momentum: Tensor,
    *,
    lr: float,
    slow_lr: float,
    beta: float,
) -> None:
    r"""Moves the anchor by a momentum that is measured in inner learning rates.

    .. math::

        u      &\leftarrow \beta u + \Delta / \gamma \\
        \theta &\leftarrow \theta - \alpha \gamma u

    A learning rate of zero moves nothing and leaves the momentum to decay.

    Args:
        anchor: parameters at the last synchronization, :math:`\theta`; updated.
        delta: mean over workers of anchor minus local parameters, :math:`\Delta`.
        momentum: slow momentum, :math:`u`; updated.
        lr: inner learning rate, :math:`\gamma`.
        slow_lr: :math:`\alpha`.
        beta: momentum decay, :math:`\beta`.
    """
    momentum.mul_(beta)
    if lr > 0:
        momentum.add_(delta, alpha=1 / lr)
        anchor.sub_(momentum, alpha=slow_lr * lr)


def _sgd_(
    anchor: Tensor,
    delta: Tensor,
    momentum: Tensor,
    *,
    lr: float,
    beta: float,
    nesterov: bool,
) -> None:
    # What torch.optim.SGD(fused=True) calls: one pass over the three instead of four,
    # a third of the time. Momentum starts at zero, so the first step is no exception.
    torch._fused_sgd_(
        [anchor],
        [delta],
        [momentum],
        weight_decay=0.0,
        momentum=beta,
        lr=lr,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,
    )
