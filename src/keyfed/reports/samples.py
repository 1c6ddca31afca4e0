"""What a run's model suggests after a few texts: English ones that it knows the words of, else its own beginnings."""

from __future__ import annotations

from keyfed.run.evaluate import suggest
from keyfed.run.folder import Trained
from keyfed.text.vocab import UNK, Vocab

PROMPTS = ("thank you very", "let me know if you", "what do you", "i would like to", "i don't", "how do i install")
BEGUN = ("see you tom", "can you he", "i am not su", "it does not wo")  # their last words are begun
ENOUGH = 3  # English prompts, below which the model begins its own
LEAST_LETTERS = 4  # of a word that is shown half


def prompts_of(trained: Trained) -> list[str]:
    """Return texts to go on from, in words of the model: in another language, or of few words, what it begins itself.

    Its own beginnings are read off the model as suggestions are, so they tell no more of the text than those do.
    """
    known = [text for text in PROMPTS if _knows(trained.vocab, text)]
    if len(known) >= ENOUGH:
        return known
    begins = [word for word in _suggest(trained, "", 2 * len(PROMPTS)) if _is_word(word)]
    pairs = [(word, next(filter(_is_word, _suggest(trained, f"{word} ", 3)), "")) for word in begins[: len(PROMPTS)]]
    return [" ".join(filter(None, pair)) for pair in pairs] or known


def examples_of(trained: Trained) -> list[tuple[str, list[str]]]:
    """Return what a run's model suggests after some texts, and how it completes a begun word."""
    prompts = prompts_of(trained)
    characters = trained.vocab.kind == "char"
    found = [(text if characters else f"{text} …", _suggest(trained, text, 3)) for text in prompts]
    for text in BEGUN if set(prompts) <= set(PROMPTS) else _begun(trained, prompts):
        before, _, begins = text.rpartition(" ")
        if characters:
            found.append((text, _suggest(trained, text, 3)))
        elif _knows(trained.vocab, before) and (words := _suggest(trained, before, 3, begins)):
            found.append((f"{text}…", words))
    return found


def _begun(trained: Trained, prompts: list[str]) -> list[str]:
    """Return texts whose last word is one that the model expects there, cut in half."""
    following = [(text, _suggest(trained, f"{text} ", 3)) for text in prompts[: len(BEGUN)]]
    longest = [(text, max(words, key=len, default="")) for text, words in following]
    return [f"{text} {word[: len(word) // 2]}" for text, word in longest if len(word) >= LEAST_LETTERS]


def _suggest(trained: Trained, text: str, k: int, begins: str = "") -> list[str]:
    return suggest(trained.spec, trained.params, trained.vocab, text, k, lines=trained.reads_lines, begins=begins)


def _knows(vocab: Vocab, text: str) -> bool:
    return UNK not in vocab.encode_context(text)


def _is_word(text: str) -> bool:
    return text.strip("'’-").isalpha()
