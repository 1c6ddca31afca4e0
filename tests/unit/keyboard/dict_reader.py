"""A reader of binary dictionaries of AOSP's version 202, from the comments of FormatSpec.java alone.

It shares no code and no constant with `keyfed.keyboard.aosp`, and reads dictionaries of AOSP's own tools as well: short
cuts to other words are skipped. Whatever the file says that the comments do not allow is an AssertionError.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Entry:
    """A word as it stands in the file."""

    frequency: int
    offends: bool
    node: int  # where its node begins
    bigrams: list[tuple[int, int]] = field(default_factory=list)  # where the second word's node begins, four bits


@dataclass
class Dictionary:
    """Attributes of the header, and words."""

    version: int
    attributes: dict[str, str]
    entries: dict[str, Entry]

    def bigrams(self) -> dict[tuple[str, str], int]:
        """Return the four bits of every pair of words."""
        at = {entry.node: word for word, entry in self.entries.items()}
        return {(word, at[node]): bits for word, entry in self.entries.items() for node, bits in entry.bigrams}


class Cursor:
    """Bytes with a place to read on from."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    def uint(self, size: int) -> int:
        assert self.at + size <= len(self.data), "the file ends too early"
        value = 0
        for byte in self.data[self.at : self.at + size]:
            value = (value << 8) | byte
        self.at += size
        return value

    def character(self) -> str | None:
        """000xxxxx begins three bytes, but 00011111 is the terminator; else a character of ISO Latin 1."""
        first = self.uint(1)
        if first == 0b00011111:
            return None
        if first < 0b00100000:
            return chr((first << 16) | self.uint(2))
        return chr(first)

    def string(self) -> str:
        letters = []
        while (c := self.character()) is not None:
            letters.append(c)
        return "".join(letters)


def read_dictionary(data: bytes) -> Dictionary:
    head = Cursor(data)
    assert head.uint(4) == 0x9BC13AFE
    version, _options, size = head.uint(2), head.uint(2), head.uint(4)
    attributes = {}
    while head.at < size:
        key = head.string()
        attributes[key] = head.string()
    assert head.at == size, "the header is not as long as it says"
    body = data[size:]
    entries: dict[str, Entry] = {}
    read: dict[int, int] = {}  # where arrays begin and end
    waiting = [(0, "")]
    while waiting:
        start, before = waiting.pop()
        assert start not in read, "two nodes have the same children"
        read[start] = _array(Cursor(body, start), before, entries, waiting)
    spans = sorted(read.items())
    assert [end for _, end in spans] == [begin for begin, _ in spans[1:]] + [len(body)], "bytes that no array holds"
    return Dictionary(version, attributes, entries)


def _array(cursor: Cursor, before: str, entries: dict[str, Entry], waiting: list[tuple[int, str]]) -> int:
    """Read one array of nodes; return where it ends."""
    count = cursor.uint(1)
    if count & 0b10000000:
        count = ((count & 0b01111111) << 8) | cursor.uint(1)
    for _ in range(count):
        node = cursor.at
        flags = cursor.uint(1)
        letters = cursor.string() if flags & 0x20 else cursor.character()
        assert letters, "a node without characters"
        word = before + letters
        entry = Entry(cursor.uint(1), bool(flags & 0x01), node) if flags & 0x10 else None
        width = flags >> 6  # 00: no children; else their address is so many bytes long
        if width:
            field_at = cursor.at
            waiting.append((field_at + cursor.uint(width), word))
        if flags & 0x08:
            length_at = cursor.at
            cursor.at = length_at + cursor.uint(2)  # the size of the list is that of itself, too
        if flags & 0x04:
            assert entry is not None, "pairs of what is no word"
            entry.bigrams = _bigrams(cursor)
        if entry is not None:
            assert word not in entries, "a word stands there twice"
            entries[word] = entry
    return cursor.at


def _bigrams(cursor: Cursor) -> list[tuple[int, int]]:
    found = []
    while True:
        flags = cursor.uint(1)
        width = (flags & 0x30) >> 4
        assert width, "an address of a kind that is not used"
        field_at = cursor.at
        offset = cursor.uint(width)
        found.append((field_at - offset if flags & 0x40 else field_at + offset, flags & 0x0F))
        if not flags & 0x80:
            return found
