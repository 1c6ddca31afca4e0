"""Strips, corrections, swipes, learning and whole typing sessions: JavaScript against Python."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.errors import DataError
from keyfed.keyboard.context import constants, emoji_table, fold, layout_of, offensive_words, read_context
from keyfed.keyboard.lexicon import resample, swipe_of
from keyfed.keyboard.personal import PersonalWords
from keyfed.keyboard.predict import KeyboardSettings, Predictor, Slot, Strip, best_of
from keyfed.keyboard.session import Editor, Keyboard, ngram_source
from keyfed.model.ngram import KneserNey, fit_kneser_ney
from keyfed.text.published import sotu_data
from keyfed.text.vocab import SPECIALS, Vocab
from tests.vocabulary import build_vocab

from .node_cases import Case, answers, needs_node, ngram_file, sent

pytestmark = needs_node

# -------------------------------------------------------------------------------------------- what was learnt

NAMES = ("learn", "keep", "add", "forget", "block", "unblock", "forget_all", "unlearn")
LEARNT = (
    "Kiel", "kiel", "Zwölf", "teh", "THE", "don’t", "b4", "a@b", "a.b", "…", "", "x" * 41, "一二",
    "a\u200cb", "a b", "²",
)  # fmt: skip


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
            actions.append([name, word, rng.choice(("in", "In", "", "b4", "a b"))] if "learn" in name else [name, word])
        histories.append([action[:1] if action[0] == "forget_all" else action for action in actions])
    cases = [{"op": "personal", "actions": [[in_javascript(a[0]), *a[1:]] for a in actions]} for actions in histories]
    for actions, found in zip(histories, answers(cases), strict=True):
        personal = PersonalWords()
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


def test_what_is_learnt_is_cut_down_alike() -> None:
    rng = random.Random(8)
    words = [a + b for a in "abcdefgh" for b in "ijklmnop"]
    actions = [["learn", rng.choice(words[: rng.choice((8, 64))]), rng.choice(("", "in"))] for _ in range(400)]
    actions += [["block", w] for w in words[:20]] + [["add", w] for w in words[:20]] + [["keep", w] for w in words]
    case = {"op": "personal", "constants": {"most_entries": 40}, "actions": actions}
    (found,) = answers([case])
    personal = PersonalWords(constants=replace(constants(), most_entries=40))
    for (name, *given_), answer in zip(actions, found["answered"], strict=True):
        refused = False
        try:
            getattr(personal, name)(*given_)
        except DataError:
            refused = True
        assert refused == (isinstance(answer, dict) and "error" in answer)
    assert json.loads(found["held"]) == json.loads(personal.to_json())
    personal.take(found["held"])


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
        personal = PersonalWords()
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
            assert shown["error"].startswith("learnt words: ")
            assert "\n" not in shown["error"]
            assert "kept" in answer["held"]
        taken += refused is None
        assert json.loads(answer["held"]) == json.loads(personal.to_json())
    assert 3 < taken < len(texts_) / 2


# ------------------------------------------------------------------------------------------------- predictions

SLIPS = ("tge", "thw", "adn", "fo", "whcih")  # words of the vocabulary that a likelier one lies beside
STRANGE = (
    "don't", "i", "i'm", "é", "été", "naïve", "straße", "x-ray", "42", "1990s", "3.5", "😀", "❤️", "...", ",",
    "שלום", "שלומות", "مرحبا", "漢字", "हिन्दी", "a\x1b[31m", "b\u202ec", "می\u200cخواهم",
    "q" * 40, "q" * 41, "damn", "pizza", "love", *SLIPS,
)  # fmt: skip


def real_words(size: int, lower: bool) -> Vocab:
    folder = sotu_data()
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
    typed = rng.choice(
        ("", mistyped(rng, rng.choice(words)), mistyped(rng, rng.choice(words[:2000])), rng.choice(SLIPS))
    )
    odd = (
        "",
        "x" * 60,
        "ab.cd",
        "@me",
        "שלומ",
        "q'",
        "\u0301",
        "a\u0301e",
        "𝒜b",
        "Wrld",
        "teh",
        "I",
        "im",
        "zzq",
        "poli",
        "ma",
    )
    return context + between + (typed if rng.random() < 0.85 else rng.choice(odd))


def learnt(rng: random.Random, vocab: Vocab) -> str:
    words = rng.sample(vocab.words[len(SPECIALS) : 400], 12)
    words = [w for w in words if any(map(str.isalnum, w))] + ["kwyjibo", "zzq", "wrld", "ωμέγα", "polish", "may"]
    personal = PersonalWords()
    for _ in range(rng.choice((0, 40, 200))):
        personal.learn(rng.choice(words), rng.choice(("in", "pizza", "", words[0])))
    for word in rng.sample(["McFly", "teh", "iPod", "i", words[1]], rng.randint(0, 2)):
        personal.add(word)
    for word in rng.sample([*words, "the", "damn", "i", emoji_table()["pizza"]], rng.randint(0, 3)):
        personal.block(word)
    return personal.to_json()


def tap_of(rng: random.Random, c: str) -> tuple[float, float] | None:
    centre = layout_of("qwerty").centre(fold(c))
    return (
        None if centre is None or rng.random() < 0.2 else (centre[0] + rng.gauss(0, 0.4), centre[1] + rng.gauss(0, 0.4))
    )


def swipe(rng: random.Random, word: str) -> list[tuple[float, float]]:
    keys = [p for p in map(layout_of("qwerty").centre, fold(word)) if p is not None]
    steps = [(a, b, i / 6) for a, b in pairwise(keys) for i in range(7)]
    return [
        (a[0] + t * (b[0] - a[0]) + rng.gauss(0, 0.15), a[1] + t * (b[1] - a[1]) + rng.gauss(0, 0.15))
        for a, b, t in steps
    ]


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
    personal = PersonalWords()
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
        predictor.settings = KeyboardSettings(choice["autocorrect"], choice["emoji"], choice["filter"])
        logp = logps[q["logp"]][: len(vocab)]
        if "points" in q:
            found.append([as_json(slot) for slot in predictor.gesture(logp, context, q["points"])])
        else:
            found.append(shown(predictor.suggest(logp, context, q["taps"])))
    return found


def test_strips_corrections_and_swipes() -> None:
    rng, draw = random.Random(6), np.random.default_rng(6)
    vocabs = [real_words(1800, lower=True), real_words(1200, lower=False)]
    most = max(map(len, vocabs))
    ranks = -np.log(np.arange(most) + 5.0)  # Zipf's law, and noise
    logps = [(sharp * ranks + draw.normal(0, 2, most)).astype(np.float32).astype(np.float64) for sharp in (1, 1, 3)]
    forms = {"congress": "Congress", "teh": "Teh", "may": "May", "états": "États"}
    cases: list[Case] = []
    for number in range(12):
        vocab = vocabs[number % 2]
        cases.append({
            "op": "predict", "vocab": number % 2, "forms": forms if vocab.lower else {},
            "layout": ("qwerty", "qwertz", "azerty")[number % 3], "personal": learnt(rng, vocab),
            "questions": [question(rng, vocab, len(logps)) for _ in range(40)],
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


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 3).map(float) | st.just(-np.inf), max_size=30), st.integers(1, 6))
def test_the_best_are_those_of_a_full_sort(scores: list[float], n: int) -> None:
    order = sorted((i for i, s in enumerate(scores) if s > -np.inf), key=lambda i: (-scores[i], i))
    assert best_of(np.array(scores), n) == order[:n]


def test_swipes_are_resampled_alike() -> None:
    rng = random.Random(7)
    paths: list[Any] = [[[1, 2]], [[1, 1], [1, 1]], [[0, 0], [2, 0], [2, 2]], [[0, 0], [0, 0], [3, 4]]]
    paths += [[[rng.uniform(0, 10), rng.uniform(0, 3)] for _ in range(rng.randint(1, 40))] for _ in range(40)]
    for path, got in zip(paths, answers([{"op": "path", "points": p, "n": 32} for p in paths]), strict=True):
        expected = resample(np.array([swipe_of(path)]), 32)[0].ravel()
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------------ typing


def chatty(vocab: Vocab, lines: Sequence[str]) -> KneserNey:
    """An n-gram model as its file has it.

    No two words are equally likely: of two that are, at equal costs, rounding would decide which comes first.
    """
    draw = np.random.default_rng(9)
    every = np.arange(len(vocab), dtype=np.int32)
    model = fit_kneser_ney([vocab.encode(lines), every], len(vocab), 3)
    levels = []
    for level in model.levels:
        prob = (level.prob * (1 + 0.01 * draw.random(len(level.prob)))).astype(np.float32).astype(np.float64)
        levels.append(replace(level, prob=prob, backoff=level.backoff.astype(np.float32).astype(np.float64)))
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


def switching(rng: random.Random, actions: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The same with learning switched now and then, in the middle of words and right after corrections too."""
    return [
        one
        for action in actions
        for one in (action, ("switch", rng.choice(("incognito", "learn"))))[: rng.choice((1,) * 9 + (2,))]
    ]


def typed_by_python(actions: Sequence[tuple[str, Any]], keyboard: Keyboard) -> list[dict[str, Any]]:
    editor, seen = Editor(keyboard), []
    for action, given_ in actions:
        if action == "type":
            editor.type(given_)
        elif action == "backspace":
            editor.backspace()
        elif action == "switch":
            personal = keyboard.predictor.personal
            name = {"learn": "learning"}.get(given_, given_)
            setattr(personal, name, not getattr(personal, name))
        elif (slot := editor.strip().slots[given_]) is not None:
            editor.pick(slot)
        seen.append({"text": editor.text, **shown(editor.strip())})
    return seen


def test_a_person_types() -> None:
    rng = random.Random(8)
    vocab = real_words(1200, lower=True)
    lines = sorted(sotu_data().rglob("*.txt"))[3].read_text("utf-8").splitlines()
    model = chatty(vocab, lines)
    forms = {"congress": "Congress", "states": "States"}
    sentences = [" ".join(line.split()[:8]) for line in lines if len(line.split()) > 8]
    sentences += ["i love pizza and teh pizza is damn", "kwyjibo kwyjibo kwyjibo is kwyjibo in kwyjbo kwyjibo"]
    cases: list[Case] = []
    for number, sentence in enumerate(rng.sample(sentences[:-2], 10) + sentences[-2:] * 2):
        given_ = {"learn": number % 5 != 3, "incognito": number % 5 == 4, "autocorrect": number % 6 != 5}
        actions = actions_of(rng, sentence)
        if number % 3 == 2:
            actions = switching(rng, actions)
        cases.append({"op": "script", "actions": actions, "settings": given_, "file": sent(ngram_file(model))})
    found = answers(cases, vocabularies=[json.loads(vocab.to_json())], forms=forms)
    corrected = 0
    for case, got in zip(cases, found, strict=True):
        asked = case["settings"]
        personal = PersonalWords(learning=asked["learn"], incognito=asked["incognito"])
        predictor = Predictor(vocab, personal, forms=forms, settings=KeyboardSettings(autocorrect=asked["autocorrect"]))
        expected = typed_by_python(case["actions"], Keyboard(ngram_source(model), predictor))
        for action, one, other in zip(case["actions"], got["seen"], expected, strict=True):
            assert one == other, action
            corrected += one["correction"] is not None
        assert got["learnt"] == json.loads(personal.to_json())
    assert corrected > 10


def test_the_engine_asks_once_a_word_and_drops_what_is_stale() -> None:
    (seen,) = answers([{"op": "engine"}])
    assert seen["sources"] == ["hat", "hut", "hat"]
    assert [word.lower() for word in seen["learnt"]] == ["hit", "hat", "hat"]
    assert seen["asked"] == [["f", 2, 3], ["n", 2, 3]]  # the correction of "hit" needed no more
    assert seen["whileTyping"] == []
    assert seen["long"] == [[None, None, None], []]
    assert seen["stale"] == [None, None, []]
    assert seen["during"] == [None, None, "hat", [["f", 2, 6]] * 3]  # an answer after the stop is not kept
    assert seen["staleSwipe"] is None
    assert [word.lower() for word in seen["swipes"]] == ["hat", "hat"]
    assert seen["undone"] == [None]
    assert seen["spelt"] == [
        ["en", "end", "ende"],
        ["End", "Den", "Ende"],
        ["end", "den", "ende"],
        " ",
        ["en", "ende", "enn"],
    ]
