"""`unisono bench --save` and `--against`: the file, what is refused, and exit code 7 where it is slower."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from unisono import cli
from unisono_contrib.measure import bench, history


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, float]:
    """Seconds by source folder; nothing is started."""
    monkeypatch.chdir(tmp_path)
    seconds = {"": 1.0}

    def measured(source: Path, words: Sequence[str], environ: Mapping[str, str]) -> Mapping[str, Any]:
        assert words == ["net", "--ranks", "2"]
        took = seconds.get(source.name, seconds[""])
        return {
            "machine": bench.machine(),
            "rows": [{"from": 0, "to": 1, "ways": "one way", "bytes": 8, "seconds": took}],
        }

    monkeypatch.setattr(history, "measured", measured)
    return seconds


def run(*words: str) -> int:
    return cli.main(["bench", "net", "--ranks", "2", *words, "--json"])


def test_what_was_saved_is_compared_with_now(
    speed: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--save", "before") == 0
    kept = json.loads(Path("bench-history/before.json").read_text())
    assert kept["repeats"] == [{"0 1 one way 8": 1.0}] * history.REPEATS
    assert run("--against", "before") == 0
    speed[""] = 1.3
    capsys.readouterr()
    assert run("--against", "before", "--save", "now.json") == 7
    said = json.loads(capsys.readouterr().out)
    assert said["pass"] is False and said["in_turns"] is False and Path("now.json").is_file()
    assert said["differences"]["all"]["ratio"] == pytest.approx(1.3)


def test_another_checkout_is_measured_in_turns(
    speed: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other" / "old" / "unisono").mkdir(parents=True)
    (tmp_path / "other" / "old" / "unisono" / "__init__.py").touch()
    speed["old"] = 0.9
    assert run("--against", "other/old") == 7
    said = json.loads(capsys.readouterr().out)
    assert said["in_turns"] is True and said["differences"]["all"]["slower"] is True
    speed["old"] = 1.0
    assert run("--against", "other/old") == 0


def test_what_cannot_be_compared_is_refused(
    speed: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--against", "nobody") == 2 and "U-C03" in capsys.readouterr().err
    assert run("--save", "a") == 0
    kept = json.loads(Path("bench-history/a.json").read_text())
    Path("b.json").write_text(json.dumps({**kept, "words": ["codecs"]}))
    assert (
        run("--against", "b.json") == 2 and "was measured by: unisono bench codecs" in capsys.readouterr().err
    )
    Path("c.json").write_text(json.dumps({**kept, "machine": {**kept["machine"], "cores": 999}}))
    assert run("--against", "c.json") == 2 and "another machine" in capsys.readouterr().err
    assert run("--against", "a", "--out", "x.svg") == 2
