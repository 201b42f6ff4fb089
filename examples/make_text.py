"""About a megabyte of English from what every machine with Python has: the documentation strings of its library.

    python examples/make_text.py [FILE] [CHARACTERS]        english.txt and 1,000,000 if not given

Standard library only, in a fixed order, so a machine makes the same text each time. Plain ASCII: some 90 characters.
"""

import ast
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path


def passages() -> Iterator[str]:
    """Documentation strings of at least a sentence, file by file, each once."""
    seen: set[str] = set()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if {"site-packages", "test", "tests"} & set(path.parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old escapes in other people's strings
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = textwrap.dedent(ast.get_docstring(node) or "")
                if len(text.split()) >= 8 and text.isascii() and text not in seen:
                    seen.add(text)
                    yield text


def main(file: str = "english.txt", characters: str = "1000000") -> None:
    limit, parts, length = int(characters), [], 0
    for text in passages():
        if length >= limit:
            break
        parts.append(text.expandtabs(4) + "\n\n")
        length += len(parts[-1])
    Path(file).write_text("".join(parts)[:limit], encoding="ascii")
    print(f"{file}: {min(length, limit):,} characters of {len(parts):,} documentation strings")


if __name__ == "__main__":
    main(*sys.argv[1:])
