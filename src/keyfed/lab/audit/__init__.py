"""The mathematics of a privacy audit: pure functions of numbers, which know no run, text or model.

    exposure     how likely a planted secret has become among random ones, and whether controls behave
    one_shot     ε as measured from the final model, by random vectors that canary clients sent
    membership   how well losses tell those who were trained on from those who were not
    leak         which words one transmitted update gives away

`keyfed.lab.audit.audit` joins them with runs.
"""
