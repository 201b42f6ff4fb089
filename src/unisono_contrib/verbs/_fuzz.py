"""`unisono verify --fuzz N`: drawn plans and recipes, or steps of other stacks, against one device, a line for many."""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from unisono.spec.errors import UsageError
from unisono.verbs import CommandCall, Result
from unisono_contrib.verify.fuzz import DIMENSIONS, FuzzResult, fuzz
from unisono_contrib.verify.fuzz.draw import documents

_LINE, _STACK_LINE = 100, 25  # cases
_REFUSALS = 12  # kinds that are printed


def run(call: CommandCall) -> Result:
    """Lines and the object of --json. Raises UsageError V11 where something else is wanted too."""
    args, seed = call.args, int(dict(call.keys).get("seed") or 0)
    _check(call)
    if args.fuzz is None:
        return _one_stack(call)
    noun = "plans, most in float64" if args.stack is None else f"steps of {args.stack}"
    if call.settings.dry_run:
        return call.would(
            {"fuzz": args.fuzz, "seed": seed}, f"would prove {args.fuzz} drawn {noun}, seed {seed}"
        )
    call.settings.note(f"proving {args.fuzz} drawn {noun}, seed {seed} (importing torch) ...")
    result, dimensions = (_plans if args.stack is None else _stacks)(call, seed)
    for line in lines_of(result, dimensions, "plans" if args.stack is None else "steps"):
        call.settings.say(line)
    return {
        "results": [failure.as_dict() for failure in result.failures], "fuzz": {"seed": seed, **result.as_dict()},
        "pass": not result.failures,
    }  # fmt: skip


def _check(call: CommandCall) -> None:
    """Raises UsageError V11."""
    args = call.args
    keys = [f"--{key}" for key, _ in call.keys if key != "seed"]
    words = {"FILE": args.file, "--plan": args.plan, "--all": args.all}
    beside = [*(word for word, value in words.items() if value), *keys]
    none = args.fuzz is not None and args.fuzz < 1
    if none or beside or args.static or args.witness or args.engine:
        flag = "--stack" if args.fuzz is None else f"--fuzz {args.fuzz}"
        what = "--fuzz 0: nothing to prove" if none else f"{flag} has plans and recipes of its own"
        with_them = f", beside {', '.join(beside)}" if beside else ""
        raise UsageError(
            what + with_them, where="unisono verify", fix="unisono verify --fuzz 500 --seed 3", code="V11"
        )


def _plans(call: CommandCall, seed: int) -> tuple[FuzzResult[Any], Iterable[str]]:
    folder = Path(tempfile.gettempdir()) / f"unisono-fuzz-{os.getuid()}"  # printed commands read it
    folder.mkdir(exist_ok=True)
    return fuzz(call.args.fuzz, seed, documents(folder), _counting(call, _LINE, "plans")), DIMENSIONS


def _stacks(call: CommandCall, seed: int) -> tuple[FuzzResult[Any], Iterable[str]]:
    from unisono_contrib.library import stack_fuzz

    heard = _counting(call, _STACK_LINE, "steps")
    return stack_fuzz.fuzz_stacks(call.args.stack, call.args.fuzz, seed, heard), (
        "stack",
        *stack_fuzz.DIMENSIONS,
    )


def _counting(call: CommandCall, every: int, noun: str) -> Callable[[FuzzResult[Any]], None]:
    """Says how far the fuzz is, after so many cases."""
    lines = 0

    def heard(result: FuzzResult[Any]) -> None:
        nonlocal lines
        if (done := result.proven // every) > lines:
            lines = done
            call.settings.say(f"{result.proven:>7,} {noun} are as one device, {len(result.failures)} are not")

    return heard


def _one_stack(call: CommandCall) -> Result:
    """One step, which --stack names in words."""
    text = call.args.stack
    if call.settings.dry_run:
        return call.would({"stack": text}, f"would prove {text}")
    from unisono_contrib.library import stack_fuzz

    call.settings.note(f"proving {text} (importing torch) ...")
    case, verdict = stack_fuzz.prove_stack(text)
    call.settings.say(f"{case.plan}\n    {verdict}")
    failure = stack_fuzz.failure_of(case, verdict)
    return {"results": [failure.as_dict()], "pass": verdict.passed}


def lines_of(result: FuzzResult[Any], dimensions: Iterable[str], noun: str = "plans") -> list[str]:
    """What stands at the end: what was seen, what was refused, and what is wrong with the command that shows it."""
    values: dict[str, list[str]] = {key: [] for key in dimensions}
    for (key, value), number in sorted(result.seen.items()):
        values.setdefault(key, []).append(f"{value} {number}")
    lines = [f"{key:<24} {'  '.join(texts)}" for key, texts in values.items() if texts]
    refused: Counter[str] = result.refused
    lines += [f"{sum(refused.values()):,} drawn {noun} were refused, most often"] if refused else []
    lines += [f"{number:>7,}  {kind}" for kind, number in refused.most_common(_REFUSALS)]
    for failure in result.failures:
        row = failure.as_dict()
        lines += [f"WRONG  {row['plan']}", f"    {row['why']}", f"    {row['command']}"]
    unproven = f", {result.unproven:,} have bounds so wide that nothing is shown" if result.unproven else ""
    return [
        *lines,
        f"{result.proven:,} drawn {noun} are as one device, {len(result.failures)} are not{unproven}",
    ]
