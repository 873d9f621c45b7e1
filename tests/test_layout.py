"""The package's arrows, read from its imports.

    recipes, benchmarks, examples -> public names -> optim -> sync -> torch
                                     checkpoint -------------> sync
                          benchmarks ---------------------> sync

Never upward, never from one method to another. One module touches the network.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Who may import torch.distributed, and which part of it.
DISTRIBUTED = {
    "lowcomm.sync.group": "torch.distributed",
    "lowcomm.sync.elastic": "torch.distributed",
    "lowcomm.sync.private": "torch.distributed",
    "lowcomm.sync.shard": "torch.distributed",
    "lowcomm.checkpoint": "torch.distributed.checkpoint",
    "lowcomm.doctor.machine": "torch.distributed",
    "lowcomm.doctor.meeting": "torch.distributed",
    "lowcomm.testing": "torch.distributed",
}
REQUIRED = {"lowcomm", "numpy", "torch"}
PUBLIC_MODULES = {"lowcomm", "lowcomm.sync", "lowcomm.testing"}
# Inner optimizers: not methods, and one method is built on one of them.
INNER = {"lowcomm.optim.adopt", "lowcomm.optim.qh_adamw"}
# What saves any state, and knows no optimizer.
STORES = {"lowcomm._folder", "lowcomm._snapshot", "lowcomm.checkpoint"}
PRINTS = {"lowcomm.__main__", "lowcomm.cli"}
# What is imported when it is asked for, and need not be there.
OPTIONAL = {
    "lowcomm.__main__": {"matplotlib", "torchft"},
    "lowcomm.sync.roll": {"torchft"},
}


def modules(root: Path, *folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for file in sorted((root / folder).rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield name, ast.parse(file.read_text(), str(file))


def is_module(root: Path, name: str) -> bool:
    path = root.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def dotted(node: ast.AST) -> str:
    """Returns "a.b.c" for that expression, "" for any other."""
    if isinstance(node, ast.Attribute) and (start := dotted(node.value)):
        return f"{start}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def used_names(root: Path, module: str, tree: ast.Module) -> set[str]:
    """Every dotted name from outside: what is imported, and attributes of that.

    `torch.distributed.send` is used by `import torch; torch.distributed.send(x)` and
    by `from torch import distributed as d; d.send(x)`.
    """
    is_package = (root.joinpath(*module.split(".")) / "__init__.py").is_file()
    origin: dict[str, str] = {}  # of a local name
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                used.add(alias.name)
                first = alias.name.partition(".")[0]
                origin[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            source = [node.module] if node.module else []
            if node.level:  # one dot is the package, each further dot one above it
                parts = module.split(".")
                source = parts[: len(parts) + is_package - node.level] + source
            for alias in node.names:
                name = ".".join([*source, alias.name])
                used.add(name)
                origin[alias.asname or alias.name] = name
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    starts = {node.value for node in attributes}  # the a.b of a.b.c
    for node in attributes:
        first, _, rest = dotted(node).partition(".")
        if node not in starts and first in origin:
            used.add(f"{origin[first]}.{rest}")
    return used


def imported_modules(root: Path, used: set[str]) -> set[str]:
    """The modules of `lowcomm` behind dotted names: the longest prefix that is one."""
    found = set()
    for name in used:
        while name and not is_module(root, name):
            name = name.rpartition(".")[0]
        if is_within(name, "lowcomm"):
            found.add(name)
    return found


def public_names(root: Path, module: str) -> set[str]:
    """The literal `__all__` of a module."""
    path = root.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def layer(module: str) -> int:
    if is_within(module, "lowcomm.sync"):
        return 1
    return 2 if is_within(module, "lowcomm.optim") else 3


def is_method(module: str) -> bool:
    package, _, name = module.rpartition(".")
    return package == "lowcomm.optim" and name[0] != "_" and module not in INNER


def faults_inside(root: Path) -> Iterator[str]:
    """What modules of the package do that they must not."""
    for module, tree in modules(root, "lowcomm"):
        used = used_names(root, module, tree)
        for target in imported_modules(root, used) - {module}:
            if layer(target) > layer(module):
                yield f"{module} imports {target}, which is above it"
            if is_method(module) and is_method(target):
                yield f"{module} imports {target}, another method"
            if module in STORES and is_within(target, "lowcomm.optim"):
                yield f"{module} imports {target}, an optimizer"
        for name in used:
            if is_within(name, "torch.distributed") and not is_within(
                name, DISTRIBUTED.get(module, "nothing")
            ):
                yield f"{module} uses {name}"
            top = name.partition(".")[0]
            known = REQUIRED | OPTIONAL.get(module, set())
            if top not in known and top not in sys.stdlib_module_names:
                yield f"{module} imports {top}, which is not required"
        if module not in PRINTS:
            if "argparse" in used:
                yield f"{module} parses a command line"
            for node in ast.walk(tree):
                if dotted(node) in {"print", "sys.stdout", "sys.stderr"}:
                    yield f"{module} prints in line {node.lineno}"


def faults_outside(root: Path) -> Iterator[str]:
    """What is outside of the package and uses what is not public in it.

    Benchmarks may take the exchange apart, to time it without the rest.
    """
    for module, tree in modules(root, "recipes", "benchmarks", "examples"):
        for name in used_names(root, module, tree):
            if not is_within(name, "lowcomm") or name in PUBLIC_MODULES:
                continue
            if is_within(module, "benchmarks") and is_within(name, "lowcomm.sync"):
                continue
            door = max((m for m in PUBLIC_MODULES if is_within(name, m)), key=len)
            member = name[len(door) + 1 :].partition(".")[0]
            if member not in public_names(root, door):
                yield f"{module} uses {name}, which is not public"


def test_the_package_keeps_its_arrows():
    assert list(faults_inside(ROOT)) == []


def test_recipes_benchmarks_and_examples_use_public_names():
    assert list(faults_outside(ROOT)) == []


# The checks themselves, on a small house.

HOUSE = {
    "lowcomm/__init__.py": "from lowcomm.optim.a import A\n__all__ = ['A']",
    "lowcomm/simulate.py": "import lowcomm.sync.engine",
    "lowcomm/cli.py": "import argparse\nprint(1)",
    "lowcomm/sync/__init__.py": "from .group import Group\n__all__ = ['Group']",
    "lowcomm/sync/engine.py": "from lowcomm.sync.group import Group\nGroup.sent",
    "lowcomm/sync/group.py": "import torch.distributed as dist\ndist.isend",
    "lowcomm/sync/shard.py": "from torch.distributed.tensor import DTensor",
    "lowcomm/checkpoint.py": "import torch\ntorch.distributed.checkpoint.save(1)",
    "lowcomm/optim/__init__.py": "",
    "lowcomm/optim/_wrapper.py": "from ..sync import engine\nimport numpy, math",
    "lowcomm/optim/a.py": "from ._wrapper import W\nfrom .adopt import ADOPT",
    "lowcomm/optim/adopt.py": "import torch\ntorch.optim.Optimizer",
    "lowcomm/testing.py": "import torch.distributed\n__all__ = ['run_workers']",
    "recipes/train.py": "import lowcomm, wandb\nlowcomm.A(1).stats\nlowcomm.sync.Group",
    "benchmarks/speed.py": "from lowcomm.testing import run_workers",
}


def build(root: Path, changes: dict[str, str]) -> Path:
    for name, text in (HOUSE | changes).items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_a_sound_house_has_no_faults(tmp_path):
    root = build(tmp_path, {})
    assert list(faults_inside(root)) + list(faults_outside(root)) == []


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        (
            "sync/mean.py",
            "from lowcomm.optim import a",
            "imports lowcomm.optim.a, which",
        ),
        ("sync/mean.py", "from ..optim.a import A", "imports lowcomm.optim.a, which"),
        ("sync/mean.py", "import lowcomm", "imports lowcomm, which is above"),
        ("sync/mean.py", "from .. import simulate", "imports lowcomm.simulate, which"),
        ("sync/mean.py", "def f():\n import lowcomm.cli", "imports lowcomm.cli, which"),
        ("optim/b.py", "from lowcomm import A", "imports lowcomm, which is above"),
        ("optim/b.py", "from lowcomm.optim.a import A", "another method"),
        ("optim/b.py", "from . import a", "another method"),
        ("optim/b.py", "import torch.distributed as dist", "uses torch.distributed"),
        ("optim/b.py", "from torch import distributed", "uses torch.distributed"),
        (
            "optim/b.py",
            "import torch\ntorch.distributed.send(1)",
            "uses torch.distributed",
        ),
        ("sync/flat.py", "import torch.distributed", "uses torch.distributed"),
        ("checkpoint.py", "from lowcomm.optim import a", "lowcomm.optim.a, an optim"),
        ("sync/mean.py", "import wandb", "imports wandb"),
        ("plan.py", "import matplotlib", "imports matplotlib"),
        ("simulate.py", "def f():\n from rich import print as p", "imports rich"),
        ("simulate.py", "print(1)", "prints in line 1"),
        ("simulate.py", "import sys\nsys.stderr.write('')", "prints in line 2"),
        ("simulate.py", "import argparse", "parses a command line"),
    ],
)
def test_a_fault_in_the_package_is_found(tmp_path, file, text, fault):
    faults = list(faults_inside(build(tmp_path, {f"lowcomm/{file}": text})))
    assert any(fault in found for found in faults), faults


@pytest.mark.parametrize(
    "text",
    [
        "from lowcomm.optim.a import A",
        "import lowcomm.optim._wrapper",
        "import lowcomm as lc\nlc.simulate",
        "import lowcomm.sync.engine",
        "from lowcomm.sync import engine",
        "from lowcomm import sync\nsync.group",
        "from lowcomm.testing import _work",
        "from lowcomm import *",
    ],
)
def test_a_private_name_in_a_recipe_is_found(tmp_path, text):
    faults = list(faults_outside(build(tmp_path, {"recipes/train.py": text})))
    assert any("recipes.train uses lowcomm" in found for found in faults), faults
