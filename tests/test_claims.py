"""What the papers claim, at sizes that a test can afford."""

import math

import pytest
import torch
from torch import nn

import lowcomm

# DES-LOC's toy: noisy gradients of f(x) = (1 - x1)^2 + 100 (x2 - x1^2)^2.

NUM_WORKERS = 16
NUM_PROBLEMS = 16  # in one tensor, each with noise of its own: as many seeds
NUM_ROUNDS = 50
PERIOD = 192


def adam(x):
    return torch.optim.Adam([x], lr=0.1, betas=(0.9964, 0.999), fused=True)


def valley(copies=1):
    """The start (-1.5, 2) of every problem, shape (2, copies * NUM_PROBLEMS)."""
    x = nn.Parameter(torch.tensor([[-1.5], [2.0]]).repeat(1, copies * NUM_PROBLEMS))
    x.grad = torch.zeros_like(x)
    return x


def generators(ranks):
    return [torch.Generator().manual_seed(rank) for rank in ranks]


def go_on(x, opt, noise_of):
    """One round of local steps; each worker's noise comes from its own generator."""
    shape = (PERIOD, 2, NUM_PROBLEMS)
    noise = torch.cat([torch.randn(shape, generator=g) for g in noise_of], dim=2)
    x1, x2 = x.detach()
    grad1, grad2 = x.grad
    for sample in noise.mul_(1.5):
        above = torch.addcmul(x2, x1, x1, value=-1)
        x.grad.copy_(sample)
        grad1.sub_(2).add_(x1, alpha=2).addcmul_(x1, above, value=-400)
        grad2.add_(above, alpha=200)
        opt.step()


def distance(x):
    """To the minimum in (1, 1), on average over the problems."""
    return (x.detach() - 1).norm(dim=0).mean().item()


def simulated(build, num_rounds):
    """Distances of the mean iterate after each round, and rounds of each stream."""

    def worker(rank, group):
        x = valley()
        opt, noise = build(x), generators([rank])
        distances = []
        for _ in range(num_rounds):
            go_on(x, opt, noise)
            distances.append(distance(x))
        return distances, {name: s.rounds for name, s in opt.stats.streams.items()}

    return lowcomm.simulate(worker, NUM_WORKERS)[0]


def stacked(num_rounds, *, reset):
    """The same without the package: all workers in one tensor, all periods equal.

    Args:
        num_rounds: rounds of local steps.
        reset: whether states are set to zero after each round instead of averaged.
    """
    x = valley(NUM_WORKERS)
    opt, noise = adam(x), generators(range(NUM_WORKERS))
    distances = []
    for _ in range(num_rounds):
        go_on(x, opt, noise)
        state = opt.state[x]
        moments = [state["exp_avg"], state["exp_avg_sq"]]
        for tensor in [x] if reset else [x, *moments]:
            by_worker = tensor.detach().view(2, NUM_WORKERS, NUM_PROBLEMS)
            by_worker.copy_(by_worker.mean(1, keepdim=True))
        for tensor in [*moments, state["step"]] if reset else []:
            tensor.zero_()
        distances.append(distance(x))
    return distances


def test_the_stacked_loop_is_local_adam():
    ours, _ = simulated(
        lambda x: lowcomm.LocalSGD(adam(x), sync_every=PERIOD, average_states=True), 2
    )
    assert ours == pytest.approx(stacked(2, reset=False), rel=1e-4)


def test_des_loc_is_as_good_as_local_adam_and_forgetting_the_states_is_not():
    """Second moments averaged every 692 steps, their half-life, instead of 192.

    The toy as published has 256 workers; its learning rate, start and beta1 are not
    published. Here are 16 workers, and rate .1 with beta1 .9964, whose half-life is the
    period. The second pair that was tried, .05 and .99, is left out for time. In it the
    resets are 4.5 times as far: the mean of 16 workers is noisier than that of 256.
    """

    def last(distances):
        return sum(distances[-10:]) / 10

    des_loc, rounds = simulated(
        lambda x: lowcomm.DESLOC(
            adam(x),
            sync_every={"params": PERIOD, "exp_avg": PERIOD, "exp_avg_sq": 692},
        ),
        NUM_ROUNDS,
    )
    local_adam = last(stacked(NUM_ROUNDS, reset=False))
    forgetful = last(stacked(NUM_ROUNDS, reset=True))
    assert rounds == {"parameters": 50, "exp_avg": 50, "exp_avg_sq": 13}
    assert last(des_loc) == pytest.approx(local_adam, rel=0.1)
    assert forgetful > 5 * last(des_loc)


BETA1, BETA2 = 0.9, 0.95
# Largest |exp_avg| / sqrt(exp_avg_sq) of Adam without other workers, whatever its
# gradients: by the inequality of Cauchy and Schwarz.
BOUND = (1 - BETA1) / math.sqrt((1 - BETA2) * (1 - BETA1**2 / BETA2))


def largest_step(first, second):
    """In learning rates, of workers that see few gradients which are not zero."""

    def worker(rank, group):
        x = nn.Parameter(torch.zeros(256))
        opt = lowcomm.DESLOC(
            [x],
            lr=1e-3,
            betas=(BETA1, BETA2),
            sync_every={"params": 10, "exp_avg": first, "exp_avg_sq": second},
        )
        generator, largest = torch.Generator().manual_seed(rank), 0.0
        for _ in range(480):
            seen = torch.rand(256, generator=generator) < 0.02
            x.grad = torch.randn(256, generator=generator) * seen
            opt.step()
            own = opt.state[x]
            steps = own["exp_avg"].abs() / (own["exp_avg_sq"].sqrt() + 1e-8)
            largest = max(largest, steps.max().item())
        opt.finish()
        return largest

    return max(lowcomm.simulate(worker, 4))


def test_moments_averaged_in_the_same_steps_keep_adams_bound_on_a_step():
    assert largest_step(0, 0) <= BOUND
    assert largest_step(40, 40) <= BOUND
    # A second moment alone falls to a quarter at most, when three workers have zeros.
    assert largest_step(60, 30) <= 2 * BOUND
    # A first moment comes to a worker whose second one is almost zero.
    assert largest_step(30, 60) > 100 * BOUND
