"""Every parser of bytes from the network, on hostile inputs: time and peak memory are at most linear in the length.

    python benchmarks/hostile_parsers.py [--least 16] [--most 512] [--repeats 3] [--only NAME]

Each parser reads over thirty hostile shapes of exactly 16, 32, … 512 kB, within what the largest message of its kind
may have. An input that is refused is as good as one that is read. Two numbers of each pair of parser and shape may be
2.5 at most, for CPU time and for peak memory (tracemalloc, of what the parser allocates): the largest ratio of two
neighbouring lengths, and the growth by a doubling that fits all lengths best. What takes under a millisecond or 256 kB
is not divided.

The rule for CPU time is the same for all pairs. A pass times every length in turn, some times over, without the garbage
collector (as `timeit` does); a length counts with its least time. The first pass parses each input once a time. On busy
cores it overstates: short work is undisturbed more often than long work. So a pair above 2.5 is measured anew in twelve
even passes, whatever they show: a time is then of as many parses as give the same number of bytes for every length. The
pair is judged by the least time of each length over all its even passes, which are made in turn with the other such
pairs. The table says how many even passes were above by themselves. Ends with 1 where a ratio is larger. The last row
is a control: the regular expression that protocol 1 counted nesting with, which must be noticed.
"""

from __future__ import annotations

import argparse
import gc
import math
import re
import socket
import struct
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from keyfed.deploy.enrolment import read_enrolment, read_leave
from keyfed.errors import KeyfedError
from keyfed.federated.public.numbers import check_public
from keyfed.private.dp.accounting import MOST_MEMBERS
from keyfed.private.secagg.collector import Collector
from keyfed.private.secagg.keys import Identity, SignedKeys, make_keys
from keyfed.private.secagg.terms import SumTerms
from keyfed.private.secagg.wire import unseal
from keyfed.run.remote.device import _vocab_of, own_config
from keyfed.wire.client import COHORT_HEAD
from keyfed.wire.flower.gate import allowed
from keyfed.wire.flower.server import Announced, Coming
from keyfed.wire.frames import HEAD, read_frame
from keyfed.wire.frames import MAGIC as FRAME_MAGIC
from keyfed.wire.messages import BEGIN_HEAD, MAGIC, control_head, finished_of, read_tensors, unpack
from keyfed.wire.promise import Promise, share_of
from keyfed.wire.server import _evaluated

Shape = Callable[[int], bytes]
Parser = Callable[[bytes], object]
Pair = tuple[str, str]  # the names of a parser and of a shape
RATIO, PASSES = 2.5, 12  # even passes of a pair whose first pass is above
LEAST_SECONDS, LEAST_BYTES = 1e-3, 256 << 10  # below which a ratio says nothing
LAYERS = {f"layer{k}.weight": ((2, 2), torch.float32) for k in range(2500)}  # a header of 512 kB can be meant
REPORT_HEAD, SHARES_HEAD = control_head(len(LAYERS)), control_head(MOST_MEMBERS)
LEGACY = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')


def repeated(unit: bytes, head: bytes = b"", tail: bytes = b"") -> Shape:
    """A shape that repeats a few bytes."""
    return lambda size: head + unit * max(1, (size - len(head) - len(tail)) // len(unit)) + tail


def listed(unit: bytes, head: bytes = b"[", tail: bytes = b"]") -> Shape:
    """A shape that is well-formed: one value, repeated with commas between."""

    def make(size: int) -> bytes:
        count = max(1, (size - len(head) - len(tail) + 1) // (len(unit) + 1))
        return head + b",".join([unit] * count) + tail

    return make


def numbered(pattern: bytes, head: bytes = b"{", tail: bytes = b"}") -> Shape:
    """A shape that is well-formed: entries that differ by a number, as many as fit."""

    def make(size: int) -> bytes:
        entries, room = [pattern % 0], size - len(head) - len(tail) - len(pattern % 0)
        while (room := room - 1 - len(pattern % len(entries))) >= 0:
            entries.append(pattern % len(entries))
        return head + b",".join(entries) + tail

    return make


def filled(shape: Shape, size: int) -> bytes:
    """A shape of exactly this size, so that lengths double: white space behind what did not come out even."""
    return shape(size)[:size].ljust(size)


SHAPES: dict[str, Shape] = {
    "unterminated string of escaped quotes": repeated(b'\\"', b'{"'),
    "unterminated string of backslashes": repeated(b"\\", b'{"'),
    "string of escaped backslashes": repeated(b"\\\\", b'{"a":"', b'"}'),
    "escaped quote after every letter": repeated(b'a\\"', b'{"a":"', b'"}'),
    "quotes": repeated(b'"'),
    "empty strings": listed(b'""'),
    "strings of two letters": listed(b'"ab"'),
    "quotes and brackets": repeated(b'"[{'),
    "opening brackets": repeated(b"["),
    "opening braces with keys": repeated(b'{"a":'),
    "closing brackets": repeated(b"]"),
    "empty lists": listed(b"[]"),
    "empty objects": listed(b"{}"),
    "lists eleven deep": listed(b"[[[[[[[[[[]]]]]]]]]]"),
    "objects of one key": listed(b'{"a":1}'),
    "object in an object": listed(b'{"a":{}}', b'{"report":[', b"]}"),
    "zeros": listed(b"0"),
    "small numbers in an object": numbered(b'"%d":0'),
    "an object of many keys in a report": numbered(b'"k%d":0.5', b'{"report":{"distance":{', b"}}}"),
    "the same key": listed(b'"a":0', b"{", b"}"),
    "one long string": repeated(b"x", b'{"a":"', b'"}'),
    "one long key": repeated(b"x", b'{"', b'":0}'),
    "one letter beyond the plane": repeated("\U0001f600".encode() + b"x" * 60, b'{"a":"', b'"}'),
    "escapes of letters": repeated(b"\\u0041", b'{"a":"', b'"}'),
    "escapes of pairs": repeated(b"\\ud83d\\ude00", b'{"a":"', b'"}'),
    "escapes of halves": repeated(b"\\ud800", b'{"a":"', b'"}'),
    "one number of many digits": repeated(b"7", b'{"a":', b"}"),
    "numbers of four thousand digits": listed(b"7" * 4000),
    "a fraction of many digits": repeated(b"3", b'{"a":0.', b"}"),
    "numbers beyond a float": listed(b"1e999"),
    "not a number": listed(b"NaN"),
    "white space": repeated(b" ", b"{", b"}"),
    "line ends": repeated(b"\n\t", b"[", b"]"),
    "commas": repeated(b",", b"["),
    "null bytes": repeated(b"\0"),
    "bytes that are no UTF-8": repeated(b"\xff"),
    "brackets in UTF-16": lambda size: ("[" * (size // 2)).encode("utf-16-le"),
    "keys of members": numbered(b'{"client":"c%d","serial":1,"mask":"00","channel":"00","signature":"00"}', b"[", b"]"),
}


def head(data: bytes) -> object:
    """The head of a message."""
    return unpack(MAGIC + struct.pack("<I", len(data)) + data)


def tensors(data: bytes) -> object:
    """The header of tensors, of a model with many layers."""
    return read_tensors(struct.pack("<Q", len(data)) + data, LAYERS)


def value(data: bytes, cap: int, key: str = "report") -> Any:
    """The bytes as a value within a head of a kind that may have `cap` bytes, as what reads values gets it."""
    if not data.startswith(b'{"report":'):
        data = b'{"' + key.encode() + b'":' + data + b"}"
    return unpack(MAGIC + struct.pack("<I", len(data)) + data, head=cap).head[key]


def members(data: bytes) -> object:
    """What a server lists to clients: everybody's keys."""
    found = value(data, COHORT_HEAD)
    return [SignedKeys.from_json(entry) for entry in found] if isinstance(found, list) else SignedKeys.from_json(found)


def shares(data: bytes) -> object:
    """Shares of a secure sum, as a client sends them for the others."""
    parcels = {str(to): bytes.fromhex(package) for to, package in value(data, SHARES_HEAD).items()}
    return Collector(TERMS).take_shares("client-0", parcels)


def sealed(data: bytes) -> object:
    """A package of shares, and the answer that opens a sum."""
    collector = Collector(TERMS)
    unseal(bytes(32), bytes(32), "client-0", "client-1", data)
    return collector.take_unmask("client-0", data)


def public(data: bytes) -> object:
    """Public numbers of a round."""
    rule = value(data, COHORT_HEAD)
    numbers = {"calibrated": False, "rule": rule, "ranges": {}, "first": {}, "outside": 0}
    return check_public(numbers, list(LAYERS))


def reply(data: bytes) -> object:
    """A reply of Flower's, whose array is described by hostile bytes."""
    contents = {
        "chunk": b"ArrayChunk  2\0ok",
        "array": b"Array chunk %d\0" % len(data) + data,
        "record": b"ArrayRecord array %d\0" % len(data) + data,
        "message": b"Message record 0\0",
    }
    coming = Coming(Announced("m", "message", tuple(contents)), 1 << 16)
    while coming.step(contents.get):
        pass
    return coming.build()


def frame(data: bytes) -> object:
    """The header of a frame on a client's socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(HEAD.pack(FRAME_MAGIC, len(data), 0) + data[: 64 << 10])
        return read_frame(ours)


def promise(data: bytes) -> object:
    """What a private run says to its clients, and what they say to it."""
    found = value(data, COHORT_HEAD)
    share_of({"masses": found, "whole": True}, LAYERS, ratio=True)
    return Promise(1.0, None, 0.0, True, 1.0, 3).check(found, 0, None, "upload")


def enrolment(data: bytes) -> object:
    """An enrolment file that names itself one, with hostile bytes inside."""
    fields = b'{"format":"keyfed-enrol-1","name":"a","node":"n","identity":"00","signature":'
    return read_enrolment(data if data[:1] in b'[{"' else fields + data + b"}")


def gate(data: bytes) -> object:
    """Paths and addresses of requests."""
    text = data.decode("latin-1")
    return allowed(text, text, text), allowed("/v1/fleet/" + text, "203.0.113.9", "203.0.113.1")


def _terms() -> SumTerms:
    keys = tuple(make_keys(Identity.make(), f"client-{k}", 0)[1] for k in range(5))
    return SumTerms(bytes(32), keys, 3, 10)


TERMS = _terms()
PARSERS: dict[str, Parser] = {
    "message head": head,
    "tensor header": tensors,
    "report of a client": lambda data: finished_of(value(data, REPORT_HEAD), LAYERS, {}),
    "counts of an evaluation": lambda data: _evaluated(value(data, REPORT_HEAD)),
    "one-time keys, lists of members": members,
    "shares for other clients": shares,
    "sealed packages, opening answers": sealed,
    "public numbers of a round": public,
    "numbers of a private round": promise,
    "configuration of a run, at a client": lambda data: own_config({"config": value(data, BEGIN_HEAD)}, Path("text")),
    "vocabulary of a run, at a client": lambda data: _vocab_of({"vocab": data.decode("utf-8", "replace")}),
    "reply of Flower's": reply,
    "frame on a client's socket": frame,
    "enrolment file": enrolment,
    "wish to leave": lambda data: read_leave(data, {"a": {"identity": "00"}}),
    "path at the gate": gate,
}


def legacy_depth(data: bytes) -> int:
    """The control: how protocol 1 counted nesting."""
    deepest = depth = 0
    for found in LEGACY.finditer(data):
        mark = data[found.start()]
        depth += (mark in b"[{") - (mark in b"]}")
        deepest = max(deepest, depth)
    return deepest


class Measured(NamedTuple):
    """One parser on one shape: peak bytes by length, and CPU seconds by length.

    Attributes:
      first: seconds of the first pass.
      even: seconds of each even pass; none where the first pass is not above the bar.
    """

    peak: list[int]
    first: list[float]
    even: list[list[float]]

    @property
    def seconds(self) -> list[float]:
        """What the pair is judged by: the least of the even passes, or the first pass."""
        return least_of(self.even) if self.even else self.first

    @property
    def above(self) -> int:
        """How many even passes are above the bar by themselves."""
        return sum(growth(one, LEAST_SECONDS) > RATIO for one in self.even)

    def ratios(self) -> tuple[float, float]:
        """The growth by a doubling, of seconds and of bytes: the largest, or that of the fit where it is larger."""
        return growth(self.seconds, LEAST_SECONDS), growth(self.peak, LEAST_BYTES)


def growth(found: Sequence[float], least: float) -> float:
    """The largest growth by a doubling: of two neighbouring lengths, or by the fit of all."""
    return max(largest(found, least), fitted(found, least))


def largest(found: Sequence[float], least: float) -> float:
    """The largest ratio of two neighbouring lengths, counted from `least` upwards: below it nothing is divided."""
    return max((b / max(a, least) for a, b in pairwise(found)), default=0.0)


def fitted(found: Sequence[float], least: float) -> float:
    """2^slope of the line through log₂ of all that is above `least`, by least squares; 0 for fewer than three."""
    logs = [math.log2(one) for one in found if one >= least]
    if len(logs) < 3:
        return 0.0
    middle = (len(logs) - 1) / 2
    return 2 ** (sum((k - middle) * y for k, y in enumerate(logs)) / sum((k - middle) ** 2 for k in range(len(logs))))


def attempt(parser: Parser, data: bytes) -> None:
    """Parse, and accept a refusal; at both ends everything else is caught one level further out."""
    try:
        parser(data)
    except KeyfedError:
        pass
    except (ValueError, KeyError, TypeError, AttributeError, LookupError, RecursionError):
        pass  # the callers of the inner parsers turn these into refusals


def seconds_of(parser: Parser, inputs: list[bytes], repeats: int, *, even: bool = False) -> list[float]:
    """One pass: the least CPU seconds that one parse takes, by length; all lengths in turn, no garbage collector.

    Args:
      even: time as many parses of each input together as have the bytes of the longest.
    """
    longest = max(map(len, inputs))

    def once(data: bytes) -> float:
        parses = longest // len(data) if even else 1
        began = time.process_time()
        for _ in range(parses):
            attempt(parser, data)
        return (time.process_time() - began) / parses

    gc.disable()
    try:
        return least_of([[once(data) for data in inputs] for _ in range(repeats)])
    finally:
        gc.enable()


def least_of(passes: Sequence[Sequence[float]]) -> list[float]:
    """The least of each length."""
    return [min(column) for column in zip(*passes, strict=True)]


def peak_of(parser: Parser, data: bytes) -> int:
    """The most bytes that a parser held at once, besides its input."""
    tracemalloc.start()
    try:
        attempt(parser, data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measure(pairs: Mapping[Pair, tuple[Parser, Shape]], sizes: list[int], repeats: int) -> dict[Pair, Measured]:
    """Measure parsers on shapes; pairs whose first pass is above then get their even passes, all pairs in turn."""

    def inputs(pair: Pair) -> list[bytes]:
        return [filled(pairs[pair][1], size) for size in sizes]

    found = {}
    for pair, (parser, _) in pairs.items():
        data = inputs(pair)
        found[pair] = Measured([peak_of(parser, one) for one in data], seconds_of(parser, data, repeats), [])
    again = [pair for pair, one in found.items() if growth(one.first, LEAST_SECONDS) > RATIO]
    for _ in range(PASSES):
        for pair in again:
            found[pair].even.append(seconds_of(pairs[pair][0], inputs(pair), repeats, even=True))
    return found


def rows(sizes: list[int], repeats: int, only: str) -> Iterator[tuple[str, bool]]:
    """Yield the lines of the table, and whether each is as it must be."""
    parsers = {name: parser for name, parser in PARSERS.items() if only in name}
    pairs = {(name, shape): (parser, make) for name, parser in parsers.items() for shape, make in SHAPES.items()}
    everything = measure(pairs, sizes, repeats)
    for name in parsers:
        found = {shape: everything[name, shape] for shape in SHAPES}
        worst = max(found, key=lambda shape: largest(found[shape].seconds, LEAST_SECONDS))
        slow = max(one.seconds[-1] for one in found.values())
        peak = max(held / size for one in found.values() for held, size in zip(one.peak, sizes, strict=True))
        steps, fit = (max(f(one.seconds, LEAST_SECONDS) for one in found.values()) for f in (largest, fitted))
        memory = max(one.ratios()[1] for one in found.values())
        again = [one for one in found.values() if one.even]
        above = f"{sum(one.above for one in again)} of {sum(len(one.even) for one in again)}" if again else ""
        yield (
            f"| {name} | {len(found)} | {1e3 * slow:.1f} | {steps:.2f} ({worst}) | {fit:.2f} | {len(again)} | {above} "
            f"| {peak:.1f} | {memory:.2f} |",
            max(steps, fit, memory) <= RATIO,
        )
    short = [size << 10 for size in (2, 4, 8, 16)]
    pair = ("control: protocol 1's pattern, 2 to 16 kB", "unterminated string of escaped quotes")
    control = measure({pair: (legacy_depth, SHAPES[pair[1]])}, short, 1)[pair]
    steps, fit = (f(control.seconds, LEAST_SECONDS) for f in (largest, fitted))
    yield (
        f"| {pair[0]} | 1 | {1e3 * control.seconds[-1]:.1f} | {steps:.2f} | {fit:.2f} "
        f"| 1 | {control.above} of {len(control.even)} | | |",
        min(steps, fit) > RATIO,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--least", type=int, default=16, help="kB of the shortest inputs")
    parser.add_argument("--most", type=int, default=512, help="kB of the longest inputs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of a parser's name")
    args = parser.parse_args()
    gc.collect()
    gc.freeze()  # a collection then walks through what the parser made, not through all that was imported
    sizes = [args.least << 10 << k for k in range((args.most // args.least).bit_length())]
    print(
        f"| parser | shapes | ms at {args.most} kB | time by a doubling, largest | by the fit | pairs measured anew "
        "| their passes above | memory, times the input | by a doubling |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    wrong = 0
    for line, fine in rows(sizes, args.repeats, args.only):
        print(line if fine else f"{line} **too dear**", flush=True)
        wrong += not fine
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
