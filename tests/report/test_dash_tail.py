"""Files that grow are read once, to the last whole line; of what comes too fast only some steps, and never other ones."""

import json
import os
from pathlib import Path

import pytest

from unisono_contrib.report.dash import tail
from unisono_contrib.report.dash.tail import LineTail, RankTail


def line(step: int, **more: object) -> str:
    return json.dumps({"kind": "step", "step": step, "rank": 0, **more}, separators=(",", ":")) + "\n"


def steps(records: list[dict]) -> list[int]:
    return [record["step"] for record in records]


def test_each_byte_is_read_once_and_half_a_line_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "rank0.jsonl", []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: seen.append(at) or real(fd, n, at))
    path.write_text(line(1) + line(2) + '{"kind":"st')
    reader = LineTail(str(path))
    assert steps(reader.records()) == [1, 2]
    with path.open("a") as file:
        file.write('ep","step":3}\n')
    assert steps(reader.records()) == [3]
    assert reader.records() == [] and seen == [0, len(line(1) + line(2))]


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text("".join(map(line, range(1, 9))))
    reader = RankTail(0, LineTail(str(path)))
    assert steps(reader.read(1)) == [*range(1, 9)]
    aside = tmp_path / "aside"
    aside.write_text("".join(map(line, range(1, 4))))
    os.replace(aside, path)
    assert steps(reader.read(1)) == [1, 2, 3]


@pytest.mark.parametrize("text", ["", "\n\n", "no JSON\n", "[1]\n", "\xff\n"])
def test_damaged_lines_are_left_out(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_bytes(line(1).encode() + text.encode("latin-1") + line(2).encode())
    assert steps(LineTail(str(path)).records()) == [1, 2]


def test_of_many_steps_those_are_read_that_a_number_divides(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    info = '{"kind":"info","rank":0,"host":"a"}\n'
    path.write_text(info + "".join(map(line, range(1, 101))))
    reader = RankTail(0, LineTail(str(path)))
    first, *others = reader.read(16)
    assert first["kind"] == "info" and steps(others) == [16, 32, 48, 64, 80, 96]
    with path.open("a") as file:
        file.write("".join(map(line, range(101, 130))))
    assert steps(reader.read(16)) == [112, 128]


@pytest.mark.parametrize("every", [1, 8, 64])
def test_single_steps_are_read_where_the_index_says(tmp_path: Path, every: int) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text("".join(line(step, mark=step * step) for step in range(1, 1001)))
    reader = RankTail(0, LineTail(str(path)))
    reader.read(every)
    for step in (1, 63, 64, 65, 500, 1000):
        assert [record["mark"] for record in reader.between(step, step)] == [step * step]
    assert steps(reader.between(130, 260)) == [*range(130, 261)]


def test_a_step_that_is_done_again_counts_as_it_was_last(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    again = "".join(line(step, mark="second") for step in range(100, 301))
    path.write_text("".join(line(step, mark="first") for step in range(1, 201)) + again)
    reader = RankTail(0, LineTail(str(path)))
    reader.read(1)
    assert [record["mark"] for record in reader.between(150, 150)] == ["second"]
    assert [record["mark"] for record in reader.between(70, 70)] == ["first"]


def test_the_end_is_there_before_the_past(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text("".join(map(line, range(1, 10_001))))
    newest = RankTail(0, LineTail(str(path))).newest()
    assert steps(newest)[-1] == 10_000 and len(newest) < 1000


def test_what_is_not_there_reads_as_nothing(tmp_path: Path) -> None:
    assert tail.read_at(tmp_path / "none", 0) == (b"", 0, 0)
    assert LineTail(str(tmp_path / "none")).records() == []
