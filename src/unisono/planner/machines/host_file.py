"""The [host] of a cluster file."""

import itertools
from dataclasses import fields

from unisono.planner.machines.host import Curve, Host, Pace
from unisono.planner.tables import Table
from unisono.spec.words import whole

_KEYS = (
    "cores",
    "crowd",
    "error",
    "step_us",
    "update_us",
    "forward",
    "backward",
    "curves",
    "calls_us",
    "copies_us",
    "memory_mb",
)


def host_from(table: Table) -> Host:
    """The [host] of a cluster file. Raises UsageError with file and line for what is wrong in it."""
    table.known(_KEYS)
    cores = table.count("cores", 0)
    if not cores:
        raise table.wrong("a host has at least one core", "cores", "cores = 2")

    def pace(key: str) -> Pace:
        own = table.table(key) if key in table.values else None
        if own is None:
            raise table.wrong(f"{key} is missing", "", f"[host.{key}], as unisono calibrate writes it")
        own.known([f.name for f in fields(Pace)])
        # In files of earlier versions convolutions are products like all others.
        usual = {"convolution": own.number("product", 1.0, 0.0)[0]}
        return Pace(
            **{
                f.name: own.number(f.name, 1e-6 if f.name == "launch" else 1e-12, usual.get(f.name, 0.0))[0]
                for f in fields(Pace)
            }
        )

    curves: dict[str, Curve] = {}
    if "curves" in table.values:
        own = table.table("curves")
        for key, points in own.values.items():
            curves[key] = _curve(own, key, points)
    memory = table.table("memory_mb") if "memory_mb" in table.values else None
    update = _numbers(table, "update_us", 3)
    return Host(
        cores=cores,
        forward=pace("forward"),
        backward=pace("backward"),
        update=(update[0] * 1e-6, update[1] * 1e-6, update[2] * 1e-6),
        step=table.number("step_us", 1e-6, 0.0)[0],
        crowd=table.number("crowd", 1.0, 1.0)[0],
        error=table.number("error", 1.0, 0.15)[0],
        curves=curves,
        calls=_by_axis(table, "calls_us", 1e-6),
        copies=_by_axis(table, "copies_us", 1e-12),
        memory=_memory(memory) if memory else {},
    )


def _by_axis(table: Table, key: str, unit: float) -> dict[str, float]:
    own = table.table(key) if key in table.values else None
    return {axis: own.number(axis, unit)[0] for axis in own.values} if own else {}


def _memory(table: Table) -> dict[str, tuple[float, float, float]]:
    found = {}
    for axis in table.values:
        fixed, share, whole = _numbers(table, axis, 3)
        found[axis] = (fixed * 1e6, share, whole)
    return found


def _numbers(own: Table, key: str, count: int) -> list[float]:
    given = own.values.get(key)
    if not isinstance(given, list) or len(given) != count or not all(map(_is_number, given)):
        raise own.wrong(f"{key} is {count} numbers of 0 or more", key, "unisono calibrate writes them")
    return [float(one) for one in given]


def _curve(own: Table, key: str, points: object) -> Curve:
    op, _, ranks = key.partition(":")
    right = isinstance(points, list) and len(points) > 0 and op != "" and (whole(ranks) or 0) > 1
    if not right or not all(isinstance(p, list) and len(p) == 2 and all(map(_is_number, p)) for p in points):  # type: ignore[union-attr]
        raise own.wrong(f"{key} is a list of [bytes, microseconds]", key, '"all_reduce:2" = [[4096, 450.0]]')
    line = [(float(n), float(us) * 1e-6) for n, us in points]  # type: ignore[union-attr]
    if any(b[0] <= a[0] for a, b in itertools.pairwise(line)) or any(s <= 0 or n <= 0 for n, s in line):
        raise own.wrong(
            f"{key}: bytes rise and nothing takes no time", key, '"all_reduce:2" = [[4096, 450.0]]'
        )
    return Curve(tuple(n for n, _ in line), tuple(s for _, s in line))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
