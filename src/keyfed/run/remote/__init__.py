"""Runs with real clients: their rounds, their privacy, their terms."""
