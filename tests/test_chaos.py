"""A run under faults ends as it must; and what is said of a bad one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytest.importorskip("torchft")
sys.path.insert(0, str(ROOT / "recipes"))
chaos = pytest.importorskip("chaos")


@pytest.mark.workers
@pytest.mark.timeout(400)
def test_a_run_under_four_faults(tmp_path):
    command = [sys.executable, "recipes/chaos.py", "--method", "streaming"]
    command += ["--faults", "4", "--no-reference", "--out", str(tmp_path)]
    command += ["--kinds", "kill", "short stop", "join and leave", "lighthouse"]
    command += ["--cache", str(ROOT / "out" / "cache")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    run = json.loads((tmp_path / "streaming-0.json").read_text())["disturbed"]
    assert len(run["faults"]) == 4
    assert run["equal at the end"] and run["ended"] == 4
    assert run["rounds compared"] > 20


def worker(**events):
    """A worker that has told this."""

    class Process:
        returncode = events.pop("code", 0)

    told = [{"event": kind, "at": 0.0, **facts} for kind, facts in events.items()]
    return chaos.Worker("w", 0, Process(), told, killed=events.pop("killed", False))


def test_a_round_that_two_workers_have_otherwise_is_half_applied():
    end = {"loss": 1.0, "print": 7}
    one = worker(round={"applied": {"parameters": [3, 11]}}, end=end)
    two = worker(round={"applied": {"parameters": [3, 12]}}, end=end)
    assert chaos.judge([one, two])["rounds half applied"] == [["parameters", 3]]
    assert chaos.judge([one, one])["rounds half applied"] == []


def report(**changes):
    good = {
        "lost": [],
        "equal at the end": True,
        "rounds half applied": [],
        "faults": [{"go_on_s": 2.0}],
        "loss": 3.0,
    }
    return {**good, **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lost": ["worker-2"]}, "nobody killed"),
        ({"equal at the end": False}, "differ"),
        ({"rounds half applied": [["parameters", 3]]}, "half applied"),
        ({"faults": [{"go_on_s": 9.5}]}, "without a round for more than 9 s"),
        ({"loss": 3.1}, "3.3% above"),
    ],
)
def test_what_must_not_be_is_named(changes, words):
    assert chaos.verdict(report(), report(), limit_s=9.0) == []
    (problem,) = chaos.verdict(report(**changes), report(), limit_s=9.0)
    assert words in problem


def test_every_kind_of_fault_comes_before_one_comes_twice():
    options = chaos.Options(faults=8)
    kinds = ["a", "b", "c", "d"]
    chosen = chaos.choose(options, kinds)
    assert sorted(chosen[:4]) == sorted(chosen[4:]) == kinds
    assert chosen == chaos.choose(options, kinds)
