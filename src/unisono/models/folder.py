"""Folders of safetensors, as `transformers` reads and writes them: one file, or several with an index.

Files are mapped, not read: a box of a tensor costs the pages that it lies on. They are written tensor by tensor, so
that no more than one of them is in memory.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.models.weights import Shape, Weights, shape_of, size_of
from unisono.observe.files import replaced, write_all, write_whole
from unisono.spec.doubtful import open_regular, parse, read_regular
from unisono.spec.errors import UsageError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja", "preprocessor_config.json",
)  # fmt: skip
FILE_BYTES = 5_000_000_000  # of one file, as transformers cuts a model
_HEADER_LIMIT = 100 << 20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where one tensor lies. at: bytes from the beginning of the file."""

    file: Path
    dtype: torch.dtype
    shape: Shape
    at: int


class SafetensorsWeights(Weights):
    """The tensors of some safetensors files."""

    def __init__(self, files: Sequence[Path], where: str) -> None:
        self.where = where
        self._stored = {name: stored for file in files for name, stored in _header(file)}
        self.shapes = {name: stored.shape for name, stored in self._stored.items()}
        self._mapped: dict[Path, Tensor] = {}

    def box(self, name: str, start: Shape, shape: Shape) -> Tensor:
        stored = self._stored[name]
        if stored.file not in self._mapped:
            self._mapped[stored.file] = torch.from_file(
                str(stored.file), shared=False, size=stored.file.stat().st_size, dtype=torch.uint8
            )
        size = prod(stored.shape) * stored.dtype.itemsize
        raw = self._mapped[stored.file][stored.at : stored.at + size]
        cut = tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
        if stored.at % stored.dtype.itemsize == 0:
            return raw.view(stored.dtype).view(stored.shape)[cut]
        # A header need not be a multiple of the element's size long: then the rows are copied to where they may be.
        if not stored.shape:
            return raw.clone().view(stored.dtype).view(())
        row = prod(stored.shape[1:]) * stored.dtype.itemsize
        rows = raw[start[0] * row : (start[0] + shape[0]) * row].clone().view(stored.dtype)
        return rows.view(shape[0], *stored.shape[1:])[(slice(None), *cut[1:])]


def _header(file: Path) -> Iterator[tuple[str, _Stored]]:
    """The tensors of one file, from its header alone. Raises UsageError W01."""
    try:
        with os.fdopen(open_regular(file, follow=True), "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= _HEADER_LIMIT:
                raise ValueError("it has no header")
            header = parse(opened.read(length))
            size = os.fstat(opened.fileno()).st_size - 8 - length
        header.pop("__metadata__", None)
        room = size  # tensors do not overlap: else a header alone would make any number of any size
        for name, entry in header.items():
            first, end = map(size_of, entry["data_offsets"])
            dtype, shape = DTYPES[entry["dtype"]], shape_of(entry["shape"])
            room -= end - first
            if end - first != prod(shape) * dtype.itemsize or not 0 <= first <= end <= size or room < 0:
                raise ValueError(f"{name} does not lie in it; was it cut short?")
            yield name, _Stored(file, dtype, shape, 8 + length + first)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise unreadable(file, error) from error


def unreadable(path: Path, error: Exception) -> UsageError:
    """W01."""
    said = {
        FileNotFoundError: "it is not there",
        KeyError: f"a dtype or field is not known here: {error}",
    }.get(type(error), getattr(error, "strerror", None) or str(error))
    return UsageError(
        f"cannot read weights from {path}: {said}",
        where="model.weights, model.kind",
        fix="a folder or file of whole weights",
        code="W01",
    )


def has_weights(folder: Path) -> bool:
    """Whether a folder holds safetensors as `transformers` writes them."""
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def open_folder(folder: Path) -> SafetensorsWeights:
    """The weights of a folder. Raises UsageError W01."""
    index = folder / INDEX
    if not index.is_file():
        return SafetensorsWeights([folder / SINGLE], str(folder))
    try:
        names: Mapping[str, str] = parse(read_regular(index, _HEADER_LIMIT, follow=True) or b"")["weight_map"]
        files = sorted({str(file) for file in names.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise unreadable(index, error) from error
    if odd := [file for file in files if Path(file).name != file]:
        raise unreadable(index, ValueError(f"it names a file outside of its folder: {odd[0]}"))
    return SafetensorsWeights([folder / file for file in files], str(folder))


# Writing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One tensor to be written; make() gives it when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: Shape
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(
    folder: Path,
    entries: Sequence[Outgoing],
    limit: int = FILE_BYTES,
    single: str = SINGLE,
    *,
    about: Mapping[str, str] | None = None,
) -> list[str]:
    """Write one file called `single`, or numbered ones of at most `limit` bytes and their index; returns their names.

    about: further metadata of each file. Raises OSError.
    """
    parts: list[list[Outgoing]] = [[]]
    for entry in entries:
        if parts[-1] and sum(outgoing.nbytes for outgoing in parts[-1]) + entry.nbytes > limit:
            parts.append([])
        parts[-1].append(entry)
    stem, end = single.removesuffix(".safetensors"), ".safetensors"
    names = [single] if len(parts) == 1 else []
    names = names or [f"{stem}-{i:05d}-of-{len(parts):05d}{end}" for i in range(1, len(parts) + 1)]
    for name, part in zip(names, parts, strict=True):
        _write_file(folder / name, part, about or {})
    if len(parts) == 1:
        return names
    total = sum(entry.nbytes for entry in entries)
    where = {entry.name: name for name, part in zip(names, parts, strict=True) for entry in part}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    write_json(folder / f"{single}.index.json", content)
    return [*names, f"{single}.index.json"]


def _write_file(path: Path, entries: Sequence[Outgoing], about: Mapping[str, str]) -> None:
    header: dict[str, Any] = {"__metadata__": {**about, "format": "pt"}}
    ordered, at = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name)), 0
    for entry in ordered:
        offsets = [at, at + entry.nbytes]
        header[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": offsets,
        }
        at = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replaced(path) as aside:
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            write_all(fd, len(text).to_bytes(8, "little") + text)
            for entry in ordered:
                x = entry.make().detach().to("cpu", entry.dtype).contiguous()
                if tuple(x.shape) != entry.shape:
                    raise ValueError(f"{entry.name} was announced as {entry.shape} and is {tuple(x.shape)}")
                write_all(fd, x.view(-1).view(torch.uint8).numpy().data)
        finally:
            os.close(fd)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A file of JSON as `transformers` writes them. Raises OSError."""
    write_whole(path, json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def not_written(out: Path, error: OSError) -> UsageError:
    """F02."""
    return UsageError(
        f"cannot write the exported model: {error.strerror or error}",
        code="F02",
        where=str(out),
        fix="--out FOLDER that can be written",
    )


def copied(folder: Path, out: Path, names: tuple[str, ...]) -> list[str]:
    """Those of these files that the folder has, copied. Raises OSError."""
    present = [name for name in names if (folder / name).is_file()]
    for name in present:
        if (folder / name).resolve() != (out / name).resolve():
            shutil.copyfile(folder / name, out / name)
    return present


def byte_tokenizer(context: int) -> dict[str, Any]:
    """The files, by their names, of a tokenizer in which a byte is a token: byte-pair encoding without any pair.

    It goes over the letters by which GPT-2 writes bytes (Radford et al., GPT-2, 2019): the printable characters of
    Latin-1 for themselves, and for the other bytes, in order, the characters from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {letters[byte]: byte for byte in range(256)},
        "merges": [],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model,
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}
