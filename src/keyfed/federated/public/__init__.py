"""Weights that clients compute themselves from public numbers: the rules, their ranges, the client's checks."""
