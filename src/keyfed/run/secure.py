"""Secure aggregation of a run: what it refuses, what it moves, what the log and the report say of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from keyfed.config.load import Config
from keyfed.engine.sums.codec import words_of
from keyfed.engine.sums.plain import MakeSelfWeighed, RunningSum, SelfWeighedRound, SelfWeighedSum
from keyfed.engine.sums.secure_round import length
from keyfed.errors import ConfigError
from keyfed.federated.public.rules import privately
from keyfed.federated.types import Method, Params
from keyfed.private.secagg.threshold import SecureSettings, most_ratio
from keyfed.run.compatible import Case, refuse, threshold_of
from keyfed.run.metrics_line import Sizes, model_bytes, sizes_of
from keyfed.system import pip_line


def settings_of(config: Config) -> SecureSettings:
    """Return how strict a run's secure sums are."""
    return SecureSettings(config.secure.threshold, config.secure.floor)


def hidden(config: Config, method: Method, members: int) -> Method:
    """Return the method whose clients weigh themselves, where the run is secure; refuse what cannot be masked."""
    if not config.secure.on and not config.secure.clear:
        return method
    refuse("secure sums", Case(config, method, members))
    refuse_unmasked(config, method, members)
    if config.secure.on:
        _masking()
    return privately(method)


def refuse_unmasked(config: Config, method: Method, members: int) -> None:
    """Refuse weights that every client of a secure sum of so many would refuse, and private sums of too many or few."""
    refuse("masked weights", Case(config, method, members))


def sums_of(config: Config) -> MakeSelfWeighed | None:
    """Return how the rounds of a run whose reports stay with the clients are summed; None for other runs."""
    if config.secure.on:
        return partial(_masking().SecureSum, settings=settings_of(config))
    if not config.secure.clear:
        return None

    def clear(hidden: SelfWeighedRound) -> SelfWeighedSum:
        ratio = float(most_ratio(threshold_of(config, len(hidden.called))))
        return SelfWeighedSum(hidden, RunningSum(hidden.theta), ratio)

    return clear


def sizes_in(config: Config, method: Method, params: Params, members: int, frozen: Collection[str] = ()) -> Sizes:
    """Return the bytes one client moves in a round; of a secure sum of so many members, if the run is secure.

    A masked vector is always whole: frozen layers are in it too, as zeros.
    """
    if not config.secure.on:
        return sizes_of(method, params, frozen)
    if method.report_free:
        words = length(method, params)
    else:  # a private run: clipped numbers alone
        words = words_of({name: p for name, p in params.items() if name not in frozen})
    wire = _wire(words, members)
    return Sizes(model_bytes(params), wire["masked"], wire["keys"] + wire["shares"] + wire["unmask"])


def alike_line(config: Config, method: Method) -> str | None:
    """Say that a dual method weighs all clients alike in secure sums, where its plain form goes by tokens."""
    spec = method.spec
    if spec is None or config.privacy.on or not (config.secure.on or config.secure.clear):
        return None
    if spec.options.get("weights") != "tokens" or spec.options.get("server_step") == "published":
        return None  # only dual methods have the option
    return (
        f"{method.name}: in secure sums all clients weigh alike, so that no joining client's tokens can be read; "
        "method.weights=tokens is for plain runs"
    )


def secure_record(record: Mapping[str, Any], costs: Mapping[str, Any], saturated: int) -> dict[str, Any]:
    """Return the line of a secure round: nothing of a single client in it but who was there.

    A client that was refused did not say why; it only took no part.
    """
    moved = costs["bytes"]
    control = moved["keys"] + moved["shares"] + moved["unmask"]
    return {
        **record,
        "refused": dict.fromkeys(record["refused"], "took no part"),
        "traffic": {**record["traffic"], "up": moved["masked"], "control": control},
        "secure": {**costs, "saturated": saturated},
    }


def secure_result(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return what the secure sums of all rounds cost; None for a run without any."""
    found = [r["secure"] for r in records if "secure" in r]
    if not found:
        return None
    return {
        "seconds": {where: sum(s["seconds"][where] for s in found) for where in found[0]["seconds"]},
        "bytes": {what: sum(s["bytes"][what] for s in found) for what in found[0]["bytes"]},
        "failed": sum(s["failed"] is not None for s in found),
        "saturated": sum(s["saturated"] for s in found),
        "raised": max(s.get("raised", 0) for s in found),
        "rounds": len(found),
    }


def clamped_result(records: Sequence[Mapping[str, Any]]) -> dict[str, int] | None:
    """Return how many weights were held at an end of their public range, and of how many; None without such ranges."""
    found = [r for r in records if "clamped" in r and not r["abandoned"]]
    if not found:
        return None
    return {"clients": sum(r["clamped"] for r in found), "of": sum(len(r["contributors"]) for r in found)}


def secure_facts(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the report says about secure aggregation; nothing for a run without."""
    return _masking_facts(result.get("secure")) + _clamped_facts(result.get("clamped"))


def _clamped_facts(found: Mapping[str, int] | None) -> list[tuple[str, str]]:
    if not found or not found["of"]:
        return []
    share = found["clients"] / found["of"]
    said = f"{found['clients']:,} of {found['of']:,} ({share:.0%}) counted as an end of the public range of weights"
    return [("clamped weights, clients of all rounds", said)]


def _masking_facts(found: Mapping[str, Any] | bool | None) -> list[tuple[str, str]]:
    if found is True:  # with real clients, whose seconds nobody here can know
        return [("secure aggregation", "uploads were masked: the server saw sums only")]
    if not found:
        return []
    seconds, moved, rounds = found["seconds"], found["bytes"], max(1, found["rounds"])
    rest = moved["keys"] + moved["shares"] + moved["unmask"]
    facts = [
        ("secure aggregation", "uploads were masked: the server saw sums only"),
        (
            "masking, a round",
            f"{seconds['clients'] / rounds:.2f} s at all clients together, {seconds['server'] / rounds:.2f} s at the "
            f"server; {moved['masked'] / rounds / 1e6:,.2f} MB of masked vectors, {rest / rounds / 1e6:,.2f} MB of "
            "keys and shares",
        ),
    ]
    if found["failed"]:
        facts.append(("secure sums that stayed closed", f"{found['failed']:,}"))
    if found["saturated"]:
        facts.append(("clients cut off by a public cap, all rounds", f"{found['saturated']:,}"))
    if found.get("raised"):  # runs of before say nothing of it
        facts.append(("ranges rose, and sums lost", f"{found['raised']} bits of precision at most"))
    return facts


def secure_line(config: Config, method: Method, params: Params, members: int) -> str | None:
    """Say what masking costs a client in bytes, before a run; None for a run without."""
    if not config.secure.on:
        return None
    wire = _wire(length(method, params), members)
    first = _wire(length(method, params, "calibration"), members)["masked"]
    return (
        f"secure: {length(method, params):,} masked numbers, {wire['masked']:,} bytes up a client and round, with "
        f"{wire['shares']:,} bytes of shares, {wire['keys']:,} of keys and {wire['unmask']:,} to unmask; "
        f"{first:,} bytes once more before the first round; {settings_of(config).threshold_of(members)} of {members} "
        "clients must stay"
    )


def _wire(words: int, members: int) -> dict[str, int]:
    moved: dict[str, int] = _masking().wire_bytes(words, members)
    return moved


def _masking() -> ModuleType:
    """Import the masking only where something is masked: it needs a package of its own."""
    try:
        from keyfed.engine.sums import masked
    except ImportError as e:
        raise ConfigError(
            f"secure.on needs the package cryptography ({e}); install it with: {pip_line('federation')}"
        ) from None
    return masked
