"""Documents: nested plain values, as a configuration is stored; written as TOML, and compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def dump_toml(document: Mapping[str, Mapping[str, Any]]) -> str:
    """Write flat sections as TOML; None is written as "none", which `coerce` reads back."""
    lines: list[str] = []
    for section, values in document.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml_value(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    # What TOML cannot write as it is; a lone surrogate (from a file name that is not UTF-8) has no form at all.
    return (
        '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text if not "\ud800" <= c <= "\udfff") + '"'
    )


def differences(old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """List `section.key: old → new` for every value that differs between two documents."""
    out = []
    for section in sorted({*old, *new}):
        a, b = old.get(section, {}), new.get(section, {})
        out += [f"{section}.{key}: {a.get(key)} → {b.get(key)}" for key in sorted({*a, *b}) if a.get(key) != b.get(key)]
    return out
