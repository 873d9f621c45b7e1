"""Every method on a problem whose numbers were worked out beforehand."""

import pytest
import torch

import lowcomm
from toy import (
    CURVATURE,
    TARGETS,
    inner_state_of,
    network,
    parameters_of,
    pull,
    same,
    scalar,
    slide,
    start,
    train,
    trajectory,
)

ADAMW = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def near(expected):
    return pytest.approx(expected, rel=0, abs=1e-7)


def run(make, num_steps: int, num_workers: int = 2):
    """Positions after every step, and the inner state at the end, of each worker."""

    def worker(rank, group):
        x = start()
        opt = make([x])
        return trajectory(x, opt, rank, num_steps), inner_state_of(opt)[0]

    return lowcomm.simulate(worker, num_workers)


def assert_trajectories(results, expected) -> None:
    for (points, _), wanted in zip(results, expected, strict=True):
        for point, want in zip(points, wanted, strict=True):
            assert point == near(want)


def test_local_sgd_follows_the_worked_numbers():
    # lr 0.1, first worker, step 1: (0, 0.5) - 0.1 * (1, 4) * (-1, 1.5) = (0.1, -0.1);
    # second worker:               (0, 0.5) - 0.1 * (1, 4) * (-3, -0.5) = (0.3, 0.7).
    # Step 2: (0.19, -0.46) and (0.57, 0.82), whose mean is (0.38, 0.18).
    # Step 3: (0.38, 0.18) - 0.1 * (1, 4) * (-0.62, 1.18) = (0.442, -0.292), and
    #         (0.38, 0.18) - 0.1 * (1, 4) * (-2.62, -0.82) = (0.642, 0.508).
    # Step 4: (0.4978, -0.5752) and (0.8778, 0.7048), mean (0.6878, 0.0648).
    results = run(
        lambda p: lowcomm.LocalSGD(torch.optim.SGD(p, lr=0.1), sync_every=2), 4
    )
    assert_trajectories(
        results,
        [
            [(0.1, -0.1), (0.38, 0.18), (0.442, -0.292), (0.6878, 0.0648)],
            [(0.3, 0.7), (0.38, 0.18), (0.642, 0.508), (0.6878, 0.0648)],
        ],
    )


def test_local_adamw_averages_parameters_and_leaves_the_moments_alone():
    # Adam's first step is lr * sign(g) up to eps. First worker, g = (-1, 6):
    # (0, 0.5 * (1 - 0.1 * 0.1)) - 0.1 * (-1, 1) = (0.1, 0.395).
    results = run(lambda p: lowcomm.LocalSGD(p, **ADAMW, sync_every=2), 4)
    synced = (0.1987581919404311, 0.48964702132527016)
    last = (0.3917903112266967, 0.4794105604461695)
    assert_trajectories(
        results,
        [
            [
                (0.09999999900000002, 0.39500000016666664),
                synced,
                (0.2956689798015293, 0.38481683518331),
                last,
            ],
            [
                (0.09999999966666669, 0.5949999995),
                synced,
                (0.2965142769494621, 0.5843439116170909),
                last,
            ],
        ],
    )
    first, second = (state for _, state in results)
    assert first["exp_avg"].tolist() == near([-0.2883448648262082, 1.979579661804421])
    assert second["exp_avg"].tolist() == near(
        [-0.9760603350574147, -0.6270095078380663]
    )
    assert first["exp_avg_sq"].tolist() == near(
        [0.028958307384107422, 1.3128075656999503]
    )
    assert second["exp_avg_sq"].tolist() == near(
        [0.3205265316718161, 0.13343379166727512]
    )


def test_local_adam_averages_both_moments_and_never_the_step():
    results = run(
        lambda p: lowcomm.LocalSGD(p, **ADAMW, sync_every=2, average_states=True), 4
    )
    synced = (0.1987581919404311, 0.48964702132527016)
    last = (0.3695792837898191, 0.4022282108599264)
    assert_trajectories(
        results,
        [
            [
                (0.09999999900000002, 0.39500000016666664),
                synced,
                (0.2794122382640991, 0.4145077838416381),
                last,
            ],
            [
                (0.09999999966666669, 0.5949999995),
                synced,
                (0.29048346050506696, 0.47115122109442537),
                last,
            ],
        ],
    )
    for _, state in results:
        assert state["exp_avg"].tolist() == near(
            [-0.6333169778409027, 0.6595847286103098]
        )
        assert state["exp_avg_sq"].tolist() == near(
            [0.175021466325003, 0.7383227307381408]
        )
        assert state["step"] == 4


# The mean displacement of round 1 is (-0.198758192, 0.010352979) whatever follows. The
# outer step makes of it, from (0, 0.5):
#   Nesterov:   buffer = displacement, moves by 0.7 * (1 + 0.9) = 1.33 of it:
#               (0.264348395, 0.5 - 1.33 * 0.010352979 = 0.486230538);
#   heavy ball: moves by 0.7 of it: (0.139130734, 0.492752915);
#   plain:      moves by all of it: (0.198758192, 0.489647021).
@pytest.mark.parametrize(
    ("outer", "first_round", "second_round"),
    [
        pytest.param(
            {"outer_lr": 0.7, "outer_momentum": 0.9},
            (0.2643483952807733, 0.4862305383626093),
            (0.6307797308804839, 0.46687527599757744),
            id="nesterov",
        ),
        pytest.param(
            {},
            (0.2643483952807733, 0.4862305383626093),
            (0.6307797308804839, 0.46687527599757744),
            id="defaults-are-nesterov",
        ),
        pytest.param(
            {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": False},
            (0.13913073435830176, 0.49275291492768913),
            (0.40077890094976615, 0.4790023961457923),
            id="heavy-ball",
        ),
        pytest.param(
            {"outer_lr": 1.0, "outer_momentum": 0.0},
            (0.1987581919404311, 0.48964702132527016),
            (0.3917903112266967, 0.4794105604461695),
            id="plain-average",
        ),
    ],
)
def test_diloco_follows_the_worked_numbers(outer, first_round, second_round):
    results = run(lambda p: lowcomm.DiLoCo(p, **ADAMW, sync_every=2, **outer), 4)
    for points, state in results:
        assert points[1] == near(first_round)
        assert points[3] == near(second_round)
        assert state["step"] == 4  # the outer step is not a step of the inner one
    # Between exchanges every worker walks by itself.
    assert results[0][0][0] != pytest.approx(results[1][0][0])
    assert results[0][0][2] != pytest.approx(results[1][0][2])


def test_one_worker_without_outer_momentum_is_lookahead():
    # Gradient 1, lr 1, every 2 steps half way back to where the round began:
    #   3 -> 2 -> (1)  and 3 - 0.5 * (3 - 1) =  2
    #   2 -> 1 -> (0)  and 2 - 0.5 * (2 - 0) =  1
    #   1 -> 0 -> (-1) and 1 - 0.5 * (1 + 1) =  0
    x = scalar(3.0)
    opt = lowcomm.DiLoCo(
        torch.optim.SGD([x], lr=1.0), sync_every=2, outer_lr=0.5, outer_momentum=0.0
    )
    seen = []
    for _ in range(6):
        slide(x, opt)
        seen.append(x.item())
    assert seen == [2.0, 2.0, 1.0, 1.0, 0.0, 0.0]


def test_one_worker_with_nesterov_by_hand():
    # Gradient 1, lr 1, H = 2, so every round moves the worker by -2, Delta = 2.
    #   m = 2            3    - 0.5 * (2 + 0.5 * 2)   =  1.5
    #   m = 1 + 2 = 3    1.5  - 0.5 * (2 + 0.5 * 3)   = -0.25
    #   m = 1.5 + 2      -.25 - 0.5 * (2 + 0.5 * 3.5) = -2.125
    x = scalar(3.0)
    opt = lowcomm.DiLoCo(
        torch.optim.SGD([x], lr=1.0), sync_every=2, outer_lr=0.5, outer_momentum=0.5
    )
    seen = []
    for _ in range(6):
        slide(x, opt)
        seen.append(x.item())
    assert seen == pytest.approx([2.0, 1.5, 0.5, -0.25, -1.25, -2.125])


def test_one_worker_with_heavy_ball_by_hand():
    # As above without looking ahead:
    #   m = 2            3 - 0.5 * 2    = 2
    #   m = 1 + 2 = 3    2 - 0.5 * 3    = 0.5
    #   m = 1.5 + 2      0.5 - 0.5 * 3.5 = -1.25
    x = scalar(3.0)
    opt = lowcomm.DiLoCo(
        torch.optim.SGD([x], lr=1.0),
        sync_every=2,
        outer_lr=0.5,
        outer_momentum=0.5,
        nesterov=False,
    )
    seen = []
    for _ in range(6):
        slide(x, opt)
        seen.append(x.item())
    assert seen == pytest.approx([2.0, 2.0, 1.0, 0.5, -0.5, -1.25])


@pytest.mark.parametrize("sync_every", [1, 2, 5])
def test_one_worker_with_a_plain_outer_step_is_the_inner_optimizer(sync_every):
    # Values between 1 and 2 that move little: their differences are exact in floating
    # point, so x - 1 * (x - y) is y to the last bit, and a wrong sign is far off.
    def walk(wrap):
        x = torch.nn.Parameter(torch.linspace(1.4, 1.6, 7, dtype=torch.float64))
        opt = wrap(torch.optim.SGD([x], lr=0.01))
        for _ in range(10):
            x.grad = x.detach() - 1.5
            opt.step()
        return x.detach()

    plain = walk(lambda inner: inner)
    wrapped = walk(
        lambda inner: lowcomm.DiLoCo(
            inner, sync_every=sync_every, outer_lr=1.0, outer_momentum=0.0
        )
    )
    assert torch.equal(plain, wrapped)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("average_states", [False, True])
@pytest.mark.parametrize("sync_every", [1, 2, 5])
def test_local_sgd_alone_is_the_inner_optimizer(sync_every, average_states, dtype):
    plain, wrapped = network(dtype=dtype), network(dtype=dtype)
    bare = torch.optim.AdamW(plain.parameters(), lr=0.03)
    train(plain, bare, range(10))
    opt = lowcomm.LocalSGD(
        wrapped.parameters(),
        lr=0.03,
        sync_every=sync_every,
        average_states=average_states,
    )
    train(wrapped, opt, range(10))
    assert same(parameters_of(plain), parameters_of(wrapped))
    assert same(inner_state_of(bare), inner_state_of(opt))


def test_local_sgd_every_step_is_sgd_on_the_mean_gradient():
    results = run(
        lambda p: lowcomm.LocalSGD(torch.optim.SGD(p, lr=0.1), sync_every=1), 5
    )
    x, expected = start(), []
    opt = torch.optim.SGD([x], lr=0.1)
    for _ in range(5):
        x.grad = CURVATURE * (x.detach() - TARGETS.mean(0))
        opt.step()
        expected.append(x.tolist())
    for points, _ in results:
        for point, want in zip(points, expected, strict=True):
            assert point == pytest.approx(want, rel=0, abs=1e-12)


def test_averaging_adam_every_step_is_not_adam_on_the_mean_gradient():
    # The mean of squares is not the square of the mean.
    results = run(
        lambda p: lowcomm.LocalSGD(p, **ADAMW, sync_every=1, average_states=True), 3
    )
    x = start()
    opt = torch.optim.AdamW([x], **ADAMW)
    for _ in range(3):
        x.grad = CURVATURE * (x.detach() - TARGETS.mean(0))
        opt.step()
    assert results[0][0][-1] != pytest.approx(x.tolist(), abs=1e-3)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_diloco_with_a_plain_outer_step_is_local_sgd(num_workers):
    def worker(wrap):
        def body(rank, group):
            model = network()
            opt = wrap(model.parameters())
            train(model, opt, range(7), rank)
            return parameters_of(model)

        return lowcomm.simulate(body, num_workers)

    averaged = worker(lambda p: lowcomm.LocalSGD(p, lr=0.01, sync_every=3))
    stepped = worker(
        lambda p: lowcomm.DiLoCo(
            p, lr=0.01, sync_every=3, outer_lr=1.0, outer_momentum=0.0
        )
    )
    torch.testing.assert_close(averaged, stepped, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("sync_every", [1, 2, 3, 5])
@pytest.mark.parametrize("method", [lowcomm.LocalSGD, lowcomm.DiLoCo])
def test_exchanges_at_the_end_of_every_period_from_the_first(
    method, sync_every, num_workers
):
    """The first round has as many steps as every other, not one more."""

    def worker(rank, group):
        x = start()
        opt = method(torch.optim.SGD([x], lr=0.01), sync_every=sync_every)
        rounds, points = [], []
        for _ in range(11):
            pull(x, opt, rank)
            rounds.append(opt.stats.rounds)
            points.append(x.tolist())
        return rounds, points

    results = lowcomm.simulate(worker, num_workers)
    for rounds, _ in results:
        assert rounds == [step // sync_every for step in range(1, 12)]
    if num_workers == 2:
        (_, first), (_, second) = results
        agreed = [step for step in range(1, 12) if first[step - 1] == second[step - 1]]
        assert agreed == list(range(sync_every, 12, sync_every))


@pytest.mark.parametrize("num_workers", [2, 3, 4, 5])
def test_after_an_exchange_all_workers_hold_the_same_bits(num_workers):
    """A sum taken in another order on each worker would drift apart slowly."""

    def worker(rank, group):
        model = network(dtype=torch.float32)
        opt = lowcomm.DiLoCo(model.parameters(), lr=0.1, sync_every=2)
        seen = []
        for step in range(20):
            train(model, opt, range(step, step + 1), rank)
            if step % 2:
                seen.append(parameters_of(model))
        return seen

    first, *others = lowcomm.simulate(worker, num_workers)
    for other in others:
        assert same(first, other)
