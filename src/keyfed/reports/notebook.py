"""What Python gets back: a run's result with its rounds, and a comparison; dictionaries with typed views on them.

Both stay the objects of result.json and compare.json, so that `result["test"]["perplexity"]` reads what the files
hold. Frames need pandas and pictures matplotlib; neither is imported before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from keyfed.engine.module import MakeModule
from keyfed.errors import ConfigError
from keyfed.reports import figures, run_page
from keyfed.run.evaluate import suggest
from keyfed.run.folder import Trained, load_model, read_metrics


@dataclass(frozen=True, slots=True)
class Round:
    """A round of a run.

    Attributes:
      loss: mean training loss of the cohort in nats a token; None in a private run.
      clients: uploads in the aggregate; None in a private run.
      tokens: tokens that the cohort predicted.
      perplexity: on validation text, as `top1` and `top3`; None where the round was not validated.
      seconds: what the round took; `elapsed` since the run began.
    """

    round: int
    loss: float | None
    clients: int | None
    tokens: int | None
    perplexity: float | None
    top1: float | None
    top3: float | None
    seconds: float | None
    elapsed: float | None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Round:
        """Read a line of metrics.jsonl.

        Example:
          >>> Round.of({"round": 3, "loss": 4.5, "contributors": ["a", "b"], "valid": {"perplexity": 80.0}}).clients
          2
        """
        valid = record.get("valid") or {}
        contributors = record.get("contributors")
        return cls(
            record["round"], record.get("loss"), None if contributors is None else len(contributors),
            record.get("worked"), valid.get("perplexity"), valid.get("top1"), valid.get("top3"),
            record.get("seconds"), record.get("elapsed"),
        )  # fmt: skip


class Result(dict[str, Any]):
    """A finished run: the object of its result.json, and what a notebook does with it.

    Attributes:
      folder: the run folder.
      module: what makes the model, for a run of a module of your own.
    """

    def __init__(self, values: Mapping[str, Any], folder: Path, module: MakeModule | None = None) -> None:
        super().__init__(values)
        self.folder, self.module = folder, module

    def __repr__(self) -> str:
        test = "no test text" if self.perplexity is None else f"test perplexity {self.perplexity:.1f}"
        return f"<{self['method']} on {self['data']}: {self['rounds']} rounds, {test}; {self.folder}>"

    @property
    def perplexity(self) -> float | None:
        """Perplexity on test text; None where there is none."""
        found = (self["test"] or {}).get("perplexity")
        return None if found is None else float(found)

    @cached_property
    def history(self) -> tuple[Round, ...]:
        """The rounds, first to last."""
        return tuple(map(Round.of, read_metrics(self.folder)))

    @cached_property
    def model(self) -> Trained:
        """The chosen model with its vocabulary, as `keyfed.load_model` returns it."""
        return load_model(self.folder, self.module)

    def suggest(self, text: str, k: int = 3) -> list[str]:
        """Return the k most probable next words after `text`."""
        model = self.model
        return suggest(model.spec, model.params, model.vocab, text, k, lines=model.reads_lines)

    def report(self) -> str:
        """Write report.md, report.html and plots into the run folder; return the text the command line prints."""
        return run_page.report_run(self.folder, self.module)

    def plot(self) -> Any:
        """Draw perplexity by round, with the baselines; a figure of matplotlib, which a notebook shows."""
        return figures.perplexity_figure(self, read_metrics(self.folder))

    def to_frame(self) -> Any:
        """Return the rounds as a pandas DataFrame, one row each."""
        return _frame([asdict(one) for one in self.history], "`.history` has the same rows").set_index("round")


class Compared(dict[str, Any]):
    """A comparison of methods: the object of its compare.json, best method first.

    Attributes:
      folder: where its report and runs are.
    """

    def __init__(self, values: Mapping[str, Any], folder: Path) -> None:
        super().__init__(values)
        self.folder = folder

    def __repr__(self) -> str:
        return f"<{', '.join(row['label'] for row in self['rows'])} on {self['data']}; {self.folder}>\n{self.verdict}"

    @property
    def verdict(self) -> str:
        """What the comparison says, in words."""
        return str(self["verdict"])

    @property
    def table(self) -> list[dict[str, Any]]:
        """A row a method: means over its seeds on test text, and the spread of perplexity over seeds."""
        return [
            {
                "method": row["label"],
                **{key: row["test_mean"][key] for key in ("perplexity", "top1", "top3")},
                "spread": row["test_spread"]["perplexity"],
                **{key: row[key] for key in ("rounds", "tokens")},
                "seeds": len(row["seeds"]),
            }
            for row in self["rows"]
        ]

    def to_frame(self) -> Any:
        """Return the table as a pandas DataFrame."""
        return _frame(self.table, "`.table` has the same rows").set_index("method")


def _frame(rows: Sequence[Mapping[str, Any]], otherwise: str) -> Any:
    try:
        return import_module("pandas").DataFrame(rows)
    except ImportError:
        raise ConfigError(f"a frame needs pandas: pip install pandas; {otherwise} without it") from None
