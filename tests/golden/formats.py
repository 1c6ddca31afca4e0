"""What is written, sent and hashed, collected from the source and from small runs; `formats.json` holds it frozen.

Keys are read from real files and messages, so that little here depends on where the code lies.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from safetensors import safe_open

import keyfed
from keyfed.config.load import SECTIONS
from keyfed.config.schema import CountsConfig
from keyfed.deploy.certificates import make_certificates
from keyfed.deploy.enrolment import enrol, read_enrolment, write_enrolment
from keyfed.deploy.homes import ClientHome, ServerHome, open_home
from keyfed.federated.components import KINDS, part_options
from keyfed.federated.methods import build_method, method_options
from keyfed.federated.spec import MethodSpec
from keyfed.federated.types import Reason
from keyfed.lab.experiment.grid import SCALES, cells_of, load_study, study_names
from keyfed.private.secagg.keys import SIGNATURE_BYTES
from keyfed.run.remote.device import method_digest
from keyfed.wire.messages import MAGIC, PROTOCOL, Kind, unpack
from keyfed.wire.transport import SIGNED, Answer, Handler, Post, deliver
from tests.faults.private import deploy, private_config
from tests.faults.private import enrol as enrolled

from .runs import PRIVATE, SECURE, Bench

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FORMATS = HERE / "formats.json"
SOURCE = ROOT / "src" / "keyfed"
ANY = "·"  # a part of a purpose that is no literal; a key that is a name of a client
SEEDING = "derive_seed"
NAMED = re.compile(r"(client-|writer)\d+(\.txt)?|[0-9a-f]{12,}|round-\d{6}")
FILES = re.compile(r"[0-9a-f]{12,}|\d{3,}")  # in names of files: rounds, serial numbers, ids


def collect(folder: Path) -> dict[str, Any]:
    """Everything that is frozen, by name."""
    bench = Bench.make(folder / "bench")
    return shortened({
        "purposes of derive_seed": purposes(SOURCE),
        **methods(),
        **configuration(),
        **cells(ROOT / "studies"),
        **run_folders(bench),
        **messages(folder / "federations"),
        **homes(folder / "homes"),
    })  # fmt: skip


def shortened(found: Mapping[str, Any]) -> dict[str, Any]:
    """Let an entry that repeats an earlier one of some length name that one."""
    first: dict[str, str] = {}
    out = {}
    for name, value in found.items():
        text = json.dumps(value)
        out[name] = f"as {first[text]}" if text in first else json.loads(text)
        if len(text) > 60:
            first.setdefault(text, name)
    return out


# (a) the purposes that seeds are derived for


def purposes(source: Path) -> list[str]:
    """Return what is given to `derive_seed` after the seed, `cohort/·` for a literal and a value.

    A function that hands a parameter of its own on to `derive_seed` is followed to its callers.
    """
    trees = [ast.parse(path.read_text("utf-8")) for path in sorted(source.rglob("*.py"))]
    # One place hashes what a million purposes have in common once, by hand.
    found = {"held out/·" for tree in trees for text in _strings(tree) if "/str:held out/str:" in text}
    calls = [list(_calls(tree)) for tree in trees]
    imports = [{a.name for n in ast.walk(t) if isinstance(n, ast.ImportFrom) for a in n.names} for t in trees]
    for here in calls:
        follow: dict[str, list[tuple[ast.FunctionDef, list[ast.expr]]]] = {}
        for function, call in here:
            if _name(call) == SEEDING:
                parts = list(call.args[1:])
                found.add(_written(parts, {}))
                names = {n.id for part in parts for n in ast.walk(part) if isinstance(n, ast.Name)}
                if function is not None and names & _parameters(function):
                    follow.setdefault(function.name, []).append((function, parts))
        for there, imported in zip(calls, imports, strict=True):
            reachable = {name: f for name, f in follow.items() if there is here or name in imported}
            for _, call in there if reachable else ():
                found |= {_written(parts, _bound(call, f)) for f, parts in reachable.get(_name(call), [])}
    return sorted(purpose for purpose in found if purpose.replace(ANY, "").strip("/"))


def _strings(tree: ast.AST) -> Iterator[str]:
    return (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def _calls(tree: ast.AST) -> list[tuple[ast.FunctionDef | None, ast.Call]]:
    """Every call, with the innermost function around it."""
    found: list[tuple[ast.FunctionDef | None, ast.Call]] = []
    open_: list[tuple[ast.AST, ast.FunctionDef | None]] = [(tree, None)]
    while open_:
        node, function = open_.pop()
        if isinstance(node, ast.Call):
            found.append((function, node))
        inner = node if isinstance(node, ast.FunctionDef) else function
        open_ += [(child, inner) for child in ast.iter_child_nodes(node)]
    return found


def _name(call: ast.Call) -> str:
    called = call.func
    return called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""


def _parameters(function: ast.FunctionDef) -> set[str]:
    a = function.args
    rest = [one for one in (a.vararg, a.kwarg) if one is not None]
    return {one.arg for one in (*a.posonlyargs, *a.args, *a.kwonlyargs, *rest)} - {"self", "seed", "round"}


def _bound(call: ast.Call, function: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """The expressions that a call gives a function's parameters; those of `*rest` are a list."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    if names[:1] == ["self"] and isinstance(call.func, ast.Attribute):
        names = names[1:]
    given: dict[str, list[ast.expr]] = {k.arg: [k.value] for k in call.keywords if k.arg}
    given |= {name: [value] for name, value in zip(names, call.args, strict=False)}
    if function.args.vararg is not None:
        given[function.args.vararg.arg] = call.args[len(names) :]
    return given


def _written(parts: list[ast.expr], given: Mapping[str, list[ast.expr]]) -> str:
    """Write parts down: literals as they are, what is handed on as its caller gives it, all else as `ANY`."""
    out: list[str] = []
    for part in parts:
        inner = part.value if isinstance(part, ast.Starred) else part
        if isinstance(inner, ast.Name) and inner.id in given:
            out += [str(one.value) if isinstance(one, ast.Constant) else ANY for one in given[inner.id]]
        elif isinstance(inner, ast.Constant):
            out.append(str(inner.value))
        else:
            out.append(ANY)
    return "/".join(out)


# (b) methods as data


def methods() -> dict[str, Any]:
    """Fields of a specification; of every method its options and the digest that clients and server compare."""
    spec = {f.name: [str(f.type), _plain(f)] for f in dataclasses.fields(MethodSpec)}
    found = {"MethodSpec": spec}
    for name in keyfed.METHODS:
        method = build_method(MethodSpec(name))
        options = {key: p.default for key, p in method_options(name).items()}
        found[f"method {name}"] = {"options": options, "digest": method_digest(method)}
    return found


def _plain(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return "required" if field.default is dataclasses.MISSING else field.default


# (c) configuration and the cells of studies


def configuration() -> dict[str, Any]:
    """Keys with type and default, by section; options of exchanged parts."""
    found: dict[str, Any] = {
        f"configuration [{name}]": {f.name: [str(f.type), _plain(f)] for f in dataclasses.fields(section)}
        for name, section in SECTIONS.items()
    }
    for kind, known in KINDS.items():
        found[f"configuration [{kind}]"] = {
            name: {key: "required" if p.default is inspect.Parameter.empty else p.default
                   for key, p in part_options(kind, name).items()}
            for name in known
        }  # fmt: skip
    return found


def cells(folder: Path) -> dict[str, Any]:
    """Of every study and scale the number of cells, and a hash of their sorted ids and files' names."""
    found = {}
    for name in study_names(folder):
        study = load_study(name, folder)
        for scale in SCALES:
            ids = sorted({(cell.id, cell.file) for cell in cells_of(study, scale)})
            digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
            found[f"cells of {name}, {scale}"] = [len(ids), digest]
    return found


# (d) files and messages


def keys(value: Any, at: str = "") -> Iterator[str]:
    """The paths of all keys in nested plain values; an element of a list is `[]`, the name of a client `ANY`.

    Example:
      >>> sorted(set(keys({"a": [{"b": 1}], "writer3.txt": {"c": None}})))
      ['a[].b', '·.c']
    """
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from keys(inner, f"{at}.{ANY if NAMED.fullmatch(str(key)) else key}".lstrip("."))
    elif isinstance(value, list | tuple) and value:
        for inner in value:
            yield from keys(inner, f"{at}[]")
    elif at:
        yield at


def all_keys(values: Iterable[Any]) -> list[str]:
    """The key paths of several values together."""
    return sorted({path for value in values for path in keys(value)})


def names_in(folder: Path) -> list[str]:
    """Names of all files below a folder; numbers and ids in them are written `N`."""
    return sorted({FILES.sub("N", p.relative_to(folder).as_posix()) for p in folder.rglob("*") if p.is_file()})


def described(folder: Path) -> dict[str, Any]:
    """The files of a folder and the keys in them: of JSON and TOML, of lines of JSON, of tensors."""
    found: dict[str, Any] = {"files": names_in(folder)}
    contents: dict[str, list[Any]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = FILES.sub("N", path.relative_to(folder).as_posix())
        if path.suffix == ".jsonl":
            contents.setdefault(name, []).extend(map(json.loads, path.read_text("utf-8").splitlines()))
        elif path.suffix == ".json":
            contents.setdefault(name, []).append(json.loads(path.read_text("utf-8")))
        elif path.suffix == ".toml":
            contents.setdefault(name, []).append(tomllib.loads(path.read_text("utf-8")))
        elif path.suffix == ".safetensors":
            with safe_open(path, "np") as tensors:
                contents.setdefault(name, []).append(dict.fromkeys(tensors.keys()))
    return found | {name: all_keys(values) for name, values in contents.items()}


FOLDERS: dict[str, dict[str, Any]] = {
    "plain": {"method": "fedmed", "beta": 0.5, "upload_keep": 0.5, "train_average": 0.5, "train_central": True},
    "all measured": {"train_cohort": 4, "participation_drop_before": 0.2, "participation_deadline": 9.0,
                     "data_unseen": 0.3, "seed": 3, "train_baselines": True, "train_curves": True},
    "rolled back": {"train_rollback": 1.01, "train_eval_every": 1, "lr": 20.0, "optimiser": "sgd", "epochs": 2,
                    "rounds": 4, "method": "fedadam"},
    "duals": {"method": "fedadmm"},
    "started": {"train_init": "source run"},
    "secure": {"method": "fedatt", **SECURE},
    "private": {**PRIVATE, "privacy_twin": True},
    "both": {"method": "fedmed", "beta": 0.5, **SECURE, **PRIVATE},
}  # fmt: skip


def run_folders(bench: Bench) -> dict[str, Any]:
    """What runs of several kinds write: checkpoints, metrics, result, ledger."""
    found = {}
    for name, settings in FOLDERS.items():
        out = bench.folder / "folders" / name
        keyfed.train(bench.configure(settings), out)
        for path, what in described(out).items():
            found[f"run folder, {name}: {path}"] = what
    return found


KINDS_OF_RUNS = {"plain": ("fedatt", False, False), "duals": ("fedadmm", False, False),
                 "secure": ("fedmed", True, False), "private": ("fedavg", False, True),
                 "both": ("fedavg", True, True), "counts": ("fedavg", True, False)}  # fmt: skip


def messages(folder: Path) -> dict[str, Any]:
    """What server and clients say to each other, by kind, and what a federation leaves on both sides."""
    found: dict[str, Any] = {
        "protocol": [PROTOCOL, MAGIC.decode()], "kinds of messages": sorted(get_args(Kind)),
        "reasons for a refusal": sorted(get_args(Reason)),
    }  # fmt: skip
    for name, (method, secure, private) in KINDS_OF_RUNS.items():
        place = folder / name
        place.mkdir(parents=True)
        config = private_config(place, method, clients=4, secure=secure, rounds=2, privacy={"noise": 0.2})
        if not private:
            config = dataclasses.replace(config, privacy=type(config.privacy)())
            config = dataclasses.replace(config, participation=type(config.participation)())
        if name == "counts":
            counted = CountsConfig(order=2, megabytes=0.01, on=True)
            config = dataclasses.replace(config, counts=counted)
        heard: dict[str, list[Any]] = {}

        def note(client: str, post: Post, handler: Handler, heard: dict[str, list[Any]] = heard) -> Answer:
            answer = deliver(client, post, handler)
            signed = post.kind in SIGNED
            heard.setdefault(f"{post.kind}, question", []).append(_said(post.body))
            if isinstance(answer, bytes):
                heard.setdefault(f"{post.kind}, answer", []).append(
                    _said(answer[: -SIGNATURE_BYTES if signed else None])
                )
            return answer

        transport, roster = enrolled(place, 4, fault=note, counts=name == "counts")
        deploy(place, config, transport, roster)
        for kind, heads in heard.items():
            found[f"message, {name}: {kind}"] = all_keys(heads)
        for path, what in described(place / "deployed").items():
            found[f"federation, {name}: {path}"] = what
        for path, what in described(place / "clients" / "client-1").items():
            found[f"client of a federation, {name}: {path}"] = what
    return found


def _said(message: bytes) -> dict[str, Any]:
    read = unpack(message)
    if not read.tensors:
        return dict(read.head)
    length = int.from_bytes(read.tensors[:8], "little")
    described = json.loads(read.tensors[8 : 8 + length])
    return {**read.head, "tensors": {name: {about["dtype"]: None} for name, about in described.items()}}


def make_homes(folder: Path) -> tuple[ServerHome, ClientHome]:
    """A server's home with one enrolled client, and that client's."""
    server = ServerHome(folder / "server")
    make_certificates(server.path, [])
    client = open_home(folder / "client", name="client-1", server="127.0.0.1:9092", ca=server.ca, when="idle",
                       keep_days=30, limits={"epsilon": 5.0})  # fmt: skip
    given = read_enrolment(write_enrolment(client).read_bytes())
    enrol(server, [given], lambda commands: [f"SuperNode {7001 + n} registered." for n, _ in enumerate(commands)])
    return server, client


def homes(folder: Path) -> dict[str, Any]:
    """The files of both homes after enrolment."""
    server, client = make_homes(folder)
    found = {f"server's home: {path}": what for path, what in described(server.path).items()}
    return found | {f"client's home: {path}": what for path, what in described(client.path).items()}
