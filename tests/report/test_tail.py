"""The ends of files that are still being written."""

import json
from pathlib import Path

from tests.report.late import lines, nobody
from unisono.report.tail import WINDOW, RunTail


def write(folder: Path, rank: int, text: str, mode: str = "a") -> None:
    (folder / "events").mkdir(exist_ok=True)
    with (folder / f"events/rank{rank}.jsonl").open(mode) as file:
        file.write(text)


def info(rank: int) -> str:
    return json.dumps({"kind": "info", "rank": rank, "coords": {"dp": rank}}) + "\n"


def test_each_look_takes_what_is_new_and_whole(tmp_path: Path) -> None:
    tail, written = RunTail(tmp_path), lines(nobody, ranks=2, steps=8)
    assert tail.look() == []
    for rank in range(2):
        write(tmp_path, rank, info(rank))
    texts = [[json.dumps(said) + "\n" for said in of_step] for of_step in written]
    for rank in range(2):
        write(tmp_path, rank, "".join(of_step[rank] for of_step in texts[:3]))
    write(tmp_path, 0, texts[3][0])
    write(tmp_path, 1, texts[3][1][:40])
    assert [one.step for one in tail.look()] == [1, 2, 3], "the fourth is half there on one rank"
    write(tmp_path, 1, texts[3][1][40:])
    read = tail.look()
    assert [one.step for one in read] == [1, 2, 3, 4] and read[-1].places[1] == {"dp": 1}
    assert sorted(read[-1].meetings[0].arrived) == [0, 1]


def test_a_start_forgets_what_was_before(tmp_path: Path) -> None:
    tail, texts = (
        RunTail(tmp_path),
        [json.dumps(of_step[0]) + "\n" for of_step in lines(nobody, ranks=1, steps=9)],
    )
    write(tmp_path, 0, info(0) + "".join(texts[:6]))
    assert len(tail.look()) == 6
    write(tmp_path, 0, info(0) + texts[4])
    assert [one.step for one in tail.look()] == [5]
    write(tmp_path, 0, info(0) + texts[0], mode="w")  # resumed: the file was written anew, and is shorter
    assert [one.step for one in tail.look()] == [1]


def test_a_long_file_is_not_read_from_its_beginning(tmp_path: Path) -> None:
    said = lines(nobody, ranks=1, steps=3)
    many = [{**said[0][0], "step": number} for number in range(1, 5001)]
    write(tmp_path, 0, info(0) + "".join(json.dumps(one) + "\n" for one in many))
    read = RunTail(tmp_path).look()
    assert [one.step for one in read] == list(range(5001 - WINDOW, 5001)) and read[0].places[0] == {"dp": 0}
