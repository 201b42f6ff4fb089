"""`unisono calibrate`: measure this machine in about two minutes, and write it down as a cluster. No torch here.

Every kind of measurement runs in ranks of its own, forked from one process: kernels and steps of ranks that compute
alone, as many as there are cores; the same with two to a core; collectives; and short runs under one axis each.
"""

import itertools
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from unisono.launch.fork_server import ForkServer
from unisono.measure.file import FittedHost, as_toml, gpus_as_toml
from unisono.observe.files import write_whole
from unisono.plan import Plan
from unisono.spec.errors import UsageError

ENTRY = "unisono.measure.rank:main"
_SILENCE = 120.0


def sizes(n_layer: int, n_head: int, d_model: int, context: int, vocab: int = 256) -> dict[str, Any]:
    return {"n_layer": n_layer, "n_head": n_head, "d_model": d_model, "context": context, "vocab": vocab}


def pictures(side: int, kind: str, **own: Any) -> dict[str, Any]:
    return {"kind": kind, "image": (3, side, side), "classes": 10, **own}


# Widths, lengths, batches and vocabularies apart from each other, so that each unit of a pace shows.
ALONE: tuple[dict[str, Any], ...] = (
    {"sizes": sizes(2, 4, 128, 64), "batch": 6},
    {"sizes": sizes(2, 4, 128, 64), "batch": 2},
    {"sizes": sizes(2, 4, 128, 64), "batch": 4, "micro_batch": 1},
    {"sizes": sizes(2, 4, 256, 64), "batch": 4},
    {"sizes": sizes(4, 5, 320, 128), "batch": 4},
    {"sizes": sizes(4, 5, 320, 128), "batch": 2, "micro_batch": 1},
    {"sizes": sizes(2, 8, 512, 128), "batch": 2},
    {"sizes": sizes(2, 8, 512, 64), "batch": 1},
    {"sizes": sizes(2, 4, 192, 256), "batch": 2},
    {"sizes": sizes(2, 4, 64, 128), "batch": 8},
    {"sizes": sizes(2, 4, 128, 64, 4096), "batch": 8},
    {"sizes": sizes(3, 6, 384, 128), "batch": 2},
    {"sizes": sizes(2, 4, 128, 64), "batch": 4, "dropout": 0.1},
    {"sizes": pictures(16, "convnet", n_layer=3, channels=16), "batch": 8},
    {"sizes": pictures(32, "convnet", n_layer=4, channels=32), "batch": 4},
    {"sizes": pictures(16, "mlp", hidden=(256, 256, 256)), "batch": 32},
    {"sizes": pictures(28, "mlp", hidden=(768, 512)), "batch": 8},
)
CROWDED = (ALONE[0], ALONE[4], ALONE[6])


def together(ranks: int, cores: int) -> list[dict[str, Any]]:
    """Short runs on so many ranks, each under one axis; pipelines also with two replicas. One is large enough for
    blocks of memory that the C library hands back (`launch.heap`). Pipelines of ranks with cores of their own come
    first and last: how late one wakes is what a machine that others share changes most from minute to minute."""
    asks: list[dict[str, Any]] = []
    pipes: list[dict[str, Any]] = []
    large = 4 if ranks <= cores else 2
    shapes = (sizes(4, 4, 96, 64), 2), (sizes(6, 8, 320, 64), 2), (sizes(4, 8, 320, 128), large)
    for shape, share in shapes:
        for plan in (f"shard={ranks} zero=3", f"tp={ranks}", f"dp={ranks}"):
            asks.append({"sizes": shape, "batch": share * ranks, "plan": plan})
    for shape, most in ((sizes(4, 4, 96, 64), 16), (sizes(4, 4, 224, 64), 8)):
        for micros in (4, most):  # few and many messages
            pipes.append({"sizes": shape, "batch": 16, "plan": f"pp={ranks} micros={micros}"})
        if ranks > 2:
            pipes.append({"sizes": shape, "batch": 16, "plan": f"dp={ranks // 2} pp=2 micros=4"})
    again = pipes[: len(pipes) // 2] if ranks <= cores else []  # the short ones, which tell it best
    return [*pipes, *asks, *again]


def run(
    out: Path, say: Callable[[str], None], tick: Callable[[float], None] = lambda share: None
) -> Mapping[str, Any]:
    """Measure, fit, write `out`. The object of --json. tick: told the share of all measurements that is done, after
    each. Raises UsageError where `out` cannot be written."""
    begun = time.perf_counter()
    cores = len(os.sched_getaffinity(0))
    _writable(out)
    worlds = sorted({2, max(2, min(8, 2 * cores))})
    plays = 3 + sum(2 + len(together(world, cores)) for world in worlds)
    with ForkServer(ENTRY) as nursery:
        play = _player(nursery, plays, tick)
        if gpus := play({"ask": "devices"}, 1)[0]["gpus"]:
            return _gpus(play, gpus, out, say, begun)
        say(f"{cores} cores: kernels and steps of ranks that compute alone ...")
        alone = play({"ask": "alone", "kernels": True, "steps": ALONE, "least": 0.35}, cores)[0]
        say("the same with two ranks to a core ...")
        crowded = play({"ask": "alone", "kernels": False, "steps": CROWDED, "least": 0.35}, 2 * cores)[0]
        met: dict[int, Any] = {}
        for world in worlds:
            say(f"collectives and plans on {world} ranks ...")
            met[world] = _meet(play, world, cores)
    measured = _measured(cores, alone, crowded, met)
    text = as_toml(measured, _device(alone), _origin())
    write_whole(out, text)
    seconds = time.perf_counter() - begun
    say(f"{out}: written after {seconds:.0f} s")
    return {
        "file": str(out), "seconds": seconds, "cores": cores, "errors": measured.errors(),
        "products_gflops": _best(alone["float32"]) / 1e9,
    }  # fmt: skip


def _gpus(
    play: Callable[[dict[str, Any], int], list[Any]],
    gpus: int,
    out: Path,
    say: Callable[[str], None],
    begun: float,
) -> Mapping[str, Any]:
    """One rank a GPU: its products, its memory, and the links between them. Not yet run on a GPU."""
    say(f"{gpus} GPUs: kernels ...")
    alone = play({"ask": "alone", "kernels": True, "steps": [], "least": 0.0}, gpus)[0]
    met = None
    if gpus > 1:
        say(f"collectives between {gpus} GPUs ...")
        met = play({"ask": "together", "collectives": True, "steps": [], "least": 0.0}, gpus)[0][
            "collectives"
        ]
    write_whole(out, gpus_as_toml(alone["name"], _device(alone), gpus, int(alone["units"]), met, _origin()))
    seconds = time.perf_counter() - begun
    say(f"{out}: written after {seconds:.0f} s")
    return {
        "file": str(out),
        "seconds": seconds,
        "gpus": gpus,
        "products_gflops": _best(alone["float32"]) / 1e9,
    }


def _player(
    nursery: ForkServer, plays: int, tick: Callable[[float], None]
) -> Callable[[dict[str, Any], int], list[Any]]:
    done = itertools.count(1)

    def play(argument: dict[str, Any], ranks: int) -> list[Any]:
        outcome = nursery.run(argument, ranks, 1, _quietly, _SILENCE)
        if outcome.error is not None:
            raise outcome.error
        tick(min(1.0, next(done) / plays))
        return outcome.results

    return play


def _quietly(rank: int, event: dict[str, Any]) -> None:
    if event["kind"] == "output":
        print(f"rank {rank} | {event['text']}", file=sys.stderr)


def _meet(play: Callable[[dict[str, Any], int], list[Any]], world: int, cores: int) -> dict[str, Any]:
    """Seconds of collectives, and parts of a step of short runs, on `world` ranks.

    Each run has processes of its own, so that their peak of memory is the run's. A collective takes some milliseconds,
    and another program may disturb it. So all are measured before the runs and after, and the shorter time counts.
    """

    def collectives() -> list[Any]:
        return play({"ask": "together", "collectives": True, "steps": [], "least": 0.0}, world)[0][
            "collectives"
        ]

    first, rows = collectives(), []
    for ask in together(world, cores):
        seen = play({"ask": "together", "collectives": False, "steps": [ask], "least": 0.35}, world)
        rows.append(
            {
                **ask, "parts": seen[0]["steps"][0], "calls": seen[0]["calls"][0],
                "peak": max(one["peak"] for one in seen),
            }
        )  # fmt: skip
    least = [
        (op, size, min(before, after))
        for (op, size, before), (*_, after) in zip(first, collectives(), strict=True)
    ]
    return {"collectives": least, "rows": rows}


def _measured(cores: int, alone: Any, crowded: Any, met: Mapping[int, Any]) -> FittedHost:
    from unisono.measure import fit

    single = [_row(ask, parts, 1) for ask, parts in zip(ALONE, alone["steps"], strict=True)]
    two = [_row(ask, parts, 2 * cores) for ask, parts in zip(CROWDED, crowded["steps"], strict=True)]
    pairs = {world: [_row(row, row["parts"], world) for row in one["rows"]] for world, one in met.items()}
    curves = {}
    for world, one in met.items():
        inside = [call for row in one["rows"] for call in row["calls"]]
        curves |= fit.curves(world, one["collectives"], inside)
    return fit.host(cores, single, two, curves, [row for rows in pairs.values() for row in rows])


def _row(ask: Mapping[str, Any], parts: Mapping[str, float], world: int) -> Any:
    from unisono.measure import fit

    plan = Plan.parse(ask.get("plan", "dp=1")).fill(world if "plan" in ask else 1)
    replicas = plan.dp * plan.shard
    micro_batch = ask.get("micro_batch") or ask["batch"] // replicas // (plan.micros or 1)
    micros = ask["batch"] // replicas // micro_batch
    return fit.Played(
        fit.model_of(ask["sizes"], ask.get("dropout", 0.0)), micro_batch, micros, parts, plan,
        ask.get("peak", 0.0), world,
    )  # fmt: skip


def _device(alone: Mapping[str, Any]) -> dict[str, float]:
    """What a cluster file says of a device: peak by dtype, memory, its bandwidth."""
    memory = alone.get("memory") or psutil.virtual_memory().total
    peak = {"fp32": _best(alone["float32"])}
    if "bfloat16" in alone:
        peak["bf16"] = _best(alone["bfloat16"])
    copied = max(alone["copies"], key=lambda one: one[0])
    return {"memory": float(memory), "bandwidth": copied[0] / copied[1], "launch": alone["launch"]} | {
        f"peak {name}": rate for name, rate in peak.items()
    }


def _best(products: Sequence[Sequence[float]]) -> float:
    """FLOP/s of the fastest product."""
    return max(2.0 * m * k * n / seconds for m, k, n, seconds in products)


def _origin() -> str:
    return f"{platform.machine()}, {time.strftime('%Y-%m-%d')}, unisono calibrate"


def _writable(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        probe = out.with_name(f".{out.name}.{os.getpid()}")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"cannot write {out}: {error.strerror}",
            where="--out",
            fix="--out FILE.toml in a folder of yours",
            code="E02",
        ) from None
