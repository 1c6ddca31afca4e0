"""No client is most of a secure sum, whatever the server asks for: as a property, and against a hostile server.

In a sum with threshold t the scale of a layer, which multiplies the upload, lies within [1/r, 1], r = min(16, t − 1).
With n contributors one client is at most min(1/2, 16/(n + 15)) of any opened layer. Every test that shows a guard has a
mutant without it, in which the attack works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from keyfed.config.load import Config
from keyfed.config.schema import PrivacyConfig
from keyfed.engine.sums import codec, masked, secure_round
from keyfed.engine.sums.codec import fixed_point
from keyfed.engine.sums.masked import MaskedNoisedSum
from keyfed.engine.sums.noised import NoisedSum, most_called
from keyfed.engine.sums.plain import SelfWeighedRound
from keyfed.engine.task import Finished
from keyfed.errors import ConfigError, PrivacyError, RunError, SecureSumOverflow
from keyfed.federated.components import MEDIATORS
from keyfed.federated.methods import METHODS, build_method
from keyfed.federated.public import rules
from keyfed.federated.public.numbers import check_public
from keyfed.federated.public.rules import privately, refuse_isolating
from keyfed.federated.spec import MethodSpec, Part
from keyfed.federated.types import Method, Params, Report, Share
from keyfed.private.dp.accounting import MOST_MEMBERS
from keyfed.private.dp.noise import Noising
from keyfed.private.dp.private_method import make_private
from keyfed.private.secagg.threshold import SecureSettings, most_ratio
from keyfed.run.folder import read_metrics
from keyfed.run.remote import device, train
from keyfed.run.remote.train import train_deployed
from keyfed.wire import client as session
from keyfed.wire import promise as promises
from keyfed.wire.promise import Promise
from tests.listeners import Heard

from .deployed import QUICK, federation, small_config, vocabulary, write_texts
from .private import deploy, enrol, private_config

LAYERS = ("bias", "weight")
THETA: Params = {name: torch.zeros(2) for name in LAYERS}
SUMMED = sorted(name for name, make in METHODS.items() if make().cohort != "pooled")


def most_share(contributors: int) -> float:
    return min(1 / 2, 16 / (contributors + 15))


# Strategies: what a server may ask for, and what clients may have


def temperatures() -> st.SearchStrategy[float]:
    return st.sampled_from([1e-6, 0.0005, 0.05, 1.0, 30.0])


def optional(numbers: Sequence[float]) -> st.SearchStrategy[float | None]:
    return st.sampled_from([None, *numbers])


NAMED = ("c0", "c1", "c7")  # clients that fixed weights may be given to
ATTENTION = {"temperature": temperatures(), "bound": optional([0.1, 3.0, 1000.0])}
OF_METHOD: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "fedatt": {**ATTENTION, "norm": st.sampled_from(["spectral", "frobenius"])},
    "fedmed": {
        **ATTENTION, "mediation": st.booleans(), "adaptive": st.booleans(), "beta": st.sampled_from([1.0, 0.5]),
        "threshold": st.sampled_from([0.0, 0.1, 5.0]), "reading": st.sampled_from(["absolute", "softmax", "histogram"]),
    },
    "fedprox": {"by_tokens": st.booleans()},
    "admm": {"weights": st.sampled_from(["tokens", "uniform"])},
    "liadmm": {"weights": st.sampled_from(["tokens", "uniform"])},
    "fedadmm": {
        "weights": st.sampled_from(["tokens", "uniform"]), "server_step": st.sampled_from(["running", "published"])
    },
}  # fmt: skip
OF_MEDIATOR: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "tokens": {"beta": st.sampled_from([1.0, 0.3])},
    "uniform": {"beta": st.sampled_from([1.0, 0.3])},
    "fixed": {
        "weights": st.lists(
            st.tuples(st.sampled_from(NAMED), st.sampled_from([0.0, 1e-9, 0.1, 0.5, 2, 7, 16, 1e9])),
            max_size=3,
        ).map(lambda pairs: ", ".join(f"{client}={weight}" for client, weight in pairs))
    },
    "attention": {**ATTENTION, "beta": st.sampled_from([1.0, 0.3])},
    "divergence": {**ATTENTION, "switch": optional([0.1]), "beta": st.sampled_from([1.0, 0.3])},
}
assert set(OF_MEDIATOR) == set(MEDIATORS), "a mediator is left out"


@st.composite
def methods(draw: st.DrawFn) -> Method:
    """Draw a method with any options that weigh its clients; those that contradict each other are left out."""
    name = draw(st.sampled_from(SUMMED))
    kind = draw(st.sampled_from([None, *OF_MEDIATOR]))
    part = None if kind is None else Part(kind, {key: draw(value) for key, value in OF_MEDIATOR[kind].items()})
    options = {} if part is not None else {key: draw(value) for key, value in OF_METHOD.get(name, {}).items()}
    try:
        return build_method(MethodSpec(name, options, mediator=part))
    except ConfigError:
        assume(False)
        raise


TOKENS = st.one_of(st.integers(1, 50), st.integers(1, 2**40))
NUMBERS = st.one_of(st.floats(0, 5), st.floats(0, 1e6))


@st.composite
def reports(draw: st.DrawFn, clients: int) -> list[Report]:
    """Draw what clients may find of themselves: one far from all others, or any."""
    odd = draw(st.integers(0, clients - 1))
    usual, far = ((draw(TOKENS), draw(st.floats(0, 20)), {name: draw(NUMBERS) for name in LAYERS}) for _ in range(2))
    made = []
    for k in range(clients):
        tokens, loss, distance = far if k == odd else usual
        made.append(Report(f"c{k}", tokens, loss, tokens, distance, float(tokens), draw(st.booleans())))
    return made


@st.composite
def public_numbers(draw: st.DrawFn, method: Method) -> dict[str, Any]:
    """Draw public numbers of a method that `check_public` lets through: any a server could tell."""

    def drawn(name: str, value: Any) -> Any:
        if name == "most":
            return 2.0 ** draw(st.integers(0, 40))
        if name == "caps":
            return {layer: draw(st.one_of(st.floats(0, 10), st.floats(0, 4096))) for layer in LAYERS}
        if name == "limit":
            return draw(st.one_of(st.none(), st.integers(1, 500).map(lambda n: n * rules.LOSS_STEP)))
        if name == "losses":
            return [draw(st.one_of(st.none(), st.floats(0, 20))) for _ in range(2)]
        return {key: drawn(key, x) for key, x in value.items()} if isinstance(value, dict) else value

    ranges = {layer: draw(st.integers(-20, 30)) for layer in LAYERS}
    rule = method.mediator.private
    assert rule is not None
    public = {
        "calibrated": True, "rule": drawn("rule", rule.init()["rule"]), "ranges": ranges, "first": dict(ranges),
        "outside": draw(st.integers(0, 2)),
    }  # fmt: skip
    check_public(public, list(LAYERS))
    return public


def written_scales(vector: np.ndarray, members: int) -> list[float]:
    """Read the scales of all layers off a client's vector, as the sum has them."""
    uploads, one = sum(p.numel() for p in THETA.values()), 1 << 31 - (members - 1).bit_length() - 1
    return [int(vector[uploads + 4 * layer].view(np.int32)) / one for layer in range(len(LAYERS))]


def shares_of_scale(
    method: Method, public: dict[str, Any], told: Sequence[Report], members: int, threshold: int
) -> list[list[float]]:
    """Return every contributor's share of the scale of every layer; none where the sum stays closed."""
    refuse_isolating(method)  # as a client does on hello,
    refuse_isolating(method, most_ratio(threshold))  # and on the terms of a sum
    scales: list[list[float]] = []
    known: dict[tuple[object, ...], list[float]] = {}
    for report in told:
        own = (report.tokens, report.loss, tuple(report.distance.values()), report.joining)
        if own in known and report.client not in NAMED:  # clients differ in few ways
            scales.append(known[own])
            continue
        done = Finished(
            0, {name: torch.zeros(2) for name in LAYERS}, report.loss, min(report.tokens, 2**31), 1, report.distance,
            weight=report.weight, joining=report.joining,
        )  # fmt: skip
        try:
            vector = secure_round.vector_of(report.client, done, THETA, method, public, members, most_ratio(threshold))
        except SecureSumOverflow:
            continue  # it takes no part
        scales.append(written_scales(vector, members))
        if report.client not in NAMED:
            known[own] = scales[-1]
    if len(scales) < threshold:
        return []
    totals = [sum(column) for column in zip(*scales, strict=True)]
    return [[own / max(total, 1e-9) for own, total in zip(row, totals, strict=True)] for row in scales]


@st.composite
def sums(draw: st.DrawFn) -> tuple[Method, dict[str, Any], list[Report], int, int]:
    method = privately(draw(methods()))
    members = draw(st.one_of(st.integers(3, 12), st.integers(3, 100)))
    threshold = draw(st.integers(members // 2 + 1, members))
    stay = draw(st.integers(threshold, members))
    return method, draw(public_numbers(method)), draw(reports(stay)), members, threshold


def no_client_is_most_of_a_sum(examples: int, honest: bool = True) -> Callable[[], None]:
    """Return the property; with clients that are not `honest` it is enough to find one example, however large."""

    @settings(
        max_examples=examples, deadline=None, derandomize=not honest, report_multiple_bugs=False,
        phases=list(Phase) if honest else [Phase.generate],
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(sums())
    def holds(drawn: tuple[Method, dict[str, Any], list[Report], int, int]) -> None:
        try:
            found = shares_of_scale(*drawn)
        except ConfigError:
            assume(False)  # the client refuses the method
        for row in found:
            assert max(row) <= most_share(len(found)) * (1 + 1e-5), "one client is too much of a layer"

    return holds


def test_no_client_is_most_of_any_layer_of_an_opened_sum():
    no_client_is_most_of_a_sum(100)()


@pytest.mark.slow
def test_no_client_is_most_of_any_layer_of_an_opened_sum_in_many_more_cases():
    no_client_is_most_of_a_sum(5000)()


def unclamped(
    report: Report, layers: Sequence[str], method: Method, public: dict[str, Any], ratio: float, *, silent: bool = False
) -> tuple[Share, dict[str, list[float]]]:
    """The mutant: a client that weighs itself as its rule says."""
    rule = method.mediator.private
    assert rule is not None
    return rule.share(report, layers, public), rule.facts(report, layers, public) | {"clamped": [0.0]}


def test_the_mutant_without_the_clamp_is_caught(monkeypatch):
    monkeypatch.setattr(secure_round, "weighed", unclamped)
    with pytest.raises(AssertionError, match="one client is too much of a layer"):
        no_client_is_most_of_a_sum(100, honest=False)()


def test_a_rule_from_outside_is_clamped_and_a_scale_of_nothing_refused():
    """One client of a rule's own choice, all others next to nothing: the rule does not get what it asks for."""
    method = build_method(MethodSpec("fedavg"))
    rule = method.mediator.private
    assert rule is not None

    def chosen(little: float) -> Method:
        def share(report: Report, layers: Sequence[str], public: dict[str, Any]) -> Share:
            numbers = dict.fromkeys(layers, 1.0 if report.client == "c3" else little)
            return Share(numbers, numbers)

        private = rule._replace(share=share)
        return privately(replace(method, spec=None, mediator=method.mediator._replace(private=private)))

    public = {
        "calibrated": True, "rule": {"most": 16.0}, "ranges": dict.fromkeys(LAYERS, 2),
        "first": dict.fromkeys(LAYERS, 2), "outside": 0,
    }  # fmt: skip
    told = [Report(f"c{k}", 8 + k, 1.0, 8) for k in range(10)]
    found = shares_of_scale(chosen(1e-9), public, told, 10, 7)
    assert found[3][0] == pytest.approx(6 / (10 + 5), rel=1e-6)
    assert shares_of_scale(chosen(0.0), public, told, 10, 7) == [], "nine clients take no part, and nothing opens"


def test_the_bound_is_met_with_equality_by_the_worst_case():
    """With 16 times the tokens of the 33 others a client is just what the rule allows, and no more."""
    method = privately(build_method(MethodSpec("fedavg")))
    public = {
        "calibrated": True, "rule": {"most": 1024.0}, "ranges": dict.fromkeys(LAYERS, 2),
        "first": dict.fromkeys(LAYERS, 2), "outside": 0,
    }  # fmt: skip
    told = [Report("c0", 2**30, 1.0, 1)] + [Report(f"c{k}", 1, 1.0, 1) for k in range(1, 34)]
    found = shares_of_scale(method, public, told, 50, 34)
    assert found[0][0] == pytest.approx(16 / (34 + 15), rel=1e-6)
    told = told[:3]
    assert shares_of_scale(method, public, told, 3, 3)[0][0] == pytest.approx(1 / 2, rel=1e-6)


# Sums of private runs: the server sees them before it adds its noise


PRIVACY = PrivacyConfig(noise=1.0, delta=1e-6, clip=10.0, quantile=None)


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_client_is_most_of_a_masked_private_sum_either(data):
    method = data.draw(methods())
    p = replace(PRIVACY, weight_cap=data.draw(st.sampled_from([None, 1.0, 1e9])))
    try:
        refuse_isolating(method, 2)
        made = make_private(method, p)
    except (ConfigError, PrivacyError):
        assume(False)
    share = made.method.mediator.share
    state = made.method.server.init(THETA)
    if made.method.mediator.released is not None:
        share = made.method.mediator.released(state)
    told = data.draw(reports(data.draw(st.integers(3, 100))))
    promise = Promise(p.clip, None, p.clip_rate, made.ratio, 1.0, 10)
    ones = {name: torch.ones(2) for name in LAYERS}
    known: dict[object, np.ndarray] = {}
    scales = []
    for r in told:
        own = r.client if r.client in NAMED else (r.tokens, r.loss, *r.distance.values())
        if own not in known:
            known[own] = promise.vector(ones, share(r, list(LAYERS)), p.clip)[[0, 2]].astype(np.float64)
        scales.append(known[own])
    for layer in range(len(LAYERS)):
        column = [row[layer] for row in scales]
        assert max(column) / sum(column) <= most_share(len(told)) * (1 + 1e-3)


def test_the_mutant_without_the_clamp_in_private_sums_is_caught(monkeypatch):
    method = build_method(MethodSpec("fedatt", {"temperature": 0.0005, "bound": 10.0}))
    made, promise = make_private(method, PRIVACY), Promise(10.0, None, 0.2, True, 1.0, 10)
    ones = {name: torch.ones(2) for name in LAYERS}
    far, near = (Report("c", 9, 1.0, 9, dict.fromkeys(LAYERS, d)) for d in (1.0, 0.001))

    def largest() -> float:
        column = [
            float(promise.vector(ones, made.method.mediator.share(r, list(LAYERS)), 10.0)[0]) for r in (far, near, near)
        ]
        return column[0] / sum(column)

    assert largest() == pytest.approx(1 / 2, rel=1e-3)
    monkeypatch.setattr(promises, "held", lambda share, ratio, silent=False: share)
    assert largest() > 0.99


# A hostile server, in process: what it opens, and how near that is to one client's upload


class Seen:
    """What clients trained, and what the server opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.uploads: dict[str, Params] = {}
        self.opened: list[Any] = []
        write, read = session.vector_of, secure_round.aggregate_of

        def writing(client: str, done: Finished, *rest: Any) -> Any:
            self.uploads[client] = {name: u.clone() for name, u in done.upload.items()}
            return write(client, done, *rest)

        def reading(*arguments: Any) -> Any:
            self.opened.append(read(*arguments))
            return self.opened[-1]

        monkeypatch.setattr(session, "vector_of", writing)
        monkeypatch.setattr("keyfed.wire.server.aggregate_of", reading)

    def cosine(self, client: str, layers: Sequence[str]) -> float:
        """The cosine between what was opened and one client's upload, over some layers."""
        total = torch.cat([self.opened[-1].total[name].flatten() for name in layers])
        own = torch.cat([self.uploads[client][name].flatten() for name in layers])
        return float(torch.dot(total, own) / (total.norm() * own.norm()))

    def distance(self, client: str, layer: str) -> float:
        """‖total/weight − upload‖ / ‖upload‖ of a layer."""
        mean = self.opened[-1].total[layer] / self.opened[-1].weight[layer]
        own = self.uploads[client][layer]
        return float((mean - own).norm() / own.norm())


def hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server check nothing of what it asks for."""
    real = device.run_method

    def unchecked(config: Config, *, secure: bool) -> Method:
        return privately(real(config, secure=False)) if secure else real(config, secure=secure)

    monkeypatch.setattr(train, "run_method", unchecked)
    monkeypatch.setattr(train, "refuse_unmasked", lambda config, method, members: None)


def obedient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: clients that refuse and clamp nothing."""
    monkeypatch.setattr(device, "refuse_isolating", lambda method: None)
    monkeypatch.setattr(session, "refuse_isolating", lambda method, ratio: None)
    monkeypatch.setattr(secure_round, "weighed", unclamped)
    check = secure_round._check
    monkeypatch.setattr(
        secure_round, "_check", lambda read, layout, method, public, clients, ratio, bound: check(
            read, layout, method, public, clients, 1e300, bound
        ),
    )  # fmt: skip


def attack(folder: Path, clients: int, **more: Any) -> tuple[Path, list[str]]:
    """Train one secure round of a federation; return its folder and what was said."""
    texts = write_texts(folder / "texts", clients)
    vocab, path = vocabulary(folder)
    config = small_config(
        folder / "texts", path, more.pop("method", "fedavg"), rounds=1, cohort=clients, secure=True,
        **more.pop("options", {}),
    )  # fmt: skip
    transport, roster = federation(folder / "clients", texts, plain=False)
    heard = Heard()
    train_deployed(replace(config, **more), vocab, folder / "run", transport, roster, heard, patience=QUICK)
    return folder / "run", heard.lines


ZEROS = Part("fixed", {"weights": ", ".join(f"client-{k}=0" for k in range(1, 6))})


def test_the_server_refuses_fixed_weights_that_single_out_a_client(tmp_path):
    with pytest.raises(
        ConfigError, match=r"fixed weights .* a weight of 0.* allows 16 times.*; bring mediator\.weights"
    ):
        attack(tmp_path, 6, mediator=ZEROS)


@pytest.mark.parametrize(
    "asked",
    [{"mediator": ZEROS}, {"method": "fedmed", "options": {"beta": 0.5}}, {"mediator": Part("tokens", {"beta": 0.2})}],
    ids=["fixed", "top-K", "top-K of a mediator"],
)
def test_clients_refuse_what_singles_out_one_of_them(tmp_path, monkeypatch, asked):
    hostile(monkeypatch)
    seen = Seen(monkeypatch)
    with pytest.raises(RunError, match="only 0 of at least 3 clients"):
        attack(tmp_path, 6, **asked)
    assert not seen.uploads, "nobody trained, nobody sent anything"


def test_clients_hold_fixed_weights_to_the_threshold_of_each_sum(tmp_path, monkeypatch):
    """Four times as much is allowed to six clients, whose threshold is 5, but eight times is not, though 16 may be."""
    hostile(monkeypatch)
    seen = Seen(monkeypatch)
    attack(tmp_path / "four", 6, mediator=Part("fixed", {"weights": "client-0=4"}))
    assert seen.opened[-1].weight["output.bias"] == pytest.approx(1 + 5 / 4, rel=1e-5)
    with pytest.raises(RunError, match="no round"):
        attack(tmp_path / "eight", 6, mediator=Part("fixed", {"weights": "client-0=8"}))
    lines = read_metrics(tmp_path / "eight" / "run")
    assert {reason for r in lines for reason in (*r["refused"].values(), *r["lost"].values())} == {"refused by client"}


def test_the_mutant_whose_clients_obey_gives_one_upload_away(tmp_path, monkeypatch, record_property):
    hostile(monkeypatch)
    obedient(monkeypatch)
    seen = Seen(monkeypatch)
    attack(tmp_path, 6, mediator=ZEROS)
    assert len(seen.uploads) == 6
    layers = list(seen.uploads["client-0"])
    assert seen.cosine("client-0", layers) > 0.999999, "the sum is the upload of client-0"
    record_property("fault", "secure: fixed weights of 0 for all but one client, with clients that obey")
    record_property("outcome", "the opened sum is one upload; real clients refuse on hello")


SHARP = {"method": "fedatt", "options": {"temperature": 0.0005}}


def at_the_largest(found: Sequence[tuple[float, float, float]], width: float, at: float | None = None) -> float:
    """Place the cap at the largest score of all, so that all others lie far below."""
    return max(high for _, high, count in found if count >= 0.5)


def nearest(seen: Seen) -> float:
    """How near any layer's mean is to one client's layer."""
    return min(seen.distance(client, layer) for client in seen.uploads for layer in seen.opened[-1].total)


def test_attention_of_any_temperature_isolates_nobody(tmp_path, monkeypatch, record_property):
    monkeypatch.setattr(rules, "best_top", at_the_largest)  # as a hostile server would
    seen = Seen(monkeypatch)
    run, _ = attack(tmp_path, 8, **SHARP)
    (line,) = read_metrics(run)
    opened = seen.opened[-1]
    ratio, clients = most_ratio(6), 8
    assert line["clamped"] > 0
    assert len(opened.contributors) == clients
    for layer, weight in opened.weight.items():
        assert weight >= clients / ratio - 1e-4
        assert 1 / weight <= most_share(clients) or opened.squares[layer] / weight**2 <= most_share(clients), layer
        assert line["effective_by_layer"][layer] >= 1 / most_share(clients) - 1e-6
    clamped_distance, clamped_cosine = nearest(seen), likest(seen)
    with monkeypatch.context() as mutant:
        obedient(mutant)
        attack(tmp_path / "mutant", 8, **SHARP)
        obeyed, alone = nearest(seen), likest(seen)
        layers = seen.opened[-1].effective_clients()
    assert min(layers.values()) < 1.001, "without the clamp a layer is one client's"
    assert obeyed < 1e-4
    assert alone > 1 - 1e-6
    assert clamped_distance > 0.1
    assert clamped_cosine < 0.99
    record_property("fault", "secure: FedAtt at T = 0.0005, whose softmax is one client's; caps of a hostile server")
    record_property(
        "outcome",
        f"clamped: no layer nearer than {clamped_distance:.2f} to a client's own (cosine {clamped_cosine:.3f})",
    )


def likest(seen: Seen) -> float:
    """The largest cosine between a layer of the sum and one client's layer."""
    return max(seen.cosine(client, [layer]) for client in seen.uploads for layer in seen.opened[-1].total)


# Fixed point of private sums: the same whether or not one client more is drawn


def noising(called: float = 100.0) -> Noising:
    return Noising(3.0, 0.0, 0.0, called, called, None, lambda: lambda name, shape: torch.zeros(shape))


class Listening:
    """In the place of a masked sum: hears what clients send."""

    def __init__(self, context: bytes, *rest: Any) -> None:
        self.vectors: list[np.ndarray] = []

    def add(self, client: str, vector: np.ndarray) -> None:
        self.vectors.append(vector)


def sent_by_the_others(
    monkeypatch: pytest.MonkeyPatch, step: Callable[[float, int], float] | None = None
) -> set[bytes]:
    """Return the different vectors that one client sends in rounds of 3 to 4,096 drawn clients."""
    monkeypatch.setattr(masked, "MaskedSum", Listening)
    monkeypatch.setattr(masked, "context_of", lambda *ignored: b"")
    names = tuple(f"c{k}" for k in range(MOST_MEMBERS))
    method, found = build_method(MethodSpec("fedavg")), set()
    share = Share(dict.fromkeys(LAYERS, 0.7), dict.fromkeys(LAYERS, 0.7))
    upload = {name: torch.tensor([0.123456789, -0.987654321]) for name in LAYERS}
    for members in range(3, MOST_MEMBERS + 1):
        if step is not None:
            monkeypatch.setattr(codec, "fixed_point", lambda clip, m=members: step(clip, m))
        hidden = SelfWeighedRound(THETA, method, {}, 0, names[:members], ())
        total = MaskedNoisedSum(THETA, noising(), hidden, SecureSettings())
        total.add("c0", upload, share)
        found.add(total._masked.vectors[0].tobytes())
    return found


def test_what_the_others_send_does_not_depend_on_how_many_are_drawn(monkeypatch):
    assert len(sent_by_the_others(monkeypatch)) == 1
    assert MOST_MEMBERS * 3.0 / fixed_point(3.0) <= 2**30, "as many as that fit"


def test_the_mutant_whose_step_follows_the_cohort_rounds_everybody_anew(monkeypatch):
    def followed(clip: float, members: int) -> float:
        return clip / 2.0 ** (30 - math.ceil(math.log2(max(2, members))))

    assert len(sent_by_the_others(monkeypatch, followed)) > 5


def test_an_opened_private_sum_is_cut_alike_whether_one_client_more_is_drawn():
    """A liar makes a sum beyond what clients can have; where it is brought back to must not tell who was drawn."""
    words = sum(p.numel() for p in THETA.values()) + len(THETA) + 3
    beyond = np.full(words, 2**29, np.uint32)
    found = set()
    for survivors in (*range(3, 200), 1024, 1025, MOST_MEMBERS):
        names = tuple(f"c{k}" for k in range(survivors))
        opened = NoisedSum(THETA, noising(100.0))
        opened.take(beyond, names)
        found.add(torch.cat(list(opened._total.values())).numpy().tobytes() + repr(opened._counts).encode())
    assert len(found) == 1
    assert most_called(100.0) == 150


def test_a_private_sum_of_more_clients_than_its_fixed_point_holds_stays_closed():
    names = tuple(f"c{k}" for k in range(MOST_MEMBERS + 1))
    hidden = SelfWeighedRound(THETA, build_method(MethodSpec("fedavg")), {}, 0, names, ())
    total = MaskedNoisedSum(THETA, noising(), hidden, SecureSettings())
    total.add("c0", THETA, Share(dict.fromkeys(LAYERS, 1.0), dict.fromkeys(LAYERS, 1.0)))
    assert total.aggregate(()).contributors == ()


def test_a_private_run_ignores_a_bound_by_which_a_server_could_silence_clients(tmp_path):
    texts = write_texts(tmp_path / "texts", 3)
    vocab, path = vocabulary(tmp_path)
    config = small_config(tmp_path / "texts", path, secure=True)
    config = replace(config, upload=replace(config.upload, bound=1e-3))
    private = replace(config, privacy=replace(PRIVACY, delta=1e-5, twin=False))
    for made, expected in ((config, 1e-3), (private, None)):
        own = device.OwnText(replace(made, data=replace(made.data, name=str(texts[0]))), build_method(
            MethodSpec("fedavg")), "client-0", vocab)  # fmt: skip
        assert own.bound == expected


def test_a_private_sum_whose_threshold_allows_no_ratio_of_two_is_refused_by_both_sides(tmp_path, monkeypatch):
    config = private_config(tmp_path, clients=3, secure=True, rounds=1)
    config = replace(config, secure=replace(config.secure, threshold=2))
    with pytest.raises(ConfigError, match=r"secure\.threshold is 2 with --dp, and clients take part from 3 on"):
        deploy(tmp_path, config, *enrol(tmp_path, 3))
    joined: list[str] = []
    real = session.Member
    monkeypatch.setattr(session, "Member", lambda me, *rest: joined.append(me) or real(me, *rest))
    hostile(monkeypatch)
    deploy(tmp_path, config, *enrol(tmp_path, 3, "others"), name="hostile")  # its rounds release noise alone
    assert not joined, "no client joins such a sum"
