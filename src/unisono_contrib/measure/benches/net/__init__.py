"""`unisono bench net`: latency and bandwidth between ranks, beside a plain TCP connection between the same two."""

import argparse
from collections.abc import Sequence
from typing import Any

from unisono.report import picture
from unisono.report.picture import BarChart, LineChart
from unisono.spec import words
from unisono_contrib.measure.benches import Bench, Row, columns, sizes_of, times_as_fast


class NetBench(Bench):
    """The net bench."""

    name = "net"
    about = "latency and bandwidth between ranks, beside plain TCP"

    def flags(self, parser: argparse._ArgumentGroup) -> None:
        parser.add_argument("--messages", default="8,64KiB,4MiB", metavar="LIST", help="their sizes")
        parser.add_argument("--pairs", type=int, default=6, metavar="N", help="of ranks, at most (6)")

    def ask(self, args: argparse.Namespace, ranks: int) -> dict[str, Any]:
        return {"sizes": sizes_of(args.messages), "pairs": pairs(ranks, args.pairs)}

    def table(self, rows: Sequence[Row]) -> list[str]:
        head = ("from", "to", "message", "ways", "time", "90 % within", "speed", "as TCP")
        lines = [
            (
                f"{row['from']} {row['from_host']}", f"{row['to']} {row['to_host']}", words.nbytes(row["bytes"]),
                row["ways"], words.seconds(row["seconds"]),
                f"{words.seconds(row['seconds_p05'])} to {words.seconds(row['seconds_p95'])}",
                f"{8e-6 * row['bytes_s']:.4g} Mbit/s", times_as_fast(row["ratio_vs_tcp"]),
            )
            for row in rows
        ]  # fmt: skip
        return columns(head, lines)

    def charts(self, rows: Sequence[Row]) -> list[BarChart | LineChart]:
        named = [(f"{row['from']} to {row['to']}, {row['ways']}", row) for row in rows]
        least, most = min(row["bytes"] for row in rows), max(row["bytes"] for row in rows)
        late = [
            (n, row["seconds"], words.seconds(row["seconds"])) for n, row in named if row["bytes"] == least
        ]
        fast = [
            (n, row["bytes_s"], f"{8e-6 * row['bytes_s']:.4g} Mbit/s")
            for n, row in named
            if row["bytes"] == most
        ]
        return [
            picture.sized(f"Time of a message of {words.nbytes(least)}, one way", late),
            picture.sized(f"Bandwidth of messages of {words.nbytes(most)}, each way", fast),
        ]


def pairs(ranks: int, most: int) -> list[list[int]]:
    """Of ranks: all while there are few, then those of each rank with the next, as many as asked for."""
    near = [[a, a + 1] for a in range(ranks - 1)]
    far = [[a, b] for a in range(ranks) for b in range(a + 2, ranks)]
    return [*near, *far][:most]
