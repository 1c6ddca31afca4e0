"""Which language a text is in, as far as a keyboard has to know: whether blanks stand between its words.

The language is known by its commonest words; that of a script which only one language writes, by the script. Nothing
else depends on it: words of every language that is written with blanks are words.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping

from keyfed.errors import DataError

COMMON: Mapping[str, frozenset[str]] = {
    name: frozenset(words.split())
    for name, words in {
        "English": "the and to of a is that you it in i for this was not with what have are but",
        "German": "und die der das ich nicht ist es ein zu mit du auf auch den wir so sie war aber",
        "French": "le la les des et est je que pas un une vous dans pour sur avec c'est qui mais ce",
        "Spanish": "que el los las no es un una por con para como pero y más está lo si muy se",
        "Italian": "che di il non è un una per la con sono ma come anche gli del mi questo ho ti",
        "Portuguese": "que não o os as um uma para com por mas como mais é você isso eu na no em",
        "Dutch": "de het een en van ik niet dat je is op te maar ook zijn voor met als wat nog",
        "Polish": "nie się w na to jest że i z do jak ale co tak za po już mnie czy tylko",
        "Turkish": "bir ve bu da de ne için ama çok ben var mi gibi daha sen yok değil o ile her",
        "Swedish": "och det att är en jag som på inte med för den har du ett av men om så till",
        "Russian": "и в не на что я с это как а у так но он мы по вы к да ты",
    }.items()
}
UNSPACED = {
    "CJK": "Chinese or Japanese", "HIRAGANA": "Japanese", "KATAKANA": "Japanese", "THAI": "Thai", "LAO": "Lao",
    "KHMER": "Khmer", "MYANMAR": "Burmese", "TIBETAN": "Tibetan",
}  # fmt: skip
LEAST_SHARE = 0.08  # of a text's words that are among a language's commonest
LONGEST_WORD = 6  # letters of a word in a script without blanks, on average; longer pieces are sentences
UNSPACED_SHARE = 0.3  # of letters


def language_of(words: Mapping[str, int]) -> str:
    """Return the language of counted words in lower case, or what is known of it.

    Example:
      >>> language_of({"the": 3, "dog": 1, "and": 2, "cat": 1}), language_of({"zzz": 4}), language_of({})
      ('English', 'not known', 'not known')
    """
    total = sum(words.values())
    shares = {name: sum(words.get(word, 0) for word in common) / max(1, total) for name, common in COMMON.items()}
    best = max(shares, key=shares.__getitem__)
    if shares[best] >= LEAST_SHARE:
        return best
    scripts = Counter[str]()
    for word, count in words.items():
        if script := _script(word):
            scripts[script] += count
    if not scripts or (main := scripts.most_common(1)[0][0]) == "LATIN":
        return "not known"
    return UNSPACED.get(main) or f"in {main.capitalize()} letters"


def _script(word: str) -> str:
    """Return the first word of the Unicode name of a word's first letter."""
    letter = next((c for c in word if c.isalpha()), "")
    return unicodedata.name(letter, "").split(" ", 1)[0].split("-")[0] if letter else ""


def unspaced(words: Iterable[str]) -> str | None:
    """Return the language whose sentences stand in the place of words, because it has no blanks; None if there is none.

    Example:
      >>> unspaced(["今天天气很好我们去公园", "ok"]), unspaced(["今天", "天气", "很", "好"])
      ('Chinese or Japanese', None)
    """
    letters = 0
    pieces: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    for word in words:
        letters += sum(map(str.isalpha, word))
        if not word.isascii() and (script := _script(word)) in UNSPACED:
            pieces[UNSPACED[script]] += len(word)
            numbers[UNSPACED[script]] += 1
    of_these = sum(pieces.values())
    if not of_these or of_these < UNSPACED_SHARE * letters or of_these < LONGEST_WORD * sum(numbers.values()):
        return None
    return pieces.most_common(1)[0][0]


def need_blanks(words: Iterable[str], name: str) -> None:
    """Raise DataError where the words of a text are sentences of a language without blanks."""
    if (language := unspaced(words)) is not None:
        raise DataError(
            f"{name}: {language} is written without blanks between words, and a word model would take sentences for "
            "words; train a model of characters (--model char-lstm), or put blanks between the words"
        )
