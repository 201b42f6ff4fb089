"""Files of `torch.save`, read without running anything in them.

A pickle names functions, and loading calls them. Here only what makes a tensor has a meaning; every other name stands
for a thing that keeps what it was given and does nothing. Names of Python's own library that no weights need, such as
`os.system`, are refused: who wrote them had something else in mind. Tensors are views of the mapped file.
"""

import _compat_pickle
import io
import os
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from unisono.models.folder import unreadable
from unisono.models.weights import Shape, Weights, shape_of, size_of
from unisono.spec.doubtful import open_regular, read_regular
from unisono.spec.errors import UsageError
from unisono.train.foreign import reading
from unisono_contrib.train.foreign.machine import Inert, Makes, PickleMachine, listed, simple

_LARGEST = 1 << 30  # bytes of a pickle without tensors
_LETTERS = 1 << 24  # of all names of tensors, and one for each thing that is looked at
_LONGEST = 4096  # letters of one name

# Of Python's own modules, those whose names frameworks write into checkpoints; none is imported for that.
_HARMLESS = frozenset(
    "_codecs argparse collections copyreg datetime decimal enum functools pathlib types typing uuid".split()
)
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


def _rebuilt(storage: Tensor, offset: Any, shape: Any, steps: Any, *_: Any) -> Tensor:
    shape, steps = shape_of(shape), shape_of(steps)
    last = size_of(offset) + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    # One that is spread by strides of 0, far beyond what anybody saves.
    if prod(shape) > 16 * len(storage) + 4096:
        raise ValueError("a tensor is larger than what it is made of")
    if 0 not in shape and last >= len(storage):
        raise ValueError("a tensor does not lie in its storage")
    return storage.as_strided(shape, steps, storage.storage_offset() + offset)


def _same(tensor: Tensor, *_: Any) -> Tensor:
    return tensor


def _ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    pairs_in_order: OrderedDict[Any, Any] = OrderedDict()
    for pair in pairs.items() if isinstance(pairs, dict) else listed(pairs):
        key, value = listed(pair)
        pairs_in_order[simple(key)] = value
    return pairs_in_order


_MADE: Mapping[str, Callable[..., Any]] = {
    "builtins.set": lambda items=(): set(map(simple, listed(items))),
    "builtins.frozenset": lambda items=(): frozenset(map(simple, listed(items))),
    "builtins.list": lambda items=(): list(listed(items)),
    "builtins.dict": lambda pairs=(): dict(_ordered(pairs)),
    "builtins.int": lambda value=0: int(value),
    "builtins.float": lambda value=0.0: float(value),
    "builtins.complex": lambda real=0.0, imaginary=0.0: complex(real, imaginary),
    "collections.OrderedDict": _ordered,
    "torch.Size": lambda shape=(): shape_of(shape),
    "torch._utils._rebuild_tensor_v2": _rebuilt,
    "torch._utils._rebuild_tensor": _rebuilt,
    "torch._utils._rebuild_parameter": _same,
    "torch._utils._rebuild_parameter_with_state": _same,
}
"""What has a meaning when it is called, and what is called in its place."""
_KEPT = frozenset("builtins.bytearray builtins.slice builtins.range builtins.object".split())
"""Harmless, but for what they may grow to: they keep what they are given."""


class Unpickler(PickleMachine):
    """Knows tensors and plain containers; all else is inert. storage(key, dtype, elements): the numbers of one."""

    def __init__(
        self, data: bytes, where: Path, storage: Callable[[str, torch.dtype, int], Tensor] | None = None
    ) -> None:
        super().__init__(data)
        self._where, self._storage = where, storage

    def resolve(self, module: str, name: str) -> Any:
        # torch.save writes names as Python 2 had them.
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        full = f"{module}.{name}"
        if full in _MADE:
            return Makes(_MADE[full])
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):  # getattr might import
            return vars(torch)[name]
        root = module.partition(".")[0]
        if root in sys.stdlib_module_names and root not in _HARMLESS and full not in _KEPT:
            raise _refused(self._where, full)
        return type("_Inert", (Inert,), {"name": full})

    def referred(self, pid: Any) -> Tensor:
        match pid:
            case ("storage", kind, str(key), _, int(elements)) if self._storage is not None:
                dtype = _STORAGES.get(str(getattr(kind, "name", "")).rpartition(".")[2], torch.uint8)
                return self._storage(simple(key), dtype, size_of(elements))
        raise ValueError("it refers to something beside the file")


def _refused(path: Path, name: str) -> UsageError:
    return UsageError(
        f"{path.name} is refused: it holds {name}, which an ordinary load would run",
        where=str(path),
        likely="weights need no such thing; the file may have been made to harm",
        fix="weights from somewhere trustworthy, best as safetensors",
        code="W05",
    )


def plain_pickle(path: Path) -> Any:
    """What a pickle without tensors holds, as plain containers and inert things. Raises UsageError W01, W05."""
    with reading(path):
        data = read_regular(path, _LARGEST, follow=True)
        if data is None:
            raise ValueError("it is too large for what it is")
        return Unpickler(data, path).load()


def saved(path: Path, at: int = 0, length: int | None = None) -> Any:
    """What `torch.save` wrote into a file, or into `length` bytes of it from `at` on. Raises UsageError W01, W05."""
    with reading(path), os.fdopen(open_regular(path, follow=True), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        part = _Part(file, at, size - at if length is None else length)
        if not zipfile.is_zipfile(part):
            raise ValueError("it is not what torch.save writes since torch 1.6")
        mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        with zipfile.ZipFile(part) as archive:
            storages = _Storages(archive, part, at, mapped)
            return Unpickler(archive.read(storages.pickled), path, storages).load()


class _Storages:
    """The tensors' numbers in an archive of `torch.save`, by their keys.

    They are views of the mapped file. What does not lie where its elements may be read is copied, once for all that
    refer to it, and no more than the file has bytes.
    """

    def __init__(self, archive: zipfile.ZipFile, part: "_Part", at: int, mapped: Tensor) -> None:
        self._archive, self._part, self._at, self._mapped = archive, part, at, mapped
        self._room = len(mapped)
        self._storages: dict[tuple[str, torch.dtype], Tensor] = {}
        self.pickled = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        self._stem = self.pickled.removesuffix("data.pkl")
        self._stored(self.pickled)

    def __call__(self, key: str, dtype: torch.dtype, elements: int) -> Tensor:
        if (key, dtype) not in self._storages:
            self._storages[key, dtype] = self._read(f"{self._stem}data/{key}", dtype)
        storage = self._storages[key, dtype]
        if len(storage) < elements:
            raise ValueError("a tensor is cut short")
        return storage

    def _stored(self, name: str) -> zipfile.ZipInfo:
        info = self._archive.getinfo(name)
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError("it is compressed, which torch.save never does")
        return info

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        info = self._stored(name)
        self._part.seek(info.header_offset)
        head = self._part.read(30)
        first = self._at + info.header_offset + 30 + int.from_bytes(head[26:28], "little")
        first += int.from_bytes(head[28:30], "little")
        raw = self._mapped[first : first + info.file_size]
        raw = raw[: len(raw) - len(raw) % dtype.itemsize]
        if first % dtype.itemsize:
            self._room -= len(raw)
            if self._room < 0:
                raise ValueError("its tensors have more bytes than it has")
            raw = raw.clone()
        return raw.view(dtype)


class _Part(io.RawIOBase):
    """Some bytes of a file as a file."""

    def __init__(self, file: BinaryIO, at: int, length: int) -> None:
        self._file, self._first, self._length, self._at = file, at, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        size = left if size < 0 else min(size, left)
        self._file.seek(self._first + self._at)
        data = self._file.read(size)
        self._at += len(data)
        return data


def tensors_in(tree: Any) -> dict[str, Tensor]:
    """All tensors of nested mappings under dotted names. Raises ValueError where these hold each other without end, or
    a tensor lies under what is no name."""
    tensors: dict[str, Tensor] = {}
    below: list[tuple[str | None, Any]] = [("", tree)]
    room = _LETTERS
    while below:
        prefix, at = below.pop()
        for key, value in at.items() if isinstance(at, Mapping) else ():
            keeps = isinstance(value, Tensor | Mapping) and not isinstance(value, Inert)
            name = f"{prefix}{key}" if keeps and prefix is not None and not isinstance(key, Inert) else None
            room -= 1 + len(name or "")
            if room < 0 or len(name or "") > _LONGEST:
                raise ValueError("its dictionaries hold each other without end")
            if isinstance(value, Mapping) and keeps:
                below.append((name and f"{name}.", value))
            elif isinstance(value, Tensor):
                if name is None:
                    raise ValueError("a tensor lies under a key that is no name")
                tensors[name] = value
    return tensors


class MadeWeights(Weights):
    """make: by name, a tensor's shape and what gives it. At most one that had to be put together is held."""

    def __init__(self, where: str, make: Mapping[str, tuple[Shape, Callable[[], Tensor]]]) -> None:
        self.where, self._make = where, make
        self.shapes = {name: shape for name, (shape, _) in make.items()}
        self._last: tuple[str, Tensor] | None = None

    def box(self, name: str, start: Shape, shape: Shape) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is made
            self._last = name, self._make[name][1]()
        whole = self._last[1]
        return whole[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]


def held(where: str, tensors: Mapping[str, Tensor]) -> MadeWeights:
    """Tensors that are there."""
    return MadeWeights(where, {name: (tuple(x.shape), lambda x=x: x) for name, x in tensors.items()})


SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
_UNDER = ("state_dict", "model_state_dict", "model", "module")  # Lightning's first


def open_torch_file(path: Path) -> Weights:
    """The weights in it. Raises UsageError W01, W05."""
    tree = saved(path)
    inner = next((tree[key] for key in _UNDER if isinstance(tree, Mapping) and key in tree), tree)
    tensors = tensors_in(inner)
    if not tensors:
        raise unreadable(path, ValueError("it holds no dictionary of tensors; was a whole module saved?"))
    return held(str(path), tensors)
