"""`keyfed counts`: from a run to counts, a mixture, and rows in its table; what is refused, and how it is said."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from safetensors.numpy import load, save

import keyfed as library
from keyfed.config.schema import PrivacyConfig
from keyfed.errors import DataError, PrivacyError, RunError
from keyfed.keyboard import compact
from keyfed.model.counts import metadata_of
from keyfed.model.mixture import BEST, COUNTED, mixture_of, places_of
from keyfed.model.tables import texts_of
from keyfed.private.dp.ledger import read_ledger
from keyfed.reports.finished import with_data
from keyfed.run.counts.command import Counting, count_run, excluded_of, read_counts, refuse_counts, score_counts
from keyfed.run.counts.gather import Gathering, groups_of
from keyfed.run.counts.mixing import laid_out, score_models
from keyfed.run.counts.noise import CountNoise, check_booked
from keyfed.run.counts.release import NetworkReader, weights_text
from keyfed.run.evaluate import evaluate_ngram, evaluate_ngram_sentences, headline, total
from keyfed.run.folder import read_result
from keyfed.text.batches import line_bounds
from keyfed.text.vocab import EOS
from keyfed.wire.messages import Rejected
from tests.end_to_end.conftest import run_command, write_corpus

COUNT = ("--order", "3", "--among", "4", "--megabytes", "0.1")


@pytest.fixture(scope="module", params=["stream", "packed"])
def counted(request, tmp_path_factory):
    """A run, counted: of streams, and of lines on their own."""
    root = tmp_path_factory.mktemp("counted")
    own = {"model_embed": 8, "model_hidden": 12, "data_vocab": 60, "data_window": 8, "lr": 2.0, "optimiser": "sgd"}
    own |= {"train_cohort": 3, "train_workers": 1, "train_valid_tokens": 500, "train_baselines": False}
    own |= {"data_batches": request.param, "data_unseen": 0.2}
    config = library.configure("fedavg", data=str(write_corpus(root / "corpus")), rounds=4, **own)
    library.train(config, root / "run")
    run_command("counts", root / "run", *COUNT)
    return root / "run"


def test_counts_are_written_tested_and_shown(counted, keyfed):
    stored = read_result(counted)["counts"]
    code, stdout, stderr = keyfed("evaluate", counted, "--json")
    assert code == 0, stderr
    assert json.loads(stdout)["counts"] == stored
    code, stdout, _ = keyfed("evaluate", counted)
    rows = [line.split("│")[1].strip() for line in stdout.splitlines() if line.count("│") > 2]
    assert rows[-5:] == ["federated", "counts", "mixture", "mixture + own", "cache"]  # in a narrow terminal
    for page in ("report.md", "report.html"):
        for row in ("federated counts", "mixture", "mixture + own cache", "; mixture with counts, test: "):
            assert row in (counted / page).read_text("utf-8"), (page, row)
    assert "Its mixture with federated counts has a test perplexity of" in stdout
    model, _ = read_counts(with_data(counted, None)[0])
    assert (model.about.k, model.about.epsilon, model.about.clients) == (3, None, 6)
    assert [int(c.min()) >= 3 for c in model.clients] == [True] * 3


def test_the_mixture_of_one_model_alone_is_that_model(counted):
    """With weights of 1 it is the network, with weights of 0 the count model: the figures of their own paths."""
    out = counted
    trained, prepared = with_data(out, None)
    model, mixture = read_counts(trained)
    shape = mixture.shape
    kind = trained.config.data.batching
    network = headline(trained.spec, trained.params, prepared.test, kind)[1]
    if trained.reads_lines:
        pooled = evaluate_ngram_sentences(model.model.nats, model.model.top, prepared.test)
    else:
        pooled = total(evaluate_ngram(model.model.nats, model.model.top, prepared.test))
    for weight, alone in ((1.0, network), (0.0, pooled.summary())):
        found = score_counts(trained, prepared, model, mixture_of(np.full(shape, weight).reshape(-1), shape[0]))
        for key in ("tokens", "perplexity", "top1", "top3"):
            assert found["mixture"]["test"].summary()[key] == pytest.approx(alone[key], rel=1e-4), key
    assert found["counts"]["test"].perplexity == pytest.approx(pooled.summary()["perplexity"], rel=1e-6)


def test_the_mixture_is_better_than_each_and_the_cache_is_a_persons_own(counted):
    rows = read_result(counted)["counts"]
    perplexity = {name: split["test"]["perplexity"] for name, split in rows.items()}
    assert perplexity["mixture"] < perplexity["counts"] * 1.001  # the network learnt next to nothing in four rounds
    assert perplexity["cache"] != perplexity["mixture"]


def test_buckets_are_the_same_for_one_text_and_for_many(counted):
    """Of streams, and of lines, each of which begins behind a line end."""
    trained, prepared = with_data(counted, None)
    model, _ = read_counts(trained)
    streams, lines = list(prepared.test.values()), trained.reads_lines
    pieces = streams
    if lines:
        cuts = [(stream, pairwise(line_bounds(stream))) for stream in streams]
        pieces = [np.append(EOS, stream[a:b]) for stream, bounds in cuts for a, b in bounds]
    for by in (BEST, COUNTED):
        laid = laid_out(model, texts_of(streams, EOS if lines else None), by, lines=lines)
        alone = np.concatenate([places_of(model, piece, by) for piece in pieces])
        assert laid.places[laid.text.predicted].tolist() == alone.tolist()
        assert len(set(alone.tolist())) > 3


def test_reading_with_both_models_ends_where_its_time_is_over(counted):
    trained, prepared = with_data(counted, None)
    model, mixture = read_counts(trained)
    texts = [(np.zeros(0, np.int32), stream) for stream in prepared.test.values()]
    looks = []

    def over():
        looks.append(1)
        raise Rejected("over limit", "the minutes are over")

    with pytest.raises(Rejected, match="the minutes are over"):
        score_models(
            trained.spec, trained.params, model, mixture, texts, EOS if trained.reads_lines else None, watch=over
        )
    reader = NetworkReader(trained.spec, trained.params, trained.reads_lines, over)
    with pytest.raises(Rejected, match="the minutes are over"):
        reader.mixture_cells(model, texts_of([texts[0][1]], EOS if trained.reads_lines else None))
    assert len(looks) >= 2


def test_what_the_weights_are_fitted_on_follows_from_the_number_of_clients_alone():
    """About 60,000 tokens, of some groups only where there are many clients; never of a part of a group."""
    for clients, groups in ((6, 2), (100, 1), (2_000, 2), (12_000, 12), (12_000, 1), (12_000, 3_000)):
        chosen, tokens = weights_text(clients, groups)
        assert 1 <= chosen <= groups
        assert chosen == groups or chosen * clients <= max(2_000 * groups, clients)
        assert 64 <= tokens <= 4_096
        assert chosen * clients / groups * tokens <= 60_000 + 64 * clients
    names = [f"client{n}" for n in range(10)]
    groups = groups_of(names, [np.array([1])] * 10, None, 2, 2)
    earlier = Gathering(groups, chains={groups[3].names: None})
    some = Gathering(groups).after(earlier, 2)
    assert [group.names for group in some.groups] == [groups[0].names, groups[2].names]
    assert Gathering(groups).after(earlier, 4).groups == [*groups[:3], groups[4]]  # the fourth stayed closed
    assert Gathering(groups).after(earlier).groups == groups
    assert some.chains is earlier.chains


def test_a_published_validation_text_is_read_as_a_whole(counted, tmp_path):
    """It is no client's, so nothing of it is cut off: neither for smoothing nor for the mixture's weights."""
    own = tmp_path / "run"
    shutil.copytree(counted, own)
    trained, prepared = with_data(own, None)
    stream = np.concatenate([*prepared.valid.values()] * 80)[:9_000].astype(np.int32)
    assert stream.size > 4_096
    population = replace(prepared.population, valid=next(iter(prepared.population.clients)).test)
    published = replace(prepared, valid={"published": stream}, population=population)
    how = Counting(order=3, among=4, megabytes=0.1)
    report = count_run(trained, published, how)
    text = texts_of([stream], EOS if trained.reads_lines else None)
    assert f"of {int(text.predicted.sum()):,} validation tokens" in report.note


def test_bad_input_is_one_line_with_numbers(counted, keyfed, tmp_path):
    out = counted
    for arguments, said in (
        (["--k", "2"], "--k is 2; expected 3 or more"),
        (["--k", "50"], "clients, and an n-gram needs 50"),
        (["--order", "9"], "--order is 9; the sketches hold n-grams of 1 to 6 words"),
        (["--megabytes", "0.0001"], "0.0001 MB a client leave"),
        (["--megabytes", "nan"], "--megabytes is nan; expected a number above 0, 1,000 at most"),
        (["--megabytes", "1e30"], "--megabytes is 1e+30; expected"),
        (["--most", "0"], "--cap is 1000 and --most is 0; expected 1 or more"),
        (["--cap", "0"], "--cap is 0 and --most is 20000; expected 1 or more"),
        (["--among", "2"], "--among is 2; a sum hides a client among 3 or more"),
    ):
        code, _, stderr = keyfed("counts", out, *arguments)
        assert (code, stderr.count("\n")) == (2, 1), stderr
        assert said in stderr
    broken = tmp_path / "broken"
    shutil.copytree(out, broken)
    data = bytearray((broken / "counts.safetensors").read_bytes())
    data[200] ^= 255
    (broken / "counts.safetensors").write_bytes(bytes(data))
    code, _, stderr = keyfed("evaluate", broken)
    assert code == 2
    assert "counts.safetensors is damaged" in stderr


def test_fewer_clients_than_a_sum_needs_are_refused(counted):
    trained, prepared = with_data(counted, None)
    refuse_counts(trained, prepared, Counting(among=4))
    few = replace(prepared, valid=dict(list(prepared.valid.items())[:2]))
    with pytest.raises(DataError, match=r"2 clients of .* have validation text, .* a client among 3 or more"):
        refuse_counts(trained, few, Counting(among=4))
    strict = replace(trained, config=replace(trained.config, secure=replace(trained.config.secure, floor=7)))
    with pytest.raises(DataError, match="has 6 clients, and a sum hides a client among 7"):
        refuse_counts(strict, prepared, Counting())


def test_masked_and_in_the_clear_write_the_same_file(counted, keyfed):
    pytest.importorskip("cryptography")
    out = counted
    written = [(out / name).read_bytes() for name in ("counts.safetensors", "mixture.json")]
    code, stdout, stderr = keyfed("counts", out, *COUNT, "--secure", "--json")
    assert code == 0, stderr
    assert json.loads(stdout)["masked"]
    assert [(out / name).read_bytes() for name in ("counts.safetensors", "mixture.json")] == written


def test_characters_are_refused(train_quietly, keyfed):
    out = train_quietly(rounds=1, model_name="char-lstm")
    code, _, stderr = keyfed("counts", out)
    assert code == 2
    assert "reads characters" in stderr


def claims_less_than_is_booked(out):
    """Check that a private run's counts are those of their ledger."""
    about = read_counts(with_data(out, None)[0])[0].about
    check_booked(out, about)
    for changed in ({"epsilon": 1.0}, {"delta": 1e-9}, {"verdict": "GUARANTEE"}):
        with pytest.raises(PrivacyError, match="the file is not that of"):
            check_booked(out, replace(about, **changed))
    with pytest.raises(PrivacyError, match="its counts have no noise"):
        check_booked(out, replace(about, epsilon=None, delta=None, verdict="NONE"))
    trained = with_data(out, None)[0]
    private = replace(trained, config=replace(trained.config, privacy=PrivacyConfig(epsilon=8.0)))
    assert read_counts(private) is not None
    stored = (out / "counts.safetensors").read_bytes()
    said = metadata_of(stored)["about"].replace(f'"epsilon": {about.epsilon}', '"epsilon": 1.0')
    (out / "counts.safetensors").write_bytes(save(load(stored), {"about": said}))
    for read in (read_counts, lambda run: compact.read_counts(run.folder, len(run.vocab), private=True)):
        with pytest.raises(PrivacyError, match="epsilon 1 at delta"):
            read(private)
    (out / "counts.safetensors").write_bytes(stored)
    (out / "counts.privacy").rename(out / "aside")  # an ε without a ledger is refused of any run
    for read in (read_counts, lambda run: compact.read_counts(run.folder, len(run.vocab), private=False)):
        with pytest.raises(PrivacyError, match="has no release"):
            read(trained)
    (out / "aside").rename(out / "counts.privacy")


def test_what_epsilon_excludes_is_said_of_the_run():
    config = library.configure("fedavg")
    assert excluded_of(config).startswith("the vocabulary, the network, the test rows and")
    private = replace(config, privacy=PrivacyConfig(epsilon=2.0), data=replace(config.data, vocab_file="words.json"))
    assert excluded_of(private) == (
        "the test rows and each client's own cache have no noise: this epsilon excludes them; the network's own "
        "epsilon adds to it"
    )


def test_weights_of_other_counts_are_refused(counted, keyfed, tmp_path):
    """Killed between the two files, a run has counts of one time and weights of another."""
    out = tmp_path / "mixed"
    shutil.copytree(counted, out)
    trained = with_data(out, None)[0]
    stored = (out / "counts.safetensors").read_bytes()
    assert read_counts(trained)[1].counts_sha256 == hashlib.sha256(stored).hexdigest()
    assert compact.read_mixture(out) == read_counts(trained)[1]
    said = metadata_of(stored)["about"].replace('"cap": 1000', '"cap": 999')
    (out / "counts.safetensors").write_bytes(save(load(stored), {"about": said}))
    for read in (lambda: read_counts(trained), lambda: compact.read_mixture(out)):
        with pytest.raises(RunError, match="was fitted for other counts than those next to it"):
            read()
    code, _, stderr = keyfed("evaluate", out)
    assert (code, stderr.count("\n")) == (2, 1), stderr


def test_with_a_budget_every_sum_is_booked_and_noised(counted, keyfed, tmp_path, monkeypatch):
    pytest.importorskip("dp_accounting")
    summed, add = {}, CountNoise.add

    def seen(self, what, cells, norm):
        summed[what] = int(cells.sum()), norm
        return add(self, what, cells, norm)

    monkeypatch.setattr(CountNoise, "add", seen)
    out = tmp_path / "noised"
    shutil.copytree(counted, out)
    budget = ("--order", "2", "--megabytes", "0.1", "--dp", "epsilon=8", "--population", "100000")
    without = (out / "counts.safetensors").read_bytes()
    code, _, stderr = keyfed("counts", out, *budget)
    assert (code, stderr.count("\n")) == (2, 1)
    assert "counts.safetensors has counts of these clients without noise: who has seen it knows more than" in stderr
    assert (out / "counts.safetensors").read_bytes() == without
    assert not (out / "counts.privacy").exists()
    (out / "counts.safetensors").unlink()
    code, _, stderr = keyfed("counts", out, *budget, "--cap", "4")
    assert code == 2
    assert "with --dp an n-gram is counted by clients" in stderr
    code, stdout, stderr = keyfed("counts", out, *budget, "--json")
    assert code == 0, stderr
    report = json.loads(stdout)
    assert report["terms"]["verdict"] == "SIMULATED"
    assert 7 < report["terms"]["epsilon"] <= 8
    without = "the vocabulary, the network, the test rows and each client's own cache have no noise"
    assert report["excluded"] == f"{without}: this epsilon excludes them"
    booked = read_ledger(out / "counts.privacy")
    assert (booked.terms.raw_vocabulary, booked.terms.secure) == (True, False)
    assert [e.what for e in booked.entries] == [
        f"counts {what}" for what in ("recount 1", "sketch 2", "recount 2", "smoothing 1", "smoothing 2", "mixture")
    ]
    assert {f"counts {what}" for what in summed} == {e.what for e in booked.entries}
    for what in ("smoothing 1", "smoothing 2", "mixture"):  # a client adds its first 16 tokens, maybe to one cell
        tokens, norm = summed[what]
        assert norm == 16
        assert tokens <= 16 * report["terms"]["clients"], what
    model, _ = read_counts(with_data(out, None)[0])
    assert model.about.epsilon == report["terms"]["epsilon"]
    assert all(level["threshold"] > 3 for level in report["levels"])
    claims_less_than_is_booked(out)
    code, _, stderr = keyfed("counts", out, *budget)
    assert code == 2
    assert "has 6 releases already" in stderr
    written = (out / "counts.safetensors").read_bytes()
    code, _, stderr = keyfed("counts", out, *COUNT)
    assert (code, stderr.count("\n")) == (2, 1)
    assert "counts.privacy has 6 releases: counts without noise in their place would void their epsilon" in stderr
    assert (out / "counts.safetensors").read_bytes() == written
