"""One lying client of ten does not destroy the model: the quick form of `benchmarks/poisoning.py`, with a tiny model.

Without the limits the same lies do destroy it."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from keyfed.config.load import Config
from keyfed.config.schema import AGAINST, LIMIT, SUM_LIMIT, TOKEN_LIMIT, UploadConfig
from keyfed.engine.simulate import STATEFUL, limited
from keyfed.engine.sums.secure_round import aggregate_of, vector_of
from keyfed.engine.task import Finished
from keyfed.errors import SecureSumError
from keyfed.federated.methods import build_method
from keyfed.federated.public.rules import privately
from keyfed.federated.soundness import WINDOW, UploadLimits, caps_of, norm_of, seen_with
from keyfed.federated.spec import MethodSpec
from keyfed.federated.types import Caps, Params, Refusal, Seen
from keyfed.private.secagg.threshold import most_ratio, usual_threshold
from keyfed.run.folder import read_metrics, read_run_toml
from keyfed.run.loop import train
from keyfed.run.remote import train as deployed
from keyfed.run.remote.train import train_deployed
from keyfed.wire.messages import unpack
from keyfed.wire.transport import Answer, Handler, Post, deliver
from tests.listeners import Heard

from .deployed import QUICK, bits, federation, last_checkpoint, last_model, small_config, vocabulary, write_texts

CLIENTS, ROUNDS = 10, 6  # the liar begins in the third


def _benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "poisoning.py"
    spec = importlib.util.spec_from_file_location("poisoning", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


poisoning = _benchmark()
KNOWN: dict[str, dict[tuple[Any, ...], Any]] = {}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("poisoning")
    paths = write_texts(folder / "texts", CLIENTS)
    vocab, path = vocabulary(folder)
    return folder, {p.stem: p for p in paths}, vocab, path


def configured(texts, *, secure: bool, rounds: int = ROUNDS, unlimited: bool = False) -> Config:
    folder, _, _, vocab = texts
    config = small_config(folder / "texts", vocab, rounds=rounds, cohort=CLIENTS, secure=secure)
    config = replace(config, data=replace(config.data, max_tokens=120))  # everybody has more, as in `keyfed up`
    if unlimited:
        off = UploadConfig(limit=0.0, token_limit=0.0, against=0.0)
        config = replace(config, upload=off, train=replace(config.train, rollback=0.0))
    return config


def attacked(texts, tmp_path: Path, attack: str, **kind: Any) -> dict[str, Any]:
    """What became of a run; what clients computed is kept for the next one, whose first rounds are the same."""
    _, paths, vocab, _ = texts
    known = KNOWN.setdefault(json.dumps(kind, sort_keys=True), {})
    out: dict[str, Any] = poisoning.run(configured(texts, **kind), attack, vocab, paths, tmp_path / attack, known)
    return out


@pytest.fixture(scope="module")
def clean(texts, tmp_path_factory):
    """Perplexity of the run without a liar, and of the one that ends before it begins to lie."""
    out: dict[tuple[bool, int], float] = {}

    def perplexity(secure: bool, rounds: int = ROUNDS) -> float:
        if (secure, rounds) not in out:
            folder = tmp_path_factory.mktemp("clean")
            out[secure, rounds] = attacked(texts, folder, "none", secure=secure, rounds=rounds)["perplexity"]
        return out[secure, rounds]

    return perplexity


@pytest.mark.parametrize("attack", poisoning.PLAIN[1:])
def test_a_liar_of_ten_costs_a_plain_run_a_tenth_at_most(texts, tmp_path, clean, attack):
    found = attacked(texts, tmp_path, attack, secure=False)
    assert found["finite"]
    assert found["rounds"] == ROUNDS
    assert found["perplexity"] <= 1.10 * clean(False)


@pytest.mark.parametrize("attack", ["x -1000", "bound and tokens"])
def test_without_limits_the_same_liar_destroys_it(texts, tmp_path, clean, attack):
    found = attacked(texts, tmp_path, attack, secure=False, unlimited=True)
    last = found["valid"][-1]
    assert last is None or last > 10 * clean(False)  # None: no number


@pytest.mark.parametrize("attack", poisoning.ATTACKS[1:])
def test_a_liar_in_a_secure_run_leaves_the_last_good_model(texts, tmp_path, clean, attack):
    found = attacked(texts, tmp_path, attack, secure=True)
    assert found["finite"]
    assert found["perplexity"] <= 1.02 * clean(True, rounds=poisoning.FIRST)


def test_without_limits_a_liar_destroys_a_secure_run(texts, tmp_path, clean):
    found = attacked(texts, tmp_path, "x -1000", secure=True, unlimited=True, rounds=8)
    last = found["valid"][-1]
    assert last is None or last > 10 * clean(True)


# the liar's room


def test_no_round_of_a_secure_run_moves_the_model_further_than_the_limit(texts, tmp_path):
    """‖θ' − θ‖ ≤ κ · median of the steps before: FedAvg's server adds the mean upload."""
    folder, paths, vocab, _ = texts
    del folder
    models: dict[int, Params] = {}
    config = configured(texts, secure=True)
    sessions, roster = federation(tmp_path, list(paths.values()))
    liar = poisoning.Liar(tmp_path / "client-5", "client-5", paths["client-5"], "at the bound")
    sessions.handlers["client-5"] = liar

    def watched(client: str, post: Post, handler: Handler) -> Answer:
        head, tensors = unpack(post.body, 1 << 24)
        if post.kind == "train" and head["purpose"] == "upload":
            models[head["round"]] = load(tensors)
        return deliver(client, post, handler)

    sessions.fault = watched
    train_deployed(config, vocab, tmp_path / "run", sessions, roster, patience=QUICK)
    rolled = {line["round"] for line in read_metrics(tmp_path / "run") if "rolled_back" in line}
    steps: list[float] = []
    for number in range(ROUNDS - 1):
        moved = norm_of({name: models[number + 1][name] - p for name, p in models[number].items()})
        if number + 1 in rolled:
            break
        assert not steps or moved <= SUM_LIMIT * statistics.median(steps[-WINDOW:]) * (1 + 1e-6)
        if moved > 0:
            steps.append(moved)
    assert len(steps) >= poisoning.FIRST


METHOD = privately(build_method(MethodSpec("fedavg", {})))
THETA = {"a": torch.zeros(6), "b": torch.zeros(2, 3)}


@settings(deadline=None)
@given(
    st.integers(3, 40),
    st.integers(0, 2**32 - 1),
    st.floats(1e-3, 1e3),
    st.integers(-8, 8),
    st.booleans(),
)
def test_one_liar_moves_no_coordinate_of_an_opened_mean_beyond_its_room(clients, seed, size, exponent, shares):
    """|mean| ≤ 2^e · k/(k/r) = 2^e · r, whatever the liar's words are; a sum beyond that is not opened."""
    draw = np.random.default_rng(seed)
    most, ratio = 2.0 ** math.ceil(math.log2(100)), most_ratio(usual_threshold(clients))
    rule = {"most": most}
    public = {"calibrated": True, "rule": rule, "ranges": {"a": exponent, "b": exponent}, "first": {}, "outside": 0}
    names = [f"c{k}" for k in range(clients)]
    total = None
    for name in names:
        upload = {n: torch.tensor(draw.uniform(-1, 1, p.shape) * 2.0**exponent / 4).float() for n, p in THETA.items()}
        done = Finished(0, upload, 1.0, int(draw.integers(20, 100)), 20, {})
        vector = vector_of(name, done, THETA, METHOD, public, clients, ratio)
        total = vector if total is None else total + vector
    assert total is not None
    words = np.rint(draw.uniform(-1, 1, 12) * size * 2.0**25).astype(np.int64).astype(np.uint32)
    lied = total.copy()
    lied[:12] += words
    if shares:  # it also takes weight away from the others
        lied[12:14] -= np.uint32(draw.integers(0, 2**26))
    try:
        aggregate = aggregate_of(lied, THETA, METHOD, public, clients, names, ratio)
    except SecureSumError:
        return
    for mean in aggregate.mean().values():
        assert float(mean.abs().max()) <= 2.0**exponent * ratio * (1 + 1e-3)


# limits


@given(
    st.lists(st.floats(0.1, 10), min_size=9, max_size=30),
    st.floats(0, 1e12),
    st.floats(1, 8),
)
def test_one_claim_moves_a_cap_to_a_neighbours_at_most(honest, claim, factor):
    with_liar = caps_of(UploadLimits(factor, factor), seen_with(Seen(), [*honest, claim], [*honest, claim]))
    ordered = sorted(honest)
    middle = len(ordered) // 2
    least, most = ordered[max(0, middle - 1)], ordered[min(len(ordered) - 1, middle + 1)]
    assert with_liar.norm is not None
    assert with_liar.tokens is not None
    assert factor * least <= with_liar.norm * (1 + 1e-9)
    assert with_liar.norm <= factor * most * (1 + 1e-9)
    assert with_liar.tokens <= math.ceil(factor * most)


@given(st.floats(1e-3, 1e6), st.floats(1e-2, 1e2))
def test_a_shortened_upload_is_as_long_as_its_cap_and_points_where_it_did(length, cap):
    method = build_method(MethodSpec("fedatt", {}))
    upload = {"a": torch.full((6,), length), "b": torch.full((2, 3), -length)}
    found = limited("liar", Finished(0, upload, 1.0, 5, 5, {"a": 1.0, "b": 1.0}), THETA, method, Caps(cap))
    assert not isinstance(found, Refusal)
    norm = norm_of(found.done.upload)
    assert norm == pytest.approx(min(cap, norm_of(upload)), rel=1e-5)
    assert found.shortened == (found.norm > cap)
    assert (found.done.upload["b"] < 0).all()
    if found.shortened:  # what it weighs by its size is measured again
        assert max(found.done.distance.values()) <= cap * (1 + 1e-5)


@pytest.mark.parametrize(("length", "refused"), [(1.0, False), (STATEFUL * 0.99, False), (STATEFUL * 1.01, True)])
def test_a_long_upload_of_a_client_that_keeps_state_is_refused_not_shortened(length, refused):
    method = build_method(MethodSpec("fedadmm", {}))
    upload = {"a": torch.tensor([length, 0, 0, 0, 0, 0]), "b": torch.zeros(2, 3)}
    done = Finished(0, upload, 1.0, 5, 5, {})
    found = limited("liar", done, THETA, method, Caps(1.0))
    assert isinstance(found, Refusal) == refused
    if not isinstance(found, Refusal):
        assert found == (done, pytest.approx(length), False)
    claiming = limited("liar", done._replace(weight=2.0**40), THETA, method, Caps(100.0, tokens=50))
    assert claiming == Refusal("liar", "does not fit")


@pytest.mark.parametrize("method", ["fedavg", "fedatt", "fedadmm"])  # a mean, distances measured again, state
def test_a_federation_with_limits_equals_the_simulation_with_the_same_limits(tmp_path, method):
    paths = write_texts(tmp_path / "texts", 5)
    vocab, path = vocabulary(tmp_path)
    config = small_config(tmp_path / "texts", path, method)
    config = replace(config, upload=UploadConfig(limit=1.0, token_limit=1.0))
    result = train(config, tmp_path / "simulated")
    transport, roster = federation(tmp_path / "clients", paths)
    real = train_deployed(config, vocab, tmp_path / "deployed", transport, roster, patience=QUICK)
    assert bits(last_model(tmp_path / "simulated")) == bits(last_model(tmp_path / "deployed"))
    assert result["shortened"] == real["shortened"]
    if method == "fedadmm":  # whose clients keep state: no upload here is beyond four times the limit
        return
    assert result["shortened"] > 0  # half of the clients are above the median
    free = replace(config, upload=UploadConfig())
    train(free, tmp_path / "free")
    assert bits(last_model(tmp_path / "free")) != bits(last_model(tmp_path / "simulated"))


def test_limits_are_the_same_after_every_resume(tmp_path):
    write_texts(tmp_path / "texts", 5)
    _, path = vocabulary(tmp_path)
    config = small_config(tmp_path / "texts", path, rounds=4)
    config = replace(config, upload=UploadConfig(limit=1.0, token_limit=1.0))
    train(config, tmp_path / "whole")

    for after in (1, 2, 3):
        run = tmp_path / f"stopped-{after}"
        with pytest.raises(KeyboardInterrupt):
            train(config, run, listener=Heard(after))
        saved = last_checkpoint(run)
        assert len(saved.state.seen.norms) == len(saved.state.seen.tokens) == after
        train(config, run, resume=True)
        assert bits(last_model(run)) == bits(last_model(tmp_path / "whole"))


def test_a_federation_writes_its_limits_down_and_an_older_one_goes_on_without(texts, tmp_path, monkeypatch):
    _, paths, vocab, _ = texts
    few = list(paths.values())[:3]
    config = replace(
        configured(texts, secure=False, rounds=2),
        train=replace(configured(texts, secure=False).train, rounds=2, cohort=3),
    )
    transport, roster = federation(tmp_path / "c", few)

    with pytest.raises(KeyboardInterrupt):
        train_deployed(config, vocab, tmp_path / "new", transport, roster, Heard(1), patience=QUICK)
    written = read_run_toml(tmp_path / "new")[0].upload
    assert (written.limit, written.token_limit, written.against) == (LIMIT, TOKEN_LIMIT, AGAINST)
    with monkeypatch.context() as older:
        older.setattr(deployed, "with_limits", lambda config, begun=None: config)
        with pytest.raises(KeyboardInterrupt):
            train_deployed(config, vocab, tmp_path / "run", transport, roster, Heard(1), patience=QUICK)
    toml = tmp_path / "run" / "run.toml"
    lines = toml.read_text("utf-8").splitlines()
    toml.write_text(
        "\n".join(x for x in lines if not x.startswith(("limit", "token_limit", "against", "rollback"))) + "\n"
    )
    result = train_deployed(config, vocab, tmp_path / "run", transport, roster, patience=QUICK, resume=True)
    assert result["rounds"] == 2


def test_claimed_tokens_count_up_to_the_cap(texts, tmp_path):
    """2^40 claimed tokens and a million are the same to a run."""
    _, paths, vocab, _ = texts
    config = configured(texts, secure=False, rounds=3)
    models = []
    for name, tokens in (("many", 1 << 40), ("million", 10**6)):

        class Claiming(poisoning.LyingLearner):
            def solve(self, theta: Params, round: int, turn: Any, claim: int = tokens) -> Finished:
                done = self._honest.solve(theta, round, turn)
                return done._replace(tokens=claim) if round >= 2 else done

        transport, roster = federation(tmp_path / name, list(paths.values()))
        session = transport.handlers["client-5"]
        honest = session._make  # type: ignore[attr-defined]
        session._make = lambda about, honest=honest, wrap=Claiming: wrap(honest(about), "", None)  # type: ignore[attr-defined]
        train_deployed(config, vocab, tmp_path / name / "run", transport, roster, patience=QUICK)
        models.append(bits(last_model(tmp_path / name / "run")))
    assert models[0] == models[1]
