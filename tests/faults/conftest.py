"""The table of faults and outcomes, printed after the tests of this folder."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = []
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            told = dict(getattr(report, "user_properties", []))
            if "fault" in told:
                rows.append((told["fault"], told["outcome"] if outcome == "passed" else "FAILED"))
    if rows:
        terminalreporter.section(f"{len(rows)} faults injected")
        width = max(len(fault) for fault, _ in rows)
        for fault, outcome in sorted(rows):
            terminalreporter.write_line(f"{fault:<{width}}  {outcome}")
