"""Whether what a run of post-training learned from has the lengths of what samplers drew: the reader, the test, and the
section of the report. No torch.

    lengths = read(run)
    lengths.drawn[3], lengths.trained[3]     # sequences of 3 tokens after their prompt

Samplers write down what they have drawn before the ranks hear of it (`samplers/sampler*.jsonl`), and ranks what the
loss counts (`lengths` in `metrics.jsonl`). So a sequence that is thrown away or cut on its way is missing there.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unisono.observe.metrics import read_lines
from unisono.report import html, picture
from unisono.report.collect import RunRecord
from unisono.spec.words import is_number

CHANCE = 0.001
"""How often `SampleLengths.alike` is false although both are of one distribution."""


def distance(first: Mapping[int, int], second: Mapping[int, int]) -> tuple[float, float]:
    """The Kolmogorov-Smirnov statistic of two samples, the largest distance of their distribution functions, and what
    it exceeds in at most `CHANCE` of all cases if both are of one distribution (Smirnov, "Table for estimating the
    goodness of fit of empirical distributions", 1948). Samples are counts by value; (0.0, inf) where one is empty."""
    sizes = sum(first.values()), sum(second.values())
    if not all(sizes):
        return 0.0, math.inf
    below, farthest = [0, 0], 0.0
    for value in sorted({*first, *second}):
        below = [below[0] + first.get(value, 0), below[1] + second.get(value, 0)]
        farthest = max(farthest, abs(below[0] / sizes[0] - below[1] / sizes[1]))
    return farthest, math.sqrt(-math.log(CHANCE / 2) / 2 * (1 / sizes[0] + 1 / sizes[1]))


@dataclass(frozen=True, slots=True)
class SampleLengths:
    """Sequences by the tokens that were drawn. drawn: by samplers, for all steps. trained: those that the loss counted.
    ahead: of `drawn`, those for steps that the run has not made. again: drawn once more after a process was lost."""

    drawn: Mapping[int, int]
    trained: Mapping[int, int]
    ahead: int
    again: int

    @property
    def lost(self) -> int:
        """Sequences that were drawn for steps that the run has made, and not trained."""
        return sum(self.drawn.values()) - self.ahead - sum(self.trained.values())

    @property
    def alike(self) -> bool:
        """Whether the test accepts them as samples of one distribution."""
        statistic, limit = distance(self.drawn, self.trained)
        return statistic <= limit

    def says(self) -> str:
        """A sentence."""
        statistic, limit = distance(self.drawn, self.trained)
        parts = [
            f"samplers drew {sum(self.drawn.values()):,} sequences",
            f"{sum(self.trained.values()):,} are trained",
        ]
        parts += [f"{self.ahead:,} for steps to come"] if self.ahead else []
        parts += [f"{self.lost:,} lost"] if self.lost else []
        verdict = "lengths of one distribution" if self.alike else "trained ones have other lengths"
        return f"{', '.join(parts)}: {verdict} (Kolmogorov-Smirnov {statistic:.3f}, limit {limit:.3f})"


def read(run: RunRecord) -> SampleLengths | None:
    """Of a run with samplers; None where nothing was drawn. What is damaged is left out."""
    trained = Counter[int]()
    for step in run.steps:
        counts = step.get("lengths")
        trained.update({int(k): v for k, v in counts.items()} if isinstance(counts, dict) else {})
    del trained[0]  # of these the loss counts nothing
    newest, again = dict[int, tuple[float, int, list[int]]](), 0
    for path in sorted((run.folder / "samplers").glob("sampler*.jsonl")):
        for line in filter(_is_whole, read_lines(path)[0]):
            group = len(line["lengths"]) // len(line["prompts"])
            for i, prompt in enumerate(line["prompts"]):
                mine = line["at"], line["step"], line["lengths"][i * group : (i + 1) * group]
                again += group if prompt in newest else 0
                newest[prompt] = max(mine, newest.get(prompt, mine))
    last = max((step["step"] for step in run.steps), default=0)
    drawn = Counter(length for _, _, lengths in newest.values() for length in lengths)
    ahead = sum(len(lengths) for _, step, lengths in newest.values() if step > last)
    return SampleLengths(drawn, trained, ahead, again) if drawn else None


def _is_whole(line: Mapping[str, Any]) -> bool:
    """Whether a line says what a sampler has drawn."""
    lists = [line.get(key) for key in ("prompts", "lengths")]
    numbers = [
        line.get("at"),
        line.get("step"),
        *(x for each in lists if isinstance(each, list) for x in each),
    ]
    return all(isinstance(each, list) and each for each in lists) and all(map(is_number, numbers))


def as_json(run: RunRecord) -> dict[str, Any] | None:
    """The same as plain values, with a sentence."""
    if (lengths := read(run)) is None:
        return None
    statistic, limit = distance(lengths.drawn, lengths.trained)
    tested = {"lost": lengths.lost, "ks": statistic, "limit": limit, "alike": lengths.alike}
    counts = {"drawn": dict(sorted(lengths.drawn.items())), "trained": dict(sorted(lengths.trained.items()))}
    return {**counts, "ahead": lengths.ahead, "again": lengths.again, **tested, "says": lengths.says()}


def section(run: RunRecord) -> str:
    """The section of the report; nothing of a run without samplers."""
    lengths = read(run)
    if lengths is None:
        return ""
    rows = [
        (f"{length}", float(lengths.trained.get(length, 0)), f"{lengths.trained.get(length, 0)} of {count}")
        for length, count in sorted(lengths.drawn.items())
    ]
    bars = picture.sized("Sequences by tokens drawn: trained, of those that samplers drew", rows)
    return html.section("lengths", bars.title, html.bars(bars), html.note(f"{lengths.says()}."))
