"""`unisono bench codecs`: how fast each codec encodes and decodes, beside a copy, and what it sends."""

import argparse
from collections.abc import Sequence
from typing import Any

from unisono.codecs import CODECS
from unisono.report import picture
from unisono.report.picture import BarChart, LineChart
from unisono.spec import words
from unisono.spec.errors import UsageError
from unisono.spec.words import percent
from unisono_contrib.measure.benches import Bench, Row, columns, sizes_of, times_as_fast


class CodecsBench(Bench):
    """The codecs bench: one process on one core, which plays the other replicas by itself."""

    name = "codecs"
    about = "how fast gradients are encoded and decoded, beside a copy and torch's hooks"
    ranks = 1
    threads = 1

    def flags(self, parser: argparse._ArgumentGroup) -> None:
        parser.add_argument(
            "--sizes", default="16MiB", metavar="LIST", help="of the gradients, in fp32 (16MiB)"
        )
        parser.add_argument("--replicas", type=int, default=4, metavar="N", help="that exchange them (4)")
        parser.add_argument(
            "--codecs",
            metavar="LIST",
            help="with options, blanks between: 'int8 topk:ratio=0.01+ef' (the family)",
        )

    def ask(self, args: argparse.Namespace, ranks: int) -> dict[str, Any]:
        if args.replicas < 2:
            raise UsageError(
                "codecs send nothing to themselves", where="--replicas", fix="--replicas 4", code="C02"
            )
        if args.codecs is not None:
            for text in args.codecs.split():
                CODECS.read(text, "--codecs")
        return {
            "sizes": sizes_of(args.sizes), "replicas": args.replicas,
            "members": args.codecs.split() if args.codecs is not None else usual(),
        }  # fmt: skip

    def table(self, rows: Sequence[Row]) -> list[str]:
        head = ("codec", "encode", "whole", "encode as copy", "whole as copy", "sent", "of fp32", "declared")
        lines = [
            (
                row["codec"],
                "–" if row["encode_seconds"] is None else words.seconds(row["encode_seconds"]),
                words.seconds(row["seconds"]),
                times_as_fast(row["ratio_vs_copy"]),
                times_as_fast(row["whole_ratio_vs_copy"]),
                "–" if row["sent_bytes"] is None else words.nbytes(row["sent_bytes"]),
                "–" if row["ratio_vs_fp32"] is None else percent(row["ratio_vs_fp32"]),
                "–" if row["declared_bytes"] is None else words.nbytes(row["declared_bytes"]),
            )
            for row in rows
            if row["skipped"] is None
        ]
        return [
            *columns(head, lines),
            *(f"skipped  {r['codec']}: {r['skipped']}" for r in rows if r["skipped"]),
        ]

    def charts(self, rows: Sequence[Row]) -> list[BarChart | LineChart]:
        ran = [row for row in rows if row["skipped"] is None]
        whole = [(r["codec"], r["whole_ratio_vs_copy"], times_as_fast(r["whole_ratio_vs_copy"])) for r in ran]
        sent = [
            (r["codec"], r["ratio_vs_fp32"], percent(r["ratio_vs_fp32"])) for r in ran if r["ratio_vs_fp32"]
        ]
        return [
            picture.sized("Speed of encoding and decoding, as a share of a copy's", whole),
            picture.sized("Bytes sent, as a share of fp32's", sent),
        ]


def usual() -> list[str]:
    """Every codec of the family that needs no option said, and those that need error feedback with it as well."""
    texts: list[str] = []
    for name in CODECS.names():
        try:
            member = CODECS.read(name)
        except UsageError:
            continue  # it has options without a default: --codecs says them
        if member.rungs:
            continue  # it is one of the others, whichever is quickest
        texts.append(name)
        if member.biased and "ef" in (CODECS.marked().names() if CODECS.marks else ()):
            try:
                CODECS.read(f"{name}+ef")
            except UsageError:
                continue
            texts.append(f"{name}+ef")
    return texts
