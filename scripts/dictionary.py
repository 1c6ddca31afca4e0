"""Make the keyboard's dictionary anew from its two sources; it is seldom needed, the file comes with the package.

    apt-get download scowl && dpkg-deb -x scowl_*.deb scowl
    pip install msgpack && pip download --no-deps wordfreq==3.1.1 && unzip -o wordfreq-3.1.1-*.whl -d wordfreq
    python scripts/dictionary.py scowl/usr/share/dict/scowl wordfreq/wordfreq/data/large_en.msgpack.gz
    python scripts/dictionary.py --packaged wordfreq/wordfreq/data/large_en.msgpack.gz     # more words of our own

SCOWL says what is a word: its English, American and British lists up to size 70. Rare short words and initials, which
would only stand in the way of corrections, are left out. To these come the words below, our own: informal ones, names,
and borrowed words with their accents. wordfreq says how frequent each is; words rarer than 10^−7 are left out.
`--packaged` takes the words of the file that is there in the place of SCOWL's, and adds our own: for these, both ways
give the same.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from pathlib import Path

import numpy as np

from keyfed.keyboard.dictionary import FILE, STEPS, Dictionary, english, from_bytes, to_bytes
from keyfed.keyboard.keys import fold

REGIONS = ("english", "american", "british", "british_z")
SIZES = {"words": 70, "upper": 70, "proper-names": 70, "contractions": 50, "abbreviations": 50}
SHORT, SHORT_SIZE = 3, 55  # words of so few letters are taken from the lists up to this size
SELDOM = 50
RAREST = 700  # in hundredths of a power of ten: a share of 10^−7
UNCOUNTED = 620  # of an informal word that wordfreq does not have
LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzàâäçèéêëíîïñóôöûü'-")
ONE_LETTER = frozenset("ai")
# Of the abbreviations; the others are states, elements and the like.
TWO_LETTERS = (
    "ai am cd cm cv dc dj dr eu ft gb gp hq hr id kg km la mb ml mm mr ms mt ny nz pc pe pm ps st tv uk un us uv vp vs"
)
INFORMAL = """
ok okay haha hahaha hehe lol omg btw idk imo yay wifi wi-fi sci-fi hmm umm ugh aww whoa woah yup yep nope nah yea
yeah gonna gotta wanna kinda sorta dunno lemme gimme pls plz thx asap fyi diy app apps emoji emojis selfie selfies
vlog podcast podcasts airbnb netflix spotify whatsapp instagram tiktok youtube google googled iphone ipad gmail
covid brexit brunch bbq xmas bday hubby veggie veggies comfy cosy grandad granddad nana nanny mam vegan vegans
laptop charger eta gps usb pdf pdfs t-shirt t-shirts hoodie hoodies leggings flip-flops lockdown checkout signup
login logins username usernames inbox hashtag hashtags livestream playlist playlists ebook ebooks smartwatch crypto
bitcoin online offline touchscreen babysit babysitter takeaway takeout email emails unfollow bestie bff fave def lmk
tbh smartphone smartphones bro dm dms lmao ya ur cos cuz aka mins y'all that'll cafe cafes uber tesco snapchat chatgpt
fifa xbox reddit tumblr linkedin pinterest etsy photoshop minecraft pokemon fortnite wifey e-mail e-mails admin admins
bot bots donut donuts dvds gifs gameplay cyber adhd lgbtq cctv wellbeing fiance geez welp
"""
ACCENTED = """
résumé résumés naïve façade crème brûlée déjà décor purée exposé señor señora niño piñata jalapeño communiqué
"""
WRITTEN = {
    "airbnb": "Airbnb", "netflix": "Netflix", "spotify": "Spotify", "whatsapp": "WhatsApp", "instagram": "Instagram",
    "tiktok": "TikTok", "youtube": "YouTube", "google": "Google", "iphone": "iPhone", "ipad": "iPad", "gmail": "Gmail",
    "covid": "Covid", "brexit": "Brexit", "eta": "ETA", "gps": "GPS", "usb": "USB", "pdf": "PDF", "pdfs": "PDFs",
    "bbq": "BBQ", "diy": "DIY", "fyi": "FYI", "xmas": "Xmas", "wi-fi": "Wi-Fi", "tesco": "Tesco", "chatgpt": "ChatGPT",
    "fifa": "FIFA", "xbox": "Xbox", "linkedin": "LinkedIn", "pinterest": "Pinterest", "etsy": "Etsy", "adhd": "ADHD",
    "lgbtq": "LGBTQ", "cctv": "CCTV", "dvds": "DVDs",
}  # fmt: skip
# Written in lower case they are words, too, and rare ones.
NAMES = """
august english french german japan china brazil wales york john peter harry henry tony tom jack mike nick bob martin
matt louis smith catholic christian twitter amazon jersey rob dave josh jim ken ron lance carol jean jerry joe jimmy
bobby charlotte alexandria paisley lima panama berlin turin madras polish scotch swiss welsh danish anna benjamin
billy bailey brad charlie carl collins colorado dutch graham jane johnny kelly kent kyle lewis logan maria manhattan
morris murphy nancy nelson oxford perry rick roger ruth shanghai soviet spencer ted terry thanksgiving victor
victoria warren
"""
# Names that SCOWL lacks. Such a one was corrected to a word that looks like it.
MORE_NAMES = """
rebecca connor malik theo zack kylie miley alexa lebron kanye beyonce rihanna abdullah hassan ibrahim mohammed rahman
isla li amir andreas hayley mikey mina sami davey jonny gabe luiz magnus ravi rahul rhys nico nicky dani steph elle
scarlett sofia siobhan niamh aoife ayesha zainab yusuf imran priya anika ananya arjun aisha fatima leila yasmin heathrow
josé müller zoë chloë chloé noël françois andré rené garcía lópez maría raúl beyoncé björn sofía
"""
WRITTEN |= {name: name.capitalize() for name in (NAMES + MORE_NAMES).split()}
OWN = (INFORMAL + ACCENTED + MORE_NAMES).split()
CONSTANTS = FILE.parents[1] / "web" / "data" / "constants.json"


def spelling(folder: Path) -> dict[str, set[str]]:
    """Return {folded word: how it is written} of all lists."""
    found: dict[str, set[str]] = defaultdict(set)
    seldom: dict[str, set[str]] = defaultdict(set)  # written so, of words that mostly are in lower case (Government)
    for path in sorted(folder.glob("*-*.*")):
        name, size = path.name.rsplit(".", 1)
        region, kind = name.split("-", 1)
        if region not in REGIONS or int(size) > SIZES.get(kind, 0):
            continue
        for word in path.read_text("utf-8").split():
            key = fold(word)
            least = ONE_LETTER if len(key) == 1 else TWO_LETTERS.split() if len(key) == 2 and kind != "words" else None
            if not key or not set(key) <= LETTERS or (least is not None and key not in least):
                continue
            if len(key) <= SHORT and int(size) > SHORT_SIZE:
                continue
            (seldom if kind == "upper" and int(size) > SELDOM else found)[key].add(word)
    for key, forms in seldom.items():
        found[key] |= set() if key in found[key] else forms
    return found


def packaged() -> dict[str, set[str]]:
    """Return the same of the words that the file has."""
    known = english()[1]
    return {
        word: {known.forms.get(word, word)} | ({word.capitalize()} if word in known.both else set())
        for word in known.words
    }


def with_own(found: dict[str, set[str]]) -> dict[str, set[str]]:
    """Add our own words."""
    own = {word: found.get(word, set()) | {WRITTEN.get(word, word)} for word in OWN}
    return {**found, **own}


def frequencies(path: Path) -> dict[str, int]:
    """Return {word: hundredths of a power of ten} of wordfreq's list, whose place in it is its frequency."""
    import msgpack

    return {
        word: place
        for place, words in enumerate(msgpack.loads(gzip.decompress(path.read_bytes()))[1:])
        for word in words
    }


def missing(words: set[str]) -> list[str]:
    """Return what the table of contractions makes that is no word: such a one would be corrected to another."""
    made = json.loads(CONSTANTS.read_text("utf-8"))["contractions"].values()
    return sorted(word for text in made for word in text.split() if word not in words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scowl", type=Path, nargs="?", help="the folder of lists")
    parser.add_argument("--packaged", action="store_true", help="take the words of the file that is there")
    parser.add_argument("wordfreq", type=Path, help="large_en.msgpack.gz")
    options = parser.parse_args()
    if options.packaged == (options.scowl is not None):
        parser.error("give either the folder of SCOWL's lists or --packaged")
    lists = with_own(packaged() if options.packaged else spelling(options.scowl))
    counted = frequencies(options.wordfreq)
    rarity = {word: counted.get(word, UNCOUNTED if word in OWN else 999) for word in lists}
    words = tuple(sorted(word for word in lists if rarity[word] <= RAREST))
    forms, both = {}, set()
    for word in words:
        written = lists[word] | ({WRITTEN[word]} if word in WRITTEN else set())
        if word in WRITTEN:
            forms[word] = WRITTEN[word]
        elif word in written:
            both |= {word} if word.capitalize() in written and word.capitalize() != word else set()
        else:  # a name before an abbreviation
            forms[word] = min(written, key=lambda form: (form != word.capitalize(), form))
    lost = missing(set(words))
    if lost:
        parser.error(f"contractions of words that are not there: {', '.join(lost)}")
    frequency = np.array([round(rarity[word] * STEPS / 100) for word in words], np.uint8)
    data = to_bytes(Dictionary(words, frequency, forms, frozenset(both)))
    from_bytes(data, "what was made")
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_bytes(gzip.compress(data, 9, mtime=0))
    english.cache_clear()
    print(f"{FILE}: {len(words):,} words, {FILE.stat().st_size:,} bytes ({len(data):,} unpacked)")


if __name__ == "__main__":
    main()
