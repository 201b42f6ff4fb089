"""Lines are found where tomllib found the keys; what is written is read back unchanged."""

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from unisono.config.toml import key_lines, line_of, toml

scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4), max_leaves=6)
names = st.from_regex(r"[a-z_][a-z0-9_-]{0,8}", fullmatch=True)


@given(values)
def test_what_is_written_is_read_back(value) -> None:
    assert tomllib.loads(f"x = {toml(value)}") == {"x": value}


@given(
    st.lists(
        st.tuples(names, st.dictionaries(names, values, max_size=4)), unique_by=lambda t: t[0], max_size=4
    )
)
def test_every_key_is_found_on_its_line(tables) -> None:
    text: list[str] = []
    expected = {}
    for table, entries in tables:
        text += ["", f"[{table}]  # a [comment]"]
        expected[(table,)] = len(text)
        for name, value in entries.items():
            text.append(f"  {name} = {toml(value)} # x = 1")
            expected[(table, name)] = len(text)
    tomllib.loads("\n".join(text))
    assert key_lines("\n".join(text)) == expected


def test_the_odd_corners_of_toml() -> None:
    text = "\n".join(
        [
            "a.b = 1",  # 1
            '"quoted key" = """',  # 2
            'not = "a key"',
            '"""',
            "list = [",  # 5
            "  1, # ]",
            "  '[',",
            "]",
            "[x.'y.z']",  # 9
            "raw = '''",  # 10
            "[no]",
            "'''",
            'inline = { k = "}" , m = [1] }',  # 13
            "last = 1",  # 14
        ]
    )
    tomllib.loads(text)
    lines = key_lines(text)
    assert lines[("a", "b")] == 1
    assert lines[("quoted key",)] == 2
    assert lines[("list",)] == 5
    assert lines[("x", "y.z", "raw")] == 10
    assert lines[("x", "y.z", "inline")] == 13
    assert lines[("x", "y.z", "last")] == 14
    assert ("not",) not in lines
    assert ("no",) not in lines
    assert line_of(lines, ("x", "y.z", "inline", "k")) == 13
    assert line_of(lines, ("nowhere",)) is None
