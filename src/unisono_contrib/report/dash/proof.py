"""What is proven of a run: the last `unisono verify` of its folder, and which recipe that was."""

import hashlib
import json
from contextlib import suppress
from typing import Any

from unisono.report.collect import RunRecord
from unisono.spec.doubtful import TEXT, read_text
from unisono.spec.runs import PROOF

_ASIDE = ("name", "out", "job", "slurm", "k8s", "network", "launch")  # sections that change no number


def recipe_hash(run: RunRecord) -> str:
    """Twelve letters that are the same for recipes that compute the same; "" where the recipe cannot be read."""
    meant = {key: value for key, value in run.config.items() if key not in _ASIDE}
    text = json.dumps(meant, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12] if meant else ""


def badge(run: RunRecord) -> dict[str, Any]:
    """`level` (same, bounds, wrong, quick, none), `said`, `recipe` and `at`, Unix time of the proof or None."""
    path = run.folder / PROOF
    level, said, at = "none", "Not proven yet: unisono verify RUN", None
    parity = str(run.summary.get("parity") or "")
    if "PASS" in parity:
        level, said = "quick", f"Checked when it ended: {parity}"
    with suppress(OSError, ValueError, RecursionError):
        results = json.loads(read_text(path, TEXT))["results"]
        at = path.stat().st_mtime
        if not all(result["pass"] for result in results):
            level, said = "wrong", "unisono verify failed: it does not compute what one device computes"
        elif all(result.get("bit_identical") for result in results):
            level, said = "same", "Same bits as one device"
        else:
            level, said = "bounds", "As one device, within the bounds of rounding"
    return {"level": level, "said": said, "recipe": recipe_hash(run), "at": at}
