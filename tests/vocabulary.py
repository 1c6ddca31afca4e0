"""A vocabulary of lines in memory, counted the plain way: what tests need, and the reference of `keyfed.text.table`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from keyfed.text.vocab import TokenKind, Vocab, VocabRules, VocabSummary, cutter


def count_tokens(
    client_lines: Sequence[Sequence[str]], cut: Callable[[str], Iterable[str]]
) -> tuple[Counter[str], Counter[str], int]:
    """Return occurrences and clients of each token, and the number of lines."""
    counts: Counter[str] = Counter()
    holders: Counter[str] = Counter()
    for lines in client_lines:
        mine = Counter(chain.from_iterable(map(cut, lines)))
        counts.update(mine)
        holders.update(mine.keys())
    return counts, holders, sum(map(len, client_lines))


def build_vocab(
    client_lines: Sequence[Sequence[str]],
    *,
    kind: TokenKind,
    size: int | None,
    lower: bool,
    tokenised: bool,
    min_clients: int = 1,
) -> tuple[Vocab, VocabSummary]:
    """Take the most frequent words of the clients' training lines.

    Example:
      >>> lines = [["a b a"], ["a c <unk>"]]
      >>> vocab, summary = build_vocab(
      ...     lines, kind="word", size=None, lower=False, tokenised=True, min_clients=2)
      >>> vocab.words[4:], summary.types, summary.dropped_types, summary.tokens, summary.unknown_rate
      (('a',), 4, 2, 8, 0.375)
    """
    cut = cutter(kind, tokenised=tokenised, lower=lower)
    rules = VocabRules(kind, size, lower, min_clients)
    return rules.choose(*count_tokens(client_lines, cut), clients=len(client_lines), tokenised=tokenised)
