"""A comparison of runs in words: a sentence on top, a table, and where bits and recipes differ.

All is said from the object of `compare --json`, which is what `facts` is here.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.spec import words

Facts = Mapping[str, Any]
HEADS = (
    "run", "plan", "steps", "loss", "validation", "speed", "sent", "time to loss", "sent to loss", "memory"
)  # fmt: skip
"""Of `rows`; the first two are names, the others figures. `footnote` says to which loss."""
_SAID = {"loss": "loss", "grad_norm": "gradient norm"}
_LONGEST = 48  # letters of a value of a recipe


def names(facts: Facts) -> list[str]:
    """The names of the runs, the baseline's first."""
    return [run["name"] for run in facts["runs"]]


def headline(facts: Facts) -> str:
    """Which other run comes to the last loss of the baseline first, and at what price."""
    target, (first, *others) = facts["target_loss"], facts["runs"]
    if target is None:
        return f"No loss of {first['name']} is a number, so there is none to come to."
    what = f"the last loss of {first['name']}, {target:.4g}"
    there = [run for run in others if run["seconds_to_target"] is not None]
    if not there:
        who = f"{others[0]['name']} does not come" if len(others) == 1 else "None of the others comes"
        return f"{who} to {what}."
    best = min(there, key=lambda run: run["seconds_to_target"])
    said = f"{best['name']} comes to {what}, after {words.seconds(best['seconds_to_target'])}"
    sent = f"{words.nbytes(best['bytes_to_target'])} sent"
    return (
        f"{said} and {sent}; {first['name']} itself after {words.seconds(first['seconds_to_target'])}"
        f" and {words.nbytes(first['bytes_to_target'])}."
    )


def rows(facts: Facts) -> list[list[str]]:
    """A row for each run, under `HEADS`."""
    return [
        [
            run["name"],
            run["plan"] or "–",
            f"{run['steps']:,}",
            words.number(run["loss"], 5),
            words.number(run["val_loss"], 5),
            f"{words.count(run['tokens_per_s'])} {run['unit']}/s" if run["tokens_per_s"] else "–",
            words.nbytes(run["bytes_sent"]),
            _said(words.seconds, run["seconds_to_target"]),
            _said(words.nbytes, run["bytes_to_target"]),
            _said(words.mebibytes, run["peak_mem_mib"]),
        ]
        for run in facts["runs"]
    ]


def footnote(facts: Facts) -> str:
    """What the table counts: the target, seconds, bytes."""
    counted = "Times are those of steps, without validation and saving; bytes are those that rank 0 sent."
    target, window, name = facts["target_loss"], facts["target_window"], facts["baseline"]
    if target is None:
        return counted
    last = "the last loss" if window == 1 else f"the mean of the last {window} losses"
    return f"Loss to come to: {target:.5g}, {last} of {name}; for others likewise. {counted}"


def notes(facts: Facts) -> list[str]:
    """What to know before one believes the table."""
    said = []
    for run in facts["runs"]:
        if run["behind"]:
            said.append(f"{run['name']} is at {run['behind']}: it goes on, or was stopped.")
        if run["first_step"] > 1:
            said.append(f"{run['name']}: nothing is known of the steps before {run['first_step']}.")
        said += [f"{run['name']}: {line}." for line in run["missing"]]
    if facts["compared_by"] == "samples":
        said.append("The global batches differ: runs are compared after equally many samples.")
    return said


def bits_line(facts: Facts) -> str:
    """Where each run leaves the bits of the baseline, in one sentence."""
    return f"Beside {facts['baseline']}: {'; '.join(map(_leaves, facts['bits']))}."


def _leaves(bits: Facts) -> str:
    first, stored = bits["first_divergence"], bits["checkpoints"]["first"]
    if stored is not None and (first is None or stored["step"] < first["step"]):
        return f"{bits['run']} has other {stored['what']} after step {stored['step']}"
    if first is not None:
        return f"{bits['run']} has other bits from step {first['step']} on"
    if not bits["steps_compared"]:
        return f"{bits['run']} has no step in common"
    return f"{bits['run']} has the same bits in {bits['steps_compared']:,} steps"


def sentences(facts: Facts) -> list[str]:
    """On the bits of each run beside the baseline's, and on those of their checkpoints."""
    return [line for bits in facts["bits"] for line in (_of_steps(facts, bits), *_of_checkpoints(bits))]


def key_rows(facts: Facts) -> list[list[str]]:
    """A row for each key in which the recipes differ: the key, and its value in each run."""
    return [
        [row["key"], *("–" if value is None else _short(value) for value in row["values"])]
        for row in facts["differences"]
    ]


def command(facts: Facts) -> str:
    """The command that compares the same runs."""
    return shlex.join(["unisono", "compare", *(run["run_dir"] for run in facts["runs"])])


def _of_steps(facts: Facts, bits: Facts) -> str:
    pair = f"{bits['run']} and {facts['baseline']}"
    first, count = bits["first_divergence"], bits["steps_compared"]
    if not count:
        return f"{pair} have no step in common, so no bits can be compared."
    if first is None:
        steps = f"all {count:,} steps" if count > 1 else "the only step"
        return f"{pair} have the same bits: loss and gradient norm of {steps} that both have."
    values = first["run"], first["baseline"]
    apart = "" if None in values else f", {abs(values[0] - values[1]):.2g} apart"
    key, place = _SAID[first["key"]], _place(first, bits["run"])
    said = f"{key} {_exact(values[0])} and {_exact(values[1])}{apart}"
    return f"{pair} differ in bits first in step {place}: {said}."


def _of_checkpoints(bits: Facts) -> Sequence[str]:
    name, checkpoints = bits["run"], bits["checkpoints"]
    said = [f"{name}: {line}." for line in checkpoints["unread"]]
    first, compared = checkpoints["first"], checkpoints["compared"]
    if first is not None:
        return [
            *said,
            f"{name}: after step {first['step']} {first['differing']} of {first['tensors']} tensors of the"
            f" {first['what']} differ; the first is {first['tensor']['name']}, {_far(first['tensor'])}.",
        ]
    if compared:
        steps = f"step{'s' * (len(compared) > 1)} {words.listed(compared)}"
        said.append(f"{name}: weights and optimiser state have the same bits in the checkpoints of {steps}.")
    return said


def _far(tensor: Facts) -> str:
    """How a tensor differs from the baseline's."""
    if tensor["why"]:
        return (
            "which one of them lacks" if tensor["why"] == "absent" else f"which has another {tensor['why']}"
        )
    largest = "what is no number" if tensor["largest"] is None else f"at most {tensor['largest']:.3g}"
    return f"in {tensor['elements']:,} of {tensor['size']:,} elements, by {largest}"


def _place(first: Facts, name: str) -> str:
    """`17`; of runs of other batches `16, after 512 samples (step 8 of b)`."""
    if first["samples"] is None:
        return str(first["step"])
    return f"{first['step']}, after {first['samples']:,} samples (step {first['run_step']} of {name})"


def _exact(value: float | None) -> str:
    return "no number" if value is None else repr(value)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _said(how: Callable[[float], str], value: float | None) -> str:
    return "–" if value is None else how(value)
