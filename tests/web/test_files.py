"""Files of weights and n-grams that the page reads, whole and damaged, and what a model of characters completes."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from keyfed.keyboard.compact import counts_source, mixture_source, pack, unpack
from keyfed.model.mixture import BEST, COUNTED, mixture_of
from keyfed.model.ngram import fit_kneser_ney
from keyfed.run.evaluate import _complete
from keyfed.text.vocab import SPECIALS, Vocab
from tests.counting import as_counts, ngram_file

from .node_cases import answers, needs_node, sent

pytestmark = needs_node


# ----------------------------------------------------------------------------------------------------- files


def test_ngram_next() -> None:
    rng = np.random.default_rng(2)
    cases, models = [], []
    for order, vocab in ((1, 5), (2, 7), (3, 12)):
        fitted = fit_kneser_ney([rng.integers(0, vocab, 300).astype(np.int32)], vocab, order)
        contexts = [rng.integers(0, vocab, n).tolist() for n in (0, 1, 2, 3, 40) for _ in range(12)]
        data = ngram_file(fitted)
        cases.append({"op": "next", "file": sent(data), "vocab": vocab, "contexts": contexts})
        models.append(unpack(data, vocab, "file").model)
    for case, model, found in zip(cases, models, answers(cases), strict=True):
        expected = [model.next(np.array(context, np.int32)) for context in case["contexts"]]
        np.testing.assert_allclose(found, expected, rtol=1e-9)
        np.testing.assert_allclose(np.sum(found, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("by", [BEST, COUNTED], ids=lambda by: by.by)
def test_the_mixture_is_that_of_python(lines, by) -> None:
    """Random weights and scores, contexts with ends of lines, networks that are more and less sure."""
    rng = np.random.default_rng(5)
    vocab = 40
    fitted = fit_kneser_ney([rng.integers(0, vocab, 3_000) // rng.integers(1, 9, 3_000)], vocab, 4)
    mixture = mixture_of(rng.random(4 * 4 * 6), 4, by)
    data = pack(as_counts(fitted, uses=60), mixture)
    contexts = [
        [2, *(rng.integers(0, vocab, n) // rng.integers(1, 9, n)).tolist()] for n in (0, 1, 2, 3, 9) for _ in range(25)
    ]
    scores = rng.normal(size=(len(contexts), vocab)) * rng.choice([0.3, 1, 3], (len(contexts), 1))
    scores -= np.log(np.exp(scores).sum(1, keepdims=True))
    compact = unpack(data, vocab, "file")
    expected, counts = [], counts_source(compact, lines=lines)
    for context, row in zip(contexts, scores, strict=True):
        expected.append(mixture_source(lambda tokens, row=row: row, compact, lines=lines)(context))
    case = {"file": sent(data), "vocab": vocab, "lines": lines, "contexts": contexts, "scores": scores.tolist()}
    found = answers([{"op": "mixture", "mixture": json.loads(mixture.to_json()), **case}])[0]
    np.testing.assert_allclose(np.exp(found["mixed"]), np.exp(expected), rtol=0, atol=1e-9)
    np.testing.assert_allclose(
        np.exp(found["counts"]), np.exp([counts(context) for context in contexts]), rtol=0, atol=1e-9
    )
    np.testing.assert_allclose(np.exp(found["mixed"]).sum(1), 1, atol=1e-6)
    assert len({compact.place(np.array(context[-3:])) for context in contexts}) > 4
    wrong = {**json.loads(mixture.to_json()), "weights": mixture.weights[1:]}
    assert "weights are not those of the n-grams" in answers([{"op": "mixture", "mixture": wrong, **case}])[0]["error"]


def test_ngram_files_that_do_not_fit_are_refused() -> None:
    whole = ngram_file(fit_kneser_ney([np.array([0, 1, 2, 1, 0, 2, 2], np.int32)], 3, 2))
    tensors = load(whole)
    changes = {
        "other": {"n2.words": tensors["n2.words"] + np.uint16(3)},
        "size": {"n2.sizes": tensors["n2.sizes"] + np.uint16(1)},
        "gap": {"n2.gaps": tensors["n2.gaps"] * np.uint16(9)},
        "none": {"n2.gaps": tensors["n2.gaps"] * np.uint16(0)},
        "mass": {"n2.mass": -tensors["n2.mass"]},
    }
    short = {name: value for name, value in tensors.items() if name != "n2.shares"}
    files = [{**tensors, **change} for change in changes.values()]
    files += [short, {"x": tensors["n1.shares"]}]
    found = answers(
        [{"op": "next", "file": sent(data), "vocab": 3, "contexts": [[1]]} for data in (whole, *map(save, files))]
    )
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
