"""What a secure sum costs: CPU seconds of a client and of the server, on one core (`--help` says how).

    python benchmarks/secure_sum.py [--clients 50] [--lost 5] [--length 1000000] [--json]

Complete graph, usual threshold. The lost clients share their keys and vanish before their upload, the dearest case for
the server: a mask per lost client and survivor. A client's figure is the mean over the survivors, from signed keys to
the answer (signatures of the whole cohort checked). The server's is everything from the first package to the opened
sum. The sum is compared with numpy's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from keyfed.private.secagg.collector import Collector
from keyfed.private.secagg.keys import Identity, is_signed, make_keys
from keyfed.private.secagg.member import Member
from keyfed.private.secagg.terms import SumTerms
from keyfed.private.secagg.threshold import usual_threshold


class Meter:
    """CPU seconds by party and step."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.clock = clock
        self.seconds: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))

    @contextmanager
    def of(self, party: str, step: str) -> Iterator[None]:
        """Count the time of the block."""
        start = self.clock()
        yield
        self.seconds[party][step] += self.clock() - start


def measure(clients: int, lost: int, length: int) -> dict[str, object]:
    """Run one sum; return seconds, bytes and whether the sum was right."""
    meter, names = Meter(), [f"client-{at:05d}" for at in range(clients)]
    identities = {name: Identity.make() for name in names}
    known = {name: identity.public for name, identity in identities.items()}
    generator = np.random.default_rng(0)
    keys = {}
    for name in names:
        with meter.of(name, "keys"):
            keys[name] = make_keys(identities[name], name, 1)
    terms = SumTerms(b"benchmark", tuple(signed for _, signed in keys.values()), usual_threshold(clients), length)
    with meter.of("server", "start"):
        collector = Collector(terms)
    members, sent, expected = {}, {}, np.zeros(length, np.uint32)
    for name in names:
        is_signed.cache_clear()  # every client checks every signature itself
        with meter.of(name, "shares"):
            members[name] = Member(name, keys[name][0], terms, known)
            packages = members[name].shares()
        sent[name] = sum(map(len, packages.values()))
        with meter.of("server", "shares"):
            collector.take_shares(name, packages)
    with meter.of("server", "shares"):
        alive, parcels = collector.forward()
    for name in names[lost:]:
        values = generator.integers(0, 1 << 32, length, np.uint32)
        expected += values
        with meter.of(name, "masked"):
            vector = members[name].masked(values, alive, parcels[name])
        sent[name] += vector.nbytes
        with meter.of("server", "masked"):
            collector.take_masked(name, vector)
    survivors = collector.survivors
    for name in survivors:
        with meter.of(name, "unmask"):
            answer = members[name].unmask(survivors)
        sent[name] += len(answer)
        with meter.of("server", "unmask"):
            collector.take_unmask(name, answer)
    with meter.of("server", "total"):
        total = collector.total()
    steps = {
        step: sum(meter.seconds[name][step] for name in survivors) / len(survivors)
        for step in ("keys", "shares", "masked", "unmask")
    }
    return {
        "clients": clients, "lost": lost, "length": length, "threshold": terms.threshold,
        "client_seconds": sum(steps.values()), "server_seconds": sum(meter.seconds["server"].values()),
        "client_steps": steps, "server_steps": dict(meter.seconds["server"]),
        "client_bytes": max(sent.values()), "exact": bool((total == expected).all()),
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--lost", type=int, default=5, help="clients lost between their shares and their upload")
    parser.add_argument("--length", type=int, default=1_000_000, help="words of the vector: one per parameter")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.clients, args.lost, args.length)
    if args.json:
        print(json.dumps(result))
        return
    print(f"{args.length:,} words, {args.clients} clients, {args.lost} lost, threshold {result['threshold']}")
    for party in ("client", "server"):
        steps = result[f"{party}_steps"]
        assert isinstance(steps, dict)
        parts = ", ".join(f"{step} {seconds * 1e3:.1f}" for step, seconds in steps.items())
        print(f"{party}  {result[f'{party}_seconds']:.3f} CPU seconds  (ms: {parts})")
    print(f"client sends {result['client_bytes']:,} bytes; sum {'exact' if result['exact'] else 'WRONG'}")


if __name__ == "__main__":
    main()
