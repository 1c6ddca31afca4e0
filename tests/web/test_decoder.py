"""The keyboard in JavaScript against the one in Python: the same cases, the same answers.

A node process takes a whole list of cases (`decoder_cases.mjs`), so that a test starts one.
"""

from __future__ import annotations

import base64
import json
import math
import random
import shutil
import struct
import subprocess
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from keyfed.errors import DataError
from keyfed.keyboard.casing import Written, all_capitals, display, put, starts_sentence
from keyfed.keyboard.context import read_context
from keyfed.keyboard.editor import Editor
from keyfed.keyboard.gesture import resample, swipe_of
from keyfed.keyboard.layout import base_letter, fold, layout_of
from keyfed.keyboard.personal import Personal
from keyfed.keyboard.predict import Predictor, Settings, Slot, Strip
from keyfed.keyboard.session import Keyboard, ngram_source
from keyfed.keyboard.tables import constants, offensive_words
from keyfed.keyboard.trie import build_trie
from keyfed.keyboard.typed import Speller
from keyfed.model.ngram import KneserNey, fit_kneser_ney
from keyfed.run.suggest import _complete
from keyfed.text.sotu import package_data
from keyfed.text.vocab import SPECIALS, Vocab, build_vocab, words_of

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed: the JavaScript side is not compared")

Case = dict[str, Any]


def answers(cases: Sequence[Case], **shared: object) -> list[Any]:
    """Run cases in one node process."""
    script = Path(__file__).with_name("decoder_cases.mjs")
    asked = json.dumps({"cases": list(cases), "shared": shared})
    done = subprocess.run([NODE or "node", script], input=asked, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == len(cases)
    return list(found)


def known(c: str) -> bool:
    """Whether every Unicode version in use knows a character; newer ones know more letters."""
    return unicodedata.category(c) not in ("Cn", "Cs")


# ---------------------------------------------------------------------------------------------------- tokens

SPICE = "aAσΣςİıßʼn'’‐‑-.,:;0123456789 _@/<>unkpadeo\u200d\u200c\ufe0f\u20e3😀👍🏽🇩🇪👨👩é\u0301\u0345\x1c\x1f\x85\ufeff\u2028\n\t٣שُहिन्दी"
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
    befores += ["", "a.b", "a.", ".a", "(don’", "@me", "x_", "n" * 9000, "ab " * 3000, "😀" * 4500, "😀 a" * 1500 + ".x"]
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
        after = put(Written(case["text"], automatic=True), case["word"][:1], k)
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


def sent(data: bytes) -> str:
    return base64.b64encode(data).decode()


def ngram_file(model: KneserNey) -> bytes:
    tensors = {}
    for n, level in enumerate(model.levels, 1):
        tensors[f"n{n}.start"] = level.start.astype(np.int32)
        tensors[f"n{n}.words"] = (level.keys % model.vocab_size).astype(np.int32)
        tensors[f"n{n}.prob"] = level.prob.astype(np.float32)
        tensors[f"n{n}.backoff"] = level.backoff[:-1].astype(np.float32)
    return bytes(save(tensors))


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
        assert all(math.isfinite(len(word)) and word for word in found)


# -------------------------------------------------------------------------------------------- what was learnt

NAMES = ("learn", "keep", "add", "forget", "block", "unblock", "forget_all", "unlearn")
LEARNT = ("Kiel", "kiel", "Zwölf", "teh", "THE", "don’t", "b4", "a@b", "a.b", "…", "", "x" * 41, "一二", "a\u200cb", "a b", "²")


def in_javascript(name: str) -> str:
    return {"forget_all": "forgetAll", "take": "importJSON"}.get(name, name)


def test_learning_and_forgetting() -> None:
    rng = random.Random(5)
    histories = []
    for _ in range(60):
        actions: list[list[str]] = []
        for _ in range(rng.randint(1, 60)):
            name = rng.choices(NAMES, weights=(30, 4, 3, 2, 2, 1, 0.2, 3))[0]
            word = rng.choice(LEARNT)
            actions.append([name, word, rng.choice(("in", "In", ""))] if "learn" in name else [name, word])
        histories.append([action[:1] if action[0] == "forget_all" else action for action in actions])
    cases = [{"op": "personal", "actions": [[in_javascript(a[0]), *a[1:]] for a in actions]} for actions in histories]
    for actions, found in zip(histories, answers(cases), strict=True):
        personal = Personal()
        for (name, *given_), answer in zip(actions, found["answered"], strict=True):
            refused = False
            try:
                getattr(personal, name)(*given_)
            except DataError:
                refused = True
            assert refused == (isinstance(answer, dict) and "error" in answer)
        assert dict(found["uses"]) == personal.uses()
        assert dict(found["after"]) == personal.uses_after("in")
        assert found["known"] == [personal.knows(word) for word in ("kiel", "zwölf", "teh", "the")]
        assert json.loads(found["held"]) == json.loads(personal.to_json())


def exports() -> list[str]:
    whole: dict[str, Any] = {
        "format": 1, "words": {"a": 3, "B’s": 1, "__proto__": 4}, "pairs": {"": {"a": 1}, "A": {"b": 2}},
        "dictionary": ["Ünal"], "blocked": ["X", "b"],
    }  # fmt: skip
    long, many = "x" * 41, {f"w{i}": 1 for i in range(50_001)}
    changed: list[dict[str, Any]] = [
        {}, {"format": 2}, {"format": "1"}, {"words": []}, {"words": None}, {"pairs": {"a": 3}}, {"pairs": [1]},
        {"dictionary": {}}, {"blocked": "abc"}, {"words": {"a": 0}}, {"words": {"a": -1}}, {"words": {"a": 1.5}},
        {"words": {"a": "3"}}, {"words": {"a": True}}, {"words": {"a": None}}, {"words": {"a": 2**53}},
        {"words": {"a": 2**53 - 1}}, {"words": {"": 1}}, {"words": {"a b": 1}}, {"words": {long: 1}},
        {"words": {long[1:]: 1}}, {"words": {"a\x00": 1}}, {"words": {"a\ud800": 1}}, {"words": {"a\u200b": 1}},
        {"words": {"😀" * 40: 1}}, {"words": {"😀" * 41: 1}}, {"pairs": {"a": {"b": []}}}, {"pairs": {"a b": {"b": 1}}},
        {"pairs": {"": {}}}, {"dictionary": [3]}, {"dictionary": [""]}, {"blocked": [None]}, {"blocked": ["\x85"]},
        {"words": many}, {"words": many, "pairs": {"a": many}}, {"more": 1},
    ]  # fmt: skip
    documents = [json.dumps({**whole, **change}) for change in changed]
    for name in ("words", "pairs", "dictionary", "blocked", "format"):
        documents.append(json.dumps({key: value for key, value in whole.items() if key != name}))
    return [*documents, "", "{", "[]", "null", "3", '"x"', documents[0][:-1], documents[0] + "x"]


def test_imports_are_taken_or_refused_whole() -> None:
    texts_ = exports()
    before = [["learn", "kept", ""], ["block", "never"]]
    found = answers([{"op": "personal", "actions": [*before, ["importJSON", text]]} for text in texts_])
    taken = 0
    for text, answer in zip(texts_, found, strict=True):
        personal = Personal()
        personal.learn("kept")
        personal.block("never")
        refused = None
        try:
            personal.take(text)
        except DataError as error:
            refused = str(error)
        shown = answer["answered"][-1]
        assert (refused is None) == (shown is None), (text[:80], refused, shown)
        if shown is not None:
            assert shown["error"].startswith("learnt words: ") and "\n" not in shown["error"]
            assert "kept" in answer["held"]
        taken += refused is None
        assert json.loads(answer["held"]) == json.loads(personal.to_json())
    assert 3 < taken < len(texts_) / 2


# ------------------------------------------------------------------------------------------------- predictions

STRANGE = (
    "don't", "i", "i'm", "é", "été", "naïve", "straße", "x-ray", "42", "1990s", "3.5", "😀", "❤️", "...", ",", "שלום", "שלומות",
    "مرحبا", "漢字", "हिन्दी", "a\x1b[31m", "b\u202ec", "می\u200cخواهم", "q" * 40, "q" * 41, "damn", "pizza", "love",
)  # fmt: skip


def real_words(size: int, lower: bool) -> Vocab:
    folder = package_data()
    names = sorted(folder.rglob("*.txt"))[:12]
    lines = [line for name in names for line in name.read_text("utf-8").splitlines()]
    found, _ = build_vocab([lines], kind="word", size=size, lower=lower, tokenised=False)
    more = [w for w in (*STRANGE, *sorted(offensive_words())[:4]) if w not in found.words]
    if not lower:
        more += [w for w in ("Polish", "polish", "IPHONE", "iPhone", "May", "may") if w not in found.words]
    return Vocab("word", (*found.words, *more), lower=lower, tokenised=False)


def mistyped(rng: random.Random, word: str) -> str:
    letters = list(word[: rng.randint(1, len(word))] if rng.random() < 0.5 else word)
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        at = rng.randrange(len(letters) + 1)
        change = rng.random()
        if change < 0.3:
            letters.insert(at, rng.choice("eatqzé'1-"))
        elif change < 0.6 and len(letters) > 1:
            letters.pop(at - 1)
        elif at + 1 < len(letters):
            letters[at], letters[at + 1] = letters[at + 1], letters[at]
    typed = "".join(letters)
    return rng.choice((str, str, str, str.capitalize, str.upper, str.swapcase))(typed)


def before_cursor(rng: random.Random, vocab: Vocab) -> str:
    words = vocab.words[len(SPECIALS) :]
    context = " ".join(rng.choices(words[:300], k=rng.choice((0, 1, 3, 80))))
    between = rng.choice((" ", " ", " ", ". ", "! \n", ", ", "\n", ".” ", "\x07", " 😀 ", " \u202b", " pizza ", " in "))
    typed = rng.choice(("", mistyped(rng, rng.choice(words)), mistyped(rng, rng.choice(words[:2000]))))
    odd = rng.choice(("", "x" * 60, "ab.cd", "@me", "שלומ", "q'", "\u0301", "a\u0301e", "𝒜b", "Wrld", "teh", "I", "im", "zzq"))
    return context + between + (typed if rng.random() < 0.9 else odd)


def learnt(rng: random.Random, vocab: Vocab) -> str:
    words = rng.sample(vocab.words[len(SPECIALS) : 400], 12)
    words = [w for w in words if any(map(str.isalnum, w))] + ["kwyjibo", "zzq", "wrld", "ωμέγα"]
    personal = Personal()
    for _ in range(rng.choice((0, 40, 200))):
        personal.learn(rng.choice(words), rng.choice(("in", "pizza", "", words[0])))
    for word in rng.sample(["McFly", "teh", "iPod", words[1]], rng.randint(0, 2)):
        personal.add(word)
    for word in rng.sample([*words, "the", "damn"], rng.randint(0, 3)):
        personal.block(word)
    return personal.to_json()


def tap_of(rng: random.Random, c: str) -> tuple[float, float] | None:
    centre = layout_of("qwerty").centre(fold(c))
    return None if centre is None or rng.random() < 0.2 else (centre[0] + rng.gauss(0, 0.4), centre[1] + rng.gauss(0, 0.4))


def swipe(rng: random.Random, word: str) -> list[tuple[float, float]]:
    keys = [p for p in map(layout_of("qwerty").centre, fold(word)) if p is not None]
    steps = [(a, b, i / 6) for a, b in zip(keys, keys[1:], strict=False) for i in range(7)]
    return [(a[0] + t * (b[0] - a[0]) + rng.gauss(0, 0.15), a[1] + t * (b[1] - a[1]) + rng.gauss(0, 0.15)) for a, b, t in steps]


def question(rng: random.Random, vocab: Vocab, logps: int) -> Case:
    before = before_cursor(rng, vocab)
    typed = read_context(before, vocab, constants()).typed
    choice = {name: rng.random() < 0.7 for name in ("autocorrect", "emoji", "filter", "own")}
    asked: Case = {"before": before, "logp": rng.randrange(logps), "taps": [], "choice": choice}
    if rng.random() < 0.5:
        asked["taps"] = [tap_of(rng, c) for c in typed][: rng.randint(0, 60)]
    if rng.random() < 0.2:
        asked["points"] = swipe(rng, rng.choice(vocab.words[len(SPECIALS) : 1500]))
    if rng.random() < 0.05:
        asked["block"] = rng.choice(vocab.words[len(SPECIALS) : 40])
    if rng.random() < 0.1:
        asked["learn"] = [rng.choice(vocab.words[len(SPECIALS) : 40]), "in"]
    return asked


def as_json(slot: Slot | None) -> dict[str, str] | None:
    return None if slot is None else {"text": slot.text, "word": slot.word, "kind": slot.kind}


def shown(strip: Strip) -> dict[str, Any]:
    return {"slots": [as_json(slot) for slot in strip.slots], "correction": strip.correction}


def asked_of_python(case: Case, vocab: Vocab, logps: Sequence[Any]) -> list[Any]:
    personal = Personal()
    personal.take(case["personal"])
    predictor = Predictor(vocab, personal, forms=case["forms"], layout=layout_of(case["layout"]))
    found: list[Any] = []
    for q in case["questions"]:
        choice, context = q["choice"], read_context(q["before"], vocab, predictor.k)
        if "block" in q:
            personal.block(q["block"])
        personal.incognito = False
        if "learn" in q:
            personal.learn(*q["learn"])
        personal.incognito = not choice["own"]
        predictor.settings = Settings(choice["autocorrect"], choice["emoji"], choice["filter"])
        logp = logps[q["logp"]][: len(vocab)]
        if "points" in q:
            found.append([as_json(slot) for slot in predictor.gesture(logp, context, q["points"])])
        else:
            found.append(shown(predictor.suggest(logp, context, q["taps"])))
    return found


def test_strips_corrections_and_swipes() -> None:
    rng, draw = random.Random(6), np.random.default_rng(6)
    vocabs = [real_words(2500, lower=True), real_words(1500, lower=False)]
    most = max(map(len, vocabs))
    ranks = -np.log(np.arange(most) + 5.0)  # Zipf's law, and noise
    logps = [(ranks + draw.normal(0, 2, most)).astype(np.float32).astype(np.float64) for _ in range(4)]
    forms = {"congress": "Congress", "teh": "Teh", "may": "May", "états": "États"}
    cases: list[Case] = []
    for number in range(16):
        vocab = vocabs[number % 2]
        cases.append({
            "op": "predict", "vocab": number % 2, "forms": forms if vocab.lower else {},
            "layout": ("qwerty", "qwertz", "azerty")[number % 3], "personal": learnt(rng, vocab),
            "questions": [question(rng, vocab, len(logps)) for _ in range(50)],
        })  # fmt: skip
    words = [json.loads(vocab.to_json()) for vocab in vocabs]
    found = answers(cases, vocabularies=words, logps=[logp.tolist() for logp in logps])
    kinds = set()
    for case, got in zip(cases, found, strict=True):
        expected = asked_of_python(case, vocabs[case["vocab"]], logps)
        for asked, one, other in zip(case["questions"], got, expected, strict=True):
            assert one == other, ascii(asked)
            kinds |= {slot["kind"] for slot in (one if isinstance(one, list) else one["slots"]) if slot}
            kinds.add("corrected" if isinstance(one, dict) and one["correction"] else "left alone")
    assert kinds == {"word", "literal", "completion", "correction", "emoji", "next", "corrected", "left alone"}


def test_swipes_are_resampled_alike() -> None:
    rng = random.Random(7)
    paths: list[Any] = [[[1, 2]], [[1, 1], [1, 1]], [[0, 0], [2, 0], [2, 2]], [[0, 0], [0, 0], [3, 4]]]
    paths += [[[rng.uniform(0, 10), rng.uniform(0, 3)] for _ in range(rng.randint(1, 40))] for _ in range(40)]
    for path, got in zip(paths, answers([{"op": "path", "points": p, "n": 32} for p in paths]), strict=True):
        expected = resample(np.array([swipe_of(path)]), 32)[0].ravel()
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------------ typing


def rounded(model: KneserNey) -> KneserNey:
    """The model as its file has it."""
    halves = [np.asarray(v, np.float32).astype(np.float64) for level in model.levels for v in (level.prob, level.backoff)]
    levels = [
        replace(level, prob=halves[2 * n], backoff=halves[2 * n + 1]) for n, level in enumerate(model.levels)
    ]
    return replace(model, levels=tuple(levels))


def actions_of(rng: random.Random, text: str) -> list[tuple[str, Any]]:
    actions: list[tuple[str, Any]] = []
    for word in text.split(" "):
        typed = mistyped(rng, word) if rng.random() < 0.4 else word
        actions += [("type", c) for c in typed]
        chance = rng.random()
        if chance < 0.25:
            actions.append(("pick", rng.randrange(3)))
            if rng.random() < 0.4:
                actions.append(("type", rng.choice(",.!?)x'")))
        else:
            actions.append(("type", rng.choice("     .,!?\n)")))
            if rng.random() < 0.3:
                actions += [("backspace", None)] * rng.randint(1, 3)
    return actions


def typed_by_python(actions: Sequence[tuple[str, Any]], keyboard: Keyboard) -> list[dict[str, Any]]:
    editor, seen = Editor(keyboard), []
    for action, given_ in actions:
        if action == "type":
            editor.type(given_)
        elif action == "backspace":
            editor.backspace()
        elif (slot := editor.strip().slots[given_]) is not None:
            editor.pick(slot)
        seen.append({"text": editor.text, **shown(editor.strip())})
    return seen


def test_a_person_types() -> None:
    rng = random.Random(8)
    vocab = real_words(1200, lower=True)
    lines = sorted(package_data().rglob("*.txt"))[3].read_text("utf-8").splitlines()
    model = rounded(fit_kneser_ney([vocab.encode(lines)], len(vocab), 3))
    forms = {"congress": "Congress", "states": "States"}
    sentences = [" ".join(line.split()[:8]) for line in lines if len(line.split()) > 8]
    sentences += ["i love pizza and teh pizza is damn", "kwyjibo kwyjibo kwyjibo is kwyjibo in kwyjbo kwyjibo"]
    cases: list[Case] = []
    for number, sentence in enumerate(rng.sample(sentences[:-2], 10) + sentences[-2:] * 2):
        given_ = {"learn": number % 5 != 3, "incognito": number % 5 == 4, "autocorrect": number % 6 != 5}
        actions = actions_of(rng, sentence)
        cases.append({"op": "script", "actions": actions, "settings": given_, "file": sent(ngram_file(model))})
    found = answers(cases, vocabularies=[json.loads(vocab.to_json())], forms=forms)
    corrected = 0
    for case, got in zip(cases, found, strict=True):
        asked = case["settings"]
        personal = Personal(learning=asked["learn"], incognito=asked["incognito"])
        predictor = Predictor(vocab, personal, forms=forms, settings=Settings(autocorrect=asked["autocorrect"]))
        expected = typed_by_python(case["actions"], Keyboard(ngram_source(model), predictor))
        for action, one, other in zip(case["actions"], got["seen"], expected, strict=True):
            assert one == other, action
            corrected += one["correction"] is not None
        assert got["learnt"] == json.loads(personal.to_json())
    assert corrected > 10
