"""Steps over slow links: each codec beside DDP fp32 and beside ours without one, interleaved in one run.

    python benchmarks/slow_links.py                 100 Mbit/s and 1 Gbit/s, 2 and 4 hosts, 3M and 13M: about 10 minutes
    python benchmarks/slow_links.py --quick         100 Mbit/s, 3M: about 3 minutes
    python benchmarks/slow_links.py --rates 100mbit --hosts 2 --sizes 3M --seconds 20
    python benchmarks/slow_links.py --codecs int8 topk:ratio=0.01+ef --intensity 8

Hosts are those of `unisono lab`, one rank each. Gradients are those of a seeded GPT and are replayed: computing is
replaced by waiting, and each gradient is there when a real backward would have it (`replay.py`). `--intensity` says how
long a step computes: the time that the link takes for DDP's bytes, over the step's computation (32: a GPU).

time: of a step, the median, and where nine tenths of the steps lie. `of DDP`, `of plain`: that time over theirs, the
median over turns; below 1 it is faster. sent: payload that a rank counts. `of fp32`: over 2 (n-1)/n bytes of the
gradients. device: bytes that left the host, with heads of frames and barriers. bound: the scheme's least bytes (see
`bound`), and sent over it. Targets are marked `yes` or `NO` beside the figures that they are about; that of `auto` is
to be no slower than plain by more than chance, which is nine tenths of the turns.

At 1 Gbit/s fewer codecs run, and torch's hooks run where a step is short. CODEC@BYTES has exchanges of so many bytes
of gradients in the place of the codec's own choice, CODEC@0 one for each bucket.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from unisono.codecs import CODECS
from unisono.launch.fork_server import ForkServer
from unisono.spec import words
from unisono.spec.errors import Skipped, UsageError
from unisono_contrib.lab.links import LabLink, rate_of
from unisono_contrib.lab.network import LabNetwork, require
from unisono_contrib.measure.benches import columns, spread

DDP, PLAIN = "DDP fp32", "plain"
HOOKS = ("torch fp16 hook", "torch bf16 hook", "torch PowerSGD hook, rank 4")
CODECS_ASKED = ("cast:bf16", "int8", "int4+ef", "powersgd:r=4+ef", "topk:ratio=0.01,kind=chunked+ef", "auto")
AT_EASE = ("cast:bf16", "int8", "auto")  # above SLOW, if nothing else is asked for
AT_EASE_SECONDS = 15.0
# At most so much of fp32's payload; at 100 Mbit/s also of DDP's time, plus MORE. Sent over the bound at most WITHIN.
TARGETS = {"cast:bf16": 0.52, "int8": 0.28, "int4+ef": 0.16, "powersgd:r=4+ef": 0.06}
TARGETS |= {"topk:ratio=0.01,kind=chunked+ef": 0.08}
MORE, WITHIN, SLOW = 0.05, 1.15, 100e6
DENSE = 256  # parameters of fewer elements, or of one dim, go whole under top-k


def bound(codec: str, shapes: Sequence[Sequence[int]], world: int, whole: bool = True) -> float | None:
    """Bytes that a rank must send in a step under this scheme, done in the best way; None for others. Of a sum that is
    (n-1)/n of the numbers twice, in so many bytes each, with a scale for each block; of a gather what others lack.
    Top-k sends norms and biases whole, which are a sum; whole=False: of all parameters the chosen elements alone."""
    numel, share = sum(map(prod, shapes)), 2 * (world - 1) / world
    body, _, _ = codec.partition("@")[0].partition("+")
    name, _, options = body.partition(":")
    match name:
        case "plain":
            return share * 4 * numel
        case "cast" if options in ("bf16", "fp16"):
            return share * 2 * numel
        case "int8":
            return share * numel * (1 + 2 / 256)
        case "int4":
            return share * numel * (1 + 4 / 64) / 2
        case "powersgd":
            rank = int(options.partition("=")[2] or 4)
            thin = sum(rank * (shape[0] + prod(shape[1:])) for shape in shapes if len(shape) > 1)
            return share * 4 * (thin + sum(prod(shape) for shape in shapes if len(shape) < 2))
        case "topk":
            said = dict(part.split("=") for part in options.split(",") if "=" in part)
            dense = (
                sum(prod(shape) for shape in shapes if len(shape) < 2 or prod(shape) < DENSE) if whole else 0
            )
            chosen = float(said.get("ratio", 0.01)) * (numel - dense)
            return (world - 1) * chosen * 6 + share * 4 * dense  # a value in 4 bytes, a place in 2
    return None


def there(asked: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(codecs that exist, why the others do not)."""
    found, missing = [], {}
    for text in asked:
        try:
            CODECS.read(text.partition("@")[0], "--codecs")
        except UsageError as error:
            missing[text] = error.what
        else:
            found.append(text)
    return found, missing


def main() -> int:
    options = arguments()
    codecs, missing = there(options.codecs)
    for text, why in missing.items():
        print(f"skipped codec {text}: {why}")
    try:
        require(LabLink(SLOW))
    except Skipped as error:
        print(error.render(), file=sys.stderr)
        return error.exit
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} at the start")
    rows: list[dict[str, Any]] = []
    begun = time.perf_counter()
    with ForkServer("replay:main", path=[str(Path(__file__).parent)]) as nursery:
        for rate in options.rates:
            for hosts in options.hosts:
                for size in options.sizes:
                    rows += cell(nursery, rate, hosts, size, ways_of(codecs, rate, size, options), options)
                    if options.json:  # after each cell, for what is cut off
                        told = json.dumps({"schema_version": 1, "rows": rows}, indent=1)
                        Path(options.json).write_text(told + "\n")
    missed = [row for row in rows if row["met"] is False]
    print(f"\n{(time.perf_counter() - begun) / 60:.1f} minutes, load {os.getloadavg()[0]:.1f}")
    print(f"{len(missed)} of {sum(row['met'] is not None for row in rows)} rows with a target miss it")
    return 1 if missed and options.strict else 0


def ways_of(codecs: Sequence[str], rate: float, size: str, options: argparse.Namespace) -> list[str]:
    """What takes turns in one cell."""
    slow = rate <= SLOW or options.codecs != list(CODECS_ASKED)
    played = [text for text in codecs if text != PLAIN and (slow or text in AT_EASE)]
    return [DDP, PLAIN, *played, *(HOOKS if options.hooks and rate <= SLOW and size == "3M" else ())]


def cell(
    nursery: ForkServer, rate: float, hosts: int, size: str, ways: Sequence[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One rate, number of hosts and size."""
    with LabNetwork(hosts, LabLink(rate)) as network:
        asked = {
            "doors": list(network.doors), "size": size, "rate": rate, "ways": list(ways), "turns": options.turns,
            "seconds": min(options.seconds, AT_EASE_SECONDS) if rate > SLOW else options.seconds,
            "intensity": options.intensity,
        }  # fmt: skip
        outcome = nursery.run(asked, hosts, 1, timeout=900.0, backend="gloo")
    if outcome.error is not None or outcome.results[0] is None:
        raise SystemExit(outcome.why())
    got: Any = outcome.results[0]
    rows = [row_of(name, got, rate, hosts, size) for name in got["took"]]
    turns = len(got["took"][DDP]["seconds"])
    print(
        f"\n{rate / 1e6:g} Mbit/s, {hosts} hosts, {size} ({got['numel'] / 1e6:.1f} M parameters), {turns} turns; "
        f"a step computes {words.seconds(got['compute'])}; load {got['load']:.1f}"
    )
    for line in table(rows):
        print(line, flush=True)
    for row in rows:
        if row["bound_bare_bytes"]:
            print(f"{row['way']}: {row['bound_bare_ratio']:.3f} of the bound for the chosen elements alone")
    for name, why in got["refused"].items():
        print(f"skipped {name}: {why}")
    return rows


def row_of(name: str, got: Mapping[str, Any], rate: float, hosts: int, size: str) -> dict[str, Any]:
    took = got["took"]
    mine = took[name]
    dense = bound("plain", got["shapes"], hosts) or 1.0
    payload = statistics.median(mine["payload"])
    sent = payload if payload >= 0 else (dense if name == DDP else None)
    least = bound("plain" if name == DDP else name, got["shapes"], hosts)
    bare = bound(name, got["shapes"], hosts, whole=False) if name.startswith("topk") else None
    row: dict[str, Any] = {
        "way": name, "rate_bit_s": rate, "hosts": hosts, "size": size, "turns": len(mine["seconds"]),
        "load": got["load"], "compute_s": got["compute"], **spread(mine["seconds"]),
        **ratios("ratio_vs_ddp", mine["seconds"], took[DDP]["seconds"]),
        **ratios("ratio_vs_plain", mine["seconds"], took[PLAIN]["seconds"]),
        "sent_bytes": sent, "payload_ratio": None if sent is None else sent / dense,
        "device_bytes": statistics.median(mine["device"]),
        "device_ratio_vs_ddp": statistics.median(mine["device"]) / statistics.median(took[DDP]["device"]),
        "bound_bytes": least, "bound_ratio": None if sent is None or not least else sent / least,
        "bound_bare_bytes": bare, "bound_bare_ratio": None if sent is None or not bare else sent / bare,
    }  # fmt: skip
    return {**row, **judged(row)}


def ratios(key: str, mine: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Turn by turn: the median, and where nine tenths of them lie."""
    found = spread([a / b for a, b in zip(mine, theirs, strict=True)])
    return {key: found["seconds"], f"{key}_p05": found["seconds_p05"], f"{key}_p95": found["seconds_p95"]}


def judged(row: Mapping[str, Any]) -> dict[str, bool | None]:
    """Whether a row meets what is asked of its codec: payload, bytes beside the bound, and at 100 Mbit/s time. Of
    `auto` nothing is asked but to be no slower than plain."""
    if row["way"] == "auto":
        quick = row["ratio_vs_plain_p05"] <= 1.0
        return {"payload_met": None, "bound_met": None, "time_met": None, "plain_met": quick, "met": quick}
    target = TARGETS.get(row["way"])
    if target is None or row["payload_ratio"] is None:
        return {"payload_met": None, "bound_met": None, "time_met": None, "met": None}
    payload = row["payload_ratio"] <= target
    within = row["bound_ratio"] is not None and row["bound_ratio"] <= WITHIN
    quick = row["ratio_vs_ddp"] <= target + MORE if row["rate_bit_s"] == SLOW else None
    return {
        "payload_met": payload,
        "bound_met": within,
        "time_met": quick,
        "met": payload and within and quick is not False,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    head = (
        "way",
        "time",
        "90 % within",
        "of DDP",
        "90 % within",
        "of plain",
        "sent",
        "of fp32",
        "device",
        "bound",
        "sent/bound",
    )
    return columns(head, [_line(row) for row in rows])


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    def told(value: float | None, met: bool | None = None) -> str:
        mark = "" if met is None else " yes" if met else " NO"
        return "–" if value is None else f"{value:.3f}{mark}"

    def size(value: float | None) -> str:
        return "–" if value is None else f"{value / 1e6:.3f} MB"

    return (
        row["way"], words.seconds(row["seconds"]),
        f"{words.seconds(row['seconds_p05'])} to {words.seconds(row['seconds_p95'])}",
        told(row["ratio_vs_ddp"], row["time_met"]),
        f"{row['ratio_vs_ddp_p05']:.3f} to {row['ratio_vs_ddp_p95']:.3f}",
        told(row["ratio_vs_plain"], row.get("plain_met")),
        size(row["sent_bytes"]), told(row["payload_ratio"], row["payload_met"]), size(row["device_bytes"]),
        size(row["bound_bytes"]), told(row["bound_ratio"], row["bound_met"]),
    )  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--rates", nargs="+", type=rate_of, default=[100e6, 1e9], metavar="R", help="100mbit 1gbit"
    )
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--sizes", nargs="+", choices=("3M", "13M"), default=["3M", "13M"])
    parser.add_argument("--codecs", nargs="+", default=list(CODECS_ASKED), metavar="CODEC")
    parser.add_argument("--no-hooks", dest="hooks", action="store_false", help="without torch's hooks of DDP")
    parser.add_argument("--intensity", type=float, default=32.0, help="communication over computation (32)")
    parser.add_argument("--turns", type=int, default=30, help="at most, of each cell (30)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=40.0,
        help="of each cell (40; 15 above 100 Mbit/s), three turns at least",
    )
    parser.add_argument("--quick", action="store_true", help="100 Mbit/s, 3M, 20 seconds a cell, no hooks")
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    parser.add_argument("--strict", action="store_true", help="leave with 1 where a target is missed")
    options = parser.parse_args()
    if options.quick:
        options.rates, options.sizes, options.seconds, options.hooks = [SLOW], ["3M"], 20.0, False
    return options


if __name__ == "__main__":
    sys.exit(main())
