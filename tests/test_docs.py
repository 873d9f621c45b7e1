"""What the documentation shows runs, and what it names is there.

Its command lines are in test_commands.py.
"""

import ast
import contextlib
import importlib
import importlib.util
import io
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lowcomm
import lowcomm.testing
from lowcomm.optim._wrapper import AbstractWrapper
from lowcomm.testing import free_port, run_workers

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
METHODS = DOCS / "methods"
README = ROOT / "README.md"
READMES = [README, ROOT / "recipes" / "README.md"]
PAGES = sorted(DOCS.rglob("*.md")) + READMES
METHOD_PAGES = sorted(page for page in METHODS.glob("*.md") if page.stem != "README")

FRAMEWORKS = {"accelerate", "pytorch_lightning", "torchft", "transformers"}

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"`(\w+)` in\s+`([\w/.]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks():
    for page in PAGES:
        if page in READMES:  # which show parts of programs
            continue
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text[: match.start()].count("\n") + 1
            yield pytest.param(page, line, match[1], id=f"{name_of(page)}:{line}")


class Losses(nn.Module):
    """A model that returns its loss, as those of the pages do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, batch):
        return (self.linear(batch) - batch[:, :3].cos()).square().mean()


class Replies(Losses):
    """One that returns more than that."""

    def forward(self, batch):
        return SimpleNamespace(loss=super().forward(batch))


def batches(rank, num):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(num, 8, 4, generator=generator)


def code_of(page: Path, heading: str = "") -> list[str]:
    """The blocks of code below a heading, up to the next one of its level."""
    text = page.read_text()
    if heading:
        text = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return BLOCK.findall(text)


def skip_without_imports(code: str) -> None:
    """Skips the test where a framework that a page is about is not installed."""
    for node in ast.walk(ast.parse(code)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        for name in names:
            top = name.partition(".")[0]
            if top in FRAMEWORKS and importlib.util.find_spec(top) is None:
                pytest.skip(f"needs {top}")


def names_in(path: Path) -> set[str]:
    """Functions and classes of a module."""
    body = ast.parse(path.read_text()).body
    return {
        node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


def anchors_of(page: Path) -> set[str]:
    """What its headings are called in links."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings}


# torch's own modules, when they are imported.
@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
@pytest.mark.parametrize(("page", "line", "code"), list(blocks()))
def test_a_block_of_code_runs_alone(page, line, code):
    skip_without_imports(code)
    # Empty lines in front: a traceback then says the line of the page.
    exec(compile("\n" * line + code, str(page), "exec"), {"__name__": "__main__"})


def surroundings():
    """What a part of a program finds."""
    model = nn.Linear(4, 1)
    opt = lowcomm.DiLoCo(model.parameters(), lr=0.1, sync_every=10)
    return {
        "build_model": lambda: nn.Linear(4, 1),
        "evaluate": lambda model: model(torch.ones(1, 4)),
        "lowcomm": lowcomm,
        "model": model,
        "opt": opt,
        "step": 1,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(opt),
    }


@pytest.mark.parametrize("code", code_of(ROOT / "README.md"))
def test_a_part_of_a_program_runs_within_one(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(code, surroundings())


@pytest.mark.parametrize("sign", ["-", "+"], ids=["before", "after"])
def test_the_loop_of_the_readme_runs_before_and_after(sign, monkeypatch):
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", README.read_text(), re.M | re.S)
    lines = [line for line in diff.splitlines() if line[0] in (" ", sign)]
    lines = [line[2:] for line in lines if "model = ..." not in line]
    worker = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (worker | {"MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    model = Replies()
    before = model.linear.weight.clone()
    try:
        exec(
            "\n".join(lines), {"torch": torch, "model": model, "loader": batches(0, 3)}
        )
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert not torch.equal(model.linear.weight, before)


def started_alone(rank, program, port):
    """What a program prints that torchrun has started."""
    torch.distributed.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(program, {"__name__": "__main__"})
    return output.getvalue()


@pytest.mark.workers
def test_the_first_program_says_what_the_page_shows():
    text = (DOCS / "index.md").read_text()
    (program,) = re.findall(r"^```python title.*?\n(.*?)^```$", text, re.M | re.S)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", text, re.M | re.S)
    printed = "".join(run_workers(started_alone, 2, program, free_port()))
    loss = r"loss \d+\.\d\d"
    assert re.sub(loss, "", printed) == re.sub(loss, "", shown)
    assert all(float(x.split()[1]) < 10 for x in re.findall(loss, printed))


TESTS = [block for block in blocks() if block.values[0] == DOCS / "testing.md"]


@pytest.mark.workers
@pytest.mark.parametrize(("page", "line", "code"), TESTS)
def test_the_tests_that_a_page_shows_pass(page, line, code, tmp_path, monkeypatch):
    # A module, from which workers in processes can import what they run.
    name = f"block_{line}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()


@pytest.mark.parametrize("page", METHOD_PAGES, ids=name_of)
def test_a_method_page_has_code_and_says_where_the_equation_is(page):
    text = page.read_text()
    places = PLACE.findall(text)
    assert BLOCK.search(text)
    assert re.search(r"https://arxiv\.org/abs/\d{4}\.\d{5}", text)
    assert any(name in lowcomm.__all__ for name, _ in places)
    assert any("_outer" in p or "_streams" in p for _, p in places)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_names_is_there(page):
    text = page.read_text()
    for name, path in PLACE.findall(text):
        assert name in names_in(ROOT / path), f"{name} in {path}"
    for path in re.findall(
        r"`((?:lowcomm|tests|recipes|benchmarks|examples)/[\w/.]+)`", text
    ):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"\b(lowcomm\.[a-zA-Z]\w*)", FENCED.sub("", text)):
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_within_the_documentation_lead_somewhere(page):
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def test_every_method_has_a_page_in_the_list():
    listed = set(LINK.findall((METHODS / "README.md").read_text()))
    assert {page.name for page in METHOD_PAGES} <= listed
    methods = {
        name
        for name in lowcomm.__all__
        if isinstance(value := getattr(lowcomm, name), type)
        and issubclass(value, AbstractWrapper)
    }
    places = [PLACE.findall(page.read_text()) for page in METHOD_PAGES]
    assert methods <= {name for place in places for name, _ in place}


# -------------------------------------------------------------------------------------
# Migration


def trained(rank, code, num, *args):
    """Parameters after the loop that a block of code defines."""
    page = {}
    exec(code, page)
    torch.manual_seed(0)
    model = Losses()
    page["train"](model, batches(rank, num), *args)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained_by_torchft(rank, code, num, lighthouse):
    """The same as a replica of one process."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "RUST_LOG": "off"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://{lighthouse}"
    return trained(rank, code, num)


def trained_with_a_scaler(rank, code, lighthouse):
    return trained(rank, code, 4, torch.amp.GradScaler("cpu"), lighthouse)


@contextlib.contextmanager
def lighthouse(least=1):
    """The address of one that runs, with rounds of so many workers at least."""
    coordination = pytest.importorskip("torchft.coordination")
    server = coordination.LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=least,
        join_timeout_ms=1000,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=5000,
    )
    try:
        yield server.address().removeprefix("http://").replace("0.0.0.0", "127.0.0.1")
    finally:
        server.shutdown()


MIGRATION = DOCS / "migration.md"


@pytest.mark.workers
def test_torchft_before_and_after_end_alike():
    before, after = code_of(MIGRATION, "From torchft")
    with lighthouse(least=2) as address:
        theirs = run_workers(trained_by_torchft, 2, before, 20, address)
    with lighthouse() as address:
        ours = run_workers(trained, 2, after, 20, address)
    torch.testing.assert_close(theirs[0], theirs[1])
    assert torch.equal(ours[0], ours[1])
    torch.testing.assert_close(ours[0], theirs[0])


@pytest.mark.workers
def test_opendiloco_after_runs():
    (after,) = code_of(MIGRATION, "From OpenDiLoCo")
    with lighthouse() as address:
        first, second = run_workers(trained_with_a_scaler, 2, after, address)
    assert torch.equal(first, second)


@pytest.mark.workers
def test_post_local_sgd_before_and_after_end_alike():
    before, after = code_of(MIGRATION, "From PostLocalSGDOptimizer")
    # The last step is one of those after which workers are equal.
    theirs, ours = (run_workers(trained, 2, code, 21) for code in (before, after))
    assert torch.equal(ours[0], ours[1])
    torch.testing.assert_close(theirs, ours)


# -------------------------------------------------------------------------------------
# The site


API = sorted((DOCS / "api").glob("*.md"))


def shown():
    """Dotted names in the order in which the pages of the API show them."""
    return [n for page in API for n in re.findall("^::: (.+)$", page.read_text(), re.M)]


def test_every_public_name_is_shown_once():
    objects = [pkgutil.resolve_name(name) for name in shown()]
    for module in (lowcomm, lowcomm.sync, lowcomm.testing):
        for name in module.__all__:
            count = sum(getattr(module, name) is one for one in objects)
            assert count == 1, f"{module.__name__}.{name}"


def test_the_navigation_has_every_page():
    listed = re.findall(r"([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    others = [f"repo/{path}" for path in ("CHANGELOG.md", "recipes/README.md")]
    assert sorted(listed) == sorted(pages + others)


RESULT = re.compile(r"^\| ([a-z]\w*[^|]*) \| (\d\.\d+ ± [\d.]+) \|(.*)$", re.MULTILINE)


def settings(page, heading):
    """From a table of losses: loss, part of the bytes, and hours, by name."""
    text = page.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = {}
    for name, loss, rest in RESULT.findall(text):
        cells = [cell.strip() for cell in rest.split("|")]
        first = next(i for i, cell in enumerate(cells) if cell.endswith("%"))
        rows[name] = (loss, *cells[first : first + 4])
    return rows


def test_the_settings_to_choose_from_are_the_best_that_were_measured():
    measured = settings(DOCS / "results.md", "All methods, every 10 steps")
    page = DOCS / "choosing.md"
    best, lowest = {}, float("inf")
    order = sorted(measured.items(), key=lambda row: float(row[1][1].rstrip("%")))
    for name, row in order:
        if (loss := float(row[0].split()[0])) < lowest:
            best[name], lowest = row, loss
    assert settings(page, "How many bytes are there?") == best
    assert f"Of all {len(measured)} settings" in page.read_text()


def test_the_losses_to_choose_by_are_those_that_were_measured():
    measured = settings(DOCS / "results.md", "All methods, every 10 steps")
    loss, part = {}, {}
    for name, row in measured.items():
        loss[name], part[name] = float(row[0].split()[0]), float(row[1].rstrip("%"))
    names = {
        "Local SGD": "local_sgd", "Local Adam": "local_adam", "DES-LOC": "desloc",
        "DiLoCo": "diloco int8", "streaming DiLoCo": "streaming int4",
        "eager DiLoCo": "eager", "NoLoCo": "noloco", "MT-DAO": "mtdao",
        "SlowMo": "slowmo",
    }  # fmt: skip
    rows = re.findall(
        r"^\|[^|]*\| \[([^\]]+)\][^|]*\| \+([\d.]+) % at ([\d.]+) %",
        (DOCS / "choosing.md").read_text(),
        re.MULTILINE,
    )
    assert [name for name, *_ in rows] == list(names)
    for name, above, of in rows:
        found = f"{names[name]}, H=10"
        assert float(above) == round(100 * (loss[found] / loss["ddp"] - 1), 1)
        assert float(of) == pytest.approx(part[found], rel=0.03)


def test_the_site_builds(tmp_path):
    pytest.importorskip("mkdocs")
    command = ["mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command.insert(0, "-m")
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    pages = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    assert len(pages) > 25
    for path, text in pages.items():
        assert not re.search(r'(src|href)="(https?:)?//[^"]*\.(js|css|woff)', text), (
            path
        )
        prose = re.sub(r"<(pre|code).*?</\1>", "", text, flags=re.DOTALL)
        for raw in (":math:", ".. math", "&gt;&gt;&gt;", "wzxhzdk"):
            assert raw not in prose, path
    assert "<mtable" in pages[tmp_path / "api" / "optimizers.html"]
