"""How a word is written: its most frequent form in training text, where that is not the word itself.

A vocabulary in lower case cannot tell `london` from `London`. A word at the start of a sentence says nothing about it
and is not counted. A form enters only if two clients or more write it: what one person alone writes is not shipped.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from keyfed.text.vocab import Vocab, words_of

LEAST_CLIENTS = 2
_ENDS = frozenset(".!?…:")  # a colon, too: what follows it may be a sentence of its own
_BETWEEN = re.compile(r"[\W_]+")  # quotes and brackets do not begin a sentence by themselves


def written_forms(clients: Iterable[Iterable[str]], vocab: Vocab, least: int = LEAST_CLIENTS) -> dict[str, str]:
    """Return {word: form} for the words of a lower-cased vocabulary whose usual form is another than the word.

    Args:
      clients: the training lines of each client.
      least: clients who must have written a form.

    Example:
      >>> vocab = Vocab("word", ("<pad>", "<bos>", "<eos>", "<unk>", "to", "london"), lower=True, tokenised=False)
      >>> written_forms([["Go to London."], ["To London"], ["to LONDON"]], vocab)
      {'london': 'London'}
    """
    if not vocab.lower or vocab.kind != "word":
        return {}
    uses: dict[str, Counter[str]] = defaultdict(Counter)
    writers: Counter[str] = Counter()
    for lines in clients:
        mine = Counter(form for line in lines for form in _inside(line, vocab.tokenised))
        for form, count in mine.items():
            word = form.lower()
            if word in vocab.index:
                uses[word][form] += count
                writers[form] += 1
    found = {word: _usual(word, forms, writers, least) for word, forms in uses.items()}
    return {word: found[word] for word in vocab.words if found.get(word, word) != word}


def _usual(word: str, forms: Counter[str], writers: Counter[str], least: int) -> str:
    """The most frequent form that enough clients write; the word itself at equal counts."""
    shared = {form: count for form, count in forms.items() if form == word or writers[form] >= least}
    return min(shared, key=lambda form: (-shared[form], form != word, form), default=word)


def _inside(line: str, tokenised: bool) -> Iterator[str]:
    """Yield the words of a line as they are written, less those that begin a sentence."""
    begins = True
    for token in words_of(line, tokenised=tokenised, lower=False):
        if _BETWEEN.fullmatch(token):
            begins = begins or token in _ENDS
            continue
        if not begins:
            yield token
        begins = False
