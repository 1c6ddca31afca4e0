"""Keyfed: federated training of keyboard language models, every method compared honestly.

    import keyfed

    config = keyfed.configure("fedavg", data="chat", model="cifg", rounds=5)
    result = keyfed.train(config, "runs/mine")
    model = keyfed.load_model("runs/mine")
    print(result.perplexity, keyfed.suggest(model, "the state of the"))

The names below are the whole public interface; everything is imported on first use, so `import keyfed` is instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from keyfed.api import (
        Compared,
        Result,
        Round,
        compare,
        configure,
        conformance,
        evaluate,
        export,
        load_model,
        personalise,
        pretrain,
        report,
        suggest,
        train,
        tune,
        vocab,
    )
    from keyfed.errors import KeyfedError
    from keyfed.federated.methods import METHODS
    from keyfed.federated.types import Method
    from keyfed.model.conformance import check_model
    from keyfed.model.language_model import PRESETS
    from keyfed.text.catalogue import load_corpus

__all__ = [
    "METHODS",
    "PRESETS",
    "Compared",
    "KeyfedError",
    "Method",
    "Result",
    "Round",
    "check_model",
    "compare",
    "configure",
    "conformance",
    "evaluate",
    "export",
    "load_corpus",
    "load_model",
    "personalise",
    "pretrain",
    "report",
    "suggest",
    "train",
    "tune",
    "vocab",
]


_HOME = {
    "check_model": "keyfed.model.conformance",
    "load_corpus": "keyfed.text.catalogue",
    "METHODS": "keyfed.federated.methods",
    "Method": "keyfed.federated.types",
    "PRESETS": "keyfed.model.language_model",
    "KeyfedError": "keyfed.errors",
}  # all others are of keyfed.api


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_HOME.get(name, "keyfed.api")), name)
    raise AttributeError(f"module 'keyfed' has no attribute {name!r}; public names: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # completion finds what is not imported yet
