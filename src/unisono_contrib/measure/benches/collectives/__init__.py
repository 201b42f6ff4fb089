"""`unisono bench collectives`: every algorithm of the family by operation and size, beside torch's process group."""

import argparse
from collections.abc import Sequence
from typing import Any

from unisono.comm.collectives import COLLECTIVES
from unisono.report import picture
from unisono.report.picture import BarChart, LineChart
from unisono.spec import words
from unisono.spec.errors import UsageError
from unisono_contrib.measure.benches import Bench, Row, chosen, columns, sizes_of, times_as_fast

OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "scatter", "gather")
PEER = "gloo"


def least_bytes(op: str, nbytes: int, size: int) -> float:
    """What the busiest of `size` ranks must send at least, whatever the algorithm. nbytes: of the whole vector, of
    which scattered and gathered parts are an equal share each (Patarasuk and Yuan 2009 for the all-reduce)."""
    share = nbytes / size
    return {
        "all_reduce": 2 * (size - 1) * share,
        "broadcast": float(nbytes if size > 1 else 0),
        "reduce": float(nbytes if size > 1 else 0),
        "gather": share if size > 1 else 0.0,
    }.get(op, (size - 1) * share)


class CollectivesBench(Bench):
    """The collectives bench."""

    name = "collectives"
    about = "each algorithm by operation and size, beside the process group's own"

    def flags(self, parser: argparse._ArgumentGroup) -> None:
        parser.add_argument(
            "--sizes", default="4KiB,64KiB,1MiB,16MiB", metavar="LIST", help="of a whole vector"
        )
        parser.add_argument("--ops", metavar="LIST", help=f"some of {','.join(OPS)}")
        parser.add_argument(
            "--rounds",
            type=int,
            default=0,
            metavar="N",
            help="turns of each line, instead of --seconds; 9 or more give a narrow interval of the ratio",
        )
        parser.add_argument("--collectives", metavar="LIST", help="some of the family, with options (all)")

    def ask(self, args: argparse.Namespace, ranks: int) -> dict[str, Any]:
        texts = args.collectives.split(",") if args.collectives else list(COLLECTIVES.names())
        for text in texts:
            COLLECTIVES.read(text, "--collectives")
        if args.rounds < 0:
            raise UsageError(f"{args.rounds} rounds", where="--rounds", fix="--rounds 9", code="C02")
        ops = chosen(args.ops, OPS, "--ops")
        return {"sizes": sizes_of(args.sizes), "ops": ops, "members": texts, "rounds": args.rounds}

    def table(self, rows: Sequence[Row]) -> list[str]:
        head = (
            "operation",
            "size",
            "algorithm",
            "time",
            "90 % within",
            "speed",
            "sent",
            "least",
            "as gloo",
            "90 % sure",
        )
        lines = [
            (
                row["op"], words.nbytes(row["bytes"]), row["algorithm"], words.seconds(row["seconds"]),
                f"{words.seconds(row['seconds_p05'])} to {words.seconds(row['seconds_p95'])}",
                f"{words.nbytes(row['bytes_s'])}/s",
                "–" if row["sent_bytes"] is None else words.nbytes(row["sent_bytes"]),
                words.nbytes(row["least_bytes"]), times_as_fast(row["ratio_vs_gloo"]),
                f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}",
            )
            for row in rows
            if row["skipped"] is None
        ]  # fmt: skip
        skipped = {(row["algorithm"], row["skipped"]): None for row in rows if row["skipped"] is not None}
        return [*columns(head, lines), *(f"skipped  {name}: {why}" for name, why in skipped)]

    def charts(self, rows: Sequence[Row]) -> list[BarChart | LineChart]:
        charts: list[BarChart | LineChart] = []
        ran = [row for row in rows if row["skipped"] is None]
        for op in dict.fromkeys(row["op"] for row in ran):
            largest = max(row["bytes"] for row in ran if row["op"] == op)
            bars = [
                (row["algorithm"], row["bytes_s"], f"{words.nbytes(row['bytes_s'])}/s")
                for row in ran
                if row["op"] == op and row["bytes"] == largest
            ]
            charts.append(picture.sized(f"{op} of {words.nbytes(largest)}, bytes a second", bars))
        return charts
