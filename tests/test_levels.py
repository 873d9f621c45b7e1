"""Local SGD in levels: often within a site, rarely between sites."""

import pytest
import torch
import torch.distributed as dist

import lowcomm
from lowcomm.testing import run_workers
from toy import (
    CURVATURE,
    TARGETS,
    inner_state_of,
    network,
    parameters_of,
    same,
    start,
    through_a_file,
    train,
)

SITES = [(0, 1), (0, 1), (2, 3), (2, 3)]


def local_sgd(params, rank, *, sync_every=4, period=2, **settings):
    return lowcomm.LocalSGD(
        params,
        lr=0.01,
        sync_every=sync_every,
        levels=[(SITES[rank], period)],
        **settings,
    )


def test_levels_follow_the_worked_numbers():
    """Every step within a site, every four between; workers 2 and 3 moved by one."""
    targets = torch.cat([TARGETS, TARGETS + 1])

    def worker(rank, group):
        x = start()
        inner = torch.optim.SGD([x], lr=0.1)
        opt = lowcomm.LocalSGD(inner, sync_every=4, levels=[(SITES[rank], 1)])
        points = []
        for _ in range(4):
            x.grad = CURVATURE * (x.detach() - targets[rank])
            opt.step()
            points.append(x.tolist())
        return points

    # Worked out by an independent implementation of the equations.
    one, two, three, four = zip(*lowcomm.simulate(worker, 4), strict=True)
    for points, first, second in (
        (one, [0.2, 0.3], [0.3, 0.7]),
        (two, [0.38, 0.18], [0.57, 0.82]),
        (three, [0.542, 0.108], [0.813, 0.892]),
        (four, [0.85975, 0.5], [0.85975, 0.5]),
    ):
        first, second = (pytest.approx(x, rel=0, abs=1e-12) for x in (first, second))
        assert list(points) == [first, first, second, second]


def test_sites_are_equal_in_their_rounds_and_all_in_the_others():
    def worker(rank, group):
        model = network()
        opt = local_sgd(model.parameters(), rank, average_states=True)
        seen = []
        for step in range(8):
            train(model, opt, range(step, step + 1), rank)
            seen.append([parameters_of(model), inner_state_of(opt)])
        return seen

    a, b, c, d = lowcomm.simulate(worker, 4)
    for step in range(1, 9):
        i = step - 1
        assert same(a[i], b[i]) == same(c[i], d[i]) == (step % 2 == 0)
        assert same(a[i], c[i]) == (step % 4 == 0)


def test_three_levels():
    sites = [((2 * (rank // 2), 2 * (rank // 2) + 1), 1) for rank in range(8)]
    cities = [((0, 1, 2, 3), 2) if rank < 4 else ((4, 5, 6, 7), 2) for rank in range(8)]

    def worker(rank, group):
        x = torch.nn.Parameter(torch.tensor([float(rank)]))
        x.grad = torch.zeros(1)
        opt = lowcomm.LocalSGD(
            torch.optim.SGD([x], lr=1.0),
            sync_every=4,
            init_sync=False,
            levels=[cities[rank], sites[rank]],  # in any order
        )
        points = []
        for _ in range(4):
            opt.step()
            points.append(x.item())
        return points

    steps = list(zip(*lowcomm.simulate(worker, 8), strict=True))
    assert steps[0] == (0.5, 0.5, 2.5, 2.5, 4.5, 4.5, 6.5, 6.5)
    assert steps[1] == steps[2] == (1.5,) * 4 + (5.5,) * 4
    assert steps[3] == (3.5,) * 8


@pytest.mark.parametrize("settings", [{}, {"overlap": 1}, {"warmup_steps": 3}])
def test_workers_may_finish_at_any_time(settings):
    """In the middle of a round, of whatever level."""

    def worker(rank, group):
        model = network()
        opt = local_sgd(model.parameters(), rank, timeout_s=5.0, **settings)
        ended = []
        for first, last in ((0, 5 + 3 * rank), (20, 31 - 3 * rank)):
            train(model, opt, range(first, last), rank)
            opt.finish()
            ended.append(parameters_of(model))
        return ended

    first, *others = lowcomm.simulate(worker, 4)
    assert all(same(first, other) for other in others)


@pytest.mark.parametrize("settings", [{}, {"overlap": 1, "average_states": True}])
def test_a_run_resumes_from_any_step(settings):
    def worker(resume_at):
        def body(rank, group):
            model = network()
            opt = local_sgd(model.parameters(), rank, **settings)
            for step in range(11):
                if step == resume_at:
                    saved = through_a_file([model.state_dict(), opt.state_dict()])
                    model = network()
                    opt = local_sgd(model.parameters(), rank, **settings)
                    model.load_state_dict(saved[0])
                    opt.load_state_dict(saved[1])
                train(model, opt, range(step, step + 1), rank)
            return parameters_of(model), inner_state_of(opt)

        return lowcomm.simulate(body, 4)

    straight = worker(None)
    assert all(same(straight, worker(step)) for step in range(2, 10))


def test_bytes_within_a_site_are_fewer():
    def worker(rank, group):
        model = torch.nn.Linear(64, 256)
        opt = local_sgd(model.parameters(), rank)
        model(torch.ones(1, 64)).sum().backward()
        sent = []
        for _ in range(4):
            opt.step()
            sent.append(opt.stats.bytes_sent)
        return sent

    size = 4 * 65 * 256
    for sent in lowcomm.simulate(worker, 4):
        assert sent[1] == pytest.approx(2 * size * 1 / 2, rel=0.01)
        assert sent[3] - sent[1] == pytest.approx(2 * size * 3 / 4, rel=0.01)


def test_sites_must_be_a_partition():
    sites = [(0, 1), (1, 2), (1, 2), (3,)]

    def worker(rank, group):
        with pytest.raises(lowcomm.PeerMismatch, match=r"got \[0, 1\] on rank 0 and"):
            lowcomm.LocalSGD(
                network().parameters(), sync_every=4, levels=[(sites[rank], 2)]
            )

    lowcomm.simulate(worker, 4)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"levels": [((0,), 4)]}, ValueError, "levels must have different periods sho"),
        ({"levels": [((0,), 2), ((0,), 2)]}, ValueError, "levels must have different"),
        ({"levels": [((0,), 0)]}, ValueError, r"levels\[0\]\[1\] must be at least 1"),
        ({"levels": [(0, 2)]}, TypeError, "levels must have sites of ranks"),
        ({"levels": [((0.0,), 2)]}, TypeError, "levels must have sites of ranks"),
        (
            {"levels": ((0,), 2)},
            TypeError,
            r"levels\[0\] must be a site and its period",
        ),
        ({"levels": [((0, 1), 2)]}, ValueError, r"different ranks among \(0,\), got"),
        ({"levels": [(None, 2)]}, TypeError, "got None. The period of all"),
        ({"codec": "int8"}, ValueError, "levels must be None beside a QSR or a codec"),
        ({"sync_every": lowcomm.QSR(4, 0.1)}, ValueError, "beside a QSR or a codec"),
        ({"overlap": 2}, ValueError, "overlap must be smaller than the period"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings, error, words):
    settings = {"sync_every": 4, "levels": [((0,), 2)]} | settings
    with pytest.raises(error, match=words):
        lowcomm.LocalSGD(network().parameters(), **settings)


def in_levels(rank, as_groups):
    model = network(dtype=torch.float32)
    groups = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3))] if as_groups else ()
    site = groups[rank // 2] if as_groups else SITES[rank]
    opt = lowcomm.LocalSGD(
        model.parameters(), lr=0.01, sync_every=4, levels=[(site, 2)], timeout_s=10.0
    )
    train(model, opt, range(6), rank)
    trained = parameters_of(model)
    train(model, opt, range(6, 9 + rank), rank)
    opt.finish()
    return trained, parameters_of(model)


@pytest.mark.workers
def test_processes_in_process_groups_have_the_bits_of_simulated_workers():
    simulated = lowcomm.simulate(lambda rank, group: in_levels(rank, False), 4)
    assert same(run_workers(in_levels, 4, True), simulated)
