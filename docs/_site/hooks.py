"""What MkDocs does not do by itself: docstrings as they are, formulas, other folders.

Docstrings keep the form in which `help()` reads well. Here they become Markdown: an
example after `>>>`, a block after `::`, and formulas as MathML, which browsers draw
without a script.

Pages link to files that lie outside this folder, as on a code host. Those come into the
site under `repo/`.
"""

import os.path
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parent.parent
ROOT = DOCS.parent

DIRECTIVE = re.compile(r"( *)\.\. (math|code-block)::\s*(.*)")
ROLE = r":math:`([^`]+)`"
LINK = re.compile(r"(?<=\]\()(?!https://|#)([^)\s#]+)")
FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)


def indent_of(line: str) -> int:
    """Spaces before it."""
    return len(line) - len(line.lstrip(" "))


class Rest(Preprocessor):
    """Turns the little reStructuredText of the docstrings into Markdown."""

    def run(self, lines: list[str]) -> list[str]:
        return list(self._convert(lines))

    def _convert(self, lines: list[str]) -> Iterator[str]:
        in_fence = False
        i = 0
        while i < len(lines):
            line = lines[i]
            i += 1
            in_fence ^= line.lstrip().startswith("```")
            pad = " " * indent_of(line)
            if in_fence:
                yield line
            elif directive := DIRECTIVE.fullmatch(line):
                body, i = self._body(lines, i, indent_of(line))
                if directive[2] == "math":
                    yield from ("", pad + self._formula([directive[3], *body]), "")
                else:
                    yield from self._block(directive[3], body, pad)
            elif line.lstrip().startswith(">>> "):
                end = i
                while end < len(lines) and lines[end].strip():
                    end += 1
                body = [one.removeprefix(pad) for one in lines[i - 1 : end]]
                yield from self._block("pycon", body, pad)
                i = end
            elif line.endswith("::") and "`" not in line:
                body, i = self._body(lines, i, indent_of(line))
                yield line[:-1]
                yield from self._block("python", body, pad)
            else:
                yield line

    def _body(
        self, lines: list[str], start: int, outside: int
    ) -> tuple[list[str], int]:
        """What is indented from here on, without its indent, and where it ends."""
        end = start
        while end < len(lines) and (
            not lines[end].strip() or indent_of(lines[end]) > outside
        ):
            end += 1
        body = lines[start:end]
        indent = min((indent_of(line) for line in body if line.strip()), default=0)
        body = [line[indent:] for line in body]
        while body and not body[-1].strip():
            body.pop()
        while body and not body[0].strip():
            body.pop(0)
        return body, end

    def _block(self, language: str, body: list[str], pad: str) -> Iterator[str]:
        yield ""
        yield f"{pad}```{language}"
        yield from (pad + line for line in body)
        yield f"{pad}```"
        yield ""

    def _formula(self, lines: list[str]) -> str:
        formula = " ".join(lines).strip()
        if "&" in formula:
            formula = rf"\begin{{align*}}{formula}\end{{align*}}"
        html = f'<div class="formula">{convert(formula, display="block")}</div>'
        return self.md.htmlStash.store(html)


class Role(InlineProcessor):
    r"""A formula within a line: :math:`\alpha`."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # type: ignore[override]
        return self.md.htmlStash.store(convert(m[1])), m.start(), m.end()


class Docstrings(Extension):
    """For Python-Markdown: `Rest` and `Role`."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(Rest(md), "rest", 28)  # before fences are taken out
        md.inlinePatterns.register(Role(ROLE, md), "role", 200)  # before `code`


def on_config(config: MkDocsConfig) -> None:
    """Called by MkDocs."""
    config.markdown_extensions.append(Docstrings())  # type: ignore[arg-type]


def links_of(markdown: str) -> list[str]:
    """Links to files, but for those in blocks of code."""
    return LINK.findall(FENCE.sub("", markdown))


def outside(page: Path, link: str) -> Path | None:
    """The file that a link leads to if it is one outside the pages' folder."""
    target = (page.parent / link).resolve()
    return target if target.is_file() and DOCS not in target.parents else None


def place_of(file: Path) -> str:
    """Where it is in the site's sources."""
    if DOCS in file.parents:
        return file.relative_to(DOCS).as_posix()
    return "repo/" + file.relative_to(ROOT).as_posix()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by MkDocs: adds what pages link to, and what those pages do."""
    waiting = [Path(file.abs_src_path or "") for file in files.documentation_pages()]
    waiting += [ROOT / "CHANGELOG.md", ROOT / "recipes" / "README.md"]
    while waiting:
        page = waiting.pop()
        if DOCS not in page.parents and files.get_file_from_path(place_of(page)):
            continue
        if DOCS not in page.parents:
            path = str(page)
            files.append(File.generated(config, place_of(page), abs_src_path=path))
        if page.suffix == ".md":
            found = [outside(page, link) for link in links_of(page.read_text())]
            waiting += [file for file in found if file is not None]
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Called by MkDocs: links lead to where files are in the site."""
    path = Path(page.file.abs_src_path or "")
    here = os.path.dirname(page.file.src_uri)

    def within_the_site(match: re.Match[str]) -> str:
        target = (path.parent / match[1]).resolve()
        if not target.is_file():
            return match[1]  # MkDocs says so
        return os.path.relpath(place_of(target), here or ".")

    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(within_the_site, part) for part in parts[::2]]
    return "".join(parts)
