"""What the documentation shows runs, and what it names is there."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import lowcomm
from lowcomm.optim._wrapper import AbstractWrapper

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
METHODS = DOCS / "methods"
READMES = [ROOT / "README.md", ROOT / "recipes" / "README.md"]
PAGES = sorted(DOCS.rglob("*.md")) + READMES
METHOD_PAGES = sorted(page for page in METHODS.glob("*.md") if page.stem != "README")

FRAMEWORKS = {"accelerate", "pytorch_lightning", "transformers"}

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


# torch's own compiler, when it is imported.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize(("page", "line", "code"), list(blocks()))
def test_a_block_of_code_runs_alone(page, line, code):
    skip_without_imports(code)
    # Empty lines in front: a traceback then says the line of the page.
    exec(compile("\n" * line + code, str(page), "exec"), {"__name__": "__main__"})


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
    for name in re.findall(r"`?lowcomm\.([a-zA-Z]\w*)", FENCED.sub("", text)):
        assert hasattr(lowcomm, name), name


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
