"""How a network stands to unigram, Kneser–Ney and central training, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keyfed.reports.document import finite, show

Record = Mapping[str, Any]
LEVEL = 0.01  # perplexities this close, relative, count as level
WORDS = {"unigram": "plain word frequencies", "kneser_ney": "counts of word sequences"}  # what a baseline is


def verdict(result: Record) -> str:
    """Say in one sentence how the network stands to unigram, Kneser–Ney and central training.

    Example:
      >>> scores = {"unigram": {"test": {"perplexity": 200.0}}}
      >>> verdict({"method": "fedavg", "rounds": 5, "test": {"perplexity": 250.0}, "baselines": scores})
      'This model does not beat plain word frequencies (unigram, 200.0). With a test perplexity of 250.0 after 5 \
rounds, fedavg is behind the unigram (perplexity 25 % higher).'
    """
    who = str(result.get("method") or "the network")
    value = (result.get("test") or {}).get("perplexity")
    own = finite(value)
    if (result.get("privacy") or {}).get("randomness") == "system":
        return f"{who} was not tested: clients of a private federation score nothing. Test it on public text."
    if (result.get("test") or {}).get("tokens") == 0:
        return f"There is no test text, so {who} was not tested: its clients have too few lines to cut."
    if own is None or own <= 0:
        return (
            f"There is no finite test perplexity of {who} (got {show(value)}): the training diverged or was not tested."
        )
    stands: dict[str, int] = {}
    clauses = []
    for key, label, found in baselines_of(result):
        other = finite((found.get("test") or {}).get("perplexity"))
        if other is not None and other > 0:
            stands[key], clause = _compare(
                own, other, "central training of the same model" if key == "central" else label
            )
            clauses.append(clause)
    rounds = finite(result.get("rounds"))
    after = "" if rounds is None else f" after {rounds:,.0f} round{'' if rounds == 1 else 's'}"
    start = f"With a test perplexity of {show(own)}{after}, {who} "
    if not clauses:
        return start + "stands alone: the run has no baselines to compare it with."
    listed = clauses[0] if len(clauses) == 1 else f"{', '.join(clauses[:-1])} and {clauses[-1]}"
    first = not_beaten("This model does not beat", own, result.get("baselines") or {})
    because = _because(stands, pooled=who == "central")
    return f"{first}{start}is {listed}" + (f": {because}." if because else ".")


def not_beaten(who: str, lowest: float, baselines: Mapping[str, Any]) -> str:
    """Say first, in a sentence of its own, that word frequencies or counts are not beaten; nothing where they are.

    Args:
      who: subject and verb, "No method beats".
      lowest: the lowest perplexity of the models.
      baselines: unigram and Kneser–Ney with their `test`.

    Example:
      >>> not_beaten("No method beats", 300.0, {"unigram": {"test": {"perplexity": 200.0}}})
      'No method beats plain word frequencies (unigram, 200.0). '
    """
    for key, label, found in baselines_of({"baselines": baselines}):
        other = finite((found.get("test") or {}).get("perplexity"))
        if key in WORDS and other is not None and other > 0 and lowest >= other * (1 - LEVEL):
            return f"{who} {WORDS[key]} ({label}, {show(other)}). "
    return ""


def baselines_of(result: Record) -> list[tuple[str, str, Record]]:
    """Return key, label and scores of the baselines a result has, weakest first."""
    baselines = result.get("baselines") or {}
    order = (baselines.get("kneser_ney") or {}).get("order")
    labels = {
        "unigram": "unigram",
        "kneser_ney": "Kneser–Ney" + (f"-{order}" if order else ""),
        "central": "central",
    }
    return [(key, label, baselines[key]) for key, label in labels.items() if baselines.get(key)]


def _compare(own: float, other: float, label: str) -> tuple[int, str]:
    """Return −1 (behind), 0 (level) or 1 (ahead) and the clause that says so."""
    ratio = own / other
    name = "the unigram" if label == "unigram" else label
    if abs(ratio - 1) <= LEVEL:
        return 0, f"level with {name} (within {LEVEL * 100:.0f} %)"
    percent = abs(ratio - 1) * 100
    amount = f"{percent:.1f}" if percent < 9.95 else f"{percent:.0f}"
    if ratio < 1:
        much = f"perplexity {amount} % lower" if ratio > 0.5 else f"perplexity × {ratio:.2g}"
        return 1, f"ahead of {name} ({much})"
    much = f"perplexity {amount} % higher" if ratio < 2 else f"perplexity × {ratio:.3g}"
    return -1, f"behind {name} ({much})"


def _because(stands: Mapping[str, int], pooled: bool) -> str:
    """Return what it means to be ahead of the counts; what it means to be behind is said first (`not_beaten`)."""
    if stands.get("unigram", 1) == 1 and stands.get("kneser_ney") == 1:
        return f"it predicts better than a count model of the {'same' if pooled else 'pooled'} text"
    return ""
