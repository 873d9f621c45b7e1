"""MT-DAO that goes on from the run of a plain optimizer."""

import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import lowcomm
from toy import (
    network,
    parameters_of,
    same,
    scalar,
    slide,
    snapshot,
    tensors_of,
    through_a_file,
    train,
)

SEVERAL = {"betas": ((0.9, 0.99), 0.75), "omega": (0.3, 0.6)}
ONE = {"betas": (0.5, 0.75), "omega": 0.9}


def checkpoint(*shapes, lr=0.01, step=3.0):
    """What AdamW saves after `step` steps, with a second moment of 4 everywhere."""
    state = {
        i: {
            "step": torch.tensor(step),
            "exp_avg": torch.full(shape, 5.0, dtype=torch.float64),
            "exp_avg_sq": torch.full(shape, 4.0, dtype=torch.float64),
        }
        for i, shape in enumerate(shapes)
    }
    group = {"lr": lr, "betas": (0.9, 0.95), "params": list(range(len(shapes)))}
    return {"state": state, "param_groups": [group]}


def momenta_of(opt) -> list[torch.Tensor]:
    return [
        value
        for state in opt.state.values()
        for name, value in state.items()
        if name.startswith("exp_avg") and name != "exp_avg_sq"
    ]


def squares_and_steps(opt) -> list:
    params = [p for group in opt.param_groups for p in group["params"]]
    states = [opt.state[p] for p in params]
    return snapshot([[float(s["step"]), s["exp_avg_sq"]] for s in states])


@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("num", [1, 2])
def test_the_next_step_by_hand(num, foreach):
    # The fourth step, of 4 * .01: u = .5 * 2, corrected by 1 - .5^4 to 16/15;
    # v = .75 * 4 + .25 * 2^2 = 4, corrected by 1 - .75^4 = 175/256.
    x = [scalar(1.0) for _ in range(num)]
    opt = lowcomm.MTDAO(
        x, **ONE, lr=7.0, eps=0.0, weight_decay=0.0, foreach=foreach, sync_every=8
    )
    opt.warm_start(checkpoint(*[(1,)] * num), lr_factor=4.0)
    for p in x:
        p.grad = torch.full_like(p, 2.0)
    opt.step()
    direction = 0.1 * 2 + 0.9 * 16 / 15
    expected = 1 - 0.04 * direction / math.sqrt(4 * 256 / 175)
    assert [p.item() for p in x] == pytest.approx([expected] * num, rel=1e-12)
    assert squares_and_steps(opt) == [[4.0, torch.full((1,), 4.0)]] * num


@pytest.mark.parametrize("foreach", [True, False])
def test_over_adopt_the_first_update_has_about_one_minus_omega(foreach):
    # No step is spent on seeding v. q = 2 / sqrt(4) = 1, below 3^(1/4), and
    # m = .001 q: a weight of .1 + .9 * .001.
    x = scalar(1.0)
    inner = lowcomm.ADOPT([x], betas=(0.999, 0.9999), omega=0.9, foreach=foreach)
    opt = lowcomm.MTDAO(inner, sync_every=8)
    opt.warm_start(checkpoint((1,)), lr_factor=2.0)
    slide(x, opt, 2.0)
    assert x.item() == pytest.approx(1 - 0.02 * 0.1009, rel=1e-12)


def test_several_momenta_start_from_zero():
    # q = 1: a weight of .1 + .3 * .1 + .6 * .01.
    x = scalar(1.0)
    opt = lowcomm.MTDAO(lowcomm.ADOPT([x], **SEVERAL), sync_every=8)
    opt.warm_start(checkpoint((1,)))
    assert set(opt.state[x]) == {"step", "exp_avg_0", "exp_avg_1", "exp_avg_sq"}
    assert not any(m.any() for m in momenta_of(opt))
    slide(x, opt, 2.0)
    assert x.item() == pytest.approx(1 - 0.01 * 0.136, rel=1e-12)


def test_without_momentum_before_and_after_it_is_the_run_before():
    plain = network()
    before = torch.optim.AdamW(plain.parameters(), lr=0.02, betas=(0.0, 0.95))
    train(plain, before, range(5))
    model = network()
    model.load_state_dict(plain.state_dict())
    opt = lowcomm.MTDAO(model.parameters(), betas=(0.9, 0.95), omega=0.0, sync_every=3)
    opt.warm_start(before.state_dict())
    train(plain, before, range(5, 12))
    train(model, opt, range(5, 12))
    torch.testing.assert_close(
        parameters_of(model), parameters_of(plain), rtol=0, atol=1e-14
    )


SOURCES = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.03),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.03, amsgrad=True),
    "QHAdamW": lambda p: lowcomm.QHAdamW(p, lr=0.03),
    "ADOPT": lambda p: lowcomm.ADOPT(p, lr=0.03),
    "DiLoCo": lambda p: lowcomm.DiLoCo(p, lr=0.03, sync_every=2),
    "DESLOC": lambda p: lowcomm.DESLOC(p, lr=0.03, sync_every=2),
}
TARGETS = {
    "QHAdamW": lambda p: lowcomm.MTDAO(p, **ONE, sync_every=2, weight_decay=0.25),
    "several": lambda p: lowcomm.MTDAO(p, **SEVERAL, sync_every=2, foreach=True),
    "ADOPT": lambda p: lowcomm.MTDAO(lowcomm.ADOPT(p, **ONE), sync_every=2),
    "torch": lambda p: lowcomm.MTDAO(torch.optim.AdamW(p), sync_every=2),
}


@pytest.mark.parametrize("build", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_takes_moments_counters_and_rates_and_keeps_the_rest(source, build):
    plain, model = network(), network(seed=1)
    before = source(plain.parameters())
    train(plain, before, range(5))
    saved = through_a_file(before.state_dict())
    kept = snapshot(saved)
    opt = build(model.parameters())
    settings = {k: v for k, v in opt.param_groups[0].items() if k != "lr"}
    parameters = parameters_of(model)
    opt.warm_start(saved, lr_factor=3)

    assert same(squares_and_steps(opt), squares_and_steps(before))
    assert momenta_of(opt) and not any(m.any() for m in momenta_of(opt))
    assert opt.param_groups[0]["lr"] == pytest.approx(0.09)
    assert {k: v for k, v in opt.param_groups[0].items() if k != "lr"} == settings
    assert same(parameters_of(model), parameters)
    assert opt.stats.steps == opt.stats.rounds == 0

    train(model, opt, range(5))
    assert same(saved, kept), "the checkpoint is left as it was"
    mine = {tensor.data_ptr() for tensor in tensors_of(opt.state_dict())}
    assert mine.isdisjoint(tensor.data_ptr() for tensor in tensors_of(saved))
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_state_has_the_dtype_of_this_optimizers_own():
    model = network(dtype=torch.bfloat16)
    opt = lowcomm.MTDAO(model.parameters(), sync_every=2)
    opt.warm_start(checkpoint(*[p.shape for p in model.parameters()]))
    for param in model.parameters():
        assert opt.state[param]["exp_avg_sq"].dtype == torch.bfloat16
        assert opt.state[param]["exp_avg_sq"].eq(4.0).all()
    train(model, opt, range(3))


def groups_of(model, *rates):
    parts = [list(layer.parameters()) for layer in (model[0], model[2])]
    pairs = zip(parts, rates, strict=True)
    return [{"params": part, "lr": rate} for part, rate in pairs]


def test_the_rate_of_every_group_is_multiplied_and_a_new_schedule_begins_there():
    plain, model = network(), network()
    before = torch.optim.AdamW(groups_of(plain, 0.1, 0.2))
    schedule = lr_scheduler.LambdaLR(before, lambda step: 0.5**step)
    train(plain, before, range(1))
    schedule.step()
    opt = lowcomm.MTDAO(groups_of(model, 1.0, 1.0), sync_every=2)
    opt.warm_start(before.state_dict(), lr_factor=4.0)
    assert [g["lr"] for g in opt.param_groups] == pytest.approx([0.2, 0.4])
    assert [g["initial_lr"] for g in opt.param_groups] == pytest.approx([0.4, 0.8])
    lr_scheduler.LambdaLR(opt, lambda step: 0.1)
    assert [g["lr"] for g in opt.param_groups] == pytest.approx([0.04, 0.08])


def test_a_rate_that_is_a_tensor_stays_one_of_its_own():
    plain, model = network(), network()
    before = torch.optim.AdamW(groups_of(plain, 0.1, 0.2), foreach=False)
    train(plain, before, range(1))
    rate = torch.tensor(1.0, dtype=torch.float64)
    inner = torch.optim.AdamW(groups_of(model, rate, rate), foreach=False)
    opt = lowcomm.MTDAO(inner, sync_every=2)
    opt.warm_start(before.state_dict(), lr_factor=2.0)
    assert [float(g["lr"]) for g in opt.param_groups] == pytest.approx([0.2, 0.4])
    assert rate == 1.0
    train(model, opt, range(2))


@pytest.mark.parametrize("named_before", [True, False])
@pytest.mark.parametrize("named_now", [True, False])
def test_parameters_correspond_by_position_with_or_without_names(
    named_before, named_now
):
    def parameters(model, named):
        return model.named_parameters() if named else model.parameters()

    plain, model = network(), network()
    before = torch.optim.AdamW(parameters(plain, named_before), lr=0.1)
    train(plain, before, range(3))
    opt = lowcomm.MTDAO(parameters(model, named_now), sync_every=2)
    opt.warm_start(through_a_file(before.state_dict()))
    assert same(squares_and_steps(opt), squares_and_steps(before))
    assert ("param_names" in opt.param_groups[0]) == named_now


def test_a_parameter_that_had_no_gradient_starts_anew():
    x, y = scalar(1.0), scalar(1.0)
    saved = checkpoint((1,), (1,))
    del saved["state"][1]
    opt = lowcomm.MTDAO([x, y], **ONE, sync_every=1)
    opt.warm_start(saved)
    assert opt.state[x]["exp_avg_sq"].item() == 4.0
    assert y not in opt.state
    x.grad, y.grad = torch.ones_like(x), torch.ones_like(y)
    opt.step()
    assert opt.state[x]["step"] == 4 and opt.state[y]["step"] == 1


def test_frozen_parameters_and_optimizers_without_second_moments_are_passed_over():
    def split(model, adaptive):
        model[2].bias.requires_grad_(False)
        matrices = [model[0].weight, model[2].weight]
        vectors = [model[0].bias, model[2].bias]
        return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), adaptive(vectors)]

    plain, model = network(), network()
    before = lowcomm.LocalSGD(split(plain, torch.optim.AdamW), sync_every=2)
    train(plain, before, range(3))
    opt = lowcomm.MTDAO(split(model, lowcomm.QHAdamW), sync_every=2)
    opt.warm_start(before.state_dict(), lr_factor=2.0)
    bias = model[0].bias
    assert list(opt.state) == [bias]
    assert opt.state[bias]["step"] == 3
    assert same(
        opt.state[bias]["exp_avg_sq"], before.state[plain[0].bias]["exp_avg_sq"]
    )
    assert [g["lr"] for g in opt.param_groups] == pytest.approx([0.2, 0.002])
    train(model, opt, range(3))


# Workers


def warm(model, saved, **settings):
    opt = lowcomm.MTDAO(model.parameters(), **SEVERAL, sync_every=2, **settings)
    opt.warm_start(saved, lr_factor=2.0)
    return opt


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_resumes_with_the_bits_of_a_run_that_never_stopped(num_workers, steps_before):
    plain = network()
    before = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train(plain, before, range(4))
    saved = through_a_file(before.state_dict())

    def worker(resume):
        def body(rank, group):
            model = network()
            model.load_state_dict(plain.state_dict())
            opt = warm(model, saved)
            train(model, opt, range(steps_before), rank)
            if resume:
                state = through_a_file([model.state_dict(), opt.state_dict()])
                model = network()  # loaded last: a new optimizer starts from rank 0's
                opt = lowcomm.MTDAO(model.parameters(), **SEVERAL, sync_every=2)
                model.load_state_dict(state[0])
                opt.load_state_dict(state[1])
            train(model, opt, range(steps_before, 9), rank)
            opt.finish()
            return parameters_of(model), snapshot(opt.state_dict()["state"])

        return body

    straight = lowcomm.simulate(worker(resume=False), num_workers)
    assert same(straight, lowcomm.simulate(worker(resume=True), num_workers))
    assert all(same(straight[0][0], other[0]) for other in straight)


@pytest.mark.parametrize("what", ["factor", "counter"])
def test_workers_that_start_from_something_else_are_refused_unchanged(what):
    def worker(rank, group):
        x = scalar(1.0)
        opt = lowcomm.MTDAO([x], sync_every=2)
        before = snapshot(opt.state_dict()["param_groups"])
        saved = checkpoint((1,), step=3.0 + rank if what == "counter" else 3.0)
        words = "rates of group 0" if what == "factor" else "step of 0.0"
        with pytest.raises(lowcomm.PeerMismatch, match=words):
            opt.warm_start(saved, lr_factor=2.0 + rank if what == "factor" else 2.0)
        return not opt.state and same(opt.state_dict()["param_groups"], before)

    assert lowcomm.simulate(worker, 2) == [True, True]


# Wrong calls


def without(*names):
    saved = checkpoint((2,), (3,))
    for state in saved["state"].values():
        for name in names:
            del state[name]
    return saved


def in_groups(*groups):
    return {**checkpoint((2,), (3,)), "param_groups": list(groups)}


SOUND = checkpoint((2,), (3,))
REFUSED = {
    "zero": (SOUND, 0.0, ValueError, "lr_factor must be positive, got lr_factor=0.0"),
    "negative": (SOUND, -1.0, ValueError, "lr_factor must be .*, got lr_factor=-1.0"),
    "infinite": (SOUND, math.inf, ValueError, "lr_factor must be a finite number"),
    "nan": (SOUND, math.nan, ValueError, "lr_factor must be a finite number"),
    "text": (SOUND, "4", TypeError, "lr_factor must be a number, got lr_factor='4'"),
    "a model's": (
        {"weight": torch.zeros(2)},
        1.0,
        ValueError,
        r"must have 'state' and 'param_groups', got \['weight'\]. Give what",
    ),
    "more groups": (
        in_groups({"lr": 0.1, "params": [0]}, {"lr": 0.1, "params": [1]}),
        1.0,
        ValueError,
        r"groups of as many parameters.*got \[1, 1\] with \[2\] here",
    ),
    "a larger group": (
        checkpoint((2,), (3,), (3,)),
        1.0,
        ValueError,
        r"got \[3\] with \[2\] here",
    ),
    "no rate": (
        in_groups({"params": [0, 1]}),
        1.0,
        ValueError,
        r"have an 'lr' in every group, got \['params'\] in group 0",
    ),
    "other shapes": (
        checkpoint((3,), (2,)),
        1.0,
        ValueError,
        r"parameters' shapes, got \(3,\) with \(2,\) of '0.0'",
    ),
    "a last shape": (
        checkpoint((2,), (3, 1)),
        1.0,
        ValueError,
        r"\(3, 1\) with \(3,\)",
    ),
    "no second moments": (
        without("exp_avg_sq"),
        1.0,
        ValueError,
        r"must have 'exp_avg_sq' and 'step' of a parameter, got \['exp_avg', 'step'\]",
    ),
    "no counters": (without("step"), 1.0, ValueError, r"got \['exp_avg', 'exp_avg_sq'"),
    "no state": (
        {**SOUND, "state": {}},
        1.0,
        ValueError,
        "must have second moments 'exp_avg_sq'.*got states of 0 parameters",
    ),
}


@pytest.mark.parametrize(
    ("saved", "factor", "error", "words"), REFUSED.values(), ids=REFUSED
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(
    saved, factor, error, words
):
    params = [nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (2, 3)]
    opt = lowcomm.MTDAO(params, **SEVERAL, lr=0.5, sync_every=2)
    before = snapshot(opt.state_dict())
    given = snapshot(saved)
    with pytest.raises(error, match=words):
        opt.warm_start(saved, lr_factor=factor)
    assert same(opt.state_dict(), before)
    assert not opt.state
    assert same(saved, given)
    opt.warm_start(SOUND)  # a fitting one is still taken
    assert opt.state[params[1]]["step"] == 3


def test_an_inner_optimizer_without_second_moments_is_refused():
    opt = lowcomm.MTDAO(torch.optim.SGD([scalar(1.0)], momentum=0.9), sync_every=2)
    with pytest.raises(ValueError, match="that the inner optimizer keeps too"):
        opt.warm_start(checkpoint((1,)))
    assert not opt.state


def stepped(x, opt):
    slide(x, opt)


def warmed(x, opt):
    opt.warm_start(checkpoint((1,)))


def loaded_inside(x, opt):
    plain = lowcomm.QHAdamW([scalar(1.0)])
    slide(plain.param_groups[0]["params"][0], plain)
    opt.inner.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("earlier", [stepped, warmed, loaded_inside])
def test_a_call_on_an_optimizer_with_state_is_refused_and_changes_nothing(earlier):
    x = scalar(1.0)
    opt = lowcomm.MTDAO([x], sync_every=4)
    earlier(x, opt)
    before = snapshot(opt.state_dict())
    with pytest.raises(RuntimeError, match="warm_start must be called on a new opt"):
        opt.warm_start(checkpoint((1,)), lr_factor=4.0)
    assert same(opt.state_dict(), before)
