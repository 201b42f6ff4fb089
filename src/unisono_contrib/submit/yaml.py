"""Manifests as YAML, of mappings, lists, texts and numbers: all that a manifest has. No torch."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_/$][\w./$-]*( [\w./$-]+)*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "nan", "inf"}
_INDENT = "  "


def as_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """The documents, one behind the other, for kubectl and for people."""
    return "---\n".join("\n".join(_mapping(document, "")) + "\n" for document in documents)


def _mapping(value: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, inner in value.items():
        yield from _entry(f"{indent}{_text(key)}:", inner, indent)


def _entry(head: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        yield head
        yield from _mapping(value, indent + _INDENT)
    elif isinstance(value, (list, tuple)) and value:
        yield head
        for item in value:
            yield from _item(item, indent)
    elif isinstance(value, str) and value.endswith("\n") and _is_block(value):
        yield f"{head} |"
        yield from (f"{indent}{_INDENT}{line}" if line else "" for line in value[:-1].split("\n"))
    else:
        yield f"{head} {_scalar(value)}"


def _item(value: Any, indent: str) -> Iterator[str]:
    if not isinstance(value, Mapping) or not value:
        yield f"{indent}- {_scalar(value)}"
        return
    lines = _mapping(value, indent + _INDENT)
    yield f"{indent}- {next(lines)[len(indent) + len(_INDENT) :]}"
    yield from lines


def _is_block(text: str) -> bool:
    """Whether a block shows the text as it is: it begins with a letter or sign, ends with one line's end, and has only
    characters that print."""
    return not text.startswith((" ", "\n")) and not text.endswith("\n\n") and all(
        line.isprintable() and line == line.rstrip() for line in text[:-1].split("\n")
    )  # fmt: skip


def _scalar(value: Any) -> str:
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(text, ensure_ascii=False))
