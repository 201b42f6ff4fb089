"""The instructions of a pickle, played without the means to run anything.

Python's own machine calls whatever a pickle names, lets it set attributes of whatever it has made, and lets a few bytes
of a pickle ask for all memory, or for a nesting that no stack holds. Here a name is what `found` says; calls go to
`Makes` and `Inert` alone, attributes are those of inert things, and what containers take is counted against the file.
"""

import io
import pickle
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

_INPYTHON: Any = pickle._Unpickler
"""Python's own machine, of which each instruction can be another: the one in C cannot be told what not to do."""
_NAMES = 10_000  # different ones in one file
_PLAIN_KEYS = (str, bytes, int, float, bool, type(None), torch.dtype)
_LONGEST = 4096  # letters of a key: each use of a longer one, of a few bytes, would compare them all
_SMALL = 1 << 53  # numbers as keys: among larger ones many can be found that fall into one place
_COPIED = (list, dict, set, tuple, frozenset, str, bytes)


class Inert(dict):
    """Stands for whatever a pickle names: keeps what it is given. name: of what it stands for. arguments: of its call.
    state: the attributes."""

    name = ""
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> "Inert":
        thing = super().__new__(cls)
        thing.arguments, thing.state = args, {}
        return thing

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


class Makes:
    """A function that a pickle may call, and do nothing else with."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make


def simple(key: Any) -> Any:
    """The key itself, or an inert thing that holds it. Raises ValueError for one that is not compared in no time.

    A tuple is held: its parts may be tuples, each there many times, so that to look at all of them takes for ever; and
    for its hash, which is no secret, many others can be found that have the same.
    """
    if isinstance(key, tuple):
        return Inert(key)
    if isinstance(key, str | bytes) and len(key) > _LONGEST:
        raise ValueError(f"a key of {len(key)} letters")
    if isinstance(key, int | float) and not -_SMALL <= key <= _SMALL:
        raise ValueError("a number that is no key")
    if not isinstance(key, (*_PLAIN_KEYS, Inert, Makes)) and not _is_inert(key):
        raise ValueError(f"a key of type {type(key).__name__}")
    return key


def listed(items: Any) -> Any:
    """The items themselves. Raises ValueError for what is no plain container: a tensor takes itself apart for ever."""
    if not isinstance(items, list | tuple | set | frozenset):
        raise ValueError(f"{type(items).__name__} in the place of a list")
    return items


def _is_inert(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Inert)


class PickleMachine(_INPYTHON):
    """Plays the pickle in `data`."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._room = len(data)  # elements that calls may copy: a pickle that means well writes each
        self._names: dict[tuple[str, str], Any] = {}

    @abstractmethod
    def resolve(self, module: str, name: str) -> Any:
        """What a name stands for."""

    @abstractmethod
    def referred(self, pid: Any) -> Any:
        """What a reference out of the pickle stands for."""

    def find_class(self, module: str, name: str) -> Any:
        if (simple(module), simple(name)) not in self._names:
            if len(self._names) >= _NAMES:
                raise ValueError("it names more things than any program has")
            self._names[module, name] = self.resolve(module, name)
        return self._names[module, name]

    def persistent_load(self, pid: Any) -> Any:
        return self.referred(pid)

    def _called(self, what: Any, arguments: Any) -> Any:
        if not isinstance(arguments, tuple):
            raise ValueError("a call without its arguments")
        self._room -= len(arguments)
        if isinstance(what, Makes):
            self._room -= sum(len(argument) for argument in arguments if isinstance(argument, _COPIED))
        if self._room < 0:
            raise ValueError("it copies more than it holds")
        if isinstance(what, Makes):
            return what.make(*arguments)
        if _is_inert(what):
            return what(*arguments)
        raise ValueError(f"it calls {type(what).__name__}, which is nothing to be called")

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._called(self.stack[-1], arguments)

    def _newobj(self) -> None:
        arguments = self.stack.pop()
        self.append(self._called(self.stack.pop(), arguments))

    def _newobj_ex(self) -> None:
        del self.stack[-1]  # arguments by name
        self._newobj()

    def _instantiate(self, klass: Any, args: Any) -> None:
        self.append(self._called(klass, tuple(args)))

    def _build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Inert | OrderedDict):
            raise ValueError(f"it changes {type(self.stack[-1]).__name__}, which is nothing to be changed")
        if isinstance(self.stack[-1], Inert):
            self.stack[-1].state = state

    def _append(self) -> None:
        self._extended([self.stack.pop()])

    def _appends(self) -> None:
        self._extended(self.pop_mark())

    def _extended(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], list):
            self.stack[-1].extend(items)
        elif not isinstance(self.stack[-1], Inert):
            raise ValueError(f"it extends {type(self.stack[-1]).__name__}")

    def _setitem(self) -> None:
        value = self.stack.pop()
        self._filled([self.stack.pop(), value])

    def _setitems(self) -> None:
        self._filled(self.pop_mark())

    def _dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._filled(items)

    def _filled(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict):
            raise ValueError(f"it fills {type(self.stack[-1]).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][simple(key)] = value

    def _additems(self) -> None:
        items = self.pop_mark()
        if not isinstance(self.stack[-1], set | Inert):
            raise ValueError(f"it adds to {type(self.stack[-1]).__name__}")
        if isinstance(self.stack[-1], set):
            self.stack[-1].update(_simple(items))

    def _frozenset(self) -> None:
        self.append(frozenset(_simple(self.pop_mark())))

    def _unplayed(self) -> None:
        raise ValueError("an instruction that no writer of weights gives")

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **_INPYTHON.dispatch,
        pickle.REDUCE[0]: _reduce,
        pickle.BUILD[0]: _build,
        pickle.NEWOBJ[0]: _newobj,
        pickle.NEWOBJ_EX[0]: _newobj_ex,
        pickle.APPEND[0]: _append,
        pickle.APPENDS[0]: _appends,
        pickle.SETITEM[0]: _setitem,
        pickle.SETITEMS[0]: _setitems,
        pickle.DICT[0]: _dict,
        pickle.ADDITEMS[0]: _additems,
        pickle.FROZENSET[0]: _frozenset,
        pickle.BYTEARRAY8[0]: _unplayed,
        pickle.NEXT_BUFFER[0]: _unplayed,
        pickle.READONLY_BUFFER[0]: _unplayed,
        pickle.EXT1[0]: _unplayed,
        pickle.EXT2[0]: _unplayed,
        pickle.EXT4[0]: _unplayed,
        pickle.PERSID[0]: _unplayed,
    }


def _simple(items: Iterable[Any]) -> list[Any]:
    return [simple(item) for item in items]
