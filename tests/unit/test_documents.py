"""The documents are true as far as a machine can tell: links lead somewhere, commands parse, pages are found."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import click
import pytest
import typer

from keyfed.cli.app import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob(".github/**/*.md")])


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = script("site")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# Links


def slug(heading: str) -> str:
    """Name a heading as GitHub does; sites collapse dashes, which `same` allows."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(text: str) -> set[str]:
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    return {re.sub("-+", "-", slug(head)) for head in re.findall(r"^#{1,6} (.+)$", text, re.M)}


def links(text: str) -> Iterator[str]:
    """Targets of a page's links that are no web addresses."""
    for found in site.TOKEN.finditer(text):
        target = found["target"]
        if target is not None and not re.match(r"[a-z]+:", target):
            yield target


def broken(page: Path) -> list[str]:
    found = []
    for target in links(page.read_text("utf-8")):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            found.append(f"{target}: no such file")
        elif anchor and re.sub("-+", "-", anchor) not in anchors(file.read_text("utf-8")):
            found.append(f"{target}: no such heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    assert not broken(page)


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    (tmp_path / "a.md").write_text("# One `--flag` here\n", "utf-8")
    page = tmp_path / "b.md"
    page.write_text("[x](a.md#one---flag-here) [y](a.md#two) [z](c.md) `[q](d.md)` [w](https://example.org)\n", "utf-8")
    assert broken(page) == ["a.md#two: no such heading", "c.md: no such file"]


# Commands


def commands(text: str) -> Iterator[str]:
    """The arguments of the `keyfed …` lines in a page's code blocks."""
    blocks = re.findall(r"^```(?:sh|bash|text)?\n(.*?)^```", text, re.M | re.S)
    blocks += re.findall(r"(?:^ {4}.*\n?)+", text, re.M)
    for block in blocks:
        joined = re.sub(r"\\\n\s*", " ", block)
        for line in re.sub(r" {2,}(?=keyfed )", "\n", joined).splitlines():  # tables have several in a line
            start = re.match(r"\s*(?:[A-Z_]+=\S+ )*keyfed (?=[a-z])", line)  # its own options act when parsed
            if start and not re.search(r"…|\.\.\.|[─◄►]|\[-", line):
                yield re.split(r"\s[|>;<]|\s&&", f"{line[start.end() :]} ")[0]


def parsed(words: str) -> None:
    """Parse a command as the program does, and run nothing."""
    command: click.Command = typer.main.get_command(app)
    args, context = shlex.split(words, comments=True), None
    while True:
        context = command.make_context(command.name, list(args), parent=context, resilient_parsing=False)
        if not isinstance(command, click.Group):
            return
        _, command, args = command.resolve_command(context, [*context._protected_args, *context.args])


def test_every_command_of_the_documents_parses(monkeypatch):
    made = typer.main.get_command(app)
    monkeypatch.setattr(typer.main, "get_command", lambda app: made)
    wrong, count = [], 0
    for page in PAGES:
        if page.name in ("cli.md", "LOG.md", "CHANGELOG.md"):  # usage lines; what was true on its day
            continue
        for line in commands(page.read_text("utf-8")):
            line = re.sub(r"\b(N|MORE)\b", "3", line)  # stands for a number
            count += 1
            try:
                parsed(line)
            except click.exceptions.Exit:
                pass
            except click.MissingParameter as error:
                if len(line.split()) > 2:  # else a command is named, and not shown
                    wrong.append(f"{name(page)}: keyfed {line.strip()}: {error}")
            except (click.ClickException, ValueError) as error:
                wrong.append(f"{name(page)}: keyfed {line.strip()}: {error}")
    assert count > 80
    assert not wrong, "\n".join(wrong)


WRONG = ["trian", "train --no-such-option", "compare fedavg --seeds", "privacy epsilon --noise x"]


@pytest.mark.parametrize("line", WRONG)
def test_a_command_that_is_wrong_is_found(line):
    with pytest.raises(click.ClickException):
        parsed(line)


# The site


def entries(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for value in nav.values():
            yield from entries(value)
    else:
        for value in nav:
            yield from entries(value)


def test_every_page_is_in_the_menu_once():
    nav = list(entries(tomllib.loads((ROOT / "zensical.toml").read_text("utf-8"))["project"]["nav"]))
    assert len(nav) == len(set(nav))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.glob("*.md")} | set(site.PROJECT)
    assert {page for page in nav if not page.startswith("results/")} == pages
    assert all((DOCS / page).exists() for page in nav if page.startswith("results/"))


def linked(page: Path) -> set[Path]:
    """The files that a page links to."""
    return {(page.parent / target.partition("#")[0]).resolve() for target in links(page.read_text("utf-8"))}


QUESTIONS = [line for line in (DOCS / "questions.md").read_text("utf-8").splitlines() if "? |" in line]


def test_there_are_ten_questions():
    assert len(QUESTIONS) == 10


@pytest.mark.parametrize("row", QUESTIONS, ids=lambda row: row.split("|")[1].strip())
def test_a_question_is_answered_within_three_clicks(row):
    """The path that the page shows can be walked, from the start page to one that the answer names."""
    _, _, answer, shown, _ = row.split("|")
    path = [(DOCS / target).resolve() for target in links(shown)]
    assert path[0] == (DOCS / "index.md").resolve()
    assert len(path) - 1 <= 3
    assert path[-1] in [(DOCS / target.partition("#")[0]).resolve() for target in links(answer)]
    for page, after in pairwise(path):
        assert after in linked(page), f"{name(page)} has no link to {name(after)}"


def test_pages_of_the_site_have_no_link_out_of_it(tmp_path):
    written = site.gather(tmp_path)
    assert len(written) > 50
    for page in written:
        for target in links(page.read_text("utf-8")):
            path = target.partition("#")[0]
            if path:
                file = (page.parent / path).resolve()
                assert file.exists(), (page, target)
                assert file.is_relative_to(tmp_path.resolve())


def test_a_link_to_the_repository_becomes_a_path():
    at = DOCS / "results" / "a.md"
    text = (
        "[the test](../../tests/unit/test_documents.py), [`Makefile`](../../Makefile), [rules](../../CONTRIBUTING.md#x)"
    )
    shown = site.page(text, at)
    assert shown == "the test (`tests/unit/test_documents.py`), `Makefile`, [rules](../CONTRIBUTING.md#x)"
    assert site.page("[a](docs/chat.md#b) `[c](d.md)`", ROOT / "CHANGELOG.md") == "[a](chat.md#b) `[c](d.md)`"


def test_the_page_of_the_python_interface_is_that_of_the_package():
    assert script("api").page() == (DOCS / "api.md").read_text("utf-8"), "run `make docs`"


# The README, and code that pages show

README = (ROOT / "README.md").read_text("utf-8")
english = script("english")


def test_the_readme_is_read_in_two_minutes():
    assert len(README) <= 6_000
    prose = [block.text for block in english.markdown_blocks(README)]
    cells = [cell for table in tables(README) for row in table for cell in row]
    assert max(english.words(sentence) for text in prose + cells for sentence in english.sentences(text)) <= 30


def tables(text: str) -> Iterator[list[list[str]]]:
    """The tables of a page, as rows of cells; code and links as they are shown."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block).replace("`", "")
        yield [row.strip("|").split("|") for row in shown.splitlines() if not row.startswith("|--")]


def least_width(table: list[list[str]]) -> int:
    """Letters that a table needs at least: the longest word of each column."""
    return sum(max(len(word) for cell in column for word in re.split(r"[\s–-]", cell)) for column in zip(*table))  # noqa: B905


def test_the_readme_fits_a_screen_and_a_phone():
    """A phone shows 40 letters of code in a line, and about 32 of a table with four columns; a screen about 110."""
    commands = [line.strip() for line in README.splitlines() if line.startswith("    make ")]
    assert len(commands) == 3
    assert max(map(len, commands)) <= 40
    code = README.partition("```python\n")[2].partition("```")[0]
    assert max(map(len, code.splitlines())) <= 110
    written = re.sub(r"<!-- methods:.*<!-- end of methods -->", "", README, flags=re.S)
    found = {table[0][0].strip(): least_width(table) for table in tables(written)}
    assert len(found) == 3
    assert {head: width for head, width in found.items() if width > 32} == {}


def test_a_table_that_is_too_wide_is_found():
    (table,) = tables("| test perplexity | Kneser–Ney-5, pooled |\n|---|--:|\n| [a.stackexchange](a.md), all | 1 |\n")
    assert least_width(table) == len("a.stackexchange,") + len("pooled")


RUN_BY = {
    "README.md": "end_to_end/test_api.py",
    "docs/add-a-method.md": "end_to_end/test_add_a_method.py",
    "docs/extending.md": "end_to_end/test_extending.py",
    "docs/own-data.md": "end_to_end/test_own_data.py",
    "docs/python.md": "end_to_end/test_notebook.py",
    "docs/starting-smart.md": "end_to_end/test_variants.py",
}


def test_every_block_that_can_be_run_is_run_by_a_test():
    runnable = {name(page) for page in PAGES if re.search(r"^```(?:python|console)$", page.read_text("utf-8"), re.M)}
    assert runnable == set(RUN_BY)
    for page, test in RUN_BY.items():
        assert f'"{page.rpartition("/")[2]}"' in (ROOT / "tests" / test).read_text("utf-8")


# Files that others read


def test_the_citation_is_of_this_version():
    import keyfed

    text = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"version: {keyfed.__version__}\n" in text
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    (released,) = re.findall(rf"^## \[{re.escape(keyfed.__version__)}\] – (\d{{4}}-\d\d-\d\d)$", changes, re.M)
    assert f'date-released: "{released}"\n' in text
    for key in ("cff-version", "title", "message", "type", "authors", "license"):
        assert re.search(rf"^{key}:", text, re.M), key


def test_workflows_call_targets_that_exist():
    yaml = pytest.importorskip("yaml")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    called = set()
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(file.read_text("utf-8"))["jobs"].values():
            for step in job["steps"]:
                called |= set(re.findall(r"\bmake ([a-z-]+)", step.get("run", "")))
    assert {"test", "wheel", "site"} <= called <= targets
    for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(file.read_text("utf-8"))


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a container file, lines joined."""
    lines = [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


KNOWN = set("ARG FROM RUN COPY ENV USER WORKDIR VOLUME EXPOSE ENTRYPOINT CMD HEALTHCHECK LABEL".split())  # noqa: SIM905


def test_the_container_is_made_from_the_wheel_and_runs_without_rights():
    found = instructions((ROOT / "packaging" / "Containerfile").read_text("utf-8"))
    names = [instruction for instruction, _ in found]
    assert set(names) <= KNOWN
    assert names[0] in ("FROM", "ARG")
    bases = [rest.split()[0] for instruction, rest in found if instruction == "FROM"]
    assert all(":" in base and not base.endswith(":latest") for base in bases)
    copies = [rest for instruction, rest in found if instruction == "COPY"]
    assert any(
        "dist/keyfed-${VERSION}-py3-none-any.whl" in copy for copy in copies
    )  # two wheels in dist/ are two names
    import keyfed

    assert f"VERSION={keyfed.__version__}" in [rest for instruction, rest in found if instruction == "ARG"]
    sent = (ROOT / ".dockerignore").read_text("utf-8").split("\n", 1)[1].split()
    assert sent == ["*", "!constraints.txt", "!dist", "dist/*", "!dist/*.whl"], (
        "no run, key or corpus goes to a builder"
    )
    users = [rest for instruction, rest in found if instruction == "USER"]
    assert users
    assert users[-1] not in ("root", "0")
    assert names.index("USER") < names.index("ENTRYPOINT")
    for instruction, rest in found:
        if instruction in ("ENTRYPOINT", "CMD"):
            assert json.loads(rest)
        if instruction == "RUN" and "pip install" in rest:
            assert "--no-cache-dir" in rest
    assert all("sudo" not in rest and "curl" not in rest for _, rest in found)


def test_the_container_of_the_page_starts_with_an_empty_volume():
    """The first start makes the certificates: without them a server in a fresh volume refuses."""
    page = re.sub(r"\\\n\s*", " ", (DOCS / "install.md").read_text("utf-8"))
    (start,) = re.findall(r"^    docker run .* keyfed +(server .*)$", page, re.M)
    parsed(start)
    assert {"--make-certificates", "--host", "--name"} <= set(start.split())
    inside = re.findall(r"^    docker exec (?:--interactive )?keyfed keyfed (.*?)(?: < .*)?$", page, re.M)
    assert len(inside) == 2
    for words in inside:
        parsed(words)


def test_the_service_is_that_of_the_page():
    unit = (ROOT / "packaging" / "keyfed-server.service").read_text("utf-8")
    page = (DOCS / "deployment.md").read_text("utf-8")
    shown = [line.strip() for line in page.partition("keyfed-server.service`:")[2].split("\n\n    ", 1)[1].splitlines()]
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    assert f"ExecStart={command}" in shown
    parsed(command.partition("keyfed ")[2])
    assert [line for line in unit.splitlines() if line.startswith("[")] == ["[Unit]", "[Service]", "[Install]"]
