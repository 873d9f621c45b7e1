"""Workers that come and go: what is kept, what is taken, and that nobody hangs."""

import functools
import gc
import itertools
import json
import re
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch

import fleet as fleets
import lowcomm
from fleet import METHODS, build, one_step, training, until_awaited, wait_for
from lowcomm.sync import mean
from lowcomm.sync.elastic import ElasticGroup
from lowcomm.sync.mean import Outcome, Wire
from lowcomm.testing import free_port
from toy import inner_state_of, same, scalar, slide, snapshot, tensors_of

every_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture
def fleet(monkeypatch):
    with fleets.made(monkeypatch) as made:
        yield made


def check_rounds(*workers):
    """Whoever has had a round has had the same one, bit by bit."""
    landed, agreed = {}, {}
    for worker in workers:
        for key, value in worker.landed.items():
            assert landed.setdefault(key, value) == value, (worker.name, key)
        for key, value in worker.agreed.items():
            assert agreed.setdefault(key, value) == value, (worker.name, key)
    assert landed


def rounds_of(worker):
    return {(stream, round) for stream, round, _ in worker.landed}


def start_three(fleet, method, num_steps=16, **settings):
    for i in range(3):
        fleet.start(
            f"worker-{i}", training(method, num_steps), start_with=3, **settings
        )


def check_equal(results):
    for result in results:
        assert same(result, results[0])


@every_method
def test_three_begin_and_end(fleet, method):
    for i in range(3):
        fleet.start(f"worker-{i}", training(method), start_with=3)
    check_equal(fleet.join())
    workers = [fleet[i] for i in range(3)]
    check_rounds(*workers)
    if method != "NoLoCo":  # of which one is alone in each round
        assert rounds_of(workers[0]) == rounds_of(workers[1]) == rounds_of(workers[2])


# Killed

#: What one is about to do in a round when it is killed.
MOMENTS = [
    *itertools.product(METHODS, ("greet", "share", "confirm to some", "land")),
    *itertools.product(("DiLoCo", "streaming"), ("launch", "prepare", "confirm")),
]


@pytest.mark.parametrize(("method", "what"), MOMENTS)
def test_a_round_in_which_one_is_killed_is_had_by_all_or_by_none(fleet, method, what):
    for i in range(3):
        trap = (what, 1) if i == 1 else None
        fleet.start(f"worker-{i}", training(method, trap=trap), start_with=3)
    check_equal(fleet.join(0, 2))
    left = fleet[0], fleet[2]
    assert fleet[1].group.is_dead
    assert [change.left for change in left[0].changes] == [(), (1,)]
    check_rounds(*left)
    if method == "NoLoCo":
        return
    assert left[0].landed == left[1].landed
    if what in ("confirm to some", "land"):  # one of them may have used it
        assert any(key[1:] == (1, (0, 1, 2)) for key in left[0].landed)
    for stream in {stream for stream, *_ in left[0].landed}:
        rounds = sorted(key for key in left[0].landed if key[0] == stream)
        members = [members for _, _, members in rounds]
        alone = members.index((0, 2))
        assert members == [(0, 1, 2)] * alone + [(0, 2)] * (len(rounds) - alone)
        assert alone <= 2
    for (_, _, members), (included, _) in left[0].landed.items():
        assert included == members


@pytest.mark.parametrize("what", ["greet", "confirm to some", "land"])
@every_method
def test_one_that_is_killed_in_finish_keeps_nobody_from_being_equal(
    fleet, method, what
):
    for i in range(3):
        trap = (what, None) if i == 1 else None
        work = training(method, 19, last_trap=trap)
        fleet.start(f"worker-{i}", work, start_with=3)
    check_equal(fleet.join(0, 2))
    assert fleet[1].group.is_dead
    check_rounds(fleet[0], fleet[2])


def test_what_is_prepared_too_late_is_not_used():
    """Others have been told already that it is not here."""
    wire = Wire(types.SimpleNamespace(rank=0), (0, 1), lane=0, exchange=5)
    outcome = Outcome({}, (0, 1), 0)
    assert wire.seal() is None
    with pytest.raises(lowcomm.PeerLost, match="settled anew"):
        wire.prepare(outcome)
    assert wire.seal() is None
    wire = Wire(types.SimpleNamespace(rank=0), (0, 1), lane=0, exchange=5)
    wire.prepare(outcome)
    assert wire.seal() is outcome


def test_a_result_is_used_when_all_others_have_said_that_they_hold_it():
    awaited = []

    def message(what):
        def post(peer, tensor, tag):
            wait = functools.partial(awaited.append, (what, peer))
            return types.SimpleNamespace(peer=peer, wait=wait)

        return post

    device, sent, received = torch.device("cpu"), message("sent"), message("received")
    group = types.SimpleNamespace(rank=1, device=device, send=sent, recv=received)
    for handle in mean._confirm(Wire(group, (0, 1, 2), lane=0, exchange=5)):
        handle.wait()
    assert sorted(awaited) == [
        *(("received", 0), ("received", 2)),
        *(("sent", 0), ("sent", 2)),
    ]


@pytest.mark.parametrize("what", ["meet", "met"])
def test_one_that_is_killed_while_they_are_settled_anew(fleet, what):
    for i in range(4):
        # After the first meeting one is killed in a round, and one in the next meeting.
        trap = {1: (what, 1), 2: ("share", 1)}.get(i)
        fleet.start(f"worker-{i}", training("streaming", trap=trap), start_with=4)
    check_equal(fleet.join(0, 3))
    assert fleet[1].group.is_dead and fleet[2].group.is_dead
    check_rounds(fleet[0], fleet[3])
    assert fleet[0].group.members() == (0, 3)


# Come


def join_later(fleet, method, step, *numbers, **more):
    """Two workers train; others come while they are at a step."""
    at = {step: until_awaited}
    for i in range(2):
        fleet.start(f"worker-{i}", training(method, at=at, **more), start_with=2)
    fleet.await_hold(0, 1)
    for number in numbers:
        fleet.start(f"worker-{number}", training(method, **more))


@pytest.mark.parametrize("step", [0, 5])
@every_method
def test_one_that_comes_begins_as_a_copy_and_is_equal_after_the_next_round(
    fleet, method, step
):
    join_later(fleet, method, step, 2)
    check_equal(fleet.join())
    check_rounds(*(fleet[i] for i in range(3)))
    assert [change.joined for change in fleet[0].changes] == [(0, 1), (2,)]
    (given,) = fleet.given
    assert given.taker == 2
    # In rounds from then on.
    if method == "NoLoCo":
        return
    for worker in (fleet[0], fleet[2]):
        last = max(worker.landed, key=lambda key: key[1])
        assert last[2] == (0, 1, 2)
    assert rounds_of(fleet[2]) < rounds_of(fleet[0])
    if method == "eager":  # a round was under way, to which it had nothing to give
        with_it = sorted(key for key in fleet[0].landed if key[2] == (0, 1, 2))
        took_part = [fleet[0].landed[key][0] for key in with_it if "last" not in key[0]]
        assert took_part == [(0, 1)] + [(0, 1, 2)] * (len(took_part) - 1)


@every_method
def test_what_a_newcomer_has_is_what_its_donor_had(fleet, method):
    """Rates as they are now, moments, anchors; not what the donor owes by itself."""

    def come(worker):
        build(worker, method, lr=0.5)
        own = worker.opt.state_dict()
        entered = snapshot([own, list(worker.model.parameters())])
        training_on(worker)
        return entered

    def training_on(worker):
        while worker.steps < 16:
            one_step(worker)
        worker.opt.finish()
        worker.group.close()

    def lower_the_rate(worker):
        for group in worker.opt.param_groups:
            group["lr"] = 0.003
        until_awaited(worker)

    for i in range(2):
        work = training(method, at={5: lower_the_rate})
        fleet.start(f"worker-{i}", work, start_with=2)
    fleet.await_hold(0, 1)
    fleet.start("worker-2", come)
    _, _, (state, params) = fleet.join()
    (given,) = fleet.given
    theirs = given.state["all"]["optimizer"]
    assert state["param_groups"][0]["lr"] == 0.003
    assert same(state["state"], theirs["state"])
    assert same(state["param_groups"], theirs["param_groups"])
    mine, theirs = state["lowcomm"]["sync"], theirs["lowcomm"]["sync"]
    assert mine["stats"]["rounds"] == theirs["stats"]["rounds"] > 0
    for name, stream in theirs["streams"].items():
        assert mine["streams"][name]["round"] == stream["round"]
        kept = mine["streams"][name]["tensors"]
        for kind in stream["tensors"].keys() - {"residual"}:
            assert same(kept[kind], stream["tensors"][kind])
        for residual in tensors_of(kept.get("residual", {})):
            assert not residual.any()
    if mine["streams"].get("parameters", {}).get("agreed"):
        anchor = mine["streams"]["parameters"]["tensors"]["anchor"]
        assert all(map(same, params, anchor.values()))


def test_two_that_come_at_once_have_different_donors(fleet):
    join_later(fleet, "streaming", 5, 2, 3)
    results = fleet.join()
    check_equal(results)
    donors = {given.taker: given.donor for given in fleet.given}
    if len(fleet[0].changes) == 2:  # were let in together
        assert sorted(donors.items()) in ([(2, 0), (3, 1)], [(2, 1), (3, 0)])


def test_workers_may_come_before_the_first_step_and_take_turns(fleet):
    """Each of them is the only one that was there when the next one comes."""
    for i in range(3):
        at = {step: until_awaited for step in range(4 * i, 8, 4)}
        fleet.start(f"worker-{i}", training("DiLoCo", at=at))
        if i < 2:
            fleet.await_hold(*range(i + 1))
    check_equal(fleet.join())


@pytest.mark.parametrize("method", ["LocalSGD", "streaming", "int8", "MTDAO"])
def test_the_donor_dies_while_it_gives(fleet, method):
    join_later(fleet, method, 5)
    fleet[0].trap = ("give", 2)
    fleet.start("worker-2", training(method))
    check_equal(fleet.join(1, 2))
    assert fleet[0].group.is_dead
    assert [(given.donor, given.taker) for given in fleet.given] == [(0, 2), (1, 2)]
    check_rounds(fleet[1], fleet[2])


@pytest.mark.parametrize("number", [0, 3])
def test_one_that_comes_dies_while_it_takes(fleet, number):
    join_later(fleet, "streaming", 5)
    fleet.start("worker-2", training("streaming", trap=("take", number)))
    check_equal(fleet.join(0, 1))
    assert fleet[2].group.is_dead
    check_rounds(fleet[0], fleet[1])
    assert fleet[0].group.members() == (0, 1)


def test_what_was_had_among_whom_is_taken_too(fleet):
    """By which it is told later whether somebody has missed a round."""
    join_later(fleet, "DiLoCo", 5)
    fleet[1].trap = ("met", 1)  # before another round
    fleet.start("worker-2", training("DiLoCo"))
    check_equal(fleet.join(0, 2))
    facts = fleet[0].councils[-1].facts
    assert facts.keys() == {0, 2}
    assert not facts[2].fresh
    places = [facts[rank].places["parameters"] for rank in (0, 2)]
    assert len({(place.round, place.landed_in) for place in places}) == 1


# By hand


def sliding(slope, method, at=None, trap=None):
    """Trains one value that moves by `slope` in each step; the values after rounds."""

    def work(worker):
        worker.trap = trap
        x = scalar(0.0)
        kind, keywords = method
        inner = lowcomm.LocalSGD if kind == "LocalSGD" else lowcomm.DiLoCo
        worker.opt = inner(
            torch.optim.SGD([x], lr=1.0), sync_every=2, group=worker.group, **keywords
        )
        points = {worker.steps: x.item()}
        while worker.steps < 8:
            if at and worker.steps in at:
                at[worker.steps](worker)
            slide(x, worker.opt, slope)
            if worker.steps % 2 == 0:
                points[worker.steps] = x.item()
        worker.opt.finish()
        worker.group.close()
        return points

    return work


@pytest.mark.parametrize(
    "method",
    [("LocalSGD", {}), ("DiLoCo", {"outer_lr": 1.0, "outer_momentum": 0.0})],
    ids=["LocalSGD", "DiLoCo"],
)
def test_the_mean_is_over_those_that_took_part(fleet, method):
    # Slopes 1, 2, 6 from 0:              -2, -4, -12  mean -6
    # The third is killed in its round:   -8, -10      mean -9
    # A fourth waits:                    -11, -13      mean -12
    # and takes steps of 12 from there:  -14, -16, -36 mean -22
    at = {4: until_awaited}
    for i, slope in enumerate((1.0, 2.0, 6.0)):
        trap = ("greet", 1) if i == 2 else None
        fleet.start(f"worker-{i}", sliding(slope, method, at, trap), start_with=3)
    fleet.await_hold(0, 1)
    fleet.start("worker-3", sliding(12.0, method))
    expected = {0: 0, 2: -6, 4: -9, 6: -12, 8: -22}
    first, second, fourth = fleet.join(0, 1, 3)
    assert first == second == expected
    assert fourth == {6: -12, 8: -22}


# Away for a while


@pytest.mark.parametrize("method", ["LocalSGD", "DiLoCo", "int8", "eager", "DESLOC"])
def test_one_that_was_away_takes_what_it_has_missed_and_keeps_its_progress(
    fleet, method
):
    seen, rounds_at = {}, []

    def away(worker):
        """Sleeps until the others have had a round without it."""

        def note(*_):
            seen["before"] = progress_of(worker), inner_state_of(worker.opt)

        hook = worker.opt.inner.register_step_post_hook(note)
        fleet.await_hold(0, 1)
        one_step(worker)
        hook.remove()
        seen["after"] = progress_of(worker), inner_state_of(worker.opt)
        seen["skipped"] = worker.opt.stats.skipped_rounds
        assert worker.steps == 7
        worker.opt.register_round_hook(lambda stats: rounds_at.append(stats.steps))

    for i in range(3):
        at = {6: away} if i == 2 else {12: until_awaited}
        work = training(method, at=at)
        fleet.start(f"worker-{i}", work, start_with=3, timeout_s=1.0)
    check_equal(fleet.join())
    check_rounds(*(fleet[i] for i in range(3)))
    (given,) = fleet.given
    assert given.taker == 2
    streams = given.state["streams"].values()
    kinds = {kind for stream in streams for kind in stream["tensors"]}
    if method in ("DiLoCo", "int8"):
        assert kinds == {"anchor", "momentum"}
    if method in ("LocalSGD", "DESLOC"):
        assert not tensors_of(given.state)
    assert seen["skipped"] >= 1
    if method in ("LocalSGD", "DiLoCo"):  # with the others: a whole round behind them
        assert rounds_at[:2] == [11, 15]
    (progress, inner), (progress_after, inner_after) = seen["before"], seen["after"]
    assert same(inner, inner_after)
    if method == "eager":  # it is in the share of the round that the others are in
        return
    torch.testing.assert_close(progress_after, progress, rtol=0, atol=1e-12)


def test_one_of_a_pair_that_was_away_is_met_again(fleet):
    def away(worker):
        fleet.await_hold(0)

    work = training("NoLoCo", 24, at={12: until_awaited})
    fleet.start("worker-0", work, start_with=2, timeout_s=1.0)
    work = training("NoLoCo", 24, at={6: away})
    fleet.start("worker-1", work, start_with=2, timeout_s=1.0)
    check_equal(fleet.join())
    check_rounds(fleet[0], fleet[1])
    met = [members for stream, _, members in fleet[0].landed if stream == "parameters"]
    assert met[0] == met[-1] == (0, 1)
    assert fleet[1].opt.stats.skipped_rounds > 0


def progress_of(worker):
    """Parameters, from the anchor where there is one."""
    streams = worker.opt.state_dict()["lowcomm"]["sync"]["streams"].values()
    anchors = {}
    for stream in streams:
        anchors |= stream["tensors"].get("anchor", {})
    named = dict(worker.model.named_parameters())
    return [
        (p - anchors[n] if n in anchors else p).detach().clone()
        for n, p in named.items()
    ]


# Leave, and end


def test_what_has_come_and_gone_leaves_nothing_behind(fleet):
    """Threads, connections and memory of groups that are no more."""

    def outlive(worker):
        build(worker, "streaming")
        for i in range(3):
            work = training("streaming", 10**6, trap=("greet", 3 * i + 3))
            other = fleet.start("worker-1", work)
            wait_for(lambda: worker.group.awaited)
            while not (other.group and other.group.is_dead):
                one_step(worker)
            other.join()
            fleet.forget("worker-1")
            del other
            one_step(worker)
            first.append(count())
            wait_for(lambda: count() <= first[0], every_s=0.1)

    def count():
        gc.collect()
        return sum(t.name.startswith("lowcomm") for t in threading.enumerate())

    first = []
    fleet.start("worker-0", outlive)
    fleet.join()


def test_one_that_leaves_in_between_is_not_even_missed(fleet, monkeypatch):
    def leave(worker):
        worker.group.close()
        raise fleets.Killed

    monkeypatch.setattr("lowcomm.sync.roll._MISSING_S", 1000.0)
    for i in range(3):
        work = training("streaming", at={6: leave} if i == 1 else None)
        fleet.start(f"worker-{i}", work, start_with=3, timeout_s=1000.0)
    check_equal(fleet.join(0, 2))
    check_rounds(fleet[0], fleet[2])
    assert fleet[0].changes[-1].left == (1,)


def test_a_change_is_told_to_all_alike(fleet):
    join_later(fleet, "LocalSGD", 5, 2)
    fleet.join()
    changes = [fleet[i].changes[-1] for i in range(3)]
    for change in changes:
        assert change.members == (0, 1, 2)
        assert change.steps == 8
    # Each says what has become other for it.
    assert [change.joined for change in changes] == [(2,), (2,), (0, 1, 2)]


def test_training_may_go_on_after_finish(fleet):
    def twice(worker):
        build(worker, "streaming")
        ends = []
        for end in (7, 14):
            while worker.steps < end:
                one_step(worker)
            worker.opt.finish()
            ends.append(fleets.state_of(worker))
        worker.group.close()
        return ends

    for i in range(2):
        fleet.start(f"worker-{i}", twice, start_with=2)
    check_equal(fleet.join())


def test_one_ends_early_and_serves_the_others(fleet):
    for i in range(3):
        work = training("streaming", 9 + 4 * i)
        fleet.start(f"worker-{i}", work, start_with=3)
    check_equal(fleet.join())
    check_rounds(*(fleet[i] for i in range(3)))


@every_method
def test_alone(fleet, method):
    fleet.start("worker-0", training(method))
    (result,) = fleet.join()
    assert all(t.isfinite().all() for t in tensors_of(result))
    assert fleet[0].opt.stats.rounds > 0
    assert fleet[0].opt.stats.bytes_sent == 0


def test_a_round_in_each_step(fleet):
    join_later(fleet, "DiLoCo", 5, 2, sync_every=1)
    check_equal(fleet.join())
    check_rounds(*(fleet[i] for i in range(3)))


# Without a lighthouse


def test_between_rounds_nothing_depends_on_the_lighthouse(fleet):
    def away(worker):
        fleet.lighthouse.is_away = True

    def back(worker):
        fleet.lighthouse.is_away = False

    for i in range(3):
        at = {3: away, 13: back} if i == 0 else None
        fleet.start(f"worker-{i}", training("streaming", at=at), start_with=3)
    check_equal(fleet.join())
    assert [len(fleet[i].changes) for i in range(3)] == [1, 1, 1]


def test_one_that_is_killed_while_the_lighthouse_is_away_is_missed_when_it_is_back(
    fleet,
):
    def away(worker):
        fleet.lighthouse.is_away = True

    def killed(worker):
        wait_for(lambda: fleet.lighthouse.is_away)
        worker.die()

    fleet.start("worker-0", training("DiLoCo", at={3: away}), start_with=3)
    fleet.start("worker-1", training("DiLoCo", at={6: killed}), start_with=3)
    fleet.start("worker-2", training("DiLoCo"), start_with=3)
    fleet[1].join(fleets.LONGEST_S)
    wait_for(lambda: all(fleet[i].is_ready for i in (0, 2)))
    fleet.lighthouse.is_away = False
    check_equal(fleet.join(0, 2))
    check_rounds(fleet[0], fleet[2])


# Refused


def error_of(worker):
    worker.join(fleets.LONGEST_S)
    assert not worker.is_alive()
    return worker.error


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"sync_every": 5}, "sync_every must be the same .* 4 on rank 0 and 5 on rank"),
        ({"outer_lr": 0.3}, "outer_lr must be the same"),
        ({"fragments": 2, "sync_every": 4}, "fragments must be the same"),
        ({"bucket_bytes": 128}, "bucket_bytes must be the same"),
    ],
)
def test_one_with_other_settings_is_refused_and_the_others_go_on(fleet, more, words):
    join_later(fleet, "DiLoCo", 5)
    other = fleet.start("worker-2", training("DiLoCo", **more))
    error = error_of(other)
    assert isinstance(error, lowcomm.PeerMismatch)
    assert re.search(words, str(error)), error
    check_equal(fleet.join(0, 1))
    check_rounds(fleet[0], fleet[1])


def test_workers_that_begin_with_other_settings_end_all(fleet):
    for i in range(2):
        fleet.start(f"worker-{i}", training("DiLoCo", sync_every=4 + i), start_with=2)
    for i in range(2):
        assert "sync_every must be the same" in str(error_of(fleet[i]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"run": "b"}, "run must be that of the workers .* 'b' on worker-2 and 'a'"),
        ({"run": "a", "token": "x"}, "token must be that of the workers"),
        ({"run": "a"}, "token must be that of the workers"),
    ],
)
def test_one_of_another_run_is_refused_and_named(fleet, settings, words):
    at = {5: lambda worker: wait_for(lambda: fleet[0].holds)}
    for i in range(2):
        work = training("DiLoCo", at=at)
        fleet.start(f"worker-{i}", work, start_with=2, run="a", token="secret")
    fleet.lighthouse.await_sheet(lambda sheet: any(e.epoch for e in sheet.values()))
    error = error_of(fleet.start("worker-2", training("DiLoCo"), **settings))
    fleet[0].holds = True
    assert isinstance(error, lowcomm.PeerMismatch)
    assert re.search(words, str(error)), error
    assert "secret" not in str(error)
    check_equal(fleet.join(0, 1))
    assert "secret" not in str(fleet.lighthouse.sheet())


def test_a_second_one_of_the_same_name_is_refused(fleet):
    at = {5: lambda worker: wait_for(lambda: fleet[0].holds)}
    for i in range(2):
        fleet.start(f"worker-{i}", training("DiLoCo", at=at), start_with=2)
    # At the end of a round too, when those that come are let in.
    fleet.lighthouse.await_sheet(lambda sheet: any(e.epoch for e in sheet.values()))
    error = error_of(fleet.start("worker-2", training("DiLoCo"), name="worker-1"))
    fleet[0].holds = True
    assert isinstance(error, lowcomm.PeerMismatch)
    assert re.match(
        "name must be that of one worker, got 'worker-1' at 127", str(error)
    )
    check_equal(fleet.join(0, 1))


def test_one_that_comes_when_the_run_ends_is_told_so(fleet):
    def linger(worker):
        build(worker)
        worker.opt.finish()
        worker.holds = True
        wait_for(lambda: not worker.holds)
        worker.group.close()

    fleet.start("worker-0", linger)
    fleet.await_hold(0)
    late = fleet.start("worker-1", training(), timeout_s=0.5)
    fleet.lighthouse.await_sheet(lambda s: "worker-1" in s and s["worker-1"].ready)
    fleet[0].holds = False
    error = error_of(late)
    assert isinstance(error, lowcomm.SyncError)
    assert "the run must be under way" in str(error)


# Given up


def test_fewer_than_there_must_be_wait_and_then_end(fleet):
    settings = {"start_with": 2, "min_workers": 2, "timeout_s": 0.4}
    for i in range(2):
        work = training(trap=("greet", 1) if i else None)
        fleet.start(f"worker-{i}", work, max_failed_rounds=1, **settings)
    fleet[1].join(fleets.LONGEST_S)
    began = time.monotonic()
    error = error_of(fleet[0])
    assert isinstance(error, lowcomm.SyncError)
    assert re.search(
        r"a round in 1 attempts, got none on worker-0 .*\['worker-0'\]", str(error)
    )
    assert time.monotonic() - began < 4


def test_another_one_ends_the_wait(fleet):
    settings = {"start_with": 2, "min_workers": 2}
    for i in range(2):
        fleet.start(
            f"worker-{i}", training(trap=("greet", 1) if i else None), **settings
        )
    fleet[1].join(fleets.LONGEST_S)
    fleet.start("worker-2", training(), **settings)
    check_equal(fleet.join(0, 2))
    check_rounds(fleet[0], fleet[2])


def test_a_round_that_fails_again_and_again_ends(fleet, monkeypatch):
    def fail(wire, job, header):
        yield from ()
        raise lowcomm.PeerLost("rank 1 was lost: always")

    monkeypatch.setattr("lowcomm.sync.engine.mean_", fail)
    for i in range(2):
        fleet.start(f"worker-{i}", training(), start_with=2, max_failed_rounds=2)
    errors = [str(error_of(fleet[i])) for i in range(2)]
    assert any("must have a round in 2 attempts" in error for error in errors)


def test_a_loss_is_raised_if_that_is_wanted(fleet):
    for i in range(3):
        work = training(trap=("share", 1) if i == 1 else None)
        fleet.start(f"worker-{i}", work, start_with=3, on_peer_loss="raise")
    for i in (0, 2):
        error = error_of(fleet[i])
        assert isinstance(error, lowcomm.PeerLost)
        assert error.rank == 1
        assert "checkpoint" in str(error)


def test_no_lighthouse_at_all(fleet):
    fleet.lighthouse.is_away = True
    fleet.start("worker-0", training(), timeout_s=0.1, max_failed_rounds=1)
    assert "lighthouse must answer, got nothing from" in str(error_of(fleet[0]))


# Wrong calls


def test_calls_that_are_wrong_in_an_elastic_group(fleet):
    def work(worker):
        with pytest.raises(RuntimeError, match="when the optimizer has been built"):
            assert worker.group.rank is None
        with pytest.raises(TypeError, match="hook must be a function"):
            worker.group.register_change_hook("print")
        build(worker, "LocalSGD")
        assert worker.group.rank == 0
        with pytest.raises(ValueError, match="add_param_group must be called with"):
            worker.opt.add_param_group({"params": [scalar(0.0)]})
        equal = []

        def enter(stats):
            with worker.opt.global_parameters():
                equal.append(stats.rounds)

        worker.opt.register_round_hook(enter)
        for _ in range(5):
            one_step(worker)
        assert equal == [1]
        with pytest.raises(ValueError, match="in a round hook or after finish"):
            with worker.opt.global_parameters():
                raise AssertionError("workers are not equal")
        worker.opt.finish()
        with worker.opt.global_parameters():
            pass
        with pytest.raises(ValueError, match="used by one optimizer, got a second"):
            lowcomm.LocalSGD([scalar(0.0)], sync_every=2, group=worker.group)

    fleet.start("worker-0", work)
    fleet.join()


def test_anchors_may_be_looked_at_at_any_time(fleet):
    def look(worker):
        with worker.opt.global_parameters():
            pass

    for i in range(2):
        at = {5: look} if i else None
        fleet.start(f"worker-{i}", training("DiLoCo", at=at), start_with=2)
    check_equal(fleet.join())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min_workers": 0}, "min_workers must be"),
        ({"min_workers": 3, "start_with": 2}, "start_with must be"),
        ({"timeout_s": 0.0}, "timeout_s must be"),
        ({"max_failed_rounds": 0}, "max_failed_rounds must be"),
        ({"on_peer_loss": "ignore"}, "on_peer_loss must be 'continue' or 'raise'"),
        ({"lighthouse": "host"}, "lighthouse must be an address like"),
        ({"lighthouse": "host:port"}, "lighthouse must be an address like"),
    ],
)
def test_settings_out_of_range(fleet, settings, words):
    settings = {"lighthouse": "127.0.0.1:1"} | settings
    with pytest.raises(ValueError, match=words):
        ElasticGroup(settings.pop("lighthouse"), **settings)


# In processes


class Process:
    """A program, and what it says, line by line: JSON, or words."""

    def __init__(self, *arguments):
        self._process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, text=True
        )
        self.said = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        with self._process.stdout as lines:
            for line in lines:
                is_json = line.startswith("{")
                self.said.append(json.loads(line) if is_json else {"words": line})

    def await_word(self, name, value=None, since=0):
        """What it has said, since it had said so many lines, under this name."""
        found = []

        def is_said():
            found[:] = [said[name] for said in self.said[since:] if name in said]
            return value in found if value is not None else found

        wait_for(is_said, every_s=0.02, longest_s=60.0)
        return found[0]

    def await_rounds(self, number):
        """Returns when it has had so many more."""
        rounds = self.await_word("rounds", since=len(self.said))
        self.await_word("rounds", rounds + number)

    def kill(self):
        self._process.kill()
        self._process.wait()

    def end(self):
        return self._process.wait(60.0)


@pytest.mark.workers
@pytest.mark.timeout(240)  # most of it starts processes
def test_kills_of_processes_and_of_the_lighthouse(tmp_path):
    pytest.importorskip("torchft")
    address, end = f"127.0.0.1:{free_port()}", tmp_path / "end"

    def begin_lighthouse():
        command = ["-m", "lowcomm", "lighthouse", "--bind", address]
        return Process(*command, "--heartbeat-s", "1")

    def begin_worker(i):
        script = Path(__file__).with_name("elastic_process.py")
        return Process(str(script), address, f"worker-{i}", str(end))

    lighthouse, workers = begin_lighthouse(), [begin_worker(i) for i in range(3)]
    try:
        workers[2].await_rounds(2)
        workers[1].kill()
        workers[0].await_word("left", [1])
        workers[1] = begin_worker(1)
        assert workers[1].await_word("began_at") > 20
        workers[0].await_word("joined", [1])
        lighthouse.kill()
        workers[0].await_rounds(3)  # which need none
        lighthouse = begin_lighthouse()
        lighthouse.await_word("words")
        since = [len(worker.said) for worker in workers]
        workers[1].kill()
        for i in (0, 2):
            workers[i].await_word("left", [1], since=since[i])
        end.touch()
        assert [workers[i].end() for i in (0, 2)] == [0, 0]
        first, last = (workers[i].await_word("result") for i in (0, 2))
        assert first == last
    finally:
        for process in (lighthouse, *workers):
            process.kill()
