"""Check that pages and docstrings are plain English: no banned word, no sentence above 30 words.

    python scripts/english.py                   # count the offenders of every file; fail where a strict file has one
    python scripts/english.py README.md …       # show each offender of these files; fail where there is one

Markdown pages are read without code blocks and tables. Python files are read for three things: docstrings, comments,
and the identifiers that they define. Text in backquotes is code: it counts as one word of its sentence, and its words
are checked as identifiers. A file that needs a banned word says so in a comment, with the reason:

    # english: hidden – the width of a recurrent state, as in the papers
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS = 30

# Files that have no offender. Elsewhere the number is printed; tests/contract/test_english.py lets it only fall.
STRICT = (
    "README.md",
    "docs/secure.md",
    "docs/privacy.md",
    *(f"src/keyfed/federated/{name}.py" for name in ["types", "round", "weigh", "local", "server", "duals", "methods"]),
)

# Banned everywhere: the word, and what to write.
BANNED = {
    "told": "statistics, given by",
    "asked": "requested, round terms",
    "course": "run, loop",
    "along": "with, adaptive",
    "hinge": "pivotal client",
    "fates": "outcomes",
    "dealing": "partition",
    "dealt": "partitioned",
    "whoever": "a client that",
    "whom": "which client",
    "nobody": "no client",
    "beside": "next to, with",
}

# Banned as identifiers (in code, and in backquotes), because their ordinary sense is needed in prose.
BANNED_NAMES = {
    "hidden": "report_free, self_weighed",
    "part": "upload, split, component",
    "turn": "task",
    "given": "the thing that is given",
    "standing": "join_weight",
    "once": "join_weight",
    "way": "client_batch",
    "walk": "run_steps",
    "track": "slots",
}

# What the invented senses of these words look like in prose.
BANNED_PHRASES = {
    r"\bhidden (?:round|sum|upload|report|client)s?\b": "report-free …",
    r"\b(?:a|the|its|their|each|one) client's (?:part|turn)\b": "upload, task",
    r"\bin turn\b": "one after the other",
    r"\bstanding (?:weight|mass)s?\b": "join weight",
    r"\bof course\b": "(leave it out)",
}

_WORD = re.compile(r"[^\W_](?:[\w'’.,%/+×-]*[^\W_])?%?")
_SHORT = re.compile(r"\b(e\.g|i\.e|et al|cf|vs|Eq|eq|Fig|Sec|resp|No|approx)\.")
_CAMEL = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_EXCUSE = re.compile(r"#\s*english:\s*(\w+)\s*–\s*\S")


class Offence(NamedTuple):
    """One offender of a file."""

    line: int
    what: str


class Block(NamedTuple):
    """A paragraph of prose, and the line where it begins."""

    line: int
    text: str


def sentences(text: str) -> list[str]:
    """Return the sentences of a paragraph; an abbreviation ends none.

    Example:
      >>> sentences("One claim, e.g. this. Another one.")
      ['One claim, e.g. this.', 'Another one.']
    """
    held = _SHORT.sub(lambda match: match[0].replace(".", "\0"), " ".join(text.split()))
    return [
        found.replace("\0", ".")
        for found in re.split(r"(?<=[.!?])[\"”')\]*]*\s+(?=[\"“(\[*]*(?:[^\W_a-z]|`))", held)
        if found
    ]


def words(sentence: str) -> int:
    """Count the words of a sentence; code in backquotes, a link's address and a formula count as one or none."""
    plain = re.sub(r"`+[^`]*`+", " code ", sentence)
    plain = re.sub(r"\]\([^)]*\)|\$[^$]*\$|https?://\S+", " ", plain)
    return len(_WORD.findall(plain))


def _of_prose(blocks: list[Block], excused: set[str]) -> Iterator[Offence]:
    for block in blocks:
        for sentence in sentences(block.text):
            if words(sentence) > MOST_WORDS:
                yield Offence(block.line, f"{words(sentence)} words: {sentence[:70]}…")
        plain = re.sub(r"`+[^`]*`+", " ", block.text)
        plain = re.sub(r"\]\([^)]*\)", "] ", plain)
        for word in re.findall(r"[^\W\d_]+", plain.lower()):
            if word in BANNED and word not in excused:
                yield Offence(block.line, f"{word!r}: write {BANNED[word]}")
        for phrase, better in BANNED_PHRASES.items():
            for match in re.finditer(phrase, plain, re.IGNORECASE):
                yield Offence(block.line, f"{match[0]!r}: write {better}")


def _of_names(names: list[tuple[int, str]], excused: set[str]) -> Iterator[Offence]:
    banned = BANNED | BANNED_NAMES
    for line, name in names:
        for word in {piece.lower() for piece in _CAMEL.findall(name)} & (banned.keys() - excused):
            yield Offence(line, f"the name {name}: write {banned[word]}")


def markdown_blocks(text: str) -> list[Block]:
    """Return the paragraphs and list items of a page, without code blocks, tables, pictures and comments."""
    text = re.sub(r"<!--.*?-->", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    blocks: list[Block] = []
    fenced, listed = False, False
    begins, lines = 0, []

    def close() -> None:
        if lines:
            blocks.append(Block(begins, "\n".join(lines)))
        lines.clear()

    for at, line in enumerate([*text.splitlines(), ""], start=1):
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
            close()
        elif fenced:
            continue
        elif not line.strip():
            close()
        elif not lines and line.startswith("    ") and not listed:
            continue  # an indented block of code
        elif line.lstrip().startswith(("|", "![", "#", "<")):
            close()
            listed = False
        else:
            item = re.match(r"\s*(?:[-*+]|\d+\.)\s+", line)
            if item:
                close()
                listed = True
            elif not lines and not line.startswith(" "):
                listed = False
            if not lines:
                begins = at
            lines.append(line[item.end() :] if item else line.strip())
    close()
    return blocks


def _docstring_blocks(line: int, text: str) -> list[Block]:
    """Return the prose of a docstring: no doctest, no display formula, no reference, an argument a block."""
    blocks: list[Block] = []
    skipped: int | None = None
    for at, chunk in enumerate(re.split(r"\n", text)):
        indent = len(chunk) - len(chunk.lstrip())
        if skipped is not None and (not chunk.strip() or indent > skipped):
            continue
        skipped = None
        bare = chunk.strip()
        if bare.startswith((".. math::", "References:", "Example:", "Examples:")) or bare.endswith("::"):
            skipped = indent
            continue
        if not bare or bare.startswith((">>>", "...", "|")) or (indent >= 8 and "  " in bare):
            blocks.append(Block(0, ""))
            continue
        starts = re.match(r"(?:[-*+]|\d+\.)\s+|[\w, *`]+: ", bare) or bare.endswith(":")
        if blocks and blocks[-1].text and not starts and not blocks[-1].text.endswith(":"):
            blocks[-1] = Block(blocks[-1].line, f"{blocks[-1].text}\n{bare}")
        else:
            blocks.append(Block(line + at, bare))
    return [block for block in blocks if block.text]


def _comment_blocks(text: str) -> list[Block]:
    blocks: list[Block] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(?:fmt|noqa|type|english|mypy|ruff):|#!", token.string):
            continue
        bare = token.string.lstrip("# ")
        if token.start[0] == last + 1 and blocks and token.line.strip().startswith("#"):
            blocks[-1] = Block(blocks[-1].line, f"{blocks[-1].text}\n{bare}")
        else:
            blocks.append(Block(token.start[0], bare))
        last = token.start[0]
    return blocks


def _names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every name that a file defines: functions, classes, arguments, variables, fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def _quoted_names(blocks: list[Block]) -> list[tuple[int, str]]:
    spans = ((block.line, span) for block in blocks for span in re.findall(r"`([^`\n]+)`", block.text))
    return [(line, name) for line, span in spans for name in re.findall(r"[A-Za-z_]\w+", span)]


def offences(path: Path) -> list[Offence]:
    """Return the offenders of a file, by line."""
    text = path.read_text("utf-8")
    excused = {word.lower() for word in _EXCUSE.findall(text)}
    if path.suffix == ".md":
        blocks = markdown_blocks(text)
        return sorted([*_of_prose(blocks, excused), *_of_names(_quoted_names(blocks), excused)])
    tree = ast.parse(text)
    blocks = _comment_blocks(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            docstring = ast.get_docstring(node, clean=True)
            if docstring:
                blocks += _docstring_blocks(node.body[0].lineno, docstring)
    names = sorted({name: line for line, name in sorted(_names(tree), reverse=True)}.items(), key=lambda pair: pair[1])
    return sorted([*_of_prose(blocks, excused), *_of_names([(line, name) for name, line in names], excused)])


def checked() -> list[Path]:
    """Return every file that is read: README, pages that people write, the package."""
    generated = {"cli.md", "options.md", "methods.md", "compatible.md", "LOG.md"}
    pages = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in generated]
    return [ROOT / "README.md", *pages, *sorted((ROOT / "src" / "keyfed").rglob("*.py"))]


def counts() -> dict[str, int]:
    """Return the number of offenders of each file that has one, by its path."""
    found = {path.relative_to(ROOT).as_posix(): len(offences(path)) for path in checked()}
    return {path: count for path, count in found.items() if count}


def main(arguments: list[str]) -> int:
    """Print the offenders; return the exit code."""
    if arguments:
        found = [(name, offence) for name in arguments for offence in offences(Path(name))]
        for name, offence in found:
            print(f"{name}:{offence.line}: {offence.what}")
        return int(bool(found))
    found = counts()
    strict = sum(found.get(path, 0) for path in STRICT)
    for path, count in sorted(found.items(), key=lambda item: -item[1])[:20]:
        print(f"{count:5} {path}{' (strict)' if path in STRICT else ''}")
    print(f"{sum(found.values())} offenders in {len(found)} files; {strict} of them in the {len(STRICT)} strict files")
    return int(strict > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
