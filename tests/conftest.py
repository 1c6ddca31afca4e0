"""Shared by all tests."""

from __future__ import annotations

import torch

# Tests run tiny models: a second thread costs more than it gives, and on a busy machine far more.
torch.set_num_threads(1)
