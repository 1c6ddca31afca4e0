"""Build hook: a wheel holds the page's runtime (onnxruntime-web), or is not built.

An editable install goes on without it and says so: training needs neither npm nor a browser, and `make assets` fetches
the files into a checkout.
"""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path("src/keyfed/keyboard")


def load_assets(root: Path) -> ModuleType:
    """Load keyfed.keyboard.assets by its path: the package is being built, not installed."""
    spec = spec_from_file_location("keyfed_assets", root / PACKAGE / "assets.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Fetch the files before a wheel is packed; hatchling finds this class by its kind."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        assets = load_assets(Path(self.root))
        wrong = assets.problem()
        if version == "editable":
            if wrong is not None:
                self.app.display_warning(f"{wrong}: `keyfed keyboard` will ask for `make assets`")
            return
        # The page's runtime is among the artifacts of pyproject.toml.
        build_data["force_include"]["studies"] = "keyfed/studies"  # where there is no ./studies
        try:
            if wrong is not None:
                assets.fetch()
            wrong = assets.problem()
        except assets.AssetError as e:
            wrong = str(e)
        if wrong is not None:
            raise SystemExit(f"error: no wheel without the keyboard page's runtime: {wrong}")
