"""One corpus as the text of several clients: one file each, as if each were another person's machine."""

from __future__ import annotations

from pathlib import Path

from keyfed.deploy.client_home import check_name
from keyfed.errors import ConfigError
from keyfed.files import write_atomically
from keyfed.text.corpus import Author, Corpus


def client_name(text: str) -> str:
    """Return a name as a client may have it.

    Example:
      >>> client_name("William Howard Taft")
      'william-howard-taft'
    """
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._") else "-" for c in text.lower())
    return check_name((plain.strip("-._") or "client")[:48])


def parts_of(corpus: Corpus, clients: int) -> dict[str, tuple[str, ...]]:
    """Return lines by client: the authors with most text, or contiguous shards of a pool; in order of names.

    Raises:
      ConfigError: there are not so many authors, or lines.
    """
    authors = [a for a in corpus.authors if a.lines]
    if corpus.natural and len(authors) > 1:
        chosen = sorted(authors, key=lambda a: (-sum(map(len, a.lines)), a.name))[:clients]
    else:
        lines = [line for a in authors for line in a.lines]
        cuts = [len(lines) * k // clients for k in range(clients + 1)]
        chosen = [Author(f"part-{k + 1:03d}", tuple(lines[cuts[k] : cuts[k + 1]])) for k in range(clients)]
    found = [a for a in chosen if a.lines]
    if len(found) < clients:
        raise ConfigError(f"{corpus.name} has text for {len(found)} clients; asked for {clients}")
    named: dict[str, tuple[str, ...]] = {}
    for author in sorted(found, key=lambda a: a.name):
        name, number = client_name(author.name), 1
        while name in named:
            number += 1
            name = f"{client_name(author.name)}-{number}"
        named[name] = author.lines
    return dict(sorted(named.items()))


def write_parts(parts: dict[str, tuple[str, ...]], folder: Path) -> dict[str, Path]:
    """Write one file a client; the folder can be trained on in a simulation as it is."""
    folder.mkdir(parents=True)
    for name, lines in parts.items():
        write_atomically(folder / name, ("\n".join(lines) + "\n").encode(), durable=False)
    return {name: folder / name for name in parts}
