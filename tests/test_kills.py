"""The short version of `benchmarks/kills.py`: kills at any moment cost no bit."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def kills(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("kills")


@pytest.mark.workers
def test_a_run_that_is_killed_at_any_moment_ends_with_the_bits_of_one_that_is_not(
    kills, tmp_path
):
    """Three kills in a row, two resumes to the end from what each has left."""
    outcomes = kills.kill_and_resume(tmp_path, num_kills=3, num_steps=110, seed=1)
    assert [outcome.differences for outcome in outcomes] == [[[], []]] * 3
    assert any(outcome.in_a_save for outcome in outcomes)
    assert any(outcome.shares for outcome in outcomes), "rounds must be under way"
    # What came after the last whole checkpoint is lost. While one was being written,
    # others may have come to wait for it.
    for outcome in outcomes:
        assert 0 <= outcome.lost < 4 * kills.SAVE_EVERY


def test_the_schedule_of_kills_is_seeded_and_half_of_it_waits_for_a_save(kills):
    schedule = kills.schedule(20, 400, seed=0)
    assert schedule == kills.schedule(20, 400, seed=0) != kills.schedule(20, 400, 1)
    assert sum(kill.in_a_save for kill in schedule) == 10
