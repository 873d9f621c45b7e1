"""Workers that are sharded by FSDP2 train, and are saved, as whole ones are."""

import functools
import json
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import lowcomm
from lowcomm.testing import run_workers
from toy import inner_state_of, network, same, snapshot, tensors_of, train

pytestmark = pytest.mark.workers

METHODS = {
    "DiLoCo": functools.partial(lowcomm.DiLoCo, sync_every=3),
    "streaming": functools.partial(
        lowcomm.DiLoCo, sync_every=4, fragments=3, overlap=2
    ),
    "eager": functools.partial(lowcomm.DiLoCo, sync_every=3, eager=True),
    "clipped": functools.partial(lowcomm.DiLoCo, sync_every=3, clip_shares=1.0),
    "int8": functools.partial(
        lowcomm.DiLoCo, sync_every=3, codec="int8", error_feedback=True
    ),
    "int4": functools.partial(lowcomm.DiLoCo, sync_every=3, codec="int4"),
    "LocalAdam": functools.partial(
        lowcomm.LocalSGD, sync_every=3, average_states=True, overlap=1
    ),
    "DESLOC": functools.partial(
        lowcomm.DESLOC, sync_every={"params": 2, "exp_avg": 2, "exp_avg_sq": 4}
    ),
    "NoLoCo": functools.partial(lowcomm.NoLoCo, sync_every=3),
    "MTDAO": functools.partial(lowcomm.MTDAO, sync_every=3),
}
PLAIN = METHODS | {
    "SlowMo": functools.partial(lowcomm.SlowMo, sync_every=3),
    "Adafactor": lambda params, lr: lowcomm.LocalSGD(
        torch.optim.Adafactor(params, lr=lr), sync_every=3
    ),
}
#: Blocks of a code are cut out of other values, so they are rounded otherwise.
TOLERANCE = {"int8": 0.01, "int4": 0.1}
NUM_STEPS = 8


class Net(nn.Module):
    """A tied embedding of an odd number of rows, one row alone, and one that is whole.

    So the second of two ranks has fewer rows of one tensor and none of another.
    """

    def __init__(self, seed):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.ones(1))
        self.whole = nn.Parameter(torch.ones(4))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(0.5 * torch.randn(p.shape, generator=generator))

    def forward(self, tokens):
        hidden = self.hidden(self.embedding(tokens)).tanh() * self.whole
        return self.out(hidden * self.gain)


def sharded(model, mesh):
    return fully_shard(model, mesh=mesh, ignored_params={model.whole})


def mesh_of(*sizes):
    names = ("site", "replicate", "shard")[-len(sizes) :]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def learn(model, opt, steps, worker, spoil=lambda step: None):
    for step in steps:
        opt.zero_grad()
        generator = torch.Generator().manual_seed(1000 * step + worker)
        tokens = torch.randint(7, (2, 5), generator=generator)
        logits = model(tokens[0])
        nn.functional.cross_entropy(logits, tokens[1]).backward()
        spoil(step)
        opt.step()


def whole(tree):
    """A copy of nested tensors, with sharded ones put together."""
    if isinstance(tree, DTensor):
        return tree.full_tensor().detach().clone()
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(whole(value) for value in tree)
    return snapshot(tree)


def bits_of(model, opt):
    """All that a worker has, but for what it has counted on its rank."""
    state = whole(opt.state_dict())
    del state["lowcomm"]["sync"]["stats"]
    return [whole(list(model.parameters())), state]


def close(left, right, atol=1e-6):
    return all(
        torch.allclose(a, b, rtol=1e-5, atol=atol)
        for a, b in zip(tensors_of(left), tensors_of(right), strict=True)
    )


# --- training


def trained(model, opt, worker):
    learn(model, opt, range(NUM_STEPS), worker)
    before = whole(list(model.parameters()))
    with opt.global_parameters():
        agreed = whole(list(model.parameters()))
    opt.finish()
    return before, agreed, whole(list(model.parameters()))


def train_sharded(rank):
    mesh, results = mesh_of(2, 2), {}
    for name, make in METHODS.items():
        model = sharded(Net(seed=rank // 2), mesh["shard"])
        opt = make(model.named_parameters(), lr=0.05, group=mesh["replicate"])
        results[name] = trained(model, opt, rank // 2)
    return results


@pytest.fixture(scope="module")
def runs():
    def plain(rank, group):
        results = {}
        for name, make in METHODS.items():
            model = Net(seed=rank)
            opt = make(model.named_parameters(), lr=0.05)
            results[name] = trained(model, opt, rank)
        return results

    return run_workers(train_sharded, 4), lowcomm.simulate(plain, 2)


@pytest.mark.parametrize("name", METHODS)
def test_two_sharded_workers_are_two_whole_ones(runs, name):
    shards, plain = runs
    for rank in range(4):
        mine = shards[rank][name]
        assert close(mine, plain[rank // 2][name], TOLERANCE.get(name, 1e-6))
        assert same(mine, shards[rank // 2 * 2][name])  # the worker's other shard
        assert same(mine[1:], shards[0][name][1:])  # the other worker


# --- decisions that all shards of a worker must take alike


def spoil_one_row(rank):
    """One value of worker 0's second shard is not finite as a round is due."""
    mesh = mesh_of(2, 2)
    model = sharded(Net(seed=0), mesh["shard"])
    opt = METHODS["DiLoCo"](model.parameters(), lr=0.05, group=mesh["replicate"])

    def spoil(step):
        if step == 2 and rank == 1:
            model.embedding.weight.grad.to_local()[-1] = math.nan

    learn(model, opt, range(4), rank // 2, spoil)
    return bits_of(model, opt)[0], opt.stats.rounds


def test_one_shard_that_is_not_finite_leaves_the_whole_worker_out():
    def plain(rank, group):
        model = Net(seed=0)
        opt = METHODS["DiLoCo"](model.parameters(), lr=0.05)

        def spoil(step):
            if step == 2 and rank == 0:
                model.embedding.weight.grad[-1] = math.nan

        learn(model, opt, range(4), rank, spoil)
        return whole(list(model.parameters()))

    expected = lowcomm.simulate(plain, 2)
    for rank, (bits, rounds) in enumerate(run_workers(spoil_one_row, 4)):
        assert rounds == 1
        assert all(tensor.isfinite().all() for tensor in bits)
        assert close(bits, expected[rank // 2])


def take_a_step_of_zero(rank):
    """Rates of zero and gradients of zero on one shard: torch's probe has both."""
    mesh = mesh_of(2, 2)
    weight = nn.Linear(1, 2, bias=False)
    model = fully_shard(weight, mesh=mesh["shard"])
    opt = lowcomm.DiLoCo(
        model.parameters(), lr=0.0, sync_every=1, group=mesh["replicate"]
    )
    model(torch.ones(1, 1))[0, 1].backward()
    assert bool(model.weight.grad.to_local().any()) == (rank % 2 == 1)
    opt.step()
    return opt.stats.steps, opt.stats.rounds


def test_gradients_that_are_zero_on_one_shard_make_no_probe():
    assert run_workers(take_a_step_of_zero, 4) == [(1, 1)] * 4


# --- other ways to lay out a worker


def lay_out_otherwise(rank):
    results = {}
    site, local = divmod(rank, 2)

    mesh = mesh_of(2, 2, 1)  # copies within a site
    model = sharded(Net(seed=site), mesh["replicate", "shard"])
    with pytest.raises(ValueError, match=r"one rank of each worker.*ranks \[\d, \d\]"):
        lowcomm.DiLoCo(model.parameters(), sync_every=3, group=mesh["replicate"])
    opt = METHODS["clipped"](model.parameters(), lr=0.05, group=mesh["site"])
    results["HSDP"] = trained(model, opt, site)

    mesh = mesh_of(2, 2)
    model = Net(seed=site)
    ddp = nn.parallel.DistributedDataParallel(
        model, process_group=mesh["shard"].get_group()
    )
    opt = METHODS["clipped"](model.parameters(), lr=0.05, group=mesh["replicate"])
    results["DDP"] = trained(ddp, opt, site)

    model = Net(seed=site)  # in which each rank has half of a layer
    plan = {"hidden": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["shard"], plan)
    opt = METHODS["clipped"](model.parameters(), lr=0.05, group=mesh["replicate"])
    results["tensor parallel"] = trained(model, opt, site)

    # Of sharded and whole tensors in one list, torch's inner step takes no foreach.
    model = sharded(Net(seed=site), mesh["shard"])
    params = [p for p in model.parameters() if p is not model.whole]
    groups = [{"params": params}, {"params": [model.whole]}]
    inner = torch.optim.AdamW(groups, lr=0.05, foreach=True)
    opt = METHODS["clipped"](inner, group=mesh["replicate"])
    results["foreach"] = trained(model, opt, site)
    return results


def one_rank_each(rank):
    """A worker that FSDP2 wraps, and that is whole all the same."""
    mesh = mesh_of(2, 1)
    wrapped = sharded(Net(seed=rank), mesh["shard"])
    opt = METHODS["clipped"](wrapped.parameters(), lr=0.05, group=mesh["replicate"])
    results = [trained(wrapped, opt, rank)]
    plain = Net(seed=rank)
    opt = METHODS["clipped"](plain.parameters(), lr=0.05)
    return [*results, trained(plain, opt, rank)]


def test_a_worker_may_be_sharded_over_one_rank():
    for wrapped, plain in run_workers(one_rank_each, 2):
        assert close(wrapped, plain)


def evaluate_global_parameters(rank):
    mesh = mesh_of(2, 2)
    model = sharded(Net(seed=0), mesh["shard"])
    opt = METHODS["DiLoCo"](model.parameters(), lr=0.05, group=mesh["replicate"])
    tokens = torch.arange(7)
    with torch.no_grad():
        first = model(tokens)
    model.reshard()
    learn(model, opt, range(2), rank // 2)
    with torch.no_grad():
        local = model(tokens)
        model.reshard()
        with opt.global_parameters():
            assert same(model(tokens), first)
            model.reshard()
        assert same(model(tokens), local)
        assert not torch.allclose(local, first)


def test_a_model_that_is_resharded_evaluates_global_parameters():
    run_workers(evaluate_global_parameters, 4)


def test_copies_ddp_and_tensor_parallelism_within_a_site_and_foreach(runs):
    for rank, results in enumerate(run_workers(lay_out_otherwise, 4)):
        for result in results.values():
            assert close(result, runs[1][rank // 2]["clipped"])


class Changing(lowcomm.sync.Group):
    """Nothing but what is asked before it is refused."""

    rank, is_elastic = 0, True
    members = send = recv = run = new_lane = None


def refuse(rank):
    mesh = mesh_of(2, 2)
    model = sharded(Net(seed=0), mesh["shard"])
    with pytest.raises(ValueError, match="fixed workers where parameters are sharded"):
        lowcomm.DiLoCo(model.parameters(), sync_every=3, group=Changing())
    for group in (None, mesh["shard"]):
        with pytest.raises(ValueError, match=r"one rank of each.*mesh\['replicate'\]"):
            lowcomm.DiLoCo(model.parameters(), sync_every=3, group=group)
    with pytest.raises(ValueError, match="all ranks of every worker"):
        lowcomm.Checkpointer("unused", model=model, group=mesh["replicate"])
    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    with pytest.raises(lowcomm.PeerMismatch, match=r"at \(\d,\) of.*at \(\d,\) of"):
        lowcomm.DiLoCo(model.parameters(), sync_every=3, group=crossed[rank in (1, 2)])
    for use_orig_params in (False, True):
        old = FullyShardedDataParallel(
            network(dtype=torch.float32),
            process_group=mesh["shard"].get_group(),
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )
        with pytest.raises(ValueError, match=r"FSDP1.*fully_shard"):
            lowcomm.DiLoCo(old.parameters(), sync_every=3, group=mesh["replicate"])


def test_groups_across_shards_and_fsdp1_are_refused_with_the_way_out():
    run_workers(refuse, 4)


def run_the_page(rank, text, folder):
    page = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(block, page)
    worker, bits = rank // 2, []
    for path in (folder / "a", folder / "a", folder / "b"):
        torch.manual_seed(rank)
        model, opt = page["train"](path)
        bits.append(bits_of(model, opt))
        assert page["evaluate"](model, opt, torch.ones(1, 8)).isfinite().all()
    page["save"](folder / "dcp", model, opt, worker)
    page["load"](folder / "dcp", model, opt, worker)
    assert same(bits_of(model, opt), bits[-1])
    return bits


def test_the_page_on_sharded_workers_runs(tmp_path):
    text = (Path(__file__).parent.parent / "docs" / "sharded.md").read_text()
    for one, resumed, _ in run_workers(run_the_page, 4, text, tmp_path):
        assert same(one, resumed)


# --- checkpoints of our own

SAVED = ("streaming", "int8", "DESLOC", "NoLoCo")


def build(name, mesh, seed):
    model = sharded(Net(seed), mesh["shard"])
    opt = METHODS[name](model.named_parameters(), lr=0.05, group=mesh["replicate"])
    return model, opt


def save_in_mid_round(rank, folder):
    mesh, bits = mesh_of(2, 2), {}
    for name in SAVED:
        model, opt = build(name, mesh, rank // 2)
        with lowcomm.Checkpointer(folder / name, model=model, optimizer=opt) as ckpt:
            learn(model, opt, range(5), rank // 2)
            ckpt.save(5)
        under_way = bool(opt.state_dict()["lowcomm"]["sync"]["pending"])
        assert under_way == (name == "streaming")
        learn(model, opt, range(5, 10), rank // 2)
        bits[name] = bits_of(model, opt)
    return bits


def resume(rank, folder):
    mesh, bits = mesh_of(2, 2), {}
    for name in SAVED:
        model, opt = build(name, mesh, 7)
        step = lowcomm.Checkpointer(folder / name, model=model, optimizer=opt).load()
        learn(model, opt, range(step, 10), rank // 2)
        bits[name] = bits_of(model, opt)
    other = mesh_of(4, 1)
    for model in (sharded(Net(0), other["shard"]), Net(0)):
        group = other["replicate"]
        opt = METHODS["int8"](model.named_parameters(), lr=0.05, group=group)
        before = bits_of(model, opt)
        ckpt = lowcomm.Checkpointer(folder / "int8", model=model, optimizer=opt)
        with pytest.raises(ValueError, match=r"meshes must be.*portable\(\)"):
            ckpt.load()
        assert same(bits_of(model, opt), before)
    return bits


def cut_twice(rank, folder):
    """FSDP2 over tensor parallelism, in a worker of four ranks."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("out", "shard", "tp"))

    def build(seed):
        model = Net(seed)
        plan = {"hidden": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh["tp"], plan)
        model = sharded(model, mesh["shard"])
        # With states of two meshes, and of a tensor that is on none.
        return model, METHODS["LocalAdam"](
            model.parameters(), lr=0.05, group=mesh["out"]
        )

    model, opt = build(0)
    learn(model, opt, range(4), 0)
    lowcomm.Checkpointer(folder, model=model, optimizer=opt).save(4)
    parts = {"model": model, "opt": opt.portable()}
    dcp.save(parts, checkpoint_id=folder / "dcp")
    for seed in (1, 2):
        again, other = build(seed)
        if seed == 1:
            parts = {"model": again, "opt": other.portable()}
            dcp.load(parts, checkpoint_id=folder / "dcp")
        else:
            lowcomm.Checkpointer(folder, model=again, optimizer=other).load()
        assert same(bits_of(again, other), bits_of(model, opt))


def test_parts_that_were_cut_twice_are_saved_too(tmp_path):
    run_workers(cut_twice, 4, tmp_path)


def resume_as_one(rank, folder):
    mesh = mesh_of(1, 2)
    model, opt = build("streaming", mesh, 7)
    ckpt = lowcomm.Checkpointer(folder / "streaming", model=model, optimizer=opt)
    learn(model, opt, range(ckpt.load(), 10), 0)
    return ckpt.report.dropped


def test_a_run_that_is_resumed_in_mid_round_has_the_bits_of_one_that_went_on(tmp_path):
    expected = run_workers(save_in_mid_round, 4, tmp_path)
    assert same(run_workers(resume, 4, tmp_path), expected)
    whole_model = sum(p.numel() for p in Net(0).parameters())
    step = tmp_path / "DESLOC" / "step-00000005"
    manifest = json.loads((step / "manifest.json").read_text())
    assert sorted(manifest["files"]) == [
        *(f"global-{shard}.pt" for shard in range(2)),
        *(f"worker-{rank}.pt" for rank in range(4)),
    ]
    step = tmp_path / "int8" / "step-00000005"
    agreed = [torch.load(step / f"global-{shard}.pt") for shard in range(2)]
    # Anchor and momentum; what is whole on both ranks is in both files.
    assert sum(t.numel() for t in tensors_of(agreed)) == 2 * (whole_model + 4)
    assert run_workers(resume_as_one, 2, tmp_path)[0][:1] == [
        "share under way of 'fragment 2' of worker 0"
    ]


# --- torch's distributed checkpoints


def through_dcp(rank, folder):
    mesh, other, bits, ends = mesh_of(2, 2), mesh_of(4, 1), [], []
    worker = rank // 2
    for name in ("streaming", "int8"):
        path = folder / name

        def parts(model, opt, worker=worker):
            return {f"model {worker}": model, f"opt {worker}": opt.portable()}

        model, opt = build(name, mesh, worker)
        learn(model, opt, range(5), worker)
        saved = bits_of(model, opt)
        dcp.save(parts(model, opt), checkpoint_id=path)
        learn(model, opt, range(5, 10), worker)
        again, opt_again = build(name, mesh, 7)
        dcp.load(parts(again, opt_again), checkpoint_id=path)
        assert same(bits_of(again, opt_again), saved)
        learn(again, opt_again, range(5, 10), worker)
        went_on = bits_of(model, opt)
        assert same(bits_of(again, opt_again), went_on)

        # Onto another mesh: twice as many workers, each whole.
        everyones = [None] * 4
        dist.all_gather_object(everyones, saved)
        params, state = everyones[rank % 2 * 2]
        model, opt = build(name, other, 7)
        dcp.load(parts(model, opt, rank % 2), checkpoint_id=path)
        now_params, now = bits_of(model, opt)
        assert same(now_params, params)
        assert same(now["state"], state["state"])
        sync, now_sync = state["lowcomm"]["sync"], now["lowcomm"]["sync"]
        assert now_sync["pending"] == []
        if rank >= 2:  # another owes what is left of its codes
            for stream in sync["streams"].values():
                for residual in stream["tensors"].get("residual", {}).values():
                    residual.zero_()
        assert same(now_sync["streams"], sync["streams"])
        learn(model, opt, range(5, 10), rank)
        opt.finish()
        bits.append(whole(list(model.parameters())))
        ends.append(went_on)
    return bits, ends


def resume_whole(rank, folder):
    """Two workers again, which are not sharded now."""
    ends = []
    for name in ("streaming", "int8"):
        model = Net(seed=7)
        opt = METHODS[name](model.named_parameters(), lr=0.05)
        parts = {f"model {rank}": model, f"opt {rank}": opt.portable()}
        dcp.load(parts, checkpoint_id=folder / name)
        learn(model, opt, range(5, 10), rank)
        ends.append(bits_of(model, opt))
    return ends


def test_torchs_checkpoint_takes_all_of_it_also_onto_another_mesh(tmp_path):
    (first, ends), *others = run_workers(through_dcp, 4, tmp_path)
    assert all(same(first, bits) for bits, _ in others)
    streaming, int8 = run_workers(resume_whole, 2, tmp_path)[0]
    assert close(streaming, ends[0])
    assert close(int8[0], ends[1][0], TOLERANCE["int8"])


def use_torchs_functions(rank, folder):
    mesh, worker = mesh_of(2, 2), rank // 2
    model, opt = build("DiLoCo", mesh, worker)
    before = whole(list(model.parameters()))
    assert len(get_optimizer_state_dict(model, opt)["state"]) == 5
    assert (opt.stats.steps, opt.stats.rounds) == (0, 0)
    assert same(whole(list(model.parameters())), before)
    learn(model, opt, range(4), worker)

    # What has no place is not loaded, and that is said.
    dcp.save({f"opt {worker}": opt}, checkpoint_id=folder)
    fresh, other = build("DiLoCo", mesh, 7)
    with pytest.raises(BaseException, match=r"all inner states.*portable\(\)"):
        dcp.load({f"opt {worker}": other}, checkpoint_id=folder)

    # The inner state alone, as torch has it.
    fresh, other = build("DiLoCo", mesh, 7)
    inner = get_optimizer_state_dict(model, opt.inner)
    set_optimizer_state_dict(fresh, other.inner, inner)
    assert same(whole(inner_state_of(other)), whole(inner_state_of(opt)))
    assert other.stats.steps == 0

    # Whole tensors, for instance of a run that is not sharded.
    fresh, other = build("DiLoCo", mesh, 7)
    other.load_state_dict(whole(opt.state_dict()))
    assert same(bits_of(fresh, other)[1], bits_of(model, opt)[1])
    assert all(
        isinstance(state["exp_avg"], DTensor)
        for param, state in other.state.items()
        if param is not fresh.whole
    )


def test_a_state_that_has_lost_something_is_refused_and_a_whole_one_is_cut(tmp_path):
    run_workers(use_torchs_functions, 4, tmp_path)


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_a_whole_worker_is_portable_too(make, tmp_path):
    def build(seed):
        model = network(seed, torch.float32)
        model[0].bias.requires_grad_(False)
        return model, make(model.parameters(), lr=0.05)

    model, opt = build(0)
    train(model, opt, range(5))
    again, other = build(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        parts = {"model": model, "opt": opt.portable()}
        dcp.save(parts, checkpoint_id=tmp_path, no_dist=True)
        parts = {"model": again, "opt": other.portable()}
        dcp.load(parts, checkpoint_id=tmp_path, no_dist=True)
    for one, its in ((model, opt), (again, other)):
        train(one, its, range(5, 9))
    assert same(bits_of(again, other), bits_of(model, opt))


def test_the_form_of_a_portable_state_is_that_of_a_fresh_one():
    def keys(tree):
        if isinstance(tree, dict):
            return {key: keys(value) for key, value in tree.items()}
        return None

    model = network()
    opt = METHODS["streaming"](model.parameters(), lr=0.05)
    fresh = keys(opt.portable().state_dict())
    for step in range(6):
        train(model, opt, range(step, step + 1))
        assert keys(opt.portable().state_dict()) == fresh
