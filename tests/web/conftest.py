"""A small trained keyboard, its server and a browser that notices everything."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import keyfed as library
from tests.counting import count_run

SENTENCES = [
    "good morning everybody", "thank you very much", "see them next week", "how was school today",
    "my sister likes green apples", "we feel happy about the weather", "please open the window again",
    "our neighbours travel through beautiful mountains",
]  # fmt: skip
"""A language in which most words leave one choice for the next."""

FRESH = """() => {
  const standard = {
    autocorrect: true, emoji: true, filter: true, learn: true, incognito: false,
    fullstop: true, capitals: false, keep: true, numbers: false,
  };
  for (const [name, value] of Object.entries(standard)) {
    const input = document.querySelector(`input[name="${name}"]`);
    if (input.checked !== value) input.click();
  }
  for (const [name, value] of [['source', 'personal'], ['layout', 'qwerty'], ['theme', 'auto']]) {
    document.querySelector(`input[name="${name}"][value="${value}"]`).click();
  }
  document.getElementById('forget-all').click();
  document.getElementById('forget-all').click();
  document.querySelectorAll('#dictionary li button, #blocked li button').forEach((button) => button.click());
  document.getElementById('close-panel').click();
}"""
LOADED = 60_000  # milliseconds: a hang, not a speed
INSECURE_HOST = "keyfed.test"  # 127.0.0.1 under a name that browsers do not trust over plain http
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="session")
def exported(tmp_path_factory) -> Path:
    """The export of a small model that was trained for a few seconds, once for all processes that run tests."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-keyboard"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with its holder
        if not (folder / "exported").exists():
            made = train_and_export(tmp_path_factory.mktemp("keyboard"))
            shutil.copytree(made, folder / "copy")
            (folder / "copy").rename(folder / "exported")
    return folder / "exported"


def train_and_export(folder: Path) -> Path:
    from keyfed.keyboard.export import export_run

    corpus = folder / "corpus"
    corpus.mkdir()
    for k in range(4):
        draw = random.Random(k)
        lines = [draw.choice(SENTENCES) for _ in range(120)]
        # Words that nobody writes twice, so that the model has seen unknown ones and goes on all the same.
        lines += [f"x{k}y{i} {draw.choice(SENTENCES)}" for i in range(60)]
        draw.shuffle(lines)
        (corpus / f"writer{k}.txt").write_text("\n".join(lines) + "\n", "utf-8")
    own: dict[str, Any] = {"model_embed": 16, "model_hidden": 32, "data_vocab": 40, "data_window": 8}
    own |= {"train_cohort": 4, "train_workers": 1, "train_valid_tokens": 500, "train_baselines": False}
    config = library.configure("fedavg", data=str(corpus), rounds=12, lr=0.02, optimiser="adam", **own)
    library.train(config, folder / "run")
    return export_run(count_run(folder / "run")).out


class Site:
    """A running server: its address, every request that reached it, and what it sent."""

    def __init__(self, folder: Path) -> None:
        import uvicorn

        from keyfed.keyboard import serve

        listening = serve.listen(0)
        self.port: int = listening.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}/"
        self.requests: list[str] = []
        self.sent: list[tuple[str, int, int]] = []  # path, status and bytes of every answer
        app = serve.make_app(folder, self.port)

        async def recorded(scope: Any, receive: Any, send: Any) -> None:
            self.requests.append(f"{scope.get('method')} {scope.get('path')}?{scope.get('query_string', b'').decode()}")
            status = size = 0

            async def counted(message: Any) -> None:
                nonlocal status, size
                status, size = message.get("status", status), size + len(message.get("body", b""))
                await send(message)

            await app(scope, receive, counted)
            self.sent.append((scope["path"], status, size))

        self._server = uvicorn.Server(
            uvicorn.Config(recorded, log_config=None, log_level="error", lifespan="off", ws="none")
        )
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)


@pytest.fixture(scope="module")
def site(exported) -> Iterator[Site]:
    """The page's own server with the small model."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    running = Site(exported)
    yield running
    running.stop()


def browser_path() -> str | None:
    """Where Chromium is, if it is."""
    return os.environ.get("KEYFED_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One Chromium for all tests of a file."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = browser_path()
    if path is None:
        pytest.skip(f"no browser found (looked for {', '.join(BROWSERS)})")
    with playwright.sync_playwright() as running:
        # Chromium's sandbox does not start for root, which is who tests run as in a container.
        arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        arguments.append(f"--host-resolver-rules=MAP {INSECURE_HOST} 127.0.0.1")
        started = running.chromium.launch(executable_path=path, args=arguments)
        yield started
        started.close()


class Visit:
    """A page in a browser context of its own, and what went wrong on it."""

    def __init__(self, browser: Any, site: Site, **options: Any) -> None:
        self.site = site
        self.context = browser.new_context(viewport={"width": 390, "height": 844}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(LOADED)
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.problems.append(f"uncaught: {error}"))
        self.page.on("websocket", lambda socket: self.requests.append(f"websocket {socket.url}"))
        self.context.on("request", lambda request: self.requests.append(request.url))

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

    def open(self, state: str = "ready") -> Visit:
        self.page.goto(self.site.address)
        return self.wait(state)

    def reload(self) -> Visit:
        self.page.reload()
        return self.wait("ready")

    def wait(self, state: str) -> Visit:
        self.page.locator("html[data-state]").wait_for(state="attached", timeout=LOADED)
        assert self.page.locator("html").get_attribute("data-state") == state, self.page.text_content("#notice")
        self.page.focus("#text")
        return self

    def fresh(self) -> None:
        """Make the page as it was at first, with its own controls."""
        self.context.set_offline(False)
        self.page.set_viewport_size({"width": 390, "height": 844})
        self.page.evaluate(FRESH)
        self.page.locator("#panel:not(.open)").wait_for(state="attached")
        self.page.locator("#learnt:empty").wait_for(state="attached")
        self.page.locator("#dictionary:empty").wait_for(state="attached")
        self.page.locator("#blocked:empty").wait_for(state="attached")
        self.page.focus("#text")
        self.press("Control+a")
        self.press("Delete")
        self.page.locator('.slot.middle[data-kind="next"]').wait_for()
        self.requests.clear()

    # ------------------------------------------------------------ what a person does and sees

    def type(self, text: str, delay: float = 0) -> None:
        self.page.keyboard.type(text, delay=delay)

    def press(self, key: str) -> None:
        self.page.keyboard.press(key)

    def tap(self, keys: str) -> None:
        for key in keys:
            self.key(key).click()

    def key(self, name: str) -> Any:
        return self.page.locator(f'.key[data-key="{name}"]')

    def slot(self, place: str) -> Any:
        return self.page.locator(f".slot.{place}")

    def shown(self) -> list[str]:
        return self.page.locator(".slot").all_text_contents()

    def hold(self, place: str) -> None:
        """A long press on a suggestion."""
        box = self.slot(place).bounding_box()
        self.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        self.page.mouse.down()
        self.page.locator(".menu").wait_for()
        self.page.mouse.up()

    def swipe(self, word: str) -> None:
        boxes = [self.key(letter).bounding_box() for letter in word]
        points = [(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2) for box in boxes]
        self.page.mouse.move(*points[0])
        self.page.mouse.down()
        for point in points[1:]:
            self.page.mouse.move(*point, steps=6)
        self.page.mouse.up()

    def panel(self) -> None:
        self.page.click("#open-panel")
        self.page.locator("#panel.open").wait_for()

    def close_panel(self) -> None:
        self.page.click("#close-panel")
        self.page.locator("#panel:not(.open)").wait_for(state="attached")
        for _ in range(100):  # until it has faded it lies over the keys
            if self.page.evaluate("document.getAnimations().length") == 0:
                break
            self.page.wait_for_timeout(20)
        self.page.focus("#text")

    def set(self, name: str, value: Any) -> None:
        """Change a setting the way a person does: open the panel, change, close."""
        self.panel()
        if isinstance(value, bool):
            self.page.locator(f'input[name="{name}"]').set_checked(value)
        else:
            self.page.locator(f'input[name="{name}"][value="{value}"]').check()
        self.close_panel()

    def stored(self) -> dict[str, Any]:
        """What the browser keeps of this page."""
        kept: dict[str, str] = self.page.evaluate("() => ({...localStorage})")
        return {key: json.loads(value) for key, value in kept.items()}

    def close(self) -> None:
        self.context.close()


@pytest.fixture
def visit(browser, site) -> Iterator[Callable[..., Visit]]:
    """Open pages; each must end without an error, a warning or a violation of the policy in its console."""
    opened: list[Visit] = []

    def start(**options: Any) -> Visit:
        opened.append(Visit(browser, site, **options))
        return opened[-1]

    yield start
    for one in opened:
        one.close()
    assert [problem for one in opened for problem in one.problems] == []


@pytest.fixture(scope="module")
def shared() -> Iterator[list[Visit]]:
    """The page that tests use one after the other: loading it costs more than most tests."""
    kept: list[Visit] = []
    yield kept
    for one in kept:
        one.close()


@pytest.fixture
def keyboard(browser, site, shared) -> Iterator[Visit]:
    """The page as a new visitor finds it, the cursor in the text; its console must stay empty."""
    one = shared.pop() if shared else Visit(browser, site).open()
    one.fresh()
    yield one
    assert one.problems == []
    shared.append(one)  # only a page that left no problem behind is used again
