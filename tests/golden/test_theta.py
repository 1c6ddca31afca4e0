"""θ after two rounds is what it was: every method and many variants, plain, secure, private and both.

Outcomes are frozen in theta.json. On a machine like the one that made the file (torch, its kernels, processor) hashes
must be equal bit for bit. On any other, norm, projections and test score must agree within `runs.TOLERANCE`. Where a
change of results is intended: `python tests/golden/make.py`.
"""

from __future__ import annotations

import pytest

import keyfed
from tests.examples import DEEP

from . import runs

FROZEN = runs.read_theta()
CASES = runs.cases()


def covering() -> list[str]:
    """All refusals, and every method in every mode; a variant plain and in one more mode, in turns.

    What comes before the cohort is drawn: plain or both, in turns. KEYFED_EXAMPLES=deep compares all.
    """
    hidden = [mode for mode in runs.MODES if mode != "plain"]
    taken = {f"{method}/{mode}" for method in keyfed.METHODS for mode in runs.MODES}
    for k, name in enumerate(runs.VARIANTS):
        taken |= {f"{name}/plain", f"{name}/{hidden[k % len(hidden)]}"}
    taken |= {f"{name}/{('plain', 'both')[k % 2]}" for k, name in enumerate(runs.PREPARED)}
    return [name for name in CASES if DEEP or name in taken or "refused" in FROZEN[name]]


SAME_MACHINE = FROZEN[runs.MACHINE] == runs.machine()
COMPARED = "bit for bit" if SAME_MACHINE else f"within {runs.TOLERANCE:g}: theta.json is of {FROZEN[runs.MACHINE]}"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> runs.Bench:
    return runs.Bench.make(tmp_path_factory.mktemp("golden") / "bench")


def test_the_frozen_file_has_every_method_in_every_mode_and_nothing_else():
    assert set(FROZEN) - {runs.MACHINE, runs.PERSONAL} == {*CASES, *runs.federations()}
    assert {f"{method}/{mode}" for method in keyfed.METHODS for mode in runs.MODES} <= set(FROZEN)


@pytest.mark.parametrize("name", covering())
def test_theta_or_the_refusal_is_as_frozen(bench, name):
    wrong = runs.differences(bench.outcome(name, CASES[name]), FROZEN[name], bits=SAME_MACHINE)
    assert not wrong, f"{name}: {'; '.join(wrong)} (compared {COMPARED})"


@pytest.mark.parametrize("name", runs.federations())
def test_theta_of_a_federation_is_as_frozen(bench, name):
    """The messages, sessions and sums of real clients; the noise alone is drawn from a seed here."""
    wrong = runs.differences(bench.federated(name), FROZEN[name], bits=SAME_MACHINE)
    assert not wrong, f"{name}: {'; '.join(wrong)} (compared {COMPARED})"


def test_a_change_in_the_last_digits_is_seen_bit_for_bit_and_a_larger_one_by_the_projections(bench):
    name = "fedavg/plain"
    bench.outcome(name, CASES[name], bench.folder / "again")
    params = keyfed.load_model(bench.folder / "again").params
    frozen = {**runs.digest(params), "nats": 1.0}
    for size, seen in ((1e-7, False), (1e-5, True)):
        moved = {**runs.digest({layer: p * (1 + size) for layer, p in params.items()}), "nats": 1.0}
        assert runs.differences(moved, frozen, bits=True)
        assert bool(runs.differences(moved, frozen, bits=False)) == seen


def test_variants_do_something():
    """A variant whose plain run equals that of the method without it would freeze nothing."""
    usual = {FROZEN[f"{method}/plain"].get("sha256") for method in keyfed.METHODS}
    same = {name for name in (*runs.PREPARED, *runs.VARIANTS) if FROZEN[f"{name}/plain"].get("sha256") in usual}
    # No score reaches the bound; curves are only written down; to weigh by tokens is fedavg's own way.
    assert same == {"fedatt-bound", "curves", "mediator-tokens"}


def test_personalisation_is_as_frozen(bench):
    assert bench.personal() == pytest.approx(FROZEN[runs.PERSONAL], rel=runs.TOLERANCE)
