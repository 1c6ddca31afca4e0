"""Differential privacy: noise, accounting, the ledger, and the private form of a method."""
