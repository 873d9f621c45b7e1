"""What the recipes log: numbers of all workers, Weights & Biases, TensorBoard.

The packages are tested by stand-ins, and by themselves where they are installed.
"""

import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"

#: As much of `wandb` as is called. It writes each call to a file, and has an account
#: and a network if it is told so.
STAND_IN = """
import json, os

class Error(Exception):
    pass

def tell(call, **facts):
    with open(os.environ["CALLS"], "a") as file:
        print(json.dumps({"call": call, **facts}, default=str), file=file)

def login(*, prompt, verify):
    assert prompt is False and verify is False
    return "ACCOUNT" in os.environ

class Run:
    def __init__(self, step):
        self.step = step

    def define_metric(self, name, **settings):
        tell("define_metric", name=name, **settings)

    def log(self, metrics, step):
        tell("log", step=step, metrics=metrics)

    def finish(self, exit_code):
        tell("finish", exit_code=exit_code)

def init(*, mode, **about):
    tell("init", mode=mode, **about)
    if mode == "online" and "NETWORK" not in os.environ:
        raise Error("no such host")
    return Run(int(os.environ.get("STEPS_THERE", 0)) if mode == "online" else 0)
"""

#: pretrain.py, whose workers end without a word when they have logged step 30.
CRASHES = """
import os, sys, time
sys.path.insert(0, os.environ["RECIPES"])
import pretrain

class Crashing(pretrain.Report):
    def line(self, step, *rest):
        super().line(step, *rest)
        if step == 30:
            while not os.path.exists("out/checkpoints/step-00000020"):
                time.sleep(0.01)
            os._exit(1)

pretrain.Report = Crashing
pretrain.main()
"""


@pytest.fixture
def recipe(monkeypatch):
    """Imports a recipe's file as its neighbours do."""
    monkeypatch.syspath_prepend(RECIPES)
    return importlib.import_module


def write_stand_in(folder):
    folder.mkdir()
    (folder / "wandb.py").write_text(STAND_IN, encoding="utf-8")
    return folder


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """Puts the stand-in in the place of `wandb`; returns the calls, when asked."""
    monkeypatch.syspath_prepend(write_stand_in(tmp_path / "packages"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    yield lambda *kinds: calls_in(tmp_path / "calls", *kinds)
    sys.modules.pop("wandb", None)


def calls_in(file, *kinds):
    calls = [json.loads(line) for line in file.read_text().splitlines()]
    return [call for call in calls if call["call"] in kinds]


def launch(recipe, **settings):
    runs = recipe("runs")
    return runs.Launch(**{**vars(runs.smoke()), **settings})


# -------------------------------------------------------------------------------------
# Numbers of all workers


def stats_of(*streams):
    """Of vectors (share, mean), one pair for each stream."""
    compared = {}
    for i, (share, mean) in enumerate(streams):
        share, mean = (torch.tensor(v, dtype=torch.float64) for v in (share, mean))
        compared[str(i)] = SimpleNamespace(
            share_norm=share.norm().item(),
            mean_norm=mean.norm().item(),
            cosine=torch.cosine_similarity(share, mean, dim=0).item(),
        )
    return SimpleNamespace(streams=compared)


def test_what_three_workers_disagree_in(recipe):
    report = recipe("report")
    losses = (2.0, 2.2, 1.9)
    shares = ([1.0, 0.0], [0.8, 0.6], [0.0, 2.0])
    mean = [0.6, 2.6 / 3]
    sums = 0
    for loss, share in zip(losses, shares, strict=True):
        likeness = report.likeness(stats_of((share, mean)))
        sums += report.terms_of({"loss": loss, "utilization": 0.5, **likeness})
    metrics = report.over_workers(sums, workers=3)
    # Squares of the lengths are 1, 1, 4; of the mean's, 0.36 + 0.7511 = 1.1111. Their
    # distances from it have the mean square 2 - 1.1111.
    assert metrics == {
        "loss": pytest.approx(6.1 / 3),
        "loss_std": pytest.approx(0.124721913),
        "utilization": 0.5,
        "delta_norm": pytest.approx(math.sqrt(2)),
        "delta_mean_norm": pytest.approx(math.sqrt(1.1111111)),
        "delta_cosine": pytest.approx(0.780028490),
        "spread": pytest.approx(math.sqrt(0.8888889)),
    }
    assert (metrics["delta_mean_norm"] / metrics["delta_norm"]) ** 2 == pytest.approx(
        0.555555556
    )


def test_streams_are_compared_as_one(recipe):
    likeness = recipe("report").likeness
    share, mean = [1.0, 2.0, -1.0], [0.5, 1.0, 3.0]
    whole = likeness(stats_of((share, mean)))
    parts = likeness(stats_of((share[:1], mean[:1]), (share[1:], mean[1:])))
    assert parts == pytest.approx(whole)
    zero = likeness(stats_of(([0.0], [0.0])))
    assert zero == {"delta_norm": 0.0, "delta_mean_norm": 0.0, "delta_cosine": 0.0}


def test_workers_that_have_compared_nothing_are_left_out(recipe):
    report = recipe("report")
    nothing = report.likeness(SimpleNamespace(streams={}))
    assert set(nothing.values()) == {None}
    of_two = [
        report.terms_of({"loss": 1.0, "utilization": 1.0, **likeness})
        for likeness in (nothing, report.likeness(stats_of(([3.0], [2.0]))))
    ]
    assert report.over_workers(of_two[0] * 2, workers=2)["spread"] is None
    metrics = report.over_workers(sum(of_two), workers=2)
    assert (metrics["loss"], metrics["delta_norm"]) == (1.0, 3.0)


def test_a_loss_that_is_no_number_is_shown(recipe):
    report = recipe("report")
    nothing = report.likeness(SimpleNamespace(streams={}))
    sums = report.terms_of({"loss": math.nan, "utilization": 1.0, **nothing})
    metrics = report.over_workers(sums, workers=1)
    assert math.isnan(metrics["loss"]) and math.isnan(metrics["loss_std"])


# -------------------------------------------------------------------------------------
# Weights & Biases, TensorBoard


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wandb": "offline"}, "wandb must be off .*, got offline.*pip install wandb"),
        ({"tensorboard": True}, "tensorboard must be off .*pip install tensorboard"),
    ],
)
def test_a_package_that_is_missing_is_named(recipe, monkeypatch, settings, message):
    for module in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=message):
        launch(recipe, **settings)


def test_a_directory_is_no_package(recipe, tmp_path, monkeypatch):
    (tmp_path / "no_package").mkdir()  # as the one that wandb writes to
    monkeypatch.syspath_prepend(tmp_path)
    assert not recipe("extras").is_installed("no_package")
    assert recipe("extras").is_installed("torch")


def test_workers_runs_need_wandb(recipe):
    with pytest.raises(ValueError, match=r"must be offline or online.*Give --wandb"):
        launch(recipe, wandb_per_worker=True)


def open_trackers(recipe, tmp_path, rank=0, before=(), **settings):
    config = launch(recipe, **settings)
    return recipe("trackers").open_trackers(
        config, tmp_path, {"a": 1}, rank=rank, start=10, run_id="id", before=before
    )


def test_one_run_is_of_worker_0(recipe, tmp_path, wandb):
    assert open_trackers(recipe, tmp_path) == []
    assert open_trackers(recipe, tmp_path, rank=1, wandb="offline") == []
    (tracker,) = open_trackers(recipe, tmp_path, wandb="offline")
    tracker.log(15, {"step": 15, "loss": 1.5, "val_loss": None})
    tracker.close(failed=True)
    (init,) = wandb("init")
    assert (init["mode"], init["project"], init["id"]) == ("offline", "lowcomm", "id")
    assert init["config"] == {"a": 1}
    assert {call["name"]: call.get("step_metric") for call in wandb("define_metric")}[
        "*"
    ] == "step"
    (log,) = wandb("log")
    assert (log["step"], log["metrics"]) == (15, {"step": 15, "loss": 1.5})
    assert wandb("finish") == [{"call": "finish", "exit_code": 1}]


def test_runs_of_workers_are_a_group(recipe, tmp_path, wandb):
    for rank in range(3):
        settings = {"wandb": "offline", "wandb_per_worker": True}
        open_trackers(recipe, tmp_path, rank=rank, **settings)
    inits = wandb("init")
    assert [init["id"] for init in inits] == ["id-0", "id-1", "id-2"]
    assert {init["group"] for init in inits} == {"id"}
    assert [init["config"]["rank"] for init in inits] == [0, 1, 2]


@pytest.mark.parametrize(
    ("environment", "modes", "said"),
    [
        ((), ["offline"], "nobody is logged in"),
        (("ACCOUNT",), ["online", "offline"], "no such host"),
        (("ACCOUNT", "NETWORK"), ["online"], None),
    ],
)
def test_a_run_that_cannot_be_sent_is_kept(
    recipe, tmp_path, wandb, monkeypatch, capsys, environment, modes, said
):
    for name in environment:
        monkeypatch.setenv(name, "yes")
    open_trackers(recipe, tmp_path, wandb="online")
    assert [init["mode"] for init in wandb("init")] == modes
    output = capsys.readouterr().out
    assert (f"wandb is offline: {said}" in output) if said else output == ""
    assert output.count("\n") == (said is not None)


def test_a_run_is_told_what_it_has_not_got(recipe, tmp_path, wandb, monkeypatch):
    for name in ("ACCOUNT", "NETWORK"):
        monkeypatch.setenv(name, "yes")
    monkeypatch.setenv("STEPS_THERE", "8")  # it has 0 to 7
    before = [{"step": 5, "loss": 3.0}, {"step": 10, "loss": 2.0}]
    (tracker,) = open_trackers(recipe, tmp_path, wandb="online", before=before)
    tracker.log(15, {"step": 15, "loss": 1.0})
    assert [call["step"] for call in wandb("log")] == [10, 15]


def test_scalars_of_a_run_that_broke_off_are_hidden(recipe, tmp_path):
    pytest.importorskip("tensorboard")
    for losses in ({10: 3.0, 15: 2.0}, {15: 1.0}):
        (tracker,) = open_trackers(recipe, tmp_path, tensorboard=True)  # from step 10
        for step, loss in losses.items():
            tracker.log(step, {"step": step, "loss": loss, "val_loss": None})
        tracker.close(failed=False)
    reader = importlib.import_module(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert reader.Tags()["scalars"] == ["loss"]
    read = [(event.step, event.value) for event in reader.Scalars("loss")]
    assert read == [(10, 3.0), (15, 1.0)]


# -------------------------------------------------------------------------------------
# A whole run


def torchrun(place, script, *flags, packages):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    return subprocess.run(
        [sys.executable, *launcher, str(script), "smoke", *flags],
        cwd=place,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, packages)]),
            "OMP_NUM_THREADS": "1",
            "RECIPES": str(RECIPES),
            "CALLS": str(place / "calls"),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def metrics_of(folder):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.workers
@pytest.mark.timeout(300)  # two starts of four
@pytest.mark.parametrize("package", ["stand-in", "wandb"])
def test_a_run_that_crashed_goes_on_as_the_same_run(tmp_path, package):
    """Four workers crash at step 30 and go on from step 20."""
    packages = []
    if package == "wandb":
        pytest.importorskip("wandb")
    else:
        packages.append(write_stand_in(tmp_path / "packages"))
    crashes = tmp_path / "crashes.py"
    crashes.write_text(CRASHES, encoding="utf-8")
    texts = [" ".join(["ba", "do", "ke", "li"][i % 4 :] * 40) for i in range(100)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "words.jsonl").write_text(lines, encoding="utf-8")
    flags = ("--data", "words.jsonl", "--out", "out", "--save-every", "20")
    flags += ("--batch-size", "2", "--wandb", "offline", "--num-steps", "50")

    broke = torchrun(tmp_path, crashes, *flags, packages=packages)
    assert broke.returncode != 0
    before = metrics_of(tmp_path / "out")
    assert [line["step"] for line in before] == [*range(5, 35, 5)], broke.stdout
    script = RECIPES / "pretrain.py"
    resumed = torchrun(tmp_path, script, *flags, "--resume", packages=packages)
    assert resumed.returncode == 0, resumed.stdout

    after = metrics_of(tmp_path / "out")
    assert [line["step"] for line in after] == [*range(5, 55, 5)]
    assert [line["loss"] for line in after[:6]] == [line["loss"] for line in before]
    for line in after:
        assert line["workers"] == 4
        assert line["loss_std"] > 0 and 0 <= line["utilization"] <= 1
        compared = {line[k] is None for k in ("delta_norm", "delta_cosine", "spread")}
        assert compared == {line["step"] < 10}  # of the first round there is nothing
    if package == "wandb":
        folders = [path.name for path in tmp_path.glob("out/wandb/offline-run-*")]
        assert len(folders) == 2
        assert len({re.fullmatch(r".*-(\w{8})", name)[1] for name in folders}) == 1
        return
    first, second = calls_in(tmp_path / "calls", "init")  # one worker, at each start
    assert first["id"] == second["id"]
    assert second["resume"] == "allow"
    steps = [call["step"] for call in calls_in(tmp_path / "calls", "log")]
    assert steps == [*range(5, 35, 5), *range(5, 55, 5)]  # offline it is told all again
    (finish,) = calls_in(tmp_path / "calls", "finish")
    assert finish["exit_code"] == 0
