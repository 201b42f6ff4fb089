"""Records of files as texts: lines of JSON, rows of tables, whole files. Imported by workers; no torch here."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.spec.doubtful import keys_once
from unisono.spec.errors import UsageError
from unisono.train.data.tokenised.chats import (
    BadRecord,
    KeysRead,
    Message,
    Wording,
    Write,
    messages_of,
    plain,
    tools_of,
    written,
)
from unisono.train.data.tokenised.order import DATASET, JSONL, PARQUET, Fields, Part, TokenOrder

Record = tuple[int, Any]  # where it stands, byte or row; what it is, or the BadRecord that it is
PIECE = 1 << 20  # characters of a plain file that are cut together
TOOLS = "tools"  # key of what a chat's assistant may call
_OTHERS = (
    (b"\x1f\x8b", "compressed by gzip: gunzip it"), (b"\x28\xb5\x2f\xfd", "compressed by zstd: unzstd it"),
    (b"PK\x03\x04", "an archive: unzip it"), (b"PAR1", "a table: parquet:PATH reads it"),
    (b"\xff\xfe", "UTF-16: iconv -f utf-16 -t utf-8 makes it readable"),
    (b"\xfe\xff", "UTF-16: iconv -f utf-16 -t utf-8 makes it readable"),
)  # fmt: skip
_KINDS = (
    (str, "a text"), (bool, "true or false"), ((int, float), "a number"), (type(None), "null"), (list, "a list"),
    (Mapping, "an object"), (bytes, "bytes"),
)  # fmt: skip


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
                yield at, parsed(line)
            except BadRecord as error:
                yield at, error


def parsed(line: bytes) -> Any:
    """What a line of JSON says. Raises BadRecord."""
    try:
        record = json.loads(line.decode("utf-8-sig"), object_pairs_hook=keys_once)
    except RecursionError as error:
        raise BadRecord("no JSON that can be read: brackets are nested too deeply") from error
    except UnicodeDecodeError as error:
        other = next((name for mark, name in _OTHERS if line.startswith(mark)), "")
        raise BadRecord(f"it is {other}" if other else f"no UTF-8: {_byte(error)}") from error
    except ValueError as error:
        zeros = "; it holds zero bytes" if b"\0" in line else ""
        raise BadRecord(f"no JSON: {error}{zeros}") from error
    if not isinstance(record, dict):
        raise BadRecord(f"{_kind(record)}, where an object with keys is wanted")
    return record


def _byte(error: UnicodeDecodeError) -> str:
    return f"byte 0x{error.object[error.start]:02x} at {error.start + 1:,}"


def _kind(value: Any) -> str:
    """What a value is, in the words of JSON."""
    return next((word for types, word in _KINDS if isinstance(value, types)), f"a {type(value).__name__}")


def parquet_records(part: Part, fields: Fields) -> Iterator[Record]:
    """The rows of some row groups, as far as they are wanted."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    with ParquetFile(part.place) as file:
        row = sum(file.metadata.row_group(i).num_rows for i in range(part.start))
        last = row + sum(file.metadata.row_group(i).num_rows for i in range(part.start, part.stop))
        wanted = {fields.messages, fields.prompt, fields.completion, fields.text, TOOLS}
        columns = [name for name in file.schema_arrow.names if name in wanted]
        others = dict.fromkeys((name for name in file.schema_arrow.names if name not in wanted), True)
        rest: Any = file.iter_batches(row_groups=list(range(part.start, part.stop)), columns=columns or None)
        try:
            for batch in rest:
                for at in range(len(batch)):
                    yield row, _row(batch, at, others)
                    row += 1
        except (ArrowException, OSError) as error:
            why = BadRecord(f"the table cannot be read from here on: {str(error)[:200]}")
            yield from ((at, why) for at in range(row, last))


def _row(batch: Any, at: int, others: Mapping[str, Any]) -> Any:
    try:
        return {**others, **batch.slice(at, 1).to_pylist()[0]}
    except UnicodeDecodeError as error:
        return BadRecord(f"no UTF-8: {_byte(error)}")
    except ValueError as error:  # such as a time that no calendar has
        return BadRecord(str(error))


def dataset_records(part: Part, opened: Any) -> Iterator[Record]:
    """Rows of a data set."""
    for row in range(part.start, part.stop):
        try:
            yield row, opened[row]
        except Exception as error:  # a picture or sound that it decodes may be broken in any way
            yield row, BadRecord(f"{type(error).__name__}: {str(error)[:200]}")


def plain_records(part: Part) -> Iterator[Record]:
    """A file, in pieces that end where a line does and the next begins with no blank."""
    with open(part.place, encoding="utf-8", errors="strict", newline="") as file:
        held, first = "", True
        while True:
            try:
                read = file.read(PIECE)
            except UnicodeDecodeError:
                yield 0, BadRecord(f"no UTF-8 text: {_first_other(part.place)}")
                return
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


def _first_other(place: str) -> str:
    """The first byte of a file that is not of UTF-8, and its line."""
    with open(place, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"{_byte(error)} of line {number:,}"
    return "a letter is cut off at its end"


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
            dataset: Any = datasets.load_from_disk(name)
            return dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
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
    fields, readers = order.fields, list[KeysRead]()

    def chatted(record: Mapping[str, Any], messages: list[Message], first: int) -> Wording:
        if not readers:
            readers.append(KeysRead(chat()))
        write, tools = readers[0].write, tools_of(record.get(TOOLS))
        remarks = _unread(readers[0].ignored(messages, tools, order.answers))
        if not order.answers:
            return Wording(write(messages, False, tools), closed=write is not plain, remarks=remarks)
        return replace(written(messages, write, first, tools), remarks=remarks)

    def text_of(record: Any) -> Wording:
        if isinstance(record, str):  # a plain file
            return Wording(record)
        if not isinstance(record, Mapping):
            raise BadRecord(f"{_kind(record)}, where an object with keys is wanted")
        if record.get(fields.messages) is not None:
            wording, read = chatted(record, messages_of(record[fields.messages]), 0), (fields.messages, TOOLS)
        else:
            wording, read = _worded(record, order, chatted)
        idle = [key for key, value in record.items() if key not in read and value not in (None, "", [], {})]
        return _sound(replace(wording, remarks=(*wording.remarks, *_unread(idle))), order)

    return text_of


def _worded(record: Mapping[str, Any], order: TokenOrder, chatted: Any) -> tuple[Wording, tuple[str, ...]]:
    """A record that is no chat, and the keys of it that were read. chatted: writes messages."""
    fields = order.fields
    prompt, completion = record.get(fields.prompt), record.get(fields.completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        messages = messages_of(prompt) + messages_of(completion)
        return chatted(record, messages, len(prompt)), (fields.prompt, fields.completion, TOOLS)
    if isinstance(prompt, str) and isinstance(completion, str):
        both = prompt + completion
        answers = ((len(prompt), len(both)),) if order.answers else None
        return Wording(both, answers), (fields.prompt, fields.completion)
    text = record.get(fields.text)
    if not isinstance(text, str):
        raise BadRecord(_lacks(record, fields))
    return Wording(text), (fields.text,)


def _sound(text: Wording, order: TokenOrder) -> Wording:
    """Return the text itself if tokens can be made of it. Raises BadRecord."""
    try:
        text.text.encode()
    except UnicodeEncodeError as error:
        half = text.text[error.start]
        raise BadRecord(
            f"its text holds half a letter, {half!r} (a surrogate without the other one)"
        ) from error
    if "\0" in text.text and not order.tokenizer.startswith("hf:"):
        raise BadRecord(f"its text holds a zero, which under tokenizer {order.tokenizer} ends a document")
    return text


def _unread(keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"key {key} is not read" for key in keys)


def _lacks(record: Mapping[str, Any], fields: Fields) -> str:
    has = ", ".join(f"{key} ({_kind(value)})" for key, value in list(record.items())[:6]) or "none"
    wanted = f"{fields.messages!r}, {fields.prompt!r} with {fields.completion!r}, or {fields.text!r}"
    return f"it has none of the keys {wanted} with text under it; its keys: {has}"
