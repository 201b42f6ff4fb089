"""What can be priced: the model of a recipe, and the software that `--stack` names, which may be scaled to a run that
was measured. Torch is imported for models that have to be traced, for no other."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono import config
from unisono.config import Loaded
from unisono.config.resolve import located, recipe_problems
from unisono.models.hf.described import config_of, read_config
from unisono.planner.from_recipe import request_of
from unisono.planner.hf_config import transformer_of
from unisono.planner.model_kinds import Model, with_optimiser
from unisono.planner.simulate import simulate
from unisono.planner.stack import Stack, read_stack, scaled, stack
from unisono.planner.toml_tables import Table, is_file
from unisono.planner.work import sample
from unisono.planner.work.networks import Network
from unisono.planner.work.transformer import Transformer, transformer
from unisono.spec.errors import ConfigProblems, UnisonoError, UsageError
from unisono.spec.model import Facts, ModelConfig
from unisono.spec.quiet import importing
from unisono.spec.source import SOURCES


def model_of(got: Loaded, environ: Mapping[str, str]) -> Model:
    """What the recipe's model is in numbers. environ: says where transformers keeps what it has loaded before.

    Raises UsageError for what cannot be priced, ConfigProblems where sizes do not fit together.
    """
    train, model = got.recipe.train, _model(got, environ)
    if isinstance(model, Transformer) and train.lora_rank:
        model = replace(model, lora=train.lora_rank)
    averages = sum(section.kept for section in got.recipe.sections())
    return with_optimiser(model, train.optimiser(), averages)


def _model(got: Loaded, environ: Mapping[str, str]) -> Model:
    recipe, kind = got.recipe, got.recipe.model.kind
    if kind.startswith("hf:"):
        return _from_hf(got, kind.removeprefix("hf:"), environ)
    if ".py:" in kind:
        wrong = [p for p in recipe_problems(recipe) if p.where == "model.kind"]
        if wrong:
            raise ConfigProblems([replace(p, where=located(p.where, got.origins)) for p in wrong])
        return _from_file(got)
    with _located(got):
        if recipe.model.attends:
            wrong = [replace(p, where=located(p.where, got.origins)) for p in recipe.model.problems()]
            if wrong:
                raise ConfigProblems(wrong)
            return transformer(recipe.model, _vocab(got))
        facts = _facts(got)
        parts = recipe.model.workload(facts)
        return Network(parts, by_weights=recipe.model.by_weights, sample=_sample(recipe.model, facts))


def _facts(got: Loaded) -> Facts:
    """What is known of the data without reading it."""
    data = got.recipe.data
    return SOURCES.read(data.source, "data.source").facts(data.tokenizer)


def _sample(model: ModelConfig, facts: Facts) -> sample.Sample:
    """Bytes of a sample of what is no transformer."""
    if model.reads == "clicks":
        return sample.features(*model.record)
    return sample.picture(model.sized(facts).sample_shape or ())


def _vocab(got: Loaded) -> int:
    vocab = got.recipe.model.sized(_facts(got)).vocab
    if vocab is None:
        what = f"the vocabulary of tokenizer {got.recipe.data.tokenizer} is not known without the data"
        raise _wrong(got, what, "model.vocab", "--model.vocab 51200")
    return vocab


def _from_hf(got: Loaded, name: str, environ: Mapping[str, str]) -> Model:
    path = config_of(name, environ)
    if path is None:
        raise _wrong(got, f"no config.json of {name}: neither such a folder nor in the cache of transformers",
                     "model.kind", "hf:FOLDER with a config.json; nothing is loaded from the network")  # fmt: skip
    with _located(got):
        config = read_config(path)
    context = got.recipe.model.window or None
    transformer = transformer_of(config, context, where=str(path))
    return transformer if transformer is not None else _traced_hf(got, path, config, context)


def _traced_hf(got: Loaded, path: Path, config: Mapping[str, Any], context: int | None) -> Network:
    """A family that is not known in numbers, traced: of the class that its config names, as `train` plays it."""
    import torch

    with _tracing(got), importing():
        import transformers

        foreign_config = transformers.AutoConfig.for_model(**config)
        named = [getattr(transformers, str(name), None) for name in config.get("architectures") or ()]
        kind = next((n for n in named if isinstance(n, type) and hasattr(n, "_from_config")), None)
        with torch.device("meta"):
            made_by = kind._from_config if kind is not None else transformers.AutoModelForCausalLM.from_config
            model = made_by(foreign_config)
    longest = getattr(foreign_config, "max_position_embeddings", None) or 64
    image = _image(foreign_config) if model.main_input_name == "pixel_values" else None

    def forward(x: torch.Tensor) -> torch.Tensor:
        if image:
            return model(pixel_values=x).logits
        # A whole mask is the one that transformers does not look into.
        mask = torch.zeros(x.shape[0], 1, x.shape[1], x.shape[1], device="meta")
        more = {"use_cache": False} if kind is None else {}
        return model(input_ids=x, attention_mask=mask, **more).logits

    return _traced(got, model, forward, image, context or longest)


def _image(config: Any) -> tuple[int, ...]:
    """Channels, height and width of a picture that a model of transformers reads."""
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return (config.num_channels, height, width)


def _from_file(got: Loaded) -> Network:
    import torch

    from unisono.models.build import cut_or_whole, user_model
    from unisono.models.plain import UserModel

    facts = got.recipe.model.sized(_facts(got))
    image = facts.sample_shape
    if image and facts.classes is None:
        what = "the number of classes is not known without the data"
        raise _wrong(got, what, "model.classes", "--model.classes 1000")
    with torch.device("meta"):
        model = user_model(got.recipe.model, facts if image else replace(facts, vocab=_vocab(got)))
    if isinstance(model, UserModel):
        shape = image or (got.recipe.model.window,)
        sample = torch.zeros((1, *shape), dtype=torch.float32 if image else torch.int64)
        model = cut_or_whole(model, sample)
    network = _traced(got, model, model, image, got.recipe.model.window)
    return network.whole if isinstance(model, UserModel) else network


def _traced(got: Loaded, model: Any, forward: Any, image: tuple[int, ...] | None, context: int) -> Network:
    import torch

    from unisono.models.chain import summed_cross_entropy
    from unisono.models.trace import trace

    def inputs(batch: int) -> torch.Tensor:
        if image:
            return torch.zeros(batch, *image, device="meta")
        return torch.zeros(batch, context, dtype=torch.int64, device="meta")

    def loss(y: torch.Tensor) -> torch.Tensor:
        shape = y.shape[:1] if image else y.shape[:-1]
        targets = torch.zeros(shape, dtype=torch.int64, device="meta")
        return getattr(model, "loss", summed_cross_entropy)(y, targets)

    with _tracing(got), torch.device("meta"):
        parts = trace(model, inputs, forward=forward, loss=loss)
    read = sample.picture(image) if image else sample.text(context, got.recipe.model.sized(Facts()).vocab)
    return Network(parts, tokens=1 if image else context, sample=read)


@contextmanager
def _located(got: Loaded) -> Iterator[None]:
    """What a kind says of its sizes, with the places of the keys."""
    try:
        yield
    except ConfigProblems:
        raise
    except UsageError as error:
        error.where = located(error.where, got.origins)
        raise


@contextmanager
def _tracing(got: Loaded) -> Iterator[None]:
    """What goes wrong while a model runs without values is the user's to know, in one sentence."""
    try:
        yield
    except (UnisonoError, ModuleNotFoundError):
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"the model cannot be traced without values: {first[:200]}"
        fix = (
            "a forward pass that branches on no tensor's value; or the kinds gpt and moe with the same sizes"
        )
        raise _wrong(got, what, "model.kind", fix) from error


def _wrong(got: Loaded, what: str, where: str, fix: str) -> UsageError:
    return UsageError(what, where=located(where, got.origins), fix=fix, code="C22")


_RUN = ("recipe", "cluster", "plan", "micro_batch", "step_s")
_CLOSE, _LEAST, _TRIES = 1e-9, 1e-3, 100


def stack_of(text: str, where: str, environ: Mapping[str, str]) -> Stack:
    """The stack of a name or a file, for prices on a cluster. Raises UsageError."""
    if not is_file(text):
        return stack(text)
    read, run = read_stack(Path(text))
    return read if run is None else scaled(read, _factor(read, run, Path(text).parent, environ))


def _factor(software: Stack, run: Table, folder: Path, environ: Mapping[str, str]) -> float:
    """How many times as long as its price a measured run took: that of which the price is the measurement."""
    run.known(_RUN)
    flags = [("plan", run.text("plan"))]
    if "micro_batch" in run.values:
        flags.append(("train.micro_batch", str(run.count("micro_batch", 1))))
    got = config.load(str(folder / run.text("recipe")), flags)
    ask = request_of(got, model_of(got, environ), run.text("cluster"), software)
    took, factor, tries = run.number("step_s")[0], 1.0, 0
    while factor > _LEAST and tries < _TRIES:
        tries += 1
        off = took / simulate(replace(ask, stack=scaled(software, factor))).price.step
        if abs(off - 1.0) < _CLOSE:
            return factor
        factor *= off
    raise run.wrong(
        "no such run takes so few seconds: what its messages wait is more", "step_s", "seconds of one step"
    )
