"""Outer updates: the papers' equations, on plain tensors, in place."""

from __future__ import annotations

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
            the anchor's shape and dtype; used up.
        momentum: outer momentum, :math:`m`, of the anchor's shape and dtype; updated.
        lr: outer learning rate, :math:`\eta`.
        beta: outer momentum decay, :math:`\beta`.
    """
    momentum.mul_(beta).add_(delta)
    delta.add_(momentum, alpha=beta)
    anchor.sub_(delta, alpha=lr)


def heavy_ball_(
    anchor: Tensor, delta: Tensor, momentum: Tensor, *, lr: float, beta: float
) -> None:
    r"""Moves the anchor along the mean pseudo-gradient with heavy-ball momentum.

    .. math::

        m      &\leftarrow \beta m + \Delta \\
        \theta &\leftarrow \theta - \eta m

    Args: as `nesterov_`; `delta` is left as it is.
    """
    momentum.mul_(beta).add_(delta)
    anchor.sub_(momentum, alpha=lr)


def plain_(anchor: Tensor, delta: Tensor, *, lr: float) -> None:
    r"""Moves the anchor along the mean pseudo-gradient.

    .. math:: \theta \leftarrow \theta - \eta \Delta

    Args: as `nesterov_`; `delta` is left as it is.
    """
    anchor.sub_(delta, alpha=lr)
