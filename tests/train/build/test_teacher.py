"""A student learns from a teacher under plans as on one device, and there as the formula says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from tests.threads import prove
from unisono.config import ModelConfig, Recipe, resolve
from unisono.models.build import Facts, build
from unisono.models.init import initialise
from unisono.plan import Plan
from unisono.spec.errors import UsageError
from unisono.spec.training import LOSSES
from unisono.train.data.load import load
from unisono.train.state.checkpoint import Box, save

TEACHER = {"n_layer": 3, "n_head": 4, "d_model": 24, "context": 8}
LLAMA = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "bias": False}
STUDENT = {"n_layer": 4, "n_head": 2, "d_model": 16, "context": 8, "dropout": 0.1}


def teacher_of(folder: Path, form: str = "run") -> tuple[Path, torch.nn.Module]:
    """A folder of a model with weights that matter, and the model itself."""
    fields = {**TEACHER, **(LLAMA if form == "hf" else {}), "vocab": 20}
    config = ModelConfig.model_validate(fields)
    model = build(config, Facts(), "cpu").double()
    initialise(model, 5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += (
                0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)).double()
            )
    state = {name: p.detach() for name, p in model.named_parameters()}
    path = folder / "teacher"
    if form == "hf":
        config.export(state, path, None)
    else:
        recipe = Recipe.model_validate_json(json.dumps({"model": fields})).model_dump(mode="json")
        pieces = [Box(f"model/{name}", tuple(x.shape), (0,) * x.dim(), x) for name, x in state.items()]
        save(path, 3, pieces, {"step": 3, "recipe": recipe, "plan": "dp=1"})
        (path / "config.resolved.toml").write_text("")
    return path, model.eval()


def recipe(folder: Path, teacher: Path, **model: Any) -> Recipe:
    words = folder / "words.txt"
    words.write_text("".join(chr(97 + i * i * 7 % 20 % (13 + i % 8)) for i in range(2000)))
    keys = {
        "steps": 3, "global_batch": 8, "micro_batch": 2, "lr": 0.01, "dtype": "float64",
        "loss": f"distil:teacher={teacher},weight=0.7,temperature=3",
    }  # fmt: skip
    data = {"source": f"text:{words}", "tokenizer": "char"}
    fields = {**STUDENT, "vocab": 20, **model}
    return Recipe.model_validate_json(json.dumps({"model": fields, "data": data, "train": keys}))


def first(ctx: Any, text: str, plan: str) -> tuple[float, float, int]:
    """(loss of the first step, of a validation, tensors of a checkpoint) on one rank."""
    from unisono.observe.span import Recorder
    from unisono.train.build.build import build as build_run
    from unisono.train.build.build import feeds, place_of
    from unisono.train.state.run_state import pieces_of
    from unisono.train.step.evaluate import evaluate
    from unisono.train.step.train_step import train

    got = resolve(Recipe.model_validate_json(text), plan, ctx.world)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    corpus = load(got.recipe.data, got.recipe.model)
    run = build_run(got.recipe, got.plan, place, corpus, Recorder(ctx.rank))
    feed = feeds(got.recipe, got.plan, corpus, place.device)[0]
    held = evaluate(run, [feed.fetch(0, run.leaves)])[0]
    report = next(iter(train(run, feed, 1, lambda: False)))
    return report.loss, held, len(pieces_of(run))


def test_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = torch.randn(2, 6, 5, 7, generator=generator, dtype=torch.float64).unbind()
    targets = torch.randint(7, (6, 5), generator=generator)
    targets[2] = -100
    teaching = LOSSES.read("distil:teacher=x,weight=0.25,temperature=4").teaching()
    assert teaching is not None
    rows = targets.flatten() != -100
    a, b = (log_softmax(x.flatten(0, 1)[rows] / 4, -1) for x in (ours, theirs))
    hard = cross_entropy(ours.flatten(0, 1)[rows], targets.flatten()[rows], reduction="sum")
    want = 0.75 * hard + 0.25 * 16 * kl_div(a, b, reduction="sum", log_target=True)
    assert torch.allclose(teaching.mix(ours, theirs, targets), want, rtol=1e-12)


@pytest.mark.parametrize("form", ["run", pytest.param("hf", marks=pytest.mark.slow)])
def test_one_device_is_a_plain_loop(form: str, tmp_path: Path, threads: Any) -> None:
    """In which student and teacher are two modules and torch does the rest."""
    path, teacher = teacher_of(tmp_path, form)
    asked = recipe(tmp_path, path, dropout=0.0)
    ((loss, held, pieces),) = threads(first, 1, text=asked.model_dump_json(), plan="precision=fp64")
    from unisono.train.build.build import feeds

    got = resolve(asked, "precision=fp64", 1)
    corpus = load(asked.data, asked.model)
    leaves = feeds(got.recipe, got.plan, corpus, torch.device("cpu"))[0].fetch(0, range(4))
    student = build(asked.model, Facts(vocab=corpus.vocab), "cpu").double()
    initialise(student, asked.seed)
    x, y = (torch.cat([getattr(leaf, key) for leaf in leaves]) for key in ("inputs", "targets"))
    with torch.no_grad():
        ours, theirs = student(x).flatten(0, 1), teacher(x).flatten(0, 1)
    hard = cross_entropy(ours, y.flatten())
    soft = kl_div(
        log_softmax(ours / 3, -1), log_softmax(theirs / 3, -1), reduction="batchmean", log_target=True
    )
    assert abs(loss - float(0.3 * hard + 0.7 * 9 * soft)) < 1e-6
    assert abs(held - float(hard)) < 1e-6, "validations are cross-entropy alone"
    plain = asked.model_copy(update={"train": asked.train.model_copy(update={"loss": None})})
    ((_, same, count),) = threads(first, 1, text=plain.model_dump_json(), plan="precision=fp64")
    assert pieces == count and held == same, "nothing of the teacher is kept, nor measured"


@pytest.mark.parametrize(
    "plans",
    [("dp=2", "tp=2"), *(pytest.param(p, marks=pytest.mark.slow) for p in (("shard=2", "cp=2"), ("dp=2 tp=2", "shard=2 zero=1 tp=2"), ("pp=2", "pp=2 schedule=dualpipev"), ("tp=2 pp=2", "shard=2 pp=2")))],
    ids=lambda plans: plans[0],
)  # fmt: skip
def test_proven(plans: tuple[str, ...], tmp_path: Path) -> None:
    asked = recipe(tmp_path, teacher_of(tmp_path)[0])
    for proof in prove(asked, [Plan.parse(f"{text} precision=fp64") for text in plans], 2):
        assert proof.passed, proof


def test_what_cannot_be(tmp_path: Path, threads: Any) -> None:
    path, _ = teacher_of(tmp_path)
    good = recipe(tmp_path, path)
    for code, plan, loss in (
        ("P10", "pp=2 schedule=pipedream", good.train.loss),
        ("C03", "dp=1", "distil"),
        ("C03", "dp=1", f"distil:teacher={tmp_path / 'nowhere'}"),
    ):
        asked = good.model_copy(update={"train": good.train.model_copy(update={"loss": loss, "clip": 0.0})})
        with pytest.raises(UsageError) as caught:
            threads(
                first, Plan.parse(plan).world, text=asked.model_dump_json(), plan=f"{plan} precision=fp64"
            )
        assert caught.value.code == code
