"""From a config.json to a model of ours: the library's own modules are made without memory, and run once without
numbers to be taken apart where they show that they can be."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unisono.models.hf.apart import Making, taken_apart
from unisono.models.hf.attention import WAY, CurrentNoise, HeldDropout, register
from unisono.models.hf.constants import keep_constants
from unisono.models.hf.described import size
from unisono.models.hf.net import ForeignModel
from unisono.models.hf.rules import rules_seen
from unisono.models.hf.swap import scaled_table, swap
from unisono.models.hf.watched import watch
from unisono.spec.errors import UsageError
from unisono.spec.frames import is_memory
from unisono.spec.model import Facts
from unisono.spec.quiet import importing

_LAYERS = 10_000
"""More than any model has: modules of so many alone would take all memory."""
_UNPLAYED = {
    "router_jitter_noise": "its draws would depend on who computes what",
    "layerdrop": "its draws would depend on who computes what",
    "output_router_logits": "that loss multiplies sums over all layers and all samples of a step, which no rank has",
}
"""Settings of a config.json that no plan could keep, and why."""


def foreign_model(config: Mapping[str, Any], context: int, facts: Facts, where: str) -> ForeignModel:
    """The model on the meta device. config: of its config.json, `where`. context: tokens of a sample, 0 for pictures.
    Raises UsageError where the library is missing, or the model cannot be played."""
    with torch.device("meta"):
        making = made_of(config, where)
        _check(making, facts, context, where)
        rules = rules_seen(making)
        theirs = {id(p): name for name, p in reversed(list(making.named_parameters(remove_duplicate=False)))}
        their_ties = _ties(making)
        origins = swap(making)
        _drop_by_noise(making)
        keep_constants(making)
        table = next((n for n, m in making.named_modules() if m is making.get_input_embeddings()), "")
        dealt = scaled_table(making, table) if table else ""
        reads = str(getattr(making, "main_input_name", "input_ids"))
        inputs = _inputs(making, reads, context, facts)
        making.train()
        if not hasattr(making(**inputs), "logits"):  # the run gives attention its cores
            what = f"{type(making).__name__} of {where} gives no logits, from which a loss could be taken"
            fix = '"architectures" of config.json naming a model with a head, as LlamaForCausalLM'
            raise UsageError(what, where="model.kind", fix=fix, code="C22")
        seen = watch(making, inputs)
        model = taken_apart(
            Making(making, seen, origins, theirs, their_ties, rules, reads, context, table, dealt)
        )
        _check_parts(model, inputs[reads], tuple(seen.result.logits.shape), where)
    return model


def _check_parts(model: ForeignModel, inputs: Tensor, shape: tuple[int, ...], where: str) -> None:
    """That the parts, one after the other, come to logits of the model's own shape."""
    try:
        with torch.no_grad():
            size = tuple(model(inputs).shape)
    except Exception as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        raise _no_parts(where, said) from error
    if size != shape:
        raise _no_parts(where, f"its parts give logits {list(size)}, all of it {list(shape)}")


def _no_parts(where: str, why: str) -> UsageError:
    what = f"the model of {where} cannot be taken apart into stem, layers and head: {why}"
    fix = "another model, or a function of your own that returns it (FILE.py:FUNCTION)"
    return UsageError(what, where="model.kind", fix=fix, code="P13")


def made_of(config: Mapping[str, Any], where: str) -> Any:
    """The library's model, of the class that its config names, else one of causal language."""
    try:
        import transformers
    except ModuleNotFoundError:
        what = "a model of kind hf: is played by transformers, which is not installed"
        raise UsageError(what, where="model.kind", fix="pip install 'unisono[hf]'", code="C10") from None
    if size(config, "num_hidden_layers", "n_layer") > _LAYERS:
        what = f"the model of {where} has more than {_LAYERS} layers"
        raise UsageError(
            what, where="model.kind", fix="the config.json as transformers writes it", code="C22"
        )
    try:
        with importing():  # transformers imports its parts when they are named
            register()
            known = transformers.AutoConfig.for_model(**config)
            named = [getattr(transformers, str(n), None) for n in config.get("architectures") or ()]
            models = (n for n in named if isinstance(n, type) and issubclass(n, transformers.PreTrainedModel))
            kind: Any = next(models, None)
            if kind is None:
                kind = transformers.AutoModelForCausalLM._model_mapping[type(known)]  # type: ignore[index]
            return kind._from_config(known, attn_implementation=WAY)
    except Exception as error:  # whatever the library makes of what a config.json says
        if is_memory(error):
            raise
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        fix = "the config.json as transformers writes it"
        raise UsageError(
            f"transformers makes no model of {where}: {said}", code="C22", where="model.kind", fix=fix
        ) from error


def _check(model: Any, facts: Facts, context: int, where: str) -> None:
    """That data and model fit, and that nothing in it is random in a way of its own."""
    config = model.config
    vocab = getattr(config, "vocab_size", None)
    if facts.vocab and vocab and facts.vocab > vocab:
        what = f"the data has {facts.vocab} tokens, the model of {where} knows {vocab}"
        fix = f"a tokenizer of at most {vocab} tokens, or a larger vocab_size"
        raise UsageError(what, where="data.tokenizer, model.kind", fix=fix, code="C22")
    longest = getattr(config, "max_position_embeddings", None)
    if context and longest and context > longest:
        what = f"context {context} is longer than the {longest} positions of {where}"
        raise UsageError(what, where="model.context", fix=f"--model.context {longest}", code="C22")
    if facts.classes and not context and facts.classes != config.num_labels:
        what = f"the data has {facts.classes} classes, the model of {where} {config.num_labels}"
        fix = f'"num_labels": {facts.classes} in config.json'
        raise UsageError(what, where="data.source, model.kind", fix=fix, code="C22")
    for key, why in _UNPLAYED.items():
        if getattr(config, key, None):
            what = f"{key} of {where} cannot be played: {why}"
            raise UsageError(what, where="model.kind", fix=f'"{key}": false in config.json', code="C22")


def _inputs(model: Any, reads: str, context: int, facts: Facts) -> dict[str, Any]:
    """What the first run is given: two samples, by which a batch is told from other sizes."""
    if reads != "pixel_values":
        return {reads: torch.zeros(2, context, dtype=torch.int64), "use_cache": False}
    config = model.config
    side = config.image_size if isinstance(config.image_size, (list, tuple)) else (config.image_size,) * 2
    shape = facts.sample_shape or (config.num_channels, *side)
    if tuple(shape) != (config.num_channels, *side):
        what = f"the model reads pictures of {(config.num_channels, *side)}, the data has {tuple(shape)}"
        fix = "image_size and num_channels of config.json as the data's"
        raise UsageError(what, where="data.source, model.kind", fix=fix, code="C22")
    return {reads: torch.zeros(2, *shape)}


def _drop_by_noise(model: nn.Module) -> None:
    """Dropout whose mask depends on the sample alone, in the place of torch's."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Dropout) and module.p > 0.0:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, HeldDropout(module.p, CurrentNoise()))


def _ties(model: nn.Module) -> dict[str, str]:
    """The library's alias → its owner: the first name of one parameter."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: owner for name, p in named if (owner := first.setdefault(id(p), name)) != name}
