"""Jobs of schedulers: what `unisono launch` writes, submits and asks about. One scheduler a file in `schedulers`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from unisono.spec.finder import Finder
from unisono_contrib.submit.job import JobFile, JobRequest


class JobState(StrEnum):
    """Where a submitted job is. STOPPED: it has saved, and nobody starts it again. UNKNOWN: the scheduler does not know
    it any more."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Submitter(ABC):
    """A scheduler. arrays: one submission may be several runs (`--each`)."""

    name: ClassVar[str]
    arrays: ClassVar[bool] = False

    @abstractmethod
    def files(self, job: JobRequest) -> Sequence[JobFile]:
        """The files of a job, the one to submit first. Nothing is written or asked; the same job has the same files.
        Raises UsageError C06 where the recipe does not say what this scheduler needs."""

    @abstractmethod
    def submit(self, job: JobRequest, folder: Path) -> str:
        """Hand the job, whose files are in `folder`, to the scheduler; its id there. Raises UsageError L14 where the
        scheduler's command is missing or refuses."""

    @abstractmethod
    def state(self, job: str, folder: Path) -> JobState:
        """The state of the job with this id. Raises UsageError L14."""


SUBMITTERS: Finder[Submitter] = Finder(
    "scheduler", "unisono_contrib.submit.schedulers", Submitter, "unisono launch"
)
