"""Word vectors for our vocabulary, from whatever file people have.

    GloVe text; FastText and word2vec text (header line)     plain, .gz, or alone in a .zip
    word2vec binary; JSON of winkNLP                         plain, .gz, or alone in a .zip
    npz, safetensors                                         arrays `vectors` [words, dim] and `words`
    a transformer's folder, or its model.safetensors         token embedding, with the tokenizer next to it

What a file is, is recognised by its content, not by its name. Only the rows of our words are kept in memory. What
cannot be used is left out and counted in `Vectors.report`; only a file with nothing for us is an error.

Arrays are read by chunks of rows, never as a whole, and never with pickle:

    npz            `words`: strings [words]                np.savez(file, vectors=vectors, words=np.array(words))
    safetensors    `words`: UTF-8 bytes, uint8 [bytes],    save_file({"vectors": vectors, "words": np.frombuffer(
                   a line end between two words                "\\n".join(words).encode(), np.uint8)}, file)

Wider vectors than wanted are reduced by PCA, or by PCA between two post-processings (PP-PCA-PP). With the rows of X the
vectors of our words (those without one take no part, and stay zero):

    PCA(X, N)              Y = (X − X̄) Uᵀ, the rows of U the first N principal components
    PPA(X, D)              X ← X − X̄;  v ← v − Σ_{i ≤ D} (u_iᵀ v) u_i for every row v   (algorithm 1)
    PP-PCA-PP(X, N, D)     PPA(PCA(PPA(X, D), N), D)                                    (algorithm 2)

Components have no sign of their own; the entry largest in absolute value is made positive, so that two machines agree.
Arithmetic is in float64, the result in float32.

References:
  Stremmel and Singh, *Pretraining Federated Text Models for Next Word Prediction*, 2020, algorithms 1 and 2.
  Mu and Viswanath, *All-but-the-Top*, 2018. Raunak et al., *Effective Dimensionality Reduction for Word
  Embeddings*, 2019.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from keyfed.errors import ConfigError, DataError
from keyfed.text.vectors.files import (
    WIDEST,
    ZIP,
    Progress,
    VectorRows,
    Vectors,
    VectorSource,
    layout_of,
    listed,
    read_file,
    shown,
)
from keyfed.text.vectors.transformer import (
    Pieces,
    TensorHead,
    TokenEmbedding,
    check_embedding,
    embedding_in,
    find_embedding,
    read_token_embedding,
    read_tokenizer,
    readable,
    rows_of,
    safetensors_in,
    tensors_of,
)

EXPECTED = "expected `vectors` [words, dim] in float32, float16 or float64, and `words`"
_ROWS = 1 << 12  # rows read at a time


def load_vectors(
    path: Path,
    words: Sequence[str],
    *,
    dim: int | None = None,
    pieces: Pieces = "mean",
    progress: Progress | None = None,
) -> Vectors:
    """Read the vectors of our words.

    Args:
      path: A file of word vectors, or a transformer's folder.
      words: Our vocabulary; specials are matched only where the file has them.
      dim: The width that is wanted in the end: a narrower file is refused before it is read. The matrix keeps
        the file's own width; `pca` and `pp_pca_pp` bring it down.
      pieces: For a token embedding: the mean of a word's pieces, or its first piece's vector.
      progress: Called with (bytes read, bytes in all) now and then, and at the end.

    Raises:
      ConfigError: `dim` or `pieces` makes no sense, or `dim` is larger than the file's.
      DataError: The file is missing, empty, damaged or of no known format, or none of our words is in it.
    """
    if dim is not None and dim < 1:
        raise ConfigError(f"{dim} dimensions of word vectors; expected at least 1")
    if pieces not in get_args(Pieces):
        raise ConfigError(f"pieces {pieces!r}; expected {' or '.join(get_args(Pieces))}")
    found = recognise(path, dim)
    gathering = VectorRows(words)
    found.read(gathering, pieces, progress)
    taken = {"mean": ", mean of pieces", "first": ", first piece"}[pieces] if found.in_pieces else ""
    return gathering.finish(VectorSource(path.name, found.format + taken))


class Recognised(NamedTuple):
    """A file of word vectors, as far as its beginning shows it.

    Attributes:
      format: in words.
      width: numbers a word.
      read: gathers the rows of our words.
      in_pieces: whether a word's vector is made of its pieces'.
    """

    format: str
    width: int
    read: Callable[[VectorRows, Pieces, Progress | None], None]
    in_pieces: bool = False


def recognise(path: Path, dim: int | None = None) -> Recognised:
    """Recognise the format of word vectors from the beginning of the file.

    Raises:
      ConfigError: The file has fewer numbers a word than the `dim` that are wanted.
      DataError: It is missing, empty, or of no known format.
    """
    try:
        if not path.exists():
            raise DataError(f"{path}: no such file; expected word vectors")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); expected word vectors") from None
    if path.is_dir():
        return _in_pieces(find_embedding(path), path, dim)
    if not path.is_file():
        raise DataError(f"{path}: no regular file; expected word vectors")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: empty; expected word vectors")
    if is_npz(path):
        width = _wide_enough(path, npz_dim(path), dim)
        return Recognised("npz", width, lambda rows, _, progress: read_npz(path, rows, width, progress))
    if is_safetensors(path):
        tensors = tensors_of(path)
        name = embedding_in(tensors)
        if name is not None:
            return _in_pieces(TokenEmbedding(path, name, tensors[name]), path, dim)
        width = _wide_enough(path, safetensors_dim(path, tensors), dim)
        return Recognised("safetensors", width, lambda rows, _, progress: read_safetensors(path, rows, width, progress))
    layout = layout_of(path)
    _wide_enough(path, layout.dim, dim)
    return Recognised(layout.name, layout.dim, lambda rows, _, progress: read_file(path, layout, rows, progress))


def _in_pieces(found: TokenEmbedding, path: Path, dim: int | None) -> Recognised:
    width = _wide_enough(path, check_embedding(found), dim)
    tokenizer = read_tokenizer(found.file.parent)

    def read(rows: VectorRows, pieces: Pieces, progress: Progress | None) -> None:
        read_token_embedding(found, tokenizer, rows, pieces, progress)

    return Recognised(f"{found.name}, {tokenizer.kind}", width, read, in_pieces=True)


def _wide_enough(path: Path, width: int, dim: int | None) -> int:
    """Return the file's width, or raise where more is wanted."""
    if dim is not None and dim > width:
        raise ConfigError(
            f"{path}: {width} numbers a word, {dim} were asked for; take a wider file, or at most {width} dimensions"
        )
    return width


def is_npz(path: Path) -> bool:
    """Tell a .npz from other .zip files: it holds .npy files."""
    with readable(path), path.open("rb") as file:
        if file.read(4) != ZIP:
            return False
        with zipfile.ZipFile(file) as archive:
            return any(name.endswith(".npy") for name in archive.namelist())


def is_safetensors(path: Path) -> bool:
    """Tell whether a file begins as safetensors do: the length of a JSON header, then the header."""
    with readable(path), path.open("rb") as file:
        start = file.read(9)
        length = int.from_bytes(start[:8], "little")
        return len(start) == 9 and start[8:] == b"{" and 2 <= length <= path.stat().st_size - 8


def read_safetensors(path: Path, gathering: VectorRows, dim: int, progress: Progress | None) -> None:
    """Gather our words' rows from `vectors` and `words`."""
    with safetensors_in(path) as file:
        table = file.get_slice("vectors")
        words = file.get_tensor("words").numpy().tobytes().split(b"\n")
        if len(words) != table.get_shape()[0]:
            raise _unequal(path, len(words), table.get_shape()[0])
        chunks = (
            (words[first : first + _ROWS], rows_of(table, first, min(_ROWS, len(words) - first)))
            for first in range(0, len(words), _ROWS)
        )
        _gather(chunks, gathering, dim, path.stat().st_size, len(words), progress)


def safetensors_dim(path: Path, tensors: dict[str, TensorHead]) -> int:
    """Return the dimension of `vectors`.

    Raises:
      DataError: There are no such tensors, or not of these shapes.
    """
    table, letters = tensors.get("vectors"), tensors.get("words")
    if table is None or letters is None:
        raise DataError(
            f"{path}: holds {listed(sorted(tensors))}; {EXPECTED} (uint8, UTF-8, a line end between words), "
            "or a transformer's wte.weight or word_embeddings.weight beside its tokenizer"
        )
    if table.type not in ("F64", "F32", "F16", "BF16") or letters.type != "U8" or len(letters.shape) != 1:
        raise DataError(
            f"{path}: vectors are {table.type}, words {letters.type} {list(letters.shape)}; {EXPECTED} in uint8 [bytes]"
        )
    return _dim(path, table.shape)


def npz_dim(path: Path) -> int:
    """Return the dimension of `vectors`.

    Raises:
      DataError: There are no such arrays, or not of these shapes and types.
    """
    with _npz(path) as (_, _, vectors, words):
        if words[0] != vectors[0][:1]:
            raise _unequal(path, math.prod(words[0]), vectors[0][0])
        return _dim(path, vectors[0])


def read_npz(path: Path, gathering: VectorRows, dim: int, progress: Progress | None) -> None:
    """Gather our words' rows from `vectors` and `words`."""
    with _npz(path) as (table, names, (shape, numbers), (_, letters)):

        def chunks() -> Iterator[tuple[list[bytes], NDArray[Any]]]:
            for first in range(0, shape[0], _ROWS):
                count = min(_ROWS, shape[0] - first)
                rows = np.frombuffer(table.read(count * dim * numbers.itemsize), numbers).reshape(count, dim)
                cells = np.frombuffer(names.read(count * letters.itemsize), letters)
                yield [_bytes(cell) for cell in cells.tolist()], rows

        _gather(chunks(), gathering, dim, shape[0] * dim * numbers.itemsize, shape[0], progress)


def _bytes(cell: str | bytes) -> bytes:
    return cell if isinstance(cell, bytes) else cell.encode("utf-8", "surrogatepass")


_Header = tuple[tuple[int, ...], np.dtype[Any]]


@contextmanager
def _npz(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes], _Header, _Header]]:
    """Open both arrays behind their headers: streams of `vectors` and `words`, then shape and type of each."""
    with readable(path), zipfile.ZipFile(path) as archive:
        held = sorted(archive.namelist())
        if not {"vectors.npy", "words.npy"} <= set(held):
            raise DataError(f"{path}: holds {listed(held)}; {EXPECTED} (strings)")
        with archive.open("vectors.npy") as table, archive.open("words.npy") as names:
            vectors, words = _npy_header(path, table), _npy_header(path, names)
            if vectors[1].kind != "f" or words[1].kind not in "US" or len(words[0]) != 1:
                raise DataError(
                    f"{path}: vectors are {vectors[1]}, words {words[1]} {list(words[0])}; {EXPECTED} (strings "
                    "[words]; Python objects are not read)"
                )
            yield table, names, vectors, words


def _npy_header(path: Path, stream: IO[bytes]) -> _Header:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read(stream)
    if by_columns and len(shape) > 1:
        raise DataError(f"{path}: vectors lie by columns; save np.ascontiguousarray(vectors)")
    return shape, dtype


def _gather(
    chunks: Iterator[tuple[list[bytes], NDArray[Any]]],
    gathering: VectorRows,
    dim: int,
    size: int,
    total: int,
    progress: Progress | None,
) -> None:
    gathering.begin(dim)
    for words, rows in chunks:
        for word, row in zip(words, rows, strict=True):
            gathering.lines += 1
            slot = gathering.slots.get(word)
            if slot is not None:
                gathering.keep(slot, row, f"row {gathering.lines}: {shown(word)}")
            elif not word.isascii() and shown(word).startswith("b'"):
                gathering.note("undecodable", f"row {gathering.lines}: {shown(word)}")
        if progress is not None:
            progress(size * gathering.lines // total, size)


def _dim(path: Path, shape: tuple[int, ...]) -> int:
    if len(shape) != 2 or 0 in shape or shape[1] > WIDEST:
        raise DataError(f"{path}: vectors have shape {list(shape)}; {EXPECTED}")
    return shape[1]


def _unequal(path: Path, words: int, vectors: int) -> DataError:
    return DataError(f"{path}: {words:,} words but {vectors:,} vectors; {EXPECTED}, one for each")


# Fewer numbers a word

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """Vectors of fewer dimensions.

    Attributes:
      matrix: float32 [words, dim]; rows of words without a vector are zero.
      explained: Share of the variance that each component kept explains [dim]: of PCA's input, so
        after the first post-processing where there is one.
      removed_before: Share of the variance of each component removed before PCA [D]; empty for PCA.
      removed_after: … and after PCA [D].
    """

    matrix: NDArray[np.float32]
    explained: Float64
    removed_before: Float64
    removed_after: Float64


def pca(matrix: NDArray[np.floating], matched: NDArray[np.bool_], dim: int) -> Reduced:
    """Reduce to the first principal components, fitted on the matched rows.

    Raises:
      ConfigError: `dim` is below 1 or more than the vectors can give, or scikit-learn is missing.
      DataError: Fewer than two rows are matched, or all are equal.

    Example:
      >>> line = np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [9.0, 0.0]])
      >>> pca(line, np.array([True, True, True, False]), 1).matrix.round(3).tolist()
      [[-1.4140000343322754], [0.0], [1.4140000343322754], [0.0]]
    """
    rows = _usable(matrix, matched, dim)
    reduced, explained = _transform(rows, dim)
    nothing = np.zeros(0)
    return Reduced(_put_back(reduced, matched), explained, nothing, nothing)


def pp_pca_pp(matrix: NDArray[np.floating], matched: NDArray[np.bool_], dim: int, remove: int = 7) -> Reduced:
    """Post-process, reduce by PCA, post-process again (algorithm 2), fitted on the matched rows.

    Args:
      remove: D, the components removed before and after; 0 leaves PCA alone.

    Raises:
      ConfigError: `dim` is below 1 or more than the vectors can give, `remove` is negative or would leave
        nothing, or scikit-learn is missing.
      DataError: Fewer than two rows are matched, or all are equal.
    """
    if not 0 <= remove < dim:
        raise ConfigError(f"{remove} components to remove of {dim}; expected 0 to {dim - 1}")
    rows = _usable(matrix, matched, dim)
    if remove >= min(rows.shape[1], len(rows) - 1):  # nothing but rounding errors would be left
        raise ConfigError(f"{remove} components to remove from {len(rows):,} vectors of {rows.shape[1]}; take fewer")
    purified, before = _post_process(rows, remove)
    reduced, explained = _transform(purified, dim)
    result, after = _post_process(reduced, remove)
    return Reduced(_put_back(result, matched), explained, before, after)


def _post_process(x: Float64, remove: int) -> tuple[Float64, Float64]:
    """Return PPA(X, D) (algorithm 1) and the share of the variance of each component removed."""
    x = x - x.mean(axis=0)
    if remove == 0:
        return x, np.zeros(0)
    u, shares = _components(x, remove)
    return x - (x @ u.T) @ u, shares


def _transform(x: Float64, dim: int) -> tuple[Float64, Float64]:
    """Return PCA(X, N) and the share of the variance that each component explains."""
    u, shares = _components(x, dim)
    return (x - x.mean(axis=0)) @ u.T, shares


def _components(x: Float64, count: int) -> tuple[Float64, Float64]:
    """Return the first principal components [count, width], signs fixed, and their shares of the variance."""
    fitted = _scikit_learn().PCA(count, svd_solver="covariance_eigh").fit(x)
    u: Float64 = fitted.components_
    largest = np.take_along_axis(u, np.abs(u).argmax(axis=1)[:, None], axis=1)
    return u * np.where(largest < 0, -1.0, 1.0), np.asarray(fitted.explained_variance_ratio_, np.float64)


def _scikit_learn() -> Any:
    try:
        from sklearn import decomposition
    except ImportError:
        raise ConfigError("reducing word vectors needs scikit-learn: pip install scikit-learn") from None
    return decomposition


def _usable(matrix: NDArray[np.floating], matched: NDArray[np.bool_], dim: int) -> Float64:
    """Return the matched rows in float64, where they can be reduced to `dim` dimensions."""
    rows = matrix[matched].astype(np.float64)
    if len(rows) < 2 or not np.ptp(rows, axis=0).any():
        raise DataError(f"{len(rows):,} words with a vector, not two of them different; expected many to reduce them")
    most = min(rows.shape)
    if not 1 <= dim <= most:
        raise ConfigError(
            f"{dim} dimensions from {len(rows):,} vectors of {rows.shape[1]}; expected 1 to {most} (more words, "
            "or wider vectors, give more)"
        )
    return rows


def _put_back(rows: Float64, matched: NDArray[np.bool_]) -> NDArray[np.float32]:
    matrix = np.zeros((len(matched), rows.shape[1]), np.float32)
    matrix[matched] = rows
    return matrix
