"""Who goes on with whom: what every worker decides by itself, from one sheet."""

import threading
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowcomm.sync import roll
from lowcomm.sync.roll import (
    Absences,
    Entry,
    Roll,
    latest,
    ranks_of,
    settle,
    settlement,
)

PATIENCE_S = 5.0
STORE = "host:1"
NAMES = [f"worker-{i}" for i in range(12)]


def entry(**said):
    return Entry("run", "token", STORE, patience_s=PATIENCE_S, **said)


def member(rank, among, epoch="1-a", **said):
    """Of those that are among each other."""
    said |= {"epoch": epoch, "generation": int(epoch.partition("-")[0])}
    return entry(rank=rank, among=dict.fromkeys(among, STORE), **said)


def members(*ranks, **said):
    among = [NAMES[rank] for rank in ranks]
    return {NAMES[rank]: member(rank, among, **said) for rank in ranks}


def said_by(sheet, name, **changes):
    return {**sheet, name: replace(sheet[name], **changes)}


def ready(sheet, *names):
    for name in names or sheet:
        sheet = said_by(sheet, name, ready=True)
    return sheet


@st.composite
def entries(draw):
    generation = draw(st.integers(0, 2))
    # Two settlements of one generation: workers that were cut off from each other.
    epoch = f"{generation}-{draw(st.sampled_from('ab'))}" if generation else ""
    least = draw(st.integers(1, 3))
    among = st.lists(st.sampled_from(NAMES[:7]), unique=True)
    return entry(
        rank=draw(st.integers(0, 4)) if generation else None,
        generation=generation,
        epoch=epoch,
        among=dict.fromkeys(draw(among), STORE) if generation else {},
        misses=draw(st.booleans()),
        ready=draw(st.booleans()),
        waited_s=draw(st.sampled_from([0.0, PATIENCE_S - 0.1, PATIENCE_S])),
        is_done=draw(st.booleans()),
        leaves=draw(st.integers(0, 3)) == 0,
        min_workers=least,
        start_with=least + draw(st.integers(0, 2)),
    )


sheets = st.dictionaries(st.sampled_from(NAMES[:6]), entries())
many = settings(max_examples=200)


def present(sheet):
    return {name: entry for name, entry in sheet.items() if not entry.leaves}


def of_latest(sheet):
    _, epoch = latest(present(sheet))
    return {n: entry for n, entry in present(sheet).items() if entry.epoch == epoch}


# settle


@many
@given(sheets)
def test_all_who_are_ready_and_nobody_else(sheet):
    names = settle(sheet)
    if names is not None:
        assert names == sorted(n for n, e in present(sheet).items() if e.ready)


@many
@given(sheets)
def test_never_fewer_than_each_of_them_wants(sheet):
    for name in (names := settle(sheet) or []):
        assert len(names) >= sheet[name].min_workers
        if latest(present(sheet))[0] == 0:
            assert len(names) >= sheet[name].start_with


@many
@given(sheets)
def test_whoever_comes_waits_for_those_that_are_there(sheet):
    names = settle(sheet)
    if names is not None:
        assert set(names) & of_latest(sheet).keys()


@many
@given(sheets)
def test_nobody_alive_is_left_out_before_patience_ends(sheet):
    names = settle(sheet)
    if names is None:
        return
    left_out = [
        n for n, e in of_latest(sheet).items() if n not in names and not e.is_done
    ]
    if left_out:
        assert any(
            entry.ready and entry.waited_s >= PATIENCE_S
            for entry in of_latest(sheet).values()
        )


@many
@given(sheets)
@pytest.mark.parametrize(
    "absent", [{"absent": STORE}, {NAMES[0]: "host:2"}], ids=["gone", "name taken"]
)
def test_an_absent_one_must_be_missed_first(absent, sheet):
    sheet = {
        name: replace(e, misses=False, waited_s=0.0, among=e.among | absent)
        for name, e in sheet.items()
    }
    assert settle(sheet) is None


@many
@given(sheets)
def test_whose_patience_has_ended_goes_on(sheet):
    """No wait without an end: not for who is silent, nor for who is not ready."""
    sheet = {n: replace(e, waited_s=PATIENCE_S) for n, e in sheet.items()}
    waiting = [n for n, e in present(sheet).items() if e.ready]
    if len(waiting) >= 5 and set(waiting) & of_latest(sheet).keys():
        assert settle(sheet) == sorted(waiting)


@many
@given(sheets, st.randoms())
def test_the_order_of_a_sheet_says_nothing(sheet, random):
    names = list(sheet)
    random.shuffle(names)
    shuffled = {name: sheet[name] for name in names}
    assert settle(shuffled) == settle(sheet)
    assert latest(shuffled) == latest(sheet)
    if together := settle(sheet):
        first = settlement(sheet, together, "1.5")
        assert settlement(shuffled, together, "1.5") == first


@many
@given(sheets)
def test_some_of_those_that_go_on_have_been_there(sheet):
    """From whom the others take what they have missed."""
    if together := settle(sheet):
        new = settlement(sheet, together, "1.5")
        went_on = [n for n in together if n in of_latest(sheet)]
        assert new.main == tuple(sorted(new.ranks[name] for name in went_on))
        assert new.main
        assert new.generation > max(e.generation for e in sheet.values())


def test_nobody_is_ready():
    assert settle({}) is None
    assert settle(members(0, 1)) is None


def test_the_first_ones_wait_until_enough_have_come():
    said = {"ready": True, "start_with": 3}
    sheet = {name: entry(**said) for name in NAMES[:2]}
    assert settle(sheet) is None
    assert settle({**sheet, NAMES[2]: entry(**said)}) == NAMES[:3]
    # One that is still loading its data is waited for, until patience ends.
    early = {name: entry(ready=True) for name in NAMES[:2]} | {NAMES[2]: entry()}
    assert settle(early) is None
    assert settle(said_by(early, NAMES[0], waited_s=PATIENCE_S)) == NAMES[:2]


def test_once_begun_fewer_go_on():
    sheet = ready(members(0, 1, start_with=3, min_workers=2))
    assert settle(sheet) == NAMES[:2]
    alone = ready(members(0, start_with=3, min_workers=2))
    assert settle(alone) is None


def test_who_comes_is_let_in_when_all_are_ready():
    sheet = ready(members(0, 1), NAMES[0]) | {NAMES[7]: entry(ready=True)}
    assert settle(sheet) is None
    assert settle(ready(sheet)) == [*NAMES[:2], NAMES[7]]
    impatient = said_by(sheet, NAMES[7], waited_s=PATIENCE_S, misses=True)
    assert settle(impatient) is None
    only_comers = {NAMES[7]: entry(ready=True, waited_s=PATIENCE_S)} | members(0)
    assert settle(only_comers) is None


def test_one_who_comes_back_waits_for_those_that_went_on():
    late = {NAMES[2]: member(2, NAMES[:3], ready=True, waited_s=PATIENCE_S)}
    sheet = members(0, 1, epoch="2-b") | late
    assert settle(sheet) is None
    assert settle(ready(sheet)) == NAMES[:3]


def test_who_is_done_is_not_waited_for():
    sheet = said_by(ready(members(0, 1, 2), *NAMES[:2]), NAMES[2], is_done=True)
    assert settle(sheet) == NAMES[:2]


def test_one_who_misses_somebody_is_enough():
    sheet = {n: e for n, e in ready(members(0, 1, 2)).items() if n != NAMES[2]}
    assert settle(sheet) is None
    assert settle(said_by(sheet, NAMES[1], misses=True)) == NAMES[:2]


def test_who_leaves_is_not_among_them():
    sheet = ready(members(0, 1, 2, epoch="1-a"))
    sheet = said_by(sheet, NAMES[2], leaves=True)
    sheet = said_by(sheet, NAMES[0], misses=True)
    assert settle(sheet) == NAMES[:2]


def test_when_the_last_one_leaves_those_that_wait_go_on_among_themselves():
    late = ready(members(1, 2, epoch="4-a", waited_s=PATIENCE_S))
    sheet = late | members(0, epoch="5-b", leaves=True)
    assert settle(sheet) == NAMES[1:3]
    new = settlement(sheet, settle(sheet), "1.5")
    assert (new.generation, new.main) == (6, (1, 2))


def test_of_two_settlements_of_one_generation_the_larger_goes_on():
    sheet = ready(members(0, 1, epoch="3-a") | members(2, epoch="3-b"))
    assert latest(sheet) == (3, "3-a")
    new = settlement(sheet, settle(sheet), "9.5")
    assert (new.generation, new.epoch, new.main) == (4, "4-9.5", (0, 1))
    # The one that is alone has nothing to say while the others train.
    sheet = ready(members(2, epoch="3-b")) | members(0, 1, epoch="3-a")
    assert settle(said_by(sheet, NAMES[2], waited_s=PATIENCE_S)) is None


def test_they_meet_at_the_first_of_them():
    stores = {NAMES[5]: "host:5", NAMES[1]: "host:1", NAMES[3]: "host:3"}
    sheet = {
        name: replace(entry(ready=True), store=store) for name, store in stores.items()
    }
    new = settlement(sheet, settle(sheet), "7.0")
    assert new.ranks == {NAMES[1]: 0, NAMES[3]: 1, NAMES[5]: 2}
    assert (new.store, new.main) == ("host:1", (0, 1, 2))


# ranks_of


@many
@given(sheets.filter(bool))
def test_numbers_are_different_and_kept(sheet):
    names = sorted(sheet)
    ranks = ranks_of(sheet, names)
    assert ranks.keys() == sheet.keys()
    assert len(set(ranks.values())) == len(names)
    had = [e.rank for e in sheet.values() if e.rank is not None]
    for name, e in sheet.items():
        if e.rank is not None and had.count(e.rank) == 1:
            assert ranks[name] == e.rank
        if e.rank is None:
            assert ranks[name] not in had
    given_anew = [ranks[name] for name in names if ranks[name] != sheet[name].rank]
    for rank in given_anew:  # the smallest ones that were free
        assert set(range(rank)) <= set(had) | set(given_anew)


@given(sheets.filter(bool))
def test_a_number_of_somebody_else_on_the_sheet_is_not_given_away(sheet):
    (first, *others) = sorted(sheet)
    taken = [sheet[name].rank for name in others]
    if sheet[first].rank is None:
        assert ranks_of(sheet, [first])[first] not in taken


def test_names_count_as_one_would_count_them():
    sheet = {f"worker-{i}": entry() for i in range(12)}
    assert ranks_of(sheet, sorted(sheet)) == {f"worker-{i}": i for i in range(12)}


def test_of_two_with_one_number_the_one_of_the_later_settlement_keeps_it():
    sheet = {
        NAMES[0]: member(1, NAMES[:1], epoch="2-a"),
        NAMES[1]: member(1, NAMES[:2], epoch="5-b"),
    }
    assert ranks_of(sheet, NAMES[:2]) == {NAMES[0]: 0, NAMES[1]: 1}


# Absences


def noted(*sheets):
    """What is said at each sheet: (seconds, whether somebody is lacking)."""
    absences = Absences()
    return [absences.note(1000.0 + s, lacks) for s, lacks in sheets]


def steady(until_s, lacks=False, start_s=0.0):
    times = range(int(start_s * 10), int(until_s * 10))
    return [(tenth / 10, lacks) for tenth in times]


def test_one_sheet_that_lacks_somebody_says_nothing():
    sheets = [(s, round(10 * s) % 4 == 0) for s, _ in steady(20)]
    assert not any(noted(*sheets))


def test_who_stays_away_is_gone():
    seen = steady(5)
    away = steady(7, True, start_s=5)
    result = noted(*seen, *away)[len(seen) :]
    began = next(s for (s, _), gone in zip(away, result, strict=True) if gone)
    assert began == pytest.approx(5 + roll._MISSING_S, abs=0.11)
    assert all(result[round(10 * roll._MISSING_S) + 1 :])
    # And back: from the first sheet on that has all.
    assert noted(*seen, *away, (7.1, False), (7.2, True))[-2:] == [False, False]


def test_the_first_sheets_after_an_outage_say_nothing():
    """All workers are away with the lighthouse; they come back one after another."""
    seen = steady(5)
    after = steady(30, True, start_s=5 + roll._OUTAGE_S + 0.1)
    result = noted(*seen, *after)[len(seen) :]
    began = next(s for (s, _), gone in zip(after, result, strict=True) if gone)
    assert began == pytest.approx(after[0][0] + roll._RETURN_S, abs=0.11)
    # A pause that is no outage costs nothing.
    short = [(5 + roll._OUTAGE_S - 0.2, True), (5 + roll._OUTAGE_S + 0.3, True)]
    assert noted(*seen, *short)[-1]


# Roll


class Lighthouse:
    """Answers each who asks with a sheet of all who have asked; or with an error."""

    def __init__(self):
        self.said = {}
        self.beats = []
        self.others = []
        self.is_away = False
        self.refused = 0

    def heartbeat(self, name, timeout):
        self.answer()
        self.beats.append(name)

    def quorum(self, name, timeout, data):
        self.answer()
        self.said[name] = data
        mine = SimpleNamespace(replica_id=name, data=data)
        created = SimpleNamespace(seconds=len(self.beats), nanos=5)
        return SimpleNamespace(participants=[mine, *self.others], created=created)

    def answer(self):
        if self.is_away:
            self.refused += 1
            raise RuntimeError("connection refused, details: and more")


@pytest.fixture
def lighthouse(monkeypatch):
    light = Lighthouse()
    monkeypatch.setattr(roll, "client_class", lambda: lambda address, timeout: light)
    monkeypatch.setattr(roll, "_ASK_S", 0.005)
    monkeypatch.setattr(roll, "_BEAT_S", 0.005)
    return light


@pytest.fixture
def called(lighthouse):
    """A roll, the sheets that it has passed on, and a wait for what they say."""
    sheets, news = [], threading.Condition()

    def on_sheet(sheet, key):
        with news:
            sheets.append((sheet, key))
            news.notify_all()

    mine = Roll("host:1", "me", entry(), on_sheet)
    mine.start()

    def await_sheet(holds):
        with news:
            seen = len(sheets)
            assert news.wait_for(
                lambda: any(holds(sheet) for sheet, _ in sheets[seen:]), 10
            )

    yield mine, sheets, await_sheet
    mine.close()


def test_what_is_said_is_on_the_next_sheets(called, lighthouse):
    mine, sheets, await_sheet = called
    await_sheet(lambda sheet: sheet["me"] == entry())
    mine.say(ready=True, epoch="4-x")
    await_sheet(lambda sheet: sheet["me"].ready and sheet["me"].epoch == "4-x")
    await_sheet(lambda sheet: sheet["me"].waited_s > 0.02)
    mine.say(ready=True)  # again, which begins no new wait
    waited_s = sheets[-1][0]["me"].waited_s
    seen = len(sheets)
    await_sheet(lambda sheet: True)
    assert all(sheet["me"].waited_s >= waited_s for sheet, _ in sheets[seen:])
    mine.say(ready=False)
    await_sheet(lambda sheet: sheet["me"].waited_s == 0)
    assert sheets[0][1].endswith(".000000005")
    assert lighthouse.beats


def test_who_speaks_of_something_else_is_not_on_a_sheet(called, lighthouse):
    _, _, await_sheet = called
    lighthouse.others = [
        SimpleNamespace(replica_id="other", data={"step": 5}),
        SimpleNamespace(replica_id="none", data=None),
        SimpleNamespace(replica_id="like", data=asdict(entry(rank=3))),
    ]
    await_sheet(lambda sheet: sheet.keys() == {"me", "like"} and sheet["like"].rank)


def test_a_lighthouse_that_is_away_is_asked_until_it_is_back(
    called, lighthouse, caplog
):
    mine, _, await_sheet = called
    await_sheet(lambda sheet: "me" in sheet)
    lighthouse.is_away = True
    for _ in range(1000):
        if lighthouse.refused > 10:
            break
        threading.Event().wait(0.01)
    lighthouse.is_away = False
    await_sheet(lambda sheet: "me" in sheet)
    words = [record.getMessage() for record in caplog.records]
    assert words.count("no answer of the lighthouse host:1: connection refused") == 1
    assert words.count("the lighthouse host:1 answers again") == 1
    mine.close()
    for thread in threading.enumerate():
        if thread.name == "lowcomm roll":
            thread.join(10)
            assert not thread.is_alive()
