"""The planner: numbers by hand, identities, and what `simulate` measures."""

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowcomm
from lowcomm.__main__ import main
from lowcomm.plan import METHODS, Method, exchange_seconds, mean_bytes, plan, suggest

# 100 MB of fp32 at 10 MB/s, steps of a second: with two workers each sends 100 MB for a
# mean, in 10 s and two latencies.
ASKED = {
    "num_params": 25e6,
    "num_workers": 2,
    "gbit_s": 0.08,
    "latency_s": 0.5,
    "step_s": 1.0,
    "num_steps": 3600,
}


def row_of(method, *, codec=None, **changes):
    settings = {**ASKED, "methods": [method], "codecs": [codec], **changes}
    (row,) = plan(**settings).rows
    return row


# --------------------------------------------------------------------------------------
# By hand


def test_a_blocking_mean():
    row = row_of(Method("DiLoCo", sync_every=20))
    assert row.bytes_per_step == 5e6 and row.ratio == 1 / 20
    assert row.exchange_s == pytest.approx(11.0)
    assert row.exposed_s == pytest.approx(11 / 20)
    assert row.compute_utilization == pytest.approx(20 / 31)
    assert row.hours == pytest.approx(31 / 20)
    assert row.extra_gb == pytest.approx(0.3)  # anchor, momentum, share
    assert row.shortest_period == 11 * 19  # 19 s of steps for each second of waiting
    assert row.smallest_overlap == 11
    assert row.note == ""


def test_with_more_workers_each_sends_more():
    row = row_of(Method("LocalSGD", sync_every=20), num_workers=4)
    assert row.bytes_per_step == 150e6 / 20 and row.ratio == 1 / 20
    assert row.exchange_s == pytest.approx(15 + 2 * 0.5)


def test_an_overlap_hides_its_steps():
    assert row_of(Method("DiLoCo", 20, overlap=4)).exposed_s == pytest.approx(7 / 20)
    row = row_of(Method("DiLoCo", 20, overlap=11))
    assert row.exposed_s == 0.0 and row.compute_utilization == 1.0


def test_fragments_wait_one_after_another():
    # A quarter takes 2.5 s and two latencies, every five steps.
    row = row_of(Method("StreamingDiLoCo", 20, overlap=2, fragments=4))
    assert row.exchange_s == pytest.approx(4 * 3.5)
    assert row.exposed_s == pytest.approx(4 * 1.5 / 20)
    assert row.smallest_overlap == 4
    assert row.extra_gb == pytest.approx(0.2 + 2 * 0.025)


def test_fragments_that_the_link_cannot_carry_queue():
    # 14 s on the wire in rounds of eight steps: 6 s too many, however long the overlap.
    row = row_of(Method("StreamingDiLoCo", 8, overlap=7, fragments=4))
    assert row.exposed_s == pytest.approx(6 / 8)
    assert row.smallest_overlap is None
    assert row.note == "no overlap hides 14 steps of exchanges"


def test_an_eager_exchange_has_the_whole_round():
    row = row_of(Method("EagerDiLoCo", 8))
    assert row.exposed_s == pytest.approx(3 / 8)
    assert row.extra_gb == pytest.approx(0.5)
    assert row_of(Method("EagerDiLoCo", 11)).exposed_s == pytest.approx(0.0)


def test_a_pair_sends_its_share_once_after_headers():
    row = row_of(Method("NoLoCo", 20), num_workers=8)
    assert row.bytes_per_step == 5e6
    assert row.exchange_s == pytest.approx(10 + 3 * 0.5)
    assert row.extra_gb == pytest.approx(0.4)


def test_of_an_odd_number_one_rests():
    assert row_of(Method("NoLoCo", 20), num_workers=5).bytes_per_step == 4e6


def test_a_codec_adds_to_the_bytes_of_a_pair():
    row = row_of(Method("NoLoCo", 20), codec="int8")
    assert row.bytes_per_step == pytest.approx(5e6 * (1 + 8.0625 / 32), rel=1e-6)
    assert row.extra_gb == pytest.approx(0.6)
    assert row.note == "anchors go as they are: a codec adds bytes"


def test_moments_have_periods_of_their_own():
    row = row_of(Method("DESLOC", 20))
    assert row.bytes_per_step == pytest.approx(1.5 * 5e6)
    assert row.exchange_s == pytest.approx(1.5 * 11)
    assert row.exposed_s == pytest.approx(1.5 * 11 / 20)
    assert row.extra_gb == pytest.approx(0.3)  # all three are due in some steps
    assert row.smallest_overlap is None  # 33 s of them then


@pytest.mark.parametrize("name", ["LocalAdam", "MTDAO"])
def test_averaged_moments_are_not_coded(name):
    row = row_of(Method(name, 20), codec="int8")
    assert row.ratio == pytest.approx((2 + 8.0625 / 32) / 20, rel=1e-6)
    assert row.extra_gb == pytest.approx(0.4)  # with the last mean


def test_gradients_travel_beside_a_part_of_the_step():
    row = row_of(Method("DDP", overlap=0.5), step_s=8.0)
    assert row.exposed_s == pytest.approx(11 - 4)
    assert row.smallest_overlap is None and row.shortest_period is None
    assert row_of(Method("DDP"), step_s=44.0).smallest_overlap == pytest.approx(0.25)


def test_gradients_may_be_narrower_than_what_others_send():
    (ddp, local) = plan(**ASKED, dtype_bytes=2, methods=METHODS[:2], codecs=[None]).rows
    assert ddp.bytes_per_step == 50e6
    assert local.ratio == pytest.approx(2 / 16)


def test_four_buckets_do_not_fill_a_long_link():
    # 40 buckets of 1 ms each on a link of 0.5 s: ten turns of 0.501 s, of which the
    # first is in the two latencies.
    link = lowcomm.Link(gbit_s=0.8, latency_s=0.5)
    seconds = exchange_seconds(4e6, link, num_buckets=40)
    assert seconds == pytest.approx(10 * 0.501 + 0.5 + 3 * 0.001)


def test_a_period_that_no_run_has():
    row = row_of(Method("DiLoCo", 20), num_steps=100)
    assert row.shortest_period is None
    assert row.note == "no blocking H of this run reaches 95%"


def test_failures_by_hand():
    # Two hours, four workers that fail every 16 h: half a failure.
    asked = {"num_workers": 4, "gbit_s": 1e9, "latency_s": 0.0, "num_steps": 7200}
    method = Method("DiLoCo", 100)
    row = row_of(method, mtbf_h=16, checkpoint_every_s=1200, restart_s=300, **asked)
    assert row.failures == pytest.approx(0.5)
    # 900 s each, of which 1/16 is lost again.
    assert row.restart_h == pytest.approx(0.5 * 0.25 / (1 - 0.25 / 4))
    # 300 s and 50 steps of one worker in four.
    assert row.go_on_h == pytest.approx(0.5 * 350 / 3600 / 4)
    often = row_of(method, mtbf_h=0.5, **asked)
    assert often.restart_h is None and often.go_on_h > 0
    assert row_of(Method("DDP"), mtbf_h=16, **asked).go_on_h is None


# --------------------------------------------------------------------------------------
# Identities


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_without_a_wire_nobody_waits(method):
    row = row_of(method, gbit_s=float("inf"), latency_s=0.0)
    assert row.compute_utilization == 1.0 and row.hours == 1.0


def test_local_sgd_every_step_costs_what_ddp_does():
    ddp, local = row_of(Method("DDP")), row_of(Method("LocalSGD", 1))
    assert (local.ratio, local.hours) == (1.0, ddp.hours)


@pytest.mark.parametrize(("codec", "bits"), [("int8", 8.0625), ("int4", 4.0625)])
@pytest.mark.parametrize("name", ["LocalSGD", "DiLoCo", "StreamingDiLoCo"])
def test_a_codec_divides_the_bytes(name, codec, bits):
    method = Method(name, 20)
    part = row_of(method, codec=codec).bytes_per_step / row_of(method).bytes_per_step
    assert part == pytest.approx(bits / 32, rel=1e-5)


def test_kept_values_of_top_k_come_back_from_all():
    codec = lowcomm.sync.TopK(density=1 / 64)
    assert mean_bytes(1 << 20, 4, codec) == (1 + 4) * (1 << 20) / 64 * 4 * 3 / 4


def test_one_fragment_at_once_is_diloco():
    streaming, plain = Method("StreamingDiLoCo", 20), Method("DiLoCo", 20)
    assert row_of(streaming).hours == row_of(plain).hours


def test_a_seed_is_a_run():
    def hours(seed):
        method = Method("NoLoCo", 20)
        return row_of(method, num_workers=8, jitter=0.3, seed=seed).hours

    assert hours(0) == hours(0) != hours(1)


sizes = st.integers(1000, 10**10)
rates = st.floats(1e-3, 1e3)
periods = st.integers(1, 400)
names = st.sampled_from([m.name for m in METHODS if m.name != "DDP"])


@settings(max_examples=40)
@given(names, sizes, rates, periods, st.integers(1, 400))
def test_longer_rounds_are_waited_for_less(name, size, gbit_s, period, more):
    asked = {"num_params": size, "gbit_s": gbit_s}
    short = row_of(Method(name, period), **asked)
    long = row_of(Method(name, period + more), **asked)
    assert long.exposed_s <= short.exposed_s * (1 + 1e-9)
    assert long.bytes_per_step < short.bytes_per_step


@settings(max_examples=40)
@given(names, sizes, rates, periods, st.floats(1.0, 100.0))
def test_a_faster_link_is_waited_for_less(name, size, gbit_s, period, factor):
    method = Method(name, period)
    slow = row_of(method, num_params=size, gbit_s=gbit_s)
    fast = row_of(method, num_params=size, gbit_s=gbit_s * factor)
    assert fast.exposed_s <= slow.exposed_s * (1 + 1e-9)


@settings(max_examples=40)
@given(names, rates, st.sampled_from([0.0, 0.2]))
def test_the_shortest_period_is_enough_and_no_longer_one_is_needed(
    name, gbit_s, jitter
):
    asked = {"gbit_s": gbit_s, "jitter": jitter, "num_workers": 4, "utilization": 0.8}
    period = row_of(Method(name, 20), **asked).shortest_period

    def used(sync_every):
        plain = "DiLoCo" if name == "EagerDiLoCo" else name
        return row_of(Method(plain, sync_every), **asked).compute_utilization

    if period is None:
        assert used(ASKED["num_steps"]) < 0.8
    else:
        assert used(period) >= 0.8 - 1e-6
        assert period == 1 or used(period - 1) < 0.8


@settings(max_examples=40)
@given(names, rates, st.integers(2, 60))
def test_the_smallest_overlap_is_enough_and_one_less_is_not(name, gbit_s, period):
    plain = "DiLoCo" if name == "EagerDiLoCo" else name
    overlap = row_of(Method(name, period), gbit_s=gbit_s).smallest_overlap
    if overlap is None:
        most = row_of(Method(plain, period, overlap=period - 1), gbit_s=gbit_s)
        assert most.exposed_s > 0
        return
    assert row_of(Method(plain, period, overlap), gbit_s=gbit_s).exposed_s < 1e-8
    if overlap:
        less = row_of(Method(plain, period, overlap - 1), gbit_s=gbit_s)
        assert less.exposed_s > 0


# --------------------------------------------------------------------------------------
# What simulated workers measure

VALUES = 1 << 16


def build(method, params, **common):
    common |= {"sync_every": method.sync_every, "overlap": int(method.overlap)}
    adam = torch.optim.AdamW(params)
    match method.name:
        case "DDP" | "LocalSGD":
            return lowcomm.LocalSGD(adam, **common)
        case "LocalAdam":
            return lowcomm.LocalSGD(adam, average_states=True, **common)
        case "DiLoCo" | "StreamingDiLoCo":
            return lowcomm.DiLoCo(adam, fragments=method.fragments, **common)
        case "EagerDiLoCo":
            return lowcomm.DiLoCo(adam, eager=True, **common)
        case "NoLoCo":
            return lowcomm.NoLoCo(adam, **common)
        case "DESLOC":
            return lowcomm.DESLOC(adam, **common)
        case "MTDAO":
            return lowcomm.MTDAO(params, **common)


def measured(method, num_workers, link, *, cycles=(2, 2), **common):
    """Bytes, seconds of waiting and of time in a step, after a few cycles."""
    cycle = method.sync_every * (6 if method.name == "DESLOC" else 1)
    first, steps = (count * cycle for count in cycles)

    def worker(rank, group):
        params = [nn.Parameter(torch.zeros(VALUES // 4)) for _ in range(4)]
        for param in params:
            param.grad = torch.ones_like(param)
        settings = {"init_sync": False, "timeout_s": 1e6, **common}
        opt = build(method, params, **settings)
        for _ in range(first):
            opt.step()
        before, start = opt.stats, group.now()
        for _ in range(steps):
            opt.step()
        after = opt.stats
        return (
            (after.bytes_sent - before.bytes_sent) / steps,
            (after.exposed_s - before.exposed_s) / steps,
            (group.now() - start) / steps,
        )

    return np.mean(lowcomm.simulate(worker, num_workers, link=link), axis=0)


def expected(method, num_workers, link, **changes):
    return row_of(
        method,
        num_params=VALUES,
        num_workers=num_workers,
        gbit_s=link.gbit_s,
        latency_s=link.latency_s,
        step_s=link.step_s,
        jitter=link.jitter,
        **changes,
    )


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize(
    "method",
    [
        Method("DDP"),
        Method("LocalSGD", 4),
        Method("LocalSGD", 4, overlap=2),
        Method("LocalAdam", 4),
        Method("LocalAdam", 4, overlap=3),
        Method("DiLoCo", 4),
        Method("DiLoCo", 4, overlap=1),
        Method("StreamingDiLoCo", 8, fragments=4),
        Method("StreamingDiLoCo", 8, overlap=1, fragments=4),
        Method("StreamingDiLoCo", 8, overlap=3, fragments=4),
        Method("EagerDiLoCo", 2),
        Method("NoLoCo", 4),
        Method("NoLoCo", 4, overlap=2),
        Method("DESLOC", 2),
        Method("DESLOC", 2, overlap=1),
        Method("MTDAO", 4),
        Method("MTDAO", 4, overlap=2),
    ],
    ids=lambda m: f"{m.name}-{m.sync_every}-{m.overlap}",
)
def test_simulated_workers_send_and_wait_as_planned(method, num_workers):
    link = lowcomm.Link(gbit_s=0.004, latency_s=0.02, step_s=0.1)
    num_bytes, exposed_s, _ = measured(method, num_workers, link)
    row = expected(method, num_workers, link)
    assert row.bytes_per_step == pytest.approx(num_bytes, rel=0.01)
    assert row.exposed_s == pytest.approx(exposed_s, rel=0.05)


@pytest.mark.parametrize("name", ["LocalSGD", "LocalAdam", "DiLoCo", "NoLoCo"])
def test_simulated_codes_too(name):
    link = lowcomm.Link(gbit_s=0.001, latency_s=0.02, step_s=0.1)
    method = Method(name, 4)
    num_bytes, exposed_s, _ = measured(method, 4, link, codec="int8")
    row = expected(method, 4, link, codec="int8")
    assert row.bytes_per_step == pytest.approx(num_bytes, rel=0.01)
    assert row.exposed_s == pytest.approx(exposed_s, rel=0.05)


@pytest.mark.parametrize("name", ["DiLoCo", "NoLoCo"])
@pytest.mark.parametrize("latency_s", [1e-4, 0.02, 0.1])
def test_simulated_buckets_too(name, latency_s):
    link = lowcomm.Link(gbit_s=0.08, latency_s=latency_s, step_s=0.1)
    method, bucket_bytes = Method(name, 2), 1 << 13  # 32 of them, of about a ms
    _, exposed_s, _ = measured(method, 4, link, bucket_bytes=bucket_bytes)
    row = expected(method, 4, link, bucket_bytes=bucket_bytes)
    assert row.exposed_s == pytest.approx(exposed_s, rel=0.05)


@pytest.mark.parametrize(
    "method",
    [Method("LocalSGD", 2), Method("NoLoCo", 2), Method("DiLoCo", 4, overlap=1)],
    ids=lambda m: m.name,
)
def test_simulated_steps_of_uneven_length_too(method):
    link = lowcomm.Link(gbit_s=0.2, latency_s=0.001, step_s=0.1, jitter=0.5)
    _, _, seconds = measured(method, 4, link, cycles=(10, 100))
    assert expected(method, 4, link).hours == pytest.approx(seconds, rel=0.04)


def test_sums_of_steps_are_drawn_as_if_one_by_one():
    jitter, steps, workers = 0.5, 16, 64
    draws = np.random.default_rng(0).lognormal(0.0, jitter, (400, workers, steps))
    slowest = draws.sum(axis=2).max(axis=1).mean() / steps
    row = row_of(
        Method("LocalSGD", steps),
        gbit_s=1e9,
        latency_s=0.0,
        num_workers=workers,
        jitter=jitter,
    )
    assert row.hours == pytest.approx(slowest, rel=0.01)


def test_thousands_wait_for_the_slowest_and_pairs_for_one_another():
    def waited(name, num_workers):
        asked = {"gbit_s": 1e9, "latency_s": 0.0, "jitter": 0.2}
        return row_of(Method(name, 1), num_workers=num_workers, **asked).exposed_s

    all_of = [waited("LocalSGD", n) for n in (2, 8, 64, 4096)]
    assert all_of == sorted(all_of)
    assert waited("NoLoCo", 4096) < all_of[-1] / 1.5
    assert waited("NoLoCo", 2) == pytest.approx(all_of[0], rel=0.1)


# --------------------------------------------------------------------------------------
# What others have published: benchmarks/planner.py


@pytest.fixture
def published(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    return importlib.import_module("planner")


def test_published_rates_lie_on_a_grid(published):
    rates = published.GBIT_S.values()
    indices = [published.grid_index(gbit_s) for gbit_s in rates]
    assert indices == [37, 27, 18, 14, 9]
    for index, gbit_s in zip(indices, rates, strict=True):
        assert published.grid_rate(index) == pytest.approx(gbit_s, abs=0.06)


def test_rates_for_half_are_the_published_ones_but_for_a_factor(published):
    """Which nothing overlaps, and what three tenths of a step beside DDP make of it."""
    for period, planned in published.rates_for_half(0.0).items():
        assert planned == pytest.approx(104.81 / period, rel=1e-3)
        assert 0.65 < planned / published.GBIT_S[period] < 0.76
    low, high = published.common_factor()
    assert 1.28 < low < 1.3 and 1.58 < high < 1.61
    for period, planned in published.rates_for_half(0.3).items():
        index = published.grid_index(published.GBIT_S[period])
        assert published.grid_rate(index - 1) < planned < published.grid_rate(index)


@pytest.mark.parametrize("tokens", [25, 100, 250])
def test_hours_are_the_published_ones_but_for_a_factor(published, tokens):
    run = published.RUNS[tokens]
    dp = published.hours_of(run, Method("DDP"))
    assert dp / run.hours_dp == pytest.approx(1.127, abs=0.004)
    streaming = published.hours_of(run, published.STREAMING, "int4")
    assert 1.05 < streaming / run.hours_streaming < 1.07
    by_dp = published.hours_of(run, published.STREAMING, "int4", by_dp_hours=True)
    assert 1.0 < by_dp / run.hours_streaming < 1.03
    eager = published.hours_of(run, published.EAGER, "int4")
    assert eager == pytest.approx(run.hours_eager)


def test_pairs_save_what_was_published_if_steps_spread_enough(published):
    saved = [published.idle_of(1024, jitter).saved for jitter in (0.25, 0.5, 1.0)]
    assert saved == pytest.approx([0.054, 0.110, 0.245], abs=0.005)
    assert published.idle_of(1024, 0.86).saved == pytest.approx(0.2, abs=0.01)
    fewer = [published.idle_of(n, 0.5).saved for n in published.NUM_WORKERS]
    assert fewer == sorted(fewer) and fewer[0] == pytest.approx(0.043, abs=0.005)


# --------------------------------------------------------------------------------------
# A study of model sizes

RUNS = {  # evaluation losses: data-parallel, then 1, 2, 4 and 8 workers
    35e6: (3.485, 3.482, 3.508, 3.554, 3.621),
    180e6: (2.950, 2.943, 2.957, 2.981, 3.019),
    550e6: (2.653, 2.645, 2.657, 2.673, 2.698),
    2.4e9: (2.326, 2.317, 2.323, 2.332, 2.351),
}


@pytest.mark.parametrize("num_params", RUNS)
def test_suggested_losses_are_those_of_the_runs(num_params):
    ddp, *losses = RUNS[num_params]
    for num_workers, loss in zip((1, 2, 4, 8), losses, strict=True):
        advice = suggest(num_params, num_workers)
        assert advice.loss == pytest.approx(loss, rel=0.01)
        assert advice.loss_ddp == pytest.approx(ddp, rel=0.01)


def test_nothing_is_suggested_that_was_not_studied():
    assert suggest(1e9, 8).outer_lr == 0.8
    assert suggest(1e9, 3) == (None, None, None)
    assert suggest(1e8, 4).outer_lr is None and suggest(1e8, 4).loss
    assert suggest(5e9, 4) == (0.6, None, None)
    with pytest.raises(ValueError, match="num_params must be a finite number of at"):
        suggest(0, 4)


# --------------------------------------------------------------------------------------
# Wrong calls


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_params": 0}, "num_params must be a finite number of at least 1"),
        ({"num_workers": 1}, "num_workers must be at least 2, got 1. One sends"),
        ({"gbit_s": 0}, "gbit_s must be positive, got gbit_s=0"),
        ({"latency_s": -1}, "latency_s must be at least 0"),
        ({"jitter": -1}, "jitter must be at least 0"),
        ({"step_s": 0}, "step_s must be above 0 and below inf, got 0. Time some"),
        ({"num_steps": 0}, "num_steps must be at least 1"),
        ({"dtype_bytes": 0}, "dtype_bytes must be above 0"),
        ({"mtbf_h": 0}, "mtbf_h must be above 0 and below inf, got 0. None stands"),
        ({"checkpoint_every_s": -1}, "checkpoint_every_s must be a finite number"),
        ({"restart_s": -1}, "restart_s must be a finite number"),
        ({"utilization": 1.0}, "utilization must be above 0 and below 1, got 1.0"),
        ({"bucket_bytes": 0}, "bucket_bytes must be a finite number of at least 1"),
        ({"codecs": ["int7"]}, "codec must be one of 'bf16'"),
    ],
)
def test_a_question_without_an_answer_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        plan(**{**ASKED, **changes})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "Diloco"}, "name must be one of DDP, .*, got 'Diloco'"),
        ({"name": "DiLoCo", "sync_every": 0}, "sync_every must be at least 1"),
        ({"name": "DiLoCo", "sync_every": 5, "overlap": 5}, "overlap must be smaller"),
        ({"name": "DDP", "overlap": 2}, "overlap must be from 0 to 1 and sync_every 1"),
        ({"name": "DDP", "sync_every": 2}, "overlap must be from 0 to 1 and"),
        (
            {"name": "EagerDiLoCo", "sync_every": 5, "overlap": 1},
            "overlap must be 0 for EagerDiLoCo, got 1. Its exchange",
        ),
        (
            {"name": "NoLoCo", "sync_every": 5, "fragments": 2},
            "fragments must be 1 for NoLoCo, got 2. Take",
        ),
    ],
)
def test_a_method_that_cannot_be_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        Method(**settings)


# --------------------------------------------------------------------------------------
# The command line

LINE = (
    "plan --num-params 150e6 --num-workers 4 --gbit-s 0.2 --latency-s 0.03 "
    "--step-s 0.8 --num-steps 88000"
).split()


def test_the_table_fits(capsys):
    main([*LINE, "--gbit-s", "1e-5", "--num-workers", "1000", "--mtbf-h", "200"])
    lines = capsys.readouterr().out.splitlines()
    rows = 1 + 3 * (len(METHODS) - 1)
    assert lines[0].split()[:5] == ["method", "H", "t", "F", "codec"]
    assert [line.split()[0] for line in lines[1:4]] == ["DDP", "LocalSGD", "LocalSGD"]
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("MTDAO") for line in lines) == 2 * 3
    assert len(lines) > 2 * rows


def test_json_holds_the_rows(capsys):
    main([*LINE, "--json", "--methods", "DiLoCo", "NoLoCo", "--codecs", "none", "int8"])
    answer = json.loads(capsys.readouterr().out)
    diloco, coded, *pairs = answer["rows"]
    assert answer["num_workers"] == 4 and len(pairs) == 2
    assert diloco["method"]["sync_every"] == 100 and diloco["codec"] is None
    assert diloco["exchange_s"] == pytest.approx(36.06)
    assert coded["codec"] == "int8"


def test_parameters_may_be_counted_in_millions(capsys):
    answers = []
    for num_params in ("150e6", "150M", "0.15b"):
        main([*LINE, "--json", "--num-params", num_params])
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] == answers[2]


def test_settings_of_methods(capsys):
    flags = "--json --codecs none --sync-every 40 --overlap 0 --fragments 2"
    main([*LINE, *flags.split(), "--ddp-overlap", "0.5", "--latency-s", "0"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    methods = {row["method"].pop("name"): row["method"] for row in rows}
    assert methods["DDP"] == {"sync_every": 1, "overlap": 0.5, "fragments": 1}
    streaming = {"sync_every": 40, "overlap": 0, "fragments": 2}
    assert methods["StreamingDiLoCo"] == streaming
    assert methods["MTDAO"]["sync_every"] == 40


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num-workers", "1"], "num_workers must be at least 2"),
        (["--codecs", "int7"], "codec must be one of"),
        (["--sync-every", "8"], "overlap must be smaller than the period"),
        (["--num-params", "150X"], "must be a number, got '150X'. Give 150e6, 150M"),
        (["--num-params", ""], "must be a number, got ''."),
    ],
)
def test_a_wrong_line_is_an_error_of_one_line(capsys, flags, words):
    with pytest.raises(SystemExit) as exit:
        main([*LINE, *flags])
    assert exit.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_picture_needs_what_text_does_not(capsys, monkeypatch, tmp_path):
    file, flags = tmp_path / "plan.png", ["--methods", "DiLoCo", "DDP"]
    main([*LINE, *flags, "--png", str(file)])
    assert file.read_bytes()[1:4] == b"PNG"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    main([*LINE, *flags])
    with pytest.raises(SystemExit):
        main([*LINE, *flags, "--png", str(file)])
    assert "pip install matplotlib" in capsys.readouterr().err


def test_the_page_shows_what_is_printed(capsys):
    page = (Path(__file__).parent.parent / "docs" / "planner.md").read_text()
    (block,) = re.findall(r"^```console\n\$ (.*?)^```$", page, re.MULTILINE | re.DOTALL)
    command, shown = block.replace("\\\n", " ").split("\n", 1)
    main(command.split()[3:])
    assert capsys.readouterr().out == shown
