"""What a recipe may say. Frozen pydantic models: strict types, unknown keys are errors."""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model
from pydantic_core import PydanticCustomError

from unisono.spec.errors import UsageError
from unisono.spec.family import Family, split
from unisono.spec.sink import SINKS
from unisono.spec.training import (
    OPTIMISERS,
    RATES,
    Count,
    Natural,
    NotNegative,
    Optimiser,
    Positive,
    Share,
)

_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelConfig(BaseModel):
    """Which model: gpt, convnet, mlp or FILE.py:FUNCTION. Sizes of another kind of model are refused when given."""

    model_config = _FROZEN

    kind: str = Field(
        default="gpt",
        description="gpt | convnet | mlp | FILE.py:FUNCTION; priced only: moe | dlrm | hf:PATH_OR_NAME",
    )
    n_layer: Count = Field(
        default=4, description="blocks (gpt: transformer blocks, convnet: residual blocks)"
    )
    n_head: Count = Field(default=4, description="attention heads")
    n_kv_head: Count | None = Field(default=None, description="key-value heads; as many as heads when absent")
    d_model: Count = Field(default=128, description="width of the residual stream")
    d_ff: Count | None = Field(
        default=None, description="feed-forward width; 4 d_model, for swiglu 8/3 d_model when absent"
    )
    context: Count = Field(default=64, description="tokens of a sample")
    vocab: Count | None = Field(default=None, description="size of the vocabulary; from the data when absent")
    dropout: Share = Field(default=0.0, description="probability of dropping an element")
    bias: bool = Field(default=True, description="biases in linear layers and norms")
    tie_embeddings: bool = Field(default=True, description="one weight for the embedding and the classifier")
    positions: Literal["learned", "rotary"] = Field(default="learned", description="how positions enter")
    activation: Literal["gelu", "swiglu"] = Field(default="gelu", description="feed-forward non-linearity")
    norm: Literal["layer", "rms"] = Field(
        default="layer", description="normalisation before attention and feed-forward"
    )
    rope_theta: Positive = Field(default=10000.0, description="base of the rotary frequencies")
    hidden: tuple[Count, ...] = Field(
        default=(128, 128), min_length=1, description="mlp: inner width of each block of two layers"
    )
    channels: Count = Field(default=32, description="convnet: channels of the first stage")
    image: tuple[Count, Count, Count] | None = Field(
        default=None, description="channels, height, width; from the data when absent"
    )
    classes: Count | None = Field(
        default=None, description="mlp, convnet: classes; from the data when absent"
    )

    n_experts: Count = Field(default=8, description="moe: experts of a sparse layer")
    top_k: Count = Field(default=2, description="moe: experts that a token takes")
    d_expert: Count | None = Field(default=None, description="moe: width of one expert; d_ff's when absent")
    n_shared_experts: Natural = Field(
        default=0, description="moe: experts of d_expert that every token takes"
    )
    capacity_factor: NotNegative = Field(
        default=0.0, description="moe: room of an expert in shares of the mean, padded up to it; 0: no limit"
    )
    load_factor: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = Field(
        default=1.0, description="moe: tokens of the fullest expert over the mean; 1 when balanced"
    )
    moe_every: Count = Field(
        default=1, description="moe: how many layers there are for each sparse one, which is the last of them"
    )
    n_dense_first: Natural = Field(default=0, description="moe: first layers that are dense")
    resnet: Literal["50", "101", "152"] | None = Field(
        default=None, description="convnet: the residual network of so many layers instead; priced only"
    )
    tables: tuple[Count, ...] = Field(default=(), description="dlrm: rows of each embedding table")
    d_table: Count = Field(default=64, description="dlrm: width of an embedding")
    lookups: Count = Field(default=1, description="dlrm: rows that a sample reads from each table")
    n_dense: Count = Field(default=13, description="dlrm: continuous features of a sample")
    bottom: tuple[Count, ...] = Field(
        default=(512, 256), description="dlrm: layers on the continuous features, before the last of d_table"
    )
    top: tuple[Count, ...] = Field(
        default=(512, 256), description="dlrm: layers on the interactions, before the last of 1"
    )

    @property
    def kv_heads(self) -> int:
        """Key-value heads as played."""
        return self.n_kv_head or self.n_head

    @property
    def ff_width(self) -> int:
        """Feed-forward width as played.

        Swiglu has three matrices, so 8/3 of the width keeps the size that 4 has with two (Shazeer, 2020).
        """
        if self.d_ff is not None:
            return self.d_ff
        if self.activation == "gelu":
            return 4 * self.d_model
        return -(-8 * self.d_model // 24) * 8

    @property
    def depth(self) -> int | None:
        """Blocks that `pp` can deal, None where only the model itself knows."""
        if self.kind == "mlp":
            return len(self.hidden)
        return self.n_layer if self.kind in ("gpt", "moe", "convnet") and not self.resnet else None

    @property
    def depth_key(self) -> str:
        return "model.hidden" if self.kind == "mlp" else "model.n_layer"


class DataConfig(BaseModel):
    """Which samples."""

    model_config = _FROZEN

    source: str = Field(
        default="stdlib", description="stdlib | digits | text:PATH | bin:PATH (uint16 tokens)"
    )
    tokenizer: str = Field(default="byte", description="byte | char")
    val_fraction: Share = Field(
        default=0.1, description="share held out, the last part of the tokens for text"
    )


def _one_of(family: Family[Any]) -> AfterValidator:
    """A name of the family, with options behind it or without."""

    def known(text: str) -> str:
        try:
            family.find(split(text)[0])
        except UsageError as error:
            raise PydanticCustomError("no_member", "{what}", {"what": error.what}) from error
        return text

    return AfterValidator(known)


def _is_sink(text: str) -> str:
    try:
        SINKS.read(text)
    except UsageError as error:
        raise PydanticCustomError("no_sink", "{what}", {"what": error.what}) from error
    return text


class _Train(BaseModel):
    """The keys of `[train]` that belong to no member of a family."""

    model_config = _FROZEN

    steps: Natural = Field(default=100, description="optimiser steps")
    global_batch: Count = Field(default=32, description="samples of one step over all ranks")
    micro_batch: Count | None = Field(
        default=None, description="samples of one forward pass; derived when absent"
    )
    dtype: Literal["float32", "float64"] = Field(default="float32", description="weights and optimiser state")
    optimizer: Annotated[str, _one_of(OPTIMISERS)] = Field(default="adamw", description=OPTIMISERS.listed())
    lr: NotNegative = Field(default=1e-3, description="peak learning rate")
    lr_schedule: Annotated[str, _one_of(RATES)] = Field(default="cosine", description=RATES.listed())
    weight_decay: NotNegative = Field(default=0.1, description="decoupled decay of matrices")
    clip: NotNegative = Field(default=1.0, description="greatest gradient norm of the whole model; 0 is off")
    eval_every: Natural = Field(default=0, description="steps between validations; 0: only at the end")
    eval_batches: Count = Field(default=8, description="global batches of one validation")
    save_every: Natural = Field(default=0, description="steps between checkpoints; 0: only at the end")
    guard: Natural = Field(
        default=0, description="steps between checks that replicas agree; 0: off, 200 costs under 1 %"
    )
    compile: bool = Field(default=False, description="torch.compile on the blocks")
    fused: bool = Field(default=True, description="the fused optimiser where there is one")
    async_save: bool = Field(default=False, description="write checkpoints beside the next steps")
    trace_steps: Natural = Field(default=3, description="steps drawn in the trace and the report")


def _with_options(base: type[BaseModel], *families: Family[Any]) -> Any:
    """`base` with the options of all members of the families as keys of its own."""
    options: dict[str, Any] = {}
    for family in families:
        for member in map(family.find, family.names()):
            for key, field in member.model_fields.items():
                options.setdefault(key, (field.annotation, copy(field)))
    return create_model(base.__name__, __base__=base, **options)


class TrainConfig(_with_options(_Train, OPTIMISERS, RATES)):
    """How the weights change. Everything counts in optimiser steps and global samples, never per process."""

    @classmethod
    def options(cls) -> frozenset[str]:
        """The keys that belong to members, of which each has some."""
        return frozenset(cls.model_fields) - frozenset(_Train.model_fields)

    def meant(self) -> frozenset[str]:
        """Of `options`, those that the chosen members have. Raises UsageError."""
        named = ((OPTIMISERS, self.optimizer), (RATES, self.lr_schedule))
        return frozenset(key for family, text in named for key in family.find(split(text)[0]).model_fields)

    def optimiser(self) -> Optimiser:
        """The chosen optimiser with its options. Raises UsageError."""
        return OPTIMISERS.among(self.optimizer, dict(self))

    def rate(self) -> Callable[[int], float]:
        """The learning rate by step, from 0. Raises UsageError."""
        return partial(RATES.among(self.lr_schedule, dict(self)).at, steps=self.steps, lr=self.lr)


class LaunchConfig(BaseModel):
    """Where the ranks live."""

    model_config = _FROZEN

    ranks: Count | None = Field(default=None, description="processes; the plan's world when absent")
    threads_per_rank: Count | None = Field(
        default=None, description="threads of a rank; the cores shared out when absent"
    )
    backend: Literal["auto", "gloo", "nccl"] = Field(default="auto")
    timeout: Positive = Field(default=600.0, description="seconds that a collective may take")


class OutConfig(BaseModel):
    """What is kept."""

    model_config = _FROZEN

    dir: str = Field(default="runs", min_length=1, description="folder of run folders")
    report: bool = Field(default=True, description="write report.html and report.png")
    track: tuple[Annotated[str, AfterValidator(_is_sink)], ...] = Field(
        default=(), description=f"sinks beside metrics.jsonl, events and trace: {SINKS.listed()}"
    )


class Recipe(BaseModel):
    """What is computed; the plan, beside it, says how it is spread."""

    model_config = _FROZEN

    name: str = Field(
        default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="folder of its runs"
    )
    seed: Natural = Field(default=0, description="initialisation, sample order, dropout")
    plan: str = Field(default="dp=1", description="how it is spread, as key=value words")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    launch: LaunchConfig = LaunchConfig()
    out: OutConfig = OutConfig()
