"""The strip and the correction on small lexicons, and what holds for any: the decoder in node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from keyfed.keyboard.keys import fold, layout_of, table
from keyfed.keyboard.session import EMPTY, Decoder
from keyfed.text.vocab import SPECIALS, Vocab

from .node_cases import K, answers, called_all, needs_node

pytestmark = needs_node

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
PICTURES = table("emoji")["words"]


class Board:
    """A decoder whose model says the same whatever it reads, and what its user taught it."""

    def __init__(self, vocab: Vocab, logp: np.ndarray, forms: dict[str, str] | None = None) -> None:
        self.decoder = Decoder(vocab, lambda ids: logp, forms=forms)

    def shows(self, before, taps=(), **options):
        self.decoder._settings = options
        return self.decoder.suggest(before, taps)

    def swipe(self, before, points):
        self.decoder._settings = {}
        return self.decoder.gesture(before, points)

    def learn(self, word, previous="", times=1):
        self.decoder.learn([(word, previous)] * times)

    def tell(self, action, word):
        self.decoder._call("personal", action=action, value=word)


@contextmanager
def on(words, chances, lower=True) -> Iterator[Board]:
    """A board on other words."""
    one = Board(vocab_of(words, lower), logp_of(chances))
    yield one
    one.decoder.close()


@pytest.fixture(scope="module")
def started() -> Iterator[Board]:
    one = Board(vocab_of(CHANCES), LOGP, FORMS)
    yield one
    one.decoder.close()


@pytest.fixture
def board(started) -> Board:
    """The board of these words, which knows nobody yet."""
    started.decoder.forget_all()
    return started


def texts(found):
    return [slot and slot.text for slot in found.slots]


def test_with_nothing_typed_the_best_next_words_stand_in_the_middle_left_and_right(board):
    found = board.shows("so ")
    assert texts(found) == ["from", "the", "I"]
    assert {slot.kind for slot in found.slots} == {"next"}
    assert texts(board.shows("")) == ["From", "The", "I"]  # a sentence starts


@pytest.mark.parametrize(
    ("typed", "middle"),
    [("th", "the"), ("hap", "happy"), ("pres", "president"), ("compnay", "company"), ("presidnet", "president"),
     ("teh", "the"), ("dont", "don't"), ("cafe", "café"), ("lond", "London"), ("Th", "The"), ("TH", "THE"),
     ("prsi", "president"), ("hwllo", "hello"), ("thwy", "they")],
)  # fmt: skip
def test_completions_and_corrections_take_the_middle_and_the_typed_word_the_left(board, typed, middle):
    found = board.shows(f"so {typed}")
    assert found.slots[1].text == middle
    assert found.slots[0].text == typed
    assert found.slots[0].kind == "literal"


def test_kinds_say_why_a_word_is_there(board):
    assert board.shows("so pres").slots[1].kind == "completion"
    assert board.shows("so compnay").slots[1].kind == "correction"
    assert board.shows("so the").slots[1].kind == "literal"
    assert board.shows("so london").slots[1].kind == "word"  # the same word, written otherwise


@pytest.mark.parametrize(
    ("typed", "correction"),
    [("teh", "the"), ("Teh", "The"), ("compnay", "company"), ("dont", "don't"), ("presidnet", "president"), ("i", "I"),
     ("hrllo", "hello"), ("the", None), ("I", None), ("TEH", None), ("tEh", None), ("t3h", None), ("teh'", None),
     ("t", None), ("x@teh", None), ("te_h", None),
     ("keyfed", None), ("zzyzx", None), ("form", None), ("london", None),
     ("shti", None)],
)  # fmt: skip
def test_what_a_separator_corrects(board, typed, correction):
    assert board.shows(f"so {typed}").correction == correction


def test_a_lone_i_stays_where_it_is_blocked_or_meant(board):
    board.learn("I", times=5)
    assert board.shows("so i").correction == "I"  # the counts are those of "I"
    board.tell("keep", "i")  # a correction that was undone
    assert board.shows("so i").correction is None
    board.tell("forget", "i")
    assert board.shows("so i").correction == "I"
    board.tell("block", "i'm")
    assert board.shows("so i'm").correction is None


def test_a_blocked_emoji_leaves_its_word_alone(board):
    assert board.shows("so pizza").slots[2].kind == "emoji"
    board.tell("block", PICTURES["pizza"])
    found = board.shows("so pizza")
    assert "pizza" in texts(found)
    assert "emoji" not in {slot.kind for slot in found.slots if slot}


def test_a_correction_stands_in_the_middle_and_the_typed_word_on_the_left(board):
    found = board.shows("so teh")
    assert texts(found)[:2] == ["teh", found.correction]


def test_the_context_can_outvote_a_known_word_by_far_only():
    weights = [1e-9] * len(CHANCES)
    weights[list(CHANCES).index("from")] = 500.0
    with on(CHANCES, weights) as board:
        assert board.shows("so form").correction == "from"
        assert board.shows("so form", autocorrect=False).correction is None


@pytest.mark.parametrize("margin", [0.0, 2.0])
def test_a_correction_has_to_win_over_an_unknown_word_by_the_margin(margin):
    cost = K.sub_near * layout_of("qwerty").distance("x", "e")
    lead = 0.0 - K.alpha * min(K.sub_far, cost)  # the only word has all the probability
    case = {
        "op": "predict", "vocab": 0, "forms": {}, "layout": "qwerty", "personal": json.dumps(NOTHING),
        "questions": [{"before": "so thx", "logp": 0, "taps": [], "choice": CHOICE}],
    }  # fmt: skip
    changed = {"margin_unknown": margin, "unknown_letter": 0.0}
    cases = [{**case, "constants": {**changed, "unknown_word": lead - margin + more}} for more in (-0.01, 0.01)]
    words = json.loads(vocab_of(["the"]).to_json())
    (under,), (over,) = answers(cases, vocabularies=[words], logps=[logp_of([5.0]).tolist()])
    assert (under["correction"], over["correction"]) == ("the", None)


def test_words_held_back_are_not_corrected_away_even_if_unknown():
    with on(["duck", "the"], [1, 1]) as board:
        assert board.shows("so fuck").correction is None
        assert board.shows("so teh").correction == "the"
        board.tell("block", "teh")
        assert board.shows("so teh").correction is None
        assert board.shows("so fuck", filter=False).correction == "duck"


def test_tap_positions_decide_between_neighbours():
    h, o, p, t = (layout_of("qwerty").centre(c) for c in "hopt")
    near_o = (o[0] * 0.52 + p[0] * 0.48), o[1]
    with on(["hit", "hot"], [1, 1]) as board:
        found = board.shows("so hpt", [h, near_o, t])
        assert found.correction == found.slots[1].text == "hot"


def test_offensive_words_are_held_back_until_the_filter_is_off_and_never_corrected_away(board):
    assert "shit" not in texts(board.shows("so shi"))
    assert "shit" in texts(board.shows("so shi", filter=False))
    found = board.shows("so shit")
    assert found.correction is None
    assert "shit" in texts(found)
    assert board.shows("so shti", filter=False).correction == "shit"


def test_a_blocked_word_is_never_shown_completed_or_corrected_to(board):
    board.learn("the", "so", times=9)
    board.tell("block", "The")
    for before in ("so ", "so t", "so th", "so teh", "so thee", ""):
        found = board.shows(before)
        assert "the" not in [slot.word for slot in found.slots if slot]
        assert fold(found.correction or "") != "the"
    assert board.shows("so the").correction is None
    board.tell("unblock", "the")
    assert board.shows("so ").slots[1].text == "the"


def test_forgetting_beats_what_was_cached(board):
    model_only = board.shows("so ")
    board.learn("pizza", "so", times=20)
    board.learn("zyx", "so", times=20)
    assert {"pizza", "zyx"} <= set(texts(board.shows("so ")))
    board.tell("forget", "pizza")
    board.tell("forget", "zyx")
    assert board.shows("so ") == model_only


def test_own_words_are_learnt_after_three_uses_and_gone_while_incognito(board):
    for seen in (False, False, False, True):
        assert ("kiel" in texts(board.shows("so kie"))) == seen
        board.learn("Kiel", "so")
    assert board.shows("so kiek").correction == "kiel"
    assert "kiel" not in texts(board.shows("so kie", incognito=True))
    assert board.shows("so kiel", incognito=True).correction is None  # it is still known


def test_dictionary_words_are_shown_as_written_and_not_corrected(board):
    assert board.shows("so thx").correction is not None
    board.tell("add", "thx")
    board.tell("add", "McCoy")
    assert board.shows("so thx").correction is None
    assert "McCoy" in texts(board.shows("so mcc"))


def test_emoji_take_the_right_slot_only(board):
    assert board.shows("so pizza").slots[2].text == PICTURES["pizza"]
    assert board.shows("my pizza ").slots[2].kind == "emoji"
    assert all(slot is None or slot.kind != "emoji" for slot in board.shows("so pizza", emoji=False).slots)
    board.tell("block", "pizza")
    assert all(slot is None or slot.kind != "emoji" for slot in board.shows("so pizza").slots)


def test_a_cased_vocabulary_shows_its_words_as_they_are():
    with on(["apple", "Apple", "US", "us"], [1, 2, 3, 4], lower=False) as board:
        assert {"US", "us"} <= set(texts(board.shows("so us")))
        assert board.shows("so appl").slots[1].text == "Apple"
        assert texts(board.shows("so Appl")).count("Apple") == 1


@pytest.mark.parametrize("words", [[], [".", ","], ["a\x1b[31mb"], ["x" * 41]])
def test_a_vocabulary_without_words_gives_an_empty_strip(words):
    with on(words, [1] * len(words)) as board:
        assert board.shows("so ") == EMPTY
        assert texts(board.shows("so abc")) == [None, "abc", None]
        assert board.swipe("so ", [(0.5, 0.5), (3.5, 0.5)]) == []


def test_monstrous_words_are_left_alone(board):
    assert board.shows("so " + "x" * 10_000) == EMPTY
    assert board.shows("so " + "x" * (K.max_typed + 1)) == EMPTY
    assert board.shows("so " + "x" * K.max_typed).slots[1].text == "x" * K.max_typed


def test_a_swipe_means_its_word_unless_it_is_held_back(board):
    centre = layout_of("qwerty").centre
    path = [centre(c) for c in "hapy"]
    assert board.swipe("so ", path)[0].text == "happy"
    assert board.swipe("", path)[0].text == "Happy"
    board.tell("block", "happy")
    assert "happy" not in [slot.word for slot in board.swipe("so ", path)]
    assert "shit" not in [slot.word for slot in board.swipe("so ", [centre(c) for c in "shit"])]
    board.learn("kiel", times=3)
    assert board.swipe("so ", [centre(c) for c in "kiel"])[0].text == "kiel"


def test_backspaces_lead_back_to_what_typing_the_rest_gives(board):
    rng = np.random.default_rng(4)
    seen, typed = {}, ""
    for _ in range(300):
        typed = typed[:-1] if rng.random() < 0.45 else typed + "thepinrsox'"[rng.integers(11)]
        assert seen.setdefault(typed, board.shows(f"so {typed}")) == board.shows(f"so {typed}")
    assert len(seen) < 250  # some were come back to


NOTHING = {"format": 1, "words": {}, "pairs": {}, "dictionary": [], "blocked": []}
CHOICE = {"autocorrect": True, "emoji": True, "filter": True, "own": True}
lexicons = st.lists(st.text("abehlpqty'.1É😀", min_size=1, max_size=6), max_size=12, unique=True)
typing = st.text("abehlpqty'TÉ1 .😀\n", max_size=10)
own = st.lists(st.text("abt", min_size=1, max_size=4), max_size=3)


@settings(max_examples=3, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.data())
def test_what_holds_for_every_strip(data):
    drawn = data.draw(st.lists(st.tuples(lexicons, typing, own), min_size=60, max_size=80))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    vocabs = [vocab_of(lexicon, lower=False) for lexicon, _, _ in drawn]
    cases = [
        {
            "op": "predict", "vocab": n, "forms": {}, "layout": "qwerty",
            "personal": json.dumps({**NOTHING, "words": dict.fromkeys(words, 3), "blocked": lexicon[:2]}),
            "questions": [{"before": before, "logp": n, "taps": [], "choice": CHOICE}],
        }
        for n, (lexicon, before, words) in enumerate(drawn)
    ]  # fmt: skip
    logps = [logp_of(rng.uniform(0.01, 1, len(lexicon))).tolist() for lexicon, _, _ in drawn]
    found = answers(cases, vocabularies=[json.loads(vocab.to_json()) for vocab in vocabs], logps=logps)
    typing_of = called_all("context.typedPart", [[before] for _, before, _ in drawn])
    for (lexicon, _, _), typed, answer in zip(drawn, typing_of, found, strict=True):
        ((left, middle, right), correction) = answer[0]["slots"], answer[0]["correction"]
        blocked = {fold(word) for word in lexicon[:2]}
        shown = [slot for slot in (left, middle, right) if slot]
        assert len({slot["text"] for slot in shown}) == len(shown)
        assert not {slot["text"] for slot in shown} & set(SPECIALS)
        words = [slot["text"] for slot in shown if slot["kind"] not in ("emoji", "literal")]
        assert all(any(map(str.isalnum, word)) for word in words)
        assert all(slot["word"] not in blocked or slot["text"] == typed for slot in shown)
        assert all(slot is None or slot["kind"] != "emoji" for slot in (left, middle))
        if typed:
            assert typed in [slot["text"] for slot in shown]
        if correction is not None:
            assert middle["text"] == correction != typed
            assert left["text"] == typed
            assert fold(correction) not in blocked
