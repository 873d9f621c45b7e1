"""The virtual clock of a slow network."""

import pytest
import torch
from torch import nn

import lowcomm
from toy import network, parameters_of, same, train

MEGABYTE = 1_000_000
# 1 MB of fp32 parameters, 2 workers: each sends half of it, twice, at 1 MB/s: a second.
LINK = {"gbit_s": 0.008, "latency_s": 0.05}


def job(num_steps, *, finish=False, **settings):
    def worker(rank, group):
        weight = nn.Parameter(torch.zeros(MEGABYTE // 4))
        weight.grad = torch.zeros_like(weight)
        opt = lowcomm.DiLoCo(
            torch.optim.SGD([weight], lr=1.0), init_sync=False, **settings
        )
        start = group.now()
        for _ in range(num_steps):
            opt.step()
        if finish:
            opt.finish()
        return group.now() - start, opt.stats.exposed_s

    return worker


def test_a_blocking_exchange_costs_its_bytes_and_two_latencies():
    link = lowcomm.Link(**LINK, step_s=0.3)
    for seconds, exposed in lowcomm.simulate(job(10, sync_every=10), 2, link=link):
        assert seconds == pytest.approx(3.0 + 1.0 + 0.1, rel=1e-3)
        assert exposed == pytest.approx(1.1, rel=1e-3)


@pytest.mark.parametrize(
    ("overlap", "exposed"), [(1, 0.8), (3, 0.2), (4, 0.0), (9, 0.0)]
)
def test_an_overlapped_exchange_costs_what_the_steps_do_not_cover(overlap, exposed):
    link = lowcomm.Link(**LINK, step_s=0.3)
    worker = job(10 + overlap, sync_every=10, overlap=overlap)
    for seconds, waited in lowcomm.simulate(worker, 2, link=link):
        assert waited == pytest.approx(exposed, abs=2e-3)
        assert seconds == pytest.approx((10 + overlap) * 0.3 + exposed, abs=2e-3)


def test_everybody_waits_for_the_slowest():
    link = lowcomm.Link(**LINK, step_s=[0.1, 0.5])
    fast, slow = lowcomm.simulate(job(10, sync_every=10), 2, link=link)
    assert fast[0] == pytest.approx(5.0 + 1.1, abs=0.06)
    assert slow[0] == pytest.approx(5.0 + 1.1, abs=0.06)
    assert fast[1] == pytest.approx(4.0 + 1.1, abs=0.06)


def test_jitter_is_the_same_every_time_and_costs_the_blocking_ones():
    def run(jitter):
        link = lowcomm.Link(gbit_s=1e3, latency_s=0.0, step_s=1.0, jitter=jitter)
        return lowcomm.simulate(job(20, sync_every=1), 4, link=link)

    assert run(0.5) == run(0.5)
    assert run(0.0)[0][0] == pytest.approx(20.0, rel=1e-3)
    assert run(0.5)[0][0] > 20.0 * 1.3  # the slowest of four in each step


def test_without_a_step_time_the_real_one_passes():
    def worker(rank, group):
        start = group.now()
        torch.randn(300, 300) @ torch.randn(300, 300)
        return group.now() - start

    link = lowcomm.Link(gbit_s=1.0, latency_s=0.0)
    assert all(0 < seconds < 10 for seconds in lowcomm.simulate(worker, 2, link=link))


def test_a_wait_ends_by_its_timeout_on_the_virtual_clock():
    link = lowcomm.Link(gbit_s=1e-6, latency_s=0.0, step_s=0.1)
    with pytest.raises(lowcomm.PeerLost, match=r"did not answer within 60 s"):
        lowcomm.simulate(job(1, sync_every=1, timeout_s=60), 2, link=link)


def test_the_link_changes_no_bit():
    def worker(rank, group):
        model = network()
        opt = lowcomm.DiLoCo(
            model.parameters(), lr=0.01, sync_every=4, fragments=2, overlap=3
        )
        train(model, opt, range(11), rank)
        return parameters_of(model)

    link = lowcomm.Link(gbit_s=1e-3, latency_s=0.2, step_s=[0.1, 0.3, 0.2], jitter=0.1)
    linked = lowcomm.simulate(worker, 3, link=link)
    assert same(linked, lowcomm.simulate(worker, 3))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gbit_s": 0, "latency_s": 0}, "gbit_s must be positive, got gbit_s=0"),
        ({"gbit_s": 1, "latency_s": -1}, "latency_s must be at least 0"),
        ({"gbit_s": 1, "latency_s": 0, "jitter": -1}, "jitter must be at least 0"),
        ({"gbit_s": 1, "latency_s": 0, "step_s": [1, -1]}, "step_s must be at least"),
        ({"gbit_s": 1, "latency_s": 0, "step_s": -1.0}, "step_s must be at least 0"),
    ],
)
def test_a_link_that_cannot_be_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        lowcomm.Link(**settings)


def test_step_times_for_another_number_of_workers_are_refused():
    link = lowcomm.Link(gbit_s=1, latency_s=0, step_s=[1.0, 1.0])
    with pytest.raises(ValueError, match="step_s must have one entry for each worker"):
        lowcomm.simulate(lambda rank, group: None, 3, link=link)
