"""What makes hostile inputs out of good ones: texts with pieces cut, doubled and put in, and trees of other values."""

import random
import struct
from collections.abc import Callable, Sequence

ESCAPES = "\x1b[2J\x1b]0;owned\x07"
LETTERS = (
    "\0", "\x7f", "\x1b", ESCAPES, "\u202e", "\u200b", "\u2028", "\ufeff", "\ud800", "é", "ß", "İ", "ﬁ", "\U0001f600", "a\u0301", "ａ",
)  # fmt: skip
NUMBERS = (
    "0", "-0", "-1", "00", "1", "2", "3", "٣", "²", "½", "Ⅷ", "𝟜", "۱۲", "1_000", "0x10", "1e3", "1e999", "-1e999", "nan", "inf", "-inf",
    "2147483648", "9223372036854775808", "18446744073709551616", "9" * 25, "9" * 5000, "1" + "0" * 400, "0.1", ".5", "1.", "1e-400",
)  # fmt: skip
PATHS = ("../" * 20 + "etc/passwd", "/dev/zero", "/dev/stdin", "/proc/self/mem", "/", "~", "~root", ".", "..", "a" * 300, "a/" * 3000, "canary.py",
         "file:///etc/passwd", "pipe")  # fmt: skip
PAYLOADS = (
    "$(touch canary)", "`touch canary`", "; touch canary", "__import__('os').system('touch canary')", "{0.__class__}", "%s%n%s", "${x}",
    "{{7*7}}", "<script>alert(1)</script>", "' OR 1=1 --", "!!python/object/apply:os.system ['touch canary']",
)  # fmt: skip
SIGNS = (":", "=", ",", ";", "+", "-", ".", "/", " ", "\n", "\r", "\t", "#", "'", '"', '"""', "\\", "[", "]", "{", "}", "(", "*", "?", "|", "&",
         "==", "::", "++", "=,", ":=", "+ef", "+ef+ef", ".py:Own")  # fmt: skip
JUNK = (*LETTERS, *NUMBERS, *PATHS, *PAYLOADS, *SIGNS)
LONG = 120_000  # letters: about what one word of a command line may have


def mutated(text: str, order: random.Random, junk: Sequence[str] = JUNK) -> str:
    """A text after some changes, one of a hundred much longer than any that is meant."""
    for _ in range(order.choice((1, 1, 1, 2, 2, 3, 5))):
        text = order.choice(_WAYS)(text, order, junk)
    return text[:LONG]


def random_text(order: random.Random, most: int = 60) -> str:
    """Letters of all planes, or bytes as a shell would hand them on."""
    if order.random() < 0.3:
        return order.randbytes(order.randint(0, most)).decode(errors="surrogateescape")
    top = order.choice((0x7F, 0xFF, 0xFFFF, 0x10FFFF))
    return "".join(chr(order.randint(0, top)) for _ in range(order.randint(0, most)))


def _cut(text: str, order: random.Random, junk: Sequence[str]) -> str:
    a, b = sorted((order.randint(0, len(text)), order.randint(0, len(text))))
    return text[:a] + text[min(b, a + 12) :]


def _doubled(text: str, order: random.Random, junk: Sequence[str]) -> str:
    a, b = sorted((order.randint(0, len(text)), order.randint(0, len(text))))
    return text[:b] + text[a:b] * order.choice((1, 1, 2, 40)) + text[b:]


def _put_in(text: str, order: random.Random, junk: Sequence[str]) -> str:
    at = order.randint(0, len(text))
    return text[:at] + order.choice(junk) + text[at:]


def _number(text: str, order: random.Random, junk: Sequence[str]) -> str:
    """Another number in the place of one."""
    places = [i for i, c in enumerate(text) if c.isdigit() and not text[i - 1 : i].isdigit()]
    if not places:
        return _put_in(text, order, junk)
    at = stop = order.choice(places)
    while text[stop : stop + 1].isdigit():
        stop += 1
    return text[:at] + order.choice(NUMBERS) + text[stop:]


def _letter(text: str, order: random.Random, junk: Sequence[str]) -> str:
    at = order.randint(0, len(text))
    return text[:at] + chr(order.choice((order.randint(32, 126), order.randint(0, 0xD7FF)))) + text[at + 1 :]


def _swapped(text: str, order: random.Random, junk: Sequence[str]) -> str:
    words = text.split(" ")
    order.shuffle(words)
    return " ".join(words)


def _longer(text: str, order: random.Random, junk: Sequence[str]) -> str:
    """One of twenty goes to the end of what there is room for."""
    if order.random() < 0.95:
        return _put_in(text, order, junk)
    piece = order.choice((*junk, text, "+a", "a=", "a:", ",", "a.", "[", "{a=", "a/", "1-2:", "(" * 50))
    at = order.randint(0, len(text))
    return text[:at] + piece * (order.choice((300, 5000, LONG)) // max(1, len(piece))) + text[at:]


_WAYS: tuple[Callable[[str, random.Random, Sequence[str]], str], ...] = (
    _cut, _doubled, _put_in, _put_in, _number, _number, _letter, _swapped, _longer,
)  # fmt: skip


def bytes_changed(data: bytes, order: random.Random) -> bytes:
    """Bytes after some changes."""
    changed = bytearray(data)
    for _ in range(order.choice((1, 1, 2, 8))):
        at = order.randrange(len(changed) + 1)
        match order.randrange(4):
            case 0:
                changed[at : at + 1] = bytes([order.randrange(256)])
            case 1:
                del changed[at : at + order.randint(1, 30)]
            case 2:
                changed[at:at] = order.randbytes(order.randint(1, 30))
            case _:
                changed[at : at + 8] = order.choice(
                    (b"\xff" * 8, b"\0" * 8, struct.pack("<q", order.choice((1 << 40, -1, 1 << 62))))
                )
    return bytes(changed)
