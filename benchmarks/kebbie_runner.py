"""What runs in kebbie's own environment (`kebbie_bench.py` starts it): kebbie, with a corrector that asks a pipe.

    python kebbie_runner.py REQUESTS ANSWERS SENTENCES RESULT

REQUESTS and ANSWERS are numbers of open pipes: one JSON object a line goes out for every question, one JSON list comes
back. SENTENCES is a JSON file with a list, RESULT the file to write. kebbie's table of frequent typos must lie in its
cache already, so that it fetches nothing.
"""

import json
import os
import sys

from kebbie import Corrector, evaluate
from kebbie.layout import LayoutHelper


class Pipe(Corrector):
    """A corrector that knows two numbers of pipes; kebbie sends it to the process that types."""

    def __init__(self, requests: int, answers: int) -> None:
        self.requests, self.answers = requests, answers

    def ask(self, task: str, context: str, points: list, word: str = "") -> list[str]:
        """Send a question and return the words that come back."""
        places = [None if point is None else [float(point[0]), float(point[1])] for point in points]
        question = {"task": task, "context": context, "points": places, "word": word}
        os.write(self.requests, json.dumps(question).encode() + b"\n")
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(self.answers, 1 << 16)
        return json.loads(line)

    def auto_correct(self, context, keystrokes, word):
        return self.ask("correct", context, keystrokes, word)

    def auto_complete(self, context, keystrokes, partial_word):
        return self.ask("complete", context, keystrokes, partial_word)

    def resolve_swipe(self, context, swipe_gesture):
        return self.ask("swipe", context, swipe_gesture)

    def predict_next_word(self, context):
        return self.ask("next", context, [])


def main() -> None:
    requests, answers = map(int, sys.argv[1:3])
    with open(sys.argv[3], encoding="utf-8") as file:
        sentences = json.load(file)
    keys = LayoutHelper("en-US").keys_info
    pipe = Pipe(requests, answers)
    centres = [[letter, *map(float, keys[letter].center)] for letter in "abcdefghijklmnopqrstuvwxyz"]
    pipe.ask("layout", "", [centre[1:] for centre in centres], "".join(centre[0] for centre in centres))
    found = evaluate(pipe, dataset={"held-out": sentences}, n_proc=1)
    with open(sys.argv[4], "w", encoding="utf-8") as file:
        json.dump(found, file, default=str)


if __name__ == "__main__":
    main()
