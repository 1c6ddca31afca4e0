"""The package's version, where every room may read it; hatch takes it from here."""

__version__ = "0.1.0"
