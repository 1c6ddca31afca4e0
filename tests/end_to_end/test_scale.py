"""Large populations: what is mapped from disk trains as what is in memory, and nothing grows with the population."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections import Counter
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest

from keyfed.config.load import Config, DataConfig, ModelConfig, Participation, TrainConfig
from keyfed.engine.problem import Problem, make_store, map_store
from keyfed.engine.simulate import Simulation
from keyfed.errors import DataError
from keyfed.federated.cohort import LISTED, derive_seed, draw, plan_round, sample_by_place
from keyfed.federated.methods import build_method
from keyfed.federated.round import initial_state, run_round
from keyfed.federated.spec import MethodSpec
from keyfed.model.language_model import build_spec, init_params
from keyfed.run import encode
from keyfed.run.folder import read_metrics
from keyfed.run.loop import train
from keyfed.run.prepare import client_tokens, make_problem, prepare
from keyfed.text.batches import Batching, lines_of
from keyfed.text.ragged import ShardWriter

from .test_resume import without_times

POPULATION = 50_000


@pytest.fixture
def table(tmp_path):
    """Forty authors in a table; some have less text than a window."""
    rng = random.Random(4)
    words = [f"{a}{b}" for a in "bdfgk" for b in ("a", "e", "i", "o", "an")]
    with (tmp_path / "chat.jsonl").open("w") as file:
        for k in range(40):
            lines = [" ".join(rng.choices(words, k=rng.randint(2, 7))) for _ in range(rng.choice([1, 12, 30]))]
            file.write(json.dumps({"author": f"a{k}", "text": "\n".join(lines)}) + "\n")
    return tmp_path / "chat.jsonl"


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Keep every corpus, however small; return the folder of the cache."""
    monkeypatch.setattr(encode, "LARGE", 0)
    monkeypatch.setenv("KEYFED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def settings(table, workers=1, **data) -> Config:
    return Config(
        data=DataConfig(name=str(table), vocab=40, window=8, **data),
        model=ModelConfig(name="cifg", embed=4, hidden=6),
        train=TrainConfig(rounds=2, cohort=5, workers=workers, device="cpu", baselines=False, valid_tokens=200),
        method="fedavg",
        options={"optimiser": "sgd", "lr": 1.0},
    )


def plainly(monkeypatch, config):
    """Prepare in memory."""
    with monkeypatch.context() as m:
        m.setenv("KEYFED_CACHE", "")
        return prepare(config)


def same(a, b) -> None:
    assert a.store.folder != b.store.folder
    assert tuple(a.store.names) == tuple(b.store.names)
    assert a.store.flat.tolist() == b.store.flat.tolist()
    assert a.store.bounds.tolist() == b.store.bounds.tolist()
    for part in ("valid", "test", "unseen"):
        one, two = getattr(a, part), getattr(b, part)
        assert list(one) == list(two)
        assert all(np.array_equal(one[name], two[name]) for name in one)
    assert tuple(a.excluded) == tuple(b.excluded)
    assert (a.vocab, a.vocab_summary, a.oov) == (b.vocab, b.vocab_summary, b.oov)
    assert a.corpus.fingerprint() == b.corpus.fingerprint()
    assert a.describe() == b.describe()


@pytest.mark.parametrize("part", [None, "2/3"])
@pytest.mark.parametrize("partition", ["natural", "iid"])
def test_a_mapped_corpus_is_the_corpus(table, kept, monkeypatch, partition, part):
    config = settings(table, partition=partition, clients=8 if partition == "iid" else None, clients_part=part)
    first = prepare(config)
    same(first, plainly(monkeypatch, config))
    monkeypatch.setattr(encode, "tabulate", lambda *_, **__: pytest.fail("the text is read a second time"))
    assert tuple(prepare(config).store.names) == tuple(first.store.names)


def test_a_mapped_corpus_that_is_cut_is_the_corpus_that_is_cut(table, kept, monkeypatch):
    config = settings(table, train_share=0.5, max_words=20)
    less = prepare(config)
    same(less, plainly(monkeypatch, config))
    for whole in (settings(table, train_share=0.5), settings(table, max_words=20)):
        assert 0 < less.store.sizes().sum() < prepare(whole).store.sizes().sum()


@pytest.mark.usefixtures("workers_are_forked")
def test_mapped_clients_train_bitwise_as_those_in_memory_in_one_process_and_in_two(table, kept, tmp_path, monkeypatch):
    runs = {}
    for name, workers in (("mapped", 1), ("mapped2", 2), ("memory", 1)):
        with monkeypatch.context() as m:
            if name == "memory":
                m.setenv("KEYFED_CACHE", "")
            result = train(settings(table, workers), tmp_path / name)
        model = {p.name: p.read_bytes() for p in (tmp_path / name).glob("*.safetensors")}
        assert model
        runs[name] = result["test"], without_times(read_metrics(tmp_path / name)), model
    assert runs["mapped"] == runs["memory"] == runs["mapped2"]


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "manifest", "stale"])
def test_a_damaged_cache_is_made_again(table, kept, monkeypatch, damage):
    config = settings(table)
    prepare(config)
    (place,) = kept.iterdir()
    tokens, manifest = place / "train" / "tokens.i32", place / "manifest.json"
    if damage == "flip":
        data = bytearray(tokens.read_bytes())
        data[100] ^= 1
        tokens.write_bytes(data)
    elif damage == "cut":
        tokens.write_bytes(tokens.read_bytes()[:-4])
    elif damage == "missing":
        tokens.unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(json.dumps({"files": {}}))
    same(prepare(config), plainly(monkeypatch, config))
    assert list(kept.iterdir()) == [place]
    assert encode.open_cache(place) is not None


def test_other_text_and_other_options_are_encoded_anew(table, kept):
    config = settings(table)
    folders = {encode.cache_folder(config)}
    for changed in (
        {"vocab": 30}, {"window": 9}, {"partition": "iid"}, {"unseen": 0.2}, {"clients_part": "1/2"},
        {"train_share": 0.5}, {"max_words": 2},
    ):  # fmt: skip
        folders.add(encode.cache_folder(replace(config, data=replace(config.data, **changed))))
    folders.add(encode.cache_folder(replace(config, train=replace(config.train, seed=2))))
    assert encode.cache_folder(replace(config, train=replace(config.train, rounds=9))) in folders
    with table.open("a") as file:
        file.write('{"author": "a1", "text": "ba"}\n')
    folders.add(encode.cache_folder(config))
    assert len(folders) == 10


def test_small_corpora_are_not_kept_and_a_cache_that_cannot_be_written_is_one_line(table, tmp_path, monkeypatch):
    monkeypatch.setenv("KEYFED_CACHE", str(tmp_path / "cache"))
    assert prepare(settings(table)).store.folder is None
    monkeypatch.setattr(encode, "LARGE", 0)
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(DataError, match="KEYFED_CACHE") as error:
        prepare(settings(table))
    assert "\n" not in str(error.value)


def test_many_held_out_streams_are_drawn_by_client(table, monkeypatch):
    everybody = prepare(settings(table))
    monkeypatch.setattr(encode, "MOST_STREAMS", 4)
    some = prepare(settings(table))
    assert len(some.valid) == len(some.test) == 4
    assert list(some.valid) == list(some.test) == [name for name in everybody.test if name in some.test]
    names = [*everybody.test, "ä/ö"]
    assert encode.stream_keys(names, 3).tolist() == [derive_seed(3, "held out", name) for name in names]


@pytest.mark.parametrize(
    "limits", [{}, {"max_tokens": 20}, {"max_sentences": 7}, {"max_sentences": 7, "max_tokens": 9}]
)
@pytest.mark.parametrize("batches", ["stream", "sentences", "packed"])
def test_tokens_of_all_clients_are_counted_as_those_of_each(table, batches, limits):
    prepared = prepare(settings(table, batches=batches, **limits))
    expected = []
    for k in range(len(prepared.store)):
        lines = lines_of(prepared.store.stream(k))
        tokens = float(sum(min(len(line), 8) if batches == "sentences" else len(line) for line in lines))
        tokens -= batches == "stream"
        tokens *= min(1.0, limits.get("max_sentences", len(lines)) / len(lines))
        expected.append(min(tokens, limits.get("max_tokens", tokens)))
    assert client_tokens(prepared).tolist() == expected


# A population that is not listed


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Fifty thousand clients of forty tokens, on disk."""
    folder = tmp_path_factory.mktemp("many") / "train"
    ids = np.random.default_rng(0).integers(4, 50, (POPULATION, 40)).astype(np.int32)
    with ShardWriter(folder) as shard:
        for k, stream in enumerate(ids):
            shard.add(f"client-{k}", stream)
    return folder


def test_workers_get_the_place_of_the_text_and_not_the_text(many):
    store = map_store(many)
    assert len(ForkingPickler.dumps(store)) < 1000
    again = ForkingPickler.loads(ForkingPickler.dumps(store))
    assert again.names[POPULATION - 1] == "client-49999"
    assert np.array_equal(again.stream(777), store.stream(777))


@pytest.mark.parametrize("sampling", ["uniform", "poisson", "size"])
def test_a_round_among_fifty_thousand_allocates_for_its_cohort_alone(many, sampling):
    method = build_method(MethodSpec("fedavg", {"optimiser": "sgd", "lr": 0.1}))
    spec = build_spec("cifg", 50, embed=4, hidden=6)
    params = init_params(spec, 1)
    tracemalloc.start()
    try:
        problem = Problem(spec, map_store(many), Batching("stream", 1, 10), seed=1)
        store, p = problem.store, Participation(sampling=sampling)
        with Simulation(problem) as federation:
            called = draw(p, len(store), 20, lambda k: int(store.bounds[k]), 1, 0)
            plan = plan_round(
                p, called, 20, epochs=1, tokens_of=lambda k: 39.0, name_of=store.names.__getitem__,
                down=1, up=1, seed=1, round=0,
            )  # fmt: skip
            fates = {store.names[f.client]: f for f in plan.fates}
            federation.expect(fates)
            _, summary = run_round(method, initial_state(method, params), list(fates), federation)
        assert len(summary.contributors) == len(called) > 5
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000  # fifty thousand names alone are more


def test_drawing_tokens_draws_clients_by_size():
    sizes = [1 + k % 5 for k in range(50)]
    starts = np.cumsum([0, *sizes]).tolist()
    counted = Counter(k for n in range(4000) for k in sample_by_place(starts.__getitem__, 50, 1, 3, n))
    for size in range(1, 6):
        share = sum(n for k, n in counted.items() if sizes[k] == size) / 4000
        assert share == pytest.approx(10 * size / sum(sizes), abs=0.03)
    many = sample_by_place(starts.__getitem__, 50, 25, 3, 0)
    assert many == sorted(set(many))
    assert len(many) == 25
    one_has_all = [0, *range(10**9, 10**9 + 50)]
    assert len(sample_by_place(one_has_all.__getitem__, 50, 20, 3, 0)) == 20
    assert LISTED >= 10_000  # populations that had a listed draw keep it


def test_central_training_pools_a_mapped_store(table, kept, monkeypatch):
    config = replace(settings(table), method="central", options={})
    pooled = [
        make_problem(p, config, build_method(MethodSpec("central", {})), "cpu").store
        for p in (prepare(config), plainly(monkeypatch, config))
    ]
    assert np.array_equal(pooled[0].stream(0), pooled[1].stream(0))
    assert len(make_store([], [])) == 0
