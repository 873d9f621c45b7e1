"""A network that does its worst: late, out of order, cut off in mid-exchange."""

import functools
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import lowcomm
from lowcomm.sync.group import resolve_group
from lowcomm.testing import run_workers, unreliable
from toy import (
    inner_state_of,
    parameters_of,
    same,
    snapshot,
    tensors_of,
    through_a_file,
    train,
)

SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "blocking": (lowcomm.DiLoCo, {}),
    "overlap": (lowcomm.DiLoCo, {"overlap": 3}),
    "streaming": (lowcomm.DiLoCo, {"fragments": 3, "overlap": 3}),
    "fragments on one step": (lowcomm.DiLoCo, {"fragments": 4, "sync_every": 3}),
    "eager": (lowcomm.DiLoCo, {"eager": True, "outer_lr": 0.4}),
    "int8, error feedback, overlap": (
        lowcomm.DiLoCo,
        {"codec": "int8", "error_feedback": True, "overlap": 2},
    ),
    "int4, error feedback, blocking": (
        lowcomm.DiLoCo,
        {"codec": "int4", "error_feedback": True, "fragments": 2},
    ),
    "averaged states": (lowcomm.LocalSGD, {"average_states": True}),
    "late averaged states": (lowcomm.LocalSGD, {"average_states": True, "overlap": 2}),
    "averages in bf16": (
        lowcomm.LocalSGD,
        {"codec": "bf16", "error_feedback": True, "overlap": 1},
    ),
    "SlowMo": (lowcomm.SlowMo, {}),
    "DESLOC": (lowcomm.DESLOC, {"sync_every": 2, "overlap": 1}),
    "MTDAO": (lowcomm.MTDAO, {}),
}
# Whose rounds go on when a worker is lost.
IN_PAIRS: dict[str, tuple[Any, dict[str, Any]]] = {
    "NoLoCo": (lowcomm.NoLoCo, {}),
    "NoLoCo, two tensors, overlap": (lowcomm.NoLoCo, {"gamma": 0.3, "overlap": 2}),
}
every_setting = pytest.mark.parametrize("name", SETTINGS)

SEEDS = st.integers(0, 2**32 - 1)


def examples(number):
    """So many seeds; a smaller one would not be a simpler one."""
    return settings(max_examples=number, phases=[Phase.generate])


SMALLEST = 384  # bytes of a bucket: a slice of 16 values for each of three workers
NUM_STEPS = 16  # three rounds, and the last one of `eager` has landed


def build(name, bucket_bytes=SMALLEST):
    """602 values: 13 of the smallest buckets, and more than a codec's block."""
    model = nn.Sequential(nn.Linear(3, 100), nn.Tanh(), nn.Linear(100, 2)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    method, keywords = (SETTINGS | IN_PAIRS)[name]
    keywords = {"sync_every": 5, "bucket_bytes": bucket_bytes} | keywords
    return model, method(model.named_parameters(), lr=0.01, **keywords)


def kept(model, opt):
    """All that an exchange reads and writes; and what has been counted."""
    streams = opt.state_dict()["lowcomm"]["sync"]["streams"].values()
    outer = snapshot([stream["tensors"] for stream in streams])
    counts = (opt.stats.steps, opt.stats.rounds, opt.stats.skipped_rounds)
    return [parameters_of(model), inner_state_of(opt), outer, counts]


def whole_run(name, bucket_bytes):
    """What a worker has after training, and after `finish`."""

    def worker(rank, group):
        model, opt = build(name, bucket_bytes)
        train(model, opt, range(NUM_STEPS), rank)
        trained = kept(model, opt)
        opt.finish()
        return trained, kept(model, opt)

    return worker


@functools.cache
def undisturbed(name, bucket_bytes=SMALLEST):
    return lowcomm.simulate(whole_run(name, bucket_bytes), 3)


# Late and out of order


@pytest.mark.parametrize("name", SETTINGS | IN_PAIRS)
@examples(3)
@given(seed=SEEDS, bucket_bytes=st.sampled_from([SMALLEST, 8192]))
def test_delays_and_disorder_change_no_bit(name, seed, bucket_bytes):
    """Reading a buffer too early, or writing one that is still being sent."""
    worker = unreliable(whole_run(name, bucket_bytes), seed=seed)
    expected = undisturbed(name, bucket_bytes)
    assert same(lowcomm.simulate(worker, 3), expected)


def mischief_among_processes(rank):
    def worker(rank, group):
        results = {}
        for name in ("streaming", "int8, error feedback, overlap", "averaged states"):
            model, opt = build(name)
            train(model, opt, range(NUM_STEPS), rank)
            results[name] = kept(model, opt)
        return results

    return unreliable(worker, seed=rank)(rank, resolve_group(None))


@pytest.mark.workers
def test_delays_and_disorder_among_processes_change_no_bit():
    for rank, results in enumerate(
        run_workers(mischief_among_processes, 3, timeout_s=110)
    ):
        for name, result in results.items():
            assert same(result, undisturbed(name)[rank][0]), name


@examples(5)
@given(seed=SEEDS)
def test_one_who_finishes_early_serves_the_others_through_disorder(seed):
    def worker(rank, group):
        model, opt = build("streaming")
        train(model, opt, range([3, 9, 16][rank]), rank)
        opt.finish()
        return parameters_of(model)

    disturbed = lowcomm.simulate(unreliable(worker, seed=seed), 3)
    assert same(disturbed, lowcomm.simulate(worker, 3))


# Cut off


@pytest.mark.parametrize("name", IN_PAIRS)
@examples(5)
@given(seed=SEEDS, rank=st.integers(0, 2), lost_at=st.integers(3, 12))
def test_pairs_do_without_who_is_cut_off(name, seed, rank, lost_at):
    def worker(me, group):
        model, opt = build(name)
        train(model, opt, range(NUM_STEPS), me)
        return kept(model, opt)

    disturbed = unreliable(worker, seed=seed, lost={rank: lost_at})
    for result in lowcomm.simulate(disturbed, 3):
        assert result[3] == undisturbed(name)[0][0][3]  # steps, rounds, skipped ones
        assert all(t.isfinite().all() for t in tensors_of(result))


class Loss(NamedTuple):
    """How a worker found out that another was lost."""

    step: int
    message: str
    before: list[Any]
    after: list[Any]
    saved_before: list[Any]  # when the step before had been taken
    saved_after: list[Any]


def until_lost(name):
    """Trains until a worker is lost; None if none was."""

    def worker(rank, group):
        model, opt = build(name)
        before = []
        opt.inner.register_step_post_hook(
            lambda *_: before.__setitem__(slice(None), kept(model, opt))
        )
        saved = None
        for step in range(NUM_STEPS):
            try:
                train(model, opt, range(step, step + 1), rank)
            except lowcomm.PeerLost as lost:
                now = through_a_file([model.state_dict(), opt.state_dict()])
                after = kept(model, opt)
                return Loss(step + 1, str(lost), before, after, saved, now)
            saved = snapshot([model.state_dict(), opt.state_dict()])
        return None

    return worker


@functools.cache
def lost_in_the_first_round(name, seed=1):
    """With many of the messages already received."""
    return lowcomm.simulate(unreliable(until_lost(name), seed=seed, lost={1: 5}), 3)


def resumed(name, states, steps, *, finish=False):
    def worker(rank, group):
        model, opt = build(name)
        model.load_state_dict(states[rank][0])
        opt.load_state_dict(states[rank][1])
        train(model, opt, steps, rank)
        if finish:
            opt.finish()
        return kept(model, opt)

    return lowcomm.simulate(worker, len(states))


@every_setting
@examples(3)
@given(seed=SEEDS, rank=st.integers(0, 2), lost_at=st.integers(3, 8))
def test_an_exchange_that_fails_changes_nothing(name, seed, rank, lost_at):
    """Half a result, or what a backend left in its buffer, taken for a whole one."""
    worker = unreliable(until_lost(name), seed=seed, lost={rank: lost_at})
    losses = lowcomm.simulate(worker, 3)
    for i, loss in enumerate(losses):
        assert loss is not None, "the loss went unnoticed"
        assert loss.step == losses[0].step
        # All but the counter of steps: parameters, inner and outer state, rounds.
        assert same(loss.after, loss.before[:3] + [(loss.step, *loss.before[3][1:])])
        assert f"rank {i} " not in loss.message.partition("answer")[0], loss.message
    # Who notices names the worker; the others may wait for one who has given up.
    survivors = [loss.message for i, loss in enumerate(losses) if i != rank]
    assert any(f"rank {rank} was lost" in message for message in survivors)


@every_setting
def test_what_is_saved_after_a_loss_holds_no_garbage(name):
    """A share that is saved from the memory into which its result was to come."""
    for loss in lost_in_the_first_round(name):
        assert all(t.isfinite().all() for t in tensors_of(loss.saved_after))


@every_setting
def test_resumed_from_before_the_loss_is_as_if_nothing_had_been_lost(name):
    """The exchange had been cut off already when a checkpoint was made of its share."""
    losses = lost_in_the_first_round(name)
    states = [loss.saved_before for loss in losses]
    steps = range(losses[0].step - 1, NUM_STEPS)
    expected = [trained for trained, _ in undisturbed(name)]
    assert same(resumed(name, states, steps), expected)


@every_setting
def test_resumed_after_a_loss_the_missing_round_is_made_up_for(name):
    losses = lost_in_the_first_round(name)
    states = [loss.saved_after for loss in losses]
    steps = range(losses[0].step, NUM_STEPS)
    for made_up, (trained, _) in zip(
        resumed(name, states, steps), undisturbed(name), strict=True
    ):
        assert made_up[3] == trained[3]
        assert all(t.isfinite().all() for t in tensors_of(made_up))
    first, *others = resumed(name, states, steps, finish=True)
    assert all(same(first[0], other[0]) for other in others)


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        # Steps of 1 and of 3 from 0. After two the exchange of -2 and -6 is lost. After
        # three there are -3 and -9, mean -6; after four -7 and -9, mean -8.
        (0, [[[-1], [-2], [-6], [-8]], [[-3], [-6], [-6], [-8]]]),
        # It was to land after three, at which the loss shows. After four there are -4
        # and -12; what was sent gives way to its mean: -4 + (-4 + 2), -12 + (-4 + 6).
        (1, [[[-1], [-2], [-3], [-6]], [[-3], [-6], [-9], [-10]]]),
    ],
)
def test_a_round_made_up_for_by_hand(overlap, expected):
    def build(rank, group):
        x = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        opt = lowcomm.LocalSGD(
            torch.optim.SGD([x], lr=1.0), sync_every=2, overlap=overlap
        )
        x.grad = torch.full_like(x, 1.0 + 2 * rank)
        return x, opt

    def until_lost(rank, group):
        x, opt = build(rank, group)
        points = []
        for _ in range(4):
            try:
                opt.step()
            except lowcomm.PeerLost:
                return [*points, x.tolist()], x.data, opt.state_dict()
            points.append(x.tolist())

    losses = lowcomm.simulate(unreliable(until_lost, lost={1: 2}), 2)

    def afterwards(rank, group):
        x, opt = build(rank, group)
        points, value, state = losses[rank]
        x.data.copy_(value)
        opt.load_state_dict(state)
        for _ in range(len(points), 4):
            opt.step()
            points.append(x.tolist())
        return points

    assert lowcomm.simulate(afterwards, 2) == expected


def with_broken_exchange(number, worker):
    """The worker, in whose exchange of this number every worker is cut off."""

    def broken(exchange):
        for _ in range(4):
            yield next(exchange)
        raise lowcomm.PeerLost("rank 1 was lost: only in this exchange")

    def cut_off(rank, group):
        run, numbers = group.run, itertools.count(1)

        def run_or_break(exchange):
            return run(broken(exchange) if next(numbers) == number else exchange)

        group.run = run_or_break
        return worker(rank, group)

    return cut_off


# After two exchanges in the construction, of parameters, first and second moments.
@pytest.mark.parametrize("number", [3, 4, 5])
def test_one_of_several_exchanges_of_a_step_may_fail(
    number,
):
    """The one behind it, whose result had come, taken for one that is still unsent."""
    worker = with_broken_exchange(number, until_lost("averaged states"))
    losses = lowcomm.simulate(worker, 3)

    def one_step(rank, group):
        model, opt = build("averaged states")
        model.load_state_dict(losses[rank].saved_after[0])
        opt.load_state_dict(losses[rank].saved_after[1])
        local = []
        opt.inner.register_step_post_hook(lambda *_: local.extend(values(model, opt)))
        train(model, opt, range(5, 6), rank)
        return local, values(model, opt)

    def values(model, opt):
        moments = inner_state_of(opt)
        return [parameters_of(model)] + [
            [moment[name] for moment in moments] for name in ("exp_avg", "exp_avg_sq")
        ]

    results = lowcomm.simulate(one_step, 3)
    for kind in range(3):
        locals_, afters = zip(*((a[kind], b[kind]) for a, b in results), strict=True)
        if kind < number - 3:  # was exchanged in the step before
            assert same(afters, locals_)
            continue
        means = [sum(each) / 3 for each in zip(*locals_, strict=True)]
        for after in afters:
            torch.testing.assert_close(after, means, rtol=1e-12, atol=0)


@every_setting
def test_after_a_loss_every_step_says_so_again_and_nothing_is_written(name):
    """Nor by messages that come when nobody waits for them any more."""

    def worker(rank, group):
        model, opt = build(name)
        messages = []
        for step in range(NUM_STEPS):
            try:
                train(model, opt, range(step, step + 1), rank)
            except lowcomm.PeerLost as lost:
                messages.append(str(lost))
        assert all(t.isfinite().all() for t in tensors_of(kept(model, opt)))
        return messages

    for messages in lowcomm.simulate(unreliable(worker, seed=3, lost={1: 4}), 3):
        assert len(messages) > 1
        assert len(set(messages)) == 1


@pytest.mark.parametrize("name", ["blocking", "averaged states", "SlowMo", "MTDAO"])
@pytest.mark.parametrize("seed", [1, 2])
def test_finish_that_fails_changes_nothing(name, seed):
    def worker(rank, group):
        model, opt = build(name)
        train(model, opt, range(9), rank)
        before = kept(model, opt)
        with pytest.raises(lowcomm.PeerLost):
            opt.finish()
        return same(before, kept(model, opt))

    worker = unreliable(worker, seed=seed, lost={1: 9})
    assert lowcomm.simulate(worker, 3) == [True] * 3


@pytest.mark.parametrize("seed", [1, 2])
def test_global_parameters_that_cannot_be_made_leave_the_local_ones(seed):
    def worker(rank, group):
        model, opt = build("averaged states")
        train(model, opt, range(3), rank)
        before = kept(model, opt)
        with pytest.raises(lowcomm.PeerLost, match="was lost"):
            with opt.global_parameters():
                raise AssertionError("there is no mean")
        return same(before, kept(model, opt))

    worker = unreliable(worker, seed=seed, lost={1: 3})
    assert lowcomm.simulate(worker, 3) == [True] * 3


@pytest.mark.parametrize("number", [1, 2])
def test_a_construction_that_fails_leaves_the_weights_alone(number):
    """In the comparison of settings, and in the broadcast of the weights."""

    def worker(rank, group):
        model = nn.Linear(30, 20)
        with torch.no_grad():
            model.weight.fill_(rank)
        before = parameters_of(model)
        with pytest.raises(lowcomm.PeerLost, match="rank 1 was lost"):
            lowcomm.DiLoCo(model.parameters(), sync_every=2, bucket_bytes=64)
        return same(before, parameters_of(model))

    worker = with_broken_exchange(number, worker)
    assert lowcomm.simulate(worker, 3) == [True] * 3


def test_the_same_seed_is_the_same_run():
    def worker(rank, group):
        model, opt = build("streaming")
        train(model, opt, range(7), rank)
        sent = []
        send = group._group.send
        group._group.send = lambda *message: sent.append(message[2]) or send(*message)
        train(model, opt, range(7, 12), rank)
        return sent

    def run(seed):
        return lowcomm.simulate(unreliable(worker, seed=seed), 3)

    assert run(4) == run(4) != run(5)
