"""Counts and mixtures of a run: the sums over clients, the levels of n-grams, what is fitted, what is tested."""
