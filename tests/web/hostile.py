"""Messages of a server that lies, made from those of one that does not, and a page that keeps apart what they do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from keyfed.wire.messages import pack, unpack
from keyfed.wire.transport import Post

Change = Callable[[dict[str, Any]], object]


def changed(body: bytes, *changes: Change, tensors: bytes | None = None) -> bytes:
    """Return a message with another head or other tensors."""
    head, own = unpack(body)
    head = json.loads(json.dumps(head))
    for change in changes:
        change(head)
    return pack(head) + (own if tensors is None else tensors)


def put(*path: str, to: Any) -> Change:
    """Return what sets one value of a head; a function is called with the value before."""

    def change(head):
        for key in path[:-1]:
            head = head[key]
        head[path[-1]] = to(head.get(path[-1])) if callable(to) else to

    return change


def drop(key: str) -> Change:
    return lambda head: head.pop(key)


class Scene:
    """One page and a round's genuine messages: `hello`, `before` (an earlier training), `train`, `upload`, `unmask`.

    Forks of the page: "fresh" knows nothing of the run, "known" has answered its hello, "ready" has everything before
    the training of the last round, "over" everything after it.
    """

    def __init__(self, browser: Any, page: str) -> None:
        self.browser, self.page = browser, page
        self.posts: dict[str, bytes] = {}
        self._forks = 0

    def watch(self, post: Post, deliver: Callable[[], Any], round: int) -> Any:
        """Hand a genuine message on, and keep what the cases need."""
        head = unpack(post.body).head
        if post.kind == "hello" and "hello" not in self.posts:
            self._keep("fresh")
            answer = deliver()
            self.posts["hello"] = post.body
            self._keep("known")
            return answer
        if post.kind == "train" and head["purpose"] == "upload":
            name = "train" if head["round"] == round else "before"
            if name not in self.posts:
                self.posts[name] = post.body
                if name == "train":
                    self._keep("ready")
        if post.kind in ("upload", "unmask") and "train" in self.posts and head["round"] == round:
            self.posts.setdefault(post.kind, post.body)
        answer = deliver()
        if post.kind == "unmask" and "unmask" in self.posts:
            self._keep("over")
        return answer

    def _keep(self, name: str) -> None:
        self.browser("fork", name=self.page, to=f"{self.page} {name}")

    def answer(self, fork: str, steps: list[Any], spoil: dict[str, Any] | None = None, **how: Any) -> dict[str, Any]:
        """Send messages to a fork of a page and return what it says to the last one; the others must be answered.

        Args:
          steps: names of genuine messages, or (kind, body), or what makes one from all answers so far.
          spoil: values of its store that are changed before.
          how: how the fork is opened otherwise than the page was.
        """
        self._forks += 1
        name = f"{self.page} case {self._forks}"
        self.browser("fork", name=f"{self.page} {fork}", to=name, **how)
        for key, to in (spoil or {}).items():
            self.browser.ask("spoil", name=name, key=key, to=to)
        answers: list[dict[str, Any]] = []
        for n, step in enumerate(steps):
            made = step(self, answers) if callable(step) else step
            kind, body = (made, self.posts[made]) if isinstance(made, str) else made
            kind = "train" if kind == "before" else kind
            answers.append(self.browser.ask("handle", name=name, kind=kind, body=body.hex()))
            if n < len(steps) - 1:
                assert "value" in answers[-1], (n, answers[-1])
        return answers[-1]

    def forged(self, kind: str, *changes: Change) -> tuple[str, bytes]:
        """A genuine message with another head."""
        return kind, changed(self.posts[kind], *changes)
