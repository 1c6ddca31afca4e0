"""What the keyboard needs beside the package's own requirements, asked for when it is needed."""

from __future__ import annotations

from importlib.util import find_spec

from keyfed.errors import ConfigError


def need(*packages: str) -> None:
    """Raise ConfigError, with the command that mends it, unless the packages are installed.

    Example:
      >>> need("numpy")
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the keyboard needs {' and '.join(missing)}, which is not installed: pip install 'keyfed[keyboard]'"
        )
