"""Files of `torch.save`, read without running anything in them.

A pickle names functions, and loading calls them. Here only what makes a tensor has a meaning; every other name stands
for a thing that keeps what it was given and does nothing. Names of Python's own library that no weights need, such as
`os.system`, are refused: who wrote them had something else in mind. Tensors are views of the mapped file.
"""

import _compat_pickle
import io
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from unisono.models.folder import unreadable
from unisono.spec.errors import UsageError

# Of Python's own modules, those whose names frameworks write into checkpoints; none is imported for that.
_HARMLESS = frozenset(
    "_codecs argparse collections copyreg datetime decimal enum functools pathlib types typing uuid".split()
)
_PLAIN: Mapping[str, Any] = {
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.list": list,
    "builtins.dict": dict,
    "builtins.int": int,
    "builtins.float": float,
    "builtins.complex": complex,
    "builtins.bytearray": bytearray,
    "builtins.slice": slice,
    "builtins.range": range,
    "builtins.object": object,
    "collections.OrderedDict": OrderedDict,
    "torch.Size": tuple,
}
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


class Inert(dict):
    """Stands for whatever a pickle names: keeps what it is given. name: of what it stands for. given: the arguments;
    state: the attributes."""

    name = ""
    given: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> "Inert":
        made = super().__new__(cls)
        made.given, made.state = args, {}
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def append(self, _: Any) -> None:
        """As a list has it."""

    def extend(self, _: Any) -> None:
        """As a list has it."""

    def add(self, _: Any) -> None:
        """As a set has it."""


def _rebuilt(storage: Tensor, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if offset < 0 or (0 not in tuple(size) and not 0 <= last < len(storage)):
        raise ValueError("a tensor does not lie in its storage")
    return storage.as_strided(tuple(size), tuple(stride), storage.storage_offset() + offset)


def _same(tensor: Tensor, *_: Any) -> Tensor:
    return tensor


_TENSORS: Mapping[str, Callable[..., Tensor]] = {
    "torch._utils._rebuild_tensor_v2": _rebuilt,
    "torch._utils._rebuild_tensor": _rebuilt,
    "torch._utils._rebuild_parameter": _same,
    "torch._utils._rebuild_parameter_with_state": _same,
}


class Unpickler(pickle.Unpickler):
    """Knows tensors and plain containers; all else is inert. storage(key, dtype, elements): the numbers of one."""

    def __init__(
        self, file: BinaryIO, where: Path, storage: Callable[[str, torch.dtype, int], Tensor] | None = None
    ) -> None:
        super().__init__(file)
        self._where, self._storage = where, storage

    def find_class(self, module: str, name: str) -> Any:
        module = _compat_pickle.IMPORT_MAPPING.get(
            module, module
        )  # torch.save writes names as Python 2 had them
        full = f"{module}.{name}"
        if full in _PLAIN:
            return _PLAIN[full]
        if full in _TENSORS:
            return _TENSORS[full]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        root = module.partition(".")[0]
        if root in sys.stdlib_module_names and root not in _HARMLESS:
            raise _refused(self._where, full)
        return type("_Inert", (Inert,), {"name": full})

    def persistent_load(self, pid: Any) -> Tensor:
        match pid:
            case ("storage", kind, str(key), _, int(elements)) if self._storage is not None:
                dtype = _STORAGES.get(str(getattr(kind, "name", "")).rpartition(".")[2], torch.uint8)
                return self._storage(key, dtype, elements)
        raise pickle.UnpicklingError("it refers to something beside the file")


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
    with _told(path), path.open("rb") as file:
        return Unpickler(file, path).load()


def saved(path: Path, at: int = 0, length: int | None = None) -> Any:
    """What `torch.save` wrote into a file, or into `length` bytes of it from `at` on. Raises UsageError W01, W05."""
    with _told(path), path.open("rb") as file:
        part = _Part(file, at, path.stat().st_size - at if length is None else length)
        if not zipfile.is_zipfile(part):
            raise ValueError("it is not what torch.save writes since torch 1.6")
        mapped = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        with zipfile.ZipFile(part) as archive:
            names = archive.namelist()
            pickled = next(name for name in names if name.endswith("data.pkl"))
            stem = pickled.removesuffix("data.pkl")

            def storage(key: str, dtype: torch.dtype, elements: int) -> Tensor:
                info = archive.getinfo(f"{stem}data/{key}")
                if info.compress_type != zipfile.ZIP_STORED:
                    raise ValueError("its tensors are compressed")
                part.seek(info.header_offset)
                head = part.read(30)
                first = at + info.header_offset + 30 + int.from_bytes(head[26:28], "little")
                first += int.from_bytes(head[28:30], "little")
                raw = mapped[first : first + info.file_size]
                if len(raw) < elements * dtype.itemsize:
                    raise ValueError("a tensor is cut short")
                return (raw if first % dtype.itemsize == 0 else raw.clone()).view(dtype)

            return Unpickler(io.BytesIO(archive.read(pickled)), path, storage).load()


class _told:
    """Whatever goes wrong inside is told as a file that cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, UsageError):
            raise unreadable(self.path, error) from error


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


def tensors_in(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    """All tensors of nested mappings under dotted names."""
    found: dict[str, Tensor] = {}
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(value, Tensor):
            found[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping) and not isinstance(value, Inert):
            found |= tensors_in(value, f"{prefix}{key}.")
    return found
