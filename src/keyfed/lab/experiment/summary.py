"""The pages about all studies together: what holds of the papers, where studies stand, which elements are here.

The front page has a line for every claim of a paper and for those of ours that are marked for it: first what holds,
then what does not, then what cannot be told. A line quotes the first comparison in the study's order and the range over
all of them, never a chosen one.

`paper_blocks` makes one report of it all that can be cited; its words are in templates/paper.toml.

The elements of the papers are in studies/coverage/*.toml. A row names what shows it: tests by path and name, cells by
study and labels. Both are looked up whenever the page is written. A test that is not there, or a cell that is not
finished at standard scale, is an error that names the row.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keyfed import __version__
from keyfed.errors import ConfigError
from keyfed.files import write_atomically
from keyfed.lab.experiment.claims import (
    ABSENT,
    EQUAL,
    FAILS,
    FAR,
    GAIN,
    HOLDS,
    LEARNING,
    UNSURE,
    Comparison,
    compare_rows,
    said_verdict,
    settled,
)
from keyfed.lab.experiment.grid import (
    SCALES,
    Study,
    StudyCheck,
    StudyClaim,
    cells_of,
    load_study,
    matches,
    study_names,
)
from keyfed.lab.experiment.page import (
    TEMPLATES,
    Results,
    causes,
    fill,
    interval_of,
    label_of,
    percent,
    picture,
    render,
    write_readme,
)
from keyfed.lab.experiment.plots import describe, drawn
from keyfed.lab.experiment.store import (
    OPEN,
    Row,
    Store,
    counted,
    main_scale,
    rows_of,
    write_printed,
    write_row,
    write_seeds,
)
from keyfed.reports.document import (
    NONE,
    Block,
    Code,
    Heading,
    Picture,
    Table,
    Text,
    escape_markdown,
    finite,
    markdown_table,
    show_duration,
    to_html,
)

FRONT, PROGRESS, COVERAGE = "README.md", "studies.md", "coverage.md"  # files, and their templates
PARTS = ("What holds", "What holds in some comparisons", "What does not hold", "What cannot be told")
MOST_WAITS = 2  # reasons of one claim that are written out
TYPED = "data/keyboard-irc.json"  # what `keyfed keyboard` measured


@dataclass(frozen=True, slots=True)
class JudgedClaim:
    """A claim, where it stands on the front page, and what is said of it there."""

    who: str
    study: str
    part: str
    says: str
    verdict: str
    more: tuple[str, ...] = ()
    page: str = ""  # the study's own by default

    @property
    def line(self) -> str:
        """One line of Markdown."""
        says = f"{self.says[0].upper()}{self.says[1:]}"
        page = f"[{self.study}]({self.page or f'{self.study}.md'})"
        start = f"- {escape_markdown(says)} ({page}): **{escape_markdown(self.verdict)}**."
        return " ".join([start, *map(escape_markdown, self.more)])


def judged_claims(folder: Path, store: Store) -> list[JudgedClaim]:
    """Every claim of a paper, and those of ours that are marked for the front page, in the order of the studies."""
    found = []
    for study in (load_study(name, folder) for name in study_names(folder)):
        there = store.of(study)
        found += [judged(study, there, claim, folder) for claim in study.claims if claim.front or not claim.ours]
        found += typed_claims(store.results) if study.name == "gboard" else []
    return found


def judged(study: Study, found: Results, claim: StudyClaim, folder: Path | None = None) -> JudgedClaim:
    """A claim with its verdict, our numbers beside the printed, how sure we are, and why."""
    who, scale = "Ours" if claim.ours else study.paper, main_scale(study, found)
    if scale is None:
        return JudgedClaim(who, study.name, PARTS[-1], claim.says, OPEN, (_finished(study, claim, found),))
    rows = rows_of(study, scale, found)
    comparisons, verdict = compare_rows(study, rows, claim), said_verdict(study, rows, claim, scale)
    part = part_of(comparisons, claim, scale)
    more = [] if scale == "smoke" else [*numbers(comparisons, claim), *causes(claim, study, found, folder)]
    more += unsettled(study, rows, comparisons, claim, found, scale) if part == PARTS[-1] else []
    return JudgedClaim(who, study.name, part, claim.says, verdict, tuple(more))


def part_of(comparisons: Sequence[Comparison], claim: StudyClaim, scale: str) -> str:
    """Under which heading a claim stands: by all comparisons that decide it, none of which counts more."""
    holds, partly, fails, unknown = PARTS
    words = {c.verdict for c in settled(comparisons)} - {OPEN}
    if scale == "smoke" or LEARNING in words or not words - {UNSURE}:
        return unknown
    if HOLDS in words:
        return holds if claim.some or words == {HOLDS} else partly
    return fails


def numbers(comparisons: Sequence[Comparison], claim: StudyClaim) -> list[str]:
    """The first comparison in the study's order with its numbers, then the range of differences over all."""
    known = [c for c in settled(comparisons) if c.ours is not None and c.verdict != OPEN]
    if not known:
        return []
    changes = [c.change for c in known if c.change is not None and not any(c.beyond)]
    return [_compared(known[0], claim), *(_range(changes) if len(changes) > 1 else ())]


def _range(changes: Sequence[float]) -> Iterable[str]:
    many = "Both" if len(changes) == 2 else f"All {len(changes)}"
    yield f"{many} differences: {percent(min(changes))} to {percent(max(changes))}."


def _compared(c: Comparison, claim: StudyClaim) -> str:
    """One comparison: where, ours, the other, the difference and its interval."""
    measure, ours = claim.measure, write_row(c.row, claim.measure)
    change = None if c.change is None else 100 * math.expm1(c.change)
    if c.against is not None:
        brackets = [] if change is None or any(c.beyond) else [f"{change:+.1f} %"]
        brackets += [interval_of(c)] if brackets and c.interval is not None else []
        if c.printed:
            brackets.append("printed " + " and ".join(write_printed(value, measure) for value in c.printed))
        after = f" ({'; '.join(brackets)})" if brackets else ""
        return f"{c.where}: {ours} against {write_row(c.against, measure)}{after}."
    if claim.kind == "printed":
        interval = "" if c.interval is None else f" ({interval_of(c)})"
        return f"{c.where}: {ours}, printed {write_printed(c.other, measure)}{interval}."
    seeds = f" ({write_seeds(c.row, measure)})" if len(c.row.records) > 1 else ""
    where = "" if change is None else f": {abs(change):.1f} % {'below' if change < 0 else 'above'} the bound"
    return f"{ours}{seeds}{where}{'' if c.interval is None else f' ({interval_of(c)})'}."


def unsettled(
    study: Study, rows: Sequence[Row], comparisons: Sequence[Comparison], claim: StudyClaim, found: Results, scale: str
) -> list[str]:
    """Say what keeps a claim from being told: missing data, open cells, runs that still learn, one seed."""
    absent = dict.fromkeys(row.absent for row in rows if row.absent and matches(row.labels, claim.of))
    if absent and said_verdict(study, rows, claim, scale) == ABSENT:
        return [f"Missing: {'; '.join(absent)}."]
    known = [c for c in settled(comparisons) if c.verdict != OPEN]
    if scale == "smoke" or not known:
        return [_finished(study, claim, found)]
    waits = list(dict.fromkeys(why for c in known if c.verdict == LEARNING for why in c.waits.split("; ") if why))
    if waits:
        more = len(waits) - MOST_WAITS
        return [f"{'; '.join(waits[:MOST_WAITS])}{f'; and {more} more' if more > 0 else ''}."]
    if all(c.interval is None for c in known):
        return [f"One seed has no spread: only a ratio above {FAR:g} would decide."]
    return []


def _finished(study: Study, claim: StudyClaim, found: Results) -> str:
    """How many of the cells that a claim is about are finished, at the first scale above smoke that has any."""
    planned = {name: [c for c in cells_of(study, name) if matches(c.labels, claim.of)] for name in study.scales}
    above = next((name for name in SCALES[1:] if planned.get(name)), "smoke")
    done = sum(cell.id in found for cell in planned[above])
    return f"Of {len(planned[above])} cells at scale {above} that it is about {done} are finished."


def typed_claims(results: Path) -> list[JudgedClaim]:
    """The slides' word on the n-gram model's cost, beside what typing on both measured; one machine, one run."""
    try:
        rows = json.loads((results / TYPED).read_text("utf-8"))["rows"]
        times = {row["name"]: row["latency"]["word"] for row in rows}
    except (OSError, ValueError, KeyError, TypeError):
        return []
    counts = [word for name, word in times.items() if name.startswith("n-gram")]
    networks = [word for name, word in times.items() if name.startswith("cifg")]
    out = []
    for says, key, unit in (
        ("the n-gram model takes longer for a word than the network", "p50_ms", "ms a word, the median"),
        ("the n-gram model takes more of the processor than the network", "cpu_ms", "ms of CPU a word"),
    ):
        ours, its = ([value for word in side if (value := finite(word.get(key)))] for side in (counts, networks))
        if not ours or not its:
            continue
        least, most = math.log(min(ours) / max(its)), math.log(max(ours) / min(its))
        part = PARTS[0] if least > math.log(FAR) else PARTS[2] if most < -math.log(FAR) else PARTS[-1]
        verdict = {PARTS[0]: HOLDS, PARTS[2]: FAILS}.get(part, UNSURE)
        more = (
            f"{_ends(ours)} against {_ends(its)} {unit}.",
            *_range([math.log(a / b) for a in ours for b in its]),
            "One run in Python on a server's processor, without an interval; no phone and no energy was measured.",
        )
        out.append(JudgedClaim("Gboard", "keyboard", part, says, verdict, more, "../keyboard.md"))
    return out


def _ends(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in (min(values), max(values))))


def front_text(folder: Path, store: Store) -> str:
    """Return the front page: a line a claim, by what is known of it and by paper."""
    claims = judged_claims(folder, store)
    papers = dict.fromkeys([*sorted({c.who for c in claims} - {"Ours"}), "Ours"])
    counts = [["", *(part.removeprefix("What ") for part in PARTS)]]
    counts += [[who, *(str(sum((c.who, c.part) == (who, part) for c in claims)) for part in PARTS)] for who in papers]
    groups = [
        (
            part,
            [(who, lines) for who in papers if (lines := [c.line for c in claims if (c.who, c.part) == (who, part)])],
        )
        for part in PARTS
    ]
    return render(FRONT, counts=counts, parts=[(part, group) for part, group in groups if group])


def progress_text(folder: Path, store: Store) -> str:
    """Return the page of where each study stands at every scale, and of the rule of verdicts."""
    stands, pages = [["study", "paper", "its page is of", *SCALES, "what is open, and why"]], []
    for name in study_names(folder):
        study = load_study(name, folder)
        found = store.of(study)
        counts = {scale: counted(study, scale, found) for scale in study.scales}
        both = (counts.get(scale, (0, 0)) for scale in SCALES)
        cells = [f"{done} of {done + left}" if done + left else NONE for done, left in both]
        stands.append(
            [name, study.paper, main_scale(study, found) or NONE, *cells, "; ".join(_left(study, found)) or NONE]
        )
        pages.append((study.title, f"{name}.md"))
    limits = {"gain": f"{100 * GAIN:g}", "equal": f"{100 * (EQUAL - 1):.0f}", "learning": LEARNING}
    return render(PROGRESS, stands=stands, pages=pages, **limits)


def _left(study: Study, found: Results) -> Iterable[str]:
    """What is open of a study above smoke scale: files that are not at hand, then cells that were not run."""
    absent = Counter(cell.absent for cell in cells_of(study, "standard") if cell.absent)
    for why, count in absent.items():
        yield f"{count} cells cannot be run: {why}"
    for scale in SCALES[1:]:
        left = counted(study, scale, found)[1]
        seconds = [finite(found[cell.id].get("seconds")) for cell in cells_of(study, scale) if cell.id in found]
        known = [second for second in seconds if second]
        takes = f", about {show_duration(left * sum(known) / len(known))} by the finished ones" if known else ""
        if left:
            yield f"{scale}: {left} not run yet{takes}"


def write_front(folder: Path, store: Store) -> Path:
    """Write docs/results/README.md, the page of where the studies stand, and the README's table of methods."""
    write_readme(folder, store)
    write_atomically(store.results / FRONT, front_text(folder, store).encode())
    write_atomically(store.results / PROGRESS, progress_text(folder, store).encode())
    return store.results / FRONT


STATUSES = ("works", "partial", "missing", "wrong")
WANTS = ("data", "phone", "detail")
SOURCE = {"paper": str, "title": str, "element": [dict]}
ELEMENT = {"number": int, "what": str, "status": str, "reason": str, "want": str, "tests": [str], "cells": [str]}


@dataclass(frozen=True, slots=True)
class Element:
    """One thing that a source has: an equation, a setting, a table, a claim.

    Attributes:
      status: "works"; "partial": some of it, or with a stand-in; "missing"; "wrong": ours is not the source's.
      reason: what is left to do, or a remark on what works.
      want: "data", "phone" or "detail" where nobody here can do more for want of it; a detail is one not printed.
      tests: `path::name` of tests that show it, `cells`: `STUDY | AXIS = LABEL` of finished cells that do.
    """

    number: int
    what: str
    status: str
    reason: str = ""
    want: str = ""
    tests: Sequence[str] = ()
    cells: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """A paper and its elements."""

    paper: str
    title: str
    elements: tuple[Element, ...]


def load_source(path: Path) -> Source:
    """Read a paper's elements; a mistake is one line that names the file and the element."""
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise ConfigError(f"{path}: no list of elements: {e}") from None
    check = StudyCheck(f"coverage/{path.name}")
    check.table(document, SOURCE, 3, "the file")
    for number, entry in enumerate(document["element"], 1):
        what = f"element {entry.get('number', number)}"
        check.table(entry, ELEMENT, 3, what)
        check.known([entry["status"]], STATUSES, f"status of {what}")
        check.known([entry["want"]] if "want" in entry else [], WANTS, f"want of {what}")
        if entry["number"] != number:
            check.refuse(f"{what} stands in place {number}; expected numbers from 1 on without a gap")
        if entry["status"] == "works":
            if not entry.get("tests") and not entry.get("cells"):
                check.refuse(f"{what} works, but nothing shows it; name tests or cells")
            if "want" in entry:
                check.refuse(f"{what} works and wants {entry['want']}; leave one out")
        elif not entry.get("reason"):
            check.refuse(f"{what} is {entry['status']} without a reason; say what is left to do")
    return Source(document["paper"], document["title"], tuple(Element(**entry) for entry in document["element"]))


@functools.cache
def named_tests(path: Path) -> frozenset[str]:
    """Names of the tests of a file, `Class::name` for those of a class; found without running it."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        within = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + n.name for n in within if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    return frozenset(name for name in found if name.rpartition("::")[2].startswith("test_"))


def check_test(test: str, root: Path) -> None:
    """Refuse a test that is not there."""
    path, _, name = test.partition("::")
    file = root / path
    if not path.startswith("tests/") or not file.is_file():
        raise ConfigError(f'test "{test}": {path} is no file of tests/')
    if name not in named_tests(file):
        raise ConfigError(f'test "{test}": {path} has no such test; expected path::name of a function of it')


def check_cells(said: str, folder: Path, store: Store) -> None:
    """Refuse cells that a study does not have at standard scale, or that are not finished there."""
    name, *conditions = (part.strip() for part in said.split("|"))
    study = load_study(name, folder)
    where = dict(label_of(condition, study, said) for condition in conditions)
    cells = [cell for cell in cells_of(study, "standard") if matches(cell.labels, where) and not cell.absent]
    if not cells:
        raise ConfigError(f'cell "{said}": no row of {name} has these labels at standard scale')
    found = store.of(study)
    left = sum(cell.id not in found for cell in cells)
    if left:
        raise ConfigError(f'cell "{said}" is not finished: {left} of {len(cells)} are open at standard scale')


def coverage_text(folder: Path, store: Store) -> str:
    """Return the page of the elements of every paper, each with what shows it.

    Args:
      folder: of the studies; the tests lie beside it.
    """
    sources = {path: load_source(path) for path in sorted((folder / "coverage").glob("*.toml"))}
    for path, source in sources.items():
        for element in source.elements:
            try:
                for test in element.tests:
                    check_test(test, folder.parent)
                for said in element.cells:
                    check_cells(said, folder, store)
            except ConfigError as e:
                raise ConfigError(f"coverage/{path.name}: element {element.number}: {e}") from None
    every = [element for source in sources.values() for element in source.elements]
    counts = [["paper", "elements", *STATUSES], *(_counts(s.paper, s.elements) for s in sources.values())]
    return render(
        COVERAGE,
        counts=[*counts, _counts("all", every)],
        wanting={want: sum(element.want == want for element in every) for want in WANTS},
        sources=[(source, _table(source)) for source in sources.values()],
    )


def _counts(name: str, elements: Sequence[Element]) -> list[str]:
    found: Mapping[str, int] = Counter(element.status for element in elements)
    return [name, str(len(elements)), *(str(found[status]) for status in STATUSES)]


def _table(source: Source) -> str:
    """A paper's elements in Markdown, with links to what shows them."""
    rows = [["#", "element", "status", "shown by", "what is left, or a remark"]]
    for element in source.elements:
        tests = [f"[{test.partition('::')[2]}](../../{test.partition('::')[0]})" for test in element.tests]
        cells = [_cell(said) for said in element.cells]
        reason = escape_markdown(element.reason) or NONE
        wants = f"For want of {'a phone' if element.want == 'phone' else element.want}: " if element.want else ""
        status = element.status if element.status == "works" else f"**{element.status}**"
        shown = ", ".join([*tests, *cells]) or NONE
        rows.append([str(element.number), escape_markdown(element.what), status, shown, wants + reason])
    return markdown_table(rows)


def _cell(said: str) -> str:
    name, *conditions = (part.strip() for part in said.split("|"))
    labels = ", ".join(condition.partition("=")[2].strip() for condition in conditions)
    return f"[{name}]({name}.md){f' ({escape_markdown(labels)})' if labels else ''}"


def write_coverage(folder: Path, store: Store) -> Path:
    """Write docs/results/coverage.md."""
    write_atomically(store.results / COVERAGE, coverage_text(folder, store).encode())
    return store.results / COVERAGE


WORDS = TEMPLATES / "paper.toml"


def paper_blocks(folder: Path, store: Store) -> list[Block]:
    """Return the report of all studies as a short paper; every number in it is read from cells."""
    words = tomllib.loads(WORDS.read_text("utf-8"))
    studies = {name: load_study(name, folder) for name in study_names(folder)}
    claims = judged_claims(folder, store)
    told = [c for c in claims if c.who != "Ours"]
    counts = ", ".join(f"{sum(c.part == part for c in told)} {_verb(part)}" for part in PARTS)
    papers = [who for who in words["paper"] if any(study.paper == who for study in studies.values())]
    blocks: list[Block] = [
        Heading(words["title"], 1),
        Text(f"Keyfed {__version__}. Every figure of ours is read from the results of cells.", "note"),
        Text(f"Of {len(told)} claims of {len(papers)} papers that a study can judge, {counts}.", "verdict"),
        *(Text(line) for part in PARTS[:3] for line in _listed(part, told)),
        Heading("Question"), *map(Text, words["question"]),
        Heading("Method"), *map(Text, words["method"]),
        Heading("Data and networks"), *data_blocks(store, studies.values()),
    ]  # fmt: skip
    for who in papers:
        blocks += [
            Heading(f"Results: {who}"),
            *map(Text, _filled(words["paper"][who]["about"], studies, store, folder)),
        ]
        for study in (study for study in studies.values() if study.paper == who):
            blocks += study_blocks(study, store, [c for c in told if c.study == study.name])
        others = [c for c in told if c.who == who and c.study not in studies]
        blocks += [claim_table(others)] if others else []
    limits = [*words["limits"], *_open_cells(studies.values(), store), *_elements(folder)]
    return [*blocks, Heading("Limits"), *map(Text, limits), Heading("How to cite"), Code(citation(words["title"]))]


def _verb(part: str) -> str:
    """The verb of a heading for several claims."""
    verbs = ("hold", "hold in some comparisons", "do not hold", "cannot be told")
    return dict(zip(PARTS, verbs, strict=True))[part]


def _listed(part: str, claims: Sequence[JudgedClaim]) -> Iterable[str]:
    """The claims of a part in one sentence."""
    found = [f"{c.says} ({c.who})" for c in claims if c.part == part]
    if found:
        yield f"{part}: {'; '.join(found)}."


def _elements(folder: Path) -> Iterable[str]:
    """How many elements of the papers are shown to work."""
    every = [e for path in sorted((folder / "coverage").glob("*.toml")) for e in load_source(path).elements]
    if every:
        works = sum(element.status == "works" for element in every)
        yield f"Of {len(every)} elements of the papers {works} work, as a test or a finished cell shows."


def _filled(sentences: Sequence[str], studies: Mapping[str, Study], store: Store, folder: Path) -> list[str]:
    """Sentences with their numbers; a number names its study, so any that asks for no targets will do."""
    base = next(study for study in studies.values() if not study.targets)
    found = [fill(sentence, base, store.of(base), folder) for sentence in sentences]
    return [sentence for sentence in found if sentence is not None]


def study_blocks(study: Study, store: Store, claims: Sequence[JudgedClaim]) -> list[Block]:
    """A study as a part of the report: its claims, its first figure, and the line that repeats its numbers."""
    found = store.of(study)
    scale = main_scale(study, found)
    blocks: list[Block] = [Heading(study.title, 3)]
    if scale is None or scale == "smoke":
        return [*blocks, Text("Not judged: no cell above smoke scale is finished.", "note")]
    rows = rows_of(study, scale, found)
    blocks += [Text(study.about), *([claim_table(claims)] if claims else [])]
    for plot in drawn(study, rows)[:1]:
        path = picture(study, plot["name"])
        if (store.results / path).is_file():
            said = describe(study, plot, rows, scale)
            blocks += [Picture(path, said, (store.results / path).read_bytes()), Text(said, "note")]
    lines = repeat_lines(study, rows, scale)
    return [*blocks, Text("What computes these numbers anew:", "note"), Code("\n".join(lines))]


def claim_table(claims: Sequence[JudgedClaim]) -> Table:
    """Claims, verdicts, and how sure they are."""
    head = ["claim", "verdict", "numbers, interval, cause"]
    return Table(
        [head, *([f"{c.says[0].upper()}{c.says[1:]}", c.verdict, " ".join(c.more) or NONE] for c in claims)],
        numbers=False,
    )


def repeat_lines(study: Study, rows: Sequence[Row], scale: str) -> list[str]:
    """The commands that compute a study's numbers anew; seeds beyond the scale's own have a line of their own."""
    line = f"keyfed study {study.name} --scale {scale} --results again"
    more = sorted({seed for row in rows for seed in row.seeds - set(study.scales[scale].seeds_of(row.labels))})
    return [line, *([f"{line} --seeds {','.join(map(str, more))}"] if more else [])]


def data_blocks(store: Store, studies: Iterable[Study]) -> list[Block]:
    """The corpora and networks of the finished cells above smoke scale."""
    texts: dict[tuple[str, str], list[Mapping[str, object]]] = {}
    networks: dict[str, list[Mapping[str, object]]] = {}
    for study in studies:
        there = store.of(study)
        cells = [cell for scale in SCALES[1:] if scale in study.scales for cell in cells_of(study, scale)]
        for record in (there[cell.id] for cell in cells if cell.id in there):
            if record.get("data_sha256"):
                texts.setdefault((record["data"], record["data_sha256"]), []).append(record)
            if record.get("parameters"):
                networks.setdefault(record["model"], []).append(record)
    columns = ("clients", "vocabulary", "train_tokens")
    corpora = [[name, digest[:12], *(_several(of, key) for key in columns)] for (name, digest), of in texts.items()]
    models = [[name, _several(of, "parameters")] for name, of in networks.items()]
    return [
        Table([["corpus", "hash", "clients", "vocabulary", "training tokens"], *sorted(corpora)]),
        Text("The hash is the beginning of the SHA-256 of the text as it was read.", "note"),
        Table([["network", "parameters, with the vocabularies it was trained on"], *sorted(models)]),
    ]


def _several(records: Sequence[Mapping[str, object]], key: str) -> str:
    values = sorted({int(value) for r in records if (value := finite(r.get(key)))})
    return " to ".join(dict.fromkeys(f"{value:,}" for value in (values[0], values[-1]))) if values else NONE


def _open_cells(studies: Iterable[Study], store: Store) -> list[str]:
    counts = [counted(study, "standard", store.of(study)) for study in studies if "standard" in study.scales]
    done, left = (sum(side) for side in zip(*counts, strict=True))
    return [
        f"Of {done + left} cells at standard scale {left} are open; a cell that several studies share counts in each."
    ]


def citation(title: str) -> str:
    """An entry for a list of references."""
    return (
        "@techreport{keyfed,\n"
        f"  title  = {{{title}}},\n"
        "  author = {{The Keyfed maintainers}},\n"
        f"  note   = {{Keyfed {__version__}; generated from docs/results/data by keyfed study report --html FILE}},\n"
        "}"
    )


def write_paper(folder: Path, store: Store, file: Path) -> Path:
    """Write the report as one page that needs nothing beside it."""
    write_atomically(file, to_html(paper_blocks(folder, store)).encode())
    return file
