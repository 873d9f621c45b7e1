"""Claims of papers on a noisy quadratic, where an experiment takes seconds.

The loss is a sum over coordinates of curvature x^2 / 2, with curvatures from 0.01 to 1
and independent noise in every worker's gradients.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import lowcomm

NUM_COORDINATES = 64
NOISE = 0.3
CURVATURE = torch.logspace(-2, 0, NUM_COORDINATES)


def start() -> nn.Parameter:
    """Where every worker begins."""
    return nn.Parameter(torch.ones(NUM_COORDINATES))


def gradients(x: nn.Parameter, rank: int, num_steps: int) -> Iterator[None]:
    """Puts a gradient into `x.grad`, step by step; each worker has noise of its own."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(num_steps):
        noise = torch.randn(NUM_COORDINATES, generator=generator)
        x.grad = CURVATURE * x.detach() + NOISE * noise
        yield


def loss_of(x: Tensor) -> float:
    return (CURVATURE * x.detach().square()).sum().item() / 2


def sgd(x: nn.Parameter, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([x], lr=lr)


# -------------------------------------------------------------------------------------
# NoLoCo: how far workers are apart


def spread_of_noloco(lr: float, decays: bool) -> float:
    """Standard deviation of 16 workers' values, at the end of 60 rounds of 25 steps.

    Args:
        lr: inner learning rate.
        decays: along a cosine to zero; else it is constant.
    """
    num_steps = 60 * 25

    def worker(rank: int, group: Any) -> Tensor:
        x = start()
        opt = lowcomm.NoLoCo(sgd(x, lr), sync_every=25)
        values = []
        for step, _ in enumerate(gradients(x, rank, num_steps), start=1):
            if decays:
                done = step / num_steps
                opt.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * done)) / 2
            opt.step()
            if step % 25 == 0 and step > num_steps - (1 if decays else 10) * 25:
                values.append(x.detach().clone())
        return torch.stack(values)

    by_worker = torch.stack(lowcomm.simulate(worker, 16))
    return by_worker.std(dim=0).square().mean().sqrt().item()


def growth_of_pairs(workers: int, momentum: float, gamma: float) -> float:
    """What differences of workers grow by in 100 rounds without a gradient.

    The package refuses a gamma with which many workers drift apart. So here is the
    paper's equation itself: between exchanges nothing moves.
    """
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randn(workers, 256, generator=generator)
    anchors -= anchors.mean(dim=0)
    first, steps = anchors.norm(), torch.zeros_like(anchors)
    for _ in range(100):
        pairs = torch.randperm(workers, generator=generator).view(-1, 2)
        means = torch.empty_like(anchors)
        means[pairs] = anchors[pairs].mean(dim=1, keepdim=True)
        steps = momentum * steps + gamma * (means - anchors)
        anchors = anchors + steps
    return ((anchors - anchors.mean(dim=0)).norm() / first).item()


def limit_of_gamma(workers: int, momentum: float) -> float:
    """Beyond it, differences without curvature grow; docs/methods/noloco.md."""
    others = workers / (workers - 1)
    return 2 * (1 - momentum**2) / (1 + momentum - momentum * others)


# -------------------------------------------------------------------------------------
# DiLoCo: outer steps that come late


def loss_of_late_steps(timing: str, sync_every: int, outer_lr: float) -> float:
    """Mean loss of the mean of 4 workers over the last 10 of 100 rounds.

    Args:
        timing: "sync" waits for the others; "eager" takes its own share at once and
            theirs a round later; "delayed" takes all of it a round later.
        sync_every: steps of a round.
        outer_lr: outer learning rate, with Nesterov momentum 0.9.
    """
    num_rounds = 100
    round_of = _round_delayed if timing == "delayed" else _round_of_package

    def worker(rank: int, group: Any) -> Tensor:
        x = start()
        next_round = round_of(x, timing == "eager", sync_every, outer_lr)
        gradient, values = gradients(x, rank, num_rounds * sync_every), []
        for _ in range(num_rounds):
            next_round(gradient)
            values.append(x.detach().clone())
        return torch.stack(values)

    means = torch.stack(lowcomm.simulate(worker, 4)).mean(dim=0)
    return sum(map(loss_of, means[-10:])) / 10


NextRound = Callable[[Iterator[None]], None]


def _round_of_package(
    x: nn.Parameter, eager: bool, sync_every: int, outer_lr: float
) -> NextRound:
    opt = lowcomm.DiLoCo(
        sgd(x, 0.1), sync_every=sync_every, outer_lr=outer_lr, eager=eager
    )

    def next_round(gradient: Iterator[None]) -> None:
        for _ in range(sync_every):
            next(gradient)
            opt.step()

    return next_round


def _round_delayed(
    x: nn.Parameter, eager: bool, sync_every: int, outer_lr: float
) -> NextRound:
    """What the package does not offer: all restart from an anchor that is a round old.

    A mean of displacements is had by averaging what is put in the parameters' place.
    """
    inner, anchor = sgd(x, 0.1), nn.Parameter(x.detach().clone())
    outer = torch.optim.SGD([anchor], lr=outer_lr, momentum=0.9, nesterov=True)
    share = nn.Parameter(torch.zeros_like(x))
    mean = lowcomm.LocalSGD(sgd(share, 0.0), sync_every=1)
    share.grad = torch.zeros_like(x)
    late: list[Tensor] = []

    def next_round(gradient: Iterator[None]) -> None:
        for _ in range(sync_every):
            next(gradient)
            inner.step()
        with torch.no_grad():
            share.copy_(anchor - x)
        mean.step()
        late.append(share.detach().clone())
        if len(late) > 1:
            anchor.grad = late.pop(0)
            outer.step()
        with torch.no_grad():
            x.copy_(anchor)

    return next_round


# -------------------------------------------------------------------------------------
# MT-DAO: what a momentum remembers


def memory_of_momenta(beta: float) -> list[float]:
    """Cosines of a worker's momentum, just before an exchange.

    8 workers average parameters and states every 32 steps, 40 times.

    Returns:
        To the workers' mean momentum, and to the mean after the last exchange; both
        averaged over workers and the last 20 rounds.
    """
    period, num_rounds = 32, 40

    def worker(rank: int, group: Any) -> Tensor:
        x = start()
        opt = lowcomm.MTDAO([x], lr=0.03, betas=(beta, 0.999), sync_every=period)
        after, pairs = torch.zeros_like(x), []
        for step, _ in enumerate(gradients(x, rank, num_rounds * period), start=1):
            opt.step()
            momentum = opt.state[x]["exp_avg"].detach().clone()
            if step % period == 0:
                after = momentum
            elif step % period == period - 1:
                pairs.append(torch.stack([momentum, after]))
        return torch.stack(pairs[-20:])

    by_worker = torch.stack(lowcomm.simulate(worker, 8))  # workers, rounds, 2, x
    momenta, after = by_worker.unbind(dim=2)
    means = momenta.mean(dim=0, keepdim=True)
    cosine = torch.nn.functional.cosine_similarity
    return [cosine(momenta, other, dim=-1).mean().item() for other in (means, after)]
