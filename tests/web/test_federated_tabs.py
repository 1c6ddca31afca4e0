"""The training worker of the federated page: several tabs, and what its owner says. No server, no keyboard."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator

import pytest

from keyfed.keyboard.federated import write_federated

from .routed import ORIGIN, TOKEN, Federation, Tab, hand_over

LINES = "".join(f"weather likes school mountains {n}\n" for n in range(80))
ROUNDS = "s => s.isRunning && s.doing.line === 'Takes part: waits for a round.'"
CURVES = {"secure/keys.mjs": ('stored, "Ed25519", true', 'stored, "Ed25519x", true')}


@pytest.fixture(scope="module")
def folder(exported, tmp_path_factory):
    return write_federated(exported, tmp_path_factory.mktemp("routed") / "site").folder


class Profile:
    """A browser's profile, and the server that its tabs speak to."""

    def __init__(self, browser, folder, changes=None):
        self.federation, self.context = Federation(), browser.new_context()
        self.context.route("**/*", hand_over(folder, self.federation, changes))

    def tab(self) -> Tab:
        return Tab(self.context)


@pytest.fixture
def profile(browser, folder) -> Iterator[Callable[..., Profile]]:
    opened: list[Profile] = []

    def start(**how) -> Profile:
        opened.append(Profile(browser, folder, **how))
        return opened[-1]

    yield start
    for one in opened:
        one.context.close()


def test_what_one_tab_forgets_no_other_keeps_or_loses(profile):
    """The key of the text is another one after that; what is typed later is kept, also after a reload."""
    one = profile()
    first, second = one.tab(), one.tab()
    first.tell("keep", text="good morning everybody\nthank you very much\n")
    first.wait("s => s.kept.lines === 2")
    second.tell("forget")
    first.wait("s => s.kept.lines === 0")
    assert first.heard("forgotten")
    first.tell("keep", text="see them next week\n")
    first.wait("s => s.kept.lines === 1")
    assert second.lines() == first.lines() == ["see them next week"]
    first.open()
    assert first.state["kept"]["lines"] == len(first.values("text")) == 1
    second.tell("remove", id=int(next(iter(second.values("text")))))
    first.wait("s => s.kept.lines === 0")
    for n in range(5):  # lines that are on their way are kept or forgotten, and never under a key that is gone
        first.tell("keep", text=f"the weather of day {n}\n")
        second.tell("forget")
        first.tell("keep", text=f"the school of day {n}\n")
    second.wait("s => s.line.startsWith('What was kept')")
    first.page.wait_for_timeout(500)
    assert len(first.lines()) == len(first.values("text"))


def test_forgetting_in_another_tab_ends_the_training_of_this_one(profile):
    one = profile()
    first, second = one.tab(), one.tab()
    first.tell("keep", text=LINES)
    first.wait("s => s.kept.lines === 80")
    first.tell("allow", why="the test waits")
    first.tell("tune")
    first.wait("s => s.work.name === 'tuning'")
    second.tell("forget")
    first.wait("s => !s.work.name && s.kept.lines === 0")
    first.tell("allow", why=None)
    first.page.wait_for_timeout(200)
    assert first.state["using"] == {"kind": "export"}
    assert "tuned" not in first.values("page")


def test_minutes_are_counted_over_all_tabs(profile):
    one = profile()
    first, second = one.tab(), one.tab()
    first.tell("keep", text=LINES)
    first.wait("s => s.kept.lines === 80")
    first.tell("tune")
    first.wait("s => s.tune")
    worked = first.wait("s => !s.work.name && s.minutes.worked > 0")["minutes"]["worked"]
    second.wait("s => s.minutes.worked > 0")
    day = first.values("page")["day"]
    first.put("page", "day", {**day, "worked": 600_000})
    second.tell("tune")
    second.wait('s => s.waits === "today\'s 10 minutes are used"')
    assert worked < 1
    second.settings(minutes=20)
    second.wait("s => s.waits === null && !s.work.name")


def test_a_page_joined_in_one_tab_takes_part_in_the_first(profile):
    one = profile()
    first, second = one.tab(), one.tab()
    second.join()
    first.wait(ROUNDS)
    assert second.wait("s => s.client")["isFirst"] is False
    assert first.state["client"] == {"server": ORIGIN, "name": "tab"}
    second.tell("leave")
    first.wait("s => !s.client && !s.isRunning")
    assert first.values("client") == {}


def test_a_stop_holds(profile):
    """Whatever is forgotten or loaded again after it: until its owner lets it take part."""
    one = profile()
    tab = one.tab()
    tab.join()
    tab.wait(ROUNDS)
    tab.tell("stop")
    tab.wait("s => s.line === 'Stopped: this page does not take part.'")
    one.federation.asked.clear()
    tab.tell("forget")
    tab.wait("s => s.line.startsWith('What was kept')")
    tab.open()
    tab.page.wait_for_timeout(500)
    assert (tab.state["isRunning"], one.federation.asked) == (False, [])
    tab.tell("go")
    tab.wait(ROUNDS)
    tab.settings(consent=False)
    tab.wait("s => s.line.startsWith('Nothing more is kept') && !s.isRunning")
    tab.page.wait_for_timeout(100)
    one.federation.asked.clear()
    tab.tell("forget")
    tab.tell("go")
    tab.tell("tune")
    tab.tell("keep", text="nothing of this is kept\n")
    tab.join("other")
    tab.page.wait_for_timeout(500)
    assert (tab.state["kept"]["lines"], one.federation.asked) == (0, [])
    tab.settings(consent=True)
    tab.wait(ROUNDS)


def test_two_clicks_take_part_once_and_a_quick_server_is_asked_once_a_second(profile):
    one = profile()
    tab = one.tab()
    tab.join()
    tab.wait(ROUNDS)
    tab.tell("stop")
    tab.wait("s => !s.isRunning")
    one.federation.asked.clear()
    tab.page.evaluate("tell('go'); tell('go'); tell('go')")
    tab.wait(ROUNDS)
    tab.page.wait_for_timeout(2_500)
    assert one.federation.count("about") == 1
    assert 2 <= one.federation.count("next") <= 4


def test_a_page_that_the_server_has_forgotten_joins_anew(profile):
    """With another identity; what left it stays counted, and the line of the trouble stays to be read."""
    one = profile()
    tab = one.tab()
    tab.join()
    tab.wait(ROUNDS)
    account = json.dumps({"entries": [], "open": ["run"], "number": 1})
    tab.put("client", "spent", {"text": account, "sum": hashlib.sha256(account.encode()).hexdigest()})
    tab.put("client", "spent head", {"number": 1, "sum": hashlib.sha256(account.encode()).hexdigest()})
    tab.put("client", "pins", {"anna": "00"})
    one.federation.refused["next"] = "not enrolled"
    state = tab.wait("s => !s.client")
    says = "The server does not know this page any more. Its keys are deleted, its own ε stays counted"
    assert says in state["doing"]["line"]
    tab.wait("s => !s.isKnown")
    assert set(tab.values("client")) & {"identity", "keys", "pins", "roster"} == set()
    assert tab.state["account"]["open"] == 1
    one.federation.refused.clear()
    tab.join(token="b" * 43)
    tab.wait(ROUNDS)
    before, after = one.federation.enrolments()
    assert before["identity"] != after["identity"]
    assert says in tab.state["trouble"]["line"]
    assert tab.state["trouble"]["at"] > 1.7e12
    tab.open()
    assert says in tab.state["trouble"]["line"]


def test_a_link_whose_answer_was_lost_is_tried_again(profile):
    one = profile()
    tab = one.tab()
    one.federation.refused["about"] = None
    tab.join()
    tab.wait("s => s.line.includes('the same link is not used yet')")
    one.federation.refused = {"enrol": None}
    tab.join()
    state = tab.wait("s => s.line.includes('the same link and this page still fit together, if it arrived')")
    assert (state["client"], state["isKnown"]) == (None, True)
    one.federation.refused = {"enrol": "name"}
    tab.join()
    tab.wait("s => s.line === 'The server refuses this page: said the test'")
    one.federation.refused.clear()
    tab.join()
    tab.wait(ROUNDS)
    asked = one.federation.enrolments()
    assert len({one["identity"] for one in asked}) == 1
    assert {one["token"] for one in asked} == {TOKEN}


def test_a_roster_of_strangers_is_trusted_by_its_owner_alone(profile):
    """Its hash is shown, and what is trusted is this roster, now and after a reload; leaving forgets it."""
    one = profile()
    tab = one.tab()
    tab.put("client", "roster", {"hash": "0" * 32, "clients": 2, "known": ["0" * 32, "1" * 32]})
    tab.join()
    hello = bytes(tab.wait(ROUNDS) and tab.page.evaluate(HELLO))
    one.federation.messages.append(("hello", hello))
    state = tab.wait("s => s.strangers")
    assert state["roster"] == {"hash": "0" * 32, "clients": 2, "known": ["0" * 32, "1" * 32]}
    assert "never seen before; compare its hash" in tab.wait("s => s.trouble")["trouble"]["line"]
    tab.page.wait_for_timeout(200)
    assert [said.get("keyfed-error") for path, said, _ in one.federation.asked if path == "answer"] == ["strangers"]
    one.federation.messages.append(("hello", hello))
    tab.page.wait_for_timeout(1_200)
    assert tab.values("client")["roster"]["hash"] == "0" * 32
    tab.tell("trust", hash=state["strangers"])
    tab.wait("s => !s.strangers")
    tab.open()
    one.federation.messages.append(("hello", hello))
    tab.wait(f"s => s.roster.hash === '{state['strangers']}'")
    tab.tell("leave")
    tab.wait("s => !s.isKnown && !s.roster")
    assert not {"trusted", "client", "trouble"} & set(tab.values("page"))


HELLO = """async () => {
  const { pack, textDigest } = await import('/client/messages.mjs');
  const spec = {name: 'fedavg'}, roster = ['a', 'b', 'c'].map((mark) => mark.repeat(32));
  const head = {run: 'r', nonce: 'n', secure: true, page: {spec}, method: await textDigest([spec, true]),
    roster, vocab: '', config: {}};
  return [...pack(head)];
}"""


def test_leaving_without_a_server_forgets_the_keys(profile):
    one = profile()
    tab = one.tab()
    one.federation.refused["enrol"] = "link"
    tab.join()
    tab.wait("s => s.isKnown && s.line.startsWith('This link is used')")
    tab.tell("leave")
    state = tab.wait("s => !s.isKnown && s.line.startsWith('Left')")
    assert state["line"] == "Left: this page has forgotten its keys and its own ε account."
    assert tab.values("client") == {}


def test_a_browser_without_the_curves_says_so_at_once(profile):
    tab = profile(changes=CURVES).tab()
    says = "This browser can train, but cannot join: it lacks Ed25519 or X25519. A current version has both."
    assert tab.wait("s => s.line !== ''")["line"] == says
    tab.tell("keep", text=LINES)
    tab.join()
    tab.wait("s => s.kept.lines === 80 && !s.isJoining")
    assert tab.state["line"] == says


def test_a_model_that_does_worse_is_offered_taken_or_refused(profile):
    one = profile()
    tab = one.tab()
    tab.tell("keep", text=LINES)
    tab.wait("s => s.kept.lines === 80")
    tab.page.evaluate(WORSE)
    for answer, using in [("refuse", "export"), ("take", "federation")]:
        tab.open()
        assert tab.state["arrived"]["name"] == "its final model"
        tab.tell("allow", why=None)
        tab.tell("consider")
        state = tab.wait("s => s.offered")
        assert state["offered"]["seen"]["isWorse"] is True
        assert state["line"].startswith("The new model does worse on your held-back lines")
        assert state["using"]["kind"] == "export"
        tab.tell(answer)
        state = tab.wait("s => !s.arrived")
        assert state["using"]["kind"] == using
        tab.page.evaluate(WORSE)


WORSE = """async () => {
  const { exportedModel } = await import('/federated/models.mjs');
  const model = await exportedModel(new URL('/model/', location).href);
  model.weights['output.bias'][5] = 50;
  model.from = {kind: 'federation', run: 'r', name: 'its final model', digest: '0'};
  const database = await new Promise((done) => {
    const request = indexedDB.open('keyfed.federated');
    request.onsuccess = () => done(request.result);
  });
  const change = database.transaction('page', 'readwrite');
  change.objectStore('page').put(model, 'last');
  await new Promise((done) => { change.oncomplete = done; });
  database.close();
}"""


def test_a_browser_without_room_and_one_that_clears_what_was_kept(profile):
    one = profile()
    empty = one.context.new_page()
    empty.goto(f"{ORIGIN}/data/layouts.json")
    browser = one.context.new_cdp_session(empty)
    browser.send("Storage.overrideQuotaForOrigin", {"origin": ORIGIN, "quotaSize": 1})
    tab = one.tab()
    tab.tell("keep", text=LINES)
    tab.page.wait_for_function("() => window.heard.some(one => one.kind === 'trouble')")
    assert tab.heard("trouble")[0]["line"].startswith("this browser has no room left: nothing more is kept")
    browser.send("Storage.overrideQuotaForOrigin", {"origin": ORIGIN})
    tab.tell("keep", text="good morning everybody\n")
    tab.wait("s => s.kept.lines === 1")
    assert tab.lines() == ["good morning everybody"]
    browser.send("Storage.clearDataForOrigin", {"origin": ORIGIN, "storageTypes": "indexeddb"})
    tab.wait("s => s.line.startsWith('This browser has cleared what this page kept')")
    tab.tell("keep", text=LINES)
    tab.page.wait_for_function("() => window.heard.filter(one => one.kind === 'trouble').length > 1")
    assert "has cleared what this page kept" in tab.heard("trouble")[-1]["line"]
