"""Build hook: a wheel holds the studies, which an editable install reads from the checkout."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Add the studies to a wheel; hatchling finds this class by its kind."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            build_data["force_include"]["studies"] = "keyfed/studies"  # where there is no ./studies
