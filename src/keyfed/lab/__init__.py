"""Experiments with runs: studies, audits, benchmarks. Imported by the command line only."""
