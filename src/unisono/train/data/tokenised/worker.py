"""A process that makes tokens of parts of the data: `python -c "... main()"`, orders on stdin, answers on stdout.

A line of JSON an order, a line an answer. The first order says how; each other one names a part and where its tokens
go. It ends with its stdin. What it says of a part: {"part", "documents", "tokens", "bad"}; {"done": bytes} on the way;
{"error": ...} where it cannot go on.
"""

import json
import os
import sys
import time
from array import array
from collections.abc import Iterator
from typing import Any

from unisono.spec.errors import UsageError
from unisono.train.data.tokenised.chats import BadRecord, Wording, Write, counted, plain, template_of
from unisono.train.data.tokenised.cutters import NUL, encoder, folder_of, width_of
from unisono.train.data.tokenised.order import DATASET, PARQUET, Part, TokenOrder
from unisono.train.data.tokenised.records import missing, opened_dataset, reader, writer

_BATCH = 1 << 18  # characters that are cut together
_TYPES = {"u1": "B", "u2": "H", "u4": "I"}
_NAMED = 5  # bad records of a part that are told
_TOLD = 0.2  # seconds between two words of how far it is


def main() -> None:
    """Serve until stdin ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism, one a core
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    maker = None
    for line in sys.stdin:
        told = json.loads(line)
        try:
            if "look" in told:
                answer = {"parts": look(TokenOrder.read(told["order"]), told["look"])}
            else:
                maker = maker or Maker(TokenOrder.read(told["order"]), answers)
                answer = maker.make(Part(*told["part"]), told["out"])
        except UsageError as error:
            answer = {"error": {k: getattr(error, k) for k in ("what", "where", "likely", "fix", "code")}}
        except OSError as error:
            answer = {"errno": error.errno, "error": str(error), "file": str(error.filename or "")}
        print(json.dumps(answer), file=answers, flush=True)


def look(order: TokenOrder, places: list[str]) -> list[tuple[Any, ...]]:
    """(place, start, stop, size, identity) of parts that cannot be known by their bytes."""
    parts: list[tuple[Any, ...]] = []
    for place in places:
        if order.kind == PARQUET:
            try:
                from pyarrow import ArrowException
                from pyarrow.parquet import ParquetFile
            except ImportError as error:
                raise missing("pyarrow") from error
            try:
                with ParquetFile(place) as file:
                    groups = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
            except ArrowException as error:
                what = f"no Parquet: {error}"
                raise UsageError(
                    what, code="D06", where=place, fix="a file that a Parquet writer has closed"
                ) from error
            parts += [(place, i, i + 1, size, "") for i, size in enumerate(groups)]
        elif order.kind == DATASET:
            made = opened_dataset(place, order.split)
            rows, step = len(made), max(256, min(10_000, len(made) // 16 + 1))
            parts += [
                (place, i, min(i + step, rows), min(step, rows - i), made._fingerprint)
                for i in range(0, rows, step)
            ]
    return parts


class Maker:
    """Makes tokens as one order says."""

    def __init__(self, order: TokenOrder, answers: Any) -> None:
        self.order, self.answers, self.told = order, answers, time.monotonic()
        folder = folder_of(order.tokenizer)
        try:
            self.encode, number = encoder(order.tokenizer)
        except ImportError as error:
            raise UsageError(
                "hf: tokenizers are read by tokenizers, which is not installed",
                code="D11", where="data.tokenizer", fix="pip install 'unisono[hf]'",
            ) from error  # fmt: skip
        self.end = number(order.separator or (folder.end if folder else NUL))
        self.kind = _TYPES[width_of(order.tokenizer)]
        self.read, self.text_of = reader(order), writer(order, self._chat)

    def _chat(self) -> Write:
        folder = folder_of(self.order.tokenizer)
        if folder is None or not folder.templated():
            return plain
        try:
            return template_of(folder)
        except ImportError as error:
            raise UsageError(
                "chat templates are rendered by transformers, which is not installed",
                code="D11", where="data.tokenizer", fix="pip install 'unisono[hf]'",
            ) from error  # fmt: skip

    def make(self, part: Part, out: str) -> dict[str, Any]:
        """Write OUT.tokens, OUT.ends (int64, behind each document) and OUT.marks (1 for each token that counts, if any
        record says which do)."""
        ends, total, bad, masked = array("q"), 0, list[tuple[int, str]](), False
        with open(f"{out}.tokens", "wb") as tokens, open(f"{out}.marks", "wb") as marks:
            for batch in self._batches(part, bad):
                self._tell(part, batch[-1][0])
                for (at, text), (made, said) in zip(batch, self._cut(batch), strict=True):
                    if at < 0:  # the same document goes on
                        ends.pop()
                        total -= 1
                        tokens.seek(-made.itemsize, os.SEEK_CUR)
                        marks.seek(-1, os.SEEK_CUR)
                    if not text.closed:
                        made.append(self.end)
                        said += b"\x01"
                    tokens.write(made)
                    marks.write(said)
                    total += len(made)
                    ends.append(total)
                    masked |= text.answers is not None
        with open(f"{out}.ends", "wb") as file:
            file.write(ends)
        return {
            "documents": len(ends),
            "tokens": total,
            "bad": bad[:_NAMED],
            "left_out": len(bad),
            "masked": masked,
        }

    def _batches(self, part: Part, bad: list[tuple[int, str]]) -> Iterator[list[tuple[int, Wording]]]:
        """Texts of about as many characters; what is bad goes to `bad`, or ends it."""
        batch: list[tuple[int, Wording]] = []
        size = 0
        for at, record in self._records(part):
            try:
                if isinstance(record, BadRecord):
                    raise record
                text = self.text_of(record)
            except BadRecord as error:
                bad.append((at, str(error)))
                if not self.order.skip_bad:
                    return
                continue
            if text.text:  # an empty text is no document
                batch.append((at, text))
                size += len(text.text)
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _records(self, part: Part) -> Iterator[tuple[int, Any]]:
        try:
            yield from self.read(part)
        except UnicodeDecodeError as error:
            yield 0, BadRecord(f"no UTF-8 text: {error}")

    def _cut(self, batch: list[tuple[int, Wording]]) -> list[tuple["array[int]", bytes]]:
        """Tokens of each text, and of each token whether it counts."""
        found: list[Any] = [None] * len(batch)
        kinds: dict[tuple[bool, bool], list[int]] = {}
        for i, (at, text) in enumerate(batch):
            kinds.setdefault((text.answers is not None, at >= 0 and not text.closed), []).append(i)
        for (masked, special), chosen in kinds.items():
            for i, cut in zip(
                chosen, self.encode([batch[i][1].text for i in chosen], masked, special), strict=True
            ):
                tokens, text = cut.tokens, batch[i][1]
                said = (
                    bytes(counted(cut.starts, text.answers))
                    if text.answers is not None
                    else b"\x01" * len(tokens)
                )
                if (
                    len(tokens) and tokens[-1] == self.end and not text.closed
                ):  # the tokenizer put it there itself
                    tokens, said = tokens[:-1], said[:-1]
                found[i] = tokens, said
        return found

    def _tell(self, part: Part, at: int) -> None:
        now = time.monotonic()
        if now - self.told > _TOLD:
            self.told = now
            print(json.dumps({"done": max(0, at - part.start)}), file=self.answers, flush=True)
