"""Training with real clients: the same rounds, run folder and report as a simulation, and no text on the server.

The run carries a vocabulary from elsewhere. Clients evaluate a model on their held-out text when they are called to
train from it, so that no message is spent on it: validation of the model after round t is known after round t + 1, and
the line of round t waits in the checkpoint until then. A checkpoint is written every round; a server that was killed is
started again with `resume` and goes on from the last whole one. Clients send their part of a secure round once: a round
in which the server was killed after that is abandoned.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keyfed.config.load import Config, check, to_document
from keyfed.engine.network import parameter_count
from keyfed.errors import ConfigError, RunError
from keyfed.federated.types import Method
from keyfed.files import write_atomically
from keyfed.model.language_model import ModelSpec
from keyfed.private.secagg.threshold import SecureSettings
from keyfed.run.compatible import Case, refuse
from keyfed.run.console import Listener, Silent, plural
from keyfed.run.counts.terms import refuse_small_sketches
from keyfed.run.folder import made_by, open_folder, read_result, read_run_toml, refuse_changes, strict, write_run_toml
from keyfed.run.plan import Choice, with_limits
from keyfed.run.prepare import build_network
from keyfed.run.remote.counting import least_counting
from keyfed.run.remote.device import method_digest, page_terms, run_method, told
from keyfed.run.remote.private import PrivateRunLoop, keep_enrolled, settle
from keyfed.run.remote.rounds import Patience as Patience
from keyfed.run.remote.rounds import RemoteRunLoop
from keyfed.run.secure import alike_line, refuse_unmasked
from keyfed.run.start import refuse_other_start, start_lines, start_without_text
from keyfed.text.vocab import Vocab
from keyfed.wire.messages import BEGIN_HEAD, CONTROL_HEAD
from keyfed.wire.roster import Roster, roster_hash
from keyfed.wire.transport import RemoteRun, Transport

HERE = Choice("cpu", 1, 1, 1, "clients train on their own devices")


def train_deployed(
    config: Config,
    vocab: Vocab,
    out: Path,
    transport: Transport,
    roster: Roster,
    listener: Listener | None = None,
    *,
    resume: bool = False,
    patience: Patience | None = None,
    raw_vocabulary: bool = False,
    own: float | None = None,
) -> dict[str, Any]:
    """Train a run with the clients of a roster and return its result (also in out/result.json).

    Args:
      config: what to train; without `secure.on` the server sees every upload.
      vocab: the run's vocabulary, from public text or from `keyfed vocab`.
      raw_vocabulary: it was made from these clients' text without noise; a private run says so.
      own: share of the clients' lines that are in the base model's own text; None where that was not compared.

    Raises:
      KeyfedError: anything the caller can mend; nothing that was checkpointed is lost.
    """
    listen, patience = listener or Silent(), patience or Patience()
    begun = read_run_toml(out)[0] if resume and (out / "run.toml").exists() else None
    refuse_extension(out, config, begun)
    config = with_limits(check(config), begun)
    method = deployable(config)
    secure = SecureSettings(config.secure.threshold, config.secure.floor) if config.secure.on else None
    if config.counts.on:
        refuse_small_sketches(config.counts, len(vocab), least_counting(config))
    spec = build_network(config, len(vocab), None)
    first, start, began = start_without_text(config, spec, vocab, own)
    settled = settle(config, out, roster, raw_vocabulary=raw_vocabulary)
    with open_folder(out, resume):
        fingerprint = hashlib.sha256(vocab.to_json().encode()).hexdigest()  # the only text a server has
        if resume and (out / "run.toml").exists():
            made = refuse_changes(out, config, fingerprint, may_start=False)
            refuse_other_start(out, made, start)
            finished = read_result(out)
            if finished is not None:
                listen.say(f"{out} is finished; nothing to do")
                return finished
        else:
            write_run_toml(out, config, made_by(HERE, fingerprint) | start.made())
            write_atomically(out / "vocab.json", vocab.to_json().encode())
        if settled is not None:
            keep_enrolled(out, settled)
        about = {
            "config": told(to_document(config if settled is None else settled.promised(config))),
            "vocab": vocab.to_json(),
            "method": method_digest(method),
        }
        if secure is not None and isinstance(spec, ModelSpec):
            about["page"] = page_terms(config, method, spec)
        refuse_long(about)
        run = RemoteRun(
            _run_name(out), about, _next_attempt(out), patience.answer, secure, config.upload.bound, config.train.seed
        )
        listen.say(f"model {spec.name}: {parameter_count(spec):,} parameters; {HERE.reason}")
        for line in start_lines(began):
            listen.say(line)
        listen.say("secure sums: the server sees no upload" if secure else "PLAIN: the server sees every upload")
        alike = alike_line(config, method)
        if alike is not None:
            listen.say(alike)
        marks = roster.marks()
        enrolled = plural(len(marks), "client")
        listen.say(f"roster {roster_hash(marks)} ({enrolled}); clients see it with `keyfed client --status`")
        given = (config, out, spec, method, transport, roster, run, listen, patience, len(vocab), first, began)
        loop = RemoteRunLoop(*given) if settled is None else PrivateRunLoop(*given, settled=settled)
        result = loop.train(vocab)
        result = dict(strict(result))
        write_atomically(out / "result.json", json.dumps(result, indent=1, allow_nan=False).encode())
        loop.part()
        return result


def refuse_extension(out: Path, config: Config, begun: Config | None) -> None:
    """Refuse other rounds than a run began with: its clients were sent their number, and have forgotten a finished run.

    Args:
      begun: what the run began with; None for one that begins now.
    """
    if begun is not None and begun.train.rounds != config.train.rounds:
        raise RunError(
            f"{out} is a run of {begun.train.rounds} rounds with real clients, and train.rounds (--rounds) is "
            f"{config.train.rounds}; its clients agreed to {begun.train.rounds}, and forget a run when it ends. Start "
            "another run with another --out"
        )


def refuse_long(about: Mapping[str, Any]) -> None:
    """Refuse a run whose beginning no client would read."""
    size = len(json.dumps(about))
    if size > BEGIN_HEAD - CONTROL_HEAD:
        raise ConfigError(
            f"configuration and vocabulary take {size:,} bytes, and clients read {BEGIN_HEAD - CONTROL_HEAD:,}; "
            "choose a smaller vocabulary (data.vocab)"
        )


def deployable(config: Config) -> Method:
    """Return the method of a run with real clients; what such a run cannot do is refused before anything starts."""
    method = run_method(config, secure=config.secure.on)
    refuse("federation", Case(config, method))
    if config.secure.on and config.participation.fraction is None:  # else clients refuse it once their number is known
        refuse_unmasked(config, method, config.train.cohort)
    return method


def _run_name(out: Path) -> str:
    """Return the run's id, the same after a restart; drawn, so that no two runs have the same."""
    path = out / "run.id"
    if not path.exists():
        write_atomically(path, os.urandom(12).hex().encode())
    return path.read_text("utf-8")


def _next_attempt(out: Path) -> int:
    path = out / "attempt"
    attempt = (int(path.read_text("utf-8")) if path.exists() else 0) + 1
    write_atomically(path, str(attempt).encode())
    return attempt
