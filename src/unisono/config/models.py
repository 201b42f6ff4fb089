"""What a recipe may say. Frozen pydantic models: strict types, unknown keys are errors."""

import math
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model
from pydantic_core import PydanticCustomError

from unisono.spec.family import Family, one_of, split
from unisono.spec.model import ModelConfig
from unisono.spec.section import RECIPE_SECTIONS, Section
from unisono.spec.sink import SINKS
from unisono.spec.source import SOURCES
from unisono.spec.training import (
    LOSSES,
    METRICS,
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


class DataConfig(BaseModel):
    """Which samples."""

    model_config = _FROZEN

    source: str = Field(default="stdlib", description=SOURCES.listed())
    tokenizer: str = Field(default="byte", description="byte | char | hf:FOLDER (with tokenizer.json)")
    val_fraction: Share = Field(
        default=0.1, description="share held out for validation; of text, the last part of the tokens"
    )
    packing: Literal["auto", "stream", "documents", "none"] = Field(
        default="auto",
        description="a window of text: cut from one stream, several whole documents, or one document and padding;"
        " auto: stream for texts, documents for chats",
    )
    answers_only: bool = Field(
        default=True, description="of chats and completions, count only the answers in the loss"
    )
    separator: str = Field(
        default="", description="token after each document; the tokenizer's end of text when absent"
    )
    skip_bad: bool = Field(default=False, description="leave bad records out, and count them")
    cache: str = Field(
        default="~/.cache/unisono/data",
        min_length=1,
        description="folder that keeps tokenised and decoded data",
    )
    workers: Count | None = Field(
        default=None, description="processes that tokenise and decode; one per core when absent"
    )
    worker_kind: Literal["threads", "processes"] = Field(
        default="threads", description="what decodes, transforms and tokenises shards while the run trains"
    )
    transform: str = Field(
        default="",
        pattern=r"^(.+\.py:[A-Za-z_]\w*)?$",
        description="FILE.py:FUNCTION(picture, draw) of your own, which makes an array of each picture in shards",
    )
    hosts: tuple[Annotated[str, Field(pattern=r"^.+:\d{1,5}$")], ...] = Field(
        default=(), description='data hosts that read, decode and tokenise for ranks: ["10.0.0.5:7400"]'
    )
    hosts_token: str = Field(
        default="", description="file with the secret of data hosts; hosts.token in data.cache when absent"
    )


_COUPLED = [name for name in OPTIMISERS.names() if OPTIMISERS.find(name).couples]


def _first_to_last(steps: str) -> str:
    """FIRST:LAST, steps from 1 on, the first not after the last."""
    first, _, last = steps.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise PydanticCustomError(
            "no_steps", "{what}", {"what": "these are no steps; 10:12 are steps 10 to 12"}
        )
    return steps


class _Train(BaseModel):
    """The keys of `[train]` that belong to no member of a family."""

    model_config = _FROZEN

    steps: Natural = Field(default=100, description="optimiser steps")
    global_batch: Count = Field(default=32, description="samples of one step over all ranks")
    micro_batch: Count | None = Field(
        default=None, description="samples of one forward pass; derived when absent"
    )
    dtype: Literal["float32", "float64"] = Field(default="float32", description="weights and optimiser state")
    optimizer: Annotated[str, one_of(OPTIMISERS)] = Field(default="adamw", description=OPTIMISERS.listed())
    loss: Annotated[str, one_of(LOSSES)] | None = Field(
        default=None, description=f"{LOSSES.listed()}; the model's own when absent"
    )
    metrics: tuple[Annotated[str, one_of(METRICS)], ...] = Field(
        default=(), description=f"numbers that validations report besides the loss: {METRICS.listed()}"
    )
    lr: NotNegative = Field(default=1e-3, description="peak learning rate")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="how lr grows with global_batch beyond lr_base_batch"
    )
    lr_base_batch: Count | None = Field(
        default=None, description="samples of a step for which lr was chosen, for lr_scaling"
    )
    lr_schedule: Annotated[str, one_of(RATES)] = Field(default="cosine", description=RATES.listed())
    weight_decay: NotNegative = Field(
        default=0.1,
        description=f"decay of matrices: decoupled; for {', '.join(_COUPLED)} a part of the gradient",
    )
    clip: NotNegative = Field(default=1.0, description="greatest gradient norm of the whole model; 0 is off")
    eval_every: Natural = Field(default=0, description="steps between validations; 0: only at the end")
    evaluate: str | None = Field(
        default=None,
        pattern=r"^.+\.py:[A-Za-z_]\w*$",
        description="FILE.py:FUNCTION(model) of your own, called after each validation; returns numbers",
    )
    eval_batches: Count = Field(default=8, description="global batches of one validation")
    save_every: Natural | Literal["auto"] = Field(
        default=0,
        description="steps between checkpoints; 0: only at the end; auto: by the time of a save and past failures",
    )
    keep: Natural = Field(default=3, description="how many of the newest checkpoints are kept; 0: all")
    keep_every: Natural = Field(
        default=0, description="steps between checkpoints that are kept for ever, besides `keep`; 0: none"
    )
    continue_from: str | None = Field(
        default=None,
        min_length=1,
        description="a DCP folder of another program: begin from its weights, optimiser state and step",
    )
    mirror: str | None = Field(
        default=None,
        min_length=1,
        description="folder or URL that gets a copy of each checkpoint: /mnt/backup, s3://bucket/runs",
    )
    guard: Natural = Field(
        default=0, description="steps between checks that replicas agree; 0: off, 200 costs under 1 %"
    )
    on_bad: Literal["stop", "skip", "roll_back"] = Field(
        default="stop",
        description="after a step whose loss or gradient norm is NaN, or a spike: stop, skip its update, or"
        " roll_back to a checkpoint before it and leave it out",
    )
    spike: NotNegative = Field(
        default=0.0,
        description="robust standard deviations above the recent median from which a loss or norm is a spike; 0: off",
    )
    skip_around: Natural = Field(
        default=1, description="steps left out before and after a bad one, once the run has rolled back"
    )
    bad_limit: Natural = Field(
        default=10,
        description="bad steps in a row, or roll-backs without progress, before the run stops",
    )
    quarantine: bool = Field(
        default=False, description="repeat a step without the micro-batches whose loss is NaN"
    )
    freeze: tuple[str, ...] = Field(
        default=(), description="weights that do not learn: globs over their names, such as stem.*"
    )
    train_only: tuple[str, ...] = Field(
        default=(), description="the only weights that learn, besides adapters if there are any"
    )
    lora_rank: Natural = Field(
        default=0, description="rank of LoRA adapters that learn instead of the weights; 0: none"
    )
    lora_alpha: Positive | None = Field(
        default=None, description="scale of adapters times their rank; twice the rank when absent"
    )
    lora_targets: tuple[str, ...] = Field(
        default=("*",),
        description="layers that get an adapter: globs over their names, or over the last part of these",
    )
    compile: bool = Field(default=False, description="torch.compile on the blocks")
    fused: bool = Field(default=True, description="use the fused optimiser if there is one")
    async_save: bool = Field(default=False, description="write checkpoints while the next steps run")
    gc_every: Natural = Field(
        default=0,
        description="steps between garbage collections, none within a step; 0: whenever Python decides",
    )
    trace_steps: Natural = Field(default=3, description="steps drawn in the trace and the report")
    profile: Annotated[str, AfterValidator(_first_to_last)] | None = Field(
        default=None,
        description="FIRST:LAST steps that are profiled: operators, modules, memory; --profile steps=FIRST:LAST",
    )


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

    @property
    def peak_lr(self) -> float:
        """`lr`, scaled from `lr_base_batch` to `global_batch`: by their quotient (Goyal et al., 2017), or by the root
        of it (Krizhevsky, 2014; You et al., 2020)."""
        return self.lr * self.lr_factor(self.global_batch / (self.lr_base_batch or self.global_batch))

    def lr_factor(self, times: float) -> float:
        """What `lr_scaling` multiplies the learning rate by for a batch `times` as large."""
        return {"none": 1.0, "linear": times, "sqrt": math.sqrt(times)}[self.lr_scaling]

    def scaling(self) -> str:
        """How `peak_lr` came about, "" where it is `lr`. Example: `peak lr 0.016 = 0.001 x 512 / 32`."""
        if self.lr_scaling == "none":
            return ""
        quotient = f"{self.global_batch} / {self.lr_base_batch}"
        times = quotient if self.lr_scaling == "linear" else f"sqrt({quotient})"
        return f"peak lr {self.peak_lr:.6g} = {self.lr:g} x {times}"

    def rate(self) -> Callable[[int], float]:
        """The learning rate by step, from 0. Raises UsageError."""
        return partial(RATES.among(self.lr_schedule, dict(self)).at, steps=self.steps, lr=self.peak_lr)


class LaunchConfig(BaseModel):
    """Where the ranks live."""

    model_config = _FROZEN

    ranks: Count | None = Field(
        default=None, description="processes; as many as the plan has ranks when absent"
    )
    servers: Count | None = Field(
        default=None,
        description="parameter servers, for sync=ssp, async and quorum: as many replicas carry one each; absent: 1",
    )
    mailbox: str | None = Field(
        default=None,
        min_length=1,
        description="folder or URL over which this run meets other runs, its peers: s3://bucket/run; for sync=diloco",
    )
    peer: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$",
        description="name of this run among the peers of launch.mailbox; the same one when it is started again",
    )
    peers: Count = Field(
        default=2,
        description="peers that begin together and share one order of samples; others may join later",
    )
    quorum: Natural = Field(
        default=0,
        description="deltas of a round after which peers wait for others only launch.quorum_grace more; 0: all",
    )
    quorum_grace: NotNegative = Field(default=60.0, description="seconds that a quorum waits for late deltas")
    peer_timeout: Positive = Field(
        default=60.0, description="seconds without a sign of life after which a peer is lost"
    )
    threads_per_rank: Count | None = Field(
        default=None,
        description="threads of a rank; absent: 1 under sync=canonical, else an equal share of the cores",
    )
    backend: (
        Literal["auto", "gloo", "nccl", "nccl:shared", "sim"]
        | Annotated[str, Field(pattern=r"^sim:memory=[1-9][0-9]*[MG]iB$")]
    ) = Field(
        default="auto",
        description="gloo computes on CPUs, nccl on GPUs; auto: nccl if each rank has a GPU; nccl:shared: ranks take"
        " turns on the available GPUs, to try a plan; sim, sim:memory=64MiB: a simulated device for each rank",
    )
    timeout: Positive | None = Field(
        default=None,
        description="seconds that a rank may keep others waiting; from the measured time of a step when absent",
    )
    recover: bool = Field(
        default=True,
        description="replace killed or hanging ranks, the fork server and the supervisor; false: a loss ends the run",
    )
    replan: bool = Field(
        default=True,
        description="change the plan, or distribute leaves by speed, if hosts or speeds have changed and it"
        " saves time; false: only with fewer replicas",
    )
    snapshot_every: Natural | None = Field(
        default=None,
        description="steps between snapshots of each rank in memory that outlives it; 0: none; absent: if only one"
        " rank or host holds a part of the state, so often that it costs under 0.5 % of a step",
    )
    tls: bool = Field(default=False, description="encrypt the links between hosts with TLS")
    shell: str = Field(
        default="ssh -o BatchMode=yes",
        min_length=1,
        description="command that runs another one on a host of --hosts: these words, the host, the command",
    )
    host_timeout: float = Field(
        default=5.0,
        ge=0.5,
        allow_inf_nan=False,
        description="seconds without a byte from another host, after which it is lost; a host that hears nothing from"
        " the supervisor for twice as long ends its ranks and reconnects",
    )
    grace: Positive = Field(
        default=10.0, description="seconds from a SIGTERM or SIGUSR1 in which the run saves and ends"
    )
    mtbf_hours: Positive = Field(
        default=24.0,
        description="expected hours between failures until the run has seen one: for train.save_every = auto",
    )
    order: str = Field(
        default="",
        pattern=r"^((pp|dp|shard|cp|tp)(,(pp|dp|shard|cp|tp))*)?$",
        description="axes by which ranks are numbered, the innermost first: pp,dp; absent: tp,cp,shard,dp,pp",
    )


class OutConfig(BaseModel):
    """What is kept."""

    model_config = _FROZEN

    dir: str = Field(default="runs", min_length=1, description="folder that contains the run folders")
    report: bool = Field(default=True, description="write report.html and report.png")
    track: tuple[Annotated[str, one_of(SINKS)], ...] = Field(
        default=(), description=f"sinks beside metrics.jsonl, events and trace: {SINKS.listed()}"
    )


class _Recipe(BaseModel):
    """The keys and sections that every recipe has."""

    model_config = _FROZEN

    name: str = Field(
        default="run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=100,
        description="name of the folder of its runs",
    )
    seed: Annotated[Natural, Field(lt=2**63)] = Field(
        default=0, description="initialisation, sample order, dropout"
    )
    plan: str = Field(default="dp=1", description="the plan, as key=value words")
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    launch: LaunchConfig = LaunchConfig()
    out: OutConfig = OutConfig()

    def sections(self) -> list[Section]:
        """Those that capabilities bring along, as far as this recipe has them."""
        sections = (getattr(self, name) for name in RECIPE_SECTIONS.names())
        return [section for section in sections if section is not None]


def _with_sections(base: type[BaseModel]) -> Any:
    """`base` with the sections that capabilities bring along, each None where a recipe does not have it."""
    sections: dict[str, Any] = {}
    for section in map(RECIPE_SECTIONS.find, RECIPE_SECTIONS.names()):
        sections[section.name] = (section | None, Field(default=None, description=section.__doc__))
    return create_model("Recipe", __base__=base, **sections)


class Recipe(_Recipe if TYPE_CHECKING else _with_sections(_Recipe)):
    """What is computed; the plan, beside it, says how it is spread."""
