"""The comparison: trials and their files, groups shortened to a few steps, pages."""

import dataclasses
import importlib
import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.fixture
def recipe(monkeypatch):
    """Imports a recipe's file as its neighbours do."""
    monkeypatch.syspath_prepend(ROOT / "recipes")
    return importlib.import_module


@pytest.fixture
def corpus(recipe):
    """A walk through tokens, of which each has one successor."""
    tokens = np.random.default_rng(0).permutation(300).astype(np.uint16)
    return recipe("data").Corpus("walk", np.tile(tokens, 40), np.tile(tokens, 3))


@pytest.fixture
def config(recipe):
    return dataclasses.replace(
        recipe("runs").compare(),
        workers=2,
        sync_every=4,
        vocab_size=300,
        context=16,
        hidden_size=16,
        num_layers=1,
        num_steps=8,
        batch_size=2,
        warmup_steps=2,
        log_every=4,
        eval_every=4,
        eval_windows=8,
    )


@pytest.fixture
def store(recipe, corpus, tmp_path):
    return recipe("trials").Store(tmp_path, corpus)


# -------------------------------------------------------------------------------------
# Trials


def test_a_trial_is_trained_once_and_read_the_same(recipe, store, config, capsys):
    trial = store.trial(config)
    assert capsys.readouterr().out.startswith("diloco workers=2 sync_every=4")
    points = trial.points
    assert [point.step for point in points] == [4, 8]
    assert [point.tokens for point in points] == [4 * 2 * 2 * 16, 8 * 2 * 2 * 16]
    # Between two workers each round is S bytes.
    assert points[1].bytes_sent == pytest.approx(2 * 4 * trial.parameters, rel=0.02)
    assert store.trial(config) == trial
    assert store.trial(dataclasses.replace(config, name="other", log_every=2)) == (
        trial._replace(config=dataclasses.replace(config, name="other", log_every=2))
    )
    assert capsys.readouterr().out == ""
    assert store.trial(dataclasses.replace(config, seed=1)).points != points
    assert len(list(store.folder.glob("*.json"))) == 2


def test_ddp_is_the_gradient_of_all_workers_and_has_no_period(recipe, store, config):
    """Its mean of gradients is that of Local SGD's parameters every step, for SGD.

    Here, over AdamW: one worker alone on all windows, by hand.
    """
    pretrain, data = recipe("pretrain"), recipe("data")
    ddp = dataclasses.replace(config, method="ddp")
    trial = store.trial(ddp)
    assert store.trial(dataclasses.replace(ddp, sync_every=9)).points == trial.points
    assert trial.final.bytes_sent == 8 * 4 * trial.parameters

    torch.manual_seed(0)
    model = pretrain.build_model(ddp)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=ddp.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    scheduler = pretrain.build_scheduler(ddp, optimizer)
    workers = [
        data.Batches(
            store.corpus.train, context=16, batch_size=2, rank=r, world=2, seed=0
        )
        for r in range(2)
    ]
    for _ in range(8):
        for batches in workers:
            (pretrain.loss_of(model, next(batches), ddp) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    windows = data.validation_windows(store.corpus.validation, 16, 8)
    loss = pretrain.loss_of(model, windows, ddp).item()
    assert trial.final.val_loss == pytest.approx(loss, abs=1e-4)


def test_a_setting_that_says_nothing_to_a_method_makes_no_other_trial(recipe, config):
    settings_of = recipe("trials").settings_of
    changes = {
        "sync_every": 7, "overlap": 1, "codec": "int8", "outer_lr": 0.1,
        "outer_momentum": 0.1, "fragments": 2, "qsr": 0.1, "slow_beta": 0.1,
        "omega": 0.1, "first_periods": 1, "second_periods": 1,
    }  # fmt: skip
    heard = {
        "ddp": 0, "local_sgd": 4, "diloco": 5, "streaming": 6, "mtdao": 5, "desloc": 5,
    }  # fmt: skip
    for method, count in heard.items():
        own = dataclasses.replace(config, method=method)
        others = [dataclasses.replace(own, **{n: v}) for n, v in changes.items()]
        differ = [settings_of(other) != settings_of(own) for other in others]
        assert sum(differ) == count, method


def test_without_time_or_leave_nothing_is_trained(recipe, store, config):
    store.trains = False
    assert store.trial(config) is None
    assert list(store.missing.values()) == [config]
    store.trains, store.deadline = True, -math.inf
    assert store.trial(config) is None
    assert store.toy(lambda: 3) is None
    assert not list(store.folder.glob("*"))


def test_a_killed_comparison_loses_one_trial(recipe, store, config, monkeypatch):
    trials = recipe("trials")
    store.trial(config)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(trials, "train", killed)
    with pytest.raises(KeyboardInterrupt):
        store.trial(dataclasses.replace(config, seed=1))
    assert store.trial(config).final.step == 8
    assert len(list(store.folder.iterdir())) == 1


# -------------------------------------------------------------------------------------
# Groups


def made_up(recipe, label, losses, **settings):
    """A row whose trials have these losses at their end."""
    groups, trials = recipe("groups"), recipe("trials")
    config = dataclasses.replace(recipe("runs").compare(), **settings)
    ddp_bytes = 600 * 2 * 4 * 1000 * 3 / 4
    sent = ddp_bytes / (1 if config.method == "ddp" else config.sync_every)
    return groups.Row(
        label,
        [
            trials.Trial(
                dataclasses.replace(config, seed=seed),
                1000,
                [
                    trials.Point(300, 300 * 2048, sent / 2, loss + 1),
                    trials.Point(600, 600 * 2048, sent, loss),
                ],
            )
            for seed, loss in enumerate(losses)
        ],
    )


@pytest.fixture
def rows(recipe):
    return {
        "ddp": made_up(recipe, "ddp", [3.0, 3.2], method="ddp"),
        "diloco, H=10": made_up(recipe, "diloco, H=10", [3.1, 3.2]),
        "diloco, H=60": made_up(recipe, "diloco, H=60", [3.9], sync_every=60),
    }


def test_every_claim_is_cited_and_has_one_way_to_be_tried(recipe):
    groups = recipe("groups").GROUPS
    assert list(groups)[0] == "headline"
    for group in groups.values():
        assert re.fullmatch(r"\d{4}\.\d{5}", group.paper)
        assert (group.rows is None) != (group.toy is None)
        assert group.claim.endswith(".")


def test_rates_are_tuned_one_after_the_other(recipe, config):
    groups = recipe("groups")
    asked = []

    class Made:
        def trial(self, config):
            asked.append((config.lr, config.outer_lr))
            loss = abs(config.lr - 3) + abs(config.outer_lr - 0.7)
            point = recipe("trials").Point(1, 1, 1.0, loss)
            return recipe("trials").Trial(config, 1, [point])

    choice = groups.Choice(lrs=(1.0, 2.0, 3.0))
    variant = groups.Variant({}, (0.4, 0.6, 0.8))
    best, note = groups.tune(Made(), choice, config, variant)
    assert asked[:3] == [(1.0, 0.6), (2.0, 0.6), (3.0, 0.6)]
    assert asked[3:] == [(3.0, 0.4), (3.0, 0.6), (3.0, 0.8)]
    assert (best.lr, best.outer_lr) in [(3.0, 0.6), (3.0, 0.8)]
    assert note.startswith("lr=3! outer_lr=")


def test_a_plan_counts_what_is_not_there(recipe, corpus, tmp_path):
    """Tuning asks for its grid, then for what it found best, which is of the grid."""
    compare = recipe("compare")
    store = recipe("trials").Store(tmp_path, corpus, trains=False)
    options = compare.Options(("headline", "J7"), seeds=2, periods=(10, 30))
    told = compare.look(options, store)
    # 5 methods without an outer rate have 3 trials to tune, 5 have 5, and 2 take rates
    # of others. Of two seeds the first is tuned at the first period.
    trials = 5 * 3 + 5 * 5 + 2 + 12 + 11 * 2
    assert told["headline"].startswith(f"{trials} trials, ")
    assert told["J7"].startswith("4 trials, ")  # the others are among the headline's


def test_verdicts_say_what_the_numbers_say(recipe, rows):
    groups = recipe("groups")
    text = groups.judge_headline(rows)
    assert "DDP comes to 3.100. Nearest is diloco, H=10 with 3.150 (+1.6%)" in text
    assert "10.0% of its bytes" in text
    assert text.endswith("diloco, H=10 sends least: 10.00%.")
    text = groups.judge_against(rows, "ddp", ("diloco, H=10", "diloco, H=60"))
    assert "diloco, H=10 +0.050 nats at 10% of the bytes, within the spread" in text
    assert "diloco, H=60 +0.800 nats at 2% of the bytes, beyond the spread" in text
    text = groups.judge_against(rows, "diloco, H=60", ("diloco, H=60",))
    assert text.endswith("+0.000 nats at 100% of the bytes.")  # of one seed
    text = groups.judge_lengths(rows)
    assert text == ("Against DDP of as many steps: diloco +25.8% at 600.")
    for name, group in groups.GROUPS.items():
        if group.rows is not None:
            assert group.judge({}).endswith("."), name


def test_the_toys_agree_with_the_claims(recipe, store):
    groups = recipe("groups")
    lines = groups.growths(store)
    assert groups.judge_growths(lines).endswith("in 12 of 12 settings.")
    assert groups.growths(dataclasses.replace(store, trains=False)) == lines


def test_delayed_steps_are_worse_than_eager_ones(recipe):
    loss = recipe("toys").loss_of_late_steps
    sync, eager, delayed = (loss(t, 5, 0.7) for t in ("sync", "eager", "delayed"))
    assert sync < eager < delayed


def test_a_slow_momentum_remembers(recipe):
    toys = recipe("toys")
    fast, slow = (toys.memory_of_momenta(beta) for beta in (0.9, 0.999))
    assert all(s > 0.8 for s in slow)
    assert fast[0] < slow[0] and fast[1] < slow[1]


# -------------------------------------------------------------------------------------
# Pages


def test_hours_are_the_planners(recipe, rows):
    hours = recipe("pages").hours
    steps = 600 * 0.8 / 3600
    diloco = rows["diloco, H=10"].config
    # 60 exchanges of 900 MB at 125 MB/s, with two latencies.
    exchanges = 60 * (900e6 / 125e6 + 0.02) / 3600
    assert hours(diloco, 0.1, "1 Gbit/s") == pytest.approx(steps + exchanges, rel=0.01)
    ddp = hours(rows["ddp"].config, 1.0, "100 Mbit/s")
    assert ddp == pytest.approx(600 * (72 + 0.06 + 0.4) / 3600, rel=0.01)
    alone = dataclasses.replace(diloco, workers=1)
    assert hours(alone, 0.0, "1 Gbit/s") == pytest.approx(steps)
    for method in recipe("pages").PLANNED:
        config = dataclasses.replace(diloco, method=method)
        assert hours(config, 0.1, "1 Gbit/s") >= steps * 0.999
    # Growing rounds are planned by what was sent.
    qsr = dataclasses.replace(diloco, method="local_sgd", sync_every=1, qsr=1.0)
    assert hours(qsr, 0.1, "1 Gbit/s") == hours(diloco, 0.1, "1 Gbit/s")


def test_the_pages_hold_tables_and_plots(recipe, rows, tmp_path):
    pages, group = recipe("pages"), recipe("groups").GROUPS["headline"]
    one = pages.section("headline", group, rows, tmp_path)
    assert [line[""] for line in one.lines] == ["ddp", "diloco, H=10", "diloco, H=60"]
    assert one.lines[0]["validation loss"] == "3.100 ± 0.141"
    assert one.lines[2]["validation loss"] == "3.900"
    assert one.lines[1]["of DDP's"] == "10.00%"

    pages.write_markdown([one], tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| ddp | 3.100 ± 0.141 | 2 |" in text
    assert "https://arxiv.org/abs/2311.08105" in text

    pages.write_html([one], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "data:image/png;base64,iVBOR" in page
    assert not re.search(r'src="(?!data:)', page)


def test_groups_end_to_end_in_20_steps(recipe, tmp_path, capsys):
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghij", k=5)) for _ in range(50)]
    data = tmp_path / "words.txt"
    data.write_text("\n".join(generator.choices(words, k=20_000)), encoding="utf-8")
    arguments = ["J13", "--steps", "20", "--seeds", "1", "--data", str(data)]
    arguments += ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]
    main = recipe("compare").main

    main([*arguments, "--dry-run"])
    assert capsys.readouterr().out.startswith("J13: 3 trials, ")
    assert not list(tmp_path.glob("out/trials/*"))

    main([*arguments, "--budget-minutes", "0"])
    assert "J13: nothing is there yet." in capsys.readouterr().out

    main(arguments)
    assert "Against H=4: H=8 " in capsys.readouterr().out
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "trials", "J13.png", "report.md", "report.html",
    }  # fmt: skip
    kept = [json.loads(p.read_text()) for p in tmp_path.glob("out/trials/*.json")]
    assert len(kept) == 3
    assert all(k["points"][-1][0] == 20 for k in kept)

    main(arguments)
    assert capsys.readouterr().out.startswith("J13: 0 trials, 0 minutes")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": ("J99",)}, "groups must be of headline, .* or all, got J99"),
        ({"groups": ()}, "groups must be of headline, .* or all, got none"),
        ({"groups": ("all",), "seeds": 0}, "seeds must be at least 1, got 0"),
        ({"groups": ("all",), "lrs": ()}, r"lrs must be positive numbers, got \(\)"),
    ],
)
def test_wrong_options_are_explained(recipe, settings, message):
    with pytest.raises(ValueError, match=message):
        recipe("compare").Options(**settings)


def test_growing_rounds_have_their_first_length_in_the_warm_up(recipe):
    run = recipe("runs").compare()
    lr = run.lr
    config = dataclasses.replace(run, method="local_sgd", sync_every=4, qsr=2 * lr)
    pretrain = recipe("pretrain")
    model = pretrain.build_model(config)
    optimizer = recipe("methods").build_optimizer(config, model)
    scheduler = pretrain.build_scheduler(config, optimizer)
    ends, rounds = [], 0
    for step in range(1, config.warmup_steps + 1):
        optimizer.step()
        scheduler.step()
        if optimizer.stats.rounds > rounds:
            ends, rounds = [*ends, step], optimizer.stats.rounds
    assert ends == [*range(4, config.warmup_steps + 1, 4)]
