"""A run is a folder: created, locked, described by run.toml, and found again."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save

from keyfed import __version__
from keyfed.config.load import Config, config_from, differences, dump_toml, to_document
from keyfed.engine.module import MakeModule
from keyfed.engine.network import Network, check_params
from keyfed.errors import FolderInUse, NoMainGuard, RunError
from keyfed.federated.soundness import finite
from keyfed.files import append_durably, locked, parse_json, read_json, write_atomically
from keyfed.model.language_model import Params
from keyfed.run.prepare import build_network
from keyfed.text.batches import reads_lines
from keyfed.text.vocab import Vocab, vocab_sha256

if TYPE_CHECKING:
    from keyfed.run.plan import Choice

LOCK = "run.lock"
OWN_TEXT = "the clients' own text"  # what the result of a run with real clients says its data are


def file_name(text: str, also: str = "") -> str:
    """Return a text as part of a file name: letters, digits, `-`, `_` and the characters of `also`; others become `-`.

    Example:
      >>> file_name("my corpus.txt")
      'my-corpus-txt'
    """
    return "".join(c if c.isalnum() or c in "-_" or c in also else "-" for c in text)


def free_name(base: Path) -> Path:
    """Return `base`, or `base-2`, `base-3`, … if that exists."""
    candidate, number = base, 1
    while candidate.exists():
        number += 1
        candidate = base.with_name(f"{base.name}-{number}")
    return candidate


@contextmanager
def open_folder(folder: Path, resume: bool) -> Iterator[Path]:
    """Create (or with `resume` reopen) a run folder and keep other processes out while it is in use.

    A new folder is its owner's alone: a model knows something of the text it learnt. One in which nothing was written,
    because the run was refused, goes again. So does that of a program without a main guard, which has trained nothing.
    """
    fresh = not folder.exists()
    if (folder / "run.toml").exists() and not resume:
        raise RunError(f"{folder} holds a run already; go on with it by --resume, or choose another --out")
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; expected a folder for the run")
    if folder.is_dir() and not resume and any(p.name != LOCK for p in folder.iterdir()):
        raise RunError(f"{folder} exists and is not empty; choose another --out")
    stack = contextlib.ExitStack()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stack.enter_context(locked(folder / LOCK))
    except BlockingIOError:
        raise FolderInUse(f"{folder} is in use by another process; wait for it or choose another --out") from None
    except OSError as e:
        raise RunError(f"{folder}: {e.strerror or e}; choose another --out") from e
    with stack:
        try:
            yield folder
        except BaseException as e:
            if fresh and isinstance(e, NoMainGuard):
                shutil.rmtree(folder, ignore_errors=True)
            elif fresh and [p.name for p in folder.iterdir()] == [LOCK]:
                with contextlib.suppress(OSError):
                    (folder / LOCK).unlink()
                    folder.rmdir()
            raise


def made_by(choice: Choice, fingerprint: str, ranks: int = 1) -> dict[str, Any]:
    """Return what it takes to repeat the run beside its configuration."""
    return {
        "keyfed": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.system()}",
        "commit": _commit(),
        "data_sha256": fingerprint,
        "device": choice.device,
        "block": choice.block,
        "workers": choice.workers,
        "threads": choice.threads,
        "ranks": ranks,
    }


def _commit() -> str | None:
    """The commit of the source tree, where the package runs from one."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
            capture_output=True, text=True, timeout=5, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def write_run_toml(folder: Path, config: Config, made: Mapping[str, Any]) -> None:
    """Write the resolved configuration and what made it: enough to repeat the run."""
    document = to_document(config)
    if "method" in made:  # one from outside the package, whose options nobody here knows
        del document["method"]
    vocabulary = vocab_sha256(config.data.vocab_file)
    origin = {} if vocabulary is None else {"vocab_sha256": vocabulary}
    write_atomically(folder / "run.toml", dump_toml({**document, "made": {**made, **origin}}).encode())


def read_run_toml(folder: Path) -> tuple[Config, dict[str, Any]]:
    """Return the configuration of a run and its `made` section."""
    try:
        document = tomllib.loads((folder / "run.toml").read_text("utf-8"))
    except FileNotFoundError:
        why = "it has no run.toml" if folder.exists() else "there is nothing of that name"
        raise RunError(f"{folder} is not a run folder ({why}); `keyfed train` makes one") from None
    except NotADirectoryError:
        raise RunError(f"{folder} is a file; expected the folder of a run, which `keyfed train` makes") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as e:
        raise RunError(f"{folder / 'run.toml'} cannot be read: {e}") from None
    made = document.get("made")
    if not isinstance(made, dict):
        raise RunError(f"{folder / 'run.toml'} has no section [made]; it is not from `keyfed train`")
    return config_from(document, str(folder / "run.toml")), made


def refuse_changes(
    folder: Path,
    config: Config,
    fingerprint: str,
    outside: Mapping[str, str] | None = None,
    *,
    may_start: bool = True,
) -> dict[str, Any]:
    """Refuse to go on with a run under another configuration or other data; return its `made` section.

    Args:
      outside: module and method that were passed, by name; see `keyfed.run.plan.names`.
      may_start: whether another run could start from this one's weights, which is then said.
    """
    old, made = read_run_toml(folder)
    refuse_others(folder, made, outside or {})
    before, now = to_document(old), to_document(config)
    if "method" in (outside or {}):
        del before["method"], now["method"]  # not the one that is trained
    changed = differences(before, now)
    if made.get("data_sha256") != fingerprint:
        changed.append(f"the text of the corpus: {str(made.get('data_sha256'))[:12]} → {fingerprint[:12]}")
    vocabulary = vocab_sha256(config.data.vocab_file)
    if vocabulary is not None and vocabulary != made.get("vocab_sha256"):
        changed.append(f"{config.data.vocab_file}: {str(made.get('vocab_sha256'))[:12]} → {vocabulary[:12]}")
    if changed:
        anew = f"another --out{f' (with --init {shlex.quote(str(folder))} from its weights)' if may_start else ''}"
        raise RunError(
            f"{folder} was started with another configuration: {'; '.join(changed)}; go on as it began, or take {anew}"
        )
    return made


def extended(folder: Path, config: Config) -> tuple[Config, Config]:
    """Return the configuration that a run goes on with, and the same with the rounds that the run has so far.

    `train.rounds` may be more than the run has; both are the same where it is not. `train.frozen_rounds` that covered
    all rounds covers the new ones, too.

    Raises:
      RunError: the run cannot have these rounds.
    """
    old, _ = read_run_toml(folder)
    has, wanted = old.train.rounds, config.train.rounds
    if has == wanted:
        return config, config
    done = len(read_metrics(folder))
    if wanted < has:
        raise RunError(
            f"{folder} is a run of {has} rounds, {done} of them done, and train.rounds (--rounds) is {wanted}; a run "
            f"can be extended to more than {has} rounds, and not cut: leave --rounds out, or take another --out"
        )
    if old.privacy.on:
        raise RunError(
            f"{folder} is a private run, whose noise and account are for {has} rounds, and train.rounds (--rounds) is "
            f"{wanted}; it cannot be extended: start another run with --rounds {wanted} and another --out"
        )
    met = (read_result(folder) or {}).get("reached")
    if met:
        raise RunError(
            f"{folder} has reached its target ({old.train.until}) after round {met['round']}: more rounds would not be "
            f"trained. Take another --out with --init {shlex.quote(str(folder))}, which starts from its weights"
        )
    begun = replace(config, train=replace(config.train, rounds=has))
    if has and old.train.frozen_rounds == config.train.frozen_rounds == has:
        config = replace(config, train=replace(config.train, frozen_rounds=wanted))
    return config, begun


def note_extension(folder: Path, config: Config, made: Mapping[str, Any], has: int) -> None:
    """Write down that a run has more rounds now.

    The result goes first: a run whose extension was not written yet is finished again, and one that was written is
    never taken for finished. What was trained beside the run, for as many rounds, is trained anew.
    """
    step = f"from {has} to {config.train.rounds} rounds"
    noted = {**made, "extended": f"{made['extended']}; {step}" if "extended" in made else step}
    (folder / "result.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "central", ignore_errors=True)
    write_run_toml(folder, config, noted)


def as_before(made: Mapping[str, Any], choice: Choice, say: Callable[[str], None], ranks: int = 1) -> Choice:
    """Train on as the run began: the same device, block, workers and threads; say when torch or ranks are others."""
    try:
        began = int(made.get("ranks", 1))
        device, numbers = str(made["device"]), {k: int(made[k]) for k in ("block", "workers", "threads")}
    except (KeyError, TypeError, ValueError) as e:
        raise RunError(f"run.toml: section [made] is damaged ({e!r}); start again with another --out") from None
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise RunError(f"this run began on {device}, and torch sees no GPU here; go on where there is one")
    if made.get("torch") != torch.__version__:
        say(
            f"torch {made.get('torch')} began this run, {torch.__version__} goes on: "
            "results may differ in the last bits"
        )
    if began != ranks:
        say(f"{began} ranks began this run, {ranks} go on: results may differ in the last bits")
    if ranks > 1:
        numbers["workers"] = 1  # a rank is a worker
    reason = f"{device}, block {numbers['block']}, workers {numbers['workers']}: as the run began"
    return replace(choice, device=device, **numbers, reason=reason)


@dataclass(frozen=True, slots=True)
class Trained:
    """A model on disk, ready to use.

    Attributes:
      method: name of the method that trained it; one from outside the package is not in `config`.
      spec: the model, a preset's or a user's module.
    """

    folder: Path
    config: Config
    method: str
    spec: Network
    params: Params
    vocab: Vocab

    @property
    def reads_lines(self) -> bool:
        """Whether the model learnt from single lines, each from a zero state behind <bos>, not from a stream."""
        return reads_lines(self.config.data.batching)


def save_model(folder: Path, params: Params, vocab: Vocab) -> None:
    """Write model.safetensors and vocab.json.

    Raises:
      RunError: a number of the model is not finite; nothing was written.
    """
    if not finite(params):
        raise RunError(f"{folder}: the model has numbers that are not finite and is not written; lower the step size")
    write_atomically(folder / "model.safetensors", save({n: t.contiguous() for n, t in params.items()}))
    write_atomically(folder / "vocab.json", vocab.to_json().encode())


def load_model(folder: Path, module: MakeModule | None = None) -> Trained:
    """Load a finished run's model; shapes are checked against its configuration, or the module it was trained with."""
    config, made = read_run_toml(folder)
    if module is None and "module" in made:
        raise RunError(
            f"{folder} was trained with the module {made['module']}, which is not in the package; use it from Python "
            f'and pass the module: keyfed.load_model("{folder}", module=…)'
        )
    if module is not None and "module" not in made:
        raise RunError(f'{folder} was trained with the preset "{config.model.name}"; leave module out')
    try:
        data = (folder / "model.safetensors").read_bytes()
        vocab = Vocab.from_json((folder / "vocab.json").read_text("utf-8"))
    except FileNotFoundError as e:
        raise RunError(
            f"{folder} has no {Path(str(e.filename)).name}: the run is not finished; go on with "
            f"`{resume_command(folder)}`"
        ) from None
    except UnicodeDecodeError as e:
        raise RunError(f"{folder / 'vocab.json'} is damaged: {e}") from None
    try:
        params = load(data)
    except Exception as e:  # safetensors raises its own error class for damaged files
        raise RunError(f"{folder / 'model.safetensors'} is damaged: {e}") from None
    spec = build_network(config, len(vocab), module)
    check_params(spec, params, str(folder / "model.safetensors"))
    return Trained(folder, config, str(made.get("method", config.method)), spec, params, vocab)


def resume_command(folder: Path) -> str:
    """Return the command that goes on with a run, as a shell takes it.

    Example:
      >>> resume_command(Path("my runs/a"))
      "keyfed train --resume --out 'my runs/a'"
    """
    return shlex.join(["keyfed", "train", "--resume", "--out", str(folder)])


def read_result(folder: Path) -> dict[str, Any] | None:
    """Return a finished run's result.json, or None."""
    try:
        return dict(read_json(folder / "result.json"))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as e:
        raise RunError(f"{folder / 'result.json'} is damaged: {e}") from None


def strict(value: Any) -> Any:
    """Replace numbers that JSON does not have (NaN, ∞) by None, all the way down."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: strict(v) for k, v in value.items()}
    return [strict(v) for v in value] if isinstance(value, list | tuple) else value


def append_line(path: Path, record: Mapping[str, Any]) -> int:
    """Append one JSON line, fsync, and return the file's new length."""
    return append_durably(path, json.dumps(strict(record), allow_nan=False).encode())


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    try:
        found = [parse_json(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    except (OSError, ValueError) as e:
        raise RunError(f"{path} is damaged: {e}") from None
    for number, line in enumerate(found, 1):
        if not isinstance(line, dict) or not isinstance(line.get("round"), int):
            raise RunError(f"{path} is damaged: line {number} is not that of a round")
    return found


def refuse_others(folder: Path, made: Mapping[str, Any], passed: Mapping[str, str]) -> None:
    """Refuse to go on with a run whose module or method is not the one it began with."""
    for what in ("module", "method"):
        began, now = made.get(what), passed.get(what)
        if began is None and now is not None:
            raise RunError(f"{folder} began with a {what} of the package, and was given {now}; leave {what} out")
        if began != now:
            raise RunError(
                f"{folder} began with the {what} {began} from outside the package, and was given {now or 'none'}; "
                f"go on from Python with the same one: keyfed.train(config, out, resume=True, {what}=…)"
            )
