"""Holding a plan against its recipe: what follows is derived, what does not fit is refused, all at once."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from unisono.config.fields import SECTIONS, TOP
from unisono.config.models import ModelConfig, Recipe, TrainConfig
from unisono.plan import Batch, Plan
from unisono.plan.checks import batch_of
from unisono.plan.grammar import meant, member
from unisono.spec.errors import ConfigProblems, Problem, UsageError
from unisono.spec.model import MODELS, OwnModel
from unisono.spec.paths import at_home
from unisono.spec.source import SOURCES

_KEY = re.compile(rf"\b({'|'.join((*TOP, *SECTIONS))})(\.\w+)?")


@dataclass(frozen=True, slots=True)
class Resolved:
    """What will run: dp and micros are numbers, the batch adds up, nothing is left to derive."""

    recipe: Recipe
    plan: Plan
    origins: Mapping[str, str]
    batch: Batch


def resolve(
    recipe: Recipe,
    plan: "Plan | str",
    world: int | None = None,
    origins: Mapping[str, str] = MappingProxyType({}),
) -> Resolved:
    """Fills dp=-1 and derives the batch. `world`: ranks that exist already (torchrun), None for as many as needed.

    Resolving what is resolved changes nothing. Raises ConfigProblems with all that is wrong.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    if recipe.train.dtype == "float64" and plan.precision == "fp32" and "precision" not in plan.said:
        plan = replace(plan, precision="fp64")
    problems = recipe_problems(recipe)
    if plan.auto:
        what = "plan auto is chosen where a run begins: unisono train"
        problems.append(
            Problem("P19", what, "plan", 'a plan, for example --plan "dp=2"; unisono plan ranks them')
        )
    try:
        plan = plan.fill(recipe.launch.ranks if world is None else world)
    except UsageError as error:
        problems.append(Problem(error.code, error.what, error.where, error.fix))
    problems += [p for p in plan.check(recipe) if not (plan.dp == -1 and problems and p.code == "P14")]
    if world is not None and plan.dp != -1 and plan.world != world:
        what = f"the plan takes {plan.world} ranks, {world} were started"
        problems.append(Problem("P14", what, "plan", f"start {plan.world} ranks, or write dp=-1"))
    batch = batch_of(plan, recipe.train)[0] if plan.dp != -1 else None
    if batch is not None and recipe.train.lr_scaling != "none":
        problems += _floor(recipe.train.model_copy(update={"global_batch": batch.global_batch}))
    if problems or batch is None:
        raise ConfigProblems([replace(p, where=located(p.where, origins)) for p in problems])
    return _settled(recipe, plan, origins, batch)


def _settled(recipe: Recipe, plan: Plan, origins: Mapping[str, str], batch: Batch) -> Resolved:
    derived = dict(origins)
    sums = {"global_batch": batch.global_batch, "micro_batch": batch.micro_batch}
    for leaf, value in sums.items():
        if getattr(recipe.train, leaf) != value:
            derived[f"train.{leaf}"] = f"derived: {batch}"
    plan = replace(plan, micros=batch.micros)
    train, launch = recipe.train.model_copy(update=sums), recipe.launch
    if text := train.scaling():
        derived["train.lr"] = f"{origins.get('train.lr', 'default')}; {text}"
    policy = member("sync", plan.sync)
    if policy is not None and policy.leafwise and launch.threads_per_rank is None:
        # Sums on a CPU depend on the number of threads, and a share of the cores on the number of ranks.
        launch = launch.model_copy(update={"threads_per_rank": 1})
        derived["launch.threads_per_rank"] = (
            f"derived: sync={plan.sync} promises the same bits on any number of ranks"
        )
    settled = recipe.model_copy(update={"train": train, "launch": launch, "plan": str(plan)})
    return Resolved(settled, plan, derived, batch)


def on_any_ranks(recipe: Recipe) -> Recipe:
    """The recipe without its own number of ranks and without peers, for plans that are asked about rather than played
    here."""
    nobody = {"ranks": None, "mailbox": None, "peer": None}
    return recipe.model_copy(update={"launch": recipe.launch.model_copy(update=nobody)})


def located(where: str, origins: Mapping[str, str]) -> str:
    """`plan.tp, model.n_head` with the place of each key where one is known: `plan.tp (my.toml:3), ...`."""

    def place(match: re.Match[str]) -> str:
        key = "plan" if match[1] == "plan" else match[0]
        origin = origins.get(key, "default")
        return match[0] if origin == "default" else f"{match[0]} ({origin})"

    return ", ".join(_KEY.sub(place, part) if _KEY.fullmatch(part) else part for part in where.split(", "))


def recipe_problems(recipe: Recipe) -> list[Problem]:
    """What does not fit together inside a recipe, whatever the plan."""
    return [*_model(recipe.model), *_data(recipe), *_train(recipe.train), *_of_classes(recipe)]


def _of_classes(recipe: Recipe) -> Iterator[Problem]:
    """A model that draws pictures gives no probabilities of classes, which losses and metrics by name are about."""
    for key, value in (("loss", recipe.train.loss), ("metrics", recipe.train.metrics)):
        if value and recipe.model.draws:
            what = f"train.{key} is about classes, and a model of kind {recipe.model.kind} learns velocities"
            yield Problem("C06", what, f"train.{key}, model.kind", f"leave train.{key} out")


def _model(model: ModelConfig) -> list[Problem]:
    path, py, name = model.kind.rpartition(".py:")
    if py and isinstance(model, OwnModel):
        return _user_model(Path(f"{path}.py"), name)
    if not model.played:
        what = f"model.kind {model.kind} is not yet in this version"
        played = " ".join(name for name in MODELS.names() if MODELS.find(name).played)
        return [Problem("C10", what, "model.kind", f"one of: {played}")]
    return list(model.problems())


def _user_model(path: Path, name: str) -> list[Problem]:
    """A model file is read, not imported: it most likely imports torch, and this answer comes before that."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except OSError:
        return [
            Problem(
                "C06", f"no such model file: {path}", "model.kind", "paths are relative to the working folder"
            )
        ]
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        return [
            Problem(
                "C06",
                f"{path} is not Python: {error}",
                f"{path}:{line}" if line else str(path),
                "mend the file",
            )
        ]
    names = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    wild = any(
        isinstance(n, ast.Import | ast.ImportFrom | ast.Assign) and name in ast.dump(n) for n in tree.body
    )
    if name in names or wild:
        return []
    fix = f"found there: {' '.join(names) or 'nothing'}"
    return [Problem("C06", f"{path} has no function {name}{meant(name, names)}", "model.kind", fix)]


def _data(recipe: Recipe) -> list[Problem]:
    text, tokenizer, model = recipe.data.source, recipe.data.tokenizer, recipe.model
    problems = []
    if not tokenizer.startswith("hf:") and tokenizer not in ("byte", "char"):
        what = f"data.tokenizer {tokenizer} is not known{meant(tokenizer, ('byte', 'char'))}"
        problems.append(Problem("C06", what, "data.tokenizer", "byte, char or hf:FOLDER"))
    folder = at_home(tokenizer.removeprefix("hf:"))
    if tokenizer.startswith("hf:") and not any(p.is_file() for p in (folder, folder / "tokenizer.json")):
        what = f"data.tokenizer {tokenizer}: neither a folder with tokenizer.json nor that file"
        fix = "hf:FOLDER as transformers saves it; names are not looked up on the network"
        problems.append(Problem("D11", what, "data.tokenizer", fix))
    try:
        source = SOURCES.read(text, "data.source")
    except UsageError as error:
        return [Problem(error.code, error.what, "data.source", error.fix), *problems]
    if source.gives and model.reads not in ("", source.gives):
        what = f"a model of kind {model.kind} reads {model.reads}, {text} gives {source.gives}"
        option = source.giving(model.reads)
        kinds = [f"kind {name}" for name in MODELS.names() if MODELS.find(name).reads == source.gives]
        fixes = [*([f"{option} behind data.source"] if option else []), *kinds, "another source"]
        problems.append(Problem("C06", what, "model.kind, data.source", ", or ".join(fixes)))
    return problems


def _train(train: TrainConfig) -> list[Problem]:
    problems: list[Problem] = []
    for leaf in sorted((train.model_fields_set & train.options()) - train.meant()):
        # A run folder of long ago has every key, with its default.
        if getattr(train, leaf) != type(train).model_fields[leaf].default:
            what = f"train.{leaf} means nothing to {train.optimizer} and {train.lr_schedule}"
            problems.append(Problem("C06", what, f"train.{leaf}", "take it out"))
    if train.evaluate is not None and not Path(train.evaluate.rpartition(":")[0]).is_file():
        what = f"no such file: {train.evaluate.rpartition(':')[0]}"
        problems.append(Problem("C06", what, "train.evaluate", "paths are relative to the working folder"))
    if (train.lr_scaling == "none") != (train.lr_base_batch is None):
        off = train.lr_scaling == "none"
        what = (
            f"train.lr_scaling {train.lr_scaling} "
            + ("has no use for" if off else "needs")
            + " lr_base_batch"
        )
        fix = (
            "--train.lr_scaling linear or sqrt"
            if off
            else "--train.lr_base_batch, for which train.lr was chosen"
        )
        problems.append(Problem("C06", what, "train.lr_scaling, train.lr_base_batch", fix))
    return problems if train.lr_scaling != "none" else [*problems, *_floor(train)]


def _floor(train: TrainConfig) -> Iterator[Problem]:
    """What is wrong with the last learning rate. train: with the batch by which the peak is scaled."""
    if train.min_lr is not None and train.min_lr > train.peak_lr:
        what = f"min_lr {train.min_lr} is above lr {train.peak_lr:g}"
        yield Problem("C06", what, "train.min_lr, train.lr", "a min_lr of at most lr")
