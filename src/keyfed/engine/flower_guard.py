"""One client's garbled reply must not cost the others theirs.

Flower takes all replies that are there from the SuperLink at once and builds them one after another: an error in one
ends the look, and the others, delivered already, are gone. Here each is built where Flower still tells a reply that
cannot be had from one that can. The names are inner ones of flwr 1.41.0 (pinned); where a version has others, replies
are looked for one by one after an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from keyfed.engine.flower_frames import BODY_CAP

HEADS = 1 << 20  # what Flower writes before each chunk, all together


def guard() -> bool:
    """Isolate replies from each other in this process; return whether that could be done."""
    from flwr.superlink.grid import http_grid

    pull, inflate = getattr(http_grid, "pull_objects", None), getattr(http_grid, "inflate_object_from_contents", None)
    error = getattr(http_grid, "ObjectPullError", None)
    if pull is None or inflate is None or error is None:
        return False
    if not hasattr(pull, "guarded"):
        pull, inflate = isolated(pull, inflate, error)
        vars(http_grid).update(pull_objects=pull, inflate_object_from_contents=inflate)
    return True


def isolated(
    pull: Callable[..., dict[str, bytes]], inflate: Callable[..., Any], error: type[Exception]
) -> tuple[Callable[..., dict[str, bytes]], Callable[..., Any]]:
    """Return `pull`, which builds the object too and raises `error` where it cannot, and `inflate`, which hands it out.

    Flower answers `error` for that one reply; everything else that is raised ends the look for all.
    """
    built: dict[str, Any] = {}

    def pull_and_build(object_ids: list[str], **more: Any) -> dict[str, bytes]:
        contents = pull(object_ids, **more)
        root = object_ids[-1]  # children come before their parents
        try:
            check_size(contents)
            built[root] = inflate(root, contents)
        except Exception as e:  # whatever a client can bring about
            raise error(root, f"garbled ({type(e).__name__})") from None
        return contents

    def hand_out(object_id: str, contents: dict[str, bytes], **more: Any) -> Any:
        return built.pop(object_id) if object_id in built else inflate(object_id, contents, **more)

    pull_and_build.guarded = True  # type: ignore[attr-defined]
    return pull_and_build, hand_out


def check_size(contents: Mapping[str, bytes], cap: int = BODY_CAP) -> None:
    """Raise ValueError for arrays that would be larger than `cap` bytes: one chunk can be named a million times."""
    from flwr.supercore.constant import HEAD_BODY_DIVIDER
    from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content

    total = 0
    for content in contents.values():
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind == "Array":
            chunks = json.loads(content.partition(HEAD_BODY_DIVIDER)[2])["arraychunk_ids"]
            total += sum(len(contents[children[k]]) for k in chunks)
    if total > cap + HEADS:
        raise ValueError(f"arrays of {total:,} bytes; at most {cap:,}")
