"""Every example runs as two workers, which agree, and resumes to the same loss."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import lowcomm
from lowcomm.testing import free_port, run_workers
from toy import same

pytestmark = pytest.mark.workers

FOLDER = Path(__file__).parent.parent / "examples"

# What each needs besides torch.
IN_FRAMEWORKS = {
    "with_trainer": ["transformers", "accelerate"],
    "with_accelerate": ["accelerate"],
    "with_lightning": ["pytorch_lightning"],
}
WITH_TORCH = ["with_compile", "with_inner"]


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run(main, *args):
    """Runs a main function; what its optimizers came to, each when it was finished."""
    finished, finish = [], lowcomm.DiLoCo.finish

    def record(opt):
        finish(opt)
        params = [p for group in opt.param_groups for p in group["params"]]
        cosines = [stream.cosine for stream in opt.stats.streams.values()]
        finished.append(
            (opt.stats.steps, opt.stats.rounds, cosines, [p.detach() for p in params])
        )

    lowcomm.DiLoCo.finish = record
    main(*args)
    return finished


def in_framework(rank, name, port, folder):
    dist.destroy_process_group()  # it is started as if it were alone
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return run(load(name).main, rank, 2, f"127.0.0.1:{port}", folder)


def with_torch(rank, folder):
    # One graph after the other, and in a folder of its own.
    os.environ |= {
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / f"inductor-{rank}"),
    }
    backend = "inductor" if shutil.which("g++") else "aot_eager"
    compiled = run(load("with_compile").main, folder / "compile", backend)
    return compiled, run(load("with_inner").main, folder / "inner")


def check(workers):
    for one, other in zip(*workers, strict=True):
        steps, rounds, cosines, params = one
        assert (steps, rounds) == other[:2]
        assert steps == 12 and rounds == 3
        assert same(params, other[3])
        # Gradients that were averaged already would make it 1.
        assert all(cosine < 0.999 for cosine in cosines if cosine is not None)


@pytest.mark.parametrize("name", IN_FRAMEWORKS)
def test_an_example_in_a_framework(name, tmp_path):
    for module in IN_FRAMEWORKS[name]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    check(run_workers(in_framework, 2, name, free_port(), tmp_path))


def test_the_examples_with_torch_alone(tmp_path):
    first, second = run_workers(with_torch, 2, tmp_path)
    for one, other in zip(first, second, strict=True):
        check((one, other))


def test_every_example_is_run():
    names = {path.stem for path in FOLDER.glob("*.py")}
    assert names == {*IN_FRAMEWORKS, *WITH_TORCH}
