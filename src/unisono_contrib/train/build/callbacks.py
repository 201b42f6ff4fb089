"""What `[callbacks]` of a recipe adds to a run: an observer that calls the user's functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from unisono.spec.errors import UsageError, UserCodeError
from unisono.spec.finder import function_in
from unisono.spec.frames import of_user
from unisono.spec.sink import Observer, RunFacts, StepRecord
from unisono_contrib.config.sections.callbacks import CallbacksConfig


@dataclass(frozen=True, slots=True)
class Event:
    """What has happened. kind: a step was made, a validation, or a checkpoint is whole on disk. step: the first is 1.
    metrics: numbers by name; of a step loss, lr, grad_norm and what else it tells, of a validation its loss and
    metrics. checkpoint: of a save, its folder. run_dir: of the run."""

    kind: Literal["step", "validation", "save"]
    step: int
    run_dir: Path
    metrics: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    checkpoint: Path | None = None


def observer(section: CallbacksConfig, run: RunFacts) -> Observer:
    """Calls the functions in their order. Raises UsageError C03 where there is none of a name, and what their files
    raise."""
    functions = {text: _read(text, number) for number, text in enumerate(section.call)}
    return CallbackObserver(functions, run.run_dir)


def _read(text: str, number: int) -> Callable[[Event], Any]:
    path, _, _ = text.rpartition(":")
    try:
        return function_in(text, f"unisono_callback_{number}_{Path(path).stem}", "callbacks.call")
    except UsageError:
        raise
    except Exception as error:  # an OSError of the file's own is no full disk
        raise of_user(error, "the callback's file", path) from error


class CallbackObserver(Observer):
    """functions: by the text that means them, each called with an `Event`. Raises UserCodeError R01 for what one
    raises."""

    def __init__(self, functions: Mapping[str, Callable[[Event], Any]], run_dir: Path) -> None:
        self._functions, self._run_dir = functions, run_dir

    def observe(self, steps: Sequence[StepRecord]) -> None:
        return None

    def stepped(self, step: int, values: Mapping[str, Any]) -> None:
        self._call(Event("step", step, self._run_dir, MappingProxyType(dict(values))))

    def validated(self, step: int, values: Mapping[str, float]) -> None:
        self._call(Event("validation", step, self._run_dir, MappingProxyType(dict(values))))

    def saved(self, step: int, checkpoint: str) -> None:
        self._call(Event("save", step, self._run_dir, checkpoint=self._run_dir / checkpoint))

    def _call(self, event: Event) -> None:
        for text, function in self._functions.items():
            try:
                # Numbers that it draws, and modes that it sets, are its own.
                with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(torch.is_grad_enabled()):
                    function(event)
            except (UsageError, UserCodeError):
                raise
            except Exception as error:
                raise of_user(error, "the callback", text.rpartition(":")[0]) from error
