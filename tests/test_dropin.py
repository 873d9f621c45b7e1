"""Whatever torch users do with an optimizer, they can do with every method.

A new method joins all of it by one line in `METHODS`.
"""

import copy
import functools
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import lowcomm
from toy import (
    inner_state_of,
    loss_of,
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


class Method(NamedTuple):
    make: Callable
    # After a first exchange the parameters are start + gain * (mean - start).
    gain: float
    # It averages the inner optimizer's states too, so it must know them.
    averages_states: bool = False


METHODS = {
    "LocalSGD": Method(lowcomm.LocalSGD, 1.0),
    "LocalSGD-states": Method(
        functools.partial(lowcomm.LocalSGD, average_states=True), 1.0, True
    ),
    "DiLoCo": Method(lowcomm.DiLoCo, 0.7 * (1 + 0.9)),
    "DiLoCo-heavy-ball": Method(
        functools.partial(lowcomm.DiLoCo, outer_lr=0.5, nesterov=False), 0.5
    ),
    "SlowMo": Method(lowcomm.SlowMo, 1.0),
    "DESLOC": Method(lowcomm.DESLOC, 1.0, True),
    "NoLoCo": Method(lowcomm.NoLoCo, 0.7),
}
NEVER = 10**6  # a period that no test reaches: what happens is the inner optimizer's


@pytest.fixture(params=METHODS.values(), ids=METHODS.keys())
def method(request):
    return request.param


# The table: what torch's users do, by name, for each thing that calls itself one


def a_scheduler_attaches(make):
    opt = make(network())
    assert isinstance(opt, torch.optim.Optimizer)
    scheduler = lr_scheduler.StepLR(opt, 1, gamma=0.5)
    opt.step()
    scheduler.step()
    assert [group["lr"] for group in opt.param_groups] == [0.025] * len(
        opt.param_groups
    )


def a_new_rate_acts_after_loading(make):
    model = network()
    opt = make(model)
    train(model, opt, range(1))
    opt.load_state_dict(opt.state_dict())
    for group in opt.param_groups:
        group["lr"] = 0.0
    before = parameters_of(model)
    train(model, opt, range(1, 2))
    torch.testing.assert_close(parameters_of(model), before)


def a_step_hook_is_called(make):
    model, calls = network(), []
    opt = make(model)
    opt.register_step_pre_hook(lambda *_: calls.append("before"))
    opt.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, opt, range(1))
    assert calls == ["before", "after"]


def a_closure_gives_its_loss(make):
    model = network()
    opt = make(model)

    def closure():
        opt.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    assert torch.equal(opt.step(closure), loss_of(network(), 0))


def defaults_are_there(make):
    assert "lr" in make(network()).defaults


def a_deep_copy_goes_its_own_way(make):
    model = network()
    opt = make(model)
    train(model, opt, range(1))
    model2, opt2 = copy.deepcopy((model, opt))
    before = parameters_of(model)
    train(model2, opt2, range(1, 5))
    assert same(parameters_of(model), before)
    train(model, opt, range(1, 5))
    assert same(parameters_of(model), parameters_of(model2))


def a_scaler_steps_it(make):
    model, other = network(), network()
    train(other, make(other), range(5))
    opt, scaler = make(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(5):
        opt.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(opt)
        scaler.update()
    # Not in its bits: torch's own fused step divides by the scale as it goes.
    torch.testing.assert_close(parameters_of(model), parameters_of(other))


def a_resumed_run_has_the_same_bits(make):
    model = network()
    opt = make(model)
    train(model, opt, range(4))
    state = through_a_file([model.state_dict(), opt.state_dict()])
    train(model, opt, range(4, 9))
    other = network(seed=1)
    resumed = make(other)
    other.load_state_dict(state[0])
    resumed.load_state_dict(state[1])
    train(other, resumed, range(4, 9))
    assert same(parameters_of(model), parameters_of(other))


ROWS = [
    a_scheduler_attaches,
    a_new_rate_acts_after_loading,
    a_step_hook_is_called,
    a_closure_gives_its_loss,
    defaults_are_there,
    a_deep_copy_goes_its_own_way,
    a_scaler_steps_it,
    a_resumed_run_has_the_same_bits,
]


class Alone:
    """An averager of torch's that has no one to average with."""

    step = 0

    def average_parameters(self, params):
        self.step += 1


def torchs_local_sgd(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing it scripts functions
        from torch.distributed.optim import PostLocalSGDOptimizer
    return PostLocalSGDOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.05), Alone()
    )


def muon_and_adamw(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    return [
        torch.optim.Muon(matrices, lr=0.05),
        torch.optim.AdamW(vectors, lr=0.05),
    ]


def over_adamw(make, **settings):
    return lambda model: make(model.parameters(), lr=0.05, sync_every=3, **settings)


COLUMNS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
    **{name: over_adamw(method.make) for name, method in METHODS.items()},
    "DiLoCo-streaming": over_adamw(
        # Alone, its rounds then change nothing beyond rounding.
        lowcomm.DiLoCo,
        fragments=3,
        overlap=1,
        outer_lr=1.0,
        outer_momentum=0.0,
    ),
    "DiLoCo-eager": over_adamw(lowcomm.DiLoCo, eager=True),
    "DiLoCo-int8": over_adamw(lowcomm.DiLoCo, codec="int8", error_feedback=True),
    "LocalSGD-fused": over_adamw(lowcomm.LocalSGD, fused=True),
    "MTDAO": over_adamw(lowcomm.MTDAO),
}
if hasattr(torch.optim, "Muon"):  # of torch 2.9
    COLUMNS["Muon-and-AdamW"] = lambda m: lowcomm.DiLoCo(
        muon_and_adamw(m), sync_every=3
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
@pytest.mark.parametrize("make", COLUMNS.values(), ids=COLUMNS.keys())
def test_a_row_of_the_drop_in_table(row, make):
    row(make)


def test_every_method_has_a_column():
    columns = {type(make(network())) for make in COLUMNS.values()}
    exported = {getattr(lowcomm, name) for name in lowcomm.__all__}
    wrapper = lowcomm.LocalSGD.__mro__[1]
    methods = {t for t in exported if isinstance(t, type) and issubclass(t, wrapper)}
    assert methods <= columns


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
def test_the_table_tells_what_is_not_drop_in(row):
    """By torch's own wrapper, of which it is known what it lacks."""
    if row in {
        a_scheduler_attaches,
        a_scaler_steps_it,
        a_resumed_run_has_the_same_bits,
    }:
        row(torchs_local_sgd)
    else:
        with pytest.raises((AssertionError, AttributeError, TypeError)):
            row(torchs_local_sgd)


# Being an optimizer


def test_is_an_optimizer_and_shares_its_innards_with_the_inner_one(method):
    model = network()
    opt = method.make(model.parameters(), lr=0.1, weight_decay=0.2, sync_every=2)
    assert isinstance(opt, torch.optim.Optimizer)
    assert type(opt.inner) is torch.optim.AdamW
    for _ in range(2):
        assert opt.param_groups is opt.inner.param_groups
        assert opt.state is opt.inner.state
        assert opt.defaults is opt.inner.defaults
        train(model, opt, range(3))
        opt.load_state_dict(opt.state_dict())
    assert opt.defaults["weight_decay"] == 0.2
    assert [id(p) for p in opt.param_groups[0]["params"]] == [
        id(p) for p in model.parameters()
    ]


def test_wraps_the_optimizer_it_is_given(method):
    model = network()
    inner = torch.optim.RMSprop(model.parameters(), lr=0.1)
    opt = method.make(inner, sync_every=2)
    assert opt.inner is inner
    assert opt.param_groups is inner.param_groups


def test_only_the_inner_optimizers_own_entries_are_in_the_state(method):
    """An extra entry in the state breaks loaders that walk it."""
    model = network()
    plain = network()
    bare = torch.optim.AdamW(plain.parameters(), lr=0.1)
    opt = method.make(model.parameters(), lr=0.1, sync_every=2)
    train(plain, bare, range(3))
    train(model, opt, range(3))
    assert len(opt.state) == len(bare.state)
    for own, entries in zip(opt.state.values(), bare.state.values(), strict=True):
        assert own.keys() == entries.keys()


@pytest.mark.parametrize("sync_every", [1, 2, NEVER])
def test_the_inner_optimizer_takes_one_step_for_each_step(method, sync_every):
    """An outer step that went through the inner optimizer would count double."""
    model = network()
    opt = method.make(model.parameters(), lr=0.1, sync_every=sync_every)
    train(model, opt, range(5))
    assert [state["step"] for state in inner_state_of(opt)] == [5] * 4
    assert opt.stats.steps == 5


def test_several_groups_are_still_one_step(method):
    model = network()
    opt = method.make(
        [{"params": [p], "lr": 0.01 * i} for i, p in enumerate(model.parameters())],
        sync_every=3,
    )
    train(model, opt, range(5))
    assert opt.stats.steps == 5
    assert [group["lr"] for group in opt.param_groups] == [0.0, 0.01, 0.02, 0.03]


def test_between_exchanges_the_bits_are_those_of_the_inner_optimizer(method):
    plain, wrapped = network(dtype=torch.bfloat16), network(dtype=torch.bfloat16)
    train(
        plain,
        torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=1e-2),
        range(20),
    )
    opt = method.make(
        wrapped.parameters(), lr=1e-3, weight_decay=1e-2, sync_every=NEVER
    )
    train(wrapped, opt, range(20))
    assert same(parameters_of(plain), parameters_of(wrapped))


def test_repr_names_the_method_and_shows_the_groups(method):
    opt = method.make([scalar(1.0)], lr=0.125, sync_every=3)
    assert repr(opt).startswith(type(opt).__name__)
    assert "lr: 0.125" in repr(opt)


def test_zero_grad_forgets_or_zeroes(method):
    model = network()
    opt = method.make(model.parameters(), lr=0.1, sync_every=1)
    train(model, opt, range(2))
    assert all(p.grad is not None for p in model.parameters())
    opt.zero_grad(set_to_none=False)
    assert all(p.grad.count_nonzero() == 0 for p in model.parameters())
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_building_it_again_over_the_same_parameters_works(method):
    """A notebook cell that runs twice, and leaves nothing of the first one behind."""
    model, earlier = network(), []
    for _ in range(2):
        opt = method.make(model.parameters(), lr=0.1, sync_every=2)
        train(model, opt, range(3))
        earlier.append(weakref.ref(opt))
    assert opt.stats.steps == 3
    gc.collect()
    assert [ref() for ref in earlier] == [None, opt]


# Learning rate schedulers

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.CosineAnnealingLR(o, 4)],
        milestones=[2],
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(
        o, 2
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, 2.0),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=3),
}


def test_no_scheduler_of_torch_is_left_out():
    assert set(lr_scheduler.__all__) - {"LRScheduler"} <= set(SCHEDULERS)


def scheduled_run(model, opt, make_scheduler):
    scheduler, seen = make_scheduler(opt), []
    for step in range(7):
        train(model, opt, range(step, step + 1))
        plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*[1.0] if plateau else [])
        seen.append([(group["lr"], group["betas"]) for group in opt.param_groups])
    return seen


@pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_every_scheduler_drives_it_like_the_inner_optimizer(method, make_scheduler):
    """Also silently: no warning that the optimizer had not stepped before."""
    plain, wrapped = network(), network()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # SequentialLR's own word on itself, before torch 2.7.
        warnings.filterwarnings("ignore", "The epoch parameter in `scheduler.step")
        expected = scheduled_run(
            plain, torch.optim.AdamW(plain.parameters(), lr=0.02), make_scheduler
        )
        opt = method.make(wrapped.parameters(), lr=0.02, sync_every=NEVER)
        assert scheduled_run(wrapped, opt, make_scheduler) == expected
    assert same(parameters_of(plain), parameters_of(wrapped))
    assert opt.stats.steps == 7


def test_the_cosine_schedule_of_transformers_attaches(method):
    transformers = pytest.importorskip("transformers")
    opt = method.make([x := scalar(1.0)], lr=0.1, sync_every=2)
    scheduler = transformers.get_cosine_schedule_with_warmup(opt, 2, 6)
    seen = []
    for _ in range(4):
        slide(x, opt)
        scheduler.step()
        seen.append(opt.param_groups[0]["lr"])
    # Up to the full rate in two steps, then the cosine: half a turn over four steps.
    assert seen == pytest.approx([0.05, 0.1, 0.1 * (1 + 0.5**0.5) / 2, 0.05])


def test_the_schedule_of_the_inner_rate_leaves_the_outer_rate_alone():
    x = scalar(0.0)
    opt = lowcomm.DiLoCo(
        torch.optim.SGD([x], lr=1.0), sync_every=2, outer_lr=0.5, outer_momentum=0.0
    )
    scheduler = lr_scheduler.StepLR(opt, 2, gamma=0.5)
    seen = []
    for _ in range(4):
        slide(x, opt)
        scheduler.step()
        seen.append(x.item())
    # Round 1 at rate 1 walks -2, half of it stays; round 2 at rate 1/2 walks -1.
    assert seen == [-1.0, -1.0, -1.5, -1.5]
    assert opt.outer_lr == 0.5


def test_a_scheduler_attached_to_the_inner_optimizer_before_still_drives_it(method):
    x = scalar(0.0)
    inner = torch.optim.SGD([x], lr=1.0)
    scheduler = lr_scheduler.StepLR(inner, 1, gamma=0.5)
    opt = method.make(inner, sync_every=NEVER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            slide(x, opt)
            scheduler.step()
    assert x.item() == -1.75


# Hooks


def test_step_hooks_run_once_around_the_whole_step(method):
    x, calls = scalar(1.0), []
    inner = torch.optim.SGD([x], lr=1.0)
    inner.register_step_post_hook(lambda *_: calls.append("inner"))
    opt = method.make(inner, sync_every=1)
    opt.register_step_pre_hook(lambda o, args, kwargs: calls.append(("pre", o)))
    opt.register_step_post_hook(
        lambda o, args, kwargs: calls.append(("post", o, o.stats.rounds > 0))
    )
    slide(x, opt)
    assert calls == [("pre", opt), "inner", ("post", opt, True)]


def test_a_removed_hook_is_silent(method):
    calls = []
    opt = method.make([x := scalar(1.0)], lr=0.1, sync_every=1)
    opt.register_step_post_hook(lambda *_: calls.append(1)).remove()
    slide(x, opt)
    assert calls == []


def test_a_step_pre_hook_may_replace_the_arguments(method):
    opt = method.make([scalar(1.0)], lr=0.1, sync_every=1)
    opt.register_step_pre_hook(lambda o, args, kwargs: ((o, lambda: 7.0), {}))
    assert opt.step() == 7.0


def test_state_dict_hooks_run_and_may_replace_the_dictionary(method):
    opt = method.make([x := scalar(1.0)], lr=0.1, sync_every=2)
    slide(x, opt)
    calls = []
    opt.register_state_dict_pre_hook(lambda o: calls.append("before saving"))
    opt.register_state_dict_post_hook(lambda o, state: {**state, "note": "mine"})
    state = opt.state_dict()
    assert state["note"] == "mine"

    def strip(o, state):
        calls.append("before loading")
        return {key: value for key, value in state.items() if key != "note"}

    opt.register_load_state_dict_pre_hook(strip)
    opt.register_load_state_dict_post_hook(lambda o: calls.append("after loading"))
    opt.load_state_dict(state)
    assert calls == ["before saving", "before loading", "after loading"]


# The compiler


@pytest.mark.parametrize("what", ["inner", "whole", "loop"])
def test_a_compiled_step_is_the_inner_optimizers_and_the_exchange_no_graph(what):
    """Traced, an exchange would fail, or run when it is traced."""

    def go(opt, model, compiled):
        def turn(step):
            opt.zero_grad()
            loss_of(model, step, 0).backward()
            opt.step()

        scheduler = lr_scheduler.ExponentialLR(opt, 0.9)  # takes no compiled step
        if compiled == "inner":
            opt.inner.step = torch.compile(opt.inner.step, backend="aot_eager")
        if compiled == "whole":
            opt.step = torch.compile(opt.step, backend="aot_eager")
        if compiled == "loop":
            turn = torch.compile(turn, backend="aot_eager")
        for step in range(5):
            turn(step)
            scheduler.step()
        return opt.stats.rounds, parameters_of(model)

    results = []
    for compiled in (None, what):
        torch.compiler.reset()
        model = network()
        # A rate in a tensor: a number would be compiled anew when it changes.
        rate = torch.tensor(0.05, dtype=torch.float64)
        inner = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        opt = lowcomm.DiLoCo(inner, sync_every=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append(go(opt, model, compiled))
    torch.testing.assert_close(results[1], results[0])


# Closures


def test_a_closure_is_called_as_often_as_by_sgd_and_its_loss_returned(method):
    model, calls = network(), []
    opt = method.make(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=1)

    def closure():
        opt.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        calls.append(loss.item())
        return loss

    losses = [opt.step(closure).item() for _ in range(4)]
    assert losses == calls
    assert losses[-1] < losses[0]
    assert opt.stats.steps == 4


@pytest.mark.parametrize("sync_every", [2, NEVER])
def test_lbfgs_calls_its_closure_as_often_as_it_likes(sync_every):
    def run(wrap):
        model, calls = network(), []
        opt = wrap(torch.optim.LBFGS(model.parameters(), max_iter=5))

        def closure():
            opt.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            calls.append(loss.item())
            return loss

        losses = [opt.step(closure).item() for _ in range(3)]
        return calls, losses, parameters_of(model)

    bare = run(lambda inner: inner)
    wrapped = run(lambda inner: lowcomm.LocalSGD(inner, sync_every=sync_every))
    assert len(bare[0]) > 3
    assert same(bare, wrapped)


def test_lbfgs_under_an_outer_step_counts_one_step_a_call():
    model = network()
    opt = lowcomm.DiLoCo(
        torch.optim.LBFGS(model.parameters(), max_iter=5), sync_every=2
    )

    def closure():
        opt.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    before = loss_of(model, 0).item()
    for _ in range(4):
        opt.step(closure)
    assert (opt.stats.steps, opt.stats.rounds) == (4, 2)
    assert loss_of(model, 0).item() < before


# Loss scaling

INNERS = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.05),
    "fused-AdamW": functools.partial(torch.optim.AdamW, lr=0.05, fused=True),
    "SGD": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
}


def scaled_loop(model, opt, *, steps, unscale=False, poisoned=(), rank=0):
    """A textbook loop with a scaler; the gradients of `poisoned` steps are infinite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    scales = []
    for step in range(steps):
        opt.zero_grad()
        scaler.scale(loss_of(model, step, rank)).backward()
        if step in poisoned:
            next(model.parameters()).grad[0, 0] = torch.inf
        if unscale:
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(opt)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("inner", INNERS.values(), ids=INNERS.keys())
@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled-by-user"])
@pytest.mark.parametrize("poisoned", [(), (2, 5)], ids=["finite", "overflows"])
def test_a_scaled_loop_is_that_of_the_inner_optimizer(method, inner, unscale, poisoned):
    plain = network(dtype=torch.float32)
    bare = inner(plain.parameters())
    expected = scaled_loop(plain, bare, steps=8, unscale=unscale, poisoned=poisoned)
    wrapped = network(dtype=torch.float32)
    opt = method.make(inner(wrapped.parameters()), sync_every=NEVER)
    scales = scaled_loop(wrapped, opt, steps=8, unscale=unscale, poisoned=poisoned)
    assert scales == expected
    assert same(parameters_of(plain), parameters_of(wrapped))
    assert same(inner_state_of(bare), inner_state_of(opt))
    assert opt.stats.steps == 8  # a skipped step is an attempted one


@pytest.mark.parametrize("inner", INNERS.values(), ids=INNERS.keys())
@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled-by-user"])
def test_an_overflow_on_one_worker_leaves_the_workers_in_phase(method, inner, unscale):
    """Counting only the steps that were taken would pair different rounds."""

    def worker(rank, group):
        model = network(dtype=torch.float32)
        opt = method.make(inner(model.parameters()), sync_every=4)
        scaled_loop(
            model,
            opt,
            steps=12,
            unscale=unscale,
            poisoned=(1, 7) if rank == 1 else (),
            rank=rank,
        )
        return opt.stats.steps, opt.stats.rounds, parameters_of(model)

    first, second = lowcomm.simulate(worker, 2)
    assert first[0] == second[0] == 12
    assert first[1] == second[1] >= 3
    assert all(t.isfinite().all() for t in first[2])
    assert same(first[2], second[2])


def test_a_scaled_loop_over_several_optimizers_skips_all_or_none(method):
    model = network(dtype=torch.float32)
    opt = method.make(matrices_and_vectors(model), sync_every=NEVER)
    start = parameters_of(model)
    # Infinite in a matrix only; the vectors' optimizer must hold still too.
    scaled_loop(model, opt, steps=1, poisoned=(0,))
    assert same(parameters_of(model), start)
    scaled_loop(model, opt, steps=1)
    assert not any(
        torch.equal(a, b) for a, b in zip(parameters_of(model), start, strict=True)
    )
    assert opt.stats.steps == 2


def test_a_disabled_scaler_is_no_scaler(method):
    plain, wrapped = network(), network()
    train(plain, method.make(plain.parameters(), lr=0.1, sync_every=2), range(4))
    opt = method.make(wrapped.parameters(), lr=0.1, sync_every=2)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(4):
        opt.zero_grad()
        scaler.scale(loss_of(wrapped, step)).backward()
        scaler.step(opt)
        scaler.update()
    assert same(parameters_of(plain), parameters_of(wrapped))


# Copies


def copied(pair):
    return copy.deepcopy(pair)


def pickled(pair):
    return pickle.loads(pickle.dumps(pair))


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("duplicate", [copied, pickled])
@pytest.mark.parametrize("steps_before", [0, 3, 4])
def test_a_copy_goes_on_like_the_original(method, duplicate, steps_before, scheduled):
    model = network()
    opt = method.make(model.parameters(), lr=0.1, sync_every=2)
    if scheduled:
        lr_scheduler.StepLR(opt, 100)
    train(model, opt, range(steps_before))
    model2, opt2 = duplicate((model, opt))
    assert type(opt2) is type(opt)
    assert opt2.param_groups is opt2.inner.param_groups
    assert opt2.state is opt2.inner.state
    assert {p.data_ptr() for p in model.parameters()}.isdisjoint(
        p.data_ptr() for p in model2.parameters()
    )
    frozen_in_time = parameters_of(model)
    train(model2, opt2, range(steps_before, 8))
    assert same(parameters_of(model), frozen_in_time)
    train(model, opt, range(steps_before, 8))
    assert same(parameters_of(model), parameters_of(model2))
    assert opt.stats.steps == opt2.stats.steps == 8


def test_a_copy_of_the_optimizer_alone_owns_its_parameters(method):
    x = scalar(1.0)
    opt = method.make(torch.optim.SGD([x], lr=1.0), sync_every=2)
    slide(x, opt)
    copied_opt = copy.deepcopy(opt)
    (y,) = copied_opt.param_groups[0]["params"]
    slide(y, copied_opt)
    assert x.item() == 0.0
    slide(x, opt)
    assert x.item() == y.item()


def test_copies_among_workers_go_on_like_the_originals(method):
    def worker(rank, group):
        model = network()
        opt = method.make(model.parameters(), lr=0.1, sync_every=3)
        train(model, opt, range(4), rank)
        model2, opt2 = copy.deepcopy((model, opt))
        train(model2, opt2, range(4, 8), rank)
        train(model, opt, range(4, 8), rank)
        return parameters_of(model), parameters_of(model2)

    for original, duplicate in lowcomm.simulate(worker, 2):
        assert same(original, duplicate)


# Ways to name the parameters


def groups_of_generators(model):
    return [
        {"params": (p for p in model[0].parameters())},
        {"params": (p for p in model[2].parameters()), "lr": 0.1},
    ]


WAYS = {
    "list": lambda model: list(model.parameters()),
    "generator": lambda model: model.parameters(),
    "named": lambda model: model.named_parameters(),
    "named-list": lambda model: list(model.named_parameters()),
    "groups": lambda model: [
        {"params": list(model[0].parameters())},
        {"params": list(model[2].parameters())},
    ],
    "groups-in-a-generator": lambda model: (
        {"params": list(layer.parameters())} for layer in (model[0], model[2])
    ),
    "generators-in-groups": groups_of_generators,
    "named-in-groups": lambda model: [
        {"params": list(model[0].named_parameters(prefix="0"))},
        {"params": list(model[2].named_parameters(prefix="2"))},
    ],
    "tensor-in-a-group": lambda model: [{"params": p} for p in model.parameters()],
    "built": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "built-named": lambda model: torch.optim.AdamW(model.named_parameters(), lr=0.1),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_every_way_to_give_the_parameters_synchronizes_all_of_them(method, way):
    """A generator that was read once before would leave nothing to synchronize."""

    def worker(rank, group):
        model, reference = network(), network()
        first = way(model)
        inner = {} if isinstance(first, torch.optim.Optimizer) else {"lr": 0.1}
        opt = method.make(first, **inner, sync_every=3)
        train(model, opt, range(7), rank)
        opt = method.make(list(reference.parameters()), lr=0.1, sync_every=3)
        train(reference, opt, range(7), rank)
        return parameters_of(model), parameters_of(reference)

    for given, expected in lowcomm.simulate(worker, 2):
        assert same(given, expected)


def test_names_arrive_in_the_groups_as_in_torch(method):
    model = network()
    opt = method.make(model.named_parameters(), lr=0.1, sync_every=2)
    assert opt.param_groups[0]["param_names"] == [
        name for name, _ in model.named_parameters()
    ]


# Several optimizers


def matrices_and_vectors(model):
    return [
        torch.optim.SGD(
            [p for p in model.parameters() if p.ndim == 2], lr=0.1, momentum=0.9
        ),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], lr=0.05),
    ]


def test_a_list_of_optimizers_is_one_synchronized_unit(method):
    def worker(rank, group):
        model = network()
        inner = matrices_and_vectors(model)
        opt = method.make(inner, sync_every=3)
        assert isinstance(opt, torch.optim.Optimizer)
        assert opt.inner == tuple(inner)
        train(model, opt, range(5), rank)
        between = parameters_of(model)
        train(model, opt, range(5, 6), rank)
        assert opt.stats.steps == 6
        return between, parameters_of(model)

    (between0, after0), (between1, after1) = lowcomm.simulate(worker, 2)
    assert not same(between0, between1)
    assert same(after0, after1)


def test_a_list_of_optimizers_steps_each_of_them(method):
    plain, wrapped = network(), network()
    first, second = matrices_and_vectors(plain)
    for step in range(4):
        plain.zero_grad()
        loss_of(plain, step).backward()
        first.step()
        second.step()
    train(
        wrapped, method.make(matrices_and_vectors(wrapped), sync_every=NEVER), range(4)
    )
    assert same(parameters_of(plain), parameters_of(wrapped))


def test_a_scheduler_reaches_every_optimizer_of_a_list(method):
    model = network()
    opt = method.make(matrices_and_vectors(model), sync_every=2)
    scheduler = lr_scheduler.StepLR(opt, 1, gamma=0.5)
    train(model, opt, range(1))
    scheduler.step()
    assert [g["lr"] for g in opt.param_groups] == [0.05, 0.025]
    assert [inner.param_groups[0]["lr"] for inner in opt.inner] == [0.05, 0.025]
    opt.load_state_dict(opt.state_dict())
    opt.param_groups[1]["lr"] = 0.5
    assert opt.inner[1].param_groups[0]["lr"] == 0.5


def test_a_list_of_optimizers_refuses_a_new_group_and_says_what_to_do(method):
    model = network()
    opt = method.make(matrices_and_vectors(model), sync_every=2)
    with pytest.raises((TypeError, ValueError), match="add_param_group") as caught:
        opt.add_param_group({"params": [scalar(1.0)]})
    assert "inner" in str(caught.value) or "optimizers" in str(caught.value)


# States in codes, as 8-bit optimizers have them


class Coded(torch.Tensor):
    """Values in 8 bits with a scale, which know no more than what their optimizer asks.

    As those of torchao: they can be neither copied nor healed as a whole.
    """

    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["codes"], parts["scale"])

    def __reduce_ex__(self, protocol):
        return Coded, (self.codes, self.scale)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{function} of a Coded")


torch.serialization.add_safe_globals([Coded])


class CodedMomentum(torch.optim.Optimizer):
    """SGD with its momentum in codes."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                values = self.values(state) if state else torch.zeros_like(p)
                values = 0.9 * values + p.grad
                scale = values.abs().amax() / 127
                codes = (values / scale.clamp_min(1e-30)).round().to(torch.int8)
                self.keep(state, codes, scale)
                p.sub_(self.values(state), alpha=group["lr"])

    def keep(self, state, codes, scale):
        state["momentum_buffer"] = Coded(codes, scale)

    def values(self, state):
        coded = state["momentum_buffer"]
        return coded.codes.to(coded.scale.dtype) * coded.scale


class PackedMomentum(CodedMomentum):
    """The same in plain tensors, which are saved under a key of their own.

    As those of bitsandbytes.
    """

    def keep(self, state, codes, scale):
        state |= {"momentum_buffer": codes, "scale": scale}

    def values(self, state):
        return state["momentum_buffer"].to(state["scale"].dtype) * state["scale"]

    def state_dict(self):
        saved = super().state_dict()
        packed = {i: {"packed": dict(s)} for i, s in saved["state"].items()}
        return {**saved, "state": packed}

    def load_state_dict(self, state_dict):
        state = {i: s["packed"] for i, s in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": {}})
        params = [p for group in self.param_groups for p in group["params"]]
        self.state.update({params[i]: s for i, s in state.items()})


CODED = [CodedMomentum, PackedMomentum]


@pytest.mark.parametrize("inner", CODED)
def test_states_in_codes_resume_with_the_same_bits(inner):
    def make(model):
        return lowcomm.DiLoCo(inner(model.named_parameters()), sync_every=3)

    a_resumed_run_has_the_same_bits(make)


@pytest.mark.parametrize("inner", CODED)
def test_states_in_codes_are_loaded_as_copies(inner):
    model = network()
    opt = lowcomm.DiLoCo(inner(model.parameters()), sync_every=3)
    train(model, opt, range(2))
    state = opt.state_dict()
    other = network()
    loaded = lowcomm.DiLoCo(inner(other.parameters()), sync_every=3)
    loaded.load_state_dict(state)
    for mine, own in zip(opt.state.values(), loaded.state.values(), strict=True):
        for key in mine:
            parts = getattr(mine[key], "codes", mine[key])
            copies = getattr(own[key], "codes", own[key])
            assert parts.data_ptr() != copies.data_ptr() and same(parts, copies)


@pytest.mark.parametrize("inner", CODED)
def test_states_in_codes_are_in_a_checkpoint_as_they_were(inner, tmp_path):
    def build():
        model = network()
        opt = lowcomm.DiLoCo(inner(model.parameters()), sync_every=3)
        return model, opt, lowcomm.Checkpointer(tmp_path, model=model, optimizer=opt)

    model, opt, ckpt = build()
    train(model, opt, range(4))
    ckpt.save(4)
    train(model, opt, range(4, 5))  # beside the writing
    ckpt.save(5)  # into the memory of the one before
    train(model, opt, range(5, 9))
    ckpt.wait()
    other, resumed, ckpt = build()
    assert ckpt.load() == 5
    train(other, resumed, range(5, 9))
    assert same(parameters_of(model), parameters_of(other))


class UnknownCoded(Coded):
    """One that torch.load makes none of."""


def test_a_checkpoint_that_could_not_be_loaded_is_not_written(tmp_path):
    model = network()
    opt = CodedMomentum(model.parameters())
    train(model, opt, range(1))
    for state in opt.state.values():
        coded = state["momentum_buffer"]
        state["momentum_buffer"] = UnknownCoded(coded.codes, coded.scale)
    ckpt = lowcomm.Checkpointer(tmp_path, model=model, optimizer=opt)
    with pytest.raises(TypeError, match="UnknownCoded at optimizer.*add_safe_globals"):
        ckpt.save(1)


@pytest.mark.parametrize("inner", CODED)
def test_a_worker_whose_states_in_codes_are_not_finite_heals(inner):
    def worker(rank, group):
        model = network()
        opt = lowcomm.DiLoCo(inner(model.parameters()), sync_every=2)
        train(model, opt, range(2), rank)
        next(model.parameters()).grad.fill_(torch.nan if rank else 1.0)
        opt.step()
        train(model, opt, range(3, 8), rank)
        return parameters_of(model)

    first, second = lowcomm.simulate(worker, 2)
    assert same(first, second)
    assert all(t.isfinite().all() for t in first)


class LargeOnlyMomentum(CodedMomentum):
    """Codes for large parameters only, as 8-bit optimizers have."""

    def keep(self, state, codes, scale):
        values = codes.to(scale.dtype) * scale
        state["momentum_buffer"] = codes if codes.numel() > 12 else values
        state["scale"] = scale

    def values(self, state):
        buffer = state["momentum_buffer"]
        return buffer if buffer.dtype == torch.float64 else buffer * state["scale"]


@pytest.mark.parametrize("inner", [CodedMomentum, LargeOnlyMomentum])
def test_states_in_codes_are_not_averaged(inner):
    """A mean of codes with different scales is nothing."""
    model = network()
    with pytest.raises(ValueError, match=r"floating-point.*parameters only"):
        opt = lowcomm.LocalSGD(
            inner(model.parameters()), sync_every=2, average_states=True
        )
        train(model, opt, range(3))


# New groups


@pytest.mark.parametrize("steps_before", [0, 4], ids=["at-once", "after-a-round"])
def test_an_added_group_starts_from_rank_zero_and_is_synchronized(method, steps_before):
    def worker(rank, group):
        x, y = scalar(1.0), scalar(5.0 if rank == 0 else 9.0)
        opt = method.make(torch.optim.SGD([x], lr=0.1), sync_every=4)
        for _ in range(steps_before):
            slide(x, opt, rank)
        opt.add_param_group({"params": [y], "lr": 1.0})
        assert opt.param_groups[1]["lr"] == 1.0
        y.grad = torch.zeros_like(y)
        slide(x, opt, rank)
        started = y.item()
        for _ in range(3):
            y.grad = torch.full_like(y, 1.0 + rank)
            slide(x, opt, rank)
        return started, x.item(), y.item()

    first, second = lowcomm.simulate(worker, 2)
    assert first[0] == second[0] == 5.0
    assert first[1:] == second[1:]
    # Three steps of 1 and of 2 away from 5: mean displacement -4.5.
    assert first[2] == pytest.approx(5.0 - 4.5 * method.gain)


def test_a_group_added_in_mid_round_is_synchronized_from_the_next_round(method):
    def worker(rank, group):
        x, y = scalar(1.0), scalar(5.0)
        opt = method.make(torch.optim.SGD([x], lr=0.1), sync_every=4)
        for _ in range(2):
            slide(x, opt, rank)
        opt.add_param_group({"params": [y]})
        for _ in range(6):
            y.grad = torch.full_like(y, 1.0 + rank)
            slide(x, opt, rank)
        return x.item(), y.item()

    first, second = lowcomm.simulate(worker, 2)
    assert first == second
    assert first[1] != 5.0


def test_an_added_group_is_saved_and_resumed(method):
    def build(num_groups):
        parameters = [scalar(float(i)) for i in range(num_groups)]
        opt = method.make(torch.optim.SGD(parameters[:1], lr=0.1), sync_every=2)
        for p in parameters[1:]:
            opt.add_param_group({"params": [p]})
        return parameters, opt

    def go(parameters, opt, steps):
        for step in steps:
            for i, p in enumerate(parameters):
                p.grad = torch.full_like(p, 1.0 + i + step)
            opt.step()

    straight, opt = build(2)
    go(straight, opt, range(5))
    state, values = through_a_file([opt.state_dict(), [p.data for p in straight]])
    resumed, opt2 = build(2)
    for p, value in zip(resumed, values, strict=True):
        p.data.copy_(value)
    opt2.load_state_dict(state)
    go(straight, opt, range(5, 9))
    go(resumed, opt2, range(5, 9))
    assert same([p.data for p in straight], [p.data for p in resumed])


# Odd parameters


def displaced(parameters, method, *, inner=None, frozen=()):
    """Two workers move every element by their own amount; returns start and results.

    Element i of a tensor moves by -(i + 1) / 64 on worker 0 and by three times as much
    on worker 1, exactly representable also in narrow types.
    """

    def worker(rank, group):
        ps = parameters()
        begin = snapshot(ps)
        opt = method.make(
            (inner or functools.partial(torch.optim.SGD, lr=1.0))(ps), sync_every=1
        )
        for i, p in enumerate(ps):
            if i in frozen:
                continue
            steps = (torch.arange(p.numel(), dtype=torch.float64) + 1) / 64
            p.grad = torch.empty_like(p).copy_(
                (steps * (1 + 2 * rank)).reshape(p.shape).to(p.dtype)
            )
        opt.step()
        return begin, snapshot(ps)

    return lowcomm.simulate(worker, 2)


def assert_averaged(results, gain, *, frozen=()) -> None:
    (begin, first), (_, second) = results
    for i, (x, a, b) in enumerate(zip(begin, first, second, strict=True)):
        assert torch.equal(a, b)
        assert a.dtype == x.dtype
        moved = (torch.arange(x.numel(), dtype=torch.float64) + 1) / 32
        moved = torch.zeros_like(moved) if i in frozen else moved
        expected = x.double() - gain * moved.reshape(x.shape)
        rounding = 2 * torch.finfo(x.dtype).eps
        torch.testing.assert_close(a.double(), expected, rtol=rounding, atol=rounding)


def filled(*shape, dtype=torch.float64):
    return nn.Parameter(torch.ones(shape, dtype=dtype))


ODD = {
    "zero-dimensional": lambda: [filled(), filled(3)],
    "zero-size": lambda: [filled(0), filled(3), filled(2, 0, 4)],
    "only-zero-size": lambda: [filled(0)],
    "one-element": lambda: [filled(1)],
    "four-dimensional": lambda: [filled(2, 3, 2, 2)],
    "channels-last": lambda: [
        nn.Parameter(
            torch.ones(2, 3, 4, 5, dtype=torch.float64).to(
                memory_format=torch.channels_last
            )
        )
    ],
    "transposed": lambda: [
        nn.Parameter(torch.ones(5, 3, dtype=torch.float64).t()),
        filled(3, 5),
    ],
    "slice-of-a-larger-tensor": lambda: [
        nn.Parameter(torch.ones(6, 8, dtype=torch.float64)[1:4, ::2])
    ],
    "mixed-dtypes": lambda: [
        filled(5, dtype=torch.bfloat16),
        filled(4, dtype=torch.float32),
        filled(3, dtype=torch.float64),
        filled(2, dtype=torch.float16),
        filled(1, dtype=torch.bfloat16),
    ],
}


@pytest.mark.parametrize("parameters", ODD.values(), ids=ODD.keys())
def test_every_element_of_an_odd_parameter_is_averaged(method, parameters):
    assert_averaged(displaced(parameters, method), method.gain)


def test_complex_parameters_are_averaged(method):
    def worker(rank, group):
        x = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128))
        opt = method.make(torch.optim.SGD([x], lr=1.0), sync_every=1)
        x.grad = torch.full_like(x, (1 + 2j) * (1 + 2 * rank))
        opt.step()
        return snapshot(x)

    first, second = lowcomm.simulate(worker, 2)
    assert torch.equal(first, second)
    # Displacements of 1 + 2j and of three times as much.
    expected = torch.tensor([1 + 2j, 3 - 1j]) - method.gain * (2 + 4j)
    torch.testing.assert_close(first, expected.to(first.dtype), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_element_of_large_tensors_is_averaged(method, dtype):
    """Work is done in pieces; what lies across their bounds must not be lost."""
    sizes = [262_143, 2, 262_144, 600_001, 1, 262_145]

    def pattern(n, rank):
        return ((torch.arange(n) % 61) / 64 * (1 + 2 * rank)).to(dtype)

    def worker(rank, group):
        ps = [filled(n, dtype=dtype) for n in sizes]
        opt = method.make(
            torch.optim.SGD(ps, lr=1.0), sync_every=1, bucket_bytes=100_000
        )
        for p in ps:
            p.grad = pattern(len(p), rank)
        opt.step()
        return [p.detach() for p in ps]

    first, second = lowcomm.simulate(worker, 2)
    rounding = 4 * torch.finfo(dtype).eps
    for n, a, b in zip(sizes, first, second, strict=True):
        assert torch.equal(a, b)
        expected = 1 - method.gain * 2 * pattern(n, 0).double()
        torch.testing.assert_close(a.double(), expected, rtol=0, atol=rounding)


def test_memory_layout_and_address_stay(method):
    """Rebinding a parameter to new storage breaks views, graphs and fused state."""
    ps = [p for make in ODD.values() for p in make()]
    places = [(p.data_ptr(), p.stride(), p.dtype) for p in ps]
    x = ps[0]
    view = x.detach().view(1)
    opt = method.make(torch.optim.SGD(ps, lr=0.1), sync_every=2)
    for _ in range(4):
        for p in ps:
            p.grad = torch.ones_like(p)
        opt.step()
    assert [(p.data_ptr(), p.stride(), p.dtype) for p in ps] == places
    assert view.item() == x.item() != 1.0


def test_frozen_parameters_stay_where_they_are(method):
    def parameters():
        ps = [filled(2), filled(3), filled(4)]
        ps[1].requires_grad_(False)
        return ps

    results = displaced(parameters, method, frozen={1})
    assert_averaged(results, method.gain, frozen={1})


def test_frozen_parameters_are_not_sent(method):
    def sent(frozen):
        def worker(rank, group):
            ps = [filled(1000), filled(3000)]
            ps[1].requires_grad_(not frozen)
            opt = method.make(torch.optim.SGD(ps, lr=0.1), sync_every=1)
            for p in ps:
                p.grad = torch.ones_like(p) if p.requires_grad else None
            opt.step()
            return opt.stats.bytes_sent

        return sum(lowcomm.simulate(worker, 2))

    assert sent(frozen=True) == pytest.approx(sent(frozen=False) / 4, rel=0.05)


def test_tied_parameters_stay_tied_and_are_averaged_once(method):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(4, 3, dtype=torch.float64)
            self.head = nn.Linear(3, 4, bias=False, dtype=torch.float64)
            self.head.weight = self.embedding.weight
            nn.init.ones_(self.head.weight)

    def worker(rank, group):
        model = Tied()
        opt = method.make(torch.optim.SGD(model.parameters(), lr=1.0), sync_every=1)
        model.head.weight.grad = torch.full((4, 3), 1.0 + rank, dtype=torch.float64)
        opt.step()
        assert model.head.weight is model.embedding.weight
        return model.head.weight.detach().clone(), opt.stats.bytes_sent

    (first, sent), (second, _) = lowcomm.simulate(worker, 2)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, torch.full_like(first, 1 - 1.5 * method.gain))
    assert sent < 2 * 12 * 8 + 500  # one copy of twelve values


def test_a_parameter_used_by_one_worker_only_is_averaged(method):
    """Leaving out what has no gradient would make the messages differ in size."""

    def worker(rank, group):
        common, expert = filled(3), filled(5)
        opt = method.make(torch.optim.AdamW([common, expert], lr=0.5), sync_every=2)
        for _ in range(4):
            opt.zero_grad(set_to_none=True)
            common.grad = torch.ones_like(common)
            if rank == 1:
                expert.grad = torch.ones_like(expert)
            opt.step()
        return snapshot([common, expert])

    first, second = lowcomm.simulate(worker, 2)
    assert same(first, second)
    assert (first[1] < 0.9).all()


def test_a_parameter_that_nobody_uses_keeps_its_value(method):
    def worker(rank, group):
        used, unused = filled(3), filled(5)
        opt = method.make([used, unused], lr=0.1, weight_decay=0.0, sync_every=2)
        for _ in range(4):
            slide(used, opt, rank)
        return snapshot(unused)

    for unused in lowcomm.simulate(worker, 2):
        torch.testing.assert_close(unused, torch.ones_like(unused))


def test_gradients_forgotten_before_the_step_change_nothing_but_the_step(method):
    model = network()
    opt = method.make(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=1)
    before = parameters_of(model)
    opt.step()
    torch.testing.assert_close(parameters_of(model), before, rtol=1e-12, atol=0)
    assert opt.stats.steps == 1


def test_sparse_gradients_reach_the_inner_optimizer(method):
    if method.averages_states:
        pytest.skip("states of SparseAdam are made by sparse gradients only")

    def worker(rank, group):
        layer = nn.Embedding(6, 3, sparse=True, dtype=torch.float64)
        nn.init.ones_(layer.weight)
        opt = method.make(
            torch.optim.SparseAdam(list(layer.parameters()), lr=0.1), sync_every=2
        )
        for _ in range(2):
            opt.zero_grad()
            layer(torch.tensor([rank, 2])).sum().backward()
            assert layer.weight.grad.is_sparse
            opt.step()
        return layer.weight.detach().clone()

    first, second = lowcomm.simulate(worker, 2)
    assert torch.equal(first, second)
    # SparseAdam moves a used row by 0.1 a step: row 0 and row 1 on one worker each,
    # row 2 on both, the others on none.
    moved = torch.tensor([0.1, 0.1, 0.2, 0.0, 0.0, 0.0], dtype=torch.float64)
    expected = (1 - method.gain * moved)[:, None].expand(6, 3)
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-6)


def test_gradient_accumulation_is_that_of_the_inner_optimizer(method):
    def accumulate(model, opt):
        for step in range(8):
            (loss_of(model, step) / 2).backward()
            if step % 2:
                opt.step()
                opt.zero_grad()

    plain, wrapped = network(), network()
    accumulate(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))
    opt = method.make(wrapped.parameters(), lr=0.1, sync_every=NEVER)
    accumulate(wrapped, opt)
    assert same(parameters_of(plain), parameters_of(wrapped))
    assert opt.stats.steps == 4


def test_gradients_are_the_same_objects_and_bits_after_an_exchange(method):
    """Handing the outer step its input through the gradients destroys them."""

    def worker(rank, group):
        model = network()
        opt = method.make(model.parameters(), lr=0.1, sync_every=1)
        opt.zero_grad()
        loss_of(model, 0, rank).backward()
        grads = [p.grad for p in model.parameters()]
        bits = snapshot(grads)
        opt.step()
        assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
        return same(bits, grads)

    assert lowcomm.simulate(worker, 2) == [True, True]


# State dictionaries


@pytest.fixture
def trained(method):
    model = network()
    opt = method.make(model.parameters(), lr=0.1, sync_every=2)
    train(model, opt, range(5))
    return model, opt


def test_a_plain_adamw_loads_the_state_dict(trained):
    model, opt = trained
    bare = torch.optim.AdamW(network().parameters(), lr=0.9)
    bare.load_state_dict(through_a_file(opt.state_dict()))
    assert bare.param_groups[0]["lr"] == 0.1
    assert same(inner_state_of(bare), inner_state_of(opt))


def test_the_state_dict_holds_plain_tensors_and_types(trained):
    _, opt = trained
    state = opt.state_dict()
    assert same(through_a_file(state), state)
    assert tensors_of(state)


def test_a_dictionary_stays_as_it_was_taken(method, trained):
    """Its saver may write it later, when anchors and momenta are of another round."""
    model, opt = trained
    state = opt.state_dict()
    before = snapshot(state["lowcomm"])
    train(model, opt, range(5, 10))
    assert same(state["lowcomm"], before)


def test_loading_leaves_the_dictionary_as_it_was_and_shares_nothing(method, trained):
    model, opt = trained
    state = through_a_file(opt.state_dict())
    before = snapshot(state)
    other = network()
    loaded = method.make(other.parameters(), lr=0.1, sync_every=2)
    loaded.load_state_dict(state)
    addresses = {t.data_ptr() for t in tensors_of(loaded.state_dict()) if t.numel()}
    assert addresses.isdisjoint(t.data_ptr() for t in tensors_of(state))
    train(other, loaded, range(5))
    assert same(state, before)


def test_loading_touches_no_parameter(method, trained):
    """Loading must not take a step to create what it fills."""
    _, opt = trained
    other = network(seed=3)
    loaded = method.make(other.parameters(), lr=0.1, sync_every=2)
    before = parameters_of(other)
    loaded.load_state_dict(opt.state_dict())
    assert same(parameters_of(other), before)
    assert all(p.grad is None for p in other.parameters())
    assert loaded.stats.steps == opt.stats.steps


def test_a_rate_set_after_loading_acts(method):
    x = scalar(1.0)
    opt = method.make(torch.optim.SGD([x], lr=1.0), sync_every=NEVER)
    slide(x, opt)
    opt.load_state_dict(opt.state_dict())
    opt.param_groups[0]["lr"] = 0.25
    slide(x, opt)
    assert x.item() == -0.25


def test_a_scheduler_goes_on_after_loading(method):
    def build():
        model = network()
        opt = method.make(model.parameters(), lr=0.1, sync_every=3)
        return model, opt, lr_scheduler.CosineAnnealingLR(opt, 10)

    def go(model, opt, scheduler, steps):
        for step in steps:
            train(model, opt, range(step, step + 1))
            scheduler.step()

    model, opt, scheduler = build()
    go(model, opt, scheduler, range(4))
    model2, opt2, scheduler2 = build()
    states = through_a_file(
        [model.state_dict(), opt.state_dict(), scheduler.state_dict()]
    )
    for thing, state in zip((model2, opt2, scheduler2), states, strict=True):
        thing.load_state_dict(state)
    assert opt2.param_groups[0]["lr"] == opt.param_groups[0]["lr"] != 0.1
    go(model, opt, scheduler, range(4, 10))
    go(model2, opt2, scheduler2, range(4, 10))
    assert same(parameters_of(model), parameters_of(model2))
    assert opt.param_groups[0]["lr"] == opt2.param_groups[0]["lr"]


def test_the_rate_of_every_group_is_restored(method):
    def build(*rates):
        return method.make(
            [{"params": [scalar(1.0)], "lr": rate} for rate in rates], sync_every=2
        )

    opt = build(0.9, 0.9)
    opt.load_state_dict(build(0.1, 0.2).state_dict())
    assert [group["lr"] for group in opt.param_groups] == [0.1, 0.2]


OTHER_CONFIGURATIONS = {
    "sync_every": (
        lambda p: lowcomm.LocalSGD(p, lr=0.1, sync_every=2),
        lambda p: lowcomm.LocalSGD(p, lr=0.1, sync_every=3),
    ),
    "average_states": (
        lambda p: lowcomm.LocalSGD(p, lr=0.1, sync_every=2),
        lambda p: lowcomm.LocalSGD(p, lr=0.1, sync_every=2, average_states=True),
    ),
    "outer_lr": (
        lambda p: lowcomm.DiLoCo(p, lr=0.1, sync_every=2),
        lambda p: lowcomm.DiLoCo(p, lr=0.1, sync_every=2, outer_lr=0.6),
    ),
    "outer_momentum": (
        lambda p: lowcomm.DiLoCo(p, lr=0.1, sync_every=2),
        lambda p: lowcomm.DiLoCo(p, lr=0.1, sync_every=2, outer_momentum=0.8),
    ),
    "nesterov": (
        lambda p: lowcomm.DiLoCo(p, lr=0.1, sync_every=2),
        lambda p: lowcomm.DiLoCo(p, lr=0.1, sync_every=2, nesterov=False),
    ),
}


@pytest.mark.parametrize("setting", OTHER_CONFIGURATIONS)
def test_another_configuration_is_refused_unless_not_strict(setting):
    make, make_other = OTHER_CONFIGURATIONS[setting]
    model, other = network(), network()
    opt = make(model.parameters())
    train(model, opt, range(3))
    loaded = make_other(other.parameters())
    with pytest.raises(ValueError, match=setting):
        loaded.load_state_dict(opt.state_dict())
    loaded.load_state_dict(opt.state_dict(), strict=False)
    assert same(inner_state_of(loaded), inner_state_of(opt))
    train(other, loaded, range(3, 8))
    assert all(p.isfinite().all() for p in other.parameters())


def test_a_refused_dictionary_changes_nothing():
    model, other = network(), network()
    opt = lowcomm.DiLoCo(model.parameters(), lr=0.1, sync_every=2)
    train(model, opt, range(3))
    loaded = lowcomm.DiLoCo(other.parameters(), lr=0.2, sync_every=3)
    train(other, loaded, range(2))
    before = snapshot(loaded.state_dict())
    with pytest.raises(ValueError):
        loaded.load_state_dict(opt.state_dict())
    assert same(loaded.state_dict(), before)


def test_another_method_is_refused_unless_not_strict():
    model, other = network(), network()
    opt = lowcomm.LocalSGD(model.parameters(), lr=0.1, sync_every=2)
    train(model, opt, range(3))
    loaded = lowcomm.DiLoCo(other.parameters(), lr=0.1, sync_every=2)
    with pytest.raises(ValueError, match="LocalSGD") as caught:
        loaded.load_state_dict(opt.state_dict())
    assert "DiLoCo" in str(caught.value)
    loaded.load_state_dict(opt.state_dict(), strict=False)
    assert same(inner_state_of(loaded), inner_state_of(opt))
    train(other, loaded, range(3, 8))
    assert all(p.isfinite().all() for p in other.parameters())


def test_another_number_of_workers_is_refused_unless_not_strict(method):
    def save(rank, group):
        model = network()
        opt = method.make(model.parameters(), lr=0.1, sync_every=2)
        train(model, opt, range(3), rank)
        return snapshot([model.state_dict(), opt.state_dict()])

    model_state, state = lowcomm.simulate(save, 2)[0]

    def load(rank, group):
        model = network()
        model.load_state_dict(model_state)
        opt = method.make(model.parameters(), lr=0.1, sync_every=2)
        with pytest.raises(ValueError, match=r"2.*3|3.*2"):
            opt.load_state_dict(state)
        opt.load_state_dict(state, strict=False)
        train(model, opt, range(3, 6), rank)
        opt.finish()
        return parameters_of(model)

    first, *others = lowcomm.simulate(load, 3)
    assert all(same(first, other) for other in others)


def test_a_plain_optimizers_dictionary_is_refused_with_the_way_out(method):
    model = network()
    bare = torch.optim.AdamW(network().parameters(), lr=0.3)
    opt = method.make(model.parameters(), lr=0.1, sync_every=2)
    with pytest.raises(ValueError, match=r"inner\.load_state_dict"):
        opt.load_state_dict(bare.state_dict())


def test_a_dictionary_of_other_parameters_is_refused(method):
    opt = method.make([scalar(1.0), scalar(2.0)], lr=0.1, sync_every=2)
    other = method.make([scalar(1.0)], lr=0.1, sync_every=2)
    with pytest.raises(ValueError):
        other.load_state_dict(opt.state_dict())


def test_torchs_distributed_checkpoint_takes_no_step_of_ours(method):
    """On a fresh optimizer it makes one step with zero gradients to create state."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = network()
    opt = method.make(model.parameters(), lr=0.1, sync_every=1)
    before = parameters_of(model)
    state = get_optimizer_state_dict(model, opt)
    assert len(state["state"]) == 4
    assert (opt.stats.steps, opt.stats.rounds) == (0, 0)
    assert same(parameters_of(model), before)
    train(model, opt, range(1))
    assert (opt.stats.steps, opt.stats.rounds > 0) == (1, True)


def test_the_round_trip_keeps_an_inner_state_wider_than_its_parameter(method):
    """Torch casts what it loads to the parameter's dtype, and the low bits are lost."""
    if method.averages_states:
        pytest.skip("a state that is averaged must stay of one dtype during a run")
    x = scalar(1.0, dtype=torch.bfloat16)
    opt = method.make(torch.optim.SGD([x], lr=0.1, momentum=0.9), sync_every=NEVER)
    slide(x, opt)
    opt.state[x]["momentum_buffer"] = torch.tensor([1 / 3])
    opt.load_state_dict(through_a_file(opt.state_dict()))
    assert same(opt.state[x]["momentum_buffer"], torch.tensor([1 / 3]))


# Warm starts


def test_a_plain_optimizers_checkpoint_warms_the_inner_one(method):
    plain = network()
    bare = torch.optim.AdamW(plain.parameters(), lr=0.05)
    train(plain, bare, range(3))
    model = network(seed=9)
    opt = method.make(model.parameters(), lr=0.1, sync_every=NEVER)
    model.load_state_dict(plain.state_dict())
    opt.inner.load_state_dict(through_a_file(bare.state_dict()))
    assert opt.param_groups is opt.inner.param_groups
    assert opt.state is opt.inner.state
    train(plain, bare, range(3, 6))
    train(model, opt, range(3, 6))
    assert same(parameters_of(plain), parameters_of(model))


def test_weights_loaded_after_construction_are_where_the_first_round_starts(method):
    """Anchors taken at construction would pull back to the weights before."""
    x = scalar(100.0)
    opt = method.make(torch.optim.SGD([x], lr=1.0), sync_every=2)
    with torch.no_grad():
        x.fill_(3.0)
    slide(x, opt)
    slide(x, opt)
    assert x.item() == pytest.approx(3.0 - 2.0 * method.gain)


# Resuming


def built_model(dtype):
    """Weights near 1, so that narrow types round an update away."""
    model = network(dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.2).add_(1.0)
    return model


RESUMED = {
    name: (functools.partial(m.make, lr=0.02), torch.float64)
    for name, m in METHODS.items()
} | {
    "LocalSGD-bf16": (
        functools.partial(lowcomm.LocalSGD, lr=0.02),
        torch.bfloat16,
    ),
    "DiLoCo-bf16": (
        functools.partial(lowcomm.DiLoCo, lr=0.01, outer_lr=0.03),
        torch.bfloat16,
    ),
}


def ended(model, opt):
    """All that the next step depends on; how long the waits were is not."""
    counted = [opt.stats.steps, opt.stats.rounds]
    return parameters_of(model), [counted, *snapshot(tensors_of(opt.state_dict()))]


def resumed_everywhere(make, dtype, num_workers, num_steps):
    """Trains once, and again from the state saved after each number of steps."""

    def straight(rank, group):
        model = built_model(dtype)
        opt = make(model)
        states = []
        for step in range(num_steps):
            states.append(through_a_file([model.state_dict(), opt.state_dict()]))
            train(model, opt, range(step, step + 1), rank)
        return states, ended(model, opt)

    results = lowcomm.simulate(straight, num_workers)
    for step in range(num_steps):

        def resume(rank, group, step=step):
            model = built_model(dtype)
            opt = make(model)
            model_state, opt_state = results[rank][0][step]
            model.load_state_dict(model_state)
            opt.load_state_dict(opt_state)
            assert opt.stats.steps == step
            train(model, opt, range(step, num_steps), rank)
            return ended(model, opt)

        resumed = lowcomm.simulate(resume, num_workers)
        for rank in range(num_workers):
            yield step, resumed[rank], results[rank][1]


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_resumed_at_any_step_has_the_bits_of_one_that_never_stopped(
    name, num_workers
):
    """Also in the middle of a round, and with wide anchors of narrow parameters."""
    partial, dtype = RESUMED[name]

    def make(model):
        return partial(model.named_parameters(), sync_every=3)

    for step, resumed, straight in resumed_everywhere(make, dtype, num_workers, 8):
        assert same(resumed[0], straight[0]), f"parameters, resumed at step {step}"
        assert same(resumed[1], straight[1]), f"state, resumed at step {step}"


def test_an_outer_rate_set_during_the_run_is_resumed():
    def build():
        x = scalar(0.0)
        inner = torch.optim.SGD([x], lr=1.0)
        return x, lowcomm.DiLoCo(inner, sync_every=2, outer_lr=0.5, outer_momentum=0.0)

    x, opt = build()
    opt.outer_lr = 0.25
    slide(x, opt)
    y, resumed = build()
    y.data.copy_(x.data)
    resumed.load_state_dict(through_a_file(opt.state_dict()))
    assert resumed.outer_lr == 0.25
    slide(y, resumed)
    assert y.item() == -0.5  # a quarter of two steps


def test_several_inner_optimizers_resume_with_the_same_bits(method):
    def make(model):
        return method.make(matrices_and_vectors(model), sync_every=3)

    for step, resumed, straight in resumed_everywhere(make, torch.float64, 2, 7):
        assert same(resumed, straight), f"resumed at step {step}"


def test_loading_into_a_used_optimizer_replaces_all_it_had(method):
    """A step, an anchor or a momentum left over from before would show."""

    def worker(rank, group):
        model = network()
        opt = method.make(model.parameters(), lr=0.1, sync_every=3)
        train(model, opt, range(4), rank)
        states = through_a_file([model.state_dict(), opt.state_dict()])
        train(model, opt, range(4, 8), rank)
        expected = parameters_of(model)
        for thing, state in zip((model, opt), states, strict=True):
            thing.load_state_dict(state)
        train(model, opt, range(4, 8), rank)
        return same(parameters_of(model), expected)

    assert lowcomm.simulate(worker, 2) == [True, True]


def test_resuming_with_another_bucket_size_gives_the_same_bits(method):
    def worker(rank, group):
        model = network()
        opt = method.make(model.parameters(), lr=0.1, sync_every=3)
        train(model, opt, range(4), rank)
        states = through_a_file([model.state_dict(), opt.state_dict()])
        train(model, opt, range(4, 8), rank)
        model2 = network()
        opt2 = method.make(model2.parameters(), lr=0.1, sync_every=3, bucket_bytes=128)
        for thing, state in zip((model2, opt2), states, strict=True):
            thing.load_state_dict(state)
        train(model2, opt2, range(4, 8), rank)
        return same(parameters_of(model), parameters_of(model2))

    assert lowcomm.simulate(worker, 2) == [True, True]


def test_the_round_trip_keeps_the_dtype_of_the_outer_state():
    """Torch casts loaded float state to the dtype of the parameter."""
    model, other = network(dtype=torch.bfloat16), network(dtype=torch.bfloat16)
    opt = lowcomm.DiLoCo(model.parameters(), lr=0.01, sync_every=2)
    train(model, opt, range(3))
    loaded = lowcomm.DiLoCo(other.parameters(), lr=0.01, sync_every=2)
    loaded.load_state_dict(through_a_file(opt.state_dict()))
    state = loaded.state_dict()
    assert same(state, opt.state_dict())
    own = tensors_of({k: v for k, v in state.items() if k not in ("state",)})
    wide = [t for t in own if t.dtype == torch.float32 and t.numel() == 15]
    assert len(wide) >= 2  # the anchor and the momentum of the 5 x 3 weight


def test_a_checkpoint_with_other_parameter_names_is_refused_and_changes_nothing():
    saved, model = network(), network(seed=1)
    state = lowcomm.DiLoCo(saved.named_parameters(), sync_every=2).state_dict()
    opt = lowcomm.DiLoCo(model.parameters(), sync_every=2)
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match=r"^names of the parameters must be those of"):
        opt.load_state_dict(state)
    assert same(opt.state_dict(), before)
