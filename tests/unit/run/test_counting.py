"""Counts over secure sums: the protocol gives the simulation's numbers, and what fewer than k wrote is not released."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keyfed.engine.sums.tallies import Entries, Fields, Sketch, added, read_recount, recount_fields, vectors
from keyfed.errors import ConfigError, Lied, RunError
from keyfed.model.counts import CountModel, CountTerms, counts_from_bytes, counts_to_bytes, grams_of
from keyfed.model.mixture import BINS
from keyfed.model.tables import texts_of, written
from keyfed.private.secagg.collector import Collector
from keyfed.private.secagg.threshold import SecureSettings
from keyfed.run.counts import fit, gather, levels
from keyfed.run.counts.fit import fit_levels
from keyfed.run.counts.gather import Gathering, PublicSum, groups_of
from keyfed.run.counts.levels import CountPlan, count_ngrams, sketches_of

V, END, CLIENTS, K = 14, 2, 12, 3
NAMES = [f"client{n}" for n in range(CLIENTS)]


def streams(seed=0, length=40):
    """Text in which common words follow common words, and every client has some that others lack."""
    random = np.random.default_rng(seed)
    return [np.minimum(random.geometric(0.25, length) + 1, V - 1).astype(np.int32) for _ in range(CLIENTS)]


def gathering(text, settings=None, lost=lambda purpose, name: False, among=6):
    return Gathering(groups_of(NAMES, text, END, among, K), settings, lost)


def plan(order=3, cap=4, most=10_000, width=400):
    return CountPlan(order, K, cap, most, "ab" * 32, tuple(Sketch(3, width, n) for n in range(2, order + 1)))


def truth(text, n, cap, lost=()):
    """Count n-grams by hand: lines on their own, the line end before a line in front."""
    clients, counts = Counter(), Counter()
    for name, stream in zip(NAMES, text, strict=True):
        own, line = Counter(), [END]
        for token in stream.tolist():
            line.append(token)
            if len(line) - (n == 1) >= n:
                own[tuple(line[-n:])] += 1
            if token == END:
                line = [END]
        if name not in lost:
            clients.update(own.keys())
            counts.update({gram: min(count, cap) for gram, count in own.items()})
    return {gram: (c, counts[gram]) for gram, c in clients.items() if c >= K}


def as_found(tables):
    out = []
    for n, table in enumerate(tables, 1):
        grams = map(tuple, grams_of([t.keys for t in tables[:n]], V).tolist())
        out.append(dict(zip(grams, zip(table.clients.tolist(), table.counts.tolist(), strict=True), strict=True)))
    return out


def test_what_is_released_is_what_k_clients_wrote_counted_by_hand():
    text = streams()
    found = as_found(count_ngrams(gathering(text), plan(), V)[0])
    assert [len(level) for level in found] == [len(truth(text, n, 4)) for n in (1, 2, 3)]
    assert found == [truth(text, n, 4) for n in (1, 2, 3)]


@pytest.mark.parametrize("drop", [False, True], ids=["all stay", "drop-outs"])
def test_the_protocol_and_the_simulation_release_the_same_bit_for_bit(drop):
    """Real members and collectors; with one client that vanishes two more are left out, for the rest of the count."""
    text, sent = streams(3), {}

    def lost(purpose, name):
        return drop and (purpose, name) in {
            ("recount 1", "client7"),
            ("sketch 2", "client4"),
            ("smoothing 2", NAMES[0]),
        }

    for secure in (None, SecureSettings()):
        summed = gathering(text, secure, lost, among=12)
        tables, report = count_ngrams(summed, plan(order=2), V)
        fitted = fit_levels(gathering(streams(9), secure, lost, among=12), tables, V)
        assert not summed.closed
        assert summed.missing == ({"recount 1": 1, "sketch 2": 4, "recount 2": 4} if drop else dict.fromkeys(
            ("recount 1", "sketch 2", "recount 2"), 0))  # fmt: skip
        sent[secure is None] = (as_found(tables), report, summed.moved(), [a.tobytes() for a in
                                  counts_arrays(fitted)])  # fmt: skip
    assert sent[True] == sent[False]
    if drop:
        assert sent[True][0][0] == truth(text, 1, 4, {"client7"})
        words = {gram[0] for gram in sent[True][0][0]}
        pairs = truth(text, 2, 4, {"client7", "client4", "client9", "client8"})  # the last by name
        assert sent[True][0][1] == {gram: found for gram, found in pairs.items() if words >= set(gram)}


def counts_arrays(model):
    return [array for level in model.levels for array in (level.keys, level.prob, level.backoff)]


def test_every_message_before_the_opening_is_masked(monkeypatch):
    """Of what the server gets hardly a word is 0, and nearly all that clients write are."""
    got, real = [], Collector.take_masked
    monkeypatch.setattr(Collector, "take_masked", lambda self, name, v: (got.append(v.copy()), real(self, name, v)))
    text = streams(3)
    count_ngrams(gathering(text, SecureSettings()), plan(order=2), V)
    wide = [vector for vector in got if vector.size > 100]  # those of the sketch
    assert len(wide) == CLIENTS
    assert all((vector == 0).mean() < 0.01 for vector in wide)
    assert len({vector.tobytes() for vector in wide}) == CLIENTS


def dealt(steps):
    """Twelve kinds of lines; client i writes those of i + steps, so that as many clients write each kind."""
    return [np.array([t for s in steps for t in (3 + (i + s) % CLIENTS, END)], np.int32) for i in range(CLIENTS)]


def apart(a, b):
    """How far two samples of words are from one distribution: chi-square of leading bytes, in standard deviations."""
    counts = np.array([np.bincount(words.view(np.uint8)[3::4], minlength=256) for words in (a, b)], float)
    expected = np.outer((a.size, b.size), counts.sum(axis=0) / (a.size + b.size))
    there = expected > 0
    free = there.any(axis=0).sum() - 1
    chi = (np.square(counts - expected)[there] / expected[there]).sum()
    return (chi - free) / np.sqrt(2 * free)


def test_populations_of_equal_sums_look_alike_to_the_server(monkeypatch):
    """Who wrote what differs, no sum does: what comes of each client has one distribution, what it wrote has not."""
    seen, real, write = {}, Collector.take_masked, vectors

    def taken(self, name, vector):
        seen.setdefault((name, "sent", dealing), []).append(vector.copy())
        return real(self, name, vector)

    def wrote(*given):
        made = write(*given)
        for name, vector in zip(NAMES, made, strict=True):
            seen.setdefault((name, "written", dealing), []).append(vector)
        return made

    monkeypatch.setattr(Collector, "take_masked", taken)
    monkeypatch.setattr(gather, "vectors", wrote)
    released = []
    for dealing in (0, 1, 2, 4, 8), (0, 3, 5, 6, 10):
        counted = Gathering(groups_of(NAMES, dealt(dealing), END, CLIENTS, K), SecureSettings())
        tables, _ = count_ngrams(counted, plan(order=2, width=20_000), 3 + CLIENTS)  # so wide that no two meet
        released.append([[column.tolist() for column in (t.keys, t.clients, t.counts)] for t in tables])
    assert released[0] == released[1]
    assert len(released[0][1][0]) == 2 * CLIENTS
    one, other = (
        {what: [np.concatenate(seen[name, what, of]) for name in NAMES] for what in ("sent", "written")}
        for of in ((0, 1, 2, 4, 8), (0, 3, 5, 6, 10))
    )
    assert max(map(apart, one["sent"], other["sent"])) < 6
    assert min(map(apart, one["sent"], one["written"])) > 30  # sees what is not masked
    assert all((a != b).any() for a, b in zip(one["written"], other["written"], strict=True))
    total, same = (np.sum(all_["written"], axis=0, dtype=np.int64) for all_ in (one, other))
    assert (total == same).all()


def test_a_group_whose_sum_stays_closed_is_left_out_to_the_end_and_named():
    def lost(purpose, name):
        return purpose == "recount 1" and name in NAMES[:2]

    few = gathering(streams(3), SecureSettings(), lost, among=4)
    count_ngrams(few, plan(order=2), V)
    assert len(few.closed) == 1
    assert few.closed[0].startswith("recount 1, group 0: 2 of 4 clients uploaded")
    assert few.missing == dict.fromkeys(("recount 1", "sketch 2", "recount 2"), 4)


@pytest.mark.parametrize("secure", [None, SecureSettings()], ids=["clear", "secure"])
def test_one_count_does_not_single_out_a_client(secure, monkeypatch):
    """The server reads the sketch at the list of the recount, and subtracts: what is left is of nobody, or of many."""
    opened, real = {}, Gathering.sums

    def kept(self, public, words, write):
        for found in real(self, public, words, write):
            opened[public.purpose] = (found, public)
            yield found

    monkeypatch.setattr(Gathering, "sums", kept)
    text, victim = streams(3), "client4"
    summed = gathering(text, secure, lambda purpose, name: (purpose, name) == ("recount 2", victim), among=12)
    wide = plan(order=2, width=20_000)  # so wide that hardly any two n-grams meet
    tables, _ = count_ngrams(summed, wide, V)
    (sketched, _), (recounted, public) = opened["sketch 2"], opened["recount 2"]
    keys, sketch = public.numbers["list.keys"], wide.sketches[0]
    cells = sketch.fields(CLIENTS).read(sketched.total)[0]
    estimate = np.min([cells[sketch.cell(row, keys)] for row in range(sketch.depth)], 0)
    gone = estimate - recount_fields(keys.size, CLIENTS, 4).read(recounted.total)[0]
    wrote = [np.isin(keys, written(texts_of([text[n]], END), tables[:1], V).key) for n in range(CLIENTS)]
    alone = wrote[NAMES.index(victim)]
    assert (alone <= (gone > 0)).all()
    assert (gone != alone).any(), "the difference of two sums is one client's text"
    assert (gone == sum(wrote[NAMES.index(name)].astype(int) for name in (victim, "client8", "client9"))).all()
    assert len(recounted.survivors) == CLIENTS - K


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_sums_of_one_text_never_differ_by_a_few_clients(data):
    """Whoever is lost: every combination of a group's sums is of k clients or more."""
    names = st.sets(st.sampled_from(NAMES), max_size=3)
    losses = {purpose: data.draw(names) for purpose in ("recount 1", "sketch 2", "recount 2")}
    summed = gathering(streams(3), None, lambda purpose, name: name in losses[purpose], among=12)
    found = []
    for purpose in losses:
        try:
            found += [set(one.survivors) for one in summed.sums(PublicSum(purpose, {}), 1, nothing)]
        except RunError:
            break
    for earlier, later in combinations(found, 2):
        assert later <= earlier
        assert len(earlier - later) not in range(1, K)
        assert 2 * len(later) > CLIENTS


def nothing(text):
    return Entries(*np.zeros((3, 0), np.int64))


@pytest.mark.parametrize("secure", [None, SecureSettings()], ids=["clear", "secure"])
def test_a_sum_that_lacks_half_of_its_clients_ends_the_count(secure):
    def lost(purpose, name):
        return purpose == "sketch 2" and name in NAMES[:6]

    with pytest.raises(RunError, match="the sum sketch 2 lacks 6 of 12 clients"):
        count_ngrams(gathering(streams(3), secure, lost), plan(order=2), V)


def test_recounts_that_lie_end_the_count_where_they_are_half(monkeypatch):
    def refuse(*_):
        raise Lied("a recount that honest clients cannot have")

    monkeypatch.setattr(levels, "read_recount", refuse)
    with pytest.raises(RunError, match=r"the sum recount 1 lacks 6 of 12 clients .*honest clients cannot have"):
        count_ngrams(gathering(streams(3)), plan(order=1), V)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 20))
def test_no_group_is_smaller_than_the_least(clients, among, least):
    names = [str(n) for n in range(clients)]
    sizes = [len(g.names) for g in groups_of(names, [np.array([1])] * clients, None, among, least)]
    assert sum(sizes) == clients
    assert min(sizes) >= min(least, clients)
    assert max(sizes) <= max(among, 2 * least - 1)
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None, max_examples=12)
@given(st.integers(K, CLIENTS), st.integers(K, CLIENTS))
@example(5, 4)  # cut equally, a group of two and one of three
def test_in_the_clear_and_masked_are_the_same_for_every_number_of_clients(clients, among):
    names, text = NAMES[:clients], streams(4)[:clients]
    found = []
    for secure in (None, SecureSettings()):
        summed = Gathering(groups_of(names, text, END, among, K), secure)
        found.append((as_found(count_ngrams(summed, plan(order=1), V)[0]), summed.closed, summed.missing))
    assert found[0] == found[1]
    assert found[0][1:] == ([], {"recount 1": 0})


def everything_shared_is_of_k_clients(text, monkeypatch):
    """Check the file, and every list of n-grams that clients get, against counts by hand and the opened sketches."""
    lists = []
    real = levels._recounted

    def seen(gathering, plan, tables, keys, estimates, vocab, noised):
        if tables:
            lists.append((keys, estimates))
        return real(gathering, plan, tables, keys, estimates, vocab, noised)

    monkeypatch.setattr(levels, "_recounted", seen)
    tables, _ = count_ngrams(gathering(text), plan(width=60), V)
    for keys, estimates in lists:
        assert keys.size == 0 or estimates.min() >= K
    for n, level in enumerate(as_found(tables), 1):
        right = truth(text, n, 4)
        assert all(gram in right for gram in level), "an n-gram of fewer than k clients is released"
    terms = CountTerms(K, 4, 10_000, CLIENTS, "ab" * 32)
    model = fit_levels(gathering(streams(9)), tables, V)
    data = counts_to_bytes(CountModel(model, tuple(t.clients for t in tables), tuple(t.counts for t in tables), terms))
    assert min(int(c.min()) for c in counts_from_bytes(data, V, "here").clients if c.size) >= K


def test_nothing_of_fewer_than_k_clients_is_shared(monkeypatch):
    """The sketch is so narrow that some of its estimates are too high: the recount decides."""
    everything_shared_is_of_k_clients(streams(5), monkeypatch)


def test_a_mutant_that_releases_one_client_less_is_found(monkeypatch):
    monkeypatch.setattr(levels, "released", lambda clients, least: clients >= least - 1)
    with pytest.raises(AssertionError, match="fewer than k clients"):
        everything_shared_is_of_k_clients(streams(5), monkeypatch)


def test_a_mutant_that_puts_smaller_estimates_on_a_list_is_found(monkeypatch):
    real = Sketch.admitted
    monkeypatch.setattr(Sketch, "admitted", lambda self, cells, keys, least: real(self, cells, keys, least - 1))
    with pytest.raises(AssertionError):
        everything_shared_is_of_k_clients(streams(5), monkeypatch)


def what_is_fitted_is_of_k_clients(monkeypatch):
    """Check the histograms that numbers are fitted on against the clients of every bucket, counted by hand."""
    wrote, read = [], []
    write, smooth, weigh = fit.Histogram.write, fit.fitted, fit.fit_weights

    def written(self, client, cell, members, most):
        here = {}
        for who, where in zip(client.tolist(), cell.tolist(), strict=True):
            here.setdefault(where // self.width, set()).add(who)
        wrote.append({bucket: len(clients) for bucket, clients in here.items()})
        return write(self, client, cell, members, most)

    monkeypatch.setattr(fit.Histogram, "write", written)
    monkeypatch.setattr(fit, "fitted", lambda level, found: (read.append(found), smooth(level, found))[1])
    monkeypatch.setattr(fit, "fit_weights", lambda found: (read.append(found), weigh(found))[1])
    tables, _ = count_ngrams(gathering(streams(5)), plan(), V)
    fit_levels(gathering(streams(9, length=6), among=12), tables, V, k=K)

    def cells(text):
        bucket = text.tokens % 7  # rare words' buckets are of few clients
        return text.client[text.predicted], (bucket * BINS + text.tokens)[text.predicted]

    fit.fit_mixture(gathering(streams(9, length=6), among=12), b"", 1, cells, k=K)
    assert any(0 < clients < K for here in wrote for clients in here.values()), "no bucket is of fewer than k clients"
    assert any(clients >= K for here in wrote for clients in here.values())
    for here, found in zip(wrote, read, strict=True):
        filled = np.flatnonzero(found.reshape(len(found), -1).any(1))
        assert all(here[bucket] >= K for bucket in filled.tolist()), "a number is fitted on text of fewer than k"
        assert len(filled) == sum(clients >= K for clients in here.values())


def test_smoothing_and_weights_are_fitted_on_the_text_of_k_clients_by_bucket(monkeypatch):
    what_is_fitted_is_of_k_clients(monkeypatch)


def test_a_mutant_that_fits_a_bucket_of_fewer_clients_is_found(monkeypatch):
    monkeypatch.setattr(fit, "enough", lambda clients, k: clients >= k - 1)
    with pytest.raises(AssertionError, match="on text of fewer than k"):
        what_is_fitted_is_of_k_clients(monkeypatch)


def test_buckets_are_counted_over_groups_and_masked_as_in_the_clear():
    """Two groups of two clients each in a bucket are four."""
    tables, _ = count_ngrams(gathering(streams(5)), plan(), V)
    fitted = [
        counts_arrays(fit_levels(gathering(streams(9), secure, among=6), tables, V, k=7))
        for secure in (None, SecureSettings())
    ]
    assert [a.tobytes() for a in fitted[0]] == [a.tobytes() for a in fitted[1]]
    few = counts_arrays(fit_levels(gathering(streams(9), among=6), tables, V, k=CLIENTS + 1))
    assert all(np.isfinite(array).all() for array in few), "no bucket at all is fitted"


def test_a_client_contributes_at_most_m_n_grams_those_most_likely_shared():
    text = streams(1)
    seen = []

    def lost(purpose, name):
        seen.append((purpose, name))
        return False

    whole = as_found(count_ngrams(gathering(text, lost=lost), plan(order=2), V)[0])
    few = as_found(count_ngrams(gathering(text), plan(order=2, most=5), V)[0])
    for n in (0, 1):
        assert sum(c for c, _ in few[n].values()) <= 5 * CLIENTS < sum(c for c, _ in whole[n].values())
    assert len(few[1]) >= 3


@settings(deadline=None)
@given(st.data())
def test_cells_of_any_width_are_read_as_they_were_written(data):
    most = tuple(data.draw(st.lists(st.integers(1, 5_000), min_size=1, max_size=3)))
    lengths = tuple(data.draw(st.integers(1, 9)) for _ in most)
    fields, clients = Fields(lengths, most), 3
    values = [np.array(data.draw(st.lists(st.integers(0, m // clients), min_size=clients * n, max_size=clients * n)))
              .reshape(clients, n) for m, n in zip(most, lengths, strict=True)]  # fmt: skip
    entries = [Entries(np.repeat(np.arange(clients), v.shape[1]), np.tile(np.arange(v.shape[1]), clients),
                       v.reshape(-1)) for v in values]  # fmt: skip
    written = fields.write(entries)
    alone = vectors(written, fields.words, clients)
    total = added(written, fields.words, np.ones(clients, bool))
    assert np.array_equal(sum(alone, np.zeros(fields.words, np.uint32)), total)
    for got, own in zip(fields.read(total), values, strict=True):
        assert got.tolist() == own.sum(0).tolist()


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=60, unique=True), st.integers(0, 2**20))
def test_a_sketch_is_never_below_the_number_of_clients(keys, seed):
    keys = np.array(keys)
    sketch, clients = Sketch(2, 16, seed), 4
    who = np.random.default_rng(seed).random((clients, keys.size)) < 0.5
    client, which = np.nonzero(who)
    fields = sketch.fields(clients)
    total = added(fields.write([sketch.write(client, keys[which])]), fields.words, np.ones(clients, bool))
    found, estimates = sketch.admitted(fields.read(total)[0], keys, 0)
    assert found.tolist() == keys.tolist()
    assert (estimates >= who.sum(0)).all()
    assert estimates.max() <= clients


def test_a_recount_that_honest_clients_cannot_have_is_refused():
    fields = recount_fields(2, 5, 4)
    for wrote, often in ((6, 8), (3, 13), (3, 2)):
        total = added(fields.write([Entries(*np.array([[0], [1], [wrote]])), Entries(*np.array([[0], [1], [often]]))]),
                      fields.words, np.ones(1, bool))  # fmt: skip
        with pytest.raises(Lied):
            read_recount(fields, total, 5, 4)


@pytest.mark.parametrize("seed", range(4))
def test_every_distribution_sums_to_one(seed):
    text = streams(seed, length=60)
    tables, _ = count_ngrams(gathering(text), plan(), V)
    model = fit_levels(gathering(streams(seed + 50)), tables, V)
    random = np.random.default_rng(seed)
    for context in [[], [END], [13, 13], *random.integers(2, V, (40, 3)).tolist()]:
        p = model.next(np.array(context, np.int64))
        assert p.sum() == pytest.approx(1, abs=1e-9)
        assert (p > 0).all()


def test_a_budget_too_small_for_one_level_is_refused_with_numbers():
    with pytest.raises(ConfigError, match=r"leave 6,250 cells a row .* words \(10,000\); give --megabytes 0.16"):
        sketches_of(1e5, 2, 50, 10_000, 7, 20)
    assert len(sketches_of(2e5, 2, 50, 10_000, 7, 20)) == 1
