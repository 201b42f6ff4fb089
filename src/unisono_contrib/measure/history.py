"""`unisono bench --save` and `--against`: what a bench measured, kept in a file or measured beside another version.

Each repeat is a process of its own, so that both versions pay alike for their start, and a version can be any checkout
of this program. Of two versions the repeats alternate, and each begins every other pair. No torch.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unisono import __file__ as here
from unisono.observe.files import write_whole
from unisono.spec.errors import UnisonoError, UsageError
from unisono_contrib.measure.slower import FIRST, MOST, SpeedDifference, of_days, of_pairs

FOLDER = "bench-history"
REPEATS = 5
"""Repeats that are saved."""
VERSION = 1
_ALL = "all"
"""The row of the geometric mean over all rows."""

Times = Mapping[str, float]
"""Seconds of each row of a bench's table, by what the row is of."""


class BenchFailed(UnisonoError):
    """A version could not be measured."""

    exit = 1
    default_code = "B01"


def own_source() -> Path:
    """The folder from which this program is imported."""
    return Path(here).parents[1]


def source_of(text: str) -> Path | None:
    """The folder to import another checkout from; None where `text` is none."""
    for folder in (Path(text) / "src", Path(text)):
        if (folder / "unisono" / "__init__.py").is_file():
            return folder.absolute()
    return None


def file_of(name: str) -> Path:
    """Where measurements of this name lie: a path that ends in .json, else `bench-history/NAME.json`."""
    return Path(name) if name.endswith(".json") else Path(FOLDER, f"{name}.json")


def measured(source: Path, words: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """The object of `unisono bench WORDS --json` by the program in `source`. Raises BenchFailed B01."""
    paths = [str(source), *filter(None, [environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "unisono", "bench", *words, "--json", "--quiet"],
        env={**environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    with suppress(ValueError):
        if done.returncode == 0:
            return json.loads(done.stdout)
    last = next((line for line in done.stderr.splitlines() if line.startswith("error")), done.stderr[-300:])
    raise BenchFailed(
        f"the bench failed with exit code {done.returncode}: {last}", where=str(source),
        fix=f"PYTHONPATH={source} python -m unisono bench {' '.join(words)}",
    )  # fmt: skip


def times_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by row; what a row is of are those of its fields that are no measurements."""
    times = {}
    for row in result["rows"]:
        if isinstance(row.get("seconds"), int | float) and row["seconds"] > 0:
            named = (str(v) for k, v in row.items() if isinstance(v, str) or k in ("bytes", "from", "to"))
            times[" ".join(named)] = float(row["seconds"])
    return times


def save(path: Path, bench: str, words: Sequence[str], results: Sequence[Mapping[str, Any]]) -> None:
    """Keep repeats. Raises OSError."""
    kept = {"version": VERSION, "bench": bench, "words": list(words), "machine": results[0]["machine"],
            "repeats": [times_of(result) for result in results]}  # fmt: skip
    write_whole(path, json.dumps(kept, indent=1) + "\n")


def saved(path: Path, words: Sequence[str]) -> dict[str, Any]:
    """What `save` kept of the same bench. Raises UsageError C03, C06."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["version"] != VERSION or not all(isinstance(times, dict) for times in kept["repeats"]):
            raise ValueError("another layout")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} holds no measurements: {error}", where="--against",
            fix=f"unisono bench {' '.join(words)} --save {path}; or --against a checkout of another version",
            code="C03",
        ) from error  # fmt: skip
    if kept["words"] != list(words):
        raise UsageError(
            f"{path} was measured by: unisono bench {' '.join(kept['words'])}", where="--against",
            fix="the same bench with the same flags", code="C06",
        )  # fmt: skip
    return kept


def beside(
    old: Callable[[], Times], new: Callable[[], Times], say: Callable[[str], None] = lambda text: None
) -> dict[str, SpeedDifference]:
    """Both versions in turns, until something is surely slower or faster, at most `MOST` pairs; the difference of each
    row, and of all."""
    pairs: list[tuple[Times, Times]] = []
    differences = dict[str, SpeedDifference]()
    while len(pairs) < MOST:
        if len(pairs) % 2:
            now, before = new(), old()
        else:
            before, now = old(), new()
        pairs.append((before, now))
        ratios = list(ratios_of(pairs))
        differences = of_pairs({name: [both[name] for both in ratios] for name in ratios[0]})
        say(f"pair {len(pairs)} of {MOST} at most: {ratios[-1][_ALL]:.4f} times as long")
        if any(difference.slower or difference.faster for difference in differences.values()):
            break
    return differences


def ratios_of(pairs: Sequence[tuple[Times, Times]]) -> Iterator[dict[str, float]]:
    """new / old of each pair, of all rows that every repeat has, and of their geometric mean."""
    names = [name for name in pairs[0][0] if all(name in times for pair in pairs for times in pair)]
    if not names:
        raise BenchFailed("the two versions measured nothing in common", where="--against")
    for old, new in pairs:
        ratios = {name: new[name] / old[name] for name in names}
        yield {_ALL: math.exp(sum(map(math.log, ratios.values())) / len(ratios)), **ratios}


def since(old: Sequence[Times], new: Sequence[Times]) -> dict[str, SpeedDifference]:
    """New repeats and those of another day."""
    names = [name for name in old[0] if all(name in times for times in (*old, *new))]
    if not names:
        raise BenchFailed("nothing in common with what was saved", where="--against")
    mean = lambda times: math.exp(sum(math.log(times[name]) for name in names) / len(names))
    whole = of_days([*map(mean, new)], [*map(mean, old)])
    return {_ALL: whole, **{name: of_days([t[name] for t in new], [t[name] for t in old]) for name in names}}


def described(differences: Mapping[str, SpeedDifference]) -> dict[str, Any]:
    """For --json: `pass` is false where anything is slower."""
    return {
        "pass": not any(difference.slower for difference in differences.values()),
        "pairs": differences[_ALL].pairs,
        "enough": differences[_ALL].pairs >= FIRST,
        "differences": {name: asdict(difference) for name, difference in differences.items()},
    }


def lines(differences: Mapping[str, SpeedDifference]) -> Iterator[str]:
    """For people."""
    wide = max(map(len, differences))
    for name, difference in differences.items():
        word = (
            "slower" if difference.slower else "faster" if difference.faster else "no difference that is sure"
        )
        within = f"{difference.low:.3f} to {difference.high:.3f}"
        yield f"{name:{wide}}  {difference.ratio:.3f} times as long ({within})  {word}"
