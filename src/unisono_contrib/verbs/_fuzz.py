"""`unisono verify --fuzz N`: drawn plans and recipes against one device, a line for each hundred."""

import os
import tempfile
from collections import Counter
from pathlib import Path

from unisono.spec.errors import UsageError
from unisono.verbs import CommandCall, Result
from unisono_contrib.verify.fuzz import DIMENSIONS, FuzzResult, fuzz
from unisono_contrib.verify.fuzz.draw import documents

_LINE = 100  # plans
_REFUSALS = 12  # kinds that are printed


def run(call: CommandCall) -> Result:
    """Lines and the object of --json. Raises UsageError V11 where something else is wanted too."""
    args, seed = call.args, int(dict(call.keys).get("seed") or 0)
    keys = [f"--{key}" for key, _ in call.keys if key != "seed"]
    words = {"FILE": args.file, "--plan": args.plan, "--all": args.all}
    beside = [*(word for word, value in words.items() if value), *keys]
    if args.fuzz < 1 or beside or args.static or args.witness or args.engine:
        what = (
            f"--fuzz {args.fuzz} draws plans and recipes itself"
            if args.fuzz > 0
            else "--fuzz 0: nothing to prove"
        )
        with_them = f", beside {', '.join(beside)}" if beside else ""
        raise UsageError(
            what + with_them, where="unisono verify", fix="unisono verify --fuzz 500 --seed 3", code="V11"
        )
    if call.settings.dry_run:
        return call.would(
            {"fuzz": args.fuzz, "seed": seed}, f"would prove {args.fuzz} drawn plans, seed {seed}"
        )
    folder = Path(tempfile.gettempdir()) / f"unisono-fuzz-{os.getuid()}"  # printed commands read it
    folder.mkdir(exist_ok=True)
    call.settings.note(f"proving {args.fuzz} drawn plans in float64, seed {seed} (importing torch) ...")
    lines = 0

    def said(result: FuzzResult) -> None:
        nonlocal lines
        if (done := result.proven // _LINE) > lines:
            lines = done
            call.settings.say(f"{result.proven:>7,} plans are as one device, {len(result.failures)} are not")

    result = fuzz(args.fuzz, seed, documents(folder), said)
    for line in lines_of(result):
        call.settings.say(line)
    return {
        "results": [failure.as_dict() for failure in result.failures], "fuzz": {"seed": seed, **result.as_dict()},
        "pass": not result.failures,
    }  # fmt: skip


def lines_of(result: FuzzResult) -> list[str]:
    """What stands at the end: what was seen, what was refused, and what is wrong with the command that shows it."""
    values: dict[str, list[str]] = {key: [] for key in DIMENSIONS}
    for (key, value), number in sorted(result.seen.items()):
        values.setdefault(key, []).append(f"{value} {number}")
    lines = [f"{key:<24} {'  '.join(texts)}" for key, texts in values.items() if texts]
    refused: Counter[str] = result.refused
    lines += [f"{sum(refused.values()):,} drawn plans were refused, most often"] if refused else []
    lines += [f"{number:>7,}  {kind}" for kind, number in refused.most_common(_REFUSALS)]
    for failure in result.failures:
        row = failure.as_dict()
        lines += [f"WRONG  {row['plan']}", f"    {row['why']}", f"    {row['command']}"]
    unproven = f", {result.unproven:,} have bounds so wide that nothing is shown" if result.unproven else ""
    return [
        *lines,
        f"{result.proven:,} drawn plans are as one device, {len(result.failures)} are not{unproven}",
    ]
