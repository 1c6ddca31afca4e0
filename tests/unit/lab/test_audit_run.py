"""A whole audit of a tiny run, and what contradicts a claim."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keyfed.config.load import Config, apply_settings
from keyfed.errors import RunError
from keyfed.federated.methods import fedavg
from keyfed.federated.round import initial_state
from keyfed.lab.audit.audit import _contradicted, _verdict, audit_run, contradictions
from keyfed.lab.audit.canaries import Canary, times_called
from keyfed.lab.audit.lint import Finding, PrivacyClaim, lint, read_claim
from keyfed.lab.audit.retrain import canary_seeds, how_many, judge, open_subject, picked, replay, sent_by
from keyfed.private.dp.accounting import Release
from keyfed.private.dp.ledger import HEAD, LEDGER, Terms, open_ledger
from keyfed.private.dp.noise import norm_of
from keyfed.run.console import Silent
from keyfed.run.loop import train
from tests.listeners import Heard

pytestmark = pytest.mark.usefixtures("losses_on_a_coarse_grid")
TINY = [
    "model.embed=8", "model.hidden=12", "data.vocab=80", "data.window=8", "train.cohort=4", "train.workers=1",
    "train.rounds=3", "train.valid_tokens=300", "train.baselines=false", "data.unseen=0.3",
]  # fmt: skip


@pytest.fixture(autouse=True)
def pictures_are_painted_but_not_rendered(monkeypatch):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    monkeypatch.setattr(FigureCanvasAgg, "print_png", lambda canvas, out, **options: out.write(b"PNG"))


@pytest.fixture(autouse=True)
def masks_repeat(monkeypatch):
    """A mask of the system's is another one each time; one test in ten thousand would find it better than chance."""
    draw = np.random.default_rng(1)
    monkeypatch.setattr("keyfed.lab.audit.inference.urandom", lambda size: draw.bytes(size))


def write_corpus(folder: Path) -> Path:
    """Twenty writers with favourite words of their own among seventy."""
    folder.mkdir()
    for k in range(20):
        draw = random.Random(k)
        own = draw.sample([f"word{n}" for n in range(70)], 25)
        lines = [" ".join(draw.choice(own) for _ in range(8)) for _ in range(60)]
        (folder / f"writer{k:02d}.txt").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    corpus = write_corpus(tmp_path_factory.mktemp("text") / "corpus")
    return apply_settings(Config(), [f"data.name={corpus}", *TINY])


@pytest.fixture(scope="module")
def sound(config, tmp_path_factory) -> Path:
    """A private run as it should be; tests only add their audits to it."""
    run = tmp_path_factory.mktemp("sound") / "run"
    train(apply_settings(config, PRIVATE), run)
    return run


def test_a_run_without_privacy_is_attacked_in_every_way_and_claims_nothing(config, tmp_path):
    run = tmp_path / "run"
    train(config, run)
    before = {name: (run / name).read_bytes() for name in ("model.safetensors", "metrics.jsonl", "result.json")}
    heard = Heard()
    found = audit_run(run, listener=heard)
    assert (found["verdict"], found["contradicted"], found["contradictions"]) == ("NONE", False, [])
    assert {name: (run / name).read_bytes() for name in before} == before
    grid = {(cell["users"], cell["copies"]): cell for cell in found["canaries"]["cells"]}
    assert set(grid) == {(u, e) for u in (1, 4) for e in (1, 14, 200)}  # 14 clients are trained on: no cell of 16
    assert grid[4, 200]["median"] > 6  # a third of what four of fourteen clients say
    assert found["canaries"]["controls"]["behave"]
    assert found["one_shot"] is None
    assert set(found["membership"]) == {f"{who}, {how}" for who in ("text", "clients")
                                        for how in ("loss", "fall of the loss")}  # fmt: skip
    views = found["leaks"]["views"]
    assert views["raw"]["recovered"] > 0.9 > 0.7 > views["raw"]["chance"]
    assert not views["masked"]["better_than_chance"]
    assert not views["noised"]["better_than_chance"]
    assert json.loads((run / "audit.json").read_text("utf-8")) == found
    page = (run / "audit.md").read_text("utf-8")
    assert "NONE. Nothing is guaranteed." in page
    assert "metrics.jsonl has figures of clients in clear" in page
    assert {p.name for p in (run / "plots").glob("audit-*.png")} == {
        "audit-canaries.png", "audit-controls.png", "audit-leaks.png",
    }  # fmt: skip
    assert any("canaries" in line for line in heard.lines)
    assert audit_run(run)["canaries"] == found["canaries"]  # again: nothing is trained anew, and nothing differs


PRIVATE = [
    "participation.sampling=poisson", "privacy.noise=1", "privacy.clip=5", "privacy.quantile=none",
    "privacy.twin=false", "train.rounds=5",
]  # fmt: skip


def test_a_sound_private_run_passes_and_one_whose_noise_is_missing_is_flagged(sound, monkeypatch):
    run, sound = sound, audit_run(sound)
    assert (sound["verdict"], sound["contradictions"]) == ("SIMULATED", [])
    assert sound["one_shot"]["certain"] <= sound["claim"]["epsilon"]
    assert sound["one_shot"]["floor"] < sound["claim"]["epsilon"]
    assert not sound["leaks"]["demonstration"]
    assert not sound["leaks"]["views"]["noised"]["better_than_chance"]
    page = (run / "audit.md").read_text("utf-8")
    assert "consistent with the claim" in page
    assert "of this run's own clients, but its noise derives from a seed" in page
    assert "imagined fleet" not in page
    assert "to rounding" in page
    assert sound["one_shot"]["power"]
    assert 0.5 < sound["one_shot"]["calls"] < 3  # 5 rounds at a rate of 4/14
    cells = {(c["users"], c["copies"]): c["calls"] for c in sound["canaries"]["cells"]}
    assert cells[4, 1] > 0
    assert "times called" in page
    assert "Nothing that was measured contradicts the claim" in page
    # The same ledger, and a mechanism that forgets to add the noise it books.
    monkeypatch.setattr(
        "keyfed.run.privacy.derived", lambda *purpose: lambda name, shape: torch.zeros(shape, dtype=torch.float64)
    )
    broken = audit_run(run)
    assert broken["contradicted"]
    assert any(why.startswith("replay:") for why in broken["contradictions"])
    assert broken["contradictions"][0].startswith("one-shot:")
    assert broken["one_shot"]["certain"] > broken["claim"]["epsilon"]
    assert "A claim is contradicted by what was measured" in (run / "audit.md").read_text("utf-8")


@pytest.mark.parametrize("more", [(), ("privacy.mechanism=tree", "participation.sampling=uniform")], ids=["", "tree"])
def test_a_run_that_was_trained_without_the_noise_it_booked_is_contradicted_by_sound_code(
    config, sound, tmp_path, monkeypatch, more
):
    private = apply_settings(config, [*PRIVATE, *more])
    quiet = tmp_path / "quiet"
    if more:
        sound = tmp_path / "sound"
        train(private, sound)
    with monkeypatch.context() as patched:
        for name in ("derived", "derived_tree"):
            patched.setattr(
                f"keyfed.run.privacy.{name}", lambda *purpose: lambda name, shape: torch.zeros(shape).double()
            )
        train(private, quiet)
    found = replay_of(sound)
    assert (found["round"], found["contradicted"]) == (5, False)
    assert found["difference"] < 1e-4
    broken = replay_of(quiet)
    assert broken["contradicted"]
    assert broken["difference"] == pytest.approx(1, abs=0.05)  # all that the noise does is missing
    (why,) = contradictions(read_claim(quiet, promised=True), [], {"planted": []}, None, None, broken)
    assert why.startswith("replay: round 5")


def test_canaries_are_clipped_by_the_sum_that_clips_everybody(monkeypatch):
    like = {"a": torch.zeros(30), "b": torch.zeros(10, 2)}
    one = sent_by([5], like, 1.5)
    assert float(norm_of(one.values())) == pytest.approx(1.5, rel=1e-6)
    monkeypatch.setattr("keyfed.engine.sums.codec.clip_factor", lambda norm, clip: 1.0)
    assert float(norm_of(sent_by([5], like, 1.5).values())) == pytest.approx(15, rel=1e-6)  # a missing clip shows
    assert sum(float(t.abs().sum()) for t in sent_by([], like, 1.5).values()) == 0


def test_an_attack_on_canaries_that_hardly_ever_came_has_no_power():
    before, after = {"w": torch.zeros(50)}, {"w": torch.ones(50)}
    often, never = (judge(before, after, canary_seeds(1, 20), 1e-5, 1.0, calls) for calls in (3.0, 0.02))
    assert (often["power"], never["power"]) == (True, False)
    found = {"verdict": "SIMULATED", "contradicted": False, "one_shot": never}
    assert "no power" in _contradicted(found)
    assert "no power" not in _contradicted({**found, "one_shot": often})
    assert _verdict({**never, "contradicted": False}).startswith("no power")
    canaries = [Canary((5, 6, 7, 8, 9), (0, 2), 1), Canary((5, 6, 7, 8, 9), (3,), 1)]
    assert times_called(canaries, [[0, 1], [0, 2], [1]]) == [3, 0]


def replay_of(run: Path) -> dict[str, Any]:
    found = replay(open_subject(run), Silent())
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("checkpoints", "words"), [("train.checkpoint_every=5", "no two checkpoints"), ("upload.keep=0.5", "keep state")]
)
def test_what_cannot_be_replayed_is_said(config, tmp_path, checkpoints, words):
    train(apply_settings(config, [*PRIVATE, checkpoints]), tmp_path / "run")
    found = replay_of(tmp_path / "run")
    assert words in found["skipped"]
    assert contradictions(read_claim(tmp_path / "run", promised=True), [], {"planted": []}, None, None, found) == []


@pytest.mark.parametrize(
    ("dimensions", "rate", "rounds", "count"),
    [(220_000, 0.01, 40, 1000), (1374, 0.2857, 5, 96), (1000, 1.0, 5, 50), (4_000_000, 0.1, 20, 67)],
    ids=["as many as one wants", "crowded", "fewest", "as many as there is time for"],
)
def test_canary_clients_are_many_but_neither_crowded_nor_slow(dimensions, rate, rounds, count):
    assert how_many(dimensions, rate, rounds) == count


def test_canaries_of_a_tree_take_turns_and_others_come_by_chance():
    turns = [picked(replace(TERMS, mechanism="tree", gap=3), 10, 1, n) for n in range(3)]
    assert sorted(k for turn in turns for k in turn) == list(range(10))
    drawn = [picked(TERMS, 1000, 1, n) for n in range(5)]
    assert all(60 < len(found) < 140 for found in drawn)
    assert drawn[0] != drawn[1]
    assert drawn == [picked(TERMS, 1000, 1, n) for n in range(5)]


def test_a_folder_without_a_finished_run_is_said_in_one_line(tmp_path):
    with pytest.raises(RunError, match=r"not a run folder"):
        audit_run(tmp_path)


# What contradicts a claim

TERMS = Terms(
    delta=1e-6, population=1000, clients=1000, cohort=100, called=100, z=1.0, mechanism="gaussian",
    sensitivity="One client moves the sum by at most S.", randomness="system",
)  # fmt: skip
QUIET = [{"round": n, "loss": None, "contributors": None, "refused": {}, "lost": {}} for n in (1, 2, 3)]
POISSON = apply_settings(Config(), ["participation.sampling=poisson"])


def ledger(folder: Path, rounds: int = 3, terms: Terms = TERMS) -> Path:
    folder.mkdir()
    opened = open_ledger(folder, terms)
    for n in range(rounds):
        opened.book(Release(terms.z, terms.rate), "update", n)
    return folder


def levels(findings: list[Finding]) -> dict[str, str]:
    return {f.check: f.level for f in findings}


def test_a_whole_ledger_and_a_quiet_log_pass(tmp_path):
    claim = read_claim(ledger(tmp_path / "run"), promised=True)
    assert claim.verdict == "GUARANTEE"
    assert claim.epsilon is not None
    assert 0 < claim.epsilon < 10
    found = lint(POISSON, fedavg(), QUIET, claim, 1000)
    assert set(levels(found).values()) == {"ok"}
    assert contradictions(claim, found, {"planted": []}, None, None) == []


def test_a_ledger_with_fewer_releases_than_rounds_is_flagged(tmp_path):
    found = lint(POISSON, fedavg(), QUIET, read_claim(ledger(tmp_path / "run", rounds=2), promised=True), 1000)
    assert levels(found)["ledger"] == "broken"


def test_a_ledger_that_was_changed_claims_nothing_and_is_flagged(tmp_path):
    run = ledger(tmp_path / "run")
    path = run / LEDGER
    path.write_bytes(path.read_bytes().replace(b'"z": 1.0', b'"z": 9.0'))
    claim = read_claim(run, promised=True)
    assert (claim.verdict, claim.epsilon) == ("NONE", None)
    found = lint(POISSON, fedavg(), QUIET, claim, 1000)
    assert levels(found)["ledger"] == "broken"
    assert contradictions(claim, found, {"planted": []}, None, None)


def test_a_ledger_that_was_rolled_back_is_flagged(tmp_path):
    run = ledger(tmp_path / "run")
    lines = (run / LEDGER).read_bytes().splitlines(keepends=True)
    (run / LEDGER).write_bytes(b"".join(lines[:-1]))
    assert read_claim(run, promised=True).problem is not None
    (run / HEAD).unlink()
    assert read_claim(run, promised=True).problem is not None


def test_a_ledger_that_is_older_than_the_metrics_or_gone_is_flagged(tmp_path):
    run = ledger(tmp_path / "run")
    hashes = [json.loads(line)["hash"] for line in (run / LEDGER).read_text("utf-8").splitlines()]
    row = {"round": 1, "privacy": {"ledger": {"rows": 2, "head": hashes[1]}}}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
    assert read_claim(run, promised=True).problem is None
    row["privacy"] = {"ledger": {"rows": 9, "head": hashes[1]}}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
    assert "round 1 was released" in (read_claim(run, promised=True).problem or "")
    (run / LEDGER).unlink()
    assert read_claim(run, promised=True).problem is not None
    assert read_claim(run, promised=False).problem is None


CLAIM = PrivacyClaim("GUARANTEE", 2.0, 1e-6, 3, 3, TERMS)


@pytest.mark.parametrize(
    ("check", "config", "records", "claim"),
    [
        ("metrics", POISSON, [{**r, "loss": 4.2} for r in QUIET], CLAIM),
        ("metrics", POISSON, [{**r, "contributors": ["ann"]} for r in QUIET], CLAIM),
        ("sampling", Config(), QUIET, CLAIM),
        ("delta", POISSON, QUIET, replace(CLAIM, terms=replace(TERMS, delta=1e-3))),
        ("population", POISSON, QUIET, replace(CLAIM, terms=replace(TERMS, clients=999))),
        ("FedAtt's noise", apply_settings(POISSON, ["method.noise=0.05"]), QUIET, CLAIM),
    ],
    ids=["loss in clear", "names in clear", "not poisson", "delta", "population", "fedatt noise"],
)
def test_what_breaks_a_claim_is_named(check, config, records, claim):
    assert levels(lint(config, fedavg(), records, claim, 1000))[check] == "broken"


@pytest.mark.parametrize(
    "shown",
    [
        {"clients_perplexity": {"seen": [3.0]}},
        {"spread": {"worst": 9.0}},
        {"oov_rate": {"train": 0.1, "test": 0.2}},
        {"start": {"from": "run", "matched": 9, "tokens": 0.5}},
        {"start": {"from": "random", "vectors": {"matched": 9, "tokens": 0.5}}},
    ],
    ids=["clients", "spread", "training text", "carried tokens", "tokens with vectors"],
)
def test_figures_of_clients_in_the_result_break_a_claim(shown):
    quiet = {"clients_perplexity": None, "spread": None, "oov_rate": {"test": 0.2}, "lost": {}}
    quiet["start"] = {"from": "run", "matched": 9, "tokens": None, "vectors": {"matched": 9, "tokens": None}}
    assert levels(lint(POISSON, fedavg(), QUIET, CLAIM, 1000, quiet))["result"] == "ok"
    assert levels(lint(POISSON, fedavg(), QUIET, CLAIM, 1000, {**quiet, **shown}))["result"] == "broken"
    assert levels(lint(POISSON, fedavg(), QUIET, PrivacyClaim("NONE"), 1000, {**quiet, **shown}))["result"] == "note"


def test_noise_of_fedatt_without_a_ledger_is_only_warned_about():
    config = apply_settings(Config(), ["method.noise=0.05"])
    found = lint(config, fedavg(), [], PrivacyClaim("NONE"), 10)
    assert levels(found)["FedAtt's noise"] == "warning"
    assert "ε is ∞" in next(f.text for f in found if f.check == "FedAtt's noise")


def test_seeds_in_the_run_are_warned_about(tmp_path):
    claim = read_claim(ledger(tmp_path / "run", terms=replace(TERMS, randomness="derived")), promised=True)
    assert claim.verdict == "SIMULATED"
    assert levels(lint(POISSON, fedavg(), QUIET, claim, 1000))["randomness"] == "warning"


def test_attacks_contradict_a_guarantee_and_not_a_simulation():
    tight = replace(CLAIM, epsilon=0.5)
    exposed = {"planted": [{"users": 1, "copies": 200, "exposure": 14.0}]}
    leak = {"demonstration": False, "views": {"noised": {"recovered": 0.95, "better_than_chance": True}}}
    assert len(contradictions(tight, [], exposed, None, leak)) == 2
    assert contradictions(replace(tight, verdict="SIMULATED"), [], exposed, None, leak) == []
    assert contradictions(replace(tight, epsilon=20.0), [], exposed, None, None) == []  # ε of 20 allows it
    measured = {"contradicted": True, "canaries": 500, "certain": 9.0}
    assert len(contradictions(replace(tight, verdict="SIMULATED"), [], exposed, measured, None)) == 1


def test_a_run_whose_step_was_halved_is_replayed_with_that_step(config, tmp_path, monkeypatch):
    real = initial_state
    monkeypatch.setattr("keyfed.run.loop.initial_state", lambda *given: replace(real(*given), halvings=3))
    train(apply_settings(config, PRIVATE), tmp_path / "run")
    found = replay_of(tmp_path / "run")
    assert not found["contradicted"]
    assert found["difference"] < 1e-3
