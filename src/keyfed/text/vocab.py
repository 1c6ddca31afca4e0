r"""Words, characters and their numbers.

A line of text becomes tokens (`words_of`), tokens become numbers (`Vocab.encode`), and a corpus becomes one stream of
int32 in which every line ends with `<eos>`. The vocabulary is built from training text only (`VocabRules`), or comes
from a file (`read_vocab`). On natural partitions a word may be required to occur with at least two clients, so that
what a single person wrote does not travel to everybody.

**Election.** No text is collected: every client sends the words it uses (`ballot`), the server counts clients
(`elect`). With :math:`B_k` the ballot of client k, a word w has :math:`v(w) = |\{k : w \in B_k\}|` votes, and the
vocabulary is

.. math:: \text{the first } V - 4 \text{ of } \{w : v(w) \ge m\} \text{ by } (-v(w), w).

A ballot says which words, not how often nor in which order, and has at most K (`most_words`) of them.

With noise (`elect_privately`) the vocabulary carries a guarantee. Adding or removing one client changes the votes of at
most K words, each by one: the counts move by at most √K. Every count that is not 0 gets Gaussian noise of standard
deviation σ = z·√K, and a word enters if its noisy count reaches a threshold τ. What a single client alone said must
stay out: each of its K words passes with chance 1 − Φ((τ − 1)/σ), so τ is such that all of them together pass with
chance at most δ/2; the noise has the other half.

.. math::  τ = 1 + σ · Φ^{-1}\big((1 − δ/2)^{1/K}\big)

References:
  Korolova, Kenthapadi, Mishra, Ntoulas, *Releasing Search Queries and Clicks Privately*, WWW 2009; Wilson et al.,
  *Differentially Private SQL with Bounded User Contribution*, 2019 (τ-thresholding).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from statistics import NormalDist
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keyfed.errors import ConfigError, DataError, nearest

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
KINDS = ("word", "char")
BASE_WORDS = Path(__file__).parents[1] / "model" / "base" / "vocab.json"  # read in the place of a file called `base`

Tokens: TypeAlias = NDArray[np.int32]
TokenKind = Literal["word", "char"]


def words_of(line: str, *, tokenised: bool, lower: bool) -> list[str]:
    """Cut one line into words, numbers, punctuation marks and symbols.

    Tokenised text, where blanks stand between all tokens, is cut at white space only. Raw text is cut further: words
    keep their inner apostrophes and hyphens (written `'` and `-` however they were typed), a number is one token with
    its separators, every punctuation mark and every emoji (with its modifiers) is one token. A literal `<unk>`,
    `<eos>`, … stays in one piece; `Vocab` reads all of them as unknown.

    Example:
      >>> words_of("Don’t panic: it's 1,234.5 well-being 😀!", tokenised=False, lower=True)
      ["don't", 'panic', ':', "it's", '1,234.5', 'well-being', '😀', '!']
      >>> words_of("the <unk> said n't", tokenised=True, lower=False)
      ['the', '<unk>', 'said', "n't"]
    """
    if tokenised:
        return (line.lower() if lower else line).split()
    # No token spans white space, so that the pieces of a chunk can be remembered.
    return [piece for chunk in line.split() for piece in _pieces(chunk, lower)]


@lru_cache(maxsize=1 << 17)
def _pieces(chunk: str, lower: bool) -> tuple[str, ...]:
    found = _pattern().finditer(chunk.lower() if lower else chunk)
    return tuple(_plain_joints(m[0]) if m.lastgroup == "word" else m[0] for m in found)


def _plain_joints(word: str) -> str:
    return word.replace("’", "'").replace("‐", "-").replace("‑", "-")


@lru_cache(maxsize=1)
def _pattern() -> re.Pattern[str]:
    # `re` knows letters but not the marks that belong to them (é in two characters, Devanagari vowels, …).
    marks = "".join(chr(c) for c in range(0x300, 0xFB50) if unicodedata.category(chr(c)) in ("Mn", "Mc"))
    letter = rf"(?:[^\W_][{marks}\u200c\u200d]*)"
    modifier = r"[\ufe0e\ufe0f\u20e3\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]"
    symbol = rf"\S{modifier}*"
    return re.compile(
        rf"(?P<special>{'|'.join(SPECIALS)})"
        rf"|(?P<number>\d+(?:[.,:]\d+)+{letter}*)"
        rf"|(?P<word>{letter}+(?:['’‐‑-]{letter}+)*)"
        r"|(?P<flag>[\U0001f1e6-\U0001f1ff]{2})"
        rf"|(?P<symbol>{symbol}(?:\u200d{symbol})*)"
    )


class Vote(NamedTuple):
    """What a vote with noisy counts cost the clients that voted: `privacy` of a vocabulary's file.

    Attributes:
      id: random name, by which a register of votes knows it.
      verdict: GUARANTEE, BOUND ONLY or SIMULATED, as of a run's ledger (`keyfed.private.dp.ledger`).
      epsilon, delta: of this vote, threshold included.
      votes: votes of the same clients so far that are known, this one among them; `all_epsilon` and `all_delta` are the
        sums over them.
    """

    id: str
    verdict: str
    epsilon: float
    delta: float
    votes: int
    all_epsilon: float
    all_delta: float

    @classmethod
    def read(cls, found: object) -> Vote:
        """Read the entry `privacy` of a vocabulary's file; DataError where it is none."""
        if isinstance(found, dict) and set(found) == set(cls._fields):
            numbers = [found[key] for key in cls._fields if key not in ("id", "verdict")]
            named = isinstance(found["id"], str) and len(found["id"]) <= 64 and found["verdict"] in VERDICTS
            if named and all(type(n) in (int, float) and 0 <= n < math.inf for n in numbers):
                return cls(**{**found, "votes": int(found["votes"])})
        raise DataError(
            f"vocabulary: 'privacy' should hold {', '.join(cls._fields)} of a vote; make the file again "
            "(`keyfed vocab --dp`)"
        )


VERDICTS = ("GUARANTEE", "BOUND ONLY", "SIMULATED")  # of a vote; one without noise is refused


@dataclass(frozen=True, slots=True)
class Vocab:
    """A list of words or characters; the place in the list is the number.

    Attributes:
      kind: `"word"` or `"char"`.
      words: All entries, the four specials first.
      lower: Whether text is written in lower case before it is looked up.
      tokenised: Whether text is cut at white space only (`words_of`).
      privacy: What the vote that made it cost, None for a vocabulary that was not elected with noise.
      index: Number of each word. The specials are left out: no text can name them.

    Example:
      >>> vocab = Vocab("word", (*SPECIALS, "the", "cat"), lower=True, tokenised=True)
      >>> vocab.encode(["The cat", "the <eos>"]).tolist()
      [4, 5, 2, 4, 3, 2]
      >>> vocab.decode([4, 5, 2, 4, 3])
      'the cat\\nthe <unk>'
    """

    kind: TokenKind
    words: tuple[str, ...]
    lower: bool
    tokenised: bool
    privacy: Vote | None = field(default=None, compare=False)
    index: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        problem = _problem_of(self.kind, self.words)
        if problem:
            raise DataError(f"vocabulary: {problem}")
        object.__setattr__(self, "index", {w: i for i, w in enumerate(self.words) if i >= len(SPECIALS)})

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, lines: Iterable[str]) -> Tokens:
        """Return one stream [tokens]: every line, then EOS. A line end inside a line is a blank."""
        cut, number = cutter(self.kind, tokenised=self.tokenised, lower=self.lower), self.index.get

        def numbers() -> Iterator[int]:
            for line in lines:
                for token in cut(line):
                    yield number(token, UNK)
                yield EOS

        return np.fromiter(numbers(), np.int32)

    def encode_context(self, text: str) -> Tokens:
        """Return the tokens of a text that goes on: EOS between its lines, none at the end."""
        return self.encode(text.split("\n"))[:-1]

    def decode(self, ids: Iterable[int]) -> str:
        """Return readable text; EOS becomes a line end, PAD and BOS vanish.

        Unknown words read `<unk>`, unknown characters `�`. Encoding the text again gives the same numbers.
        """
        blank, unknown = (" ", SPECIALS[UNK]) if self.kind == "word" else ("", "\N{REPLACEMENT CHARACTER}")
        lines: list[list[str]] = [[]]
        for i in map(int, ids):
            if not 0 <= i < len(self.words):
                raise DataError(f"token {i} is not in this vocabulary of {len(self.words):,} entries")
            if i == EOS:
                lines.append([])
            elif i not in (PAD, BOS):
                lines[-1].append(unknown if i == UNK else self.words[i])
        return "\n".join(map(blank.join, lines))

    def to_json(self) -> str:
        """Return the vocabulary as one JSON object (`vocab.json` of a run)."""
        vote = {} if self.privacy is None else {"privacy": self.privacy._asdict()}
        return json.dumps(
            {"kind": self.kind, "lower": self.lower, "tokenised": self.tokenised, **vote, "words": self.words}
        )

    @classmethod
    def from_json(cls, text: str) -> Vocab:
        """Read what `to_json` wrote.

        Raises:
          DataError: The text is not such an object, or its words are damaged.
        """
        try:
            found = json.loads(text)
        except RecursionError:
            raise DataError("vocabulary: nested deeper than any vocabulary; is it a vocab.json?") from None
        except ValueError as error:
            raise DataError(f"vocabulary: not JSON ({error}); is vocab.json cut short?") from None
        if not isinstance(found, dict):
            raise DataError(f"vocabulary: expected a JSON object, got {type(found).__name__}")
        expected = {"kind": str, "lower": bool, "tokenised": bool, "words": list}
        for key, kind in expected.items():
            if not isinstance(found.get(key), kind):
                got = type(found[key]).__name__ if key in found else "nothing"
                raise DataError(f"vocabulary: {key!r} should be of type {kind.__name__}, got {got}")
        if not all(isinstance(word, str) for word in found["words"]):
            raise DataError("vocabulary: 'words' holds something that is not a string")
        vote = Vote.read(found["privacy"]) if "privacy" in found else None
        return cls(
            found["kind"], tuple(found["words"]), lower=found["lower"], tokenised=found["tokenised"], privacy=vote
        )


def _problem_of(kind: str, words: tuple[str, ...]) -> str | None:
    if kind not in KINDS:
        return f"its kind is neither {KINDS[0]!r} nor {KINDS[1]!r}"
    if words[: len(SPECIALS)] != SPECIALS:
        return f"the first {len(SPECIALS)} entries should be {' '.join(SPECIALS)}, and are others"
    if len(set(words)) != len(words):
        twice = Counter(words).most_common(1)[0][0]
        first, again = [place for place, word in enumerate(words) if word == twice][:2]
        return f"a word is listed twice, as entries {first} and {again}"
    for place, word in enumerate(words):
        if place < len(SPECIALS):
            continue
        if kind == "char" and (len(word) != 1 or word == "\n"):
            return f"entry {place} is not a single character other than the line end"
        if kind == "word" and word.split() != [word]:
            return f"entry {place} is empty or holds white space"
    return None


def cutter(kind: str, *, tokenised: bool, lower: bool) -> Callable[[str], Iterable[str]]:
    """Return what cuts a line into the words or characters that are counted and encoded."""
    if kind == "word":
        return lambda line: words_of(line, tokenised=tokenised, lower=lower)
    return lambda line: (line.lower() if lower else line).replace("\n", " ")


@dataclass(frozen=True, slots=True)
class VocabSummary:
    """What a vocabulary keeps of the text it was built from.

    Attributes:
      types: Different words in the text, a literal `<unk>` being one of them.
      kept: Words in the vocabulary, specials not counted.
      dropped_types: Words left out (not counting literal specials, which are no words).
      dropped_tokens: Occurrences of those words.
      tokens: Tokens in the text, line ends included.
      rare_clients_types: Words left out because fewer than `min_clients` clients have them.
      unknown_rate: Fraction of `tokens` that are encoded as UNK, literal specials included.
    """

    types: int
    kept: int
    dropped_types: int
    dropped_tokens: int
    tokens: int
    rare_clients_types: int
    unknown_rate: float


def summarise(vocab: Vocab, counts: Mapping[str, int], line_ends: int) -> VocabSummary:
    """Say what a vocabulary keeps of a text: `kept` are the words that the text has, too.

    Args:
      counts: Occurrences of each word of the text.
      line_ends: Number of its lines.
    """
    known = [word for word in counts if word in vocab.index]
    words = [word for word in counts if word not in SPECIALS]
    total, kept = sum(counts.values()), sum(counts[word] for word in known)
    return VocabSummary(
        types=len(counts),
        kept=len(known),
        dropped_types=len(words) - len(known),
        dropped_tokens=sum(counts[word] for word in words) - kept,
        tokens=total + line_ends,
        rare_clients_types=0,
        unknown_rate=(total - kept) / max(1, total + line_ends),
    )


@dataclass(frozen=True, slots=True)
class VocabRules:
    """How a vocabulary is chosen: the most frequent words of the clients' training text; ties go by the word itself.

    Attributes:
      kind: `"word"` or `"char"`.
      size: Entries wanted, the four specials included (10,000 leaves 9,996 words); None takes all.
      lower: Whether to write everything in lower case.
      min_clients: Clients who must have used a word before it may enter.
      known: The vocabulary of a file, in place of a choice.
    """

    kind: TokenKind
    size: int | None
    lower: bool
    min_clients: int = 1
    known: Vocab | None = None

    def choose(
        self, counts: Mapping[str, int], holders: Mapping[str, int], line_ends: int, *, clients: int, tokenised: bool
    ) -> tuple[Vocab, VocabSummary]:
        """Return the vocabulary and what it keeps of the text.

        Args:
          counts: Occurrences of each word.
          holders: Clients who used each word, or at least `min_clients` where more did.
          line_ends: Number of lines.
          clients: Number of clients.
          tokenised: How text is cut is a matter of the text, also with a vocabulary of a file.
        """
        if self.known is not None:
            vocab = replace(self.known, tokenised=tokenised)
            return vocab, summarise(vocab, counts, line_ends)
        if self.kind not in KINDS:
            raise ConfigError(
                f"vocabulary kind {self.kind!r} does not exist{nearest(self.kind, KINDS)}; use word or char"
            )
        _check_size(self.size, self.min_clients)
        if not counts:
            raise DataError("no words to build a vocabulary from: the training text is empty")
        words = [word for word in counts if word not in SPECIALS]
        shared = [word for word in words if holders[word] >= self.min_clients]
        if not shared:
            raise DataError(
                f"no word is used by {self.min_clients} or more of the {clients:,} clients; lower min_clients"
            )
        ranked = sorted(shared, key=lambda word: (-counts[word], word))
        kept = ranked[: None if self.size is None else self.size - len(SPECIALS)]
        vocab = Vocab(self.kind, (*SPECIALS, *kept), lower=self.lower, tokenised=tokenised)
        rare = len(words) - len(shared)
        return vocab, replace(summarise(vocab, counts, line_ends), rare_clients_types=rare)


def _check_size(size: int | None, min_clients: int) -> None:
    if size is not None and size <= len(SPECIALS):
        raise ConfigError(f"vocabulary size {size} leaves no room: {len(SPECIALS)} entries are special")
    if min_clients < 1:
        raise ConfigError(f"min_clients must be at least 1, got {min_clients}")


READS = {"word": "words", "char": "characters"}


def read_vocab(path: Path, kind: TokenKind) -> Vocab:
    """Read a vocab.json for a model that reads words or characters.

    Raises:
      DataError: The file is missing, damaged, empty or of the other kind.
    """
    data = _bytes_of(path)
    try:
        vocab = Vocab.from_json(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}); expected a vocab.json") from None
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    if vocab.kind != kind:
        raise DataError(
            f"{path}: a vocabulary of {READS[vocab.kind]}, and the model reads {READS[kind]}; take a model or a "
            "vocabulary of the other kind"
        )
    if len(vocab) == len(SPECIALS):
        raise DataError(f"{path}: a vocabulary without words, only the {len(SPECIALS)} specials")
    if kind == "char" and vocab.lower:
        raise DataError(f"{path}: characters in lower case, and a character model keeps its case; set lower to false")
    return vocab


def vocab_sha256(path: str | None) -> str | None:
    """Return the SHA-256 of a vocabulary's file, None for none."""
    return None if path is None else hashlib.sha256(_bytes_of(Path(path))).hexdigest()


def _bytes_of(path: Path) -> bytes:
    try:
        return (BASE_WORDS if str(path) == "base" else path).read_bytes()
    except FileNotFoundError:
        how = "`keyfed vocab --out FILE` makes one, and every finished run has a vocab.json"
        raise DataError(f"{path}: there is no such vocabulary; {how}") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; expected a vocab.json") from None


# Election

# Of two votes one may be an attacker's, who guesses a word to learn whether some single other person uses it.
MIN_CLIENTS = 3
# 22 of the 39 clients of sotu use more; of its training tokens 2.23 % are then unknown, 2.21 % without a cap.
MOST_WORDS = 4_000

Ballot = frozenset[str]


def ballot(
    lines: Iterable[str],
    *,
    kind: TokenKind,
    lower: bool,
    tokenised: bool,
    least_uses: int = 1,
    most_words: int | None = MOST_WORDS,
    known: Container[str] = (),
) -> Ballot:
    """Return what one client sends: the words of its own training text, most frequent first where there are too many.

    Args:
      lines: The client's training lines; `kind`, `lower` and `tokenised` are those of the vocabulary.
      least_uses: Uses from which on a word is sent.
      most_words: Words sent at most, ties going by the word itself; None sends all.
      known: Words of a public vocabulary, which no client needs to send: the places are for new ones.

    Example:
      >>> said = ballot(["b a b", "c <unk> c"], kind="word", lower=True, tokenised=True, most_words=2)
      >>> sorted(said)
      ['b', 'c']
      >>> sorted(ballot(["b a b"], kind="word", lower=True, tokenised=True, known={"b"}))
      ['a']
    """
    if least_uses < 1:
        raise ConfigError(f"least_uses must be at least 1, got {least_uses}")
    if most_words is not None and most_words < 1:
        raise ConfigError(f"most_words must be at least 1, got {most_words}")
    uses = Counter(chain.from_iterable(map(cutter(kind, tokenised=tokenised, lower=lower), lines)))
    said = [word for word, n in uses.items() if n >= least_uses and word not in SPECIALS and word not in known]
    if most_words is not None and len(said) > most_words:
        said = sorted(said, key=lambda word: (-uses[word], word))[:most_words]
    return frozenset(said)


@dataclass(frozen=True, slots=True)
class Election:
    """What came of a vote. Words that were not elected are counted and forgotten.

    Attributes:
      words: Elected, by falling number of clients, then by the word.
      votes: Clients of each of them.
      no_room: Words of enough clients that did not fit in.
      ballots: Clients who voted, empty ballots included; this and what follows is 0 in a vote with noise.
      types: Different words on all ballots.
      too_few: Words of fewer clients than `min_clients`.
    """

    words: tuple[str, ...]
    votes: tuple[int, ...]
    no_room: int
    ballots: int = 0
    types: int = 0
    too_few: int = 0

    def vocab(self, kind: TokenKind, *, lower: bool, tokenised: bool) -> Vocab:
        """Return the elected words behind the four specials; the arguments are those of the ballots."""
        return Vocab(kind, (*SPECIALS, *self.words), lower=lower, tokenised=tokenised)

    def beyond(self, known: Vocab) -> Vocab:
        """Return a vocabulary with the elected words behind its own, which keep their numbers."""
        return replace(known, words=(*known.words, *self.words))


def elect(
    ballots: Iterable[Collection[str]],
    *,
    size: int | None,
    min_clients: int = MIN_CLIENTS,
    allow_single: bool = False,
) -> Election:
    """Count the clients of each word and take the words of the most; ties go by the word itself.

    Args:
      ballots: The words of each client, read one at a time; a word counts once a ballot.
      size: Entries wanted, the four specials included; None takes every word of enough clients.
      min_clients: Clients a word needs.
      allow_single: Whether `min_clients` may be 1, so that what a single person wrote reaches everybody.

    Example:
      >>> found = elect([{"the", "mine"}, {"the", "a"}, {"a", "the"}], size=None, min_clients=2)
      >>> found.words, found.votes, found.types, found.too_few
      (('the', 'a'), (3, 2), 3, 1)
    """
    _check_size(size, min_clients)
    if min_clients == 1 and not allow_single:
        raise ConfigError(
            "min_clients 1 lets the words of a single person into a vocabulary that everybody gets; take 2 or more, "
            f"{MIN_CLIENTS} by default, or allow it with --allow-single"
        )
    votes, voters = _count_votes(ballots)
    if not votes:
        raise DataError(f"no words to elect: the ballots of all {voters:,} clients are empty")
    shared = [word for word, n in votes.items() if n >= min_clients]
    if not shared:
        raise DataError(f"no word is on the ballots of {min_clients} or more of the {voters:,} clients; ask for fewer")
    elected = sorted(shared, key=lambda word: (-votes[word], word))[: None if size is None else size - len(SPECIALS)]
    return Election(
        words=tuple(elected),
        votes=tuple(votes[word] for word in elected),
        no_room=len(shared) - len(elected),
        ballots=voters,
        types=len(votes),
        too_few=len(votes) - len(shared),
    )


def _count_votes(ballots: Iterable[Collection[str]], most_words: int | None = None) -> tuple[Counter[str], int]:
    """Return the clients of each word, and how many clients voted; a word counts once a ballot."""
    votes: Counter[str] = Counter()
    voters = 0
    for words in ballots:
        said = set(words)
        if most_words is not None and len(said) > most_words:
            raise DataError(f"a ballot has {len(said):,} words, more than the {most_words:,} that were agreed")
        votes.update(said)
        voters += 1
    for special in SPECIALS:
        del votes[special]  # no client of ours sends one; another's must not make an entry twice
    return votes, voters


def threshold(sigma: float, delta: float, most_words: int) -> float:
    """Return τ, below which no noisy count is released.

    Example:
      >>> round(threshold(10.0, 1e-6, 100), 1)
      58.3
    """
    # log1p and expm1: (1 − δ/2)^{1/K} differs from 1 by less than a float can say otherwise.
    beyond = -math.expm1(math.log1p(-delta / 2) / most_words)
    return 1 - sigma * NormalDist().inv_cdf(beyond)


def elect_privately(
    ballots: Iterable[Collection[str]],
    *,
    size: int | None,
    most_words: int,
    sigma: float,
    delta: float,
    draw: Callable[[int], Iterable[float]],
    scale: float = 1.0,
    min_clients: int = 1,
) -> Election:
    """Count the clients of each word, add noise, and take the words of the highest noisy counts above the threshold.

    Only counts that are noised are released: the votes of the words elected, as whole numbers.

    Args:
      ballots: the words of each client, at most `most_words` of them.
      size: entries wanted, the four specials included; None takes every word above the threshold.
      sigma: standard deviation of the noise of a count.
      delta: δ of the guarantee, half of which is for the threshold.
      draw: returns that many standard normals.
      scale: clients there are / clients of an imagined fleet: noise and threshold of that fleet, on these counts.
      min_clients: clients a word needs in any case, by its noisy count.
    """
    votes, _ = _count_votes(ballots, most_words)
    words = sorted(votes)  # in an order that does not depend on who came first
    least = max(threshold(sigma, delta, most_words) * scale, min_clients)
    noisy = {word: votes[word] + sigma * scale * x for word, x in zip(words, draw(len(words)), strict=True)}
    passed = sorted((word for word in words if noisy[word] >= least), key=lambda word: (-noisy[word], word))
    if not passed:
        raise DataError(
            f"no word has the {least:,.0f} clients that the noise of {sigma * scale:,.3g} asks for; more "
            "clients, fewer words a client (--most-words) or a larger epsilon"
        )
    elected = passed[: None if size is None else max(0, size - len(SPECIALS))]
    # How many different words there are, and how many fell below the threshold, was not noised: it is not released.
    released = tuple(round(noisy[word]) for word in elected)
    return Election(tuple(elected), released, no_room=len(passed) - len(elected))
