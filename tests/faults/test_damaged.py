"""Files of one's own, damaged: every loader returns, or raises a KeyfedError, whatever lies on the disk.

Payloads come from a seed: bits flipped, bytes removed and repeated, files cut, JSON values of another type, nesting
that no parser follows. Checkpoints and ledgers get their sums made to fit, so that what lies behind the sum is reached.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import random
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save as save_arrays

from keyfed.config.load import check, read_config
from keyfed.deploy import consent
from keyfed.deploy.enrolment import names_by_key, read_nodes
from keyfed.deploy.homes import ClientHome, ServerHome, Settings
from keyfed.deploy.server_app import event_line, follow
from keyfed.engine.client_state import read_state, write_state
from keyfed.errors import KeyfedError
from keyfed.federated.types import State
from keyfed.lab.papers import find_kept
from keyfed.private.dp.accounting import Release
from keyfed.private.dp.ledger import ORIGIN, Terms, _line, check_against_metrics, open_ledger, read_ledger
from keyfed.reports.figures import read_log, scalars
from keyfed.run.checkpoint import Best, Checkpoint, _seal, load_checkpoint, named_states, save_checkpoint
from keyfed.run.encode import open_cache
from keyfed.run.folder import read_metrics, read_result, read_run_toml
from keyfed.text.corpus import read_corpus
from keyfed.text.ragged import PackedNames, ShardWriter, streams_of
from keyfed.text.vectors import load_vectors
from keyfed.text.vectors.transformer import read_tokenizer
from keyfed.text.vocab import SPECIALS, Vocab, read_vocab
from keyfed.wire.device_store import DeviceStore
from keyfed.wire.roster import Enrolled, Roster

QUICK, THOROUGH = 120, 6000  # payloads a target
VALUES = (
    None, True, False, 0, -1, 1, 2**63, 10**400, -(2**70), 1e308, 0.5, "", "x", "\ud800", "é" * 50, "../../x", "1e9",
    [], {}, [[]], [None], [1, 2, 3, 4], {"x": 1}, {"": {}}, float("nan"), float("inf"),
)  # fmt: skip


def deep(opening, depth):
    closing = {"[": "]", '{"a":': "}"}[opening]
    return opening * depth + "1" + closing * depth


def bytes_changed(data, rng):
    """Flip, cut, repeat or replace bytes."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            del data[at : at + rng.randrange(1, 9)]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 4:
            data[at:at] = data[: rng.randrange(len(data) + 1)]
        else:
            data[at : at + 1] = rng.choice((b"\0", b"\xff", b"-", b"9", b"[", b'"', b"\n", b"NaN", b"\\ud800"))
    return bytes(data)


def places_of(value, here=()):
    """All places in a JSON value."""
    yield here
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places_of(child, (*here, key))


def value_changed(value, rng):
    """Replace, remove or add one value of a JSON document."""
    place = rng.choice(list(places_of(value)))
    new = rng.choice(VALUES)
    if not place:
        return new
    inside = value
    for key in place[:-1]:
        inside = inside[key]
    kind = rng.randrange(4)
    if kind == 0:
        del inside[place[-1]]
    elif kind == 1 and isinstance(inside, dict):
        inside[rng.choice(("", "x", "\ud800", "__class__"))] = inside.pop(place[-1])
    else:
        inside[place[-1]] = new
    return value


def json_changed(data, rng):
    """Change a JSON document, or nest it beyond all measure."""
    if rng.randrange(8) == 0:
        return deep(rng.choice(("[", '{"a":')), rng.choice((40, 900, 100_000))).encode()
    value = value_changed(json.loads(data), rng)
    if rng.randrange(8) == 0:
        return json.dumps(value).encode().replace(b"1", deep("[", rng.choice((40, 900, 5000))).encode(), 1)
    return json.dumps(value).encode()


def lines_changed(data, rng):
    lines = data.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = json_changed(lines[at], rng)
    return b"\n".join(lines) + b"\n"


@dataclass(frozen=True)
class Target:
    """A kind of file.

    Attributes:
      make: writes the files into a folder.
      load: reads them.
      changes: by a file's ending, what changes it apart from its bytes.
      after: makes sums fit to what was changed.
    """

    make: Callable[[Path], None]
    load: Callable[[Path], object]
    changes: dict[str, Callable] = field(default_factory=lambda: {".json": json_changed, ".jsonl": lines_changed})
    after: Callable[[Path, Path], None] = lambda folder, path: None


# ---------------------------------------------------------------------------------------------------------- the files


def checkpoints(folder):
    for number in (1, 2):
        state = State({"w": torch.zeros(2, 3)}, {"last": [1.0]}, {"m": torch.ones(3)}, number)
        best = Best(1, 3.5, {"w": torch.ones(2, 3)})
        pending = {"round": number, "loss": 2.0}
        save_checkpoint(folder, Checkpoint(state, best, 10 * number, 1.5, {}, pending))


def refit(folder, path):
    """Make the newest checkpoint's sum and seal fit to what lies there."""
    try:
        manifest = json.loads((folder / "round-000002.json").read_bytes())
        manifest["sha256"] = hashlib.sha256((folder / "round-000002.safetensors").read_bytes()).hexdigest()
        manifest["seal"] = _seal(manifest)
        (folder / "round-000002.json").write_bytes(json.dumps(manifest).encode())
    except (ValueError, TypeError, RecursionError, AttributeError):
        pass


def load_newest(folder):
    named_states(folder)
    found = load_checkpoint(folder, 10**6, lambda line: None)
    # The first checkpoint is whole: whatever became of the second, the run goes on.
    assert found is not None
    assert found.state.round in (1, 2)
    assert isinstance(found.best, Best | None)
    assert isinstance(found.metrics_length + found.seconds, float)
    return found


def device(folder):
    store = DeviceStore(folder)
    store.identity()
    for _ in range(2):
        store.new_keys("anna")
    store.pin({"bert": b"\1" * 32})
    store.begin("run", {"config": {}, "vocab": "v", "method": "fedavg", "secure": None})
    store.see("run", 1, 2, "ab")
    store.refuse_second("run", 2, "train", None)
    store.took_part("run", 3, 0.5)
    write_state(store.state_file("run", 2), {"dual": torch.zeros(3)})


def use_device(folder):
    store = DeviceStore(folder)
    for use in (
        store.identity,
        lambda: store.new_keys("anna"),
        lambda: store.take_keys(1),
        lambda: store.pin({"bert": b"\1" * 32}),
        lambda: store.begun("run"),
        lambda: store.begin("run", {"config": {}, "vocab": "v", "method": "fedavg", "secure": None}),
        lambda: store.seen("run"),
        lambda: store.refuse_second("run", 4, "train", None),
        lambda: store.last_part("run"),
        lambda: store.refuse_early("run", 9, 1),
        lambda: read_state(store.state("run", 2)),
    ):
        with contextlib.suppress(KeyfedError):
            use()


def shard(folder):
    with ShardWriter(folder / "train") as out:
        for name in ("ann", "bérté", "c"):
            out.add(name, np.arange(5, dtype=np.int32))


def read_shard(folder):
    streams = list(streams_of(folder / "train"))
    names = PackedNames(folder / "train")
    return [streams, list(names), names[:2], names[-1], sum(int(ids.sum()) for _, ids in streams)]


def homes(folder):
    server = ServerHome(folder / "server")
    server.path.mkdir()
    anna, bert = Enrolled("aa", "bb", "2026-01-01"), Enrolled("aa", "cc", "2026-01-01", revoked=True)
    Roster(server.roster).write({"anna": anna, "bert": bert})
    (server.path / "nodes.json").write_text('{"anna": 12345, "bert": 3}')
    (server.path / "address.json").write_text('{"address": "127.0.0.1:9092"}')
    client = ClientHome(folder / "client")
    client.path.mkdir()
    client.write(Settings("anna", "127.0.0.1:9092"))
    consent.ask(client.path, "words", yes=True, read=None, say=lambda line: None)


def read_homes(folder):
    server, client = ServerHome(folder / "server"), ClientHome(folder / "client")
    tried = [
        lambda: names_by_key(server),
        lambda: Roster(server.roster).names(),
        lambda: Roster(server.roster).write({"carl": Enrolled("dd", "ee", "2026-01-01")}),
        lambda: read_nodes(server),
        server.address,
        lambda: consent.words_for(client.path, client.settings()),
        client.data,
        lambda: consent.given(client.path, "words"),
        lambda: consent.need_consent(client),
    ]
    for use in tried:
        with contextlib.suppress(KeyfedError):
            use()


METRICS = {
    "round": 1, "loss": 2.0, "valid": {"nats": 1.0, "perplexity": 2.7, "top1": 0.1, "top3": 0.2}, "seconds": 1.0,
    "elapsed": 1.0, "effective_clients": 3.0, "traffic": {"down": 5, "up": 6},
}  # fmt: skip


def events(folder):
    lines = [event_line("say", "hello"), event_line("start", ["rounds", 3, 0]), event_line("round", METRICS)]
    (folder / "output.events").write_text("".join([*lines, event_line("result", {"perplexity": 3.0})]))
    (folder / "metrics.jsonl").write_text("".join(json.dumps({**METRICS, "round": k}) + "\n" for k in (1, 2)))
    (folder / "result.json").write_text(json.dumps({"perplexity": 3.0, "rounds": 2}))


class Silent:
    def say(self, line): ...
    def start(self, what, rounds, done):
        assert isinstance(rounds + done, int)

    def round(self, record):
        assert float(record["loss"]) is not None


def read_events(folder):
    for use in (
        lambda: follow(iter((folder / "output.events").read_text("utf-8", "replace").split("\n")), Silent()),
        lambda: [scalars(record, {"down": 1.0, "up": 1.0}) for record in read_log(folder)],
        lambda: read_result(folder),
    ):
        with contextlib.suppress(KeyfedError):
            use()


def events_changed(data, rng):
    lines = data.decode().splitlines()
    at = rng.randrange(len(lines))
    prefix, brace, rest = lines[at].partition("{")
    lines[at] = prefix + json_changed((brace + rest).encode(), rng).decode()
    return "\n".join(lines).encode()


WORDS = ("the", "cat", "sat")


def vocabulary(folder):
    (folder / "vocab.json").write_text(Vocab("word", (*SPECIALS, *WORDS), lower=True, tokenised=False).to_json())


def tokenizers(folder):
    pieces = {"[UNK]": 0, "the": 1, "cat": 2, "##s": 3, "s": 4, "t": 5, "h": 6, "e": 7, "th": 8}
    for name in ("bert", "gpt", "json", "bpe"):
        (folder / name).mkdir()
    (folder / "bert" / "vocab.txt").write_text("\n".join(pieces))
    (folder / "bert" / "tokenizer_config.json").write_text('{"do_lower_case": true, "strip_accents": null}')
    (folder / "gpt" / "vocab.json").write_text(json.dumps(pieces))
    (folder / "gpt" / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    piece = {"model": {"type": "WordPiece", "vocab": pieces, "unk_token": "[UNK]"}, "normalizer": {"type": "Lowercase"}}
    (folder / "json" / "tokenizer.json").write_text(json.dumps(piece))
    pairs = {
        "model": {"type": "BPE", "vocab": pieces, "merges": ["t h", ["th", "e"]]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}]},
    }
    (folder / "bpe" / "tokenizer.json").write_text(json.dumps(pairs))
    for name in ("bert", "gpt", "json", "bpe"):
        table = save_arrays({"wte.weight": np.ones((9, 4), np.float32)})
        (folder / name / "model.safetensors").write_bytes(table)


def read_tokenizers(folder):
    for name in ("bert", "gpt", "json", "bpe"):
        with contextlib.suppress(KeyfedError):
            read_tokenizer(folder / name).encode("thes")
        with contextlib.suppress(KeyfedError):
            load_vectors(folder / name, WORDS)


def vectors(folder):
    rows = "".join(f"{word} 1.0 -2 3e-1\n" for word in WORDS)
    (folder / "glove.txt").write_text(rows)
    (folder / "fasttext.vec").write_text(f"3 3\n{rows}")
    (folder / "packed.txt.gz").write_bytes(gzip.compress(rows.encode()))
    table = np.ones((3, 3), np.float32)
    (folder / "word2vec.bin").write_bytes(b"3 3\n" + b"".join(w.encode() + b" " + table[0].tobytes() for w in WORDS))
    np.savez(folder / "arrays.npz", vectors=table, words=np.array(WORDS))
    letters = np.frombuffer("\n".join(WORDS).encode(), np.uint8)
    (folder / "arrays.safetensors").write_bytes(save_arrays({"vectors": table, "words": letters}))
    (folder / "arrays.json").write_text(json.dumps({word: [1.0, 2.0, 3.0] for word in WORDS}))


def read_vectors(folder):
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(KeyfedError):
            load_vectors(path, WORDS)


TERMS = Terms(1e-6, 1000, 100, 10.0, 10.0, 1.0, "gaussian", "1", "derived", 3.0)


def ledger(folder):
    book = open_ledger(folder, TERMS)
    for number in (1, 2):
        book.book(Release(1.0, 0.01), "update", number)
    told = {"ledger": {"rows": 2, "head": book.hashes[1]}}
    (folder / "metrics.jsonl").write_text(json.dumps({**METRICS, "privacy": told}) + "\n")


def refit_ledger(folder, path):
    """Make the chain of hashes fit to what was changed."""
    lines, before = [], ORIGIN
    try:
        for line in next(folder.glob("ledger*.jsonl"), next(folder.glob("*ledger*"))).read_bytes().splitlines():
            plain = {k: v for k, v in json.loads(line).items() if k not in ("hash", "before")}
            made, before = _line(plain, before)
            lines.append(made)
    except (ValueError, TypeError, AttributeError, RecursionError, StopIteration):
        return
    next(folder.glob("*ledger*")).write_bytes(b"".join(line + b"\n" for line in lines))


def use_ledger(folder):
    for use in (
        lambda: check_against_metrics(read_ledger(folder), read_metrics(folder)),
        lambda: (read_ledger(folder).verdict(), read_ledger(folder).attempts(1)),
        lambda: read_ledger(folder).epsilon("rdp"),
        lambda: open_ledger(folder, TERMS),
    ):
        with contextlib.suppress(KeyfedError):
            use()


CONFIG = """
[method]
name = "fedavg"
lr = 0.1
[data]
name = "toy"
clients = 5
[model]
name = "gru"
hidden = 8
[train]
rounds = 3
cohort = 2
[privacy]
noise = 1.0
[made]
method = "fedavg"
device = "cpu"
"""


def configuration(folder):
    (folder / "run.toml").write_text(CONFIG)


def toml_changed(data, rng):
    """Give an option another value."""
    lines = data.decode().splitlines()
    at = rng.choice([k for k, line in enumerate(lines) if "=" in line])
    odd = ("true", "-1", "1e400", "nan", "[]", "[[1]]", "{}", '""', '"none"', "1979-05-27", '"\\u0000"', "9" * 30,
           "0x7fffffffffffffff", deep("[", 3000), '"x,=="', "'''\n'''")  # fmt: skip
    key = lines[at].partition("=")[0] if rng.randrange(4) else rng.choice(('"" ', "a.b ", '"\\u0000" '))
    lines[at] = f"{key}= {rng.choice(odd)}"
    return "\n".join(lines).encode()


def read_configuration(folder):
    for use in (lambda: check(read_config(folder / "run.toml")), lambda: read_run_toml(folder)):
        with contextlib.suppress(KeyfedError):
            use()


def corpora(folder):
    rows = [{"author": who, "text": f"hello from {who}", "created": 5} for who in ("ann", "bert")]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "b.csv").write_text("author,text,created\nann,hello,5\nbert,hi,2011-01-01\n")
    (folder / "c.tsv").write_text("author\ttext\nann\thello\nbert\thi\n")
    leaf = {
        "users": ["ann", "bert"], "num_samples": [1, 1],
        "user_data": {"ann": {"x": ["hello there"]}, "bert": {"x": [[["<BOS>", "a"], ["b", "<PAD>"]]]}},
    }  # fmt: skip
    (folder / "d.json").write_text(json.dumps(leaf))
    (folder / "e.txt").write_text("some text\nand a line\n")
    (folder / "f.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    (folder / "g.txt.gz").write_bytes(gzip.compress((folder / "e.txt").read_bytes()))


def read_corpora(folder):
    for path in [*sorted(folder.iterdir()), folder]:
        with contextlib.suppress(KeyfedError):
            read_corpus(path).fingerprint()


def kept(folder):
    checkpoints(folder / "cell" / "checkpoint")
    (folder / "cell" / "kept.json").write_text(json.dumps({"about": {"x": 1}, "records": [{"round": 1}, {"round": 2}]}))
    cache = folder / "cache"
    cache.mkdir()
    (cache / "manifest.json").write_text(
        json.dumps({"files": {}, "published": [True, True], "skipped": [], "corpus": {}})
    )


def read_kept(folder):
    find_kept(folder / "cell", {"x": 1}, {"w": torch.zeros(2, 3)}, lambda line: None)
    open_cache(folder / "cache")


TARGETS = {
    "checkpoints": Target(checkpoints, load_newest, after=refit),
    "a client's own files": Target(device, use_device),
    "shards": Target(shard, read_shard),
    "rosters, nodes, client.json": Target(homes, read_homes),
    "run events": Target(
        events, read_events, {".events": events_changed, ".json": json_changed, ".jsonl": lines_changed}
    ),
    "vocabulary": Target(vocabulary, lambda folder: read_vocab(folder / "vocab.json", "word").encode(["the cat"])),
    "tokenizers": Target(tokenizers, read_tokenizers),
    "ledger": Target(ledger, use_ledger, after=refit_ledger),
    "vectors": Target(vectors, read_vectors),
    "configuration": Target(configuration, read_configuration, {".toml": toml_changed}),
    "corpora": Target(corpora, read_corpora),
    "cells and caches": Target(kept, read_kept),
}


def untyped(target, folder, payloads, seed):
    """Return the errors that are no KeyfedError, by type and place, and how many there were."""
    rng, found, examples = random.Random(seed), Counter(), {}
    folder.mkdir()
    target.make(folder)
    whole = {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    target.load(folder)  # what nothing has damaged is read
    for _ in range(payloads):
        for path in [p for p in folder.rglob("*") if p.is_file() and p not in whole]:
            path.unlink()
        for path, data in whole.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)
        path = rng.choice(list(whole))
        change = target.changes.get(path.suffix, bytes_changed) if rng.randrange(3) else bytes_changed
        changed = change(whole[path], rng)
        path.write_bytes(changed)
        if rng.randrange(2):
            target.after(folder, path)
        try:
            target.load(folder)
        except KeyfedError:
            pass
        except Exception as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if "keyfed" in f.filename]
            where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
            key = f"{type(error).__name__} {path.name} at {where}"
            found[key] += 1
            examples.setdefault(key, (changed[:200], str(error)[:200]))
    return found, examples


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """No waiting for the disk."""
    monkeypatch.setattr("os.fsync", lambda handle: None)


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_give_typed_errors(name, tmp_path):
    found, examples = untyped(TARGETS[name], tmp_path / "x", QUICK, seed=18)
    assert not found, (found, examples)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_files_give_typed_errors_thoroughly(name, seed, tmp_path, record_property):
    found, examples = untyped(TARGETS[name], tmp_path / "x", THOROUGH, seed)
    record_property("payloads", THOROUGH)
    assert not found, (found, examples)
