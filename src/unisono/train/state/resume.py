"""Which checkpoint a run goes on from, and whether it may: one rank chooses, the others only look at its choice."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from unisono.config import Recipe
from unisono.plan import Plan
from unisono.plan.grammar import member
from unisono.spec.errors import UsageError
from unisono.spec.finder import contributed
from unisono.spec.model import restored
from unisono.spec.runs import FIXED
from unisono.spec.section import RECIPE_SECTIONS
from unisono.spec.source import SOURCES
from unisono.train.state.checkpoint import load
from unisono.train.state.checkpoint.faults import damaged
from unisono.train.state.checkpoint.find import FOLDER, by_age, first_whole, pointed, resumed_first, step_of
from unisono.train.state.checkpoint.manifest import MANIFEST
from unisono.train.state.checkpoint.read import whole_manifest
from unisono.train.state.checkpoint.tensorfile import Damage
from unisono.train.state.writing import nothing_to_resume

FREE = (
    "data.cache",
    "data.workers",
    "data.worker_kind",
    "data.hosts",
    "data.hosts_token",
)  # where and how fast it is made, and not what


def choose(
    run_dir: Path,
    recipe: Recipe,
    data: str,
    last_bits: Mapping[str, Any] = MappingProxyType({}),
    named: str = "",
) -> tuple[Path, list[str]]:
    """The newest whole checkpoint of a run, or the one that is named, every byte of it read; and notes: what is wrong
    with those before it, what is given up of those after it.

    recipe: resolved. data: the fingerprint of the data that the run would go on with. last_bits: device and threads of
    a rank. Raises UsageError: K05 if the run was begun with another recipe, other data or, where the policy promises
    bits, other `last_bits`; K06 if no checkpoint is whole.
    """
    ages = by_age(run_dir)
    folder, faults = first_whole([run_dir / FOLDER / named] if named else ages)
    notes = list[str]()
    if recipe.train.mirror and (folder is None or faults or _lost(run_dir, ages)):
        mirror = contributed("unisono.train.state.checkpoint.mirror")
        place, wanted = (
            mirror.place_at(recipe.train.mirror, run_dir),
            partial(_before, run_dir, folder, named),
        )
        copy, notes = mirror.fetch(place, run_dir, wanted)
        faults, notes = ([], [*faults, *notes]) if copy is not None else (faults, notes)
        folder = copy or folder
    if folder is None:
        raise nothing_to_resume(str(run_dir), "; ".join([*faults, *notes]))
    state = load(folder, [])
    other = _fit(state, recipe, data, last_bits, folder)
    notes += [f"{fault}; going on from {folder.name}" for fault in faults]
    if named and ages and ages[0] != folder:
        notes.append(
            f"going on from {folder.name}; what the run made after it, up to {ages[0].name}, is given up"
        )
    return folder, notes + other


def _lost(run_dir: Path, ages: Sequence[Path]) -> bool:
    """Whether the checkpoint that was saved last is not there."""
    saved = pointed(run_dir)
    return saved is not None and saved not in map(step_of, ages)


def _before(run_dir: Path, folder: Path | None, named: str, steps: Iterable[int]) -> list[int]:
    """The steps to resume from rather than from `folder`, in the order of `by_age`."""
    if named:
        return [step for step in steps if step == step_of(Path(named))]
    top, have = pointed(run_dir), step_of(folder) if folder is not None else None
    ordered = sorted({*steps, *(() if have is None else (have,))}, key=partial(resumed_first, top))
    return ordered if have is None else ordered[: ordered.index(have)]


def _fit(
    state: Mapping[str, Any], recipe: Recipe, data: str, last_bits: Mapping[str, Any], folder: Path
) -> list[str]:
    """Notes. Raises UsageError K05 for what does not fit; K01 for a state that no run writes."""
    try:
        check_fits(state, recipe, data, folder)
        return _other_bits(state.get("last_bits", {}), last_bits, recipe.plan, folder)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        what = f"its state makes no sense ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        raise damaged(folder, Damage(what, file=MANIFEST)) from error


def identity(folder: Path) -> str:
    """Which save a checkpoint's folder holds, as this rank sees it: `step-000200 1f0a…`. Raises UsageError K01."""
    return f"{folder.name} {whole_manifest(folder).attempt}"


def check_fits(state: Mapping[str, Any], recipe: Recipe, data: str, folder: Path) -> None:
    """Raises UsageError K05 where a checkpoint's state is of another recipe or of other data.

    A checkpoint of a version that kept no fingerprint of its data is taken on trust.
    """
    then, now = dict(state.get("recipe", {})), recipe.model_dump(mode="json")
    # With the keys of its kind alone, as now. Another kind is another run: it may name a file, which nobody opens.
    if then.get("model") and _dig(then, "model.kind") == recipe.model.kind:
        then["model"] = restored(then["model"]).model_dump(mode="json")
    differ = [
        (name, old, new)
        for key in (*FIXED, *_pins(then, recipe))
        for name, old, new in _differences(key, _dig(then, key), _dig(now, key))
    ]
    if differ:
        said = "; ".join(f"{name} = {old!r}, not {new!r}" for name, old, new in differ)
        raise UsageError(
            f"the run was begun with {said}",
            where=str(folder),
            likely="these say what is computed, and a run that goes on computes the same",
            fix=f"leave {', '.join(name for name, *_ in differ)} as it was, or start a new run",
            code="K05",
        )
    was = _dig(state, "data.fingerprint")
    if was and was != data:
        raise UsageError(
            f"the run was begun on other data: its fingerprint was {was}, {recipe.data.source} has {data} now",
            where=str(folder),
            likely=SOURCES.read(recipe.data.source).moves,
            fix="the data as it was, or a new run",
            code="K05",
        )


def _pins(then: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """What sections of the recipe add to FIXED; those that the run was begun with and that are left out now."""
    now = recipe.sections()
    kept = {section.name for section in now}
    left_out = [name for name in RECIPE_SECTIONS.names() if then.get(name) and name not in kept]
    return [*(key for section in now for key in section.pins), *left_out]


def _other_bits(was: Mapping[str, Any], now: Mapping[str, Any], plan: str, folder: Path) -> list[str]:
    """Notes where sums will round in another way than before. Raises UsageError K05 where the policy forbids that."""
    changed = [key for key in now if key in was and was[key] != now[key]]
    if not changed:
        return []
    before, after = (", ".join(f"{key} {bits[key]}" for key in changed) for bits in (was, now))
    what = f"the run was made with {before} a rank and goes on with {after}: its last bits may differ"
    sync = Plan.parse(plan).sync
    policy = member("sync", sync)
    if policy is None or not policy.leafwise:
        return [what]
    same = (
        f"--launch.threads_per_rank {was['threads']}" if changed == ["threads"] else "the same kind of device"
    )
    raise UsageError(
        f"{what}, which sync={sync} promises they do not",
        where=str(folder),
        fix=f"{same}, or sync=every_step in the plan",
        code="K05",
    )


def _differences(key: str, was: Any, wanted: Any) -> list[tuple[str, Any, Any]]:
    """(dotted key, value then, value now) of what differs below `key`."""
    if not (isinstance(was, dict) and isinstance(wanted, dict)):
        return [(key, was, wanted)] if was != wanted else []
    parts = [part for part in was if was[part] != wanted.get(part) and f"{key}.{part}" not in FREE]
    return [(f"{key}.{part}", was[part], wanted.get(part)) for part in parts]


def _dig(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part, {}) if isinstance(tree, dict) else None
    return tree
