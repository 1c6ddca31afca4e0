"""Word vectors for our vocabulary, from whatever file people have.

    GloVe text; FastText and word2vec text (header line)     plain, .gz, or alone in a .zip
    word2vec binary; JSON of winkNLP                         plain, .gz, or alone in a .zip
    npz, safetensors                                         arrays `vectors` and `words`
    a transformer's folder, or its model.safetensors         token embedding, with the tokenizer beside it

What a file is, is told by its content, not by its name. Only the rows of our words are kept in memory. What
cannot be used is left out and counted in `Vectors.report`; only a file with nothing for us is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from keyfed.errors import ConfigError, DataError
from keyfed.text.vectors.arrays import (
    is_npz,
    is_safetensors,
    npz_dim,
    read_npz,
    read_safetensors,
    safetensors_dim,
    tensors_of,
)
from keyfed.text.vectors.files import layout_of, read_file
from keyfed.text.vectors.rows import Gathering, Progress, Report, Source, Vectors
from keyfed.text.vectors.transformer import (
    Pieces,
    TokenEmbedding,
    check_embedding,
    embedding_in,
    find_embedding,
    read_token_embedding,
    read_tokenizer,
)

__all__ = ["Pieces", "Progress", "Report", "Source", "Vectors", "load_vectors"]


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
        the file's own width; `keyfed.text.vectors.reduce` brings it down.
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
    if not path.exists():
        raise DataError(f"{path}: no such file; expected word vectors")
    gathering = Gathering(words)
    if path.is_dir():
        kind = _from_embedding(find_embedding(path), path, gathering, dim, pieces, progress)
    elif path.stat().st_size == 0:
        raise DataError(f"{path}: empty; expected word vectors")
    elif is_npz(path):
        width = _wide_enough(path, npz_dim(path), dim)
        read_npz(path, gathering, width, progress)
        kind = "npz"
    elif is_safetensors(path):
        kind = _from_safetensors(path, gathering, dim, pieces, progress)
    else:
        layout = layout_of(path)
        _wide_enough(path, layout.dim, dim)
        read_file(path, layout, gathering, progress)
        kind = layout.name
    return gathering.finish(Source(path.name, kind))


def _from_safetensors(
    path: Path, gathering: Gathering, dim: int | None, pieces: Pieces, progress: Progress | None
) -> str:
    tensors = tensors_of(path)
    name = embedding_in(tensors)
    if name is not None:
        return _from_embedding(TokenEmbedding(path, name, tensors[name]), path, gathering, dim, pieces, progress)
    width = _wide_enough(path, safetensors_dim(path, tensors), dim)
    read_safetensors(path, gathering, width, progress)
    return "safetensors"


def _from_embedding(
    found: TokenEmbedding, path: Path, gathering: Gathering, dim: int | None, pieces: Pieces, progress: Progress | None
) -> str:
    _wide_enough(path, check_embedding(found), dim)
    tokenizer = read_tokenizer(found.file.parent)
    read_token_embedding(found, tokenizer, gathering, pieces, progress)
    taken = "mean of pieces" if pieces == "mean" else "first piece"
    return f"{found.name}, {tokenizer.kind}, {taken}"


def _wide_enough(path: Path, width: int, dim: int | None) -> int:
    """Return the file's width, or raise where more is wanted."""
    if dim is not None and dim > width:
        raise ConfigError(
            f"{path}: {width} numbers a word, {dim} were asked for; "
            f"take a wider file, or at most {width} dimensions"
        )  # fmt: skip
    return width
