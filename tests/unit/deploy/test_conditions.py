"""When a client trains, read from folders and texts as systems have them."""

from __future__ import annotations

import pytest

from keyfed.deploy import homes
from keyfed.deploy.homes import describe, idle, on_power, parse_metered, unmet


def supplies(folder, **kinds):
    for name, values in kinds.items():
        (folder / name).mkdir(parents=True)
        for key, value in values.items():
            (folder / name / key).write_text(f"{value}\n")
    return folder


MAINS_ON, MAINS_OFF = {"type": "Mains", "online": 1}, {"type": "Mains", "online": 0}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param({"AC": MAINS_ON, "BAT0": {"type": "Battery", "status": "Charging"}}, True, id="laptop-plugged"),
        pytest.param({"AC": MAINS_OFF, "BAT0": {"type": "Battery", "status": "Discharging"}}, False, id="on-battery"),
        pytest.param({"BAT0": {"type": "Battery", "status": "Full"}}, True, id="full-no-mains-entry"),
        pytest.param({"BAT0": {"type": "Battery", "status": "Unknown"}}, None, id="battery-unknown"),
        pytest.param({"mouse": {"type": "Battery", "scope": "Device", "status": "Discharging"}}, None, id="a-mouse"),
        pytest.param({"AC": MAINS_OFF}, False, id="mains-off"),
        pytest.param({"usb": {"type": "USB", "online": 1}}, True, id="usb"),
        pytest.param({}, None, id="desktop"),
    ],
)
def test_power(tmp_path, found, expected):
    (tmp_path / "s").mkdir()
    assert on_power(supplies(tmp_path / "s", **found)) is expected


def test_power_where_the_system_has_no_such_folder(tmp_path):
    assert on_power(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("text", "expected"), [("0.40 1 1 1/9 9\n", True), ("1.40 0 0 1/9 9\n", False), ("", None), ("x", None)]
)
def test_idle(tmp_path, text, expected):
    (tmp_path / "loadavg").write_text(text)
    assert idle(tmp_path / "loadavg", cores=2) is expected
    assert idle(tmp_path / "missing", cores=2) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GENERAL.METERED:yes (guessed)\nGENERAL.STATE:100 (connected)\n", True),
        (
            "GENERAL.METERED:no\nGENERAL.STATE:100 (connected)\n\n"
            "GENERAL.METERED:yes\nGENERAL.STATE:20 (unavailable)\n",
            False,
        ),
        (
            "GENERAL.METERED:no\nGENERAL.STATE:100 (connected)\n\n"
            "GENERAL.METERED:yes\nGENERAL.STATE:100 (connected (externally))\n",
            True,
        ),
        ("GENERAL.METERED:unknown\nGENERAL.STATE:100 (connected)\n", None),
        (
            "GENERAL.METERED:no\nGENERAL.STATE:100 (connected)\n\n"
            "GENERAL.METERED:unknown\nGENERAL.STATE:100 (connected)\n",
            None,
        ),
        ("", None),
        ("nonsense", None),
    ],
    ids=["metered", "other-device-off", "one-of-two", "unknown", "one-unknown", "empty", "nonsense"],
)
def test_metered(text, expected):
    assert parse_metered(text) is expected


def test_what_the_system_does_not_tell_is_not_met_and_is_said(monkeypatch):
    told = {"idle": ("idle", lambda: True), "power": ("on power", lambda: None), "unmetered": ("free", lambda: False)}
    monkeypatch.setattr(homes, "CONDITIONS", told)
    assert unmet(["idle"]) == []
    assert unmet(["idle", "power", "unmetered"]) == ["on power", "free"]
    assert describe() == [("idle", "yes"), ("on power", "the system does not tell"), ("free", "no")]
