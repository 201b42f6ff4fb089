"""README.md of an exported folder: what was trained, how it was spread, and what is proven of that."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.config import ModelConfig
from unisono.observe.files import write_whole
from unisono.plan import Plan
from unisono.plan.fidelity import fidelity_of
from unisono.spec.errors import UnisonoError
from unisono.spec.runs import CONFIG, PROOF

_MEANS = {
    "EXACT": "the same bits as one device",
    "ROUNDING": "one device's numbers up to the order of sums, within a bound that follows from the dtype",
    "LOSSY": "one device's numbers up to a stated bound",
}


def write_card(out: Path, run: Path, state: Mapping[str, Any], model: ModelConfig) -> str:
    """The card's file name. Raises OSError."""
    recipe = state["recipe"]
    plan = str(state.get("plan") or recipe.get("plan", "dp=1"))
    base = model.begins_from()
    head = ["library_name: transformers", "tags:", "- unisono", "pipeline_tag: text-generation"]
    train = recipe.get("train", {})
    val = state.get("val") or []
    lines = [
        "---",
        *(head if model.reads != "pictures" else head[:3]),
        "---",
        "",
        f"# {recipe.get('name', 'run')}",
        "",
        f"Trained with Unisono for {state['step']} steps of {train.get('global_batch')} samples each"
        + (f", from the weights at `{Path(base).name}`" if base else "")
        + (f", by adapters of rank {train['lora_rank']}, merged" if train.get("lora_rank") else "")
        + ".",
        *(
            [f"Loss on held-out data after step {int(val[-1][0])}: {val[-1][1]:.4f} nats per target."]
            if val
            else []
        ),
        "",
        "## Plan",
        "",
        f"`{plan}`",
        "",
        *_proof(run, plan),
        "",
        "## Recipe",
        "",
        *_recipe(run, recipe),
        "",
    ]
    write_whole(out / "README.md", "\n".join(lines))
    return "README.md"


def _proof(run: Path, plan: str) -> list[str]:
    """What the plan promises, and what `unisono verify RUN` has found, if it has been asked."""
    try:
        fidelity = fidelity_of(Plan.parse(plan)).name
    except (UnisonoError, ValueError):
        return ["This version does not know the plan."]
    said = [f"It promises {fidelity}: {_MEANS.get(fidelity, 'a stated bound')}."]
    try:
        results = json.loads((run / PROOF).read_text(encoding="utf-8"))["results"]
        for result in results:
            word = "holds" if result["pass"] else "does not hold"
            errors = ", ".join(f"{key} {value:.1e}" for key, value in result.get("max_rel_err", {}).items())
            said.append(
                f"Proven by `unisono verify`: `{result['plan']}` {word}; largest relative errors: {errors}."
            )
    except (OSError, ValueError, KeyError, TypeError):
        said.append("It has not been proven for this run: `unisono verify RUN` does that.")
    return said


def _recipe(run: Path, recipe: Mapping[str, Any]) -> list[str]:
    """The resolved recipe; of a run that has lost it, what the checkpoint kept."""
    try:
        text = (run / CONFIG).read_text(encoding="utf-8").rstrip()
        return ["```toml", text, "```"]
    except (OSError, UnicodeDecodeError):
        return ["```json", json.dumps(recipe, indent=2, sort_keys=True), "```"]
