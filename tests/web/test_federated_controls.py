"""The federated page's panel: what it says, what its controls do, and when the page works. No server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from keyfed.keyboard.federated import write_federated

from .conftest import INSECURE_HOST, LOADED, Visit
from .routed import ORIGIN, PUT, TOKEN, VALUES, Federation, hand_over

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
QUICK = {
    "federated/page.mjs": (
        "const IDLE = 5_000, LEFT_ALONE = 15_000, LOOK = 1_000;",
        "const IDLE = 400, LEFT_ALONE = 15_000, LOOK = 100;",
    )
}
DEVICE = """
window.battery = {level: 1, charging: false};
navigator.getBattery = async () => window.battery;
window.isAway = false;
Object.defineProperty(document, 'hidden', {get: () => window.isAway});
"""


class Address:
    def __init__(self, address):
        self.address = address


class Owner(Visit):
    """A visit of the page, whose files come from the test."""

    def __init__(self, browser, folder, origin=ORIGIN, changes=None):
        super().__init__(browser, Address(f"{origin}/"), service_workers="block")
        self.federation = Federation()
        self.context.route("**/*", hand_over(folder, self.federation, changes))
        self.context.add_init_script(DEVICE)

    def agree(self) -> Owner:
        self.page.evaluate("document.querySelector('input[name=consent]').click()")
        expect(self.page.locator("#panel-body dd").first).to_contain_text("lines of at most")
        return self

    def fact(self, name: str) -> object:
        return self.page.locator(f'#panel-body dt:text-is("{name}") + dd')

    def another(self) -> object:
        """Another tab of the same profile."""
        page = self.context.new_page()
        page.goto(f"{ORIGIN}/")
        page.locator("#federated-note[data-ready]").wait_for(state="attached")
        page.locator("html[data-state=ready]").wait_for(state="attached")
        return page


@pytest.fixture(scope="module")
def folder(exported, tmp_path_factory):
    return write_federated(exported, tmp_path_factory.mktemp("controls") / "site").folder


@pytest.fixture
def owner(browser, folder) -> Iterator[Callable[..., Owner]]:
    opened: list[Owner] = []

    def start(**how) -> Owner:
        opened.append(Owner(browser, folder, **how))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_when_it_works_and_what_is_switched_in_another_tab(owner):
    """Typing, an empty battery, a tab out of sight, incognito; and every setting counts in all tabs."""
    one = owner(changes=QUICK).open().agree()
    one.panel()
    today = one.fact("Today")
    expect(today).to_have_text("0.0 of 10 minutes")
    one.close_panel()
    one.type("good")
    one.panel()
    expect(today).to_contain_text("waits: you are typing")
    expect(today).to_have_text("0.0 of 10 minutes")
    for change, says in [
        ("battery.level = 0.29", "the battery is at 29 %"),
        ("battery.charging = true", ""),
        ("isAway = true", "this tab is out of sight"),
    ]:
        one.page.evaluate(change)
        expect(today).to_have_text(f"0.0 of 10 minutes{'; waits: ' if says else ''}{says}")
    other = one.another()
    other.evaluate("document.querySelector('input[name=out]').click()")
    expect(today).to_have_text("0.0 of 10 minutes")
    one.page.evaluate("document.querySelector('input[name=incognito]').click()")
    expect(today).to_contain_text("waits: this is incognito")
    other.evaluate("document.querySelector('input[name=preview]').click()")
    expect(one.page.locator("input[name=preview]")).to_be_checked()
    other.select_option("#minutes", "60", force=True)
    expect(today).to_contain_text("of 60 minutes")
    expect(one.page.locator("#minutes")).to_have_value("60")
    other.evaluate(
        "() => { for (const [id, n] of [['floor', 12], ['budget', 2.5]]) {"
        "const field = document.getElementById(id); field.value = n; field.dispatchEvent(new Event('change')); } }"
    )
    expect(one.page.locator("#floor")).to_have_value("12")
    expect(one.page.locator("#budget")).to_have_value("2.5")
    one.page.fill("#floor", "2")
    one.page.locator("#floor").blur()
    expect(one.page.locator("#floor")).to_have_value("12")
    kept = json.loads(one.page.evaluate("localStorage.getItem('keyfed.federated')"))
    assert kept == {"consent": True, "out": True, "preview": True, "minutes": 60, "budget": 2.5, "floor": 12}
    assert [line for line in one.problems if "blocked by Playwright" not in line] == []


def test_what_was_kept_can_be_forgotten_without_consent(owner):
    """After it is withdrawn, after a reload, with and without a worker; the draft goes with it."""
    one = owner().open().agree()
    one.type("goodbye everybody from here\n")
    one.panel()
    expect(one.fact("Kept for training")).to_have_text("1 lines of at most 4,000")
    one.page.locator("input[name=consent]").uncheck()
    expect(one.page.locator("#federated-note")).to_contain_text("Nothing more is kept or trained.")
    assert one.page.locator("#forget-kept").is_visible()
    one.reload()
    assert one.page.evaluate("localStorage.getItem('keyfed.text')") is not None
    one.panel()
    expect(one.fact("Kept for training")).to_have_text("1 lines of at most 4,000")
    one.page.click("#forget-kept")
    one.page.click("#forget-kept")
    expect(one.fact("Kept for training")).to_have_text("0 lines of at most 4,000")
    assert one.page.evaluate(VALUES, "text") == {}
    assert one.page.evaluate("localStorage.getItem('keyfed.text')") is None
    assert one.federation.asked == []
    for name in ("text", "tuned"):
        one.page.evaluate(PUT, ["page" if name == "tuned" else "text", 1 if name == "text" else name, {"sealed": 0}])
    one.context.route("**/trainer.mjs", lambda route: route.abort())
    one.reload()
    one.panel()
    expect(one.page.locator("#federated-note")).to_contain_text("Training does not work here")
    one.page.click("#forget-all")
    one.page.click("#forget-all")
    expect(one.page.locator("#federated-note")).to_have_text("What was kept for training is forgotten.")
    assert one.page.evaluate(VALUES, "text") == {}
    assert "tuned" not in one.page.evaluate(VALUES, "page")


def test_leave_is_there_as_long_as_there_is_an_identity(owner):
    one = owner().open().agree()
    one.page.evaluate("hash => { location.hash = hash; }", f"join={TOKEN}")
    one.panel()
    one.page.click("#join")
    expect(one.page.locator("#rounds-note")).to_have_text("Takes part: waits for a round.", timeout=LOADED)
    one.federation.refused["next"] = "not enrolled"
    expect(one.page.locator("#rounds-note")).to_contain_text("join again with a new link")
    expect(one.page.locator("#leave")).to_be_hidden()  # there is nothing to leave
    one.federation.refused = {"enrol": None}
    one.page.evaluate("hash => { location.hash = hash; }", f"join={TOKEN}")
    one.page.click("#join")
    expect(one.page.locator("#federated-note")).to_contain_text('press "Join" again later')
    expect(one.page.locator("#leave")).to_be_visible()
    expect(one.page.locator("#join")).to_be_enabled()
    one.page.locator("input[name=consent]").uncheck()
    expect(one.page.locator("#leave")).to_be_visible()
    expect(one.page.locator("#go")).to_be_hidden()
    one.page.click("#leave")
    one.page.click("#leave")
    expect(one.page.locator("#federated-note")).to_have_text(
        "Left: this page has forgotten its keys and its own ε account."
    )
    expect(one.page.locator("#leave")).to_be_hidden()


def test_plain_http_and_a_page_without_its_description_say_one_line(owner):
    plain = owner(origin=f"http://{INSECURE_HOST}").open("failed")
    plain.panel()
    plain.page.locator("input[name=consent]").check()
    says = "Over plain http a browser lets no page train or take part: open this page over https."
    expect(plain.page.locator("#federated-note")).to_have_text(says)
    plain.close_panel()
    plain.type("nothing of this is kept\n")
    assert plain.page.evaluate("indexedDB.databases()") == []
    assert plain.federation.asked == []
    bare = owner()
    bare.context.route("**/page.json", lambda route: route.fulfill(status=404, body=""))
    bare.open()
    expect(bare.page.locator("#federated-note")).to_contain_text("page.json is missing or damaged")
    assert bare.page.locator("input[name=consent]").count() == 0


def test_what_the_panel_says_of_models_accounts_rosters_and_troubles(owner):
    """Its own words for states that take a whole run to reach."""
    page = owner().open().page
    page.evaluate(PANEL)
    show = "change => { Object.assign(state, change); panel.show(state); }"
    text = page.locator("#trial")
    seen = {
        "lines": 9, "isEnough": True, "isWorse": True,
        "before": {"top3": 0.5, "nats": 2.0}, "after": {"top3": 0.25, "nats": 4.0},
    }  # fmt: skip
    arrived = {"kind": "federation", "run": "r", "name": "its final model", "digest": "0" * 64}
    page.evaluate(show, {"arrived": arrived, "offered": {"seen": seen, "isTaken": False}})
    expect(text).to_contain_text("It does worse for you: 25.0 % of your held-back words among the first three")
    page.evaluate("document.querySelector('#trial #take').click(); document.querySelector('#trial #refuse').click()")
    account = {"epsilon": 1.2345, "delta": 1e-6, "uploads": 3, "runs": 1, "open": 0, "budget": None}
    page.evaluate(
        show, {"account": account, "arrived": None, "strangers": "5" * 32, "roster": {"clients": 7, "hash": "6" * 32}}
    )
    expect(text).to_contain_text("Own ε1.23 (δ = 0.000001) for 3 uploads to 1 private run")
    expect(text).to_contain_text(f"7 clients, hash {'6' * 32}")
    expect(text).to_contain_text(f"Its hash is {'5' * 32}: compare it")
    page.evaluate("document.querySelector('#trial #trust').click()")
    assert page.evaluate("acts") == [["take", None], ["refuse", None], ["trust", {"hash": "5" * 32}]]
    trouble = {"line": "Refused to answer (strangers: …).", "at": 1_700_000_000_000}
    page.evaluate(show, {"trouble": trouble})
    expect(page.locator("#trial #last-trouble")).to_contain_text("2023")
    expect(page.locator("#trial #last-trouble")).to_contain_text(": Refused to answer (strangers: …).")
    page.evaluate(show, {"doing": {"line": trouble["line"], "isTrouble": True}})
    assert page.locator("#trial #last-trouble").get_attribute("hidden") is not None  # it stands there already


PANEL = """async () => {
  const { FederatedPanel } = await import('/federated/panel.mjs');
  const body = document.createElement('div');
  body.id = 'trial';
  document.body.append(body);
  window.acts = [];
  const settings = {consent: true, out: false, preview: false, minutes: 10, budget: 0, floor: 3};
  window.panel = new FederatedPanel(body, settings, {agree() {}, change() {},
    act: (kind, more) => acts.push([kind, more ?? null])});
  window.state = {
    kept: {lines: 0, held: 0, bytes: 0, most: 4000}, work: {name: ''}, line: '', isTrouble: false, trouble: null,
    waits: null, client: null,
    isFirst: true, isRunning: false, doing: {line: '', isTrouble: false}, isJoining: false,
    using: {kind: 'export'}, tune: null, numbers: null,
    account: null, arrived: null, offered: null, server: null, minutes: {worked: 0, most: 10},
    isKnown: true, roster: null, strangers: null,
  };
}"""
