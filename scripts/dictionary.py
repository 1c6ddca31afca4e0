"""Make the keyboard's dictionary anew from its two sources; it is seldom needed, the file comes with the package.

    apt-get download scowl && dpkg-deb -x scowl_*.deb scowl
    pip install msgpack && pip download --no-deps wordfreq==3.1.1 && unzip -o wordfreq-3.1.1-*.whl -d wordfreq
    python scripts/dictionary.py scowl/usr/share/dict/scowl wordfreq/wordfreq/data/large_en.msgpack.gz

SCOWL says what is a word: its English, American and British lists up to size 70. Rare short words and initials, which
would only stand in the way of corrections, are left out. To these come the informal words below, our own. wordfreq says
how frequent each is; words rarer than 10^−7 are left out.
"""

from __future__ import annotations

import argparse
import gzip
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
tbh smartphone smartphones
"""
WRITTEN = {
    "airbnb": "Airbnb", "netflix": "Netflix", "spotify": "Spotify", "whatsapp": "WhatsApp", "instagram": "Instagram",
    "tiktok": "TikTok", "youtube": "YouTube", "google": "Google", "iphone": "iPhone", "ipad": "iPad", "gmail": "Gmail",
    "covid": "Covid", "brexit": "Brexit", "eta": "ETA", "gps": "GPS", "usb": "USB", "pdf": "PDF", "pdfs": "PDFs",
    "bbq": "BBQ", "diy": "DIY", "fyi": "FYI", "xmas": "Xmas", "wi-fi": "Wi-Fi",
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
WRITTEN |= {name: name.capitalize() for name in NAMES.split()}


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
    for word in INFORMAL.split():
        found[word].add(WRITTEN.get(word, word))
    return found


def frequencies(path: Path) -> dict[str, int]:
    """Return {word: hundredths of a power of ten} of wordfreq's list, whose place in it is its frequency."""
    import msgpack

    return {
        word: place
        for place, words in enumerate(msgpack.loads(gzip.decompress(path.read_bytes()))[1:])
        for word in words
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scowl", type=Path, help="the folder of lists")
    parser.add_argument("wordfreq", type=Path, help="large_en.msgpack.gz")
    options = parser.parse_args()
    lists, counted = spelling(options.scowl), frequencies(options.wordfreq)
    rarity = {word: counted.get(word, UNCOUNTED if word in INFORMAL.split() else 999) for word in lists}
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
    frequency = np.array([round(rarity[word] * STEPS / 100) for word in words], np.uint8)
    data = to_bytes(Dictionary(words, frequency, forms, frozenset(both)))
    from_bytes(data, "what was made")
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_bytes(gzip.compress(data, 9, mtime=0))
    english.cache_clear()
    print(f"{FILE}: {len(words):,} words, {FILE.stat().st_size:,} bytes ({len(data):,} unpacked)")


if __name__ == "__main__":
    main()
