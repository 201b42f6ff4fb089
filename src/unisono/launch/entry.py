"""Entry functions by name: "module:function". No torch of its own."""

import importlib
from types import ModuleType
from typing import Any

from unisono.spec.errors import UsageError


def find(entry: str) -> tuple[ModuleType, Any]:
    """The module and function that "module:function" names. Raises UsageError."""
    module_name, _, name = entry.partition(":")
    module = importlib.import_module(module_name)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(
            f"module {module_name} has no function {name or '(none named)'}",
            where=getattr(module, "__file__", "") or "",
            fix='name the function to run as "module:function"',
            code="L03",
        )
    return module, function
