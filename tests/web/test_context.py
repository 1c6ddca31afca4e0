"""The text left of the cursor, and how a chosen word is written: the decoder in node.

On any text its words are those of `keyfed.text.vocab`; the rest is put next to the rule, written out plainly.
"""

from __future__ import annotations

import json
import unicodedata
from functools import cache

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from keyfed.keyboard.keys import base_letter, fold, layout_of
from keyfed.keyboard.measure import strokes_between
from keyfed.text.batches import line_read
from keyfed.text.vocab import EOS, SPECIALS, UNK, Vocab, words_of

from .node_cases import K, answers, called, called_all, needs_node

pytestmark = needs_node
some = settings(max_examples=3, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))

VOCAB = Vocab("word", (*SPECIALS, "a", "b", "."), lower=True, tokenised=False)


@pytest.mark.parametrize(
    ("before", "typed"),
    [
        ("", ""), ("hel", "hel"), ("hello ", ""), ("say hel", "hel"), ("say (hel", "hel"), ("don'", "don'"),
        ("don’t", "don’t"),
        ("'hel", "hel"), ("-hel", "hel"), ("well-k", "well-k"), ("well-", "well-"), ("end.", ""), ("end...", ""),
        ("so...and", "and"), ("www.ex", "www.ex"), ("@ann", "@ann"), ("me@x.or", "me@x.or"), ("snake_ca", "snake_ca"),
        ("/usr/bi", "/usr/bi"), ("3.1", "3.1"), ("a\nb", "b"), ("😀", ""), ("👩\u200d", ""), ("x😀ab", "ab"),
        ("नमस्ते", "नमस्ते"),
        ("e\u0301t", "e\u0301t"), ("שלום", "שלום"), ("a\x1b[31mb", "31mb"), ("'", ""), ("--", ""), ("...", ""),
        ("hi!", ""),
    ],
)  # fmt: skip
def test_the_word_being_typed(before, typed):
    assert called("context.typedPart", before) == typed


def read(*befores, vocab=VOCAB):
    """Return what is read of each text after the one before it."""
    (found,) = answers([{"op": "context", "befores": befores}], vocab=json.loads(vocab.to_json()))
    return found


@some
@given(st.lists(st.text("ab'-.@ \n😀é", max_size=30), min_size=60, max_size=80))
def test_the_typed_part_is_a_suffix_and_typing_goes_on_with_it(befores):
    every = called_all("context.typedPart", [[before] for before in befores])
    again = called_all("context.typedPart", [[typed] for typed in every])
    longer = called_all("context.typedPart", [[before + "a"] for before in befores])
    for before, typed, same, more in zip(befores, every, again, longer, strict=True):
        assert before.endswith(typed)
        assert not any(c.isspace() for c in typed)
        assert same == typed
        assert more.endswith("a")


def test_the_last_context_is_taken_over_only_while_its_text_stands():
    for second in ("a b b", "b b b"):
        assert read("a b ", second)[1:] == read(second)


@pytest.mark.parametrize(("n", "start"), [(0, 0), (31, 0), (63, 0), (64, 32), (95, 32), (96, 64), (1000, 960)])
def test_the_model_reads_from_the_anchor_on(n, start):
    tokens = list(range(10, 10 + n))
    assert called("context.anchored", tokens) == [EOS, *tokens[start:]]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", ""),
        ("The Cat ", "cat"),
        ("cat\n", ""),
        ("cat, ", ""),
        ("cat. the", "the"),
        ("don’t ", "don't"),
        ("x 😀 ", ""),
    ],
)
def test_the_previous_word(text, word):
    assert called("context.previousWord", text) == word


def test_a_line_end_is_read_as_one():
    assert read("a\n\nx b")[0]["ids"] == [EOS, 4, EOS, EOS, UNK]


def test_of_a_pasted_novel_only_the_end_is_read_and_its_start_seldom_moves():
    novel = "word " * 20_000
    kept = called_all("context.lastPart", [[novel + "a" * n] for n in range(0, 900, 30)])
    starts = {len(novel) + 30 * n - len(part) for n, part in enumerate(kept)}
    assert len(starts) <= 2
    assert all(K.most_text - K.text_step - 5 <= len(novel) - start <= K.most_text for start in starts)
    assert len(read(novel)[0]["ids"]) <= 2 * K.anchor
    short = {"op": "call", "module": "context", "name": "lastPart", "constants": {"most_text": 10, "text_step": 4}}
    found = answers([{**short, "given": [text]} for text in ("aaaa bbbb cccc dddd", "x" * 50)])
    assert found == ["dddd", "x" * 10]
    short["constants"] = {"most_text": 12, "text_step": 4}
    assert answers([{**short, "given": ["one two three four"]}]) == ["three four"]


def test_a_word_of_ten_thousand_characters_is_one_word():
    assert called("context.typedPart", "x" * 10_000) == "x" * 10_000
    assert len(read("a " + "x" * 10_000)[0]["typed"]) > K.max_typed


FORMS = {"london": "London", "iphone": "iPhone", "nasa": "NASA"}


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ("", True), ("   ", True), ("Hello\n", True), ("Hello \n  ", True), ("Hello. ", True), ("Hello! ", True),
        ("Hello? ", True), ("Hello… ", True), ('"Hello." ', True), ("(Hello.) ", True), ("he said “hello.”  ", True),
        ("Hello ", False), ("Hello", False), ("Hello.", False), ("Hello, ", False), ("3.14 is ", False), ("a: ", False),
    ],
)  # fmt: skip
def test_where_sentences_start(text, starts):
    assert called("casing.startsSentence", text) == starts


@pytest.mark.parametrize(
    ("word", "typed", "sentence", "shown"),
    [
        ("the", "", False, "the"), ("the", "", True, "The"), ("the", "t", True, "the"), ("the", "T", False, "The"),
        ("the", "TH", False, "THE"), ("the", "Th", False, "The"), ("london", "lo", False, "London"),
        ("london", "", True, "London"), ("london", "LON", False, "LONDON"), ("nasa", "n", False, "NASA"),
        ("iphone", "ip", False, "iPhone"), ("i", "i", False, "I"), ("i'm", "im", False, "I'm"),
        ("école", "E", False, "École"),
        ("ß", "S", False, "ß"), ("straße", "ST", False, "STRASSE"), ("don't", "DON'T", False, "DON'T"),
        ("שלום", "ש", True, "שלום"),
        ("1st", "", True, "1st"),
    ],
)  # fmt: skip
def test_words_are_shown_with_their_form_and_the_typed_capitals(word, typed, sentence, shown):
    case = {"op": "casing", "text": "" if sentence else "a ", "word": word, "typed": typed, "forms": FORMS}
    assert answers([case])[0]["shown"] == shown


def test_all_capitals_need_two_letters():
    words = ("I", "OK", "O'K", "Ok", "A1", "", "漢字", "R2D2")
    assert called_all("casing.allCapitals", [[word] for word in words]) == [
        False, True, True, False, False, False, False, True,
    ]  # fmt: skip


@some
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=10), min_size=60, max_size=80))
def test_a_capital_changes_the_first_letter_only(words):
    for word, shown in zip(words, called_all("casing.capitalised", [[word] for word in words]), strict=True):
        assert shown[1:] == word[1:]
        assert len(shown) == len(word)


def test_a_picked_word_replaces_the_typed_part_and_a_blank_follows():
    assert called("casing.pick", "I am hap", "hap", "happy") == {"text": "I am happy ", "automatic": True}
    assert called("casing.pick", "I am ", "", "here") == {"text": "I am here ", "automatic": True}


def put(text, automatic, c):
    return called("casing.put", {"text": text, "automatic": automatic}, c)


@pytest.mark.parametrize("mark", list(".,!?:;)…"))
def test_a_mark_takes_the_place_of_an_automatic_blank_only(mark):
    assert put("so ", True, mark) == {"text": f"so{mark} ", "automatic": True}
    assert put("so ", False, mark) == {"text": f"so {mark}", "automatic": False}


@pytest.mark.parametrize("c", list('a1("'))
def test_other_characters_leave_the_blank(c):
    assert put("so ", True, c) == {"text": f"so {c}", "automatic": False}


@pytest.mark.parametrize("c", list("'’-\n"))
def test_what_joins_words_or_ends_the_line_takes_the_place_of_an_automatic_blank_only(c):
    assert put("so ", True, c) == {"text": f"so{c}", "automatic": False}
    assert put("so ", False, c) == {"text": f"so {c}", "automatic": False}


def test_a_blank_that_is_typed_is_the_automatic_one():
    assert put("so ", True, " ") == {"text": "so ", "automatic": False}
    assert put("so ", False, " ") == {"text": "so  ", "automatic": False}


def fewest_strokes(between):
    """Search the keys that write what stands behind a picked word: characters and backspaces, breadth first."""
    seen, reached = {("so ", True)}, [("so ", True)]
    for strokes in range(8):
        if any(text == f"so{between}" for text, _ in reached):
            return strokes
        typed = [({"text": text, "automatic": auto}, c) for text, auto in reached for c in sorted({*between, " "})]
        found = [(one["text"], one["automatic"]) for one in called_all("casing.put", typed)]
        found += [(text[:-1], False) for text, _ in reached]
        reached = [one for one in dict.fromkeys(found) if one not in seen and len(one[0]) <= len(between) + 4]
        seen.update(reached)
    return None


@pytest.mark.parametrize("between", [" ", ", ", ". ", "/", " (", "-", ": ", "...", " - ", "'", " :)", "", "!) ", ",x"])
def test_a_measurement_counts_the_fewest_strokes_between_words(between):
    assert strokes_between(between, True) == fewest_strokes(between)


# ------------------------------------------------------------------------------------------------------ any text


@cache
def unknown():
    """Characters that only one of the two sides' Unicode versions knows, or knows a capital of."""
    (ranges,) = answers([{"op": "unassigned"}])
    later = {chr(c) for start, stop in ranges for c in range(start, stop)}
    return frozenset(later | set("\u019b\u0264\ua7d3\ua7d5"))


def known(c):
    """Whether a character means the same to both sides; newer Unicode versions know more letters."""
    return unicodedata.category(c) not in ("Cn", "Cs") and c not in unknown()


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
def test_words_of_any_text(data):
    lines = data.draw(st.lists(st.tuples(texts, st.booleans(), st.booleans()), min_size=60, max_size=120))
    found = answers([{"op": "words", "line": a, "tokenised": b, "lower": c} for a, b, c in lines])
    for (line, tokenised, lower), words in zip(lines, found, strict=True):
        assert words == words_of(line, tokenised=tokenised, lower=lower), ascii(line)


def test_a_model_of_lines_reads_the_last_line():
    cases = [[EOS], [EOS, 5, 6], [EOS, 5, EOS], [EOS, 5, EOS, 7, 8], [9, 10]]
    found = answers([{"op": "lineRead", "ids": ids} for ids in cases])
    assert found == [line_read(ids) for ids in cases]


def test_every_character_is_cut_alike():
    """Between two letters: joins them, stands alone or vanishes; upper case first, for its lower case."""
    every = [chr(c) for c in range(0x110000) if known(chr(c)) and unicodedata.category(chr(c)) != "Co"]
    lines = ["".join(f"A{c}B " for c in every[at : at + 4000]) for at in range(0, len(every), 4000)]
    found = answers([{"op": "words", "line": line, "tokenised": False, "lower": True} for line in lines])
    for line, words in zip(lines, found, strict=True):
        assert words == words_of(line, tokenised=False, lower=True)


LONG = (
    "n" * 9000, "ab " * 3000, "😀" * 4500, "😀 a" * 1500 + ".x", "Hi." + " " * 5000 + "a",
)  # fmt: skip
HAND = (
    "", "a.b", "a.", ".a", "(don’", "@me", "x_", *LONG, "He said “hi!” ", "a!)'] ", "3.5 ",
    "one\n", "one\n\u2003", "x\x1c",
)  # fmt: skip


@some
@given(st.lists(texts, min_size=60, max_size=100))
def test_what_is_read_of_any_text(befores):
    vocab = Vocab("word", (*SPECIALS, "a", "b", "the", ".", "é", "'"), lower=True, tokenised=False)
    befores = [*befores, *HAND]
    kept = called_all("context.lastPart", [[before] for before in befores])
    found = read(*befores, vocab=vocab)
    for before, part, seen in zip(befores, kept, found, strict=True):
        assert seen["text"] + seen["typed"] == part, ascii(before)
        tokens = vocab.encode_context(seen["text"]).tolist()
        assert seen["ids"] == [EOS, *tokens[K.anchor * max(0, len(tokens) // K.anchor - 1) :]], ascii(before)
        words = words_of(seen["text"].rsplit("\n", 1)[-1], tokenised=False, lower=False)
        is_word = bool(words) and any(map(str.isalnum, words[-1]))
        assert seen["previous"] == (fold(words[-1]) if is_word else ""), ascii(before)
        assert before.endswith(part)
        if len(before) <= K.most_text:
            assert part == before
        else:
            assert len(part) <= K.most_text


@some
@given(st.lists(texts, min_size=60, max_size=100), st.lists(texts, min_size=60))
def test_capitals_and_blanks_of_any_text(befores, words):
    forms = {"the": "THe", "éa": "ÉA"}
    befores, words = [*befores, *HAND], [*words, "the", "i", "i'm", "éa", "ßa", "ǆ"]
    cases = [
        {"op": "casing", "text": text, "word": word or ",", "typed": typed, "forms": forms}
        for text, word, typed in zip(befores, words, [*words[1:], "TH"], strict=False)
    ]
    for case, seen in zip(cases, answers(cases), strict=True):
        text, word, typed = case["text"], case["word"], case["typed"]
        bare = text.rstrip()
        ends = bare != text and bare.rstrip(K.sentence_close).endswith(tuple(K.sentence_end))
        assert seen["sentence"] == (not bare or "\n" in text[len(bare) :] or ends), ascii(case)
        letters = [c for c in typed if c.lower() != c.upper()]
        assert seen["capitals"] == (len(letters) >= 2 and all(c.lower() != c for c in letters)), ascii(case)
        base = K.capital_i.get(word) or forms.get(word, word)
        if seen["capitals"]:
            assert seen["shown"] == base.upper(), ascii(case)
        elif typed[0].lower() != typed[0] if typed else seen["sentence"]:
            assert (seen["shown"][1:], seen["shown"].upper()) == (base[1:], base.upper()), ascii(case)
        else:
            assert seen["shown"] == base, ascii(case)
        mark = word[:1]
        if mark <= "\uffff":  # JavaScript took half of it otherwise
            blank = text.endswith(" ")
            moved = blank and mark in K.no_blank_before
            bare = text[:-1] if moved or (blank and mark in K.no_blank_around + " ") else text
            after = f"{bare}{mark} " if moved else bare + mark
            assert seen["put"] == {"text": after, "automatic": moved}, ascii(case)


@some
@given(st.lists(texts, min_size=60, max_size=80))
def test_any_text_is_folded_alike_in_a_measurement(words):
    found = answers([{"op": "folded", "text": word} for word in words])
    assert found == [[fold(word), [base_letter(c) for c in word]] for word in words]


@pytest.mark.parametrize("name", ["qwerty", "qwertz", "azerty"])
def test_keys_lie_where_a_measurement_has_them(name):
    characters = "abcdefghijklmnopqrstuvwxyzéñßÜ'-7漢"
    (found,) = answers([{"op": "centres", "layout": name, "characters": characters}])
    layout = layout_of(name)
    assert found == [point and list(point) for point in map(layout.centre, characters)]


def test_what_can_be_suggested_learnt_and_corrected():
    asked = {
        "suggestible": ["it's", "42", "...", "a\x1b[31m", "a" * 41, "😀" * 41, "a" * 40],
        "learnable": ["Kiel", "b4", "me@x.de", "a.b", "…", "rock'"],
        "correctable": ["teh", "Teh", "TEH", "iPhnoe", "b4", "x@y", "rock'", "", "a" * 49],
    }
    found = answers([{"op": op, "words": words} for op, words in asked.items()])
    assert found == [
        [True, True, False, False, False, False, True],
        [True, False, False, False, False, False],
        [True, True, False, False, False, False, False, False, False],
    ]
