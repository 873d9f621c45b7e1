"""Command lines in the documentation are ones that their programs take.

Each is taken as far as its program's own parser goes, or to its end where that needs no
time. What needs several machines, hours or a scheduler is not started.
"""

import argparse
import importlib
import re
import runpy
import shlex
import subprocess
import sys
import tomllib

import pytest
import torch.distributed.run

import lowcomm.__main__
from test_docs import DOCS, PAGES, ROOT, name_of

BLOCK = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r'python title="([^"]+)"')
ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
KINDS = {"", "bash", "console", "diff", "python", "text", "yaml"}
#: where a recipe has read its command line
LAST = {"chaos": ("tyro", "cli"), "compare": ("tyro", "cli")}


def blocks(page, kind):
    return [code for found, code in BLOCK.findall(page.read_text()) if found == kind]


def scripts():
    for page in PAGES:
        for number, script in enumerate(blocks(page, "bash")):
            yield pytest.param(page, script, id=f"{name_of(page)}:{number}")
        for number, session in enumerate(blocks(page, "console")):
            typed = re.findall(r"^\$ ((?:.*\\\n)*.*)$", session, re.MULTILINE)
            script = "\n".join(typed)
            yield pytest.param(page, script, id=f"{name_of(page)}:console {number}")


def commands(script):
    """Each command's words, with what was set before in the place of its name."""
    variables = {}
    for line in script.replace("\\\n", " ").splitlines():
        line = re.sub(r"\$\([^)]*\)", "computed", line)
        for name, value in variables.items():
            line = re.sub(rf"\${name}\b", value, line)
        words = [word for word in shlex.split(line, comments=True) if word != "&"]
        while words and words[0] in ("exec", "export"):
            words.pop(0)
        while words and (match := ASSIGNMENT.fullmatch(words[0])):
            variables[match[1]] = match[2].strip('"')
            words.pop(0)
        while words and words[0] == "exec":
            words.pop(0)
        if words:
            yield words


class Parsed(Exception):
    """A program has taken its command line."""


def end_after(patch, owner, name):
    """Lets a function do its work, and then ends the program."""
    function = getattr(owner, name)

    def then_end(*args, **kwargs):
        function(*args, **kwargs)
        raise Parsed

    patch.setattr(owner, name, then_end)


class Shell:
    """Takes commands as if from the repository's root."""

    def __init__(self, page, patch):
        self.files = FILE.findall(page.read_text())  # that a reader has saved
        self.patch = patch

    def run(self, script):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        for program, *words in commands(script):
            assert program in ("make", "pip", "python", "srun", "torchrun"), program
            getattr(self, program)(*words)

    def make(self, *targets):
        makefile = (ROOT / "Makefile").read_text()
        assert set(targets) <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))

    def pip(self, verb, *words):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = {f".[{name}]" for name in project["optional-dependencies"]}
        assert verb == "install"
        assert set(words) <= {"-e", ".", *extras}

    def srun(self, program, *words):
        if (program, words[0]) == ("bash", "-c"):
            return self.run(words[1])
        return self.run(shlex.join([program, *words]))

    def torchrun(self, *words):
        parser = torch.distributed.run.get_args_parser()
        found = parser.parse_args([word for word in words if word != "..."])
        module = ["-m"] if found.module else []
        self.python(*module, found.training_script, *found.training_script_args)

    def python(self, program, *words):
        if program == "-m":
            return self.command_line(*words)
        if program in self.files:
            assert not words
            return
        source = (ROOT / program).read_text()
        if not re.search(r"argv\[1:|cli|parse_args", source):
            taken = re.findall(r"argv\[(\d)\]", source)
            assert {int(i) for i in taken} == {1 + i for i in range(len(words))}
            return
        with self.patch.context() as patch, pytest.raises((Parsed, SystemExit)) as end:
            patch.syspath_prepend((ROOT / program).parent)
            if program.startswith("recipes/"):
                module, name = LAST.get(program[8:-3], ("runs", "configure"))
                pytest.importorskip("tyro")
                end_after(patch, importlib.import_module(module), name)
            else:
                end_after(patch, argparse.ArgumentParser, "parse_args")
            patch.setattr(sys, "argv", [program, *words])
            runpy.run_path(str(ROOT / program), run_name="__main__")
        assert end.type is Parsed or end.value.code == 0

    def command_line(self, module, command, *words):
        assert module == "lowcomm"
        with self.patch.context() as patch:

            def end(*_):
                raise Parsed

            if command == "plan":  # arithmetic
                lowcomm.__main__.main([command, *words])
                return
            patch.setattr(lowcomm.__main__, f"_{command}", end)
            with pytest.raises(Parsed):
                lowcomm.__main__.main([command, *words])


@pytest.fixture
def shell(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # nothing is written, but if it were
    return lambda page: Shell(page, monkeypatch)


@pytest.mark.parametrize(("page", "script"), list(scripts()))
def test_commands_are_taken(shell, page, script):
    shell(page).run(script)


def test_the_cluster_file_starts_what_there_is(shell):
    yaml = pytest.importorskip("yaml")
    page = DOCS / "recipes.md"
    (block,) = blocks(page, "yaml")
    task = yaml.safe_load(block)
    for script in (task["setup"], task["run"]):
        shell(page).run(script)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_block_is_of_a_kind_that_is_tested(page):
    kinds = {FILE.sub("python", kind) for kind, _ in BLOCK.findall(page.read_text())}
    assert kinds <= KINDS


@pytest.mark.parametrize(
    "script",
    [
        "make dinner",
        "pip install lowcom",
        "ls",
        "torchrun --nproc-per-machine 2 recipes/pretrain.py smoke",
        "torchrun -m lowcomm doctor --seconds many",
        "python recipes/pretrain.py smoke --sync-evry 3",
        "python recipes/pretrian.py smoke",
        "python recipes/compare.py --budget 60",
        "python examples/with_trainer.py 0",
        "python -m lowcomm lighthouse --listen x",
        "for",
    ],
)
def test_a_wrong_command_is_noticed(shell, script):
    with pytest.raises((Exception, SystemExit)) as error:
        shell(ROOT / "README.md").run(script)
    assert error.type is not Parsed


def test_the_page_on_the_command_line_has_every_option(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")  # or a long option may be divided
    text = (DOCS / "api" / "command_line.md").read_text()
    sections = dict(re.findall(r"^## (\w+)$(.*?)(?=^## |\Z)", text, re.M | re.S))
    with pytest.raises(SystemExit):
        lowcomm.__main__.main(["--help"])
    (names,) = re.findall(r"{(\S+)} \.\.\.", capsys.readouterr().out)
    assert set(sections) == set(names.split(","))
    for name, section in sections.items():
        with pytest.raises(SystemExit):
            lowcomm.__main__.main([name, "--help"])
        options = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))
        rows = set(re.findall(r"^\| `(--[a-z-]+)` \|", section, re.MULTILINE))
        assert rows == options - {"--help"}
