"""Lengths of sequences: what samplers drew beside what the loss counted, read from a run folder."""

import json
from pathlib import Path

from unisono.report.collect import RunRecord
from unisono_contrib.report import lengths

DRAWN = [
    {"step": 1, "at": 1.0, "prompts": [0, 1], "lengths": [2, 3, 5, 5]},
    {"step": 2, "at": 2.0, "prompts": [2, 3], "lengths": [1, 1, 4, 2]},
    {"step": 2, "at": 9.0, "prompts": [2], "lengths": [3, 1]},  # after a loss, by newer weights
    {"step": 3, "at": 9.5, "prompts": [4], "lengths": [6, 6]},
    {"step": 3, "at": "late", "prompts": 4, "lengths": None},
]


def run(folder: Path, *steps: dict[str, int]) -> RunRecord:
    (folder / "samplers").mkdir()
    text = "".join(f"{json.dumps(line)}\n" for line in DRAWN)
    (folder / "samplers" / "sampler0.jsonl").write_text(f'{text}{{"step": 4, "at"')
    return RunRecord(folder, tuple({"step": i + 1, "lengths": counts} for i, counts in enumerate(steps)))


def test_what_was_drawn_is_trained_is_for_steps_to_come_or_is_lost(tmp_path: Path) -> None:
    record = run(tmp_path, {"2": 1, "3": 1, "5": 2}, {"0": 1, "1": 1, "3": 1, "2": 1})
    found = lengths.read(record)
    assert found is not None
    assert found.drawn == {2: 2, 3: 2, 5: 2, 1: 1, 4: 1, 6: 2} and found.again == 2 and found.ahead == 2
    assert found.trained == {2: 2, 3: 2, 5: 2, 1: 1} and found.lost == 1, "the one of four tokens"
    assert "1 lost" in found.says() and "2 for steps to come" in lengths.section(record)


def test_a_run_without_samplers_has_no_section(tmp_path: Path) -> None:
    assert lengths.read(RunRecord(tmp_path)) is None and lengths.section(RunRecord(tmp_path)) == ""
