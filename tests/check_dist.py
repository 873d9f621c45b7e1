"""What `make check-dist` checks of the files that would be published.

The wheel goes into an empty environment, where nothing comes along but what it asks
for, and is used there; the source distribution is unpacked, and some of its tests are
run.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Two steps with an exchange in the second, alone, of everything that is an optimizer.
STEPS = """
import inspect, pathlib, sys, torch, lowcomm
assert "site-packages" in lowcomm.__file__, lowcomm.__file__
assert (pathlib.Path(lowcomm.__file__).parent / "py.typed").is_file()
names = []
for name in lowcomm.__all__:
    make = getattr(lowcomm, name)
    if not (isinstance(make, type) and issubclass(make, torch.optim.Optimizer)):
        continue
    model = torch.nn.Linear(3, 2)
    before = model.weight.detach().clone()
    known = inspect.signature(make).parameters
    period = {"sync_every": 2} if "sync_every" in known else {}
    opt = make(model.parameters(), lr=0.1, **period)
    for _ in range(2):
        opt.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        opt.step()
    if period:
        assert opt.stats.rounds >= 1, name
        opt.finish()
    assert not torch.equal(model.weight, before), name
    names.append(name)
print(*names)
"""

PLAN = "--num-params 1e8 --num-workers 4 --gbit-s 1 --latency-s 0.01 --step-s 1"
COMMANDS = {
    "--help": "lighthouse",
    "doctor": "lowcomm " + PROJECT["version"],
    f"plan {PLAN} --num-steps 1000": "StreamingDiLoCo",
}


def run(*command: object, cwd: Path, **environ: str) -> str:
    """The output of a command, which has to succeed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=kept | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))[:300]}\n{done.stdout}")
    return done.stdout


def say(text: str) -> None:
    print(text, flush=True)


def check_names(names: set[str], needed: set[str], unwanted: str) -> None:
    if missing := needed - names:
        sys.exit(f"missing: {sorted(missing)}")
    if found := [name for name in names if re.search(unwanted, name)]:
        sys.exit(f"not to be published: {sorted(found)}")


def package_files() -> set[str]:
    files = {str(p.relative_to(ROOT)) for p in (ROOT / "lowcomm").rglob("*.py")}
    return files | {"lowcomm/py.typed"}


def check_wheel(wheel: Path) -> None:
    """It has the whole package, its licence, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = next(n.partition("/")[0] for n in names if ".dist-info/" in n)
        metadata = archive.read(f"{info}/METADATA").decode()
    check_names(names, package_files() | {f"{info}/licenses/LICENSE"}, r"\.pyc$")
    tops = {name.partition("/")[0] for name in names}
    if tops != {"lowcomm", info}:
        sys.exit(f"the wheel installs {sorted(tops)}")
    asked = re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)
    hard = [line for line in asked if "extra ==" not in line]
    if hard != PROJECT["dependencies"]:
        sys.exit(f"the wheel requires {hard}")
    say(f"{wheel.name}: {len(names)} files, requires {', '.join(hard)}")


def check_sdist(sdist: Path, folder: Path) -> None:
    """It has what git has, and its tests pass without what lies around it."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    names = {str(p.relative_to(source)) for p in source.rglob("*") if p.is_file()}
    tracked = set(run("git", "ls-files", cwd=ROOT).splitlines())
    check_names(names, tracked, r"\.pyc$|(^|/)(\.venv|out|dist|build)/")
    tests = [f"tests/test_{name}.py" for name in ("layout", "public_names", "robust")]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run(*pytest, "--collect-only", cwd=source)
    passed = run(*pytest, *tests, cwd=source).splitlines()[-1]
    say(f"{sdist.name}: {len(names)} files; {passed}")


def check_installed(wheel: Path, folder: Path) -> None:
    """It runs where nothing else is installed."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    pinned = ["--constraint", ROOT / "constraints.txt"]
    run(*pip, "install", "--quiet", *pinned, wheel, cwd=folder)
    run(*pip, "check", cwd=folder)
    listed = json.loads(run(*pip, "list", "--format=json", cwd=folder))
    versions = {one["name"].lower(): one["version"] for one in listed}
    extras = {
        re.match(r"[\w.-]+", requirement)[0].lower()
        for requirements in PROJECT["optional-dependencies"].values()
        for requirement in requirements
    }
    if unwanted := extras & versions.keys():
        sys.exit(f"installed along with the wheel: {sorted(unwanted)}")
    say(f"installed: {', '.join(f'{k} {v}' for k, v in sorted(versions.items()))}")
    strict = ["-W", "error"]
    say(f"two steps of {run(python, *strict, '-c', STEPS, cwd=folder).strip()}")
    for words, expected in COMMANDS.items():
        output = run(python, "-m", "lowcomm", *words.split(), cwd=folder)
        if expected not in output:
            sys.exit(f"python -m lowcomm {words} says\n{output}")
        say(f"python -m lowcomm {words}: {len(output.splitlines())} lines")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path, nargs="?", default=ROOT / "dist")
    folder = parser.parse_args().dist
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    check_wheel(wheel)
    for check, file in ((check_sdist, sdist), (check_installed, wheel)):
        with tempfile.TemporaryDirectory() as temporary:
            check(file.resolve(), Path(temporary))


if __name__ == "__main__":
    main()
