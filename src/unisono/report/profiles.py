"""What a report says of profiled steps, where a run has some: the sister package reads them."""

from dataclasses import dataclass
from typing import Any

from unisono.report.collect import RunRecord
from unisono.spec.finder import sister


@dataclass(frozen=True)
class ProfilePart:
    """section: of the page. numbers: for `--json`. missing: what could not be read, in sentences."""

    section: str = ""
    numbers: dict[str, Any] | None = None
    missing: tuple[str, ...] = ()


NO_PROFILE = ProfilePart()


def of(run: RunRecord) -> ProfilePart:
    """The profile of a run; nothing where it has none. What is damaged is named, never fatal."""
    folder, pages = run.folder / "profile", None
    if folder.is_dir():
        pages = sister("unisono.report.profile.page")
    if pages is None:
        return NO_PROFILE
    try:
        seen = pages.digested(run.folder)
    except (OSError, EOFError, ValueError, RecursionError) as error:
        return ProfilePart(missing=(f"profile/ is damaged: {error}",))
    return NO_PROFILE if seen is None else ProfilePart(pages.section(run, seen), pages.as_json(run, seen))
