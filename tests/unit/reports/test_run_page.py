"""The report of a run: verdict and table for any numbers, all parts optional, nothing hostile gets through."""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.config.load import Config, DataConfig, apply_settings
from keyfed.errors import RunError
from keyfed.reports.document import (
    Code,
    Heading,
    Links,
    Picture,
    Table,
    Text,
    clean,
    escape_markdown,
    show_duration,
    to_html,
    to_markdown,
)
from keyfed.reports.figures import draw_plots, round_ticks
from keyfed.reports.run_page import document, result_table, verdict, write_report
from keyfed.run.folder import OWN_TEXT, write_run_toml

PNG = b"\x89PNG\r\n\x1a\n"
positive = st.floats(min_value=0.0, exclude_min=True, allow_infinity=False)
anything = st.one_of(st.none(), st.floats(), st.integers(), st.booleans())


def summary(perplexity: float, top1: float = 0.1) -> dict[str, Any]:
    return {
        "perplexity": perplexity,
        "nats": math.log(perplexity),
        "top1": top1,
        "top3": 2 * top1,
        "top1_words": top1 / 2,
        "top3_words": top1,
        "oov_rate": 0.05,
        "tokens": 1234,
    }


def a_result(**changes: Any) -> dict[str, Any]:
    spread = {"clients": 20, "best": 90.0, "p10": 95.0, "median": 110.0, "p90": 130.0, "worst": 140.0}
    result: dict[str, Any] = {
        "run": "somewhere",
        "method": "fedavg",
        "model": "cifg",
        "data": "sotu",
        "parameters": 11260,
        "vocabulary": 500,
        "clients": 20,
        "cohort": 4,
        "rounds": 2,
        "seed": 1,
        "best_round": 2,
        "test": {**summary(112.0), "sentence_perplexity": 113.0},
        "unseen": summary(120.0),
        "spread": {**spread, "worst_decile": summary(135.0, 0.07)},
        "unseen_spread": {**spread, "clients": 4, "worst_decile": summary(136.0, 0.06)},
        "clients_perplexity": {"seen": [90.0 + k for k in range(20)], "unseen": [100.0, 120.0, 130.0]},
        "baselines": {
            "unigram": {"test": summary(220.0), "unseen": summary(230.0), "seconds": 0.1},
            "kneser_ney": {"test": summary(100.0), "unseen": summary(101.0), "seconds": 1.0, "order": 5},
            "central": {"test": summary(111.5), "unseen": summary(119.0), "seconds": 2.0},
        },
        "traffic": {"down": 8_000_000, "up": 6_000_000, "control": 1000},
        "refused": 1,
        "tokens_trained": 9600,
        "oov_rate": {"train": 0.04, "valid": 0.05, "test": 0.05},
        "seconds": 75.0,
        "evaluation_seconds": 8.0,
        "baseline_seconds": 4.0,
    }
    return {**result, **changes}


def a_record(number: int, perplexity: float) -> dict[str, Any]:
    return {
        "round": number,
        "loss": math.log(perplexity),
        "tokens": 1600,
        "worked": 4800,
        "cohort": 4,
        "contributors": ["a", "b", "c"],
        "refused": {"d": "non-finite report"} if number == 2 else {},
        "effective_clients": 3.5,
        "traffic": {"down": 4_000_000, "up": 3_000_000, "control": 500},
        "seconds": 0.5,
        "valid": summary(perplexity),
        "elapsed": 0.5 * number,
    }


def a_folder(folder: Path, result: dict[str, Any] | None, records: list[Any], config: Config | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    write_run_toml(folder, config or Config(), {"keyfed": "0.1.0", "commit": None, "device": "cpu"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


class Page(HTMLParser):
    """What a browser would find in a page: tags with attributes, and the text between."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


SUGGESTIONS = [("i am", ["the", "not", "going"]), ("so", ["far"])]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A run of two rounds and what its report wrote; drawing it takes a second."""
    folder = a_folder(
        tmp_path_factory.mktemp("whole") / "run", a_result(), [a_record(1, 150.0), a_record(2, 110.0)]
    )  # fmt: skip
    return folder, write_report(folder, SUGGESTIONS)


def test_whole_report(whole: tuple[Path, list[Path]]) -> None:
    folder, written = whole
    names = [p.relative_to(folder).as_posix() for p in written]
    assert names == [
        "report.md",
        "report.html",
        *(f"plots/{n}.png" for n in ("perplexity", "accuracy", "clients", "traffic")),
    ]
    assert all(p.read_bytes().startswith(PNG) for p in written[2:])
    text = (folder / "report.md").read_text("utf-8")
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    assert titles == [
        "fedavg on sotu, model cifg", "Result", "Spread over clients", "Suggestions", "Training", "Privacy",
        "Data and vocabulary", "Configuration", "Made by", "Definitions",
    ]  # fmt: skip
    for expected in (
        verdict(a_result()),
        "| seen | 20 | 90.00 | 95.00 | 110.0 | 130.0 | 140.0 | 135.0 | 7.0 % |",
        "| i am | the | not | going |",
        "| so | far | – | – |",
        "| traffic | 8.00 MB down, 6.00 MB up, 0.00 MB control |",
        "| refused clients | 1 (non-finite report: 1) |",
        "| best validation round | 2 (the last one: more rounds may still help) |",
        "| time, training | 1 min 15 s |",
        "![Traffic added up over rounds: 8.0 MB down, 6.0 MB up](plots/traffic.png)",
        '[method]\nname = "fedavg"',
        "| commit | none |",
    ):
        assert expected in text


def test_page_needs_nothing_from_outside(whole: tuple[Path, list[Path]]) -> None:
    source = (whole[0] / "report.html").read_text("utf-8")
    page = Page(source)
    assert not {"script", "link", "iframe", "object", "base"} & {tag for tag, _ in page.tags}
    assert "http://" not in source
    assert "https://" not in source
    assert "url(" not in source
    pictures = [attrs.get("src") or attrs.get("srcset") for tag, attrs in page.tags if tag in ("img", "source")]
    assert len(pictures) == 8  # four plots, for light and dark pages
    for picture in pictures:
        kind, _, data = str(picture).partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data, validate=True).startswith(PNG)
    assert all(attrs.get("alt") for tag, attrs in page.tags if tag == "img")
    assert "prefers-color-scheme: dark" in source
    assert 'name="viewport"' in source


def test_writing_twice_gives_the_same_bytes(whole: tuple[Path, list[Path]]) -> None:
    folder, written = whole
    first = [p.read_bytes() for p in written]
    for path in written:
        path.unlink()
    assert [p.read_bytes() for p in write_report(folder, SUGGESTIONS)] == first


def test_hostile_names_are_text(tmp_path: Path) -> None:
    evil = "</title><script>alert(1)</script> \"x\" 'y' $\\frac{ | ![p](http://e) \x00\u202e\ud800 `z`"
    config = Config(data=DataConfig(name="x</pre><script>"))
    record = {**a_record(1, 150.0), "refused": {evil: evil}}
    folder = a_folder(tmp_path / "run", a_result(data=evil, model=evil), [record], config)
    write_report(folder, [(evil, [evil])])
    page = Page((folder / "report.html").read_text("utf-8"))
    assert "script" not in {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert sum("alert(1)" in words for words in page.words) >= 4
    text = (folder / "report.md").read_text("utf-8")
    body, fence, _ = text.partition("```toml")
    assert fence
    body = body.replace("<details><summary>All settings, as in run.toml</summary>", "")
    assert not re.search(r"(?<!\\)<", body)
    assert "![p]" not in body
    row = next(line for line in body.splitlines() if line.startswith("| \\<"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 5


def test_empty_result_and_no_rounds(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "run", {}, [])
    assert [p.name for p in write_report(folder)] == ["report.md", "report.html"]


@pytest.mark.parametrize("missing", sorted(a_result()))
def test_any_part_may_be_missing(missing: str) -> None:
    for result in (a_result(**{missing: None}), {k: v for k, v in a_result().items() if k != missing}):
        blocks = document(result, [{"round": 1}, a_record(2, 110.0)], Config(), {})
        assert "None" not in to_markdown([b for b in blocks if isinstance(b, Table)])
        assert to_html(blocks)


def test_central_run_has_no_traffic(tmp_path: Path) -> None:
    result = a_result(method="central", baselines={}, cohort=1, clients_perplexity=None)
    folder = a_folder(tmp_path / "run", result, [a_record(1, 150.0)])
    assert [p.name for p in write_report(folder)][2:] == ["perplexity.png", "accuracy.png"]
    text = (folder / "report.md").read_text("utf-8")
    assert "| traffic |" not in text
    assert "no baselines" in text


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = a_folder(tmp_path / "run", a_result(), [a_record(1, 150.0)])
    assert [p.name for p in write_report(folder)] == ["report.md", "report.html"]
    assert "matplotlib is not installed" in (folder / "report.html").read_text("utf-8")
    assert not (folder / "plots").exists()


def test_unfinished_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run folder"):
        write_report(tmp_path)
    with pytest.raises(RunError, match="not finished"):
        write_report(a_folder(tmp_path / "run", None, [a_record(1, 150.0)]))


def test_plots_of_extreme_numbers() -> None:
    """A run that diverged: infinite, undefined and huge values, one point, zero accuracy."""
    undefined = {"perplexity": math.inf, "top1": math.nan}
    records = [a_record(1, 1e29), a_record(2, 1e300), {**a_record(3, 2.0), "valid": undefined}]
    result = a_result(best_round=1, clients_perplexity={"seen": [1.0, 1e12, math.inf], "unseen": []})
    plots = draw_plots(result, records)
    assert [p.name for p in plots] == ["perplexity", "accuracy", "clients", "traffic"]
    assert "seen clients (2) (1 off the scale)" in plots[2].alt
    assert [p.name for p in draw_plots(result, records[1:])] == ["accuracy", "clients", "traffic"]
    assert draw_plots({}, [{"round": 1, "valid": {"top1": 0.0}}])[0].name == "accuracy"


def test_result_table() -> None:
    table = result_table(a_result())
    assert [row[0] for row in table] == ["model", "fedavg (this run)", "central", "Kneser–Ney-5", "unigram"]
    assert table[0][1:] == [
        "test perplexity", "nats", "top-1", "top-3", "top-1 words", "top-3 words", "unseen perplexity", "unseen top-1",
    ]  # fmt: skip
    assert table[1][1:] == ["112.0", "4.718", "10.0 %", "20.0 %", "5.0 %", "10.0 %", "120.0", "10.0 %"]
    alone = result_table({"method": "central", "test": summary(50.0), "unseen": None, "baselines": {}})
    assert len(alone) == 2
    assert len(alone[0]) == len(alone[1]) == 7


def stand(own: float, **others: float) -> str:
    method = "central" if "central_run" in others else "fedavg"
    others.pop("central_run", None)
    baselines: dict[str, Any] = {k: {"test": {"perplexity": v}} for k, v in others.items()}
    return verdict({"method": method, "rounds": 3, "test": {"perplexity": own}, "baselines": baselines})


def test_a_federation_without_baselines_is_shown_the_way_to_one() -> None:
    alone = {"method": "fedavg", "rounds": 3, "test": {"perplexity": 100.0}, "baselines": {}}
    real = {**alone, "data": OWN_TEXT, "secure": True}
    assert verdict(real).endswith("to compare it with. `--counts` adds a baseline by sums (docs/counts.md).")
    plain, counted = {**real, "secure": False}, {**real, "counts": {"mixture": {"test": {"perplexity": 90.0}}}}
    assert "--counts" not in verdict(alone) + verdict(plain) + verdict(counted)  # a plain run may not count


def test_verdict_cases() -> None:
    assert verdict(a_result()) == (
        "This model does not beat counts of word sequences (Kneser–Ney-5, 100.0). "
        "With a test perplexity of 112.0 after 2 rounds, fedavg is ahead of the unigram (perplexity 49 % lower), "
        "behind Kneser–Ney-5 (perplexity 12 % higher) and level with central training of the same model (within 1 %)."
    )
    behind = stand(100, unigram=50, kneser_ney=20)
    assert behind.startswith("This model does not beat plain word frequencies (unigram, 50.00). With a test")
    assert behind.endswith("is behind the unigram (perplexity × 2) and behind Kneser–Ney (perplexity × 5).")
    assert stand(100, unigram=100.5, kneser_ney=100.5).startswith("This model does not beat plain word frequencies")
    assert stand(100, unigram=300, kneser_ney=100).startswith("This model does not beat counts of word sequences")
    assert stand(100, unigram=300, kneser_ney=120).endswith(
        "is ahead of the unigram (perplexity × 0.33) and ahead of Kneser–Ney (perplexity 17 % lower): it predicts "
        "better than a count model of the pooled text."
    )
    assert stand(100, central=98.5).endswith("is behind central training of the same model (perplexity 1.5 % higher).")
    assert stand(100, kneser_ney=150, central_run=1).endswith("better than a count model of the same text.")
    assert stand(100, kneser_ney=50, central_run=1).startswith("This model does not beat counts of word sequences")
    assert "no baselines" in stand(100)
    for bad in (None, math.nan, math.inf, 0.0):
        assert "no finite test perplexity" in verdict({"test": {"perplexity": bad}})
    assert verdict({})


@settings(deadline=None)
@given(positive, positive, positive, positive)
def test_verdict_says_who_is_ahead(own: float, unigram: float, kneser_ney: float, central: float) -> None:
    sentence = stand(own, unigram=unigram, kneser_ney=kneser_ney, central=central)
    beaten = own < unigram * 0.99 and own < kneser_ney * 0.99
    assert sentence.startswith("With a test perplexity of " if beaten else "This model does not beat ")
    assert sentence.endswith(".")
    for other, name in ((unigram, "the unigram"), (kneser_ney, "Kneser–Ney"), (central, "central training")):
        ratio = own / other
        place = "level with" if abs(ratio - 1) <= 0.01 else "ahead of" if ratio < 1 else "behind"
        assert f"{place} {name}" in sentence


@settings(deadline=None)
@given(anything, anything, anything, anything)
def test_any_number_can_be_shown(own: Any, top1: Any, other: Any, rounds: Any) -> None:
    scores = {"perplexity": own, "nats": own, "top1": top1, "top1_words": top1, "oov_rate": top1}
    baselines = {"unigram": {"test": {"perplexity": other}}, "central": {"test": None}, "kneser_ney": None}
    result = {"test": scores, "unseen": scores, "baselines": baselines, "rounds": rounds, "best_round": rounds}
    assert verdict(result).endswith(".")
    assert len({len(row) for row in result_table(result)}) == 1
    assert to_html(document(result, [], Config(), {}))


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=())))
def test_escaping(text: str) -> None:
    page = Page(
        to_html([Heading(text), Text(text, "note"), Picture("plots/a.png", text, b"", b""), Links([(text, "a")])])
    )
    inside = [(tag, attrs) for tag, attrs in page.tags if tag in ("title", "h2", "p", "img", "a")]
    assert [tag for tag, _ in inside] == ["title", "h2", "p", "img", "a"]
    assert inside[3][1]["alt"] == clean(text)
    assert "".join(page.words).count(clean(text)) >= 4  # title, heading, paragraph, link
    line = escape_markdown(text)
    line.encode("utf-8")
    assert "\n" not in line
    assert not re.search(r"(?<!\\)(\\\\)*[<|`*\[\]]", line)
    assert re.sub(r"\\([\\`*\[\]<>|#!~&$_])", r"\1", line) == clean(text)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=())))
def test_document_keeps_its_shape(text: str) -> None:
    blocks = [Heading(text, 1), Text(text), Table([["a", "b"], [text, text]]), Code(f"x = {text}", "toml")]
    tags = [tag for tag, _ in Page(to_html(blocks)).tags]
    expected = "main h1 p div table thead tr th th tbody tr th td div pre"
    assert tags[tags.index("main") :] == expected.split()
    assert to_markdown(blocks).count("```") == 2


def test_marked_words_are_code_and_settings_are_folded() -> None:
    marked, plain = Text("run `a <b>` or `c`", marked=True), Text("run `a`")
    page = Page(to_html([marked, plain, Code("x = 1", "toml", folded="All & more")]))
    found = [tag for tag, _ in page.tags if tag in ("code", "details", "summary")]
    assert found == ["code", "code", "details", "summary"]
    assert {"a <b>", "run `a`", "All & more"} <= set(page.words)
    text = to_markdown([marked, plain, Code("x = 1", "toml", folded="All")])
    assert "run `a <b>` or `c`" in text
    assert "run \\`a\\`" in text
    assert "<details><summary>All</summary>\n\n```toml\nx = 1\n```\n\n</details>" in text


@settings(deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_ticks_are_rounds_that_were_measured(rounds: list[int]) -> None:
    ticks = round_ticks(rounds)
    assert set(ticks) <= set(rounds)
    assert 1 <= len(ticks) <= 8
    assert ticks == sorted(ticks)


def test_a_first_reader_reads_what_perplexity_is() -> None:
    blocks = document(a_result(), [], Config(), {})
    said = [block.text for block in blocks if isinstance(block, Text) and block.text.startswith("A perplexity of")]
    assert len(said) == 1
    assert "equally likely words. Lower is better." in said[0]


def test_links_lead_beside_the_document_and_nowhere_else() -> None:
    links = Links([("a <b>", "x y/seed-1"), ("evil", 'javascript:alert("1")')])
    page = Page(to_html([links]))
    assert [attrs["href"] for tag, attrs in page.tags if tag == "a"] == [
        "x%20y/seed-1",
        "javascript%3Aalert%28%221%22%29",
    ]
    assert "a <b>" in page.words
    assert to_markdown([links]).splitlines()[0] == "- [a \\<b\\>](x%20y/seed-1)"


def test_durations() -> None:
    assert [show_duration(s) for s in (0.04, 59.9, 60, 3599.7, 7500)] == [
        "0.0 s",
        "59.9 s",
        "1 min 0 s",
        "1 h 0 min",
        "2 h 5 min",
    ]


def test_a_real_run(tmp_path: Path) -> None:
    from keyfed.run.loop import train

    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for k in range(4):
        lines = [f"we the people number {k} say {w} to the house and the {w} again ." for w in ("peace", "law", "work")]
        (corpus / f"client <{k}>.txt").write_text("\n".join(lines * 30))
    tiny = [
        f"data.name={corpus}", "data.unseen=0.25", "data.vocab=60", "data.max_tokens=300", "train.rounds=2",
        "train.cohort=2", "train.workers=1", "train.valid_tokens=300", "train.central=true", "model.embed=8",
        "model.hidden=8", "train.ngram_order=3",
    ]  # fmt: skip
    out = tmp_path / "run"
    result = train(apply_settings(Config(method="fedavg"), tiny), out)
    assert {p.name for p in write_report(out)} >= {"report.md", "report.html", "perplexity.png", "traffic.png"}
    text = (out / "report.md").read_text("utf-8")
    assert escape_markdown(verdict(result)) in text
    assert "Kneser–Ney-3" in text
    assert [p.name for p in write_report(out / "central")][:2] == ["report.md", "report.html"]
