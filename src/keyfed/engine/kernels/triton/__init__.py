"""The kernels of a step in Triton's language."""
