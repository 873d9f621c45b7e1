"""Exchanges that land after they were launched: streaming, eager, late averages."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lowcomm
from lowcomm.testing import run_workers
from toy import (
    CURVATURE,
    TARGETS,
    inner_state_of,
    network,
    parameters_of,
    same,
    slide,
    snapshot,
    through_a_file,
    train,
)


def near(values):
    return [pytest.approx(row, rel=0, abs=1e-9) for row in values]


def apart(num_steps, **settings):
    """The quadratic with each coordinate a parameter; both workers after each step."""

    def worker(rank, group):
        x = [nn.Parameter(torch.tensor([v], dtype=torch.float64)) for v in (0.0, 0.5)]
        opt = lowcomm.DiLoCo(torch.optim.SGD(x, lr=0.1), **settings)
        points = []
        for _ in range(num_steps):
            for i, p in enumerate(x):
                p.grad = CURVATURE[i] * (p.detach() - TARGETS[rank, i])
            opt.step()
            points.append([p.item() for p in x])
        with opt.global_parameters():
            points.append([p.item() for p in x])
        return points

    left, right = lowcomm.simulate(worker, 2)
    return [list(pair) for pair in zip(left, right, strict=True)]


# Worked out by an independent recursion: two fragments of one value, H = 4, so they
# are launched after steps 2, 6, 10, ... and 4, 8, ...; within a step the order is inner
# step, apply, launch. By (overlap, local_mix): rows of both workers after some steps.
STREAMING = {
    (0, 0.0): {
        1: [[0.1, -0.1], [0.3, 0.7]],
        2: [[0.5054, -0.46], [0.5054, 0.82]],
        4: [[0.599374, -0.078816], [0.979374, -0.078816]],
        6: [[1.4044706102, -0.66837376], [1.4044706102, 0.61162624]],
        10: [[2.162206008192, -0.724360411464], [2.162206008192, 0.555639588536]],
    },
    (1, 0.5): {
        3: [[0.3882, -0.676], [0.6592, 0.892]],
        5: [[0.504442, -0.481088], [1.103952, 0.441152]],
        7: [[0.9379499145, -0.81319168], [1.3707514645, 0.79881472]],
        10: [[0.954765487671, -0.747770359552], [1.812277817621, 0.610326331648]],
    },
    (2, 0.5): {
        4: [[0.42465, -0.8056], [0.76855, 0.9352]],
        6: [[0.5339665, -0.504416], [1.1925255, 0.448928]],
        10: [[0.926819758225, -0.5849026304], [1.676760038175, 0.3472740608]],
    },
}
GLOBAL = {
    (0, 0.0): [2.162206008192, -0.234334476288],
    (1, 0.5): [1.277301809, -0.22648552704],
    (2, 0.5): [1.19679518, -0.2340329472],
}


@pytest.mark.parametrize(("overlap", "local_mix"), STREAMING)
def test_streaming_follows_the_worked_numbers(overlap, local_mix):
    points = apart(10, sync_every=4, fragments=2, overlap=overlap, local_mix=local_mix)
    for step, rows in STREAMING[overlap, local_mix].items():
        assert points[step - 1] == near(rows), f"step {step}"
    expected = GLOBAL[overlap, local_mix]
    assert points[10] == near([expected, expected])


def test_eager_follows_the_worked_numbers():
    points = apart(8, sync_every=2, eager=True)
    for step, rows in {
        2: [[0.12635, -0.1384], [0.37905, 0.7128]],
        4: [[0.6696506775, -0.56445696], [0.9981520325, 0.28735232]],
        6: [[1.299680004148, -0.938144461824], [1.701949172444, 0.085555780608]],
        8: [[1.905140055849, -0.967580121041], [2.369016403998, 0.137788024816]],
    }.items():
        assert points[step - 1] == near(rows), f"step {step}"


def test_one_fragment_without_overlap_or_mix_is_plain_diloco_to_the_bit():
    plain = apart(9, sync_every=3)
    assert plain == apart(9, sync_every=3, fragments=1, overlap=0, local_mix=0.0)


def test_eager_alone_is_diloco_alone():
    def run(**settings):
        model = network()
        opt = lowcomm.DiLoCo(model.parameters(), lr=0.01, sync_every=3, **settings)
        train(model, opt, range(12))
        return parameters_of(model)

    torch.testing.assert_close(run(eager=True), run(), rtol=0, atol=1e-12)


def test_a_late_average_keeps_the_progress_since_its_launch():
    # Gradients 1 and 3 with lr 1 from 0: after two steps -2 and -6, mean -4, launched.
    # One more step each: -3 and -9; what was sent gives way to the mean:
    #   -3 + (-4 + 2) = -5 and -9 + (-4 + 6) = -7
    def worker(rank, group):
        x = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        opt = lowcomm.LocalSGD(torch.optim.SGD([x], lr=1.0), sync_every=2, overlap=1)
        seen = []
        for _ in range(3):
            slide(x, opt, 1.0 + 2 * rank)
            seen.append(x.item())
        return seen

    assert lowcomm.simulate(worker, 2) == [[-1, -2, -5], [-3, -6, -7]]


def test_late_moments_decay_as_they_would_have_and_are_never_negative():
    """Worker 0 has a huge second moment when it sends, worker 1 a tiny one."""
    overlap, beta2 = 3, 0.5

    def worker(rank, group):
        x = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        inner = torch.optim.Adam([x], lr=0.1, betas=(0.9, beta2))
        opt = lowcomm.LocalSGD(
            inner, sync_every=4, average_states=True, overlap=overlap
        )
        seen = []
        for step in range(8):
            slide(x, opt, [100.0, 0.01][rank] if step < 4 else 0.0)
            seen.append(inner.state[x]["exp_avg_sq"].item())
        return seen

    first, second = lowcomm.simulate(worker, 2)
    # Until the launch after step 4; from there every worker has zero gradients, so an
    # average of the launched values would have decayed by beta2 in each step.
    mean = (first[3] + second[3]) / 2
    for seen in (first, second):
        assert seen[6] == pytest.approx(mean * beta2**overlap, rel=1e-12)
        assert min(seen) >= 0


SETTINGS = {
    "blocking": {},
    "overlap": {"overlap": 2},
    "streaming": {"fragments": 3, "overlap": 3},
    "fragments on one step": {"fragments": 4, "sync_every": 3, "overlap": 2},
    "kept local": {"overlap": 1, "local_mix": 1.0},
    "eager": {"eager": True, "outer_lr": 0.4},
    "eager fragments": {"eager": True, "fragments": 2, "outer_lr": 0.4},
    "int8": {"codec": "int8", "overlap": 1},
    "int4, error feedback": {"codec": "int4", "error_feedback": True, "fragments": 2},
}


def build(settings):
    model = network()
    keywords = {"lr": 0.01, "sync_every": 5, **settings}
    return model, lowcomm.DiLoCo(model.parameters(), **keywords)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("stop", range(1, 12))
def test_resumed_with_rounds_in_flight_is_never_stopped(settings, stop):
    def straight(rank, group):
        model, opt = build(settings)
        train(model, opt, range(14), rank)
        return parameters_of(model), inner_state_of(opt)

    def resumed(rank, group):
        model, opt = build(settings)
        train(model, opt, range(stop), rank)
        saved = through_a_file([model.state_dict(), opt.state_dict()])
        model, opt = build(settings)
        model.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
        train(model, opt, range(stop, 14), rank)
        return parameters_of(model), inner_state_of(opt)

    assert same(lowcomm.simulate(straight, 2), lowcomm.simulate(resumed, 2))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("num_steps", [4, 5, 6, 8, 10])
def test_finished_workers_are_equal_and_go_on(settings, num_steps):
    def worker(rank, group):
        model, opt = build(settings)
        train(model, opt, range(num_steps), rank)
        opt.finish()
        first, rounds = parameters_of(model), opt.stats.rounds
        opt.finish()
        assert same(parameters_of(model), first)
        assert opt.stats.rounds == rounds
        train(model, opt, range(num_steps, num_steps + 7), rank)
        opt.finish()
        return first, parameters_of(model)

    results = lowcomm.simulate(worker, 3)
    assert all(same(result, results[0]) for result in results)
    assert all(p.isfinite().all() for p in results[0][1])


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_one_that_finishes_early_serves_the_others(settings):
    def worker(rank, group):
        model, opt = build(settings)
        train(model, opt, range([3, 9, 16][rank]), rank)
        opt.finish()
        first = parameters_of(model)
        train(model, opt, range(20, 27), rank)
        opt.finish()
        return first, parameters_of(model)

    results = lowcomm.simulate(worker, 3)
    assert all(same(result, results[0]) for result in results)


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    narrow=st.booleans(),
    fragments=st.integers(1, 4),
    bucket_bytes=st.sampled_from([1, 64, 200, 1 << 20]),
    num_workers=st.integers(1, 4),
    overlap=st.integers(0, 2),
)
def test_every_element_is_averaged_once_in_a_period(
    sizes, narrow, fragments, bucket_bytes, num_workers, overlap
):
    """Rank r moves all values by r + 1: whoever is averaged twice or never is off."""
    if not any(sizes):
        sizes = [*sizes, 1]
    dtypes = [torch.bfloat16 if narrow and i % 2 else torch.float32 for i in range(9)]

    def worker(rank, group):
        params = [
            nn.Parameter(torch.zeros(n, dtype=dtypes[i])) for i, n in enumerate(sizes)
        ]
        opt = lowcomm.DiLoCo(
            torch.optim.SGD(params, lr=1.0),
            sync_every=3,
            outer_lr=1.0,
            outer_momentum=0.0,
            fragments=min(fragments, len(params)),
            overlap=overlap,
            bucket_bytes=bucket_bytes,
        )
        for step in range(3 + overlap):
            for p in params:
                p.grad = torch.full_like(p, -float(rank + 1) if step == 0 else 0.0)
            opt.step()
        with opt.global_parameters():
            return snapshot([p.data for p in params])

    mean = (num_workers + 1) / 2
    for params in lowcomm.simulate(worker, num_workers):
        for p in params:
            assert (p == mean).all(), (p, mean)


def streaming_job(rank):
    results = []
    for settings in SETTINGS.values():
        model, opt = build(settings)
        train(model, opt, range(13), rank)
        opt.finish()
        results.append((parameters_of(model), opt.stats.bytes_sent))
    return results


@pytest.mark.workers
def test_processes_with_rounds_in_flight_have_the_bits_of_simulated_workers():
    simulated = lowcomm.simulate(lambda rank, group: streaming_job(rank), 3)
    assert same(run_workers(streaming_job, 3), simulated)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"overlap": 5}, "overlap must be smaller.*overlap=5.*period of 5.*eager"),
        ({"overlap": -1}, "overlap must be at least 0, got overlap=-1"),
        ({"overlap": 1, "eager": True}, "eager must be False with overlap"),
        ({"local_mix": 1.5}, "local_mix must be from 0 to 1, got local_mix=1.5"),
        ({"fragments": 0}, "fragments must be at least 1.*fragments=0"),
        ({"fragments": 5}, "number of trainable tensors.*fragments=5 with 4"),
        ({"codec": "int3"}, "codec must be .*int3"),
        ({"error_feedback": True}, "error_feedback must be False without a codec"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_reason(settings, words):
    with pytest.raises(ValueError, match=words):
        build(settings)


def test_fragments_that_forget_a_parameter_name_it():
    model = network()
    named = list(model.named_parameters())
    with pytest.raises(ValueError, match=r"got lists without 2\.bias"):
        lowcomm.DiLoCo(named, sync_every=2, fragments=[[p for _, p in named[:3]]])


def test_a_parameter_in_two_fragments_belongs_to_the_first():
    model = network()
    a, b, c, d = model.parameters()
    opt = lowcomm.DiLoCo([a, b, c, d], sync_every=2, fragments=[[a, b], [b, c, d]])
    train(model, opt, range(4))
    assert opt.stats.streams["fragment 0"].rounds == 2
    assert opt.stats.rounds == 4


def test_disagreement_shows_in_the_cosine():
    # Displacements (1, 0) and (0, 2): mean (.5, 1), of length sqrt(1.25).
    #   cos = .5 / sqrt(1.25)  and  2 / (2 sqrt(1.25))
    def worker(rank, group):
        x = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        opt = lowcomm.DiLoCo(torch.optim.SGD([x], lr=1.0), sync_every=1)
        x.grad = torch.tensor([[1.0, 0.0], [0.0, 2.0]][rank], dtype=torch.float64)
        opt.step()
        return opt.stats.streams["parameters"]

    first, second = lowcomm.simulate(worker, 2)
    assert (first.share_norm, second.share_norm) == pytest.approx((1.0, 2.0))
    assert first.mean_norm == second.mean_norm == pytest.approx(1.25**0.5)
    assert first.cosine == pytest.approx(0.5 / 1.25**0.5)
    assert second.cosine == pytest.approx(1 / 1.25**0.5)
