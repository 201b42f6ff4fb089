"""A profile in a run's report: what is in its folder is digested once, and shown as tables."""

import re
from pathlib import Path

from unisono.observe.files import write_whole
from unisono_contrib.report.profile import perfetto
from unisono_contrib.report.profile.digest import ProfileDigest, digest
from unisono_contrib.report.profile.kineto import read

FOLDER, TRACE, SUMMARY = "profile", "trace.pftrace", "summary.json"


def digested(run_dir: Path) -> ProfileDigest | None:
    """The digest of a run's profile; None where it has none. Writes the trace of all ranks beside the ranks' files.
    Raises OSError, EOFError and ValueError where a file is damaged."""
    folder = run_dir / FOLDER
    paths = sorted(folder.glob("rank*.json.gz"), key=lambda path: int(re.sub(r"\D", "", path.name) or 0))
    if not paths:
        return None
    profiles = [read(path) for path in paths]
    write_whole(folder / TRACE, perfetto.write(profiles))
    return digest(profiles)
