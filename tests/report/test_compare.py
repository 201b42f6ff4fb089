"""Runs beside each other: the same bits are called the same, the first other bit is named, and no folder is misread."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.runs import write_run
from tests.report.test_page import CHROMIUM, browse
from unisono.report.collect import RunRecord
from unisono.spec.errors import UsageError
from unisono_contrib.report import compare, compare_page, compare_words
from unisono_contrib.report.compare import StepMap
from unisono_contrib.report.dash import static

NONE: dict[str, Any] = {"compared": [], "first": None, "unread": []}
Line = dict[str, Any]


def rewritten(run: Path, change: Callable[[int, Line], Line | None]) -> Path:
    """A run whose lines of metrics are others; None leaves a line out."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [line for i, old in enumerate(lines) if (line := change(i, dict(old))) is not None]
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    return run


def runs(place: Path, *changes: Callable[[int, Line], Line | None], steps: int = 40) -> list[Path]:
    """A run, and one for each change of it."""
    folders = [write_run(place / "runs" / "a" / "1", steps=steps)]
    for i, change in enumerate(changes):
        folders.append(rewritten(write_run(place / "runs" / f"b{i}" / "1", steps=steps), change))
    return folders


def facts_of(folders: Sequence[Path]) -> dict[str, Any]:
    return compare.facts(compare.gather(folders), lambda a, b, at: NONE)


def same(i: int, line: Line) -> Line:
    return line


def off_by_a_bit(step: int, key: str) -> Callable[[int, Line], Line]:
    """The smallest change there is, in one step."""
    return lambda i, line: line | {key: math.nextafter(line[key], 9.0)} if i == step - 1 else line


def test_equal_runs_have_the_same_bits(tmp_path: Path) -> None:
    (bits,) = facts_of(runs(tmp_path, same))["bits"]
    assert (bits["bit_identical"], bits["steps_compared"], bits["first_divergence"]) == (True, 40, None)


@pytest.mark.parametrize("key", compare.EXACT)
@pytest.mark.parametrize("step", [1, 17, 40])
def test_the_first_other_bit_is_named(tmp_path: Path, key: str, step: int) -> None:
    facts = facts_of(runs(tmp_path, off_by_a_bit(step, key)))
    (bits,) = facts["bits"]
    first = bits["first_divergence"]
    assert bits["bit_identical"] is False and (first["step"], first["key"]) == (step, key)
    assert first["run"] == math.nextafter(first["baseline"], 9.0)
    (said,) = compare_words.sentences(facts)
    assert f"first in step {step}:" in said and repr(first["run"]) in said


def test_a_zero_has_a_sign_and_what_is_no_number_is_itself(tmp_path: Path) -> None:
    folders = runs(tmp_path, *(lambda i, line, x=x: line | {"grad_norm": x} for x in (0.0, -0.0, None, None)))
    signs, nothing = facts_of(folders[1:3]), facts_of(folders[3:])
    assert signs["bits"][0]["first_divergence"]["step"] == 1 and nothing["bits"][0]["bit_identical"]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_line_of_metrics_keeps_every_bit(value: float) -> None:
    from unisono.observe.metrics import _line

    assert json.loads(_line({"loss": value}))["loss"].hex() == value.hex()


def test_other_batches_are_compared_by_samples(tmp_path: Path) -> None:
    short, long = runs(tmp_path, same)
    text = (long / "config.resolved.toml").read_text()
    (long / "config.resolved.toml").write_text(text.replace("global_batch = 32", "global_batch = 64"))
    losses = [json.loads(line)["loss"] for line in (short / "metrics.jsonl").read_text().splitlines()]
    rewritten(long, lambda i, line: line | {"loss": losses[2 * i + 1]} if i < 10 else None)
    facts = facts_of([short, long])
    (bits,) = facts["bits"]
    assert facts["compared_by"] == "samples" and (bits["bit_identical"], bits["steps_compared"]) == (True, 10)
    assert [run["samples"] for run in facts["runs"]] == [1280, 640]
    assert compare_page.losses(compare.gather([short, long]))[0].title == "Loss, by sample"
    rewritten(long, off_by_a_bit(4, "loss"))
    first = facts_of([short, long])["bits"][0]["first_divergence"]
    assert (first["step"], first["run_step"], first["samples"]) == (8, 4, 256)


@given(st.integers(1, 99), st.integers(1, 99), st.integers(1, 999))
def test_steps_stand_beside_each_other_at_equal_samples(batch: int, other: int, step: int) -> None:
    beside = StepMap(batch, other)(step)
    assert beside is None if step * batch % other else beside is not None and beside * other == step * batch


def test_the_target_is_reached_at_a_price(tmp_path: Path) -> None:
    """A run whose losses are those of the first one's next but ninth step, and that sends a tenth."""
    plain = runs(tmp_path)[0]
    lines = [json.loads(line) for line in (plain / "metrics.jsonl").read_text().splitlines()]
    sooner = rewritten(
        write_run(tmp_path / "runs" / "b" / "1", steps=40),
        lambda i, line: (
            line | {"loss": lines[min(39, i + 10)]["loss"], "bytes_sent": line["bytes_sent"] // 10}
        ),
    )
    facts = facts_of([plain, sooner])
    first, other = facts["runs"]
    reached = next(i + 1 for i, line in enumerate(lines) if _mean(lines, i) <= facts["target_loss"] + 1e-12)
    assert first["steps_to_target"] == reached and other["steps_to_target"] == reached - 10
    assert other["bytes_to_target"] * 10 == pytest.approx(
        first["bytes_to_target"] * (reached - 10) / reached, rel=0.01
    )
    seconds = sum(sum(v for k, v in line["time"].items() if k != "comm_hidden") for line in lines[:reached])
    assert first["seconds_to_target"] == pytest.approx(seconds)
    assert compare_words.headline(facts).startswith("b comes to the last loss of a,")
    worse = facts_of([sooner, rewritten(plain, lambda i, line: line | {"loss": 9.0})])
    assert worse["runs"][1]["steps_to_target"] is None
    assert compare_words.headline(worse).startswith("a does not come to the last loss of b,")


def _mean(lines: Sequence[Line], at: int) -> float:
    return (lines[at]["loss"] + lines[at - 1]["loss"]) / 2 if at else math.inf


@given(st.lists(st.floats(0.0, 9.0), min_size=1, max_size=80))
def test_the_baseline_always_reaches_its_own_target(losses: list[float]) -> None:
    steps = tuple({"step": i + 1, "loss": loss} for i, loss in enumerate(losses))
    run = compare.ComparedRun("a", RunRecord(Path("a"), steps=steps))
    target = compare.target_of(run)
    assert target is not None and run.reaches(target) is not None


def test_losses_that_are_no_numbers_have_no_target(tmp_path: Path) -> None:
    facts = facts_of(
        runs(tmp_path, same)[1:] + [rewritten(runs(tmp_path / "x")[0], lambda i, line: line | {"loss": None})]
    )
    assert facts["runs"][1]["loss"] is None and facts["target_loss"] is not None
    nothing = facts_of([Path(run["run_dir"]) for run in reversed(facts["runs"])])
    assert nothing["target_loss"] is None and "is a number" in compare_words.headline(nothing)


def test_keys_in_which_recipes_differ(tmp_path: Path) -> None:
    folders = runs(tmp_path, same, same)
    text = (folders[1] / "config.resolved.toml").read_text()
    (folders[1] / "config.resolved.toml").write_text(text.replace("lr = 0.001", "lr = 0.002\nclip = 1.0"))
    assert facts_of(folders)["differences"] == [
        {"key": "train.lr", "values": [0.001, 0.002, 0.001]},
        {"key": "train.clip", "values": [None, 1.0, None]},
    ]
    (folders[2] / "config.resolved.toml").unlink()
    facts = facts_of(folders)
    assert facts["differences"] == [] and "b1: config.resolved.toml is absent." in compare_words.notes(facts)


def test_a_run_that_goes_on_is_taken_as_it_is(tmp_path: Path) -> None:
    def torn(i: int, line: Line) -> Line | None:
        return line if i < 12 else None

    folders = runs(tmp_path, torn)
    with (folders[1] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "lo')
    facts = facts_of(folders)
    assert facts["bits"][0]["bit_identical"] and facts["bits"][0]["steps_compared"] == 12
    assert any("b0 is at step 12 of 40" in note for note in compare_words.notes(facts))


def test_runs_without_a_common_step_have_no_bits_to_compare(tmp_path: Path) -> None:
    folders = runs(tmp_path, lambda i, line: line if i > 20 else None)
    rewritten(folders[0], lambda i, line: line if i < 20 else None)
    facts = facts_of(folders)
    assert (
        facts["bits"][0]["bit_identical"] is None and "no step in common" in compare_words.sentences(facts)[0]
    )
    assert any("before 21" in note for note in compare_words.notes(facts))


@pytest.mark.parametrize(
    ("names", "code", "what"),
    [
        (["a/1"], "C04", "one run alone"),
        (["a/1", "a"], "C04", "same run"),
        (["a/1", "gone"], "C03", "no such run folder"),
        (["a/1", "a/1/metrics.jsonl"], "C03", "is a file"),
        (["a/1", "empty"], "C03", "has no step"),
        (["empty", "a/1"], "C03", "has no step"),
        (["a/1", "damaged"], "C03", "has no step"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, names: list[str], code: str, what: str) -> None:
    place = runs(tmp_path)[0].parents[1]
    (place / "empty" / "events").mkdir(parents=True)
    (place / "damaged").mkdir()
    (place / "damaged" / "metrics.jsonl").write_text('{"step": 1, "loss"\n[]\n')
    with pytest.raises(UsageError, match=what) as caught:
        compare.gather([place / name for name in names])
    assert caught.value.code == code


def test_the_page_and_the_sheet_show_every_run(tmp_path: Path) -> None:
    rich = {"staleness": 1.5, "staleness_counts": [1, 2], "consensus": 0.1, "codec_error": 0.01}
    folders = runs(tmp_path, same, lambda i, line: line | rich | {"bytes_sent": 7})
    comparison, facts = compare.gather(folders), facts_of(folders)
    files = static.write(comparison, facts, tmp_path / "out.html")
    assert [file.name for file in files] == ["out.html", "out.png"] and all(
        file.stat().st_size for file in files
    )
    text = files[0].read_text()
    for name in ("runs", "loss-3", "target-0", "bits", "replicas-0", "staleness-0", "again"):
        assert f'"id":"beside-{name}"' in text
    assert all(text.count(f'"Run {name}"') == 1 for name in ("a", "b0", "b1"))
    charts = compare_page.losses(comparison)
    assert [chart.axis.name for chart in charts] == ["step", "token", "seconds", "MiB sent by rank 0"]
    assert charts[3].axis.log and not charts[2].axis.log  # one sends 160,000 times what another does
    (svg,) = static.write(comparison, facts, tmp_path / "out.svg")
    assert svg.read_text().startswith("<svg")


def test_names_are_as_short_as_they_tell_runs_from_each_other() -> None:
    for paths, names in (
        ("/r/a/1 /r/b/1", "a b"),
        ("/r/a/1 /r/a/2", "1 2"),
        ("/r/a/1 /r/a/2 /r/b/1", "a/1 a/2 b/1"),
    ):
        assert compare.names_of([Path(path) for path in paths.split()]) == names.split()


def test_many_runs_have_colours_of_their_own() -> None:
    for count in (2, 8, 9, 40):
        colours = compare_page.colours(range(count))
        assert len(set(colours)) == count


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.timeout(120)
def test_the_page_asks_nobody_and_complains_of_nothing(tmp_path: Path) -> None:
    folders = runs(tmp_path, same)
    (page, _) = static.write(compare.gather(folders), facts_of(folders), tmp_path / "out.html")
    document, console = browse(page, tmp_path / "profile")
    assert console == [] and "Where bits differ" in document
    assert all(
        f'data-testid="{name}"' in document
        for name in ("beside-runs", "beside-bits", "heat", "times", "verdict")
    )
