"""What is promised beyond being an optimizer: among workers, and to wrong calls."""

import functools
import logging
import math
import re
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowcomm
from toy import (
    inner_state_of,
    loss_of,
    network,
    parameters_of,
    same,
    scalar,
    slide,
    snapshot,
    tensors_of,
    train,
)

METHODS = {
    "LocalSGD": lowcomm.LocalSGD,
    "LocalSGD-states": functools.partial(lowcomm.LocalSGD, average_states=True),
    "DiLoCo": lowcomm.DiLoCo,
    "DiLoCo-plain": functools.partial(lowcomm.DiLoCo, outer_lr=1.0, outer_momentum=0.0),
}
FIRST_GAIN = {
    "LocalSGD": 1.0,
    "LocalSGD-states": 1.0,
    "DiLoCo": 1.33,
    "DiLoCo-plain": 1,
}

every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())


def sgd(*parameters, lr=1.0, **settings):
    return torch.optim.SGD(list(parameters), lr=lr, **settings)


# Finishing


@every_method
def test_finish_ends_a_partial_round_with_equal_parameters(make):
    """The last steps would otherwise never be shared."""

    def worker(rank, group):
        model = network()
        opt = make(model.parameters(), lr=0.05, sync_every=4)
        train(model, opt, range(4), rank)
        full, rounds = parameters_of(model), opt.stats.rounds
        train(model, opt, range(4, 6), rank)
        local = parameters_of(model)
        opt.finish()
        assert opt.stats.rounds == 2 * rounds
        assert opt.stats.steps == 6
        return full, local, parameters_of(model)

    (full, local0, first), (_, local1, second) = lowcomm.simulate(worker, 2)
    assert not same(local0, local1)
    assert same(first, second)
    assert not same(first, full)


@pytest.mark.parametrize("name", METHODS)
def test_finish_takes_one_ordinary_exchange(name):
    def worker(rank, group):
        x = scalar(5.0)
        opt = METHODS[name](sgd(x), sync_every=4)
        for _ in range(2):
            slide(x, opt, 1.0 + rank)
        opt.finish()
        return x.item()

    # Two steps of 1 and of 2 away from 5: mean displacement -3.
    expected = 5 - 3 * FIRST_GAIN[name]
    assert lowcomm.simulate(worker, 2) == pytest.approx([expected] * 2)


@every_method
def test_finish_at_a_round_boundary_exchanges_nothing_more(make):
    def worker(rank, group):
        model = network()
        opt = make(model.parameters(), lr=0.05, sync_every=2)
        train(model, opt, range(4), rank)
        before, rounds = parameters_of(model), opt.stats.rounds
        opt.finish()
        assert same(parameters_of(model), before)
        assert opt.stats.rounds == rounds
        return before

    first, second = lowcomm.simulate(worker, 2)
    assert same(first, second)


@every_method
@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_second_finish_does_nothing(make, num_workers):
    def worker(rank, group):
        model = network()
        opt = make(model.parameters(), lr=0.05, sync_every=4)
        train(model, opt, range(3), rank)
        opt.finish()
        before, stats = parameters_of(model), opt.stats
        opt.finish()
        assert same(parameters_of(model), before)
        assert opt.stats.rounds == stats.rounds
        assert opt.stats.bytes_sent == stats.bytes_sent

    lowcomm.simulate(worker, num_workers)


@every_method
def test_finish_before_any_step_changes_nothing(make):
    def worker(rank, group):
        model = network()
        opt = make(model.parameters(), lr=0.05, sync_every=4)
        before = parameters_of(model)
        opt.finish()
        return before, parameters_of(model)

    for before, after in lowcomm.simulate(worker, 2):
        torch.testing.assert_close(before, after, rtol=1e-12, atol=0)


@every_method
def test_training_goes_on_after_finish_in_the_same_phase(make):
    def worker(rank, group):
        model = network()
        opt = make(model.parameters(), lr=0.05, sync_every=4)
        train(model, opt, range(6), rank)
        opt.finish()
        agreed = []
        for step in range(6, 13):
            train(model, opt, range(step, step + 1), rank)
            agreed.append(parameters_of(model))
        opt.finish()
        agreed.append(parameters_of(model))
        return agreed

    first, second = lowcomm.simulate(worker, 2)
    equal = [same(a, b) for a, b in zip(first, second, strict=True)]
    # Steps 7 to 13; 8 and 12 end a period; then finish.
    assert equal == [False, True, False, False, False, True, False, True]


@every_method
@pytest.mark.parametrize("num_steps", [(6, 10), (3, 6, 10), (10, 3), (0, 5), (4, 5, 8)])
@pytest.mark.parametrize("sync_every", [2, 4])
def test_workers_with_fewer_steps_serve_the_others_until_all_are_there(
    make, num_steps, sync_every
):
    """Uneven data: without service the longer workers would wait for ever."""

    def worker(rank, group):
        model = network()
        opt = make(model.parameters(), lr=0.05, sync_every=sync_every, timeout_s=20)
        train(model, opt, range(num_steps[rank]), rank)
        opt.finish()
        assert opt.stats.steps == num_steps[rank]
        ended = parameters_of(model)
        opt.finish()
        return ended, parameters_of(model)

    first, *others = lowcomm.simulate(worker, len(num_steps))
    for ended, again in [first, *others]:
        assert same(ended, first[0])
        assert same(again, ended)
    assert all(t.isfinite().all() for t in first[0])


@pytest.mark.parametrize("name", METHODS)
def test_a_worker_that_finished_has_no_weight_in_later_rounds(name):
    # Both agree at step 2 on 5 - gain * 3 (steps of 1 and of 2). Then worker 1 goes on
    # alone for one more round of -4 with a fresh or an old outer momentum.
    def worker(rank, group):
        x = scalar(5.0)
        opt = METHODS[name](sgd(x), sync_every=2)
        for _ in range(2 + 2 * rank):
            slide(x, opt, 1.0 + rank)
        opt.finish()
        return x.item()

    agreed = 5 - 3 * FIRST_GAIN[name]
    last = {
        # momentum 0.9 * 3 + 4 = 6.7; moves by 0.7 * (4 + 0.9 * 6.7) = 7.021
        "DiLoCo": agreed - 7.021,
    }.get(name, agreed - 4)
    assert lowcomm.simulate(worker, 2) == pytest.approx([last] * 2)


# Evaluating


def test_global_parameters_of_diloco_are_where_the_round_began():
    """Evaluating the drifted local weights would differ on every worker."""

    def worker(rank, group):
        model = network()
        opt = lowcomm.DiLoCo(model.parameters(), lr=0.05, sync_every=3)
        train(model, opt, range(3), rank)
        agreed = parameters_of(model)
        train(model, opt, range(3, 5), rank)
        local, places = parameters_of(model), [p.data_ptr() for p in model.parameters()]
        stats = opt.stats
        with opt.global_parameters():
            assert same(parameters_of(model), agreed)
            assert [p.data_ptr() for p in model.parameters()] == places
        assert same(parameters_of(model), local)
        assert not same(local, agreed)
        assert opt.stats.bytes_sent == stats.bytes_sent
        assert opt.stats.setup_bytes == stats.setup_bytes  # no exchange at all

    lowcomm.simulate(worker, 2)


def test_one_worker_may_look_at_the_global_parameters_of_diloco_alone():
    def worker(rank, group):
        model = network()
        opt = lowcomm.DiLoCo(model.parameters(), lr=0.05, sync_every=3, timeout_s=10)
        train(model, opt, range(4), rank)
        if rank == 1:
            with opt.global_parameters():
                pass
        train(model, opt, range(4, 6), rank)
        return parameters_of(model)

    first, second = lowcomm.simulate(worker, 2)
    assert same(first, second)


@pytest.mark.parametrize("average_states", [False, True])
def test_global_parameters_of_local_sgd_are_the_mean_of_the_workers_now(
    average_states,
):
    def worker(rank, group):
        model = network()
        opt = lowcomm.LocalSGD(
            model.parameters(), lr=0.05, sync_every=3, average_states=average_states
        )
        train(model, opt, range(4), rank)
        local, state, stats = parameters_of(model), inner_state_of(opt), opt.stats
        with opt.global_parameters():
            mean = parameters_of(model)
        assert same(parameters_of(model), local)
        assert same(inner_state_of(opt), state)
        assert opt.stats.rounds == stats.rounds
        assert opt.stats.bytes_sent == stats.bytes_sent
        assert opt.stats.setup_bytes > stats.setup_bytes
        return local, mean

    (local0, mean0), (local1, mean1) = lowcomm.simulate(worker, 2)
    assert same(mean0, mean1)
    expected = [(a + b) / 2 for a, b in zip(local0, local1, strict=True)]
    torch.testing.assert_close(mean0, expected, rtol=0, atol=1e-12)
    assert not same(local0, local1)


@every_method
def test_looking_at_the_global_parameters_does_not_disturb_training(make):
    def worker(look):
        def body(rank, group):
            model = network()
            opt = make(model.parameters(), lr=0.05, sync_every=3)
            for step in range(7):
                train(model, opt, range(step, step + 1), rank)
                if look:
                    with opt.global_parameters():
                        model(torch.ones(1, 3, dtype=torch.float64))
            return parameters_of(model), inner_state_of(opt)

        return lowcomm.simulate(body, 2)

    assert same(worker(look=True), worker(look=False))


@every_method
def test_local_parameters_are_back_after_an_exception(make):
    def worker(rank, group):
        model = network()
        opt = make(model.parameters(), lr=0.05, sync_every=3)
        train(model, opt, range(4), rank)
        local = parameters_of(model)
        with pytest.raises(ZeroDivisionError):
            with opt.global_parameters():
                raise ZeroDivisionError
        assert same(parameters_of(model), local)
        with opt.global_parameters():  # and may be entered again
            pass
        train(model, opt, range(4, 6), rank)
        return parameters_of(model)

    first, second = lowcomm.simulate(worker, 2)
    assert same(first, second)


@every_method
def test_inside_global_parameters_nothing_that_would_train_is_allowed(make):
    def worker(rank, group):
        model = network()
        opt = make(model.parameters(), lr=0.05, sync_every=3)
        train(model, opt, range(4), rank)
        local = parameters_of(model)
        with opt.global_parameters():
            with pytest.raises((RuntimeError, ValueError), match="global_parameters"):
                opt.step()
            with pytest.raises((RuntimeError, ValueError), match="global_parameters"):
                with opt.global_parameters():
                    pass
            with pytest.raises((RuntimeError, ValueError), match="global_parameters"):
                opt.finish()
        assert same(parameters_of(model), local)
        assert opt.stats.steps == 4

    lowcomm.simulate(worker, 2)


@every_method
def test_before_the_first_step_the_global_parameters_are_the_parameters(make):
    model = network()
    opt = make(model.parameters(), lr=0.05, sync_every=3)
    before = parameters_of(model)
    with opt.global_parameters():
        assert same(parameters_of(model), before)
    assert same(parameters_of(model), before)


# Counting

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@pytest.mark.parametrize("make", [lowcomm.LocalSGD, lowcomm.DiLoCo])
def test_bytes_of_a_mean_follow_the_formula(make, num_workers, dtype):
    """2 S (n - 1) / n for S bytes, in at least single precision, and small headers."""

    def worker(rank, group):
        x = nn.Parameter(torch.zeros(20_000, dtype=dtype))
        opt = make(sgd(x, lr=0.01), sync_every=2)
        sent = []
        for _ in range(4):
            slide(x, opt, rank)
            sent.append(opt.stats.bytes_sent)
        return sent

    size = 20_000 * max(4, dtype.itemsize)
    expected = 2 * size * (num_workers - 1) / num_workers
    for sent in lowcomm.simulate(worker, num_workers):
        assert sent[0] == 0
        assert sent[1] == sent[2] == pytest.approx(expected, rel=0.02)
        assert sent[1] >= expected * 0.99
        assert sent[3] == pytest.approx(2 * sent[1], rel=0.01)
        assert all(isinstance(number, int) for number in sent)


def test_averaging_the_states_sends_each_of_them():
    def worker(rank, group):
        x = nn.Parameter(torch.zeros(20_000))
        opt = lowcomm.LocalSGD([x], lr=0.1, sync_every=1, average_states=True)
        slide(x, opt, 1.0 + rank)
        return opt.stats.bytes_sent

    parameters_and_two_moments = 3 * 80_000
    assert lowcomm.simulate(worker, 2) == pytest.approx(
        [parameters_and_two_moments] * 2, rel=0.02
    )


@every_method
def test_stats_is_a_snapshot(make):
    def worker(rank, group):
        x = scalar(1.0)
        opt = make(sgd(x), sync_every=2)
        empty = opt.stats
        assert (empty.steps, empty.rounds, empty.bytes_sent) == (0, 0, 0)
        assert empty.skipped_rounds == 0
        assert empty.setup_bytes > 0
        for _ in range(4):
            slide(x, opt)
        later = opt.stats
        assert (empty.steps, empty.rounds, empty.bytes_sent) == (0, 0, 0)
        assert later.steps == 4
        assert later.rounds >= 2
        assert later.bytes_sent > 0
        assert later.exposed_s >= 0
        assert later.skipped_rounds == 0

    lowcomm.simulate(worker, 2)


@every_method
def test_alone_rounds_are_counted_and_no_bytes(make):
    x = scalar(1.0)
    opt = make(sgd(x), sync_every=2)
    for _ in range(5):
        slide(x, opt)
    assert opt.stats.rounds == 2
    assert opt.stats.bytes_sent == 0
    assert opt.stats.exposed_s < 1


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("make", [lowcomm.LocalSGD, lowcomm.DiLoCo])
def test_round_hooks_see_every_applied_round(make, num_workers):
    def worker(rank, group):
        x = scalar(1.0)
        opt = make(sgd(x), sync_every=2)
        seen = []
        opt.register_round_hook(
            lambda stats: seen.append((stats.steps, stats.rounds, x.item()))
        )
        after = []
        for _ in range(5):
            slide(x, opt, 1.0 + rank)
            after.append(x.item())
        opt.finish()
        after.append(x.item())
        return seen, after

    for seen, after in lowcomm.simulate(worker, num_workers):
        assert [entry[:2] for entry in seen] == [(2, 1), (4, 2), (5, 3)]
        assert [entry[2] for entry in seen] == [after[1], after[3], after[5]]


def test_several_round_hooks_are_called_in_order():
    opt = lowcomm.LocalSGD(sgd(x := scalar(1.0)), sync_every=1)
    calls = []
    opt.register_round_hook(lambda stats: calls.append("first"))
    opt.register_round_hook(lambda stats: calls.append("second"))
    slide(x, opt)
    assert calls == ["first", "second"]


def test_a_removed_round_hook_is_silent():
    opt = lowcomm.LocalSGD(sgd(x := scalar(1.0)), sync_every=1)
    calls = []
    opt.register_round_hook(calls.append).remove()
    slide(x, opt)
    assert calls == []


def test_the_outer_rate_can_be_set_during_a_run():
    x = scalar(10.0)
    opt = lowcomm.DiLoCo(sgd(x), sync_every=1, outer_lr=0.5, outer_momentum=0.0)
    assert opt.outer_lr == 0.5
    seen = []
    for rate in (0.5, 0.25, 2.0):
        opt.outer_lr = rate
        assert opt.outer_lr == rate
        slide(x, opt)
        seen.append(x.item())
    assert seen == [9.5, 9.25, 7.25]


@pytest.mark.parametrize("value", [-0.5, math.nan, math.inf])
def test_an_outer_rate_that_cannot_work_is_not_set(value):
    opt = lowcomm.DiLoCo(sgd(scalar(1.0)), sync_every=1)
    with pytest.raises(ValueError, match="outer_lr"):
        opt.outer_lr = value
    assert opt.outer_lr == 0.7


# Weights


def weighted_mean(make, weight, num_workers=3):
    """Where workers that moved by -1, -2, -3, ... from 0 agree."""

    def worker(rank, group):
        x = scalar(0.0)
        opt = make(sgd(x), sync_every=1, weight=weight(rank))
        slide(x, opt, 1.0 + rank)
        return x.item()

    values = lowcomm.simulate(worker, num_workers)
    assert len(set(values)) == 1
    return values[0]


@pytest.mark.parametrize("name", METHODS)
def test_a_callable_weighs_this_workers_share(name):
    # (1 * 1 + 2 * 2 + 3 * 3) / (1 + 2 + 3) = 14 / 6
    value = weighted_mean(METHODS[name], lambda rank: lambda: 1.0 + rank)
    assert value == pytest.approx(-14 / 6 * FIRST_GAIN[name])


@pytest.mark.parametrize("name", METHODS)
def test_a_weight_of_zero_leaves_a_worker_out(name):
    value = weighted_mean(METHODS[name], lambda rank: lambda: float(rank == 1))
    assert value == pytest.approx(-2 * FIRST_GAIN[name])


@every_method
def test_only_the_ratio_of_the_weights_matters(make):
    small = weighted_mean(make, lambda rank: lambda: 1e-3 * (1 + rank))
    large = weighted_mean(make, lambda rank: lambda: 1e6 * (1 + rank))
    assert small == pytest.approx(large)


@every_method
def test_weights_that_are_all_zero_apply_nothing(make):
    """Zero shares divided by zero weight would be NaN."""

    def worker(rank, group):
        x = scalar(0.0)
        opt = make(sgd(x), sync_every=1, weight=lambda: 0.0)
        slide(x, opt, 1.0 + rank)
        assert opt.stats.skipped_rounds >= 1
        assert opt.stats.rounds == 0
        return x.item()

    assert lowcomm.simulate(worker, 2) == [-1.0, -2.0]


@every_method
def test_weighing_by_steps_is_equal_in_equal_rounds(make):
    equal = weighted_mean(make, lambda rank: "equal")
    assert weighted_mean(make, lambda rank: "steps") == pytest.approx(equal)


@pytest.mark.parametrize(("weight", "mean"), [("steps", 2.5), ("equal", 2.0)])
def test_weighing_by_steps_counts_the_steps_since_the_last_round(weight, mean):
    # After a common round of 4 steps without movement: 1 step and 3 steps of -1.
    # By steps: (1 * 1 + 3 * 3) / 4 = 2.5; equally: 2.
    def worker(rank, group):
        x = scalar(0.0)
        opt = lowcomm.LocalSGD(sgd(x), sync_every=4, weight=weight)
        for _ in range(4):
            slide(x, opt, 0.0)
        for _ in range(1 + 2 * rank):
            slide(x, opt)
        opt.finish()
        return x.item()

    assert lowcomm.simulate(worker, 2) == pytest.approx([-mean] * 2)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "many", None])
def test_a_weight_that_is_no_weight_is_refused_where_it_is_used(value):
    def worker(rank, group):
        x = scalar(0.0)
        opt = lowcomm.LocalSGD(
            sgd(x), sync_every=1, weight=lambda: value if rank == 1 else 1.0
        )
        slide(x, opt)

    with pytest.raises((TypeError, ValueError), match="weight") as caught:
        lowcomm.simulate(worker, 2)
    assert str(value) in str(caught.value)


# Buffers


def normalized():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-0.5, 1.0 + i, p.numel()).reshape(p.shape))
    return model


@every_method
@pytest.mark.parametrize("what", ["module", "tensors"])
def test_float_buffers_are_averaged_and_integer_ones_come_from_rank_zero(make, what):
    """Counters cannot be averaged, and variances must not get outer momentum."""

    def worker(rank, group):
        model = normalized()
        buffers = model if what == "module" else list(model.buffers())
        opt = make(model.parameters(), lr=0.1, sync_every=2, buffers=buffers)
        generator = torch.Generator().manual_seed(rank)
        history = []
        for _ in range(4):
            opt.zero_grad()
            for _ in range(3 + rank):
                batch = torch.randn(5, 3, generator=generator).double()
                model(batch).square().sum().backward()
            local = snapshot(dict(model.named_buffers()))
            opt.step()
            history.append((local, snapshot(dict(model.named_buffers()))))
        return history

    first, second = lowcomm.simulate(worker, 2)
    for step, ((local0, after0), (local1, after1)) in enumerate(
        zip(first, second, strict=True), start=1
    ):
        if step % 2:
            assert same(local0, after0) and same(local1, after1)
            continue
        assert same(after0, after1)
        for name in ("1.running_mean", "1.running_var"):
            mean = (local0[name] + local1[name]) / 2
            torch.testing.assert_close(after0[name], mean, rtol=0, atol=1e-12)
            assert not same(local0[name], local1[name])
        assert (after0["1.running_var"] >= 0).all()
        counter = "1.num_batches_tracked"
        assert after0[counter] == local0[counter] != local1[counter]
        assert after0[counter].dtype == torch.int64


@every_method
def test_buffers_stay_local_unless_asked_for(make):
    def worker(rank, group):
        model = normalized()
        opt = make(model.parameters(), lr=0.1, sync_every=1)
        model(torch.full((5, 3), 1.0 + rank, dtype=torch.float64)).sum().backward()
        opt.step()
        return snapshot(list(model.buffers()))

    first, second = lowcomm.simulate(worker, 2)
    assert not same(first, second)


@every_method
def test_buffers_begin_like_those_of_rank_zero(make):
    def worker(rank, group):
        floats = torch.full((3,), 0.5 + rank)
        integers = torch.tensor(rank)
        make(sgd(scalar(1.0)), sync_every=4, buffers=[floats, integers])
        return floats.tolist(), integers.item()

    assert lowcomm.simulate(worker, 2) == [([0.5] * 3, 0)] * 2


@every_method
def test_buffers_are_written_in_place_and_agree_after_finish(make):
    def worker(rank, group):
        buffer = torch.zeros(3)
        place = buffer.data_ptr()
        opt = make(sgd(x := scalar(1.0)), sync_every=4, buffers=[buffer])
        buffer.fill_(rank)
        slide(x, opt)
        opt.finish()
        assert buffer.data_ptr() == place
        return buffer.tolist()

    assert lowcomm.simulate(worker, 2) == [[0.5] * 3] * 2


# Not a number


@pytest.mark.parametrize("num_workers", [3, 4])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", METHODS)
def test_a_worker_that_is_not_finite_is_left_out_and_healed(
    name, value, num_workers, caplog
):
    """One bad batch on one worker must not reach the others."""
    caplog.set_level(logging.DEBUG)

    def worker(rank, group):
        x = nn.Parameter(torch.zeros(40, dtype=torch.float64))
        y = scalar(0.0)
        opt = METHODS[name](sgd(x, y, momentum=0.5), sync_every=2)
        y.grad = torch.ones_like(y)
        slide(x, opt, 1.0 + rank)
        y.grad = torch.zeros_like(y)
        x.grad = torch.zeros_like(x)
        if rank == 1:
            x.grad[7] = value
        opt.step()
        synced = snapshot([x, y])
        state = inner_state_of(opt)
        skipped = opt.stats.skipped_rounds
        for _ in range(6):
            y.grad = torch.ones_like(y)
            slide(x, opt, 1.0 + rank)
        return synced, state, skipped, snapshot([x, y]), opt.stats.rounds

    results = lowcomm.simulate(worker, num_workers)
    # Momentum 0.5: a step of -g and one of -g / 2 after it, with g = 1 + rank.
    good = [1 + rank for rank in range(num_workers) if rank != 1]
    expected = -1.5 * sum(good) / len(good) * FIRST_GAIN[name]
    for synced, state, skipped, later, rounds in results:
        torch.testing.assert_close(
            synced[0], torch.full_like(synced[0], expected), rtol=0, atol=1e-12
        )
        # The bad worker's share is left out whole, not only the bad tensor.
        assert synced[1].item() == pytest.approx(-1.5 * FIRST_GAIN[name])
        assert all(t.isfinite().all() for t in tensors_of(state))
        assert skipped == 0
        assert same(later, results[0][3])
        assert all(t.isfinite().all() for t in later)
        assert rounds == results[0][4]
    assert any(record.levelno >= logging.WARNING for record in caplog.records)


@pytest.mark.parametrize("make", [lowcomm.LocalSGD, lowcomm.DiLoCo])
def test_the_adam_moments_of_a_healed_worker_are_finite_again(make):
    """Healed parameters would turn into NaN again at the next step."""

    def worker(rank, group):
        model = network(dtype=torch.float32)
        opt = make(model.parameters(), lr=0.01, sync_every=2)
        for step in range(8):
            opt.zero_grad()
            loss_of(model, step, rank).backward()
            if rank == 0 and step == 1:
                for p in model.parameters():
                    p.grad.fill_(math.nan)
            opt.step()
        return parameters_of(model), inner_state_of(opt)

    results = lowcomm.simulate(worker, 3)
    for parameters, state in results:
        assert same(parameters, results[0][0])
        assert all(t.isfinite().all() for t in parameters)
        assert all(t.isfinite().all() for t in tensors_of(state))
        assert all(entry["step"] == 8 for entry in state)


@every_method
def test_a_worker_that_is_not_finite_at_the_end_is_healed_by_finish(make):
    def worker(rank, group):
        x = scalar(0.0)
        opt = make(sgd(x), sync_every=4)
        slide(x, opt, math.nan if rank == 1 else 1.0)
        opt.finish()
        return x.item()

    first, second, third = lowcomm.simulate(worker, 3)
    assert math.isfinite(first)
    assert first == second == third


def test_a_moment_that_is_not_finite_is_left_out_of_the_averaged_moments():
    def worker(rank, group):
        x = scalar(0.0)
        opt = lowcomm.LocalSGD(sgd(x, momentum=0.5), sync_every=2, average_states=True)
        slide(x, opt, 1.0 + rank)
        if rank == 1:
            opt.state[x]["momentum_buffer"].fill_(math.inf)
            x.grad = None  # no step of this parameter: its value stays finite
            opt.step()
        else:
            slide(x, opt, 0.0)
        return opt.state[x]["momentum_buffer"].item(), x.isfinite().item()

    # Half of 1 and half of 3, on average.
    assert lowcomm.simulate(worker, 3) == [(1.0, True)] * 3


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("make", [lowcomm.LocalSGD, lowcomm.DiLoCo])
def test_when_nobody_is_finite_nothing_is_applied_and_the_round_counted(
    make, num_workers
):
    def worker(rank, group):
        x, y = scalar(1.0), scalar(2.0)
        opt = make(sgd(x, y), sync_every=2)
        slide(x, opt)
        y.grad = torch.full_like(y, 1.0 + rank)
        before = y.item()
        slide(x, opt, math.nan)
        assert opt.stats.skipped_rounds == 1
        assert opt.stats.rounds == 0
        assert opt.stats.steps == 2
        return before - y.item(), x.item()

    for rank, (moved, x) in enumerate(lowcomm.simulate(worker, num_workers)):
        assert moved == 1.0 + rank  # its own step and nothing else
        assert math.isnan(x)


# Workers that might as well be one


ALIKE = METHODS | {
    "LocalSGD-coded": functools.partial(lowcomm.LocalSGD, codec="int8"),
    "LocalSGD-late": functools.partial(lowcomm.LocalSGD, overlap=1),
    "DiLoCo-coded": functools.partial(lowcomm.DiLoCo, codec="int4"),
    "DiLoCo-fragments": functools.partial(lowcomm.DiLoCo, fragments=2, overlap=1),
    "DiLoCo-eager": functools.partial(lowcomm.DiLoCo, eager=True),
    "SlowMo": lowcomm.SlowMo,
    "NoLoCo": lowcomm.NoLoCo,
    "DESLOC": lowcomm.DESLOC,
    "MTDAO": lowcomm.MTDAO,
}


def rounds_with(make, data, *, num_workers=2, lr=0.05, dtype=torch.float32):
    """Trains each worker on the data of the rank that stands in its place."""

    def worker(rank, group):
        model = network(dtype=dtype)
        opt = make(model.parameters(), lr=lr, sync_every=2)
        train(model, opt, range(7), data[rank])
        opt.finish()

    lowcomm.simulate(worker, num_workers)


@pytest.fixture
def alike(caplog):
    """What was said of equal gradients."""
    return lambda: [m for m in caplog.messages if "gradients must differ" in m]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("make", ALIKE.values(), ids=ALIKE.keys())
def test_each_worker_is_told_once_that_all_have_the_same_gradients(make, dtype, alike):
    """Of a run with equal gradients nothing is wrong but that it was for nothing."""
    rounds_with(make, [5, 5], dtype=dtype)
    assert len(alike()) == 2
    assert "got the same from ranks [0, 1] in the first round" in alike()[0]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"data": [5, 6]}, id="other data"),
        pytest.param({"data": [5, 5, 6], "num_workers": 3}, id="other data for one"),
        pytest.param({"data": [5, 5], "lr": 0.0}, id="not moved"),
        pytest.param({"data": [5, 5, 5], "num_workers": 3, "lr": 0.0}, id="three"),
        pytest.param({"data": [5], "num_workers": 1}, id="alone"),
    ],
)
@pytest.mark.parametrize("name", [name for name in ALIKE if name != "NoLoCo"])
def test_nothing_is_said_of_workers_that_differ_or_stand_still(name, settings, alike):
    rounds_with(ALIKE[name], **settings)
    assert alike() == []


def test_a_pair_of_noloco_knows_of_nobody_else(alike):
    rounds_with(lowcomm.NoLoCo, [5, 6])
    assert alike() == []


@pytest.mark.parametrize(("data", "told"), [([5, 5, 6, 6], 4), ([5, 6, 5, 6], 0)])
def test_a_site_that_might_as_well_be_one_worker_is_told_so(data, told, alike):
    def worker(rank, group):
        model = network()
        site = [0, 1] if rank < 2 else [2, 3]
        opt = lowcomm.LocalSGD(
            model.parameters(), lr=0.05, sync_every=4, levels=[(site, 2)]
        )
        train(model, opt, range(8), data[rank])

    lowcomm.simulate(worker, 4)
    assert len(alike()) == told


def test_shares_that_are_moved_about_are_not_the_same(alike):
    """Sums alone would not tell them apart."""

    def worker(rank, group):
        x = nn.Parameter(torch.zeros(2))
        opt = lowcomm.DiLoCo(sgd(x), sync_every=1)
        x.grad = torch.tensor([1.0, 2.0]) if rank else torch.tensor([2.0, 1.0])
        opt.step()

    lowcomm.simulate(worker, 2)
    assert alike() == []


# Workers that do not fit together


def named(*shapes, dtype=torch.float64, trainable=True):
    return [
        (name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=trainable))
        for name, shape in shapes
    ]


TWO = (("first", (2, 3)), ("second", (2, 3)))

# What worker 1 builds, when all others build `usual`, and what must be named.
MISMATCHES = {
    "shape": (
        lambda: lowcomm.LocalSGD(
            named(TWO[0], ("second", (3, 2))), lr=0.1, sync_every=2
        ),
        "second",
    ),
    "dtype": (
        lambda: lowcomm.LocalSGD(
            named(TWO[0]) + named(TWO[1], dtype=torch.float32), lr=0.1, sync_every=2
        ),
        "second",
    ),
    "order": (
        lambda: lowcomm.LocalSGD(named(TWO[1], TWO[0]), lr=0.1, sync_every=2),
        "first|second",
    ),
    "name": (
        lambda: lowcomm.LocalSGD(
            named(TWO[0], ("other", (2, 3))), lr=0.1, sync_every=2
        ),
        "second|other",
    ),
    "missing": (
        lambda: lowcomm.LocalSGD(named(TWO[0]), lr=0.1, sync_every=2),
        "second",
    ),
    "additional": (
        lambda: lowcomm.LocalSGD(named(*TWO, ("third", (1,))), lr=0.1, sync_every=2),
        "third",
    ),
    "frozen": (
        lambda: lowcomm.LocalSGD(
            named(TWO[0]) + named(TWO[1], trainable=False), lr=0.1, sync_every=2
        ),
        "second",
    ),
    "sync_every": (
        lambda: lowcomm.LocalSGD(named(*TWO), lr=0.1, sync_every=3),
        "sync_every",
    ),
    "average_states": (
        lambda: lowcomm.LocalSGD(
            named(*TWO), lr=0.1, sync_every=2, average_states=True
        ),
        "average_states",
    ),
    "method": (
        lambda: lowcomm.DiLoCo(named(*TWO), lr=0.1, sync_every=2),
        "LocalSGD|DiLoCo",
    ),
    "buffers": (
        lambda: lowcomm.LocalSGD(
            named(*TWO), lr=0.1, sync_every=2, buffers=[torch.zeros(3)]
        ),
        "buffer",
    ),
}


def assert_refused_everywhere(make, make_other, words, num_workers=3) -> None:
    def worker(rank, group):
        with pytest.raises(lowcomm.PeerMismatch) as caught:
            make_other() if rank == 1 else make()
        return str(caught.value)

    for message in lowcomm.simulate(worker, num_workers):
        assert re.search(words, message), message
        assert re.search(r"\b(rank|worker) 1\b", message), message


@pytest.mark.parametrize("difference", MISMATCHES)
def test_workers_that_differ_are_refused_on_every_rank(difference):
    """Equal byte counts would be averaged into garbage, others kill the process."""
    make_other, words = MISMATCHES[difference]
    assert_refused_everywhere(
        lambda: lowcomm.LocalSGD(named(*TWO), lr=0.1, sync_every=2), make_other, words
    )


@pytest.mark.parametrize(
    "setting",
    [{"outer_lr": 0.5}, {"outer_momentum": 0.5}, {"nesterov": False}],
    ids=str,
)
def test_outer_settings_that_differ_are_refused_on_every_rank(setting):
    def make(**outer):
        return lowcomm.DiLoCo(named(*TWO), lr=0.1, sync_every=2, **outer)

    (name,) = setting
    assert_refused_everywhere(make, lambda: make(**setting), name)


def test_parameters_without_names_are_told_apart_too():
    def make(*sizes):
        return lowcomm.LocalSGD(
            [nn.Parameter(torch.zeros(n)) for n in sizes], lr=0.1, sync_every=2
        )

    assert_refused_everywhere(lambda: make(3, 4), lambda: make(4, 3), "3|4")


def test_an_inner_learning_rate_may_differ():
    def worker(rank, group):
        x = scalar(0.0)
        opt = lowcomm.LocalSGD(sgd(x, lr=1.0 + rank), sync_every=1)
        slide(x, opt)
        return x.item()

    assert lowcomm.simulate(worker, 2) == [-1.5, -1.5]


def test_a_mismatch_is_found_before_any_weight_is_sent():
    def worker(rank, group):
        model = network(seed=rank)
        before = parameters_of(model)
        with pytest.raises(lowcomm.PeerMismatch):
            lowcomm.DiLoCo(model.parameters(), lr=0.1, sync_every=2 + rank)
        assert same(parameters_of(model), before)

    lowcomm.simulate(worker, 2)


@every_method
def test_all_workers_start_from_the_weights_of_rank_zero(make):
    """Each built its model from another seed."""

    def worker(rank, group):
        model = network(seed=rank)
        own = parameters_of(model)
        places = [p.data_ptr() for p in model.parameters()]
        make(model.parameters(), lr=0.1, sync_every=2)
        assert [p.data_ptr() for p in model.parameters()] == places
        return own, parameters_of(model)

    results = lowcomm.simulate(worker, 3)
    for _, started in results:
        assert same(started, results[0][0])
    assert not same(results[1][0], results[0][0])


@every_method
def test_without_the_broadcast_every_worker_keeps_its_weights(make):
    def worker(rank, group):
        model = network(seed=rank)
        own = parameters_of(model)
        make(model.parameters(), lr=0.1, sync_every=2, init_sync=False)
        return same(own, parameters_of(model))

    assert lowcomm.simulate(worker, 2) == [True, True]


def test_anchors_that_differ_are_found_at_the_first_exchange_on_every_rank():
    """A displacement from unequal anchors has no meaning."""

    def worker(rank, group):
        model = network(seed=int(rank == 1))
        opt = lowcomm.DiLoCo(model.parameters(), lr=0.1, sync_every=2, init_sync=False)
        train(model, opt, range(1), rank)
        with pytest.raises(lowcomm.PeerMismatch) as caught:
            train(model, opt, range(1, 2), rank)
        assert opt.stats.rounds == 0
        return str(caught.value)

    for message in lowcomm.simulate(worker, 3):
        assert re.search("anchor|agreed|weights|parameters|init_sync", message), message
        assert re.search(r"\b(rank|worker)s? 1\b", message), message


@pytest.mark.parametrize("average_states", [False, True])
def test_averaging_does_not_mind_where_the_workers_began(average_states):
    def worker(rank, group):
        x = scalar(float(10 * rank))
        opt = lowcomm.LocalSGD(
            sgd(x, momentum=0.9),
            sync_every=1,
            init_sync=False,
            average_states=average_states,
        )
        slide(x, opt)
        return x.item()

    assert lowcomm.simulate(worker, 3) == pytest.approx([9.0] * 3)


@every_method
def test_a_worker_resumed_from_an_older_file_is_found_out(make):
    """Averaging round 3 of one worker with round 2 of another is silent damage."""

    def save(rank, group):
        model = network()
        opt = make(model.parameters(), lr=0.1, sync_every=2)
        states = []
        for step in range(4):
            train(model, opt, range(step, step + 1), rank)
            states.append(snapshot([model.state_dict(), opt.state_dict()]))
        return states[1], states[3]

    saved = lowcomm.simulate(save, 2)

    def resume(rank, group):
        model = network()
        opt = make(model.parameters(), lr=0.1, sync_every=2, timeout_s=20)
        model_state, opt_state = saved[rank][0 if rank == 1 else 1]
        model.load_state_dict(model_state)
        with pytest.raises(lowcomm.PeerMismatch):
            opt.load_state_dict(opt_state)
            train(model, opt, range(4, 6), rank)

    began = time.monotonic()
    lowcomm.simulate(resume, 2)
    assert time.monotonic() - began < 10


def test_errors_about_other_workers_are_one_family():
    assert issubclass(lowcomm.SyncError, Exception)
    assert issubclass(lowcomm.PeerLost, lowcomm.SyncError)
    assert issubclass(lowcomm.PeerMismatch, lowcomm.SyncError)
    assert not issubclass(lowcomm.PeerMismatch, lowcomm.PeerLost)


# Simulated workers


def test_results_come_in_rank_order():
    def worker(rank, group):
        assert group.rank == rank
        x = scalar(float(rank))
        opt = lowcomm.LocalSGD(sgd(x), sync_every=1, init_sync=False)
        slide(x, opt, 0.0)
        return rank, x.item()

    assert lowcomm.simulate(worker, 4) == [(rank, 1.5) for rank in range(4)]


def test_the_group_of_a_worker_can_also_be_handed_over():
    def worker(rank, group):
        x = scalar(float(rank))
        opt = lowcomm.LocalSGD(sgd(x), sync_every=1, init_sync=False, group=group)
        slide(x, opt, 0.0)
        return x.item()

    assert lowcomm.simulate(worker, 3) == [1.0] * 3


def test_two_optimizers_of_one_worker_do_not_disturb_each_other():
    """As in adversarial training: one wrapper for each of two models."""

    def worker(both):
        def body(rank, group):
            model = network()
            opt = lowcomm.DiLoCo(model.parameters(), lr=0.1, sync_every=2)
            other = network(seed=5)
            if both:
                opt2 = lowcomm.LocalSGD(other.parameters(), lr=0.1, sync_every=3)
            for step in range(6):
                train(model, opt, range(step, step + 1), rank)
                if both:
                    train(other, opt2, range(step, step + 1), rank)
            return parameters_of(model)

        return lowcomm.simulate(body, 2)

    assert same(worker(both=True), worker(both=False))


def test_simulation_repeats_to_the_bit():
    def worker(rank, group):
        torch.manual_seed(rank)
        model = network(dtype=torch.float32)
        opt = lowcomm.DiLoCo(model.parameters(), lr=0.1, sync_every=2)
        noise = []
        for step in range(5):
            noise.append(torch.rand(3))
            train(model, opt, range(step, step + 1), rank)
        return noise, parameters_of(model)

    assert same(lowcomm.simulate(worker, 3), lowcomm.simulate(worker, 3))


def test_every_worker_has_its_own_random_state():
    """Workers that share one generator would draw each other's numbers."""

    def worker(rank, group):
        torch.manual_seed(rank)
        x = scalar(0.0)
        opt = lowcomm.LocalSGD(sgd(x), sync_every=1)
        drawn = []
        for _ in range(4):
            drawn.append(torch.rand(()).item())
            slide(x, opt)
        return drawn

    drawn = lowcomm.simulate(worker, 3)
    for rank in range(3):
        generator = torch.Generator().manual_seed(rank)
        expected = [torch.rand((), generator=generator).item() for _ in range(4)]
        assert drawn[rank] == expected


def test_a_workers_own_exception_leaves_as_it_is_with_its_rank():
    """The errors that its absence causes in the others must not hide it."""

    def worker(rank, group):
        x = scalar(0.0)
        opt = lowcomm.LocalSGD(sgd(x), sync_every=2)
        for step in range(4):
            if rank == 1 and step == 2:
                raise KeyError("my own mistake")
            slide(x, opt)

    began = time.monotonic()
    with pytest.raises(KeyError, match="my own mistake") as caught:
        lowcomm.simulate(worker, 3)
    assert any("1" in note for note in caught.value.__notes__)
    assert time.monotonic() - began < 10


def test_exceptions_of_several_workers_leave_as_a_group():
    def worker(rank, group):
        if rank == 0:
            raise KeyError("zero")
        if rank == 2:
            raise ZeroDivisionError("two")
        return rank

    with pytest.raises(ExceptionGroup) as caught:
        lowcomm.simulate(worker, 3)
    assert caught.group_contains(KeyError, match="zero")
    assert caught.group_contains(ZeroDivisionError, match="two")
    assert len(caught.value.exceptions) == 2
    for error, rank in zip(caught.value.exceptions, "02", strict=True):
        assert any(rank in note for note in error.__notes__)


def test_a_worker_that_leaves_without_finishing_is_lost_and_nobody_hangs():
    def worker(rank, group):
        x = scalar(0.0)
        opt = lowcomm.LocalSGD(sgd(x), sync_every=2, timeout_s=3)
        for _ in range(2 if rank == 1 else 4):
            slide(x, opt)

    began = time.monotonic()
    with pytest.raises(lowcomm.PeerLost, match="1"):
        lowcomm.simulate(worker, 2)
    assert time.monotonic() - began < 20


def test_after_a_failed_simulation_the_next_one_works():
    def broken(rank, group):
        opt = lowcomm.LocalSGD(sgd(x := scalar(0.0)), sync_every=1)
        if rank == 1:
            raise ZeroDivisionError
        slide(x, opt)

    def sound(rank, group):
        x = scalar(float(rank))
        opt = lowcomm.LocalSGD(sgd(x), sync_every=1, init_sync=False)
        slide(x, opt, 0.0)
        return x.item()

    with pytest.raises(ZeroDivisionError):
        lowcomm.simulate(broken, 2)
    assert lowcomm.simulate(sound, 3) == [1.0] * 3


def test_outside_a_simulation_a_wrapper_is_alone_again():
    lowcomm.simulate(lambda rank, group: None, 2)
    x = scalar(3.0)
    opt = lowcomm.LocalSGD(sgd(x), sync_every=1)
    slide(x, opt)
    assert x.item() == 2.0


# Narrow numbers


def test_bf16_parameters_do_not_swallow_small_outer_steps():
    """An outer step far below the spacing of bf16 must add up in a wide anchor."""
    # Below 1 neighbours are 2^-8 apart. Each round steps down by one, of which 0.05
    # stays: 200 rounds make 200 * 0.05 = 10 spacings, though each alone rounds to 0.
    x = scalar(1.0, dtype=torch.bfloat16)
    opt = lowcomm.DiLoCo(
        sgd(x, lr=2.0**-8), sync_every=1, outer_lr=0.05, outer_momentum=0.0
    )
    for _ in range(200):
        slide(x, opt)
    assert x.item() == pytest.approx(1 - 10 * 2.0**-8, abs=1.5 * 2.0**-8)


def test_bf16_outer_momentum_does_not_swallow_small_displacements():
    # One large round fills the momentum to 1; then 40 rounds of 2^-10 each, which bf16
    # would lose beside it, against the same run in double precision.
    def run(dtype):
        x = scalar(0.0, dtype=dtype)
        opt = lowcomm.DiLoCo(sgd(x), sync_every=1, outer_lr=0.01, outer_momentum=0.99)
        slide(x, opt, 1.0)
        for _ in range(40):
            slide(x, opt, 2.0**-7)
        return x.item()

    assert run(torch.bfloat16) == pytest.approx(run(torch.float64), rel=0.02)


@pytest.mark.parametrize("name", ["LocalSGD", "DiLoCo-plain"])
def test_large_fp16_values_of_many_workers_do_not_overflow(name):
    """Eight times 20000 is beyond what fp16 can hold; their mean is not."""

    def worker(rank, group):
        x = nn.Parameter(torch.full((33,), 10.0, dtype=torch.float16))
        opt = METHODS[name](sgd(x), sync_every=1)
        slide(x, opt, -20_000.0)
        return snapshot(x)

    for x in lowcomm.simulate(worker, 8):
        assert x.dtype == torch.float16
        torch.testing.assert_close(x, torch.full_like(x, 20_010.0), rtol=1e-3, atol=0)


def test_equal_values_have_themselves_as_mean():
    """Dividing by another count than that of the members would scale them."""

    def worker(rank, group):
        x = nn.Parameter(torch.linspace(-3, 3, 101, dtype=torch.float64))
        before = snapshot(x)
        opt = lowcomm.LocalSGD(sgd(x), sync_every=1)
        slide(x, opt, 0.0)
        torch.testing.assert_close(x.detach(), before, rtol=1e-15, atol=0)

    for num_workers in range(1, 8):
        lowcomm.simulate(worker, num_workers)


SHAPES = st.one_of(
    st.integers(0, 300).map(lambda n: (n,)),
    st.sampled_from([(), (0,), (1,), (15,), (16,), (17,), (0, 3), (4, 5), (2, 3, 4)]),
)
TENSORS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(
    tensors=TENSORS,
    bucket_bytes=st.sampled_from([256, 300, 512, 1000, 4096, 1 << 20]),
    num_workers=st.integers(1, 5),
)
def test_every_element_is_averaged_exactly_once(tensors, bucket_bytes, num_workers):
    """Whatever fits a bucket, fills it exactly, spills over or is larger than it."""

    def values(i, shape, dtype, rank):
        # Small integers with a pattern of their own: sums are exact in every dtype.
        flat = (torch.arange(math.prod(shape)) * 7 + 3 * i) % 11 + rank
        return (flat * num_workers).reshape(shape).to(dtype)

    def worker(rank, group):
        ps = [
            nn.Parameter(values(i, shape, dtype, rank))
            for i, (shape, dtype) in enumerate(tensors)
        ]
        opt = lowcomm.LocalSGD(
            sgd(*ps), sync_every=1, init_sync=False, bucket_bytes=bucket_bytes
        )
        opt.step()
        return snapshot(ps)

    results = lowcomm.simulate(worker, num_workers)
    for i, (shape, dtype) in enumerate(tensors):
        every = [values(i, shape, dtype, rank).double() for rank in range(num_workers)]
        mean = (sum(every) / num_workers).to(dtype)
        for result in results:
            assert torch.equal(result[i], mean)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([64], id="exactly-one-bucket"),
        pytest.param([48, 48], id="second-does-not-fit"),
        pytest.param([24, 24, 24], id="third-spills"),
        pytest.param([500], id="larger-than-a-bucket"),
        pytest.param([500, 1], id="large-then-small"),
        pytest.param([1, 500, 1], id="large-between-small"),
        pytest.param([0, 3], id="empty-tensor"),
        pytest.param([1] * 70, id="many-small"),
    ],
)
@every_method
def test_the_size_of_the_buckets_never_shows(make, sizes):
    def run(bucket_bytes):
        def worker(rank, group):
            ps = [
                nn.Parameter(torch.linspace(0, 1 + i, n, dtype=torch.float64))
                for i, n in enumerate(sizes)
            ]
            opt = make(ps, lr=0.1, sync_every=1, bucket_bytes=bucket_bytes)
            for step in range(3):
                for p in ps:
                    p.grad = torch.sin(p.detach() * 50 + step + rank)
                opt.step()
            return snapshot(ps)

        return lowcomm.simulate(worker, 3)

    small, large = run(512), run(1 << 20)
    assert same(small, large)
    assert same(small[0], small[1]) and same(small[0], small[2])


# Where the outer state lives


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_the_device_of_the_anchors_does_not_change_the_run(device):
    def run(**where):
        model = network()
        opt = lowcomm.DiLoCo(model.parameters(), lr=0.1, sync_every=2, **where)
        train(model, opt, range(5))
        return parameters_of(model)

    assert same(run(anchor_device=device), run())


# Wrong calls

X = functools.partial(scalar, 1.0)

WRONG_CALLS = {
    "sync_every=0": (
        lambda: lowcomm.LocalSGD([X()], lr=0.1, sync_every=0),
        ValueError,
        ["sync_every", "0"],
    ),
    "sync_every=-3": (
        lambda: lowcomm.DiLoCo([X()], lr=0.1, sync_every=-3),
        ValueError,
        ["sync_every", "-3"],
    ),
    "sync_every=1.5": (
        lambda: lowcomm.DiLoCo([X()], lr=0.1, sync_every=1.5),
        (TypeError, ValueError),
        ["sync_every", "1.5"],
    ),
    "sync_every='2'": (
        lambda: lowcomm.LocalSGD([X()], lr=0.1, sync_every="2"),
        TypeError,
        ["sync_every", "2"],
    ),
    "sync_every=None": (
        lambda: lowcomm.LocalSGD([X()], lr=0.1, sync_every=None),
        TypeError,
        ["sync_every", "None"],
    ),
    "weights that do not exist yet": (
        lambda: lowcomm.DiLoCo(
            nn.Linear(2, 2, device="meta").named_parameters(), lr=0.1, sync_every=2
        ),
        ValueError,
        ["params", "'weight'", "meta", "to_empty"],
    ),
    "sync_every missing": (
        lambda: lowcomm.LocalSGD([X()], lr=0.1),
        TypeError,
        ["sync_every"],
    ),
    "sync_every by position": (
        lambda: lowcomm.DiLoCo([X()], 100),
        TypeError,
        ["positional"],
    ),
    "outer_lr=-1": (
        lambda: lowcomm.DiLoCo([X()], lr=0.1, sync_every=1, outer_lr=-1.0),
        ValueError,
        ["outer_lr", "-1.0"],
    ),
    "outer_lr=nan": (
        lambda: lowcomm.DiLoCo([X()], lr=0.1, sync_every=1, outer_lr=math.nan),
        ValueError,
        ["outer_lr", "nan"],
    ),
    "outer_lr=inf": (
        lambda: lowcomm.DiLoCo([X()], lr=0.1, sync_every=1, outer_lr=math.inf),
        ValueError,
        ["outer_lr", "inf"],
    ),
    "outer_momentum=-0.1": (
        lambda: lowcomm.DiLoCo([X()], lr=0.1, sync_every=1, outer_momentum=-0.1),
        ValueError,
        ["outer_momentum", "-0.1"],
    ),
    "outer_momentum=1": (
        lambda: lowcomm.DiLoCo([X()], lr=0.1, sync_every=1, outer_momentum=1.0),
        ValueError,
        ["outer_momentum", "1.0"],
    ),
    "unknown inner keyword": (
        lambda: lowcomm.DiLoCo([X()], lr=0.1, wieght_decay=0.1, sync_every=1),
        TypeError,
        ["wieght_decay"],
    ),
    "keyword of another method": (
        lambda: lowcomm.LocalSGD([X()], lr=0.1, sync_every=1, outer_lr=0.7),
        TypeError,
        ["outer_lr"],
    ),
    "inner keyword beside an optimizer": (
        lambda: lowcomm.LocalSGD(sgd(X()), weight_decay=0.25, sync_every=1),
        TypeError,
        ["weight_decay"],
    ),
    "inner keyword beside a list of optimizers": (
        lambda: lowcomm.LocalSGD([sgd(X()), sgd(X())], lr=0.1, sync_every=1),
        TypeError,
        ["lr"],
    ),
    "a wrong value of an inner keyword": (
        lambda: lowcomm.DiLoCo([X()], lr=-0.5, sync_every=1),
        ValueError,
        ["learning rate", "-0.5"],
    ),
    "no parameters": (
        lambda: lowcomm.DiLoCo([], lr=0.1, sync_every=1),
        ValueError,
        ["empty"],
    ),
    "a module": (
        lambda: lowcomm.DiLoCo(network(), lr=0.1, sync_every=1),
        TypeError,
        [],
    ),
    "a number": (lambda: lowcomm.DiLoCo(3, lr=0.1, sync_every=1), TypeError, []),
    "a lone tensor": (
        lambda: lowcomm.DiLoCo(X(), lr=0.1, sync_every=1),
        TypeError,
        [],
    ),
    "an optimizer class": (
        lambda: lowcomm.DiLoCo(torch.optim.AdamW, sync_every=1),
        TypeError,
        [],
    ),
    "optimizers among parameters": (
        lambda: lowcomm.DiLoCo([sgd(X()), X()], sync_every=1),
        TypeError,
        [],
    ),
    "optimizers that share a parameter": (
        lambda: lowcomm.DiLoCo([sgd(p := X()), sgd(p)], sync_every=1),
        ValueError,
        ["more than one|disjoint|both|share|twice"],
    ),
    "weight='loud'": (
        lambda: lowcomm.DiLoCo([X()], lr=0.1, sync_every=1, weight="loud"),
        ValueError,
        ["weight", "loud"],
    ),
    "weight=3": (
        lambda: lowcomm.DiLoCo([X()], lr=0.1, sync_every=1, weight=3),
        (TypeError, ValueError),
        ["weight", "3"],
    ),
    "buffers=3": (
        lambda: lowcomm.DiLoCo([X()], lr=0.1, sync_every=1, buffers=3),
        TypeError,
        ["buffers", "3"],
    ),
    "buffers=['a']": (
        lambda: lowcomm.DiLoCo([X()], lr=0.1, sync_every=1, buffers=["a"]),
        TypeError,
        ["buffers"],
    ),
    "timeout_s=0": (
        lambda: lowcomm.DiLoCo([X()], lr=0.1, sync_every=1, timeout_s=0),
        ValueError,
        ["timeout_s", "0"],
    ),
    "timeout_s=-1": (
        lambda: lowcomm.DiLoCo([X()], lr=0.1, sync_every=1, timeout_s=-1),
        ValueError,
        ["timeout_s", "-1"],
    ),
    "timeout_s=nan": (
        lambda: lowcomm.DiLoCo([X()], lr=0.1, sync_every=1, timeout_s=math.nan),
        ValueError,
        ["timeout_s", "nan"],
    ),
    "bucket_bytes=0": (
        lambda: lowcomm.DiLoCo([X()], lr=0.1, sync_every=1, bucket_bytes=0),
        ValueError,
        ["bucket_bytes", "0"],
    ),
    "bucket_bytes=-8": (
        lambda: lowcomm.DiLoCo([X()], lr=0.1, sync_every=1, bucket_bytes=-8),
        ValueError,
        ["bucket_bytes", "-8"],
    ),
    "anchor_device='nowhere'": (
        lambda: lowcomm.DiLoCo([X()], lr=0.1, sync_every=1, anchor_device="nowhere"),
        (RuntimeError, ValueError),
        ["nowhere"],
    ),
    "group='all'": (
        lambda: lowcomm.DiLoCo([X()], lr=0.1, sync_every=1, group="all"),
        TypeError,
        ["group", "all"],
    ),
    "a round hook that cannot be called": (
        lambda: lowcomm.LocalSGD([X()], lr=0.1, sync_every=1).register_round_hook(3),
        TypeError,
        ["3"],
    ),
    "an empty state dictionary": (
        lambda: lowcomm.LocalSGD([X()], lr=0.1, sync_every=1).load_state_dict({}),
        ValueError,
        ["state_dict", r"\[\]"],
    ),
    "simulate with no worker": (
        lambda: lowcomm.simulate(lambda rank, group: None, 0),
        ValueError,
        ["num_workers", "0"],
    ),
    "simulate with what cannot be called": (
        lambda: lowcomm.simulate(3, 2),
        TypeError,
        ["3"],
    ),
    "simulate with half a worker": (
        lambda: lowcomm.simulate(lambda rank, group: None, 1.5),
        (TypeError, ValueError),
        ["num_workers", "1.5"],
    ),
}


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_a_wrong_call_says_what_was_wrong(call):
    wrong, error, words = WRONG_CALLS[call]
    with pytest.raises(error) as caught:
        wrong()
    for word in words:
        assert re.search(word, str(caught.value)), str(caught.value)


def test_the_round_hook_is_not_called_for_a_skipped_round():
    x = scalar(1.0)
    opt = lowcomm.LocalSGD(sgd(x), sync_every=1)
    calls = []
    opt.register_round_hook(calls.append)
    slide(x, opt, math.nan)
    assert calls == []


def test_several_workers_without_a_process_group_are_refused(monkeypatch):
    """Each would train by itself, and nobody would notice."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="got None with WORLD_SIZE=2.*init_process_g"):
        lowcomm.DiLoCo(network().parameters(), sync_every=2)
    monkeypatch.setenv("WORLD_SIZE", "1")
    lowcomm.DiLoCo(network().parameters(), sync_every=2)
