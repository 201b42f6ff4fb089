"""Numbers and names as people read them."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

LONGEST = 100
"""Letters of a word that may be another one misspelt; to compare longer ones takes seconds."""
PART_NAMES = {
    "data": "input",
    "forward": "forward",
    "backward": "backward",
    "weight": "weight gradients",
    "comm_exposed": "communication, exposed",
    "comm_hidden": "communication, hidden",
    "wait": "waiting",
    "optim": "optimiser",
    "other": "other",
}


# What a step's line of metrics may say beside its loss, by its key there.
INSTRUMENTS = {
    "staleness": "staleness",
    "consensus": "consensus distance",
    "effective_batch": "effective batch",
    "idle_share": "idle share",
    "cohort": "peers in the round",
    "epsilon": "epsilon",
    "noise_scale": "gradient noise scale",
    "reward": "reward",
    "kl_sampler": "KL(sampler, trainer)",
    "val_gap": "generalisation gap",
}


# What the ranks of an axis send each other in a step, and how: `KIND, how (axis)`.
_SENT = {
    "dp.all_reduce": "gradients",
    "shard.all_gather": "parameters",
    "shard.reduce_scatter": "gradients",
    "replica.all_reduce": "gradient norm",
    "pp.send": "between stages",
    "tp.all_gather": "activations",
    "tp.reduce_scatter": "activations",
    "tp.all_reduce": "activations",
}


def traffic(axis: str, op: str) -> str:
    """What is sent, in words of the field: `gradients, all-reduce (dp)`. axis: of the mesh, or `replica`: all ranks of
    one replica, which add up the norm for clipping. op: a collective, or send."""
    said = ", ".join(word for word in (_SENT.get(f"{axis}.{op}", ""), op.replace("_", "-")) if word)
    return said if axis in ("replica", "") else f"{said} ({axis})"


def exposed(axis: str) -> str:
    """What the time that such communication takes is called: `communication (dp)`, `gradient norm`."""
    return _SENT["replica.all_reduce"] if axis == "replica" else f"communication ({axis})"


def seconds(value: float) -> str:
    """`139 ms`, `2.3 s`, `1 h 05 min`, `83.2 days`."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    if value >= 2 * 86400:
        days = value / 86400
        return f"{days:.3g} days" if days < 1000 else f"{days:,.0f} days"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def nbytes(value: float) -> str:
    """`512 B`, `1.2 KiB`, `34 MiB`, `27.1 TiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1000 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"
        value /= 1024
    return ""


def mebibytes(value: float) -> str:
    """A size in MiB: `310 MiB`, `1.25 GiB`."""
    return nbytes(value * 2**20)


def count(value: float) -> str:
    """`940`, `28.9k`, `1.2M`."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.3g}"


def whole(text: str) -> int | None:
    """The number of 0 or more that a text is in plain digits, 18 of them at most; None where it is none."""
    return int(text) if len(text) <= 18 and text.isascii() and text.isdigit() else None


def percent(fraction: float) -> str:
    """`0.823` as `82 %`; below ten percent with one digit."""
    value = 100 * fraction
    return f"{value:.0f} %" if value >= 9.95 or value < 0.05 else f"{value:.1f} %"


def number(value: Any, digits: int = 4) -> str:
    """A figure for a tile; a dash for what is not a number."""
    return f"{value:.{digits}g}" if isinstance(value, int | float) else "–"


def is_number(value: Any) -> bool:
    """A figure, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def instrument(key: str, value: float) -> str:
    """`staleness 1.5`, `idle share 12 %`. key: of `INSTRUMENTS`."""
    return f"{INSTRUMENTS[key]} {percent(value) if key == 'idle_share' else f'{value:.3g}'}"


def listed(items: Sequence[object], most: int = 6) -> str:
    """1, 2, 3 … and 5 more."""
    shown = ", ".join(map(str, items[:most]))
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"


def nearest(word: str, words: Iterable[str]) -> str:
    """The word that was probably meant, or ""; among near ones, one with the same first letter. The dashes before flags
    say nothing: `--lr` is not near to `--rank`."""
    if len(word) > LONGEST:
        return ""
    plain = {known.lstrip("-"): known for known in words}
    letters = word.lstrip("-").lower()
    close = get_close_matches(letters, list(plain), n=3, cutoff=0.5)
    same = [c for c in close if c[0] == letters[:1]]
    return plain.get((same or close or [""])[0], "")


def meant(word: str, words: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing."""
    close = nearest(word, words)
    return f"; did you mean {close}?" if close else ""


def relative_error(error: float | None) -> str:
    """`1.2e-15`; `=` for none at all, `none` for one without bound, `-` where nothing was compared."""
    if error is None:
        return "-"
    if not error:
        return "="
    return "none" if error >= 1e300 else f"{error:.1e}"
