"""Model FLOP utilisation (MFU) as a waterfall in words: from a step at peak to what was measured, each loss with
what would change it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.report.verdict.causes import candidates
from unisono.report.verdict.evidence import Prices, RunEvidence, number_of
from unisono.spec.words import count, percent, seconds

BELOW = "operations below peak"
_LEAST = 0.005  # of a step: what takes less is not shown


@dataclass(frozen=True, slots=True)
class UsedPeak:
    """A loss of the waterfall. share: of the step. after: what is left of 100 %. change: flags as typed, or what to do;
    gain_s: seconds of a step."""

    what: str
    share: float
    after: float
    change: str = ""
    gain_s: float = 0.0

    def says(self) -> str:
        """`79 % after input (21 %): --data.workers 2, which saves 40 ms`."""
        knob = f": {self.change.rstrip('.')}" if self.change else ""
        gain = f", saves {seconds(self.gain_s)} a step" if self.change and self.gain_s > 0 else ""
        return f"{percent(self.after)} after {self.what} ({percent(self.share)}){knob}{gain}"


def waterfall(evidence: RunEvidence, price: Prices, prediction: Mapping[str, Any]) -> list[UsedPeak]:
    """The losses of a mean step, the greatest first, and last the share of peak that operations themselves reach; what
    remains is the MFU. prediction: of `prediction.json`, for `ideal_s`, the seconds of the model's arithmetic at peak.
    Nothing where these are not known. Where causes overlap, so that more than the step would be lost, the smaller ones
    give way."""
    ideal, period = number_of(prediction, "ideal_s"), evidence.period
    if not 0 < ideal <= period:
        return []
    left, losses = 1.0, []
    for each in candidates(evidence, price):
        share = min(each.cost / period, left - ideal / period)
        if share >= _LEAST:
            left -= share
            name = f"{each.cause} on {each.phase}" if each.cause == "communication" else each.cause
            losses.append(UsedPeak(name, share, left, each.change or each.advice, each.gain))
    below = left - ideal / period
    if below >= _LEAST:
        wider = "larger matrices, or --plan precision=bf16 where the device is faster in it"
        losses.append(UsedPeak(BELOW, below, ideal / period, wider))
    return losses


def in_words(losses: Sequence[UsedPeak], prediction: Mapping[str, Any]) -> list[str]:
    """A line for the MFU and the peak that it is of, and one a loss; none without losses."""
    if not losses:
        return []
    whose = (
        "measured here"
        if prediction.get("calibrated") is True
        else f"of {prediction.get('cluster')}, not measured"
    )
    peak = number_of(prediction, "peak_flops")
    at = f" of {count(peak)}FLOP/s" if peak else ""
    return [
        f"MFU {percent(losses[-1].after)}{at} a rank ({whose}): from 100 %,",
        *(loss.says() for loss in losses),
    ]
