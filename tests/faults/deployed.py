"""A small federation in this process: sessions with their own text, called through the messages of a real one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from keyfed.config.load import Config, DataConfig, ModelConfig, Participation, TrainConfig, to_document
from keyfed.config.schema import SecureConfig
from keyfed.federated.types import Params
from keyfed.private.secagg.keys import SIGNATURE_BYTES, signed_answer
from keyfed.private.secagg.threshold import Floors
from keyfed.run.checkpoint import Checkpoint, load_checkpoint
from keyfed.run.remote.device import method_digest, own_text, run_method, told
from keyfed.run.remote.train import Patience
from keyfed.text.vocab import Vocab
from keyfed.wire.client import ClientSession
from keyfed.wire.roster import Enrolled, Roster
from keyfed.wire.transport import SIGNED, Answer, Calls, Fault, Handler, InProcess, Post, RemoteRun
from tests.vocabulary import build_vocab

QUICK = Patience(answer=5, quorum=1, look=0.01)
WORDS = "the a cat dog bird sat ran flew on under over mat tree house and then it was small big red .".split()  # noqa: SIM905


def write_texts(folder: Path, clients: int, lines: int = 24) -> list[Path]:
    """Write one file of pseudo-sentences a client, each with its own habits."""
    folder.mkdir(parents=True, exist_ok=True)
    out = []
    for k in range(clients):
        text = []
        for n in range(lines + 3 * k):
            draw = hashlib.sha256(f"{k}/{n}".encode()).digest()
            text.append(" ".join(WORDS[(b * (k + 3)) % len(WORDS)] for b in draw[: 5 + draw[-1] % 6]))
        out.append(folder / f"client-{k}.txt")
        out[-1].write_text("\n".join(text) + "\n", "utf-8")
    return out


def vocabulary(folder: Path) -> tuple[Vocab, Path]:
    """A vocabulary that is given, not built from clients' text."""
    vocab, _ = build_vocab([[" ".join(WORDS)]], kind="word", size=None, lower=True, tokenised=False)
    path = folder / "vocab.json"
    path.write_text(vocab.to_json(), "utf-8")
    return vocab, path


def small_config(
    data: Path,
    vocab: Path,
    method: str = "fedavg",
    *,
    rounds: int = 3,
    cohort: int = 4,
    secure: bool = False,
    **options: object,
) -> Config:
    """A run that takes a second; its clients are the files of a folder."""
    return Config(
        data=DataConfig(name=str(data), unseen=0.0, vocab_file=str(vocab), window=8),
        model=ModelConfig("cifg", embed=6, hidden=8),
        train=TrainConfig(rounds=rounds, cohort=cohort, baselines=False, workers=1, block=1, device="cpu"),
        participation=Participation(),
        secure=SecureConfig(on=secure),
        method=method,
        options=options,  # type: ignore[arg-type]
    )


def federation(
    home: Path,
    texts: list[Path],
    *,
    fault: Fault | None = None,
    plain: bool = True,
    floor: int = 3,
    counts: bool = False,
    named: Callable[[Path], str] = lambda path: path.stem,
) -> tuple[InProcess, Roster]:
    """Enrol a session for every text.

    Args:
      named: a client's name; a simulation calls it by its file, and draws the order of lines and dropout by that name.
    """
    sessions, roster = {}, Roster(home / "roster.json")
    for path in texts:
        name = named(path)
        sessions[name] = session(home, path, plain=plain, floor=floor, counts=counts, name=name)
        identity = sessions[name].store.identity().public.hex()
        node_key = hashlib.sha256(name.encode()).hexdigest()
        roster.write({name: Enrolled(identity, node_key, datetime.now(UTC).isoformat())})
    return InProcess(sessions, fault), roster


def revoke(roster: Roster, name: str) -> None:
    """Let a client take part no more."""
    roster.write({name: replace(roster.entries[name], revoked=True)})


def session(
    home: Path, text: Path, *, plain: bool = True, floor: int = 3, counts: bool = False, name: str | None = None
) -> ClientSession:
    """A client's session; one made again has lost what was in memory, and no file."""
    name = name or text.stem
    learner = own_text(name, text)
    return ClientSession(home / name, name, learner, plain=plain, counts=counts, floors=Floors(floor))


def resigned(client: str, post: Post, handler: Handler, answer: bytes, change: Callable[[bytes], Answer]) -> Answer:
    """Return a changed answer with the client's own signature: what an enrolled client that lies can send."""
    assert isinstance(handler, ClientSession)
    changed = change(answer[:-SIGNATURE_BYTES] if post.kind in SIGNED else answer)
    if not isinstance(changed, bytes) or post.kind not in SIGNED:
        return changed
    return signed_answer(handler.store.identity(), client, post.kind, changed)


def calls_of(tmp_path: Path, fault: Fault | None = None, clients: int = 3) -> Calls:
    """Calls to the clients of a plain run that has not begun."""
    transport, roster = federation(tmp_path, write_texts(tmp_path / "t", clients), fault=fault)
    vocab, path = vocabulary(tmp_path)
    config = small_config(tmp_path / "t", path)
    method = run_method(config, secure=False)
    about = {"config": told(to_document(config)), "vocab": vocab.to_json(), "method": method_digest(method)}
    return Calls(transport, roster, RemoteRun("r", about, 1, 5.0))


def last_checkpoint(run: Path) -> Checkpoint:
    """What a run would go on from."""
    found = load_checkpoint(run / "checkpoint", 1 << 40, lambda line: None)
    assert found is not None
    return found


def last_model(run: Path) -> Params:
    """The model after the last round, whichever was chosen."""
    return last_checkpoint(run).state.params


def bits(params: Params) -> dict[str, bytes]:
    """Parameters as bytes, to be compared bit for bit."""
    return {name: p.numpy().tobytes() for name, p in sorted(params.items())}
