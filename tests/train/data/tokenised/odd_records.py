"""Odd records, each as a line of a file or a row of a table, and what becomes of it: a document, or the reason why not."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.train.data.chats import chat
from unisono.train.data.tokenised.order import JSONL, Part, TokenOrder
from unisono.train.data.tokenised.worker import Maker

GOOD = b'{"text": "good"}\n'


@dataclass(frozen=True)
class Odd:
    """One record between two good ones. says: a part of why it is bad; "" if it is a document. told: parts of the
    remarks about it; none where there is none."""

    name: str
    line: bytes
    says: str = ""
    told: tuple[str, ...] = ()
    document: bytes | None = None


def odd(name: str, record: object, says: str = "", *told: str, document: str | None = None) -> Odd:
    line = record if isinstance(record, bytes) else json.dumps(record).encode()
    return Odd(name, line, says, told, None if document is None else document.encode())


def turn(role: str, **more: object) -> Mapping[str, object]:
    return {"role": role, "content": "w", **more}


ODD = [
    odd("half an emoji", {"text": "cut \ud83d here"}, "half a letter, '\\ud83d'"),
    odd("the other half", {"text": "cut \ude00 here"}, "half a letter"),
    odd("both halves", {"text": "\ud83d\ude00"}, document="😀"),
    odd("half an emoji in a chat", chat("\udc00", "a"), "half a letter"),
    odd("half an emoji that is not read", {"text": "a", "x": "\ud83d"}, "", "key x is not read", document="a"),
    odd("200,000 brackets", b"[" * 200_000, "nested too deeply"),
    odd("200,000 objects", b'{"a":' * 200_000, "nested too deeply"),
    odd("100,000 brackets under a key", b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too deeply"),
    odd("5,000 digits", b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "no JSON"),
    odd("1e999 that is not read", b'{"text": "a", "n": 1e999}', "", "key n is not read", document="a"),
    odd("1e999 as text", b'{"text": 1e999}', "text (a number)"),
    odd("NaN as text", b'{"text": NaN}', "text (a number)"),
    odd("Infinity as text", b'{"text": -Infinity}', "text (a number)"),
    odd("NaN that is not read", b'{"text": "a", "score": NaN}', "", "key score is not read", document="a"),
    odd("NaN as messages", b'{"messages": NaN}', "no list"),
    odd("a key twice", b'{"text": "a", "text": "b"}', "the key 'text' is given twice"),
    odd("a key twice inside", b'{"messages": [{"role": "user", "role": "assistant", "content": "a"}]}', "'role' is given twice"),
    odd("a text alone", "text", "a text, where an object with keys is wanted"),
    odd("a number alone", 3, "a number, where"),
    odd("null", None, "null, where"),
    odd("true", True, "true or false, where"),
    odd("a list", [{"text": "a"}], "a list, where"),
    odd("an object of nothing", {}, "its keys: none"),
    odd("null as text", {"text": None}, "text (null)"),
    odd("a list as text", {"text": ["a"]}, "text (a list)"),
    odd("a prompt without completion", {"prompt": "a"}, "prompt (a text)"),
    odd("a prompt with a list", {"prompt": "a", "completion": ["b"]}, "completion (a list)"),
    odd("messages as a text", {"messages": "[]"}, "no list"),
    odd("messages of texts", {"messages": ["a"]}, "message 1 is no object"),
    odd("a role that is a number", {"messages": [{"role": 1, "content": "a"}]}, "message 1 has no role"),
    odd("content of parts", {"messages": [turn("user", content=[{"type": "text"}])]}, "message 1 is no text"),
    odd("no answer", {"messages": [turn("user")]}, "nothing to learn"),
    odd("a line cut off", b'{"text": "go', "no JSON"),
    odd("two objects in a line", b'{"text": "a"}{"text": "b"}', "Extra data"),
    odd("single quotes", b"{'text': 'a'}", "no JSON"),
    odd("a comma too many", b'{"text": "a",}', "no JSON"),
    odd("no UTF-8", b'{"text": "gr\xfc\xdfe"}', "no UTF-8: byte 0xfc at 13"),
    odd("UTF-8 of a surrogate", b'{"text": "\xed\xa0\xbd"}', "no UTF-8"),
    odd("a zero byte", b'{"text": "a\0b"}', "it holds zero bytes"),
    odd("a hole of zero bytes", b"\0" * 4096, "it holds zero bytes"),
    odd("an escaped zero", b'{"text": "a\\u0000b"}', "ends a document"),
    odd("gzip", b"\x1f\x8b\x08\0\0\0\0\0\0\x03\xab\x56", "compressed by gzip"),
    odd("zstd", b"\x28\xb5\x2f\xfd\x04\x58\xff\xff", "compressed by zstd"),
    odd("UTF-16", '{"text": "a"}'.encode("utf-16"), "it is UTF-16"),
    odd("a picture", b"\x89PNG\r", "no UTF-8"),
    odd("a mark of UTF-8", b'\xef\xbb\xbf{"text": "a"}', document="a"),
    odd("an empty text", {"text": ""}, "", "an empty text is no document"),
    odd("a key beside", {"text": "a", "url": "u"}, "", "key url is not read", document="a"),
    odd("empty keys beside", {"text": "a", "url": "", "meta": None, "tags": []}, document="a"),
    odd("a text beside a chat", chat("q", "a") | {"text": "t"}, "", "key text is not read"),
    odd("pictures of a chat", chat("q", "a") | {"images": ["a.png"]}, "", "key images is not read"),
    odd("tools without a template", chat("q", "a") | {"tools": [{"name": "f"}]}, "", "key tools is not read"),
    odd("tools as JSON", chat("q", "a") | {"tools": '[{"name": "f"}]'}, "", "key tools is not read"),
    odd("tools that are no list", chat("q", "a") | {"tools": {"name": "f"}}, "its tools are no list"),
    odd("tools that are no JSON", chat("q", "a") | {"tools": "[" * 100_000}, "its tools are no JSON"),
    odd("a name", {"messages": [turn("user", name="Bo"), turn("assistant")]}, "", "key name of messages is not read"),
    odd(
        "calls of tools",
        {"messages": [turn("user"), {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]},
        "",
        "key tool_calls of messages is not read",
    ),
    odd("calls of none", {"messages": [turn("user"), turn("assistant", tool_calls=[])]}),
    odd("a user's weight", {"messages": [turn("user", weight=1), turn("assistant")]}, "", "key weight of messages"),
    odd("a weight of a half", {"messages": [turn("assistant", weight=0.5)]}, "weight of message 1 is 0.5"),
    odd("a weight in words", {"messages": [turn("assistant", weight="1")]}, "weight of message 1 is '1'"),
    odd("weights of 0 alone", {"messages": [turn("assistant", weight=0)]}, "have the weight 0"),
]  # fmt: skip


def made(folder: Path, body: bytes, *, skip_bad: bool, tokenizer: str = "byte") -> dict[str, object]:
    """What a worker says of a file of these bytes, as it would from its own process; documents: of each its bytes."""
    file = folder / "a.jsonl"
    file.write_bytes(body)
    maker = Maker(TokenOrder(JSONL, tokenizer, skip_bad=skip_bad), open("/dev/null", "w"))  # noqa: SIM115
    answer = maker.make(Part(str(file), 0, len(body), len(body)), str(folder / "out"))
    if tokenizer == "byte":
        tokens = (folder / "out.tokens").read_bytes()
        assert tokens.count(b"\0") == answer["documents"]
        answer["texts"] = tokens.split(b"\0")[:-1]
    return answer


def observed(one: Odd, folder: Path) -> tuple[str, list[str]]:
    """(what is said of a record, all that is not as it should be), with and without skip_bad."""
    line = b"".join((GOOD, one.line, b"\n", GOOD))
    without, skipped = (made(folder, line, skip_bad=skip) for skip in (False, True))
    bad, texts = without["bad"], skipped["texts"]
    assert isinstance(bad, list) and isinstance(texts, list) and isinstance(without["told"], dict)
    said = bad[0][1] if bad else "; ".join(without["told"]) or "a document"
    own = texts[1:-1]
    checks = {
        f"says {said}": bool(bad) == bool(one.says) and one.says in said,
        f"names another place: {bad}": not bad or bad[0][0] == len(GOOD),
        f"skip_bad leaves {skipped['left_out']} out": skipped["left_out"] == bool(one.says),
        f"the good records beside it: {texts}": texts[0] == texts[-1] == b"good",
        f"is made to {own}": one.document is None or own == [one.document],
        f"remarks {without['told']}": bad
        or (len(without["told"]) == len(one.told) and all(part in said for part in one.told)),
        f"remarks name another place: {without['told']}": all(
            told == [1, len(GOOD)] for told in without["told"].values()
        ),
        f"pieces of it are no words: {said[:80]!r}": not re.search(r"Error\b|Traceback", said),
    }
    return said, [words for words, good in checks.items() if not good]
