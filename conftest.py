"""What pytest collects no doctests from: modules in the language of a library that this machine does not have."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["src/keyfed/engine/kernels/triton_*.py"]
