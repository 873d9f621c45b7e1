import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import lowcomm
import lowcomm.testing

ROOT = Path(__file__).parent.parent

NAMES = [
    "ADOPT",
    "Checkpointer",
    "DESLOC",
    "DiLoCo",
    "Link",
    "LocalSGD",
    "MTDAO",
    "NoLoCo",
    "PeerLost",
    "PeerMismatch",
    "QHAdamW",
    "QSR",
    "SlowMo",
    "SyncError",
    "half_life",
    "plan",
    "simulate",
]


def test_the_public_names_are_these():
    assert lowcomm.__all__ == NAMES


def test_all_is_sorted():
    assert lowcomm.__all__ == sorted(lowcomm.__all__)


def test_all_is_complete():
    names = {
        name
        for name, value in vars(lowcomm).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert names == set(lowcomm.__all__)


def documented(thing):
    """The arguments that a docstring names, in its order."""
    section = inspect.getdoc(thing).partition("\nArgs:\n")[2].partition("\n\n")[0]
    return re.findall(r"^    (\w+):", section, re.MULTILINE)


@pytest.mark.parametrize("door", [lowcomm, lowcomm.sync, lowcomm.testing])
def test_every_public_name_has_a_docstring_with_its_arguments_in_order(door):
    for name in door.__all__:
        thing = getattr(door, name)
        assert thing.__doc__, name
        # The other errors have a message, as Python's own do.
        if name not in ("SyncError", "PeerMismatch"):
            assert documented(thing) == [*inspect.signature(thing).parameters], name


def test_importing_the_package_imports_no_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        re.match(r"[\w-]+", requirement)[0].replace("-", "_")
        for requirements in project["optional-dependencies"].values()
        for requirement in requirements
    }
    assert {"torchft", "transformers", "wandb"} <= extras
    code = "import sys, lowcomm.testing; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert extras.isdisjoint(modules.split())


def test_it_needs_torch_and_numpy_and_nothing_else():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w-]+", one)[0] for one in project["dependencies"]}
    assert needed == {"torch", "numpy"}


def test_importing_the_package_adds_the_standard_library_to_what_torch_imports():
    """What torch need not have at hand is not needed here; nor does it take long."""
    code = """
import sys, numpy, torch
before = set(sys.modules)
import lowcomm, lowcomm.sync, lowcomm.testing, lowcomm.__main__
added = {name for name in sys.modules if name not in before}
assert "lowcomm.optim.diloco" in added
print(*{name.partition(".")[0] for name in added})
"""
    command = [sys.executable, "-W", "error", "-c", code]
    added = set(subprocess.check_output(command, cwd=ROOT, text=True).split())
    assert added <= {"lowcomm"} | sys.stdlib_module_names
