"""Files of text, opened within bounds: on the disk, packed with gzip, or in a .zip, which is not unpacked to the disk.

What unpacks to far more than text does is refused after that much (`Bomb`). The encoding is read off the bytes. Known
are UTF-8, UTF-16 with a byte-order mark or NULs in every other byte (what Excel calls Unicode text), and cp1252, which
Excel writes in Western Europe. Nothing here quotes a file.
"""

from __future__ import annotations

import codecs
import gzip
import io
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, TextIO, TypeAlias

from keyfed.errors import DataError

UNREADABLE = (OSError, EOFError, zlib.error, zipfile.BadZipFile)  # what a damaged .gz or .zip raises

MOST_RATIO = 100  # unpacked to packed; text has 3 to 10, the tables of programs up to 40, a bomb 1,000
LEAST_UNPACKED = 1 << 24  # bytes that any file may unpack to
MOST_MEMBERS = 50_000  # files of a .zip
MOST_BYTES = 1 << 30  # of a file that is read whole
SAMPLE = 1 << 18  # bytes from which the encoding is read off
WESTERN = 0.3  # letters beyond ASCII of a text in cp1252, at most; Cyrillic or Greek in their own tables have all
MEDIA = frozenset({".jpg", ".jpeg", ".png", ".gif", ".webp", ".heic", ".mp3", ".mp4", ".m4a", ".opus", ".ogg", ".oga"})
MEDIA |= {".wav", ".mov", ".avi", ".mkv", ".webm", ".pdf", ".vcf", ".tgs"}
READ_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


@dataclass(frozen=True, slots=True)
class Packed:
    """A file inside a .zip.

    Attributes:
      size: unpacked, as the archive says; no more than that is read.
    """

    archive: zipfile.ZipFile
    name: str
    size: int

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    def __str__(self) -> str:
        return f"{self.archive.filename}: {self.name}"


File: TypeAlias = Path | Packed


@dataclass(frozen=True, slots=True)
class Leaf:
    """A file of a folder or archive, and its name there."""

    name: str
    file: File


class Bomb(DataError):
    """A packed file that unpacks to far more than text does."""


class Unusable(ValueError):
    """Why a file cannot be used; never bytes of it."""


def why_unreadable(error: Exception) -> str:
    """Return what is wrong with a file; never bytes of it, which errors of gzip quote.

    Example:
      >>> why_unreadable(gzip.BadGzipFile("Not a gzipped file (b'my')")), why_unreadable(EOFError("cut"))
      ('no gzip file, or a damaged one', 'cut')
    """
    if isinstance(error, gzip.BadGzipFile | zlib.error):
        return "no gzip file, or a damaged one"
    if isinstance(error, zipfile.BadZipFile):
        return "a damaged archive"
    return str(getattr(error, "strerror", None) or error)


def suffix_of(file: File) -> str:
    """Return the extension in lower case, that of the packed file for a .gz.

    Example:
      >>> suffix_of(Path("Chat.CSV.gz")), suffix_of(Path("notes"))
      ('.csv', '')
    """
    return (PurePosixPath(file.stem).suffix if file.suffix == ".gz" else file.suffix).lower()


def open_bytes(file: File) -> io.BufferedReader:
    """Open a file, packed with gzip or not; what unpacks to far more than text does is a `Bomb` after that much."""
    if isinstance(file, Packed):
        info = file.archive.getinfo(file.name)
        if info.flag_bits & 1 or info.compress_type not in READ_METHODS:
            raise OSError("encrypted" if info.flag_bits & 1 else "packed in a way that is not read")
        return io.BufferedReader(Bounded(file.archive.open(info), file.size))
    if file.suffix != ".gz":
        return file.open("rb")
    most = max(LEAST_UNPACKED, MOST_RATIO * file.stat().st_size)
    bomb = Bomb(
        f"{file}: it unpacks to more than {most:,} bytes, {MOST_RATIO} times its size, which text does not; unpack it "
        "yourself if you trust it"
    )
    return io.BufferedReader(Bounded(gzip.open(file), most, bomb), io.DEFAULT_BUFFER_SIZE * 8)


def packed_size(file: File) -> int | None:
    """Return the bytes that a file takes in its archive, or as a .gz; None where it is not packed."""
    if isinstance(file, Packed):
        return file.archive.getinfo(file.name).compress_size
    return file.stat().st_size if file.suffix == ".gz" else None


class Bounded(io.RawIOBase):
    """The next `most` bytes of a file. Behind them it ends, or raises `beyond` where the file goes on."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile, most: float, beyond: Bomb | None = None) -> None:
        self._file, self._left, self._beyond = file, most, beyond

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(int(min(len(buffer), self._left + (self._beyond is not None))))
        if self._beyond is not None and len(data) > self._left:
            raise self._beyond
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def open_text(file: File, newline: str | None = None) -> TextIO:
    """Open a text file, packed or not. Bytes that are no text become lone surrogates."""
    encoding = encoding_of(beginning(file), whole=False) or "utf-8-sig"
    return io.TextIOWrapper(open_bytes(file), encoding=encoding, errors="surrogateescape", newline=newline)


def beginning(file: File, most: int = SAMPLE) -> bytes:
    """Return the first bytes of a file; of one that is damaged, those before the damage."""
    found = bytearray()
    try:
        with open_bytes(file) as opened:
            while len(found) < most and (piece := opened.read1(min(1 << 14, most - len(found)))):
                found += piece
    except (*UNREADABLE, Bomb):  # said where it is read
        pass
    return bytes(found)


def encoding_of(data: bytes, whole: bool = True) -> str | None:
    """Return the encoding of a text by its first bytes; None where it is none that is known here.

    Args:
      whole: the bytes are all there are; otherwise the last character may be cut.

    Example:
      >>> [encoding_of(text) for text in (b"plain", "caf\u00e9".encode(), "caf\u00e9".encode("cp1252"))]
      ['utf-8-sig', 'utf-8-sig', 'cp1252']
      >>> [encoding_of(text) for text in ("caf\u00e9".encode("utf-16"), "\u043f\u0440\u0438\u0432".encode("cp1251"))]
      ['utf-16', None]
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-32" if data.startswith(codecs.BOM_UTF32_LE) else "utf-16"
    if (wide := _wide(data[:4096])) is not None:
        return wide
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data, final=whole)
        return "utf-8-sig"
    except UnicodeDecodeError:
        pass
    high = sum(map(data.count, map(bytes, zip(range(128, 256)))))
    valid = len("".join(letter for letter in data.decode("utf-8", "ignore") if not letter.isascii()).encode())
    if valid > high / 20:  # damaged UTF-8
        return "utf-8-sig"
    try:
        text = data.decode("cp1252")
    except UnicodeDecodeError:
        return None
    controls = sum(map(text.count, map(chr, (*range(9), *range(14, 32)))))
    letters = sum(map(str.isalpha, text))
    beyond = sum(letter.isalpha() for letter in text if not letter.isascii())
    return None if controls or beyond > max(1, WESTERN * letters) else "cp1252"


def _wide(data: bytes) -> str | None:
    """Tell UTF-16 without a mark: of Western text every other byte is NUL, and no other."""
    if len(data) < 8:
        return None
    even, odd = data[::2].count(0), data[1::2].count(0)
    if odd > 0.4 * len(data) / 2 and not even:
        return "utf-16-le"
    return "utf-16-be" if even > 0.4 * len(data) / 2 and not odd else None


def read_whole(file: File) -> bytes:
    """Read a file that is parsed as a whole.

    Raises:
      Unusable: it cannot be read, or is larger than what is read whole.
    """
    try:
        with open_bytes(file) as opened:
            data = opened.read(MOST_BYTES + 1)
    except Bomb as error:
        raise Unusable(str(error).removeprefix(f"{file}: ")) from None
    except UNREADABLE as error:
        raise Unusable(f"unreadable ({why_unreadable(error)})") from None
    if len(data) > MOST_BYTES:
        raise Unusable(f"more than {MOST_BYTES >> 20:,} MiB, which is not read in one piece; split it")
    return data


def read_text(file: File) -> str:
    """Read a text file.

    Raises:
      Unusable: it is unreadable, binary, or in an encoding that is not known here.
    """
    return text_of(read_whole(file))


def text_of(data: bytes) -> str:
    """Decode a text; `Unusable` where it is binary or in an encoding that is not known here."""
    encoding = encoding_of(data)
    if encoding is None or encoding.startswith("utf-8"):
        if b"\0" in data:
            raise Unusable("binary (it has a NUL byte)")
        if encoding is None:
            raise Unusable("not UTF-8, UTF-16 or cp1252; save it as UTF-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        name = "UTF-8" if encoding == "utf-8-sig" else encoding.upper()
        raise Unusable(f"not {name} (byte {error.start}); save it as UTF-8") from None
    if "\0" in text:
        raise Unusable("binary (it has a NUL byte)")
    return text.removeprefix("\ufeff")


# Folders and archives


def leaves_of(place: Path, closed: dict[str, str] | None = None) -> list[Leaf]:
    """Return the files of a folder or .zip by name, without those that are not shown.

    Args:
      closed: takes the files and folders that may not be read, and why.

    Raises:
      Unusable: the archive is damaged, or unpacks to far more than text does.
    """
    found = _in_folder(place, {} if closed is None else closed) if place.is_dir() else _in_archive(place)
    shown = (leaf for leaf in found if not any(name.startswith((".", "__MACOSX")) for name in leaf.name.split("/")))
    return sorted(shown, key=lambda leaf: PurePosixPath(leaf.name))


def _in_folder(folder: Path, closed: dict[str, str]) -> Iterator[Leaf]:
    def name_of(path: Path) -> str:
        return path.relative_to(folder).as_posix().encode(errors="backslashreplace").decode()

    def refused(error: OSError) -> None:
        path = Path(error.filename or folder)
        name = folder.resolve().name if path == folder else name_of(path)
        closed[name] = why_unreadable(error)

    for place, _, files in os.walk(folder, onerror=refused):
        for name in files:
            path = Path(place, name)
            try:
                if path.is_file():
                    yield Leaf(name_of(path), path)
            except OSError as error:
                refused(error)


def _in_archive(path: Path) -> Iterator[Leaf]:
    try:
        archive = zipfile.ZipFile(path)
    except UNREADABLE as error:
        raise Unusable(f"unreadable ({why_unreadable(error)})") from None
    except (ValueError, OverflowError, NotImplementedError):
        raise Unusable("unreadable (a damaged archive)") from None
    members = [info for info in archive.infolist() if not info.is_dir()]
    if len(members) > MOST_MEMBERS:
        raise Unusable(f"{len(members):,} files; at most {MOST_MEMBERS:,} are read")
    # Of several files of one name the last is opened.
    sizes = {info.filename: info.file_size for info in members if not stat.S_ISLNK(info.external_attr >> 16)}
    texts = sum(size for name, size in sizes.items() if PurePosixPath(name).suffix.lower() not in MEDIA)
    most = max(LEAST_UNPACKED, MOST_RATIO * path.stat().st_size)
    if texts > most:
        raise Unusable(
            f"it unpacks to more than {most:,} bytes, {MOST_RATIO} times its size, which text does not; unpack it "
            "yourself if you trust it"
        )
    for name, size in sizes.items():
        yield Leaf(name.encode(errors="backslashreplace").decode(), Packed(archive, name, size))
