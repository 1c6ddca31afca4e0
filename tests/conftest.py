"""Shared by all tests."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported: its kernels then run on a CPU

# Tests run tiny models: a second thread costs more than it gives, and on a busy machine far more. One it stays: a run
# asks for all cores when it judges a round or trains one client, and then every tanh of a few hundred numbers costs
# milliseconds, because threads wait for each other.
torch.set_num_threads(1)
torch.set_num_threads = lambda threads: None
