"""The other methods: worked numbers, identities, every method with every setting."""

import copy
import inspect
import math

import pytest
import torch
from torch import nn

import lowcomm
from toy import (
    CURVATURE,
    TARGETS,
    inner_state_of,
    loss_of,
    network,
    parameters_of,
    same,
    start,
    through_a_file,
    train,
    trajectory,
)


def run(build, num_steps, num_workers=2):
    """Both workers' parameters after each step on the quadratic."""

    def worker(rank, group):
        x = start()
        return trajectory(x, build(x), rank, num_steps)

    return list(zip(*lowcomm.simulate(worker, num_workers), strict=True))


def near(rows):
    return [pytest.approx(row, rel=0, abs=1e-9) for row in rows]


def both(row):
    return [row, row]


def adam(x, **settings):
    return torch.optim.Adam([x], lr=0.1, betas=(0.9, 0.99), **settings)


def periods(params, first, second):
    return {"params": params, "exp_avg": first, "exp_avg_sq": second}


# Worked out by an independent implementation of the papers' equations.
WORKED = {
    "slowmo": (
        lambda x: lowcomm.SlowMo(torch.optim.SGD([x], lr=0.1), sync_every=2),
        {2: both([0.38, 0.18]), 4: both([0.8778, -0.0952])},
    ),
    "post-local": (
        lambda x: lowcomm.LocalSGD(
            torch.optim.SGD([x], lr=0.1), sync_every=2, warmup_steps=2
        ),
        {3: [[0.442, -0.292], [0.642, 0.508]], 4: both([0.6878, 0.0648])},
    ),
    "des-loc, 2:2:4": (
        lambda x: lowcomm.DESLOC(adam(x), sync_every=periods(2, 2, 4)),
        {
            1: [[0.099999999, 0.4000000001666667], [0.0999999996666667, 0.5999999995]],
            2: both([0.1997581919337644, 0.4995426027342573]),
            3: [[0.3685183639535, 0.4403281269913], [0.2777460083522, 0.4716599057925]],
            4: both([0.440117545210425, 0.4268340856915032]),
        },
    ),
    "des-loc, 1:2:4": (
        lambda x: lowcomm.DESLOC(adam(x), sync_every=periods(1, 2, 4)),
        {
            3: both([0.3231321861609834, 0.4579335791416739]),
            4: both([0.440037269091293, 0.4293450014336118]),
        },
    ),
    "des-loc over adopt": (
        lambda x: lowcomm.DESLOC(
            lowcomm.ADOPT([x], lr=0.1, betas=(0.9, 0.99)), sync_every=periods(2, 2, 4)
        ),
        {
            1: both([0.0, 0.5]),
            2: both([0.01, 0.5]),
            3: [[0.0289, 0.49], [0.0289666666666667, 0.51]],
            4: both([0.0557812035404611, 0.4999333333333333]),
            5: [
                [0.0841676139577301, 0.4864564537270028],
                [0.093113267754689, 0.5043464216451288],
            ],
        },
    ),
    "mt-dao": (
        lambda x: lowcomm.MTDAO(
            [x],
            lr=0.1,
            betas=(0.999, 0.99),
            omega=0.9,
            weight_decay=0.0,
            sync_every=periods(2, 2, 4),
        ),
        {
            2: both([0.1995919722600074, 0.4993608339209848]),
            3: [
                [0.3645482308242907, 0.4380166991861508],
                [0.2785547387451063, 0.4781697315618352],
            ],
            4: both([0.4383481797889332, 0.4287816904882721]),
        },
    ),
    "mt-dao over adopt": (
        lambda x: lowcomm.MTDAO(
            lowcomm.ADOPT([x], lr=0.1, betas=(0.999, 0.9999), omega=0.9), sync_every=2
        ),
        {
            2: both([0.01009, 0.5]),
            3: [
                [0.0146467652121426, 0.4880009002096226],
                [0.0221790097903775, 0.5045123851785945],
            ],
            4: both([0.0274388994691627, 0.4918196133879964]),
            5: [
                [0.0320694693497714, 0.4782837098753252],
                [0.0410942506346003, 0.4963332651540199],
            ],
        },
    ),
}


@pytest.mark.parametrize(("build", "rows"), WORKED.values(), ids=WORKED)
def test_a_method_follows_the_worked_numbers(build, rows):
    points = run(build, max(rows))
    for step, row in rows.items():
        assert list(points[step - 1]) == near(row), f"step {step}"


def test_two_momenta_by_hand():
    # First step: every corrected momentum is the gradient g, so is the direction, and
    # v is g^2: a step of lr. Then with -g: u = b (1 - b) g - (1 - b) g, corrected
    # by 1 / (1 - b^2): -(1 - b) / (1 + b) g; v stays g^2. By weights:
    #   .1 * -1 + .1 * -(.1 / 1.9) + .8 * -(.01 / 1.99) = -.1092833...
    x = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    opt = lowcomm.QHAdamW(
        [x], lr=0.5, betas=((0.9, 0.99), 0.9), omega=(0.1, 0.8), eps=0, weight_decay=0
    )
    for sign in (1.0, -1.0):
        x.grad = torch.full_like(x, 2 * sign)
        opt.step()
    back = 0.1 + 0.1 * 0.1 / 1.9 + 0.8 * 0.01 / 1.99
    assert x.item() == pytest.approx(1.0 - 0.5 + 0.5 * back, rel=1e-12)
    assert set(opt.state[x]) == {"step", "exp_avg_0", "exp_avg_1", "exp_avg_sq"}


def same_run(left, right, num_steps=9, num_workers=3, atol=1e-12):
    def worker(build):
        def body(rank, group):
            model = network()
            opt = build(model.parameters())
            train(model, opt, range(num_steps), rank)
            return parameters_of(model)

        return lowcomm.simulate(body, num_workers)

    torch.testing.assert_close(worker(left), worker(right), rtol=0, atol=atol)


ADAMW = {"lr": 0.01, "weight_decay": 0.1}


def test_equal_periods_are_local_adam():
    same_run(
        lambda p: lowcomm.DESLOC(p, **ADAMW, sync_every=periods(3, 3, 3)),
        lambda p: lowcomm.LocalSGD(p, **ADAMW, sync_every=3, average_states=True),
    )


def test_states_that_are_never_averaged_are_local_adamw():
    same_run(
        lambda p: lowcomm.DESLOC(p, **ADAMW, sync_every=periods(3, 0, 0)),
        lambda p: lowcomm.LocalSGD(p, **ADAMW, sync_every=3),
    )


def test_one_integer_is_one_three_six():
    same_run(
        lambda p: lowcomm.DESLOC(p, **ADAMW, sync_every=1),
        lambda p: lowcomm.DESLOC(p, **ADAMW, sync_every=periods(1, 3, 6)),
        num_steps=13,
    )


def test_a_momentum_of_full_weight_is_adamw_and_des_loc():
    same_run(
        lambda p: lowcomm.MTDAO(p, **ADAMW, betas=(0.9, 0.99), omega=1.0, sync_every=3),
        lambda p: lowcomm.DESLOC(
            p, **ADAMW, betas=(0.9, 0.99), sync_every=periods(3, 3, 3)
        ),
    )


def test_slowmo_without_momentum_is_local_sgd():
    same_run(
        lambda p: lowcomm.SlowMo(p, lr=0.01, sync_every=3, slow_momentum=0.0),
        lambda p: lowcomm.LocalSGD(p, lr=0.01, sync_every=3),
    )


def test_diloco_of_rate_one_without_momentum_is_local_sgd():
    same_run(
        lambda p: lowcomm.DiLoCo(
            p, lr=0.01, sync_every=3, outer_lr=1.0, outer_momentum=0.0
        ),
        lambda p: lowcomm.LocalSGD(p, lr=0.01, sync_every=3),
    )


def test_local_sgd_with_a_period_of_one_is_data_parallel_sgd():
    """The mean of steps along each worker's gradient is a step along their mean."""

    def worker(rank, group):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, lowcomm.LocalSGD(inner, sync_every=1), range(9), rank)
        return parameters_of(model)

    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(9):
        opt.zero_grad()
        for rank in range(3):
            (loss_of(model, step, rank) / 3).backward()
        opt.step()
    for ended in lowcomm.simulate(worker, 3):
        torch.testing.assert_close(ended, parameters_of(model), rtol=0, atol=1e-12)


def test_des_loc_with_an_outer_step_and_no_states_is_diloco():
    same_run(
        lambda p: lowcomm.DESLOC(p, lr=0.01, sync_every={"params": 3}, outer_lr=0.7),
        lambda p: lowcomm.DiLoCo(p, lr=0.01, sync_every=3),
        atol=0,
    )


@pytest.mark.parametrize("inner", [lowcomm.QHAdamW, lowcomm.ADOPT])
@pytest.mark.parametrize("betas", [(0.9, 0.99), ((0.9, 0.99), 0.95)])
def test_foreach_and_single_tensor_steps_are_the_same(inner, betas):
    omega = 0.7 if isinstance(betas[0], float) else (0.3, 0.5)

    def trained(foreach):
        model = network()
        opt = inner(
            model.parameters(),
            lr=0.01,
            betas=betas,
            omega=omega,
            weight_decay=0.1,
            foreach=foreach,
        )
        train(model, opt, range(6))
        return parameters_of(model)

    torch.testing.assert_close(trained(True), trained(False), rtol=0, atol=1e-15)


def test_qsr_rounds_grow_with_the_rate_at_their_start():
    def worker(rank, group):
        x = start()
        inner = torch.optim.SGD([x], lr=0.1)
        opt = lowcomm.LocalSGD(inner, sync_every=lowcomm.QSR(base=2, alpha=0.2))
        rounds = []
        for step in range(1, 16):
            before = opt.stats.rounds
            trajectory(x, opt, rank, 1)
            if opt.stats.rounds > before:
                rounds.append(step)
            # The rate of the round is set after the step that ended the last one.
            opt.param_groups[0]["lr"] = 0.1 if step < 4 else 0.08 if step < 8 else 0.05
        return rounds

    # (.2/.1)^2 = 4: steps 4; then .08: 6 steps, 10; then .05: 16 steps, 26.
    assert lowcomm.simulate(worker, 2) == [[4, 10], [4, 10]]


def test_momentum_survives_and_stays_aligned_the_slower_it_is():
    """Eight workers on a noisy quadratic, exchanging every 32 steps."""
    alignment = {}
    for beta in (0.9, 0.95, 0.99, 0.999):

        def worker(rank, group, beta=beta):
            generator = torch.Generator().manual_seed(rank)
            x = nn.Parameter(torch.full((64,), 3.0))
            scale = torch.logspace(-2, 0, 64)
            opt = lowcomm.MTDAO(
                [x], lr=0.01, betas=(beta, 0.999), omega=0.9, sync_every=32
            )
            for _ in range(32 * 12 - 1):
                noise = 0.3 * torch.randn(64, generator=generator)
                x.grad = scale * x.detach() + noise
                opt.step()
            return opt.state[x]["exp_avg"].clone()

        momenta = torch.stack(lowcomm.simulate(worker, 8))
        cosines = nn.functional.cosine_similarity(momenta, momenta.mean(0)[None])
        alignment[beta] = cosines.mean().item()
    values = list(alignment.values())
    assert values == sorted(values)
    assert alignment[0.999] >= 0.8


METHODS = {
    "LocalSGD": lambda p, **k: lowcomm.LocalSGD(p, sync_every=4, **k),
    "LocalAdam": lambda p, **k: lowcomm.LocalSGD(
        p, sync_every=4, average_states=True, **k
    ),
    "QSR": lambda p, **k: lowcomm.LocalSGD(p, sync_every=lowcomm.QSR(4, 0.02), **k),
    "warm-up": lambda p, **k: lowcomm.LocalSGD(p, sync_every=4, warmup_steps=3, **k),
    "DiLoCo": lambda p, **k: lowcomm.DiLoCo(p, sync_every=4, **k),
    "SlowMo": lambda p, **k: lowcomm.SlowMo(p, sync_every=4, **k),
    "DESLOC": lambda p, **k: lowcomm.DESLOC(p, sync_every=3, **k),
    "DESLOC-outer": lambda p, **k: lowcomm.DESLOC(p, sync_every=3, outer_lr=0.7, **k),
    "MTDAO": lambda p, **k: lowcomm.MTDAO(p, sync_every=4, **k),
    "NoLoCo": lambda p, **k: lowcomm.NoLoCo(p, sync_every=4, **k),
    "NoLoCo-gamma": lambda p, **k: lowcomm.NoLoCo(p, sync_every=4, gamma=0.4, **k),
}
SETTINGS = {
    "plain": {},
    "overlap": {"overlap": 2},
    "int8": {"codec": "int8"},
    "int8, overlap, error feedback": {
        "codec": "int8",
        "overlap": 1,
        "error_feedback": True,
    },
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_method_with_every_setting_resumes_and_ends_equal(
    method, settings, dtype
):
    def build():
        model = network(dtype=dtype)
        return model, method(model.parameters(), lr=0.01, **settings)

    def worker(resume):
        def body(rank, group):
            model, opt = build()
            train(model, opt, range(10), rank)
            if resume:
                saved = through_a_file([model.state_dict(), opt.state_dict()])
                model, opt = build()
                model.load_state_dict(saved[0])
                opt.load_state_dict(saved[1])
            train(model, opt, range(10, 21), rank)
            before = parameters_of(model), inner_state_of(opt)
            opt.finish()
            return before, parameters_of(model)

        return body

    straight = lowcomm.simulate(worker(resume=False), 2)
    assert same(straight, lowcomm.simulate(worker(resume=True), 2))
    assert same(straight[0][1], straight[1][1])
    assert all(p.isfinite().all() for p in straight[0][1])


# Each with the others that it needs; `group` is the simulated one.
OPTIONS = {
    "group": lambda group: {"group": group},
    "overlap": {"overlap": 1},
    "codec": {"codec": "bf16"},
    "error_feedback": {"error_feedback": True, "codec": "int8"},
    "anchor_device": {"anchor_device": "cpu", "codec": "int8"},
    "weight": {"weight": "steps"},
    "clip_shares": {"clip_shares": 2.0},
    "trim_shares": {"trim_shares": 1},
    "buffers": lambda group: {"buffers": [torch.ones(3), torch.ones(2).long()]},
    "bucket_bytes": {"bucket_bytes": 64},
    "timeout_s": {"timeout_s": 30.0},
    "init_sync": {"init_sync": False},
    "average_states": {"average_states": True},
    "warmup_steps": {"warmup_steps": 2},
    "levels": {"levels": [([0, 1], 1)]},
    "outer_lr": {"outer_lr": 0.6},
    "outer_momentum": {"outer_momentum": 0.8, "outer_lr": 0.6},
    "nesterov": {"nesterov": False},
    "fragments": {"fragments": 2},
    "local_mix": {"local_mix": 0.25},
    "eager": {"eager": True},
    "gamma": {"gamma": 0.4, "outer_lr": 0.6},
    "seed": {"seed": 3},
    "peers": {"peers": lambda round: [[0, 1]]},
    "slow_lr": {"slow_lr": 0.9},
    "slow_momentum": {"slow_momentum": 0.6},
}
# Of the inner optimizer, which a wrapper passes on.
INNER_OPTIONS = {
    "weight_decay": {"weight_decay": 0.1},
    "betas": {"betas": (0.8, 0.9)},
    "eps": {"eps": 1e-6},
    "foreach": {"foreach": True},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "capturable": {"capturable": False},
    "differentiable": {"differentiable": False},
    "fused": {"fused": True},
    "omega": {"omega": 0.5},
}
CLASSES = {
    name: value
    for name in lowcomm.__all__
    if isinstance(value := getattr(lowcomm, name), type)
    and issubclass(value, lowcomm.LocalSGD.__mro__[1])
}
# What cannot be had together is refused when it is asked for: nothing is displaced, or
# pairs have no extremes.
REFUSED = {
    ("LocalSGD", "clip_shares"),
    ("LocalSGD", "trim_shares"),
    ("DESLOC", "clip_shares"),
    ("DESLOC", "trim_shares"),
    ("MTDAO", "clip_shares"),
    ("MTDAO", "trim_shares"),
    ("NoLoCo", "clip_shares"),
    ("NoLoCo", "trim_shares"),
}


def options_of(make):
    """All keywords that it takes, its own, those of all, and the inner optimizer's."""
    own = set(inspect.signature(make).parameters)
    all_have = set(inspect.signature(make.__mro__[1].__init__).parameters)
    inner = lowcomm.QHAdamW if make is lowcomm.MTDAO else torch.optim.AdamW
    inners = set(inspect.signature(inner).parameters) - {"lr"}
    return (own | all_have | inners) - {
        "self",
        "params",
        "sync_every",
        "common",
        "inner",
    }


ALL_OPTIONS = [
    pytest.param(name, option, id=f"{name}-{option}")
    for name, make in CLASSES.items()
    for option in sorted(options_of(make))
]


@pytest.mark.parametrize(("name", "option"), ALL_OPTIONS)
def test_every_option_of_every_method_runs(name, option):
    """An attribute that is only used with an option may not be there."""
    settings = (OPTIONS | INNER_OPTIONS)[option]

    def worker(rank, group):
        model = network()
        given = settings(group) if callable(settings) else settings
        opt = CLASSES[name](model.parameters(), lr=0.05, sync_every=3, **given)
        train(model, opt, range(7), rank)
        opt.finish()
        return parameters_of(model)

    if (name, option) in REFUSED:
        with pytest.raises(ExceptionGroup) as caught:
            lowcomm.simulate(worker, 2)
        assert all(option in str(error) for error in caught.value.exceptions)
        return
    first, second = lowcomm.simulate(worker, 2)
    assert same(first, second)
    assert not same(first, parameters_of(network()))


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_method_stays_in_phase_when_one_worker_overflows(method):
    def worker(rank, group):
        model = network(dtype=torch.float32)
        opt = method(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(13):
            opt.zero_grad()
            loss = sum(p.square().sum() for p in model.parameters())
            scaler.scale(loss).backward()
            if rank == 0 and step == 5:
                next(model.parameters()).grad.fill_(math.inf)
            scaler.step(opt)
            scaler.update()
        opt.finish()
        return opt.stats.rounds, parameters_of(model)

    first, second = lowcomm.simulate(worker, 2)
    assert same(first, second)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda p: lowcomm.SlowMo(p, sync_every=2, slow_lr=-1), ValueError, "slow_lr"),
        (
            lambda p: lowcomm.SlowMo(p, sync_every=2, slow_momentum=1.0),
            ValueError,
            "slow_momentum must be at least 0 and below 1, got slow_momentum=1.0",
        ),
        (
            lambda p: lowcomm.DESLOC(p, sync_every={"params": 2, "exp": 3}),
            ValueError,
            r"name states of the inner optimizer, got 'exp' with states \['exp_avg'",
        ),
        (
            lambda p: lowcomm.DESLOC(p, sync_every={"exp_avg": 3}),
            ValueError,
            "must have a period of at least 1 for 'params'",
        ),
        (
            lambda p: lowcomm.DESLOC(p, sync_every={"params": 2, "exp_avg": -1}),
            ValueError,
            r"sync_every\['exp_avg'\] must be at least 0",
        ),
        (
            lambda p: lowcomm.DESLOC(torch.optim.Rprop(p), sync_every=2),
            ValueError,
            "must be a mapping for this inner optimizer.*prev",
        ),
        (
            lambda p: lowcomm.DESLOC(
                torch.optim.LBFGS(p), sync_every={"params": 2, "d": 2}
            ),
            ValueError,
            "states of LBFGS must come of a step .* got TypeError.*closure.* Average",
        ),
        (lambda p: lowcomm.MTDAO(p, sync_every=0), ValueError, "at least 1"),
        (lambda p: lowcomm.MTDAO(p, sync_every=2, fused=True), TypeError, "fused"),
        (lambda p: lowcomm.QHAdamW(p, omega=1.5), ValueError, "omega must be"),
        (lambda p: lowcomm.QHAdamW(p, omega=(0.1, 0.2)), ValueError, "omega must have"),
        (lambda p: lowcomm.QHAdamW(p, betas=(1.0, 0.9)), ValueError, "betas must be"),
        (lambda p: lowcomm.ADOPT(p, lr=-1.0), ValueError, "lr must be at least 0"),
        (lambda p: lowcomm.QSR(0, 0.1), ValueError, "base must be at least 1"),
        (lambda p: lowcomm.QSR(2, -0.1), ValueError, "alpha must be"),
        (lambda p: lowcomm.QSR(4, 0.1, max_period=2), ValueError, "max_period"),
        (
            lambda p: lowcomm.LocalSGD(p, sync_every=lowcomm.QSR(2, 1.0), overlap=2),
            ValueError,
            "overlap must be smaller than the period",
        ),
        (lambda p: lowcomm.half_life(1.0), ValueError, "beta must be between 0 and 1"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_value(call, error, words):
    with pytest.raises(error, match=words):
        call(list(network().parameters()))


def test_the_arithmetic_of_the_headlines():
    def factor(*periods):
        return 1 / sum(1 / k for k in periods)

    assert factor(256, 768, 1536) == pytest.approx(170.67, abs=0.01)
    assert factor(1, 3, 6) / factor(1, 1, 1) == pytest.approx(2.0)
    assert factor(32, 32, 32) == pytest.approx(10.67, abs=0.01)
    assert lowcomm.half_life(0.999) == pytest.approx(692.8, abs=0.1)
    assert 0.999**32 == pytest.approx(0.968, abs=1e-3)


# Bytes a worker sends in a step, over those of DDP: 2 (M - 1) / M values of four bytes.
VOLUMES = {
    "LocalSGD": (lambda p, site: lowcomm.LocalSGD(p, sync_every=6), 1 / 6),
    "LocalAdam": (
        lambda p, site: lowcomm.LocalSGD(p, sync_every=6, average_states=True),
        3 / 6,
    ),
    "post-local": (
        lambda p, site: lowcomm.LocalSGD(p, sync_every=6, warmup_steps=24),
        (24 + 2) / 36,
    ),
    "levels": (
        lambda p, site: lowcomm.LocalSGD(p, sync_every=6, levels=[(site, 2)]),
        1 / 6 + (1 / 2 - 1 / 6) * (1 / 2) / (3 / 4),
    ),
    "DiLoCo": (lambda p, site: lowcomm.DiLoCo(p, sync_every=6), 1 / 6),
    "streaming": (lambda p, site: lowcomm.DiLoCo(p, sync_every=6, fragments=3), 1 / 6),
    "streaming, int4": (
        lambda p, site: lowcomm.DiLoCo(p, sync_every=6, fragments=3, codec="int4"),
        4.0625 / 32 / 6,
    ),
    "int8": (
        lambda p, site: lowcomm.DiLoCo(p, sync_every=6, codec="int8"),
        8.0625 / 32 / 6,
    ),
    "eager": (lambda p, site: lowcomm.DiLoCo(p, sync_every=6, eager=True), 1 / 6),
    "SlowMo": (lambda p, site: lowcomm.SlowMo(p, sync_every=6), 1 / 6),
    # One partner, and the whole of one tensor, or of two.
    "NoLoCo": (lambda p, site: lowcomm.NoLoCo(p, sync_every=6), 4 / (2 * 3 * 6)),
    "NoLoCo, two": (
        lambda p, site: lowcomm.NoLoCo(p, sync_every=6, gamma=0.4),
        4 / (3 * 6),
    ),
    "DESLOC": (
        lambda p, site: lowcomm.DESLOC(p, sync_every=6),
        1 / 6 + 1 / 18 + 1 / 36,
    ),
    "MTDAO": (lambda p, site: lowcomm.MTDAO(p, sync_every=6), 3 / 6),
    "MTDAO, periods": (
        lambda p, site: lowcomm.MTDAO(p, sync_every=periods(6, 12, 36)),
        1 / 6 + 1 / 12 + 1 / 36,
    ),
}


@pytest.mark.parametrize(("build", "volume"), VOLUMES.values(), ids=VOLUMES)
def test_bytes_in_a_step_are_those_of_the_formula(build, volume):
    def worker(rank, group):
        model = nn.Sequential(*(nn.Linear(512, 255) for _ in range(3)))
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        opt = build(model.parameters(), (0, 1) if rank < 2 else (2, 3))
        late = 6 if getattr(opt, "eager", False) else 0
        for _ in range(36 + late):
            opt.step()
        return opt.stats.bytes_sent, sum(p.numel() for p in model.parameters())

    for sent, size in lowcomm.simulate(worker, 4):
        assert sent / 36 == pytest.approx(volume * 2 * 3 / 4 * 4 * size, rel=0.01)


def test_quadratic_gradients_are_the_ones_that_were_worked_with():
    x = start()
    assert (CURVATURE * (x.detach() - TARGETS[0])).tolist() == [-1.0, 6.0]
    assert copy.deepcopy(x).tolist() == [0.0, 0.5]
