"""How docstrings are shown on the site: `name: meaning.` in the middle of a paragraph becomes an entry of a list.

A griffe extension, named in mkdocs.yml. In a function the names are those of its parameters, so other colons stay.
"""

import re
from typing import Any

import griffe

_NAMED = re.compile(r"(?:^|(?<=\. ))([a-z_]\w*(?:, [a-z_]\w*)*): ")


class FieldLists(griffe.Extension):
    """Rewrites the docstrings of functions and classes."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        self._rewrite(func, {parameter.name for parameter in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        self._rewrite(cls, None)  # some attributes are of a base class, or set in a method

    def _rewrite(self, documented: griffe.Object, names: set[str] | None) -> None:
        if documented.docstring is not None:
            paragraphs = documented.docstring.value.split("\n\n")
            documented.docstring.value = "\n\n".join(listed(text, names) for text in paragraphs)


def listed(paragraph: str, names: set[str] | None) -> str:
    """The paragraph with a list of its `name: meaning`. names: those that count, None for all."""
    if paragraph.startswith(("    ", "- ")):
        return paragraph
    text = " ".join(paragraph.split())
    matches = [m for m in _NAMED.finditer(text) if names is None or names.issuperset(m[1].split(", "))]
    if not matches:
        return paragraph
    ends = [match.start() for match in matches[1:]] + [len(text)]
    entries = [
        f"- `{match[1].replace(', ', '`, `')}`: {text[match.end() : end].strip()}"
        for match, end in zip(matches, ends, strict=True)
    ]
    before = text[: matches[0].start()].strip()
    return "\n\n".join(filter(None, (before, "\n".join(entries))))
