"""One training step of our models: by hand on a CPU, captured and in Triton on a GPU."""
