"""The rows of other engines, as lines and as the object of --json."""

from typing import Any

from unisono.spec.settings import Settings
from unisono.spec.words import relative_error
from unisono_contrib.verify.engines.beside import BOUND, KINDS, EngineRow
from unisono_contrib.verify.engines.session import EngineSession


def tell_rows(beside: EngineSession, settings: Settings) -> dict[str, Any]:
    """Play all engines and print a line for each answer; `results` and `pass` as `verify` has them."""
    settings.note(f"the same steps by {', '.join(engine.name for engine in beside.engines)} ...")
    tables = list(beside.tables())
    rows = [row for table in tables for row in table.rows]
    width = max([24, *(len(row.plan) for row in rows)])
    heads = " ".join(f"{kind:>8}" for kind in (*KINDS, "bound"))
    settings.say(f"{'engine':<7} {'plan':<{width}} {'ranks':>5} {'against':<16} {heads}")
    for row in rows:
        settings.say(_line(row, width))
    for engine in dict.fromkeys(odd for table in tables for odd in table.odd()):
        settings.say(f"    likely  {engine}'s one device is wrong: the other engines agree with each other")
    shown = [] if beside.covering else beside.refused
    for left in shown:
        error = left.error.as_dict()
        settings.say(f"{left.engine:<7} {left.plan}  refused: {error['code']} {error['what']}")
    if beside.covering and beside.refused:
        settings.say(f"note: {len(beside.refused)} times a plan is none that an engine plays")
    good = sum(row.passed for row in rows)
    settings.say(f"{good} of {len(rows)} answers are those of the other engines' one device, to {BOUND:g}")
    refused = [_refused(left.engine, left.plan, left.error.as_dict()) for left in shown]
    return {
        "results": [*(row.as_dict() for row in rows), *refused],
        "pass": good == len(rows) and not refused,
    }


def _line(row: EngineRow, width: int) -> str:
    numbers = " ".join(
        f"{relative_error(row.max_rel_err[kind]) if kind in row.max_rel_err else '-':>8}" for kind in KINDS
    )
    text = f"{row.engine:<7} {row.plan:<{width}} {row.ranks:>5} {'+'.join(row.against):<16} {numbers}"
    text += f" {relative_error(row.bound):>8}  {'ok' if row.passed else 'FAIL'}"
    return text if row.passed else f"{text}\n    first   {row.first_divergence}"


def _refused(engine: str, plan: str, error: dict[str, Any]) -> dict[str, Any]:
    return {
        "engine": engine, "plan": plan, "ranks": None, "against": [], "max_rel_err": None,
        "first_divergence": None, "pass": False, "refused": error,
    }  # fmt: skip
