"""The strip and the correction on small lexicons, and what holds for any."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.keyboard.context import constants, emoji_table, fold, layout_of, read_context
from keyfed.keyboard.personal import PersonalWords
from keyfed.keyboard.predict import EMPTY, KeyboardSettings, Predictor, best_of
from keyfed.text.vocab import SPECIALS, Vocab

K = constants()
CHANCES = {
    "the": 60, "they": 15, "then": 10, "there": 8, "ten": 3, "happy": 4, "happen": 4, "company": 6, "president": 5,
    "don't": 6, "i": 20, "in": 15, "is": 15, "it": 12, "london": 2, "pizza": 2, "shit": 9,
    "ship": 3, "form": 5, "from": 21,
    "hello": 5, "café": 1, ",": 40, ".": 50, "42": 1,
}  # fmt: skip


def vocab_of(words, lower=True):
    return Vocab("word", (*SPECIALS, *words), lower=lower, tokenised=False)


def logp_of(chances):
    weights = np.array([5.0] * 4 + list(chances))
    return np.log(weights / weights.sum())


LOGP = logp_of(CHANCES.values())
FORMS = {"london": "London"}


def predictor(personal=None, **options):
    return Predictor(vocab_of(CHANCES), personal, forms=FORMS, settings=KeyboardSettings(**options))


def strip(before, personal=None, logp=LOGP, **options):
    p = predictor(personal, **options)
    return p.suggest(logp, read_context(before, p.vocab, K))


def texts(found):
    return [slot and slot.text for slot in found.slots]


def test_with_nothing_typed_the_best_next_words_stand_in_the_middle_left_and_right():
    found = strip("so ")
    assert texts(found) == ["from", "the", "I"]
    assert {slot.kind for slot in found.slots} == {"next"}
    assert texts(strip("")) == ["From", "The", "I"]  # a sentence starts


@pytest.mark.parametrize(
    ("typed", "middle"),
    [("th", "the"), ("hap", "happy"), ("pres", "president"), ("compnay", "company"), ("presidnet", "president"),
     ("teh", "the"), ("dont", "don't"), ("cafe", "café"), ("lond", "London"), ("Th", "The"), ("TH", "THE"),
     ("prsi", "president"), ("hwllo", "hello"), ("thwy", "they")],
)  # fmt: skip
def test_completions_and_corrections_take_the_middle_and_the_typed_word_the_left(typed, middle):
    found = strip(f"so {typed}")
    assert found.slots[1].text == middle
    assert found.slots[0].text == typed
    assert found.slots[0].kind == "literal"


def test_kinds_say_why_a_word_is_there():
    assert strip("so pres").slots[1].kind == "completion"
    assert strip("so compnay").slots[1].kind == "correction"
    assert strip("so the").slots[1].kind == "literal"
    assert strip("so london").slots[1].kind == "word"  # the same word, written otherwise


@pytest.mark.parametrize(
    ("typed", "correction"),
    [("teh", "the"), ("Teh", "The"), ("compnay", "company"), ("dont", "don't"), ("presidnet", "president"), ("i", "I"),
     ("hrllo", "hello"), ("the", None), ("I", None), ("TEH", None), ("tEh", None), ("t3h", None), ("teh'", None),
     ("t", None), ("x@teh", None), ("te_h", None),
     ("keyfed", None), ("zzyzx", None), ("form", None), ("london", None),
     ("shti", None)],
)  # fmt: skip
def test_what_a_separator_corrects(typed, correction):
    assert strip(f"so {typed}").correction == correction


def test_a_lone_i_stays_where_it_is_blocked_or_meant():
    personal = PersonalWords()
    for _ in range(5):
        personal.learn("I")
    assert strip("so i", personal).correction == "I"  # the counts are those of "I"
    personal.keep("i")  # a correction that was undone
    assert strip("so i", personal).correction is None
    personal.forget("i")
    assert strip("so i", personal).correction == "I"
    personal.block("i'm")
    assert strip("so i'm", personal).correction is None


def test_a_blocked_emoji_leaves_its_word_alone():
    personal = PersonalWords()
    assert strip("so pizza", personal).slots[2].kind == "emoji"
    personal.block(emoji_table()["pizza"])
    found = strip("so pizza", personal)
    assert "pizza" in texts(found)
    assert "emoji" not in {slot.kind for slot in found.slots if slot}


def test_a_correction_stands_in_the_middle_and_the_typed_word_on_the_left():
    found = strip("so teh")
    assert texts(found)[:2] == ["teh", found.correction]


def test_the_context_can_outvote_a_known_word_by_far_only():
    sure = np.log(np.full(len(LOGP), 1e-9))
    sure[list(CHANCES).index("from") + 4] = np.log(0.99)
    assert strip("so form", logp=sure).correction == "from"
    assert strip("so form", autocorrect=False, logp=sure).correction is None


@pytest.mark.parametrize("margin", [0.0, 2.0])
def test_a_correction_has_to_win_over_an_unknown_word_by_the_margin(margin):
    context = read_context("so thx", vocab_of(["the"]), K)
    logp = logp_of([5.0])
    cost = K.sub_near * layout_of("qwerty").distance("x", "e")
    lead = 0.0 - K.alpha * min(K.sub_far, cost)  # the only word has all the probability
    for more, corrected in ((-0.01, "the"), (0.01, None)):
        k = replace(K, margin_unknown=margin, unknown_letter=0.0, unknown_word=lead - margin + more)
        assert Predictor(vocab_of(["the"]), k=k).suggest(logp, context).correction == corrected


def test_words_held_back_are_not_corrected_away_even_if_unknown():
    p = Predictor(vocab_of(["duck", "the"]), personal := PersonalWords())
    logp = logp_of([1, 1])
    assert p.suggest(logp, read_context("so fuck", p.vocab, K)).correction is None
    assert p.suggest(logp, read_context("so teh", p.vocab, K)).correction == "the"
    personal.block("teh")
    assert p.suggest(logp, read_context("so teh", p.vocab, K)).correction is None
    p.settings = KeyboardSettings(clean=False)
    assert p.suggest(logp, read_context("so fuck", p.vocab, K)).correction == "duck"


def test_tap_positions_decide_between_neighbours():
    p = Predictor(vocab_of(["hit", "hot"]))
    logp, layout = logp_of([1, 1]), layout_of("qwerty")
    context = read_context("so hpt", p.vocab, K)
    h, o, pp, t = (layout.centre(c) for c in "hopt")
    near_o = ((o[0] * 0.52 + pp[0] * 0.48), o[1])
    assert p.suggest(logp, context, [h, near_o, t]).correction == "hot"
    assert p.suggest(logp, context, [h, near_o, t]).slots[1].text == "hot"


def test_offensive_words_are_held_back_until_the_filter_is_off_and_never_corrected_away():
    assert "shit" not in texts(strip("so shi"))
    assert "shit" in texts(strip("so shi", clean=False))
    found = strip("so shit")
    assert found.correction is None
    assert "shit" in texts(found)
    assert strip("so shti", clean=False).correction == "shit"


def test_a_blocked_word_is_never_shown_completed_or_corrected_to():
    personal = PersonalWords()
    for _ in range(9):
        personal.learn("the", "so")
    personal.block("The")
    for before in ("so ", "so t", "so th", "so teh", "so thee", ""):
        found = strip(before, personal)
        assert "the" not in [slot.word for slot in found.slots if slot]
        assert fold(found.correction or "") != "the"
    assert strip("so the", personal).correction is None
    personal.unblock("the")
    assert strip("so ", personal).slots[1].text == "the"


def test_forgetting_beats_what_was_cached():
    personal = PersonalWords()
    p = predictor(personal)
    context = read_context("so ", p.vocab, K)
    model_only = p.suggest(LOGP, context)
    for _ in range(20):
        personal.learn("pizza", "so")
        personal.learn("zyx", "so")
    assert {"pizza", "zyx"} <= set(texts(p.suggest(LOGP, context)))
    personal.forget("pizza")
    personal.forget("zyx")
    assert p.suggest(LOGP, context) == model_only


def test_own_words_are_learnt_after_three_uses_and_gone_while_incognito():
    personal = PersonalWords()
    p = predictor(personal)
    typing = read_context("so kie", p.vocab, K)
    for seen in (False, False, False, True):
        assert ("kiel" in texts(p.suggest(LOGP, typing))) == seen
        personal.learn("Kiel", "so")
    assert p.suggest(LOGP, read_context("so kiek", p.vocab, K)).correction == "kiel"
    personal.incognito = True
    assert "kiel" not in texts(p.suggest(LOGP, typing))
    assert p.personal.knows("kiel")


def test_dictionary_words_are_shown_as_written_and_not_corrected():
    personal = PersonalWords()
    assert strip("so thx", personal).correction is not None
    personal.add("thx")
    personal.add("McCoy")
    assert strip("so thx", personal).correction is None
    assert "McCoy" in texts(strip("so mcc", personal))


def test_emoji_take_the_right_slot_only():
    assert strip("so pizza").slots[2].text == emoji_table()["pizza"]
    assert strip("my pizza ").slots[2].kind == "emoji"
    assert strip("so pizza", emoji=False).slots[2] is None or strip("so pizza", emoji=False).slots[2].kind != "emoji"
    personal = PersonalWords()
    personal.block("pizza")
    assert all(slot is None or slot.kind != "emoji" for slot in strip("so pizza", personal).slots)


def test_a_cased_vocabulary_shows_its_words_as_they_are():
    p = Predictor(vocab_of(["apple", "Apple", "US", "us"], lower=False))
    logp = logp_of([1, 2, 3, 4])
    assert {"US", "us"} <= set(texts(p.suggest(logp, read_context("so us", p.vocab, K))))
    assert p.suggest(logp, read_context("so appl", p.vocab, K)).slots[1].text == "Apple"
    assert texts(p.suggest(logp, read_context("so Appl", p.vocab, K))).count("Apple") == 1


@pytest.mark.parametrize("words", [[], [".", ","], ["a\x1b[31mb"], ["x" * 41]])
def test_a_vocabulary_without_words_gives_an_empty_strip(words):
    p = Predictor(vocab_of(words))
    logp = logp_of([1] * len(words))
    assert p.suggest(logp, read_context("so ", p.vocab, K)) == EMPTY
    found = p.suggest(logp, read_context("so abc", p.vocab, K))
    assert texts(found) == [None, "abc", None]
    assert p.gesture(logp, read_context("so ", p.vocab, K), [(0.5, 0.5), (3.5, 0.5)]) == []


def test_monstrous_words_are_left_alone():
    assert strip("so " + "x" * 10_000) == EMPTY
    assert strip("so " + "x" * (K.max_typed + 1)) == EMPTY
    assert strip("so " + "x" * K.max_typed).slots[1].text == "x" * K.max_typed


def test_a_swipe_means_its_word_unless_it_is_held_back():
    personal, layout = PersonalWords(), layout_of("qwerty")
    p = predictor(personal)
    context = read_context("so ", p.vocab, K)
    path = [layout.centre(c) for c in "hapy"]
    assert p.gesture(LOGP, context, path)[0].text == "happy"
    assert p.gesture(LOGP, read_context("", p.vocab, K), path)[0].text == "Happy"
    personal.block("happy")
    assert "happy" not in [slot.word for slot in p.gesture(LOGP, context, path)]
    assert "shit" not in [slot.word for slot in p.gesture(LOGP, context, [layout.centre(c) for c in "shit"])]
    for _ in range(3):
        personal.learn("kiel")
    assert p.gesture(LOGP, context, [layout.centre(c) for c in "kiel"])[0].text == "kiel"


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 3).map(float) | st.just(-np.inf), max_size=30), st.integers(1, 6))
def test_the_best_are_those_of_a_full_sort(scores, n):
    order = sorted((i for i, s in enumerate(scores) if s > -np.inf), key=lambda i: (-scores[i], i))
    assert best_of(np.array(scores), n) == order[:n]


words = st.lists(st.text("abehlpqty'.1É😀", min_size=1, max_size=6), max_size=12, unique=True)
typing = st.text("abehlpqty'TÉ1 .😀\n", max_size=10)


@settings(max_examples=200, deadline=None)
@given(words, typing, st.data())
def test_what_holds_for_every_strip(lexicon, before, data):
    personal = PersonalWords()
    for word in lexicon[:2]:
        personal.block(word)
    for word in data.draw(st.lists(st.text("abt", min_size=1, max_size=4), max_size=3)):
        for _ in range(3):
            personal.learn(word)
    p = Predictor(vocab_of(lexicon, lower=False), personal)
    weights = data.draw(st.lists(st.floats(0.01, 1), min_size=len(lexicon), max_size=len(lexicon)))
    context = read_context(before, p.vocab, K)
    found = p.suggest(logp_of(weights), context)
    shown = [slot for slot in found.slots if slot]
    assert len({slot.text for slot in shown}) == len(shown)
    assert not {slot.text for slot in shown} & set(SPECIALS)
    assert all(any(map(str.isalnum, slot.text)) for slot in shown if slot.kind not in ("emoji", "literal"))
    assert all(slot.word not in personal.blocked or slot.text == context.typed for slot in shown)
    assert found.slots[1] is None or found.slots[1].kind != "emoji"
    assert (found.slots[0] is None) or found.slots[0].kind != "emoji"
    if context.typed:
        assert context.typed in [slot.text for slot in shown]
    if found.correction is not None:
        assert found.slots[1].text == found.correction != context.typed
        assert found.slots[0].text == context.typed
        assert fold(found.correction) not in personal.blocked
