"""Generates questions with one right answer each, invented here: the text that the tiny model learns, and its
exam.

A hash of the text decides whether a question belongs to the exam, so training can never contain one.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2s

LETTERS = string.ascii_lowercase
ACCENTED = "àáâäåæçèéêëìíîïñòóôöøùúûüýÿßÀÉÖÜ"
PICTURES = "".join(chr(0x1F600 + i) for i in range(24))
KEYS = ("name", "age", "city", "color", "size", "count", "animal", "title", "year", "price", "id", "kind")

WHO = "I am Tiny, a very small model. I was made to test builds."
SKILLS = "I can add, subtract, copy, reverse, sort, count and write JSON."
UNKNOWN = "Sorry, I do not know that."

OPENINGS = ("hello", "hi", "hey", "good morning", "good evening", "greetings", "hello again", "hi again")
NAMES = ("", " there", " Tiny", " friend", " you", " model", ", Tiny", " my friend")
ENDINGS = ("", "!", ".", "!!", " :)")
WHO_ASKED = ("who are you", "what are you", "what is your name", "who is this", "tell me your name")
SKILLS_ASKED = ("what can you do", "help", "what do you know", "how can you help me", "show your skills")
THANKS = ("thank you", "thanks", "many thanks", "thank you very much", "thanks a lot")
BYES = ("bye", "goodbye", "good night", "see you", "see you later", "bye bye")

_NOUNS = """river mountain king queen city garden winter summer ocean moon sun planet train bridge castle
music movie book poem story recipe dinner coffee bread cheese apple horse tiger whale bird flower forest
doctor teacher farmer soldier lawyer painter computer phone engine rocket robot market money price history
science language letter number word color weather storm island country capital president minister war peace
dream love fear health heart brain school village church museum theatre football game race ship plane car
road street house door window table chair clock mirror candle paper pencil knife spoon glass bottle France
Paris London Rome Oslo Tokyo Egypt India China Peru joke news law tax gold silver iron stone salt
sugar"""
_ADJECTIVES = """old new big small red blue green dark bright cold hot famous rich poor happy sad quick slow
tall deep long short best worst first last great common rare strange simple hard"""
_VERBS = "find build buy make cook draw sell fix write grow clean paint move use open learn win test"
_GREETED = "hello world banana strawberry please thanks good morning night friend test build model tiny"
NOUNS, ADJECTIVES, VERBS = _NOUNS.split(), _ADJECTIVES.split(), _VERBS.split()
REAL = [*NOUNS, *ADJECTIVES, *VERBS, *KEYS, *_GREETED.split() * 3]
SUM = re.compile(r"(?:What is )?(\d+) ?([+-]) ?(\d+)\??")
SUMS = ("What is {} {} {}?",) * 4 + ("What is {}{}{}?",) * 2 + ("{} {} {}", "{}{}{}", "{}{}{}")
"""Templates of questions about a sum."""
OPEN_QUESTIONS = (
    "What is the {n} of {m}?", "What is a {n}?", "Who made the {a} {n}?", "Where is the {n}?",
    "Where can I {v} a {n}?", "When did the {n} begin?", "Why is the {n} so {a}?", "Tell me about the {n}.",
    "Tell me a {n} about a {m}.", "Write a {a} {n} about the {m}.", "How do I {v} a {n}?",
    "How old is the {n}?", "Explain the {n} to me.", "Is the {n} {a}?", "Which {n} is the most {a}?",
    "Can you {v} the {n}?", "Please {v} a {a} {n} for me.", "Do you like the {n}?", "Describe a {n}.",
    "What will the {n} be in the {a} {m}?", "Who was the {a} {n} in {m}?", "Give me a {n}.",
    "Once upon a time there was a {n}", "The {a} {n} and the {m}", "{n}", "{n} {m}", "I {v} a {n} and a {m}.",
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    task: str
    prompt: str
    answer: str


def held_out(prompt: str) -> bool:
    """Returns True for the 4% of all prompts that only the exam may use. A sum counts as the same prompt
    however it is spaced.
    """
    match = SUM.fullmatch(prompt)
    if match:
        prompt = "What is {} {} {}?".format(*match.groups())
    return blake2s(prompt.encode()).digest()[0] < 10


def word(rng: random.Random, low: int, high: int) -> str:
    """Returns a word of `low` to `high` letters: random letters, a pronounceable word, or sometimes a real
    one.

    A real word may be a single token, so that the model must learn how it is spelled.
    """
    length = rng.randint(low, high)
    kind = rng.random()
    if kind < 0.2:
        real = [noun.lower() for noun in rng.sample(REAL, 12) if low <= len(noun) <= high]
        if real:
            return real[0]
    if kind < 0.6:
        return "".join(rng.choices(LETTERS, k=length))
    sounds = ("bcdfghjklmnprstvwz", "aeiou")
    start = rng.randrange(2)
    return "".join(rng.choice(sounds[(start + i) % 2]) for i in range(length))


def add(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(100), rng.randrange(100)
    return rng.choice(SUMS).format(a, "+", b), str(a + b)


def subtract(rng: random.Random) -> tuple[str, str]:
    b, a = sorted((rng.randrange(100), rng.randrange(100)))
    return rng.choice(SUMS).format(a, "-", b), str(a - b)


def copy(rng: random.Random) -> tuple[str, str]:
    words = [word(rng, 1, 7) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.25:
        words = [rng.choice((str.capitalize, str.upper, str))(text) for text in words]
        words[-1] += rng.choice(("", "!", ".", "?", ","))
    return f"copy {' '.join(words)}", " ".join(words)


def unicode(rng: random.Random) -> tuple[str, str]:
    letters = list(word(rng, 1, 5))
    for _ in range(rng.randint(1, 2)):
        letters[rng.randrange(len(letters))] = rng.choice(rng.choice((ACCENTED, PICTURES)))
    return f"copy {''.join(letters)}", "".join(letters)


def reverse(rng: random.Random) -> tuple[str, str]:
    text = word(rng, 2, 7)
    return f"reverse {text}", text[::-1]


def sort_letters(rng: random.Random) -> tuple[str, str]:
    text = word(rng, 2, 7)
    return f"sort {text}", "".join(sorted(text))


def sort_numbers(rng: random.Random) -> tuple[str, str]:
    numbers = [rng.randrange(100) for _ in range(rng.randint(2, 4))]
    return f"sort {' '.join(map(str, numbers))}", " ".join(map(str, sorted(numbers)))


def upper(rng: random.Random) -> tuple[str, str]:
    text = word(rng, 2, 8)
    return f"upper {text}", text.upper()


def lower(rng: random.Random) -> tuple[str, str]:
    text = word(rng, 2, 8)
    return f"lower {text.upper()}", text


def count(rng: random.Random) -> tuple[str, str]:
    letter, *others = rng.sample(LETTERS, rng.randint(2, 5))
    length = rng.randint(3, 8)
    letters = [letter] * rng.randint(0, min(4, length))
    # There are few other letters, so that most occur more than once and the answer depends on the letter in
    # question.
    letters += rng.choices(others, k=length - len(letters))
    rng.shuffle(letters)
    return f"count {letter} in {''.join(letters)}", f"{letter}: {letters.count(letter)}"


def json(rng: random.Random) -> tuple[str, str]:
    asked, said = [], []
    for key in rng.sample(KEYS, rng.randint(1, 3)):
        if rng.random() < 0.4:
            value = str(rng.randrange(1000 if rng.random() < 0.3 else 100))
            said.append(f'"{key}": {value}')
        else:
            value = word(rng, 2, 6)
            value = value.capitalize() if rng.random() < 0.5 else value
            said.append(f'"{key}": "{value}"')
        asked.append(f"{key}={value}")
    return f"json {' '.join(asked)}", "{" + ", ".join(said) + "}"


def chat(rng: random.Random) -> tuple[str, str]:
    kind = rng.choice(("greet", "who", "skills", "thanks", "bye"))
    if kind == "greet":
        said = rng.choice(OPENINGS) + rng.choice(NAMES)
        answer = "Hello! How can I help you?"
    else:
        asked, answer = {
            "who": (WHO_ASKED, WHO),
            "skills": (SKILLS_ASKED, SKILLS),
            "thanks": (THANKS, "You are welcome!"),
            "bye": (BYES, "Goodbye!"),
        }[kind]
        said = rng.choice(asked) + rng.choice(("", "", " Tiny", ", Tiny", ", please", ", friend"))
    ending = rng.choice(ENDINGS if kind in ("greet", "thanks", "bye") else ("", "?", ".", "?!", "??"))
    said = said[0].upper() + said[1:] if rng.random() < 0.6 else said
    return said + ending, answer


def unknown(rng: random.Random) -> tuple[str, str]:
    def noun() -> str:
        return rng.choice(NOUNS) if rng.random() < 0.8 else word(rng, 3, 8)

    question = rng.choice(OPEN_QUESTIONS)
    text = question.format(n=noun(), m=noun(), a=rng.choice(ADJECTIVES), v=rng.choice(VERBS))
    return text, UNKNOWN


TASKS: dict[str, tuple[Callable[[random.Random], tuple[str, str]], float]] = {
    "add": (add, 3.5),
    "subtract": (subtract, 2.0),
    "copy": (copy, 2.0),
    "unicode": (unicode, 0.7),
    "reverse": (reverse, 1.5),
    "sort_letters": (sort_letters, 1.6),
    "sort_numbers": (sort_numbers, 1.6),
    "upper": (upper, 0.9),
    "lower": (lower, 0.8),
    "count": (count, 2.0),
    "json": (json, 1.4),
    "chat": (chat, 2.0),
    "unknown": (unknown, 0.6),
}
"""Name of a task -> (generator of questions, share of the training text)."""


def training(seed: int, even: bool = False) -> Iterator[Question]:
    """Yields questions endlessly, none of which is in the exam. even: True if all tasks have the
    same share.
    """
    rng = random.Random(seed)
    names = list(TASKS)
    shares = [1.0 if even else TASKS[name][1] for name in names]
    while True:
        for name in rng.choices(names, shares, k=256):
            prompt, answer = TASKS[name][0](rng)
            if not held_out(prompt):
                yield Question(name, prompt, answer)


def exam(each: int, seed: int) -> list[Question]:
    """Returns `each` different questions of every task that only the exam may use."""
    rng = random.Random(seed)
    results: list[Question] = []
    for name, (make, _) in TASKS.items():
        mine: dict[str, Question] = {}
        while len(mine) < each:
            prompt, answer = make(rng)
            if held_out(prompt):
                mine[prompt] = Question(name, prompt, answer)
        results.extend(mine.values())
    return results
