"""The privacy audit of a run: attacks, what its ledger claims, and whether the two agree.

- canaries: how likely a planted secret has become among random ones, and whether controls behave.
- inference: how well losses tell members from others, and which words one transmitted update gives away.
- retrain: one round replayed by the ledger's noise, and ε as measured by canary clients in the sum.
- lint: what ledger, configuration, metrics and files say about the claim.
- audit: all of it on a run, and the page about it.
"""
