"""What a question about a run asks for: a time, a step, a rank. Keywords, no language model.

"why slow at 02:10?"   the minute around 02:10      "since 02:10", "between 02:10 and 02:20"
"step 812"             the steps around it          "steps 100 to 200", "since step 100"
"rank 3"               one rank beside the others   "now": the last steps
"""

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from unisono.report.verdict.evidence import STACKED, RankSeen, RunEvidence
from unisono.spec import words

AROUND = 8
"""Steps before and after a step that is asked for, and a tenth of a run's where that is more."""
_CLOCK = re.compile(r"\b(?:(\d{4}-\d\d-\d\d)[ T])?(\d{1,2}):(\d\d)(?::(\d\d))?\b")
_STEPS = re.compile(r"\bsteps?\s+(\d+)(?:\s*(?:to|-|–|and|until)\s*(\d+))?", re.IGNORECASE)
_RANK = re.compile(r"\brank\s+(\d+)", re.IGNORECASE)
_NOW = re.compile(r"\b(now|lately|latest|currently|at the end)\b", re.IGNORECASE)
_SINCE = re.compile(r"\b(since|after|from)\b", re.IGNORECASE)
_UNTIL = re.compile(r"\b(until|till|before|up to)\b", re.IGNORECASE)
_CALM = ("why", "slow", "what", "limits", "limit", "verdict", "run", "whole", "all", "bottleneck")


@dataclass(frozen=True, slots=True)
class RunQuestion:
    """What a text asks for. window: steps, the first and the last; None for the whole run. rank: of whom alone.
    understood: whether there was anything that is known here; `said` says what was taken of it."""

    window: tuple[int, int] | None
    rank: int | None
    understood: bool
    said: str


def read(text: str, evidence: RunEvidence) -> RunQuestion:
    """Read a question about a run, of which `evidence` has all steps."""
    numbers = evidence.numbers
    rank = int(match[1]) if (match := _RANK.search(text)) else None
    if rank is not None and rank not in {each.rank for each in evidence.ranks}:
        return RunQuestion(None, None, False, f"the run has no rank {rank}: this is the whole run")
    of = "" if rank is None else f", rank {rank} beside the others"
    if not numbers:
        return RunQuestion(None, rank, True, "the whole run" + of)
    window, said = _stretch(text, evidence)
    if window is not None:
        return RunQuestion(window, rank, True, said + of)
    if said:
        return RunQuestion(None, rank, False, f"{said}: this is the whole run{of}")
    calm = rank is not None or any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in _CALM)
    if calm or not text.strip():
        return RunQuestion(None, rank, True, "the whole run" + of)
    return RunQuestion(None, rank, False, "no time, step or rank was understood: this is the whole run")


def _stretch(text: str, evidence: RunEvidence) -> tuple[tuple[int, int] | None, str]:
    """(steps, in words), or (None, why not), or (None, "") where the text names none."""
    numbers, around = evidence.numbers, max(AROUND, len(evidence.numbers) // 10)
    first, last = numbers[0], numbers[-1]
    if match := _STEPS.search(text):
        begin = int(match[1])
        end = int(match[2]) if match[2] else begin
        if begin > last or end < first:
            return None, f"the run has steps {first} to {last}"
        return _opened(text, begin, end, around if not match[2] else 0, evidence)
    if times := list(_CLOCK.finditer(text)):
        starts = starts_of(evidence)
        if not starts:
            return None, "no step's time was written down"
        begin, end = (_step_at(match, starts) for match in (times[0], times[-1]))
        if begin is None or end is None:
            span = f"{_clock(min(starts.values()))} to {_clock(max(starts.values()))}"
            return None, f"the run went from {span} by the clock of this machine"
        return _opened(text, min(begin, end), max(begin, end), around if len(times) == 1 else 0, evidence)
    if _NOW.search(text):
        return _opened("", max(first, last - 2 * around), last, 0, evidence)
    return None, ""


def _opened(
    text: str, begin: int, end: int, around: int, evidence: RunEvidence
) -> tuple[tuple[int, int], str]:
    first, last = evidence.numbers[0], evidence.numbers[-1]
    window = max(first, begin - around), min(last, end + around)
    if _SINCE.search(text) and around:
        window = max(first, begin), last
    elif _UNTIL.search(text) and around:
        window = first, min(last, end)
    return window, f"steps {window[0]} to {window[1]}"


def beside(evidence: RunEvidence, rank: int | None) -> list[str]:
    """What one rank's mean step takes beside the median of the others', part by part; nothing without a rank."""
    mine = next((each for each in evidence.ranks if each.rank == rank), None)
    others = [each for each in evidence.ranks if each is not mine]
    if mine is None or not mine.steps or not others:
        return []

    def mean(each: RankSeen, part: str) -> float:
        return statistics.fmean(step.parts.get(part, 0.0) for step in each.steps)

    rows = []
    for part in (*STACKED, "between"):
        its, theirs = mean(mine, part), statistics.median(mean(each, part) for each in others)
        if max(its, theirs) >= 0.01 * evidence.period:
            name = words.PART_NAMES.get(part, "between two steps")
            rows.append(f"{mine.name}: {name} {words.seconds(its)}, the others {words.seconds(theirs)}")
    return rows


def starts_of(evidence: RunEvidence) -> Mapping[int, float]:
    """Unix seconds at which each step began on the first rank, of those that are known."""
    steps = evidence.ranks[0].steps if evidence.ranks else ()
    return {step.step: step.start for step in steps if step.start}


def _step_at(match: re.Match[str], starts: Mapping[int, float]) -> int | None:
    """The step under way at a time of day, by this machine's clock: of the days on which the run went, the last. None
    where the run did not go then."""
    day, hours, minutes, seconds = match.groups()
    if int(hours) > 23 or int(minutes) > 59 or int(seconds or 0) > 59:
        return None
    begin, end = min(starts.values()), max(starts.values())
    for back in range(400):
        date = (
            datetime.fromtimestamp(end - 86400 * back).date()
            if day is None
            else datetime.fromisoformat(day).date()
        )
        at = datetime(
            date.year, date.month, date.day, int(hours), int(minutes), int(seconds or 30 * (seconds is None))
        )
        if begin - 60 <= at.timestamp() <= end + 60:
            return max((s for s, start in starts.items() if start <= at.timestamp()), default=min(starts))
        if day is not None or at.timestamp() < begin - 86400:
            break
    return None


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")
