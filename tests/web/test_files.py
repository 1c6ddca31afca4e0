"""Files of weights and n-grams that the page reads, whole and damaged, and what a model of characters completes."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load, save

from keyfed.model.ngram import fit_kneser_ney
from keyfed.run.evaluate import _complete
from keyfed.text.vocab import SPECIALS, Vocab

from .node_cases import answers, needs_node, ngram_file, sent

pytestmark = needs_node


# ----------------------------------------------------------------------------------------------------- files


def test_ngram_next() -> None:
    rng = np.random.default_rng(2)
    cases, models = [], []
    for order, vocab in ((1, 5), (2, 7), (3, 12)):
        model = fit_kneser_ney([rng.integers(0, vocab, 300).astype(np.int32)], vocab, order)
        contexts = [rng.integers(0, vocab, n).tolist() for n in (0, 1, 2, 3, 40) for _ in range(12)]
        cases.append({"op": "next", "file": sent(ngram_file(model)), "vocab": vocab, "contexts": contexts})
        models.append(model)
    for case, model, found in zip(cases, models, answers(cases), strict=True):
        expected = [model.next(np.array(context, np.int32)) for context in case["contexts"]]
        np.testing.assert_allclose(found, expected, rtol=3e-7)  # the file holds float32
        np.testing.assert_allclose(np.sum(found, axis=1), 1, atol=1e-5)


def test_ngram_files_that_do_not_fit_are_refused() -> None:
    model = fit_kneser_ney([np.array([0, 1, 2, 1, 0, 2, 2], np.int32)], 3, 2)
    whole = ngram_file(model)
    tensors = load(whole)
    other = {**tensors, "n2.words": tensors["n2.words"] + 3}
    short = {name: value for name, value in tensors.items() if name != "n2.prob"}
    ends = {**tensors, "n2.start": tensors["n2.start"][::-1].copy()}
    files = [whole, bytes(save(other)), bytes(save(short)), bytes(save(ends)), bytes(save({"x": tensors["n1.prob"]}))]
    found = answers([{"op": "next", "file": sent(data), "vocab": 3, "contexts": [[1]]} for data in files])
    assert "error" not in found[0]
    for answer in found[1:]:
        assert answer["error"].startswith("damaged n-gram file: ")


def test_tensors_and_int8() -> None:
    rng = np.random.default_rng(3)
    q = rng.integers(-127, 128, (5, 7)).astype(np.int8)
    scale = rng.random(5).astype(np.float32)
    tensors: dict[str, Any] = {
        "a": rng.normal(size=(3, 2)).astype(np.float32),
        "m": q,
        "m.scale": scale,
        "odd.scale": np.ones(3, np.float32),
        "none": np.zeros((0, 4), np.float32),
    }
    wholes, wide = answers([{"op": op, "file": sent(bytes(save(tensors)))} for op in ("tensors", "widened")])
    for name, (shape, values) in wholes.items():
        assert (tuple(shape), values) == (tensors[name].shape, tensors[name].ravel().tolist())
    assert set(wide) == {"a", "m", "odd.scale", "none"}
    assert wide["m"][1] == (q.astype(np.float32) * scale[:, None]).ravel().tolist()


def damaged_tensors() -> list[bytes]:
    whole = bytes(save({"a": np.arange(4, dtype=np.float32), "b": np.arange(3, dtype=np.int32)}))
    length = struct.unpack("<Q", whole[:8])[0]
    body = whole[8 + length :]

    def with_header(header: object) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + body

    def entry(dtype: object = "F32", shape: object = (7,), offsets: object = (0, 28)) -> dict[str, object]:
        return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}

    assert len(body) == 28
    headers: list[object] = [
        b"{", b"\xff\xfe", [], None, {"a": 3}, {"a": None},
        entry(dtype="F12"), entry(dtype="toString"), entry(dtype=None),
        entry(shape=(8,)), entry(shape=(-7,)), entry(shape=(3.5, 2)), entry(shape="7"), entry(shape=(1 << 53, 1 << 53)),
        entry(offsets=(0, 24)), entry(offsets=(4, 28), shape=(6,)), entry(offsets=(28, 0)), entry(offsets=(0,)),
        entry(offsets=(0, 2800), shape=(700,)), entry(offsets=(0.0, "28")),
        {"a": entry()["a"], "b": {"dtype": "F32", "shape": [7], "data_offsets": [0, 28]}},
    ]  # fmt: skip
    cuts = [whole[:n] for n in (0, 7, 8, 20, 8 + length, len(whole) - 1)]
    lengths = [struct.pack("<Q", n) + whole[8:] for n in (0, 1, len(whole), 1 << 40, (1 << 64) - 1)]
    return [*cuts, *lengths, whole + b"\0", *map(with_header, headers)]


def test_damaged_tensors_are_refused() -> None:
    files = damaged_tensors()
    for number, answer in enumerate(answers([{"op": "tensors", "file": sent(data)} for data in files])):
        assert answer.get("error", "").startswith("damaged safetensors file: "), number
    lonely = {"m": np.ones((2, 2), np.int8)}
    wrong = {**lonely, "m.scale": np.ones(3, np.float32)}
    whole = {"m": np.ones((2, 2), np.int32)}
    for answer in answers([{"op": "widened", "file": sent(bytes(save(t)))} for t in (lonely, wrong, whole)]):
        assert answer["error"].startswith("damaged safetensors file: parameter")


# ------------------------------------------------------------------------------------------------ characters


class TableReader:
    """A model over characters whose scores depend on the last two; its state is the last one of each row."""

    def __init__(self, table: np.ndarray[Any, Any]) -> None:
        self.table = torch.tensor(table)

    def after(self, tokens: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        return self.table[state, tokens[:, -1]], tokens[:, -1]

    def keep(self, state: Any, rows: list[int]) -> Any:
        return state[rows]


def test_completions_of_a_character_model() -> None:
    rng = np.random.default_rng(4)
    vocab = Vocab("char", (*SPECIALS, *"abcdefghijklmnop \u2003"), lower=False, tokenised=False)
    cases = []
    for _ in range(20):
        raw = torch.tensor(rng.normal(size=(len(vocab),) * 3) * 3, dtype=torch.float32)
        table = raw.log_softmax(-1).numpy()
        last = rng.integers(4, len(vocab), 2).tolist()
        cases.append({"op": "complete", "words": vocab.words, "table": table.tolist(), "last": last, "k": 3})
    for case, found in zip(cases, answers(cases), strict=True):
        reader: Any = TableReader(np.array(case["table"], np.float32))
        logp, state = reader.after(torch.tensor([[case["last"][1]]]), torch.tensor([case["last"][0]]))
        assert found == _complete(reader, vocab, logp[0], state, 3)
        assert all(found)
