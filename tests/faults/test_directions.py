"""Uploads that point against the others of their round are left out of plain sums, and honest ones are not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from keyfed.config.load import check, method_spec
from keyfed.config.schema import AGAINST, SecureConfig, UploadConfig
from keyfed.errors import ConfigError
from keyfed.federated import soundness
from keyfed.federated.methods import build_method
from keyfed.federated.soundness import CLEARLY, LEAST_COMPARED, against_others, cosines_of, opposed
from keyfed.federated.types import Caps, Params
from keyfed.reports import run_page as report
from keyfed.run import ranks
from keyfed.run.folder import read_metrics
from keyfed.run.loop import train
from keyfed.run.plan import Choice
from keyfed.run.remote.train import train_deployed
from tests.listeners import Heard

from .deployed import QUICK, federation, last_model, small_config, vocabulary, write_texts
from .test_poisoning import bits, poisoning

NUMBERS = 400  # of an upload here


def of(*vectors: torch.Tensor) -> list[Params]:
    """Uploads of two layers."""
    return [{"a": v[: len(v) // 3], "b": v[len(v) // 3 :].reshape(1, -1)} for v in vectors]


def left_out(vectors: Sequence[torch.Tensor], share: float = AGAINST) -> list[int]:
    return opposed(cosines_of(of(*vectors)), share)


def cohort(seed: int, clients: int, noise: float) -> list[torch.Tensor]:
    """Vectors with a common part of norm 1 and one of their own of about this norm."""
    draw = torch.Generator().manual_seed(seed)
    own = torch.randn(clients + 1, NUMBERS, generator=draw) / math.sqrt(NUMBERS)
    return list(own[0] + noise * own[1:])


SEEDS, NOISE = st.integers(0, 2**32 - 1), st.floats(0, 10)


@given(SEEDS, st.integers(1, 12), NOISE, st.data())
def test_who_is_left_out_does_not_depend_on_the_order(seed, clients, noise, data):
    vectors = cohort(seed, clients, noise)
    signs = data.draw(st.lists(st.sampled_from([-1.0, 1.0]), min_size=clients, max_size=clients))
    vectors = [sign * v for sign, v in zip(signs, vectors, strict=True)]
    order = data.draw(st.permutations(range(clients)))
    assert {order[k] for k in left_out([vectors[k] for k in order])} == set(left_out(vectors))


@given(SEEDS, st.integers(1, 12), NOISE, st.data())
def test_lengths_do_not_matter(seed, clients, noise, data):
    vectors = cohort(seed, clients, noise)
    vectors[0] = -vectors[0]
    lengths = data.draw(st.lists(st.integers(-30, 19), min_size=clients, max_size=clients))
    longer = [v * 2.0**e for e, v in zip(lengths, vectors, strict=True)]
    assert left_out(longer) == left_out(vectors)


@given(SEEDS, st.integers(1, 14), st.floats(0, 1), st.lists(st.booleans(), min_size=14, max_size=14))
def test_those_left_out_are_a_minority_and_the_others_agree(seed, clients, share, lying):
    vectors = [-v if lies else v for v, lies in zip(cohort(seed, clients, 1.0), lying, strict=False)]
    out = left_out(vectors, share)
    assert len(set(out)) == len(out)
    assert not out or (clients >= LEAST_COMPARED and 2 * len(out) < clients)


@given(SEEDS, st.integers(3, 12), st.lists(st.floats(1e-3, 1e3), min_size=12, max_size=12))
def test_uploads_of_one_direction_are_never_left_out_whatever_one_client_sends(seed, honest, lengths):
    same, liar = cohort(seed, 2, 3.0)
    vectors = [length * same for length in lengths[:honest]]
    assert left_out(vectors) == []
    assert set(left_out([*vectors, liar])) <= {honest}
    assert left_out([*vectors, -same]) == [honest]


@given(SEEDS, st.integers(6, 12), st.integers(1, 2), st.floats(0, 2))
def test_negated_uploads_are_left_out_and_no_honest_one_beside_them(seed, honest, liars, noise):
    """Honest ones agree with a cosine of 1/(1 + noise²) in twos; liars negate what they trained."""
    assume(liars * 3 <= honest)
    vectors = cohort(seed, honest + liars, noise)
    vectors = [-v if k < liars else v for k, v in enumerate(vectors)]
    assert set(left_out(vectors)) == set(range(liars))


@given(SEEDS, st.integers(4, 12), st.floats(0, 1.5))
def test_a_liar_cannot_have_a_certain_client_left_out_by_negating_its_upload(seed, honest, noise):
    vectors = cohort(seed, honest, noise)
    assert set(left_out([*vectors, -vectors[1]])) <= {honest}


@pytest.mark.parametrize("clients", [4, 5, 6, 10, 20])
@pytest.mark.parametrize("common", [0.02, 0.06, 0.1, 0.25])
def test_a_liar_who_knows_an_upload_cannot_have_its_client_left_out(clients, common, monkeypatch):
    """It sends the sum of the others less a multiple of the victim: the sum then points against the victim, which
    agrees with every honest client."""
    monkeypatch.setitem(globals(), "NUMBERS", 40_000)
    for seed in range(3):
        honest = cohort(seed, clients - 1, math.sqrt(1 / common - 1))
        assert (cosines_of(of(*honest))[0] > 0).all()
        others = sum(v / v.norm() for v in honest[1:])
        for strength in (1.0, 2.0, 4.0, 8.0):
            liar = others - strength * honest[0] / honest[0].norm()
            assert 0 not in left_out([*honest, liar / liar.norm()])


def test_by_the_sum_alone_it_could(monkeypatch):
    """The mutant: an upload is left out by the sum of the others, whatever they are one by one."""
    monkeypatch.setitem(globals(), "NUMBERS", 40_000)
    honest = cohort(0, 3, math.sqrt(1 / 0.06 - 1))
    liar = sum(v / v.norm() for v in honest[1:]) - 4 * honest[0] / honest[0].norm()
    vectors = [*honest, liar]
    assert 0 not in left_out(vectors)
    monkeypatch.setattr(soundness.statistics, "median", lambda numbers: -1.0)
    assert 0 in left_out(vectors)


@pytest.mark.parametrize("seed", range(8))
def test_uploads_that_have_nothing_in_common_are_all_kept(seed):
    draw = torch.Generator().manual_seed(seed)
    assert left_out(list(torch.randn(10, 20_000, generator=draw))) == []


@given(st.floats(-1, 1), st.floats(0.01, 1), st.integers(4, 10))
def test_the_threshold_is_a_share_of_the_agreement_of_the_others(cosine, share, others):
    """Beside clients that agree entirely an upload may have a cosine of −max(ε, γ) with them."""
    most = max(CLEARLY, share)
    assume(abs(cosine + most) > 1e-4)
    honest, liar = torch.zeros(2, 6, dtype=torch.float64)
    honest[1], liar[1], liar[4] = 1.0, cosine, math.sqrt(1 - cosine**2)
    assert left_out([liar, *[honest] * others], share) == [0] * (cosine < -most)


def test_the_threshold_falls_with_the_agreement_of_the_others():
    """Clients that agree by 0.2 in twos: half of the agreement of a negated one is too much, a tenth is not."""
    common, *own = torch.eye(9, dtype=torch.float64)
    honest = [common + 2 * v for v in own[:7]]
    others = sum(honest)
    agreement = soundness._agreement(cosines_of(of(*honest)), range(7))[0]
    direction = others / others.norm()
    for part, out in ((0.5, [7]), (0.1, [])):
        liar = -part * agreement * direction + math.sqrt(1 - (part * agreement) ** 2) * own[7]
        assert left_out([*honest, liar]) == out


def test_two_camps_of_one_size_are_both_kept():
    camp = torch.ones(NUMBERS)
    assert left_out([camp, camp, camp, -camp, -camp, -camp]) == []
    assert left_out([camp, camp, camp, camp, -camp, -camp]) in ([4, 5], [5, 4])


def test_a_pair_of_opposites_among_clients_that_share_nothing_is_kept():
    """Which of the two is against the others cannot be told: the others have no direction."""
    *others, one = torch.eye(7)
    assert left_out([*others, one, -one]) == []


def test_an_upload_of_zeros_is_kept():
    assert left_out([torch.zeros(NUMBERS), *cohort(1, 6, 0.5)]) == []
    assert left_out([torch.zeros(NUMBERS)] * 6) == []


@pytest.mark.parametrize("piece", [1, 7, 1 << 16])
def test_cosines_do_not_depend_on_the_pieces_in_which_they_are_computed(monkeypatch, piece):
    vectors = cohort(3, 6, 1.0)
    monkeypatch.setattr(soundness, "PIECE", piece)
    units = torch.stack([v.double() / v.double().norm() for v in vectors])
    torch.testing.assert_close(cosines_of(of(*vectors)), units @ units.T, rtol=1e-12, atol=1e-12)


def test_nothing_is_compared_without_the_option():
    uploads = dict(zip("abcdef", of(*[torch.ones(6)] * 5, -torch.ones(6)), strict=True))
    assert against_others(uploads, Caps(against=AGAINST)) == ["f"]
    assert against_others(uploads, Caps()) == against_others(uploads, None) == []
    assert against_others({}, Caps(against=AGAINST)) == []


# runs


def made(tmp_path: Path, method: str = "fedavg", clients: int = 5, rounds: int = 4, **upload: Any) -> tuple[Any, ...]:
    paths = write_texts(tmp_path / "texts", clients)
    vocab, path = vocabulary(tmp_path)
    config = small_config(tmp_path / "texts", path, method, rounds=rounds, cohort=clients)
    return replace(config, upload=UploadConfig(**upload)), vocab, paths


def refused(run: Path) -> list[dict[str, str]]:
    """Return who was left out of every round; a simulation calls a client by its file."""
    return [{c.removesuffix(".txt"): why for c, why in line["refused"].items()} for line in read_metrics(run)]


def least_agreeing(cosines: torch.Tensor, share: float) -> list[int]:
    """Stands in for `opposed`, among honest clients: one is always left out."""
    del share
    return [int(cosines.sum(1).argmin())] if len(cosines) else []


@pytest.mark.parametrize("method", ["fedavg", "fedatt", "fedmed", "fedadam", "fedadmm"])
def test_a_federation_leaves_out_whom_the_simulation_leaves_out(tmp_path, monkeypatch, method):
    monkeypatch.setattr(soundness, "opposed", least_agreeing)
    config, vocab, paths = made(tmp_path, method, limit=1.0, token_limit=1.0, against=AGAINST)
    simulated = train(config, tmp_path / "simulated")
    transport, roster = federation(tmp_path / "clients", paths)
    real = train_deployed(config, vocab, tmp_path / "deployed", transport, roster, patience=QUICK)
    assert bits(last_model(tmp_path / "simulated")) == bits(last_model(tmp_path / "deployed"))
    assert refused(tmp_path / "simulated") == refused(tmp_path / "deployed")
    expected = 0 if method == "fedadmm" else 4  # whose clients send no change of the model
    assert simulated["against"] == real["against"] == expected
    for line in read_metrics(tmp_path / "simulated") + read_metrics(tmp_path / "deployed"):
        assert line["reported"] == 5
        assert len(line["contributors"]) == (5 if method == "fedadmm" else 4)
        assert not set(line["refused"]) & set(line["contributors"])


@pytest.mark.parametrize("method", ["fedavg", "fedatt"])
def test_comparing_honest_clients_changes_no_bit_of_a_model(tmp_path, method):
    config, _, _ = made(tmp_path, method, limit=1.5, against=AGAINST)
    train(config, tmp_path / "compared")
    train(replace(config, upload=replace(config.upload, against=None)), tmp_path / "free")
    assert refused(tmp_path / "compared") == [{}] * 4
    assert bits(last_model(tmp_path / "compared")) == bits(last_model(tmp_path / "free"))


@pytest.mark.parametrize("mended", [True, False], ids=["compared", "mutant"])
def test_a_negated_upload_is_left_out_said_and_counted(tmp_path, monkeypatch, mended):
    """The mutant compares nothing: the liar is in every sum, at the length that its limit lets it have."""
    if not mended:
        monkeypatch.setattr(soundness, "opposed", lambda cosines, share: [])
    config, vocab, paths = made(tmp_path, clients=10, rounds=5)
    transport, roster = federation(tmp_path / "clients", paths)
    home = tmp_path / "clients" / "client-5"
    transport.handlers["client-5"] = poisoning.Liar(home, "client-5", paths[5], "at the bound")
    listener = Heard()
    result = train_deployed(config, vocab, tmp_path / "run", transport, roster, listener, patience=QUICK)
    lies = 5 - poisoning.FIRST
    assert result["against"] == (lies if mended else 0)
    expected = {"client-5": "against the others"} if mended else {}
    assert refused(tmp_path / "run") == [{}] * poisoning.FIRST + [expected] * lies
    said = [line for line in listener.lines if "client-5 is left out: against the others" in line]
    assert len(said) == (lies if mended else 0)
    counted = [number for what, number in report._participation(result) if "against the others" in what]
    assert counted == ([str(lies)] if mended else [])


def test_secure_sums_show_no_direction(tmp_path):
    config, _, _ = made(tmp_path, against=AGAINST)
    with pytest.raises(ConfigError, match=r"upload\.against compares single uploads"):
        check(replace(config, secure=SecureConfig(on=True)))


def test_ranks_do_not_compare_uploads(tmp_path):
    config, _, _ = made(tmp_path, against=AGAINST)
    method = build_method(method_spec(config))
    with pytest.raises(ConfigError, match=r"upload\.against needs the uploads in one process"):
        ranks.among(2, config, method, Choice("cpu", 1, 1, 1, ""))
    free = replace(config, upload=UploadConfig())
    assert ranks.among(2, free, method, Choice("cpu", 1, 1, 1, "")).workers == 1


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_is_between_0_and_1(tmp_path, share):
    config, _, _ = made(tmp_path, against=share)
    with pytest.raises(ConfigError, match=r"upload\.against is"):
        check(config)
