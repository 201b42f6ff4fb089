"""Which functions and classes of this process others may call: those that are marked, and modules that `init` names."""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from unisono_contrib.rpc.errors import refused

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__remote_calls__"


def exported(thing: F) -> F:
    """Let other workers of the run call this function, or make objects of this class and call their public methods.

    @rpc.exported
    def add(x, y): ...
    """
    setattr(thing, _MARK, True)
    return thing


def path_of(thing: Callable[..., Any] | str) -> str:
    """`module:name`, by which another worker finds a function or a class; a text stays. Raises UsageError Q04."""
    if isinstance(thing, str):
        return thing
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    if not module or not name or "<" in name:
        fix = "a function or class at the top of a module, or its path as a text: 'module:name'"
        raise refused(f"{name or thing!r} has no import path that another worker could look up", fix)
    return f"{module}:{name}"


class Exports:
    """What this worker may be asked for. modules: whose public functions and classes are exported without a mark."""

    def __init__(self, modules: Sequence[str] = ()) -> None:
        for name in modules:
            importlib.import_module(name)
        self._modules = frozenset(modules)

    def find(self, path: str) -> Callable[..., Any]:
        """The function or class of a path. Nothing is imported for it. Raises UsageError Q04."""
        module, _, name = path.partition(":")
        thing: Any = sys.modules.get(module)
        for part in name.split("."):
            thing = None if thing is None or not part.isidentifier() else vars(thing).get(part)
            if not callable(thing) or (isinstance(thing, (staticmethod, classmethod, property))):
                thing = None
        if thing is None or not self._is_exported(thing, module, name):
            fix = "@rpc.exported above it, in a module that this worker has imported; or rpc.init(modules=[...])"
            raise refused(f"this worker exports no {path}", fix, where=path)
        return thing

    def method(self, thing: Any, name: str) -> Callable[..., Any]:
        """A public method of an object whose class, or a base of it, is exported. Raises UsageError Q04."""
        kind = type(thing)
        known = any(self._is_exported(base, base.__module__, base.__qualname__) for base in kind.__mro__[:-1])
        if not known or name.startswith("_") or not callable(getattr(kind, name, None)):
            what = f"{kind.__qualname__} has no exported method {name}"
            raise refused(what, "@rpc.exported above its class, and a public method", where=kind.__module__)
        return getattr(thing, name)

    def _is_exported(self, thing: Any, module: str, name: str) -> bool:
        if vars(thing).get(_MARK, False) if hasattr(thing, "__dict__") else False:
            return True
        public = not any(part.startswith("_") for part in name.split("."))
        return module in self._modules and public and getattr(thing, "__module__", None) == module
