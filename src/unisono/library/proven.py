"""Verdicts of `unisono prove`, kept beside each script by the digest of its code, and printed when it is started.

`.unisono/proven.json`, in the script's folder, goes where the script goes: every host that sees the script sees it, and
who wants it in the repository commits it. A verdict holds as long as the script, and what it has imported from its
folder, is unchanged. It holds for the family of a plan: what `dp=2` proves, `dp=8` does in the same way.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from unisono.observe.files import write_whole
from unisono.plan import Plan
from unisono.spec.errors import Problem

PLACE = Path(".unisono", "proven.json")
MOST = 64  # versions of scripts that are remembered in a folder

Word = Literal["proven", "failed", "never"]


@dataclass(frozen=True, slots=True)
class ScriptProof:
    """The verdict on a script under a family of plans. plan, steps: with which it was played, if it was."""

    word: Word
    family: str
    plan: str = ""
    steps: int = 0


def family(plan: Plan) -> str:
    """`dp`, `shard` or `dp shard`: the axes on which ranks share the work; "" for one rank."""
    return " ".join(axis for axis in ("dp", "shard") if getattr(plan, axis) > 1)


def keep(script: Path, files: Sequence[str], verdicts: Mapping[Plan, tuple[bool, int]]) -> Path | None:
    """Remember verdicts: plan -> (whether it passed, steps). files: the script's own modules. Returns the file; None
    where it cannot be written, which harms nothing."""
    place = script.parent / PLACE
    with suppress(OSError, ValueError):
        paths = {Path(file) for file in (script, *files)}
        digests = {str(path.relative_to(script.parent)): _digest(path) for path in paths}
        known = _read(place)
        entry = known.pop(digests[script.name], {})
        plans = entry.get("plans", {}) if entry.get("files") == digests else {}
        for plan, (passed, steps) in verdicts.items():
            plans[family(plan)] = {"pass": passed, "plan": str(plan), "steps": steps}
        known[digests[script.name]] = {"script": script.name, "files": digests, "plans": plans}
        latest = dict(list(known.items())[-MOST:])
        return write_whole(place, json.dumps({"schema_version": 1, "scripts": latest}, indent=1) + "\n")
    return None


def look_up(script: Path, plan: Plan) -> ScriptProof:
    """Return the verdict on this script, as it is now, under plans of this family."""
    kin = family(plan)
    with suppress(OSError, ValueError, AttributeError, TypeError, KeyError):
        entry = _read(script.parent / PLACE)[_digest(script)]
        same = all(_digest(script.parent / name) == digest for name, digest in entry["files"].items())
        verdict = entry["plans"][kin] if same else {}
        if verdict:
            word: Word = "proven" if verdict["pass"] else "failed"
            return ScriptProof(word, kin, str(verdict["plan"]), int(verdict["steps"]))
    return ScriptProof("never", kin)


def note_of(proof: ScriptProof, command: str) -> Problem:
    """Return the note for whoever starts the script. command: which proves it."""
    what = {
        "proven": f"is proven under {proof.family}: {proof.steps} steps of {proof.plan} were those of one process",
        "failed": f"FAILED its proof under {proof.family} ({proof.plan}): it does not compute what one process does",
        "never": f"was never proven under {proof.family}: nobody has compared it with one process",
    }
    return Problem("V06", f"this script {what[proof.word]}", fix=command)


def _read(place: Path) -> dict[str, Any]:
    if not place.is_file():
        return {}
    return dict(json.loads(place.read_text("utf-8"))["scripts"])


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
