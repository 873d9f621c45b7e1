"""The engine on an accelerator: the same code, buffers on their way to the host."""

import pytest
import torch
from torch import nn

import lowcomm
from lowcomm.testing import run_workers

pytestmark = [pytest.mark.gpu, pytest.mark.workers]

SETTINGS = {
    "blocking": {},
    "overlap": {"overlap": 2},
    "streaming": {"fragments": 2, "overlap": 2},
    "int8": {"codec": "int8", "error_feedback": True, "overlap": 1},
    "host anchors": {"anchor_device": "cpu"},
}


def build(device, settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).to(device)
    opt = lowcomm.DiLoCo(
        torch.optim.SGD(model.parameters(), lr=0.05), sync_every=4, **settings
    )
    return model, opt


def train(model, opt, rank, num_steps, *, pressure=False):
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(rank)
    for _ in range(num_steps):
        batch = torch.randn(16, 64, generator=generator).to(device)
        opt.zero_grad()
        model(batch).square().mean().backward()
        opt.step()
        if pressure:  # freed memory is handed out at once, and overwritten
            for size in (1 << 12, 1 << 16, 1 << 20):
                torch.full((size,), float("nan"), device=device)


def job(rank, device, settings, pressure):
    model, opt = build(device, settings)
    train(model, opt, rank, 14, pressure=pressure)
    opt.finish()
    return [p.detach().cpu() for p in model.parameters()], opt.stats.rounds


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_two_workers_on_one_device_agree_and_follow_the_host(settings):
    """Over gloo, both on the same device; under allocation pressure."""
    first, second = run_workers(job, 2, "cuda", settings, True, timeout_s=120)
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    host = run_workers(job, 2, "cpu", settings, False, timeout_s=120)[0]
    assert first[1] == host[1]
    for a, b in zip(first[0], host[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_overlap_of_nothing_is_blocking_to_the_bit():
    blocking = run_workers(job, 2, "cuda", {}, False, timeout_s=120)[0]
    zero = run_workers(job, 2, "cuda", {"overlap": 0}, True, timeout_s=120)[0]
    assert all(torch.equal(a, b) for a, b in zip(blocking[0], zero[0], strict=True))


def test_an_exchange_needs_no_more_than_its_buffers():
    device = torch.device("cuda")
    weight = nn.Parameter(torch.zeros(50_000_000, device=device))
    weight.grad = torch.zeros_like(weight)
    opt = lowcomm.DiLoCo(torch.optim.SGD([weight], lr=1.0), sync_every=1)
    opt.step()
    torch.cuda.synchronize()
    steady = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    opt.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - steady <= 1.1 * weight.nbytes


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_codecs_give_the_host_s_codes(name):
    codec = lowcomm.sync.make_codec(name)
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(codec.encode(values.cuda()).cpu(), codec.encode(values))
    decoded = codec.decode(codec.encode(values.cuda()), 5000).cpu()
    torch.testing.assert_close(decoded, codec.decode(codec.encode(values), 5000))
