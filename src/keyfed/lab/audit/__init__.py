"""The privacy audit of a run: attacks, what its ledger claims, and whether the two agree.

canaries     how likely a planted secret has become among random ones, and whether controls behave
one_shot     ε as measured from the final model, by random vectors that canary clients sent
replay       one round of a private run done again, by the ledger's noise
members      how well losses tell those who were trained on from those who were not
leaks        which words one transmitted update gives away
lint         what ledger, configuration, metrics and files say about the claim
audit, page  all of it on a run, and the page about it
"""
