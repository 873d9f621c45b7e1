"""NoLoCo: pairs, the range that keeps them together, rounds without a partner."""

import atexit
import os
import signal
import subprocess
import time

import pytest
import torch
from torch import nn

import lowcomm
from lowcomm.optim._outer import heavy_ball_
from lowcomm.sync.peers import Pairs
from lowcomm.sync.turns import alone
from lowcomm.testing import run_workers
from toy import (
    CURVATURE,
    TARGETS,
    network,
    parameters_of,
    same,
    snapshot,
    start,
    train,
)

# Workers 2 and 3 have the targets of 0 and 1, moved by one.
FOUR_TARGETS = torch.cat([TARGETS, TARGETS + 1])

LINK = lowcomm.Link(gbit_s=1.0, latency_s=0.01, step_s=1.0)


def descend(x, opt, rank, num_steps):
    """Steps on the quadratic of one of four workers."""
    for _ in range(num_steps):
        x.grad = CURVATURE * (x.detach() - FOUR_TARGETS[rank])
        opt.step()


def adam(x):
    return torch.optim.Adam([x], lr=0.1, betas=(0.9, 0.99))


def anchors_after_rounds(num_workers, num_rounds, **settings):
    def worker(rank, group):
        x = start()
        opt = lowcomm.NoLoCo(adam(x), sync_every=2, **settings)
        points = []
        for _ in range(num_rounds):
            descend(x, opt, rank, 2)
            points.append(x.tolist())
        return points

    return list(zip(*lowcomm.simulate(worker, num_workers), strict=True))


# Numbers and identities


def test_two_workers_follow_the_worked_numbers():
    first, second = anchors_after_rounds(2, 2)
    near = pytest.approx([0.13983073435363508, 0.4996798219139801], rel=0, abs=1e-9)
    assert list(first) == [near, near]
    near = pytest.approx([0.3488017620942144, 0.49905133523419676], rel=0, abs=1e-9)
    assert list(second) == [near, near]


@pytest.mark.parametrize("gamma", [None, 0.7])
def test_four_workers_in_given_pairs_follow_the_worked_numbers(gamma):
    pairs = [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]]
    points = anchors_after_rounds(4, 3, gamma=gamma, peers=lambda round: pairs[round])
    second = [
        [0.3487177562732349, 0.36040006665956215],
        [0.3494600388792612, 0.6390876484028061],
        [0.34879067804744757, 0.36091235159719404],
        [0.34953296065347383, 0.639599933340438],
    ]
    third = [
        [0.590310528571306, 0.38848014237065964],
        [0.592468943568555, 0.611430208],
        [0.591887878794, 0.388569792],
        [0.590917116, 0.611519858],
    ]
    assert list(points[1]) == [pytest.approx(row, rel=0, abs=1e-9) for row in second]
    assert list(points[2]) == [pytest.approx(row, rel=0, abs=2e-9) for row in third]


def test_two_tensors_follow_the_equation():
    """beta and gamma apart, by hand, over four rounds of random pairs."""
    alpha, beta, gamma = 0.5, 0.9, 0.3
    points = anchors_after_rounds(
        4, 4, outer_lr=beta, outer_momentum=alpha, gamma=gamma, seed=3
    )
    xs = [start() for _ in range(4)]
    inners = [adam(x) for x in xs]
    phi = [x.detach().clone() for x in xs]
    delta = [torch.zeros(2, dtype=torch.float64) for _ in xs]
    for round in range(4):
        for rank in range(4):
            descend(xs[rank], inners[rank], rank, 2)
        means = {}
        for rank in range(4):
            pair = Pairs(seed=3)((0, 1, 2, 3), rank, round, step=0)
            assert rank in pair
            means[rank] = (
                sum(xs[j].detach() - phi[j] for j in pair) / len(pair),
                sum(phi[j] for j in pair) / len(pair),
            )
        for rank, (moved, anchor) in means.items():
            delta[rank] = (
                alpha * delta[rank] + beta * moved + gamma * (anchor - phi[rank])
            )
        for rank in range(4):
            phi[rank] = phi[rank] + delta[rank]
            xs[rank].data.copy_(phi[rank])
        expected = [pytest.approx(x.tolist(), rel=0, abs=1e-12) for x in xs]
        assert list(points[round]) == expected


def test_a_group_of_everyone_is_diloco_with_a_heavy_ball():
    def worker(make):
        def body(rank, group):
            model = network()
            opt = make(model.parameters())
            train(model, opt, range(12), rank)
            return parameters_of(model)

        return lowcomm.simulate(body, 3)

    everyone = worker(
        lambda p: lowcomm.NoLoCo(
            p, lr=0.01, sync_every=3, peers=lambda round: [(0, 1, 2)]
        )
    )
    diloco = worker(
        lambda p: lowcomm.DiLoCo(
            p, lr=0.01, sync_every=3, outer_lr=0.7, outer_momentum=0.5, nesterov=False
        )
    )
    torch.testing.assert_close(everyone, diloco, rtol=0, atol=1e-12)


def test_alone_it_is_diloco_with_a_heavy_ball():
    def trained(make):
        model = network()
        train(model, make(model.parameters()), range(12))
        return parameters_of(model)

    torch.testing.assert_close(
        trained(lambda p: lowcomm.NoLoCo(p, lr=0.01, sync_every=3)),
        trained(
            lambda p: lowcomm.DiLoCo(
                p,
                lr=0.01,
                sync_every=3,
                outer_lr=0.7,
                outer_momentum=0.5,
                nesterov=False,
            )
        ),
        rtol=0,
        atol=1e-12,
    )


# Pairs


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 5, 7, 8])
def test_pairs_are_a_matching_of_all(num_workers):
    members = tuple(range(num_workers))
    met = set()
    for round in range(60):
        groups = [Pairs(seed=1)(members, rank, round, step=0) for rank in members]
        assert all(groups[m] == group for group in groups for m in group)
        assert sum(len(group) == 1 for group in set(groups)) == num_workers % 2
        met |= set(groups)
    # Everybody meets everybody, and of an odd number everyone rests.
    pairs = num_workers * (num_workers - 1) // 2
    assert len(met) == pairs + (num_workers if num_workers % 2 else 0)


def test_pairs_depend_on_the_seed_and_on_who_is_there():
    def rounds(seed, members):
        peers = Pairs(seed)
        return [peers(members, 0, round, step=0) for round in range(20)]

    assert rounds(0, tuple(range(8))) != rounds(1, tuple(range(8)))
    assert all(partner != (0, 3) for partner in rounds(0, (0, 1, 2, 4, 5, 6)))


@pytest.mark.parametrize("num_workers", [3, 5])
def test_of_an_odd_number_one_steps_alone(num_workers):
    def worker(rank, group):
        model = network()
        opt = lowcomm.NoLoCo(model.parameters(), lr=0.01, sync_every=2)
        train(model, opt, range(9), rank)
        opt.finish()
        return opt.stats.skipped_rounds, parameters_of(model)

    first, *others = lowcomm.simulate(worker, num_workers)
    assert first[0] == 0
    assert all(same(first, other) for other in others)


# The range of gamma


@pytest.mark.parametrize("num_workers", [8, 16, 64])
def test_workers_stay_together_inside_the_range_only(num_workers):
    """In directions without curvature, 200 rounds at .7 and 1.5 times the limit."""

    def spread(gamma):
        members = tuple(range(num_workers))
        generator = torch.Generator().manual_seed(0)
        anchors = torch.randn(num_workers, 32, generator=generator).double()
        momenta = torch.zeros_like(anchors)
        for round in range(200):
            means = torch.stack(
                [
                    anchors[list(Pairs(seed=0)(members, rank, round, step=0))].mean(0)
                    for rank in members
                ]
            )
            delta = gamma * (anchors - means)
            heavy_ball_(anchors, delta, momenta, lr=1.0, beta=0.5)
        return anchors.std(0).square().mean().sqrt().item()

    limit = 2 * (1 - 0.5**2)
    assert spread(0.7 * limit) <= 1e-6
    assert spread(1.5 * limit) >= 1e6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"outer_momentum": 0.9}, r"below 2 \(1 - outer_momentum\^2\) = 0.38, got out"),
        ({"outer_momentum": 0.5, "gamma": 1.5}, "= 1.5, got gamma=1.5 with outer_mom"),
        ({"gamma": 0.0}, "gamma must be above 0"),
        ({"gamma": -0.1}, "gamma must be a finite number of at least 0"),
        ({"gamma": float("nan")}, "gamma must be a finite number"),
        ({"outer_lr": 0.0}, "gamma must be above 0.*got outer_lr=0.0, which gamma fol"),
        ({"outer_momentum": 1.0}, "outer_momentum must be at least 0 and below 1"),
        ({"sync_every": 0}, "sync_every must be at least 1"),
        ({"overlap": 4}, "overlap must be smaller than the period"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        lowcomm.NoLoCo(network().parameters(), **{"sync_every": 4} | settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"seed": 0.5}, "seed must be a whole"), ({"peers": [(0, 1)]}, "peers must be")],
)
def test_an_argument_of_another_type_is_refused(settings, words):
    with pytest.raises(TypeError, match=words):
        lowcomm.NoLoCo(network().parameters(), sync_every=4, **settings)


def test_the_outer_rate_can_be_set_within_the_range():
    opt = lowcomm.NoLoCo(network().parameters(), sync_every=4)
    opt.outer_lr = 1.4
    with pytest.raises(ValueError, match="gamma must be"):
        opt.outer_lr = 1.5
    assert opt.outer_lr == 1.4


# Bytes


@pytest.mark.parametrize(
    ("settings", "tensors"),
    [
        ({}, 1.0),
        ({"gamma": 0.7}, 1.0),  # the same as the outer rate
        ({"gamma": 0.4}, 2.0),
        ({"codec": "int8"}, 1.0 + 8.0625 / 32),
        ({"codec": "int4", "gamma": 0.4}, 1.0 + 4.0625 / 32),
    ],
)
def test_bytes_of_a_round_are_those_of_one_or_two_tensors(settings, tensors):
    def worker(rank, group):
        model = nn.Linear(64, 512)
        opt = lowcomm.NoLoCo(model.parameters(), lr=0.01, sync_every=2, **settings)
        model(torch.ones(1, 64)).sum().backward()
        opt.step()
        opt.step()
        return opt.stats.bytes_sent

    expected = tensors * 4 * 65 * 512
    for sent in lowcomm.simulate(worker, 4):
        assert sent == pytest.approx(expected, rel=0.01)


# Without a partner


def test_workers_may_finish_at_any_time():
    """Who is in finish is missing from the others' rounds, and nobody waits."""

    def worker(rank, group):
        model = network()
        opt = lowcomm.NoLoCo(model.parameters(), lr=0.01, sync_every=2, timeout_s=5)
        train(model, opt, range(4 + 9 * rank), rank)
        opt.finish()
        ended = parameters_of(model)
        train(model, opt, range(40, 49), rank)
        opt.finish()
        return ended, parameters_of(model)

    for num_workers in (2, 3, 4):
        first, *others = lowcomm.simulate(worker, num_workers)
        assert all(same(first, other) for other in others)


def test_a_worker_that_has_failed_is_done_without():
    def worker(rank, group):
        model = network()
        opt = lowcomm.NoLoCo(model.parameters(), lr=0.01, sync_every=2, timeout_s=5)
        train(model, opt, range(5), rank)
        if rank == 2:
            raise KeyError("this worker's own")
        train(model, opt, range(5, 30), rank)
        assert opt.stats.rounds == 15
        return parameters_of(model)

    with pytest.raises(KeyError):  # and nothing else
        lowcomm.simulate(worker, 4)


def test_a_late_partner_costs_one_timeout_and_is_met_again():
    """Worker 3 stands still for 10 s; others do not wait longer than 3 s for it."""

    def worker(rank, group):
        model = network()
        opt = lowcomm.NoLoCo(model.parameters(), lr=0.01, sync_every=2, timeout_s=3.0)
        for step in range(20):
            if rank == 3 and step == 5:
                for _ in range(10):
                    group.tick()
            train(model, opt, range(step, step + 1), rank)
        trained = group.now()
        opt.finish(timeout_s=20.0)
        return trained, opt.stats.rounds, parameters_of(model)

    *others, late = lowcomm.simulate(worker, 4, link=LINK)
    assert all(same(result[1:], late[1:]) for result in others)
    assert late[0] == pytest.approx(30, abs=0.5)
    # Its partners in the rounds at steps 6, 8, 10, 12 waited, or somebody for those.
    assert any(time > 22.9 for time, *_ in others)
    assert all(time < 20 + 4 * 3.0 + 0.5 for time, *_ in others)


@pytest.mark.parametrize(
    ("num_steps", "stands_still", "pause_s"),
    [
        ((4, 3), 3, 10),  # right before it finishes; the other waits for its round
        ((12, 3), 1, 7),  # the other declines rounds that it never takes
        ((12, 12), 1, 7),
        ((3, 12), 1, 7),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"gamma": 0.4}, {"overlap": 1}])
def test_a_worker_that_was_late_may_finish_early(
    num_steps, stands_still, pause_s, settings
):
    """What it owed is answered by its being finished, and nobody waits in vain."""

    def worker(rank, group):
        model = network()
        opt = lowcomm.NoLoCo(
            model.parameters(), lr=0.01, sync_every=2, timeout_s=3.0, **settings
        )
        ended = []
        for _ in range(2):
            for step in range(num_steps[rank]):
                if rank == 1 and step == stands_still:
                    for _ in range(pause_s):
                        group.tick()
                train(model, opt, range(step, step + 1), rank)
            if rank == 1 and stands_still == num_steps[1]:
                for _ in range(pause_s):
                    group.tick()
            opt.finish(timeout_s=60.0)
            ended.append(parameters_of(model))
        return ended

    first, second = lowcomm.simulate(worker, 2, link=LINK)
    assert same(first, second)


def test_of_a_group_of_three_the_others_go_on_together():
    """When the third is late in round 1, and in rounds of two after it."""

    def worker(rank, group):
        x = nn.Parameter(torch.tensor([float(rank)]))
        x.grad = torch.zeros(1)
        opt = lowcomm.NoLoCo(
            torch.optim.SGD([x], lr=1.0),
            sync_every=2,
            timeout_s=3.0,
            init_sync=False,
            peers=lambda round: [(0, 1, 2)] if round == 1 else [(0, 1)],
        )
        met = []
        for step in range(8):
            if rank == 2 and step == 3:
                for _ in range(60):
                    group.tick()
            sent = opt.stats.bytes_sent
            opt.step()
            met.append(opt.stats.bytes_sent - sent > 80)
        streams = opt.stats.streams.values()
        assert opt.stats.bytes_sent == sum(stream.bytes_sent for stream in streams)
        return met[1::2]

    first, second, _ = lowcomm.simulate(worker, 3, link=LINK)
    assert first == second
    assert first[0] and all(first[2:])


def test_a_run_resumes_after_a_round_was_declined(caplog):
    """One is late in the first round; the second is declined, and still under way."""

    def build():
        model = network()
        return model, lowcomm.NoLoCo(
            model.parameters(), lr=0.01, sync_every=2, overlap=1, timeout_s=3.0
        )

    def worker(rank, group):
        model, opt = build()
        for step in range(4):
            if rank == 1 and step == 1:
                for _ in range(7):
                    group.tick()
            train(model, opt, range(step, step + 1), rank)
        states = snapshot([model.state_dict(), opt.state_dict()])
        train(model, opt, range(4, 9), rank)
        return states

    saved = lowcomm.simulate(worker, 2, link=LINK)
    assert not any("finite" in record.getMessage() for record in caplog.records)

    def resumed(rank, group):
        model, opt = build()
        model.load_state_dict(saved[rank][0])
        opt.load_state_dict(saved[rank][1])
        train(model, opt, range(4, 9), rank)
        opt.finish(timeout_s=20.0)
        return opt.stats.rounds, parameters_of(model)

    first, second = lowcomm.simulate(resumed, 2)
    assert same(first, second)


def test_a_group_that_matches_by_order_is_refused():
    group = alone()
    group.matches_tags = False
    lowcomm.DiLoCo(network().parameters(), sync_every=2, group=group)
    with pytest.raises(ValueError, match="group must match messages by their tags"):
        lowcomm.NoLoCo(network().parameters(), sync_every=2, group=group)


def test_a_share_that_is_not_finite_is_left_out():
    def worker(rank, group):
        model = network()
        opt = lowcomm.NoLoCo(model.parameters(), lr=0.01, sync_every=2, gamma=0.4)
        train(model, opt, range(3), rank)
        if rank == 1:
            next(model.parameters()).data.fill_(float("nan"))
        train(model, opt, range(3, 20), rank)
        opt.finish()
        return parameters_of(model)

    first, *others = lowcomm.simulate(worker, 4)
    assert all(same(first, other) for other in others)
    assert all(p.isfinite().all() for p in first)


# Real processes


def loss_of_all(model):
    """Far from the start, the same on all workers."""
    return sum(p.square().sum() for p in model.parameters())


def train_with_a_victim(rank, ending, timeout_s):
    """At its step 16, worker 3 is killed, or stopped for four seconds."""
    model = network(dtype=torch.float32)
    opt = lowcomm.NoLoCo(
        torch.optim.SGD(model.parameters(), lr=0.02),
        sync_every=3,
        timeout_s=timeout_s,
        bucket_bytes=64,
    )
    losses, longest = [], 0.0
    for step in range(60):
        if rank == 3 and step == 16:
            command = f"sleep 4; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", command])
            os.kill(os.getpid(), ending)
        opt.zero_grad()
        loss = loss_of_all(model)
        loss.backward()
        began = time.monotonic()
        opt.step()
        longest = max(longest, time.monotonic() - began)
        losses.append(loss.item())
        time.sleep(0.02)
    opt.finish(timeout_s=20.0)
    return losses, longest, opt.stats.rounds, parameters_of(model)


@pytest.mark.workers
def test_when_one_of_four_is_killed_the_others_go_on_and_end_equal():
    results = run_workers(
        train_with_a_victim, 4, signal.SIGKILL, 20.0, may_die={3}, timeout_s=90
    )
    assert results[3] is None
    for losses, longest, rounds, ended in results[:3]:
        assert rounds == 21  # 20, and the last one
        assert longest < 5.0  # a closed connection is noticed at once
        assert losses[-1] < 0.5 * losses[16]
        assert same(ended, results[0][3])


@pytest.mark.workers
def test_when_one_of_four_stands_still_the_others_go_on_and_it_comes_back():
    results = run_workers(train_with_a_victim, 4, signal.SIGSTOP, 1.0, timeout_s=90)
    for losses, _, rounds, ended in results:
        assert rounds == 21
        assert losses[-1] < 0.5 * losses[16]
        assert same(ended, results[0][3])
    assert all(longest < 2.5 for _, longest, *_ in results[:3])


def evaluate_after_a_death(rank, num_steps_after):
    """Whoever was its partner meanwhile knows of it, the others do not."""
    model = network(dtype=torch.float32)
    opt = lowcomm.NoLoCo(model.parameters(), lr=0.01, sync_every=2, timeout_s=5.0)
    train(model, opt, range(4), rank)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    train(model, opt, range(4, 4 + num_steps_after), rank)
    failures = 0
    for _ in range(3):
        try:
            with opt.global_parameters():
                mean = parameters_of(model)
        except lowcomm.SyncError:
            failures += 1
    train(model, opt, range(10, 16), rank)
    opt.finish()
    return failures, mean, parameters_of(model)


@pytest.mark.workers
@pytest.mark.parametrize("num_steps_after", [0, 2])
def test_a_death_ends_an_evaluation_but_not_the_run(num_steps_after):
    first, *others, _ = run_workers(
        evaluate_after_a_death, 4, num_steps_after, may_die={3}
    )
    assert first[0] == 1
    assert all(same(first, other) for other in others)


def fork_with_an_exchange_abandoned(rank):
    model = network(dtype=torch.float32)
    opt = lowcomm.NoLoCo(model.parameters(), lr=0.01, sync_every=2, timeout_s=1.0)
    train(model, opt, range(1), rank)
    if rank == 1:
        time.sleep(3)
    train(model, opt, range(1, 2), rank)
    code = None
    if rank == 0:  # its partner is still to come
        child = os.fork()
        if child == 0:
            atexit._run_exitfuncs()  # what is registered for the end
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    train(model, opt, range(2, 6), rank)
    opt.finish(timeout_s=20.0)
    return code, parameters_of(model)


@pytest.mark.workers
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded")
def test_a_child_ends_without_taking_the_connections_along():
    first, second = run_workers(fork_with_an_exchange_abandoned, 2)
    assert first[0] == 0
    assert same(first[1], second[1])
