"""The keyboard in JavaScript against the one in Python: the same cases, the same answers.

A node process takes a whole list of cases (`decoder_cases.mjs`), so that a test starts one.
"""

from __future__ import annotations

import json
import random
import struct
import unicodedata
from functools import cache
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from keyfed.keyboard.context import (
    WrittenText,
    all_capitals,
    base_letter,
    constants,
    display,
    fold,
    layout_of,
    put,
    read_context,
    starts_sentence,
)
from keyfed.keyboard.lexicon import Speller, build_trie
from keyfed.model.ngram import fit_kneser_ney
from keyfed.run.evaluate import _complete
from keyfed.text.batches import line_read
from keyfed.text.vocab import EOS, SPECIALS, Vocab, words_of

from .node_cases import Case, answers, needs_node, ngram_file, sent

pytestmark = needs_node


@cache
def unknown() -> frozenset[str]:
    """Characters that only one of the two Unicode versions knows, or knows a capital of."""
    (ranges,) = answers([{"op": "unassigned"}])
    later = {chr(c) for start, stop in ranges for c in range(start, stop)}
    return frozenset(later | set("\u019b\u0264\ua7d3\ua7d5"))


def known(c: str) -> bool:
    """Whether a character means the same to both sides; newer Unicode versions know more letters."""
    return unicodedata.category(c) not in ("Cn", "Cs") and c not in unknown()


# ---------------------------------------------------------------------------------------------------- tokens

SPICE = (
    "aAσΣςİıßŉ'’‐‑-.,:;0123456789 _@/<>unkpadeo\u200d\u200c\ufe0f\u20e3😀👍🏽🇩🇪👨👩"
    "é\u0301\u0345\x1c\x1f\x85\ufeff\u2028\n\t\u0663\u05e9\u064f\u0939\u093f\u0928\u094d\u0926\u0940"
)
texts = st.lists(
    st.one_of(
        st.sampled_from(SPICE),
        st.sampled_from(SPECIALS),
        st.characters(exclude_categories=("Cn", "Cs")).filter(known),
    ),
    max_size=24,
).map("".join)


@settings(max_examples=4, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.data())
def test_words_of_any_text(data: st.DataObject) -> None:
    lines = data.draw(st.lists(st.tuples(texts, st.booleans(), st.booleans()), min_size=60, max_size=120))
    found = answers([{"op": "words", "line": a, "tokenised": b, "lower": c} for a, b, c in lines])
    for (line, tokenised, lower), words in zip(lines, found, strict=True):
        assert words == words_of(line, tokenised=tokenised, lower=lower), ascii(line)


def test_a_model_of_lines_reads_the_last_line() -> None:
    cases = [[EOS], [EOS, 5, 6], [EOS, 5, EOS], [EOS, 5, EOS, 7, 8], [9, 10]]
    found = answers([{"op": "lineRead", "ids": ids} for ids in cases])
    assert found == [line_read(ids) for ids in cases]


def test_every_character_is_cut_alike() -> None:
    """Between two letters: joins them, stands alone or vanishes; upper case first, for its lower case."""
    every = [chr(c) for c in range(0x110000) if known(chr(c)) and unicodedata.category(chr(c)) != "Co"]
    lines = ["".join(f"A{c}B " for c in every[at : at + 4000]) for at in range(0, len(every), 4000)]
    found = answers([{"op": "words", "line": line, "tokenised": False, "lower": True} for line in lines])
    for line, words in zip(lines, found, strict=True):
        assert words == words_of(line, tokenised=False, lower=True)


@settings(max_examples=3, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.data())
def test_context_and_casing_of_any_text(data: st.DataObject) -> None:
    vocab = Vocab("word", (*SPECIALS, "a", "b", "the", ".", "é", "'"), lower=True, tokenised=False)
    forms, k = {"the": "THe", "éa": "ÉA"}, constants()
    befores = data.draw(st.lists(texts, min_size=60, max_size=100))
    befores += [
        "",
        "a.b",
        "a.",
        ".a",
        "(don’",
        "@me",
        "x_",
        "n" * 9000,
        "ab " * 3000,
        "😀" * 4500,
        "😀 a" * 1500 + ".x",
    ]
    befores += ["Hi." + " " * 5000 + "a", "He said “hi!” ", "a!)'] ", "3.5 ", "one\n", "one\n\u2003", "x\x1c"]
    words = data.draw(st.lists(st.one_of(texts, st.sampled_from(["the", "i", "i'm", "éa", "ßa", "ǆ"])), min_size=60))
    contexts = [{"op": "context", "before": before} for before in befores]
    written = [
        {"op": "casing", "text": text, "word": word or ",", "typed": typed, "forms": forms}
        for text, word, typed in zip(befores, words, [*words[1:], "TH"], strict=False)
    ]
    spelt = [{"op": "folded", "text": word} for word in words]
    found = answers([*contexts, *written, *spelt], vocab=json.loads(vocab.to_json()))
    for case, read in zip(contexts, found, strict=False):
        expected = read_context(case["before"], vocab, k)
        fields = {"ids": list(expected.ids), "previous": expected.previous, "text": expected.text}
        assert read == {**fields, "typed": expected.typed}, ascii(case)
    for case, seen in zip(written, found[len(contexts) :], strict=False):
        starts = starts_sentence(case["text"], k)
        after = put(WrittenText(case["text"], automatic=True), case["word"][:1], k)
        if case["word"][:1] <= "\uffff":  # JavaScript took half of it otherwise
            assert seen["put"] == {"text": after.text, "automatic": after.automatic}, ascii(case)
        assert seen["sentence"] == starts, ascii(case)
        assert seen["capitals"] == all_capitals(case["typed"]), ascii(case)
        assert seen["shown"] == display(case["word"], case["typed"], starts, forms, k), ascii(case)
    for case, (folded, bases) in zip(spelt, found[len(contexts) + len(written) :], strict=True):
        assert folded == fold(case["text"])
        assert bases == [base_letter(c) for c in case["text"]]


# ------------------------------------------------------------------------------------------------------ rows


def lexicon(rng: random.Random, letters: str, size: int) -> list[str]:
    return ["".join(rng.choices(letters, k=rng.randint(1, 7))) for _ in range(size)]


def typing_case(rng: random.Random) -> Case:
    letters = rng.choice(["ab", "qwea", "eéèE'-", "asdfzxcv1’", "ñßaİΣ漢"])
    taps = [None, (rng.uniform(-1, 11), rng.uniform(-1, 4))]
    keys = [(rng.choice(letters + "k"), rng.choice(taps)) for _ in range(rng.randint(0, 8))]
    words = lexicon(rng, letters, rng.randint(1, 30))
    return {"op": "rows", "words": words, "layout": rng.choice(["qwerty", "qwertz", "azerty"]), "keys": keys}


def test_rows_equal() -> None:
    rng = random.Random(1)
    cases = [typing_case(rng) for _ in range(200)]
    for case, found in zip(cases, answers(cases), strict=True):
        trie = build_trie(case["words"])
        assert found["alphabet"] == trie.alphabet
        for name in ("parent", "char", "node"):
            assert found[name] == getattr(trie, name).tolist()
        state = Speller(trie, layout_of(case["layout"]), constants()).start()
        for (c, tap), seen in zip(case["keys"], found["seen"], strict=True):
            state = state.key(c, tap)
            np.testing.assert_allclose(seen["row"], state.row, rtol=0, atol=1e-12)
            np.testing.assert_allclose(seen["prefix"], state.beginnings, rtol=0, atol=1e-12)


# ----------------------------------------------------------------------------------------------------- files


def test_ngram_next() -> None:
    rng = np.random.default_rng(2)
    cases, models = [], []
    for order, vocab in ((1, 5), (2, 7), (3, 12)):
        model = fit_kneser_ney([rng.integers(0, vocab, 300).astype(np.int32)], vocab, order)
        contexts = [rng.integers(0, vocab, n).tolist() for n in (0, 1, 2, 3, 40) for _ in range(12)]
        cases.append({"op": "next", "file": sent(ngram_file(model)), "vocab": vocab, "contexts": contexts})
        models.append(model)
    for case, model, found in zip(cases, models, answers(cases), strict=True):
        expected = [model.next(np.array(context, np.int32)) for context in case["contexts"]]
        np.testing.assert_allclose(found, expected, rtol=3e-7)  # the file holds float32
        np.testing.assert_allclose(np.sum(found, axis=1), 1, atol=1e-5)


def test_ngram_files_that_do_not_fit_are_refused() -> None:
    model = fit_kneser_ney([np.array([0, 1, 2, 1, 0, 2, 2], np.int32)], 3, 2)
    whole = ngram_file(model)
    tensors = load(whole)
    other = {**tensors, "n2.words": tensors["n2.words"] + 3}
    short = {name: value for name, value in tensors.items() if name != "n2.prob"}
    ends = {**tensors, "n2.start": tensors["n2.start"][::-1].copy()}
    files = [whole, bytes(save(other)), bytes(save(short)), bytes(save(ends)), bytes(save({"x": tensors["n1.prob"]}))]
    found = answers([{"op": "next", "file": sent(data), "vocab": 3, "contexts": [[1]]} for data in files])
    assert "error" not in found[0]
    for answer in found[1:]:
        assert answer["error"].startswith("damaged n-gram file: ")


def test_tensors_and_int8() -> None:
    rng = np.random.default_rng(3)
    q = rng.integers(-127, 128, (5, 7)).astype(np.int8)
    scale = rng.random(5).astype(np.float32)
    tensors: dict[str, Any] = {
        "a": rng.normal(size=(3, 2)).astype(np.float32),
        "m": q,
        "m.scale": scale,
        "odd.scale": np.ones(3, np.float32),
        "none": np.zeros((0, 4), np.float32),
    }
    wholes, wide = answers([{"op": op, "file": sent(bytes(save(tensors)))} for op in ("tensors", "widened")])
    for name, (shape, values) in wholes.items():
        assert (tuple(shape), values) == (tensors[name].shape, tensors[name].ravel().tolist())
    assert set(wide) == {"a", "m", "odd.scale", "none"}
    assert wide["m"][1] == (q.astype(np.float32) * scale[:, None]).ravel().tolist()


def damaged_tensors() -> list[bytes]:
    whole = bytes(save({"a": np.arange(4, dtype=np.float32), "b": np.arange(3, dtype=np.int32)}))
    length = struct.unpack("<Q", whole[:8])[0]
    body = whole[8 + length :]

    def with_header(header: object) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + body

    def entry(dtype: object = "F32", shape: object = (7,), offsets: object = (0, 28)) -> dict[str, object]:
        return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}

    assert len(body) == 28
    headers: list[object] = [
        b"{", b"\xff\xfe", [], None, {"a": 3}, {"a": None},
        entry(dtype="F12"), entry(dtype="toString"), entry(dtype=None),
        entry(shape=(8,)), entry(shape=(-7,)), entry(shape=(3.5, 2)), entry(shape="7"), entry(shape=(1 << 53, 1 << 53)),
        entry(offsets=(0, 24)), entry(offsets=(4, 28), shape=(6,)), entry(offsets=(28, 0)), entry(offsets=(0,)),
        entry(offsets=(0, 2800), shape=(700,)), entry(offsets=(0.0, "28")),
        {"a": entry()["a"], "b": {"dtype": "F32", "shape": [7], "data_offsets": [0, 28]}},
    ]  # fmt: skip
    cuts = [whole[:n] for n in (0, 7, 8, 20, 8 + length, len(whole) - 1)]
    lengths = [struct.pack("<Q", n) + whole[8:] for n in (0, 1, len(whole), 1 << 40, (1 << 64) - 1)]
    return [*cuts, *lengths, whole + b"\0", *map(with_header, headers)]


def test_damaged_tensors_are_refused() -> None:
    files = damaged_tensors()
    for number, answer in enumerate(answers([{"op": "tensors", "file": sent(data)} for data in files])):
        assert answer.get("error", "").startswith("damaged safetensors file: "), number
    lonely = {"m": np.ones((2, 2), np.int8)}
    wrong = {**lonely, "m.scale": np.ones(3, np.float32)}
    whole = {"m": np.ones((2, 2), np.int32)}
    for answer in answers([{"op": "widened", "file": sent(bytes(save(t)))} for t in (lonely, wrong, whole)]):
        assert answer["error"].startswith("damaged safetensors file: parameter")


# ------------------------------------------------------------------------------------------------ characters


class TableReader:
    """A model over characters whose scores depend on the last two; its state is the last one of each row."""

    def __init__(self, table: np.ndarray[Any, Any]) -> None:
        self.table = torch.tensor(table)

    def after(self, tokens: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        return self.table[state, tokens[:, -1]], tokens[:, -1]

    def keep(self, state: Any, rows: list[int]) -> Any:
        return state[rows]


def test_completions_of_a_character_model() -> None:
    rng = np.random.default_rng(4)
    vocab = Vocab("char", (*SPECIALS, *"abcdefghijklmnop \u2003"), lower=False, tokenised=False)
    cases = []
    for _ in range(20):
        raw = torch.tensor(rng.normal(size=(len(vocab),) * 3) * 3, dtype=torch.float32)
        table = raw.log_softmax(-1).numpy()
        last = rng.integers(4, len(vocab), 2).tolist()
        cases.append({"op": "complete", "words": vocab.words, "table": table.tolist(), "last": last, "k": 3})
    for case, found in zip(cases, answers(cases), strict=True):
        reader: Any = TableReader(np.array(case["table"], np.float32))
        logp, state = reader.after(torch.tensor([[case["last"][1]]]), torch.tensor([case["last"][0]]))
        assert found == _complete(reader, vocab, logp[0], state, 3)
        assert all(found)
