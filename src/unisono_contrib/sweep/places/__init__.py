"""Where the trials of a sweep are trained, one place a file."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import ClassVar, Protocol

from unisono.spec.finder import Finder
from unisono_contrib.sweep.room import Need
from unisono_contrib.sweep.trial import PieceOutcome, TrialJob


class Workers(Protocol):
    """Those who train trials, while a sweep is at work."""

    def start(self, job: TrialJob, need: Need) -> None:
        """Start a piece of a trial."""
        ...

    def ended(self) -> Iterator[tuple[int, PieceOutcome]]:
        """Wait until a piece has ended; each that has, by its trial."""
        ...


class TrialPlace(ABC):
    """A place. Its workers end with the context: asked to save, then killed."""

    name: ClassVar[str]

    @abstractmethod
    def open(self, grace: float) -> AbstractContextManager[Workers]:
        """The workers. grace: seconds in which a trial may save at the end. Raises UsageError E01 where what it takes
        is not installed."""


PLACES: Finder[TrialPlace] = Finder("place of trials", "unisono_contrib.sweep.places", TrialPlace, "--on")
