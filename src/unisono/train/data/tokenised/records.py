"""Records of files as texts: lines of JSON, rows of tables, whole files. Imported by workers; no torch here."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from unisono.spec.errors import UsageError
from unisono.train.data.tokenised.chats import BadRecord, Wording, Write, messages_of, plain, written
from unisono.train.data.tokenised.order import DATASET, JSONL, PARQUET, Fields, Part, TokenOrder

Record = tuple[int, Any]  # where it stands, byte or row; what it is, or the BadRecord that it is
PIECE = 1 << 20  # characters of a plain file that are cut together


def jsonl_records(part: Part) -> Iterator[Record]:
    """The lines that begin in a stretch of bytes."""
    with open(part.place, "rb") as file:
        if part.start:
            file.seek(part.start - 1)
            file.readline()  # the line that another part has
        while (at := file.tell()) < part.stop and (line := file.readline()):
            if not line.strip():
                continue
            try:
                yield at, json.loads(line)
            except ValueError as error:
                yield at, BadRecord(f"no JSON: {error}")


def parquet_records(part: Part, fields: Fields) -> Iterator[Record]:
    """The rows of some row groups, as far as they are wanted."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(part.place) as file:
        row = sum(file.metadata.row_group(i).num_rows for i in range(part.start))
        wanted = {fields.messages, fields.prompt, fields.completion, fields.text}
        columns = [name for name in file.schema_arrow.names if name in wanted]
        for batch in file.iter_batches(
            row_groups=list(range(part.start, part.stop)), columns=columns or None
        ):
            for record in batch.to_pylist():
                yield row, record
                row += 1


def dataset_records(part: Part, opened: Any) -> Iterator[Record]:
    """Rows of a data set."""
    for row in range(part.start, part.stop):
        yield row, opened[row]


def plain_records(part: Part) -> Iterator[Record]:
    """A file, in pieces that end where a line does and the next begins with no blank."""
    with open(part.place, encoding="utf-8", errors="strict", newline="") as file:
        held, first = "", True
        while True:
            read = file.read(PIECE)
            held += read
            if "\0" in read[:4096]:
                yield 0, BadRecord("no text: it holds zero bytes")
                return
            cut = _end_of_line(held) if read else len(held)
            if cut and held[:cut]:
                yield (0 if first else -1), held[:cut]
                held, first = held[cut:], False
            if not read:
                return


def _end_of_line(text: str) -> int:
    """Behind the last line end that no blank follows; 0 if there is none."""
    at = text.rfind("\n", 0, len(text) - 1)
    while at >= 0 and text[at + 1].isspace():
        at = text.rfind("\n", 0, at)
    return at + 1


def opened_dataset(name: str, split: str) -> Any:
    """A data set of the library `datasets`: a folder that it saved, files that it reads, or a name that its cache
    holds. Nothing is downloaded. Raises UsageError D10, D02."""
    try:
        import datasets
    except ImportError as error:
        raise missing("datasets") from error
    datasets.disable_progress_bars()
    try:
        if Path(name).is_dir() and (
            Path(name, "state.json").exists() or Path(name, "dataset_dict.json").exists()
        ):
            made: Any = datasets.load_from_disk(name)
            return made[split] if isinstance(made, datasets.DatasetDict) else made
        return datasets.load_dataset(name, split=split)
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise UsageError(
            f"no data set {name!r} on this machine, or no split {split!r} of it: {why}",
            code="D02",
            where="data.source",
            likely="it was never loaded here, and nothing is downloaded",
            fix="load it once with datasets.load_dataset, or name a folder that save_to_disk made",
        ) from error


def missing(library: str) -> UsageError:
    """The error for a library that is not installed."""
    return UsageError(
        f"this source reads with {library}, which is not installed",
        code="D10",
        where="data.source",
        fix="pip install 'unisono[hf]'",
    )


def reader(order: TokenOrder) -> Callable[[Part], Iterator[Record]]:
    """What reads the parts of an order's places."""
    if order.kind == JSONL:
        return jsonl_records
    if order.kind == PARQUET:
        return lambda part: parquet_records(part, order.fields)
    if order.kind == DATASET:
        held: dict[str, Any] = {}

        def read(part: Part) -> Iterator[Record]:
            if part.place not in held:
                held[part.place] = opened_dataset(part.place, order.split)
            return dataset_records(part, held[part.place])

        return read
    return plain_records


def writer(order: TokenOrder, chat: Callable[[], Write]) -> Callable[[Any], Wording]:
    """What makes a text of a record. chat: how chats are written, asked for with the first. Raises BadRecord."""
    fields, made = order.fields, list[Write]()

    def write() -> Write:
        if not made:
            made.append(chat())
        return made[0]

    def chatted(messages: list[Mapping[str, Any]], first: int) -> Wording:
        if not order.answers:
            return Wording(write()(messages, False), closed=write() is not plain)
        return written(messages, write(), first)

    def text_of(record: Any) -> Wording:
        if isinstance(record, str):
            return Wording(record)
        if not isinstance(record, Mapping):
            raise BadRecord(f"a {type(record).__name__}, where an object with keys is wanted")
        if record.get(fields.messages) is not None:
            return chatted(messages_of(record[fields.messages]), 0)
        prompt, completion = record.get(fields.prompt), record.get(fields.completion)
        if isinstance(prompt, list) and isinstance(completion, list):
            return chatted(messages_of(prompt) + messages_of(completion), len(prompt))
        if isinstance(prompt, str) and isinstance(completion, str):
            both = prompt + completion
            return Wording(both, ((len(prompt), len(both)),) if order.answers else None)
        text = record.get(fields.text)
        if not isinstance(text, str):
            raise BadRecord(_lacks(record, fields))
        return Wording(text)

    return text_of


def _lacks(record: Mapping[str, Any], fields: Fields) -> str:
    has = ", ".join(map(str, list(record)[:6])) or "none"
    wanted = f"{fields.messages!r}, {fields.prompt!r} with {fields.completion!r}, or {fields.text!r}"
    return f"it has none of the keys {wanted} with text under it; its keys: {has}"
