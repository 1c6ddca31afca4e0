"""The audit of a run with real clients: what it claims, and what its own files say about that.

Its attacks would need the clients' text, which is not here and cannot be trained on again: none is made, and the page
says so. Nor can a round be done again, for nobody can draw its noise a second time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from keyfed.files import write_atomically
from keyfed.lab.audit.lint import lint, read_claim
from keyfed.lab.audit.page import claim_blocks
from keyfed.lab.audit.private_files import file_findings
from keyfed.reports.document import Heading, Text, to_markdown
from keyfed.run.folder import read_metrics, read_result, read_run_toml, strict
from keyfed.run.remote.terms import ENROLLED
from keyfed.wire.device import run_method

NO_ATTACKS = (
    "None was made: the text is on the clients' devices. Audit a simulation with the same configuration on public text "
    "(`keyfed train`, then `keyfed privacy audit`) to see what the attacks find there."
)


def audit_deployed(run: Path) -> dict[str, Any]:
    """Audit a run that was trained by real clients; write audit.md and audit.json, and return what audit.json has."""
    config, _ = read_run_toml(run)
    claim, result = read_claim(run, promised=config.privacy.on), read_result(run) or {}
    path = run / ENROLLED
    clients = len(json.loads(path.read_text("utf-8"))) if path.exists() else int(result.get("clients") or 0)
    method = run_method(config, secure=config.secure.on)
    findings = [*lint(config, method, read_metrics(run), claim, clients, result), *file_findings(run, claim)]
    against = [f"{f.check}: {f.text}" for f in findings if f.level == "broken"]
    found = {
        "run": str(run),
        "verdict": "NONE" if against else claim.verdict,
        "contradicted": bool(against),
        "contradictions": against,
        "claim": claim.as_dict(),
        "findings": [f._asdict() for f in findings],
        "attacked": False,
    }
    found = dict(strict(found))
    write_atomically(run / "audit.json", json.dumps(found, indent=1, allow_nan=False).encode())
    page = to_markdown([*claim_blocks(found), Heading("Attacks"), Text(NO_ATTACKS)])
    write_atomically(run / "audit.md", page.encode("utf-8"))
    return found
