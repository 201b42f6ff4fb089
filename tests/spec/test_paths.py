"""A path that is there is taken as it is; only what is not there is a pattern, a home or a path with options."""

import os
from pathlib import Path

import pytest

from unisono.spec.paths import at_home, bytes_of, file_and_name, foreign, matching, names_something, parted


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (
        "~me",
        "a*.txt",
        "ab.txt",
        "d[1]/x.txt",
        "d1/y.txt",
        "c,text=d.jsonl",
        "x.py:y/m.py",
        "m.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/of/me")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "home"),
    [
        ("~me", "~me"),
        ("~/x", "/home/of/me/x"),
        ("~nobody-is-called-so/x", "~nobody-is-called-so/x"),
        ("a~b", "a~b"),
    ],
)
def test_a_home_is_meant_where_nothing_is_called_so(place: Path, path: str, home: str) -> None:
    assert at_home(path) == Path(home)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("a*.txt", ["a*.txt"]),
        ("a?.txt", ["a*.txt", "ab.txt"]),
        ("d[1]/*.txt", ["d[1]/x.txt"]),
        ("d[12]/*.txt", ["d1/y.txt"]),
        ("**/?.txt", ["d1/y.txt", "d[1]/x.txt"]),
        ("none", []),
        ("none*", []),
        ("a\0*", []),
    ],
)
def test_a_pattern_means_files_that_are_not_called_so(place: Path, path: str, found: list[str]) -> None:
    assert matching(path) == found and names_something(path) == bool(found)
    assert matching(str(place / path)) == sorted(str(place / name) for name in found)


@pytest.mark.parametrize(
    ("text", "path", "options"),
    [
        ("c,text=d.jsonl", "c,text=d.jsonl", ""),
        ("c,text=d.jsonl,text=x", "c,text=d.jsonl", "text=x"),
        ("a?.txt:text=x", "a?.txt", "text=x"),
        ("m.py,txet=x", "m.py", "txet=x"),  # so that the misspelt option is told
        ("none,text=x", "none", "text=x"),
        ("no, ne:x", "no, ne:x", ""),
        (",text=x", "", "text=x"),
    ],
)
def test_options_stand_behind_what_is_there(place: Path, text: str, path: str, options: str) -> None:
    assert parted(text, ("text",)) == (path, options)


@pytest.mark.parametrize(
    ("text", "apart"),
    [
        ("m.py:f", ("m.py", "f")),
        ("x.py:y/m.py:f:a=1", ("x.py:y/m.py", "f:a=1")),
        ("no.py:y/m.py:f", ("no.py", "y/m.py:f")),
        ("m.txt:f", None),
    ],
)
def test_a_file_of_python_and_a_name_in_it(place: Path, text: str, apart: tuple[str, str] | None) -> None:
    assert file_and_name(text) == apart


def test_bytes_that_are_no_utf8_are_foreign() -> None:
    assert foreign(os.fsdecode(b"gr\xfc")) and not foreign("gr\xfc") and not foreign("模型 😀")


def test_the_bytes_of_a_word_are_those_that_came() -> None:
    assert bytes_of("a\udcff") == b"a\xff"
    assert bytes_of("\ud800") == b"\xed\xa0\x80"
