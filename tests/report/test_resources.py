"""The reader of resources/, and its section of the report."""

import json
from pathlib import Path
from typing import Any

import pytest

from unisono.report import page
from unisono.report.collect import collect
from unisono_contrib.report.resources import joules_per_token, read, section, troubles


def sampled(
    folder: Path, samples: list[dict[str, Any]], facts: dict[str, Any] | None = None, name: str = "host-a"
) -> Path:
    (folder / "resources").mkdir(exist_ok=True)
    head = {"kind": "info", "host": "a", "cores": 8, "memory_mib": 1000, **(facts or {})}
    text = "\n".join(json.dumps(line) for line in [head, *samples])
    (folder / "resources" / f"{name}.jsonl").write_text(text + "\n")
    steps = [
        {"step": step, "loss": 1.0, "tokens": 100, "tokens_per_s": 9.0, "time": {}} for step in range(1, 21)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    return folder


def sample(at: float, step: int, **more: Any) -> dict[str, Any]:
    return {"at": at, "step": step, "cores": 6.0, "available_mib": 400, "swap_mib": 0,
            "disk": {"write_mib_s": 2.0, "free_mib": 5000}, "net": {"eth0": [1000, 3000]}, **more}  # fmt: skip


def test_a_host_is_a_row(tmp_path: Path) -> None:
    run = collect(sampled(tmp_path, [sample(1, 1), sample(2, 4)]))
    text = section(run)
    for words in ("6.0 of 8", "600 MiB", "(eth0)", "Means over 2 samples"):
        assert words in text, words
    assert "Resources" in page.page(run, page.analyse.analyse(run))


def test_energy_counts_from_sample_to_sample(tmp_path: Path) -> None:
    """1,000 J for the 1,000 tokens of ten steps; a pause of an hour, whose joules trained nobody, is left out."""
    rows = [(0, 0, 0.0), (1, 5, 400.0), (2, 10, 1000.0), (3602, 10, 90_000.0)]
    folder = sampled(tmp_path, [sample(at, step, joules={"cpu": joules}) for at, step, joules in rows])
    hosts, _ = read(folder)
    assert joules_per_token(hosts, collect(folder).steps) == pytest.approx(1.0)
    sampled(tmp_path, [sample(0, 0), sample(1, 5)], name="host-b")
    assert joules_per_token(read(folder)[0], collect(folder).steps) is None


def test_what_is_too_full_too_hot_or_broken_is_said(tmp_path: Path) -> None:
    gpu = {"busy": 0.9, "celsius": 91, "ecc": 3, "throttled": True, "watts": 700.0}
    samples = [sample(1, 1, available_mib=10, gpus=[gpu]), sample(2, 2, swap_mib=500, gpus=[gpu])]
    said = " ".join(troubles(read(sampled(tmp_path, samples))[0]))
    for words in ("99 % full", "swapped out 500 MiB", "91 °C", "lower clocks", "3 uncorrected"):
        assert words in said, (words, said)
    assert troubles(read(sampled(tmp_path, [sample(1, 1)]))[0]) == []


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        '{"at": "x", "step": 1}',
        '{"at": 1, "step": 1, "gpus": 3, "net": {"a": ["x"]}, "disk": 4, "joules": 5}',
    ],
)
def test_what_is_damaged_is_left_out(tmp_path: Path, line: str) -> None:
    folder = sampled(tmp_path, [sample(1, 1)])
    with open(folder / "resources/host-a.jsonl", "a") as file:
        file.write(line + "\n")
    (folder / "resources/rank0.jsonl").write_text(line)
    (folder / "resources/rankx.jsonl").write_text("{}")
    assert "Resources" in section(collect(folder)) and joules_per_token(read(folder)[0], []) is None


def test_a_run_without_samples_has_no_section(tmp_path: Path) -> None:
    assert section(collect(tmp_path)) == "" and read(tmp_path) == ({}, {})
