"""Folders of safetensors, as `transformers` reads and writes them: one file, or several with an index.

Files are mapped, not read: a box of a tensor costs the pages that it lies on. They are written tensor by tensor, so
that no more than one of them is in memory.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from unisono.models.weights import Shape, Weights
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
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class SafetensorsWeights(Weights):
    """The tensors of some safetensors files."""

    def __init__(self, files: Sequence[Path], where: str) -> None:
        self.where = where
        self._files = {name: opened for opened in map(_opened, files) for name in opened.keys()}  # noqa: SIM118
        self.shapes = {
            name: tuple(opened.get_slice(name).get_shape()) for name, opened in self._files.items()
        }

    def box(self, name: str, start: Shape, shape: Shape) -> Tensor:
        cut = tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
        return self._files[name].get_slice(name)[cut]


def _opened(file: Path) -> Any:
    """One file, of which the header is read. Raises UsageError W01."""
    try:
        os.close(open_regular(file, follow=True))  # a pipe in its place would be waited for
        return safe_open(file, "pt")
    except (OSError, SafetensorError) as error:
        raise unreadable(file, error) from error


def unreadable(path: Path, error: Exception) -> UsageError:
    """W01."""
    missing = isinstance(error, FileNotFoundError)
    said = "it is not there" if missing else getattr(error, "strerror", None) or str(error)
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


def write_model(
    out: Path,
    entries: Sequence[Outgoing],
    texts: Mapping[str, Mapping[str, Any]],
    copies: Sequence[tuple[Path, tuple[str, ...]]] = (),
) -> list[str]:
    """Write a model's tensors, the JSON files `texts`, and `copies` of the named files of other folders, where these
    have them. Returns the names of all files. Raises UsageError F02."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        files = [*write_tensors(out, entries), *texts]
        for file, content in texts.items():
            write_json(out / file, content)
        return files + [name for folder, names in copies for name in copied(folder, out, names)]
    except OSError as error:
        raise not_written(out, error) from error


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
