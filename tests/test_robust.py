"""Rounds that a few bad shares do not spoil."""

import pytest
import torch
from torch import nn

import lowcomm
from lowcomm.testing import run_workers
from toy import network, parameters_of, same, through_a_file, train

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "sync_every": 1}


def moved_by(slopes, **settings):
    """Where workers are that have gone by `slopes` from zero, after a round."""

    def worker(rank, group):
        x = nn.Parameter(torch.zeros(4))
        x.grad = torch.tensor(slopes[rank])
        inner = torch.optim.SGD([x], lr=1.0)
        opt = lowcomm.DiLoCo(inner, **PLAIN | settings)
        opt.step()
        return x.detach().clone()

    first, *others = lowcomm.simulate(worker, len(slopes))
    assert all(same(first, other) for other in others)
    return (-first).tolist()


UNIT = [1.0, 0.0, 0.0, 0.0]
LONG = [0.0, 100.0, 0.0, 0.0]


def test_a_share_that_is_too_long_is_shortened_to_the_limit(caplog):
    # Lengths 1, 1, 1, 100, median 1: the last counts as 2 long.
    mean = moved_by([UNIT, UNIT, UNIT, LONG], clip_shares=2.0)
    assert mean == pytest.approx([3 / 4, 2 / 4, 0, 0])
    assert "takes 0.02 times rank 3's share: it is 1e+02 long" in caplog.text


def test_weights_count_beside_the_limit():
    # A weight of 3 for the first worker: (3 * 1 + 1 + 1) / 6 and 2 / 6.
    def worker(rank, group):
        x = nn.Parameter(torch.zeros(4))
        x.grad = torch.tensor([UNIT, UNIT, UNIT, LONG][rank])
        inner = torch.optim.SGD([x], lr=1.0)
        weight = 3.0 if rank == 0 else 1.0
        opt = lowcomm.DiLoCo(inner, **PLAIN, clip_shares=2.0, weight=lambda: weight)
        opt.step()
        return (-x).tolist()

    for mean in lowcomm.simulate(worker, 4):
        assert mean == pytest.approx([5 / 6, 2 / 6, 0, 0])


def test_shares_within_the_limit_are_left_as_they_are():
    slopes = [[float(i), 1.0, -2.0, 0.5] for i in range(4)]
    assert moved_by(slopes, clip_shares=3.0) == moved_by(slopes)


def test_of_workers_who_stand_still_nobody_is_shortened():
    zero = [0.0] * 4
    assert moved_by([zero, zero, UNIT], clip_shares=2.0) == pytest.approx(
        [1 / 3, 0, 0, 0]
    )


def test_the_extremes_of_each_value_are_left_out():
    slopes = [[1.0, 9.0, -1.0, 0.0], [2.0, 1.0, 0.0, 0.0], [3.0, 2.0, 1.0, 0.0]]
    slopes += [[1e30, -1e30, 7.0, 0.0]]
    assert moved_by(slopes, trim_shares=1) == [2.5, 1.5, 0.5, 0.0]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_with_too_few_workers_nothing_is_left_out(num_workers):
    slopes = [[float(i)] * 4 for i in range(num_workers)]
    assert moved_by(slopes, trim_shares=1) == moved_by(slopes)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap": 1, "sync_every": 3},
        {"codec": "int8", "error_feedback": True},
        {"fragments": 2, "sync_every": 3},
    ],
)
@pytest.mark.parametrize("robust", [{"clip_shares": 1.1}, {"trim_shares": 1}])
def test_a_run_resumes_and_ends_equal(settings, robust):
    settings = {"lr": 0.01, "sync_every": 2} | settings | robust

    def run(resume_at):
        def worker(rank, group):
            model = network()
            opt = lowcomm.DiLoCo(model.parameters(), **settings)
            for step in range(11):
                if step == resume_at:
                    saved = through_a_file([model.state_dict(), opt.state_dict()])
                    model = network()
                    opt = lowcomm.DiLoCo(model.parameters(), **settings)
                    model.load_state_dict(saved[0])
                    opt.load_state_dict(saved[1])
                train(model, opt, range(step, step + 1), rank)
            train(model, opt, range(11, 13 + rank), rank)
            opt.finish()
            return parameters_of(model)

        return lowcomm.simulate(worker, 3)

    straight = run(None)
    assert same(straight[0], straight[1]) and same(straight[0], straight[2])
    assert all(same(run(step), straight) for step in (4, 7))


def in_processes(rank):
    model = network(dtype=torch.float32)
    for settings in ({"clip_shares": 1.0}, {"trim_shares": 1}):
        opt = lowcomm.DiLoCo(model.parameters(), lr=0.01, sync_every=2, **settings)
        train(model, opt, range(5), rank)
        opt.finish()
    return parameters_of(model)


@pytest.mark.workers
def test_processes_have_the_bits_of_simulated_workers():
    simulated = lowcomm.simulate(lambda rank, group: in_processes(rank), 3)
    assert same(run_workers(in_processes, 3), simulated)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: lowcomm.DiLoCo(p, sync_every=2, clip_shares=0.5), "at least 1, got"),
        (lambda p: lowcomm.DiLoCo(p, sync_every=2, trim_shares=-1), "at least 0"),
        (
            lambda p: lowcomm.DiLoCo(p, sync_every=2, trim_shares=1, weight="steps"),
            "trim_shares must be 0 with weights, got 1 with weight='steps'",
        ),
        (
            lambda p: lowcomm.LocalSGD(p, sync_every=2, trim_shares=1),
            "must be left out with LocalSGD, got Robust.*exchange no pseudo-gradients",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(network().parameters())
