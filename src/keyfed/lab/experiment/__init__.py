"""Many runs: the papers' studies, comparisons, searches."""
