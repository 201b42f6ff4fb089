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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from unisono.spec.errors import UsageError
from unisono.spec.frames import words
from unisono.train.data.tokenised.chats import BadRecord, Wording, Write, counted, plain, template_of
from unisono.train.data.tokenised.cutters import NUL, Encoded, encoder, folder_of, width_of
from unisono.train.data.tokenised.order import DATASET, PARQUET, PLAIN, Part, TokenOrder
from unisono.train.data.tokenised.records import Record, missing, opened_dataset, reader, writer
from unisono.train.data.worker_pool import failure

_BATCH = 1 << 18  # characters that are cut together
_TYPES = {"u1": "B", "u2": "H", "u4": "I"}
_NAMED = 5  # bad records of a part that are told
_OVER = "a token begins before an answer and ends in it: it counts"
_TOLD = 0.2  # seconds between two words of how far it is


def main() -> None:
    """Serve until stdin ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism, one a core
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    maker = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "look" in request:
                answer = {"parts": look(TokenOrder.read(request["order"]), request["look"])}
            else:
                maker = maker or Maker(TokenOrder.read(request["order"]), answers)
                answer = maker.make(Part(*request["part"]), request["out"])
        except (UsageError, OSError) as error:
            answer = failure(error)
        except Exception as error:  # of a library that reads or cuts
            answer = {"error": _unforeseen(request, error)}
        print(json.dumps(answer), file=answers, flush=True)


def _unforeseen(request: dict[str, Any], error: Exception) -> dict[str, str]:
    """The fields of the error for what a library raised that reads or cuts."""
    place = str(request["part"][0]) if "part" in request else ", ".join(map(str, request["look"]))
    fix = "a data.source without it; if it is in order, report it"
    return {"what": f"the data cannot be read: {words(error)}", "where": place, "fix": fix, "code": "D16"}


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
            dataset = opened_dataset(place, order.split)
            rows, step = len(dataset), max(256, min(10_000, len(dataset) // 16 + 1))
            parts += [
                (place, i, min(i + step, rows), min(step, rows - i), dataset._fingerprint)
                for i in range(0, rows, step)
            ]
    return parts


class Maker:
    """Makes tokens as one order says. answers: the file that hears how far it is, if any."""

    def __init__(self, order: TokenOrder, answers: Any = None) -> None:
        self.order, self.answers, self._said_at = order, answers, time.monotonic()
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

    def make(self, part: Part, out: str, records: Iterable[Record] | None = None) -> dict[str, Any]:
        """Write OUT.tokens, OUT.ends (int64, behind each document) and OUT.marks (1 for each token that counts, if any
        record says which do). records: of the part, where somebody else has read them."""
        result = _Made()
        with open(f"{out}.tokens", "wb") as tokens, open(f"{out}.marks", "wb") as marks:
            for batch in self._batches(self.read(part) if records is None else records, result):
                self._tell(part, batch[-1][0])
                for (at, text), cut in zip(batch, self._cut(batch), strict=True):
                    if isinstance(cut, BadRecord):
                        result.bad.append((at, str(cut)))
                    else:
                        self._put(at, text, cut, tokens, marks, result)
                if result.bad and not self.order.skip_bad:
                    break
            if result.bad and self.order.kind == PLAIN:  # its beginning alone is no document
                result.ends, result.total = array("q"), 0
                tokens.truncate(0)
                marks.truncate(0)
        with open(f"{out}.ends", "wb") as file:
            file.write(result.ends)
        return {
            "documents": len(result.ends), "tokens": result.total, "masked": result.masked, "left_out": len(result.bad),
            "bad": sorted(result.bad)[:_NAMED], "told": result.remarks,
        }  # fmt: skip

    def _put(
        self, at: int, text: Wording, cut: "_Cut", tokens: BinaryIO, marks: BinaryIO, result: "_Made"
    ) -> None:
        """A document behind those before, or more of the last one."""
        if at < 0:
            result.ends.pop()
            result.total -= 1
            tokens.seek(-cut.tokens.itemsize, os.SEEK_CUR)
            marks.seek(-1, os.SEEK_CUR)
        if not text.closed:
            cut.tokens.append(self.end)
            cut.marks += b"\x01"
        tokens.write(cut.tokens)
        marks.write(cut.marks)
        result.total += len(cut.tokens)
        result.ends.append(result.total)
        result.masked |= text.answers is not None
        for remark in (*text.remarks, *([_OVER] if cut.over else [])):
            result.tell(remark, at)

    def _batches(self, records: Iterable[Record], result: "_Made") -> Iterator[list[tuple[int, Wording]]]:
        """Texts of about as many characters; a bad one is noted, or ends it."""
        batch: list[tuple[int, Wording]] = []
        size = 0
        for at, record in records:
            try:
                if isinstance(record, BadRecord):
                    raise record
                text = self.text_of(record)
            except BadRecord as error:
                result.bad.append((at, str(error)))
                if not self.order.skip_bad:
                    break
                continue
            if text.text:
                batch.append((at, text))
                size += len(text.text)
            else:
                result.tell("an empty text is no document", at)
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _cut(self, batch: list[tuple[int, Wording]]) -> "list[_Cut | BadRecord]":
        """Tokens of each text, and of each token whether it counts."""
        cuts: list[Any] = [None] * len(batch)
        kinds: dict[tuple[bool, bool], list[int]] = {}
        for i, (at, text) in enumerate(batch):
            kinds.setdefault((text.answers is not None, at >= 0 and not text.closed), []).append(i)
        for (masked, special), chosen in kinds.items():
            texts = [batch[i][1].text for i in chosen]
            for i, cut in zip(chosen, self._encoded(texts, masked, special), strict=True):
                cuts[i] = cut if isinstance(cut, BadRecord) else self._marked(cut, batch[i][1])
        return cuts

    def _encoded(self, texts: list[str], masked: bool, special: bool) -> "list[Encoded | BadRecord]":
        try:
            return [*self.encode(texts, masked, special)]
        except BaseException as error:  # a tokenizer that panics raises no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            if len(texts) == 1:
                return [BadRecord(f"the tokenizer takes it not: {words(error)}")]
            return [encoding for text in texts for encoding in self._encoded([text], masked, special)]

    def _marked(self, cut: Encoded, text: Wording) -> "_Cut":
        marks, over = (
            (bytearray(b"\x01" * len(cut.tokens)), False)
            if text.answers is None
            else counted(cut, text.answers)
        )
        if (
            len(cut.tokens) and cut.tokens[-1] == self.end and not text.closed
        ):  # the tokenizer put it there itself
            return _Cut(cut.tokens[:-1], marks[:-1], over)
        return _Cut(cut.tokens, marks, over)

    def _tell(self, part: Part, at: int) -> None:
        now = time.monotonic()
        if self.answers is not None and now - self._said_at > _TOLD:
            self._said_at = now
            print(json.dumps({"done": max(0, at - part.start)}), file=self.answers, flush=True)


@dataclass(slots=True)
class _Cut:
    """A text's tokens. marks: of each 1 where it counts. over: one that counts begins before its answer."""

    tokens: "array[int]"
    marks: bytearray
    over: bool


@dataclass(slots=True)
class _Made:
    """What was made of a part so far. ends: behind each document. bad: (place, why). remarks: of each remark, how many
    records it is about, and the place of the first."""

    ends: "array[int]" = field(default_factory=lambda: array("q"))
    total: int = 0
    masked: bool = False
    bad: list[tuple[int, str]] = field(default_factory=list)
    remarks: dict[str, list[int]] = field(default_factory=dict)

    def tell(self, remark: str, at: int) -> None:
        """One record more that this is to be said of."""
        self.remarks.setdefault(remark, [0, at])[0] += 1
