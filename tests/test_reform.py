"""What becomes of rounds under way: every way in which workers can be cut off.

A model of what workers do in rounds says which combinations there can be. A round goes
launched, prepared (all of the result is here), landed; a worker prepares when all of
the members have launched, and lands when all have prepared.
"""

import itertools
import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowcomm.sync.errors import PeerMismatch
from lowcomm.sync.reform import Council, Facts, Place, UnderWay

STREAM = "parameters"
BEFORE = ((3, "1-a"), (4, "1-a"))  # rounds that all have had, and among whom


class Launched(NamedTuple):
    """A round of a worker that has not landed."""

    epoch: str
    members: tuple[int, ...]
    prepared: bool = False


@dataclass
class Worker:
    """What a worker has had, as (round, among whom it was)."""

    had: tuple[tuple[int, str], ...] = BEFORE
    under_way: Launched | None = None
    fresh: bool = False

    @property
    def round(self):
        return 0 if self.fresh else self.had[-1][0] + 1

    def facts(self):
        way = self.under_way
        if way is not None:
            way = UnderWay(way.epoch, way.members, 10 * self.round, way.prepared)
        landed_in = "" if self.fresh else self.had[-1][1]
        place = Place(self.round, landed_in, way)
        facts = Facts(self.fresh, 10 * self.round, 10 * self.round, {STREAM: place})
        return Facts.unpack(json.loads(json.dumps(facts.pack())))


def council_of(workers, main):
    return Council({rank: w.facts() for rank, w in workers.items()}, main)


def settle(workers, main):
    """What each worker does after a council; the rounds that are under way then."""
    council = council_of(workers, main)
    donors = council.donors()
    for rank, worker in workers.items():
        if worker.fresh:
            continue
        if council.is_used(rank, STREAM):
            worker.had += ((worker.round, worker.under_way.epoch),)
            worker.under_way = None
        elif worker.under_way is not None:
            # What is exchanged again is among nobody until it is sent.
            again = None if rank in council.behind else Launched("", tuple(workers))
            worker.under_way = again
    for taker, donor in donors.items():
        assert donor not in donors, "a donor lacks something itself"
        had = workers[donor].had
        workers[taker] = Worker(had=had)
    if (clock := council.sent_again(STREAM)) is not None:
        assert clock == 10 * next(w.round for w in workers.values())
    return council


# Three workers, all combinations

#: How far a worker has come: in the round, and in the one behind it.
STAGES = [
    (5, "not launched"),
    (5, "launched"),
    (5, "prepared"),
    (6, "not launched"),  # has landed
    (6, "launched"),
    (6, "prepared"),
    (7, "not launched"),
]


def is_possible(stages):
    """A worker prepares when all have launched, and lands when all have prepared."""
    return max(stages) - min(stages) <= 2 and all(
        (mine not in (2, 5) or other >= mine - 1)  # prepared
        and (mine not in (3, 4) or other >= 2)  # landed
        and (mine != 6 or other >= 5)
        for mine, other in itertools.product(stages, repeat=2)
    )


def worker_at(stage, epoch="2-b", members=(0, 1, 2)):
    round, what = STAGES[stage]
    had = BEFORE + tuple((r, epoch) for r in range(5, round))
    if what == "not launched":
        return Worker(had)
    return Worker(had, Launched(epoch, members, what == "prepared"))


COMBINATIONS = [
    stages
    for stages in itertools.product(range(len(STAGES)), repeat=3)
    if is_possible(stages)
]
SURVIVORS = [ranks for n in (1, 2, 3) for ranks in itertools.combinations(range(3), n)]


def test_the_model_has_the_combinations_that_matter():
    assert (3, 2, 2) in COMBINATIONS  # one has landed what all hold
    assert (3, 2, 1) not in COMBINATIONS
    assert (2, 1, 1) in COMBINATIONS  # one holds what the others do not
    assert (2, 1, 0) not in COMBINATIONS
    assert (4, 2, 3) in COMBINATIONS
    assert len(COMBINATIONS) > 40


@pytest.mark.parametrize("survivors", SURVIVORS, ids=str)
def test_a_round_is_used_by_all_that_are_left_or_by_none(survivors):
    for stages in COMBINATIONS:
        everybody = {rank: worker_at(stage) for rank, stage in enumerate(stages)}
        dead = [w for rank, w in everybody.items() if rank not in survivors]
        left = {rank: everybody[rank] for rank in survivors}
        council = settle(left, survivors)
        (had,) = {worker.had for worker in left.values()}
        for worker in dead:  # what one that is gone has used is used by all
            assert had[: len(worker.had)] == worker.had, stages
        assert not council.behind, stages
        assert not council.donors()


@pytest.mark.parametrize("survivors", SURVIVORS, ids=str)
def test_what_all_that_are_left_hold_is_not_thrown_away(survivors):
    left = {rank: worker_at(2) for rank in survivors}
    settle(left, survivors)
    assert all(worker.had[-1] == (5, "2-b") for worker in left.values())
    for rank in survivors:
        left = {other: worker_at(1 + (other != rank)) for other in survivors}
        settle(left, survivors)
        assert all(worker.had == BEFORE for worker in left.values())
        assert all(worker.under_way is not None for worker in left.values())


@pytest.mark.parametrize("takers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("survivors", SURVIVORS, ids=str)
def test_who_comes_gets_all_of_it_from_donors_in_turn(survivors, takers):
    for stages in COMBINATIONS:
        left = {rank: worker_at(stages[rank]) for rank in survivors}
        left |= {10 + i: Worker(fresh=True) for i in range(takers)}
        council = settle(left, survivors)
        assert council.fresh == [10 + i for i in range(takers)]
        assert len({worker.had for worker in left.values()}) == 1, stages
        gives = Counter(council.donors().values())
        assert gives.keys() <= set(survivors)
        assert max(gives.values()) - min(gives[rank] for rank in survivors) <= 1


@pytest.mark.parametrize("late", range(3))
def test_one_who_was_away_takes_what_it_has_missed_and_nothing_else(late):
    """The others were settled without it, and have gone on or not."""
    others = tuple(rank for rank in range(3) if rank != late)
    for stages in COMBINATIONS:
        for rounds_without in range(3):
            left = {rank: worker_at(stages[rank]) for rank in others}
            settle(left, others)
            for worker in left.values() if rounds_without else ():
                worker.under_way = None
                rounds = range(worker.round, worker.round + rounds_without)
                worker.had += tuple((r, "3-c") for r in rounds)
            had = left[others[0]].had
            left[late] = worker_at(stages[late])
            own = left[late].had
            council = settle(left, others)
            assert {worker.had for worker in left.values()} == {had}, stages
            # Own progress is counted once: what holds its share is landed, not taken.
            if rounds_without == 0 and len(had) - len(own) <= 1:
                is_held = had == own or STAGES[stages[late]][1] == "prepared"
                assert council.behind == ([] if is_held else [late]), stages


def test_one_that_has_had_other_rounds_takes_those_of_the_rest():
    """As many, but among others: who was cut off went on alone."""
    cut_off = Worker((*BEFORE, (5, "2-x")))
    left = {0: worker_at(3), 1: worker_at(3), 2: cut_off}
    assert settle(left, (0, 1)).behind == [2]
    assert left[2].had == (*BEFORE, (5, "2-b"))


def test_a_result_of_another_exchange_of_the_round_is_not_the_same():
    """The others were settled without it, and have prepared the round again."""
    late = worker_at(2)
    left = {0: worker_at(2, "3-c", (0, 1)), 1: worker_at(2, "3-c", (0, 1)), 2: late}
    used = [council_of(left, (0, 1)).is_used(rank, STREAM) for rank in left]
    assert used == [True, True, False]
    assert settle(left, (0, 1)).behind == [2]
    assert {worker.had[-1] for worker in left.values()} == {(5, "3-c")}


def test_the_run_begins():
    workers = {rank: Worker(fresh=True) for rank in range(3)}
    council = council_of(workers, (0, 1, 2))
    assert (council.old, council.donors(), council.behind) == ({}, {}, [])
    assert council.sent_again(STREAM) is None


def test_a_first_meeting_that_failed_for_some_is_made_up_for():
    """One has begun already, the others have not: they take from it."""
    workers = {0: Worker(fresh=True), 1: worker_at(0), 2: Worker(fresh=True)}
    assert council_of(workers, (0, 1, 2)).donors() == {0: 1, 2: 1}


def test_most_steps_of_anybody():
    workers = {0: worker_at(0), 1: worker_at(6), 2: Worker(fresh=True)}
    assert council_of(workers, (0, 1)).steps == 70


def test_streams_are_judged_one_by_one():
    """Of two fragments one was prepared by all, the other not."""

    def facts(*prepared, members=(0, 1)):
        ways = [UnderWay("2-b", members, 10 + i, p) for i, p in enumerate(prepared)]
        places = {f"fragment {i}": Place(5, "1-a", w) for i, w in enumerate(ways)}
        return Facts(False, 50, 50, places)

    council = Council({0: facts(True, True), 1: facts(True, False)}, (0, 1))
    assert [council.is_used(0, f"fragment {i}") for i in (0, 1)] == [True, False]
    assert [council.sent_again(f"fragment {i}") for i in (0, 1)] == [None, 11]
    # And who lacks a round of one is behind, though it has the other.
    both = facts(True, True, members=(1, 2))
    first, second = (Place(round, "2-b", None) for round in (5, 6))
    late = replace(both, places={"fragment 0": first, "fragment 1": second})
    assert Council({0: late, 1: both, 2: both}, (1, 2)).behind == [0]
    late = replace(both, places={"fragment 0": second, "fragment 1": second})
    assert Council({0: late, 1: both, 2: both}, (1, 2)).behind == []


def test_a_pair_that_went_on_with_others_still_has_its_round():
    """One of a pair lands, and has another round with a third before the other lands.

    The other, which is slower, holds the result of their round too.
    """

    def place(round, landed_in="2-b", under_way=None):
        return Facts(False, 0, 0, {STREAM: Place(round, landed_in, under_way)})

    slow = place(5, "1-a", UnderWay("2-b", (0, 1), 50, True))
    council = Council({0: place(7), 1: slow, 2: place(7)}, (0, 1, 2))
    assert council.is_used(1, STREAM)
    other = place(5, "1-a", UnderWay("1-a", (0, 1), 50, True))
    assert not Council({0: place(7), 1: other, 2: place(7)}, (0, 1)).is_used(1, STREAM)


def test_when_all_that_had_the_last_rounds_are_gone_the_latest_one_gives():
    """A newcomer was let in, and its donor died before it had given anything."""
    workers = {0: worker_at(0), 1: worker_at(3), 7: Worker(fresh=True)}
    council = settle(workers, (7,))
    assert council.donors() == {0: 1, 7: 1}


def test_nobody_has_had_all_rounds():
    def facts(*rounds):
        places = {f"fragment {i}": Place(r, "", None) for i, r in enumerate(rounds)}
        return Facts(False, 0, 0, places)

    with pytest.raises(PeerMismatch, match=r"all of them among \[0, 1\].*checkpoint"):
        Council({0: facts(5, 6), 1: facts(6, 5)}, (0, 1))


# Any history


class Run:
    """Workers that take rounds, die, are away and come back, in any order."""

    def __init__(self, num_workers):
        self.alive = {rank: Worker() for rank in range(num_workers)}
        self.away = {}  # alive, but not among the others
        self.generation = 1
        self.settle()

    def settle(self):
        """All that are there; who is away comes back with the next settlement."""
        main = tuple(
            r for r, w in self.alive.items() if not w.fresh and r not in self.away
        )
        settle(self.alive, main)
        self.generation += 1
        self.members = tuple(sorted(self.alive))
        self.everybody = dict(self.alive)  # with those that die from here on
        self.away.clear()
        assert len({worker.had for worker in self.alive.values()}) == 1

    def launch(self, rank):
        worker = self.alive[rank]
        epoch = f"{self.generation}-x"
        if worker.under_way is None or not worker.under_way.epoch:
            worker.under_way = Launched(epoch, self.members)

    def prepare(self, rank):
        worker = self.alive[rank]
        if worker.under_way is None or not worker.under_way.epoch:
            return
        if all(
            other.round > worker.round
            or (other.round == worker.round and other.under_way is not None)
            and other.under_way.epoch == worker.under_way.epoch
            for other in self.everybody.values()
        ):
            worker.under_way = worker.under_way._replace(prepared=True)

    def land(self, rank):
        worker = self.alive[rank]
        if worker.under_way is None or not worker.under_way.prepared:
            return
        if all(
            other.round > worker.round
            or (other.under_way is not None and other.under_way.prepared)
            for other in self.everybody.values()
        ):
            worker.had += ((worker.round, worker.under_way.epoch),)
            worker.under_way = None

    def die(self, rank):
        if len(self.alive) > 1:
            del self.alive[rank]

    def come(self, rank):
        if rank not in self.alive:
            self.alive[rank] = Worker(fresh=True)
            self.everybody.pop(rank, None)

    def leave_behind(self, rank):
        """Settles the others without one that is silent."""
        others = {r: w for r, w in self.alive.items() if r != rank and not w.fresh}
        if not others or rank not in self.members or self.alive[rank].fresh:
            return
        silent = self.alive.pop(rank)
        joining = {r: self.alive.pop(r) for r in list(self.alive) if r not in others}
        self.settle()
        self.alive |= {rank: silent} | joining
        self.away[rank] = silent


@settings(max_examples=150)
@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(
            st.sampled_from(
                ["launch", "prepare", "land"] * 3
                + ["die", "come", "settle", "leave_behind"]
            ),
            st.integers(0, 5),
        ),
        max_size=40,
    ),
)
def test_workers_have_had_the_same_rounds_whatever_happened(num_workers, events):
    run = Run(num_workers)
    for what, rank in events:
        landed = {r: w.had for r, w in run.alive.items() if not w.fresh}
        if what == "settle":
            run.settle()
        elif what == "come":
            run.come(rank)
        elif rank in run.alive:
            joined = rank in run.everybody and rank not in run.away
            if joined or what in ("die", "leave_behind"):
                getattr(run, what)(rank)
        for r, had in landed.items():  # what was used stays, with those in the main
            if r in run.alive and r not in run.away and not run.alive[r].fresh:
                assert run.alive[r].had[: len(had)] == had
    if not all(worker.fresh for worker in run.alive.values()):
        run.settle()
