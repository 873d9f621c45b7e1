"""The example of how a method is written is a whole method."""

import re
import types
from pathlib import Path

import pytest
import torch

import lowcomm
from toy import network, parameters_of, same, through_a_file, train

PAGE = Path(__file__).parent.parent / "docs" / "new_method.md"
CODE = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def sparta():
    module = types.ModuleType("sparta")
    exec(compile(CODE[1], str(PAGE), "exec"), module.__dict__)
    return module.SPARTA


def test_it_is_short():
    method = CODE[1].partition("\n\n\ndef worker")[0]
    assert len(method.splitlines()) <= 100


@pytest.mark.parametrize(
    "settings",
    [{}, {"sync_every": 3, "overlap": 2}, {"weight": "steps"}],
    ids=["plain", "overlap", "weights"],
)
@pytest.mark.parametrize("resume_at", [7, 8])
def test_it_resumes_to_the_bit_and_ends_equal(sparta, settings, resume_at):
    def build():
        model = network()
        return model, sparta(model.parameters(), lr=0.01, part=0.3, **settings)

    def run(resume_at):
        def worker(rank, group):
            model, opt = build()
            for step in range(12):
                if step == resume_at:
                    saved = through_a_file([model.state_dict(), opt.state_dict()])
                    model, opt = build()
                    model.load_state_dict(saved[0])
                    opt.load_state_dict(saved[1])
                train(model, opt, range(step, step + 1), rank)
            trained = parameters_of(model)
            train(model, opt, range(12, 14 + rank), rank)
            opt.finish()
            return trained, parameters_of(model)

        return lowcomm.simulate(worker, 3)

    straight = run(None)
    assert same(straight, run(resume_at))
    first, *others = (ended for _, ended in straight)
    assert all(same(first, other) for other in others)


def test_it_sends_what_it_says(sparta):
    def worker(rank, group):
        model = torch.nn.Linear(512, 512)
        opt = sparta(model.parameters(), lr=0.01, part=0.01)
        model(torch.ones(1, 512)).sum().backward()
        opt.step()
        return opt.stats.bytes_sent

    expected = 2 * (2 - 1) / 2 * 4 * 0.01 * 513 * 512
    for sent in lowcomm.simulate(worker, 2):
        assert sent == pytest.approx(expected + 80, rel=0.01)


def test_a_codec_that_no_stream_takes_is_refused(sparta):
    with pytest.raises(ValueError, match="codec must be None with SPARTA, got Int8"):
        sparta(network().parameters(), codec="int8")


def test_a_group_that_comes_later_is_averaged_too(sparta):
    def worker(rank, group):
        first, second = (torch.nn.Parameter(torch.ones(50)) for _ in range(2))
        opt = sparta(torch.optim.SGD([first], lr=1.0), part=1.0)
        for param in (first, second):
            param.grad = torch.zeros(50)
        opt.step()
        opt.add_param_group({"params": [second]})
        second.grad.fill_(-float(rank))
        opt.step()
        return (second == 1.5).double().mean().item(), (first == 1.0).all().item()

    for part, untouched in lowcomm.simulate(worker, 2):
        assert 0.5 < part < 0.8 and untouched  # with replacement: 1 - 1/e
