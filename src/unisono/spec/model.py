"""`[model]` of a recipe: what the declaration of every model kind says. No torch.

A kind is a folder of `models/`: `models/gpt/__init__.py` declares it, `net.py` beside it holds the module.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema, core_schema

from unisono.spec.errors import Problem, UsageError
from unisono.spec.family import Family, Member
from unisono.spec.training import Count, Share
from unisono.spec.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor, nn

    Layout = Mapping[str, tuple[Any, ...]]  # of models.hf.names


@dataclass(frozen=True, slots=True)
class Facts:
    """What the data decides about a model: size of the vocabulary, number of classes, shape of a sample; None where
    it is not known. rows: of each table that a sample's indices point into."""

    vocab: int | None = None
    classes: int | None = None
    sample_shape: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None


class DealtSize(NamedTuple):
    """A size that an axis of the plan deals out: `the heads`, `model.n_head`, 8."""

    what: str
    key: str
    size: int


class ModelConfig(Member):
    """`[model]` of a recipe: the keys of one kind of model. `ModelConfig(kind="mlp", hidden=(64,))` is an MLPConfig.

    reads: what a sample is: "tokens", "pictures", "clicks"; "" where only the model's author knows. played: `train`
    plays it; others are priced alone. attends: a transformer, priced along every axis from its sizes. grids: `tp=RxC`
    deals its products in two dims. by_weights: pp deals equal weights to its stages when priced, as `train` does,
    rather than equal arithmetic. depth_key: the key that says its depth. selective: its anatomy says
    what `recompute=selective` computes again, or may say it. packs: attention and positions of its blocks stay inside
    the documents of a window, as `Noise.documents` says them. imports: a library of others plays it, which takes long
    to import: once, before ranks are forked. samples: the module of `train.data`
    whose `prepared(config, corpus)` makes what it reads of what a source gives; "": it reads that. draws: `sample`
    draws pictures from it.
    """

    model_config = ConfigDict(strict=True)

    name: ClassVar[str] = ""
    reads: ClassVar[str] = ""
    played: ClassVar[bool] = True
    attends: ClassVar[bool] = False
    grids: ClassVar[bool] = False
    by_weights: ClassVar[bool] = True
    depth_key: ClassVar[str] = "model.n_layer"
    selective: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    imports: ClassVar[bool] = False
    samples: ClassVar[str] = ""
    draws: ClassVar[bool] = False

    kind: str = Field(default="gpt", description="which kind of model")
    weights: str | None = Field(
        default=None,
        description="weights to begin from, in whatever form; drawn from the seed when absent",
    )

    def __new__(cls, /, **keys: Any) -> "ModelConfig":
        member = kind_of(keys.get("kind", "gpt")) if cls is ModelConfig else cls
        return super().__new__(member)  # pyright: ignore[reportArgumentType]

    if TYPE_CHECKING:  # the keys are those of the kind

        def __init__(self, /, **keys: Any) -> None: ...

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if Member not in cls.__bases__:  # a kind, rather than the base of all
            return handler(source)
        return core_schema.no_info_plain_validator_function(lambda value: _of_its_kind(value))

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        """Of the base: any of the kinds."""
        if Member not in cls.__bases__:
            return handler(schema)
        kinds = [MODELS.find(name).model_json_schema() for name in MODELS.names()]
        return {"description": listed(), "anyOf": kinds}

    def model_post_init(self, context: Any, /) -> None:
        self.__pydantic_fields_set__.add("kind")  # without it, the other keys mean nothing to who reads them

    @property
    def depth(self) -> int | None:
        """Blocks that `pp` can deal, None where only the module knows."""
        return None

    @property
    def record(self) -> tuple[int, int]:
        """Numbers and indices of a sample, where samples are clicks."""
        return 0, 0

    @property
    def window(self) -> int:
        """Tokens of a sample, where samples are tokens."""
        return getattr(self, "context", 0)

    def problems(self) -> Iterator[Problem]:
        """Sizes that do not go together."""
        yield from ()

    def deals(self, axis: str) -> Sequence[DealtSize] | None:
        """What `tp`, `cp` or `ep` deals out among its ranks, for `cp` positions, then heads; None: nothing that it
        could; (): the module knows."""
        return None

    def refuses(self, plan: Any) -> Iterator[Problem]:
        """What of a plan a model of this kind cannot be played with."""
        yield from ()

    def sized(self, facts: Facts) -> Facts:
        """`facts`, and in their place what the recipe says itself."""
        sizes = [getattr(self, key, None) for key in ("vocab", "classes", "image")]
        return Facts(
            sizes[0] or facts.vocab, sizes[1] or facts.classes, sizes[2] or facts.sample_shape, facts.rows
        )

    def workload(self, facts: Facts) -> Workload:
        """Products, weights and activations, part by part, for prices. Raises UsageError C22 where a size is open."""
        raise UsageError(f"a model of kind {self.kind} has no price", code="C22", where="model.kind")

    def build(self, facts: Facts) -> "nn.Module":
        """The module with stem, blocks, head, and anatomy. Raises UsageError where a size is open."""
        raise UsageError(f"a model of kind {self.kind} is priced, not played", code="C10", where="model.kind")

    def begins_from(self) -> str | None:
        """Where the first weights lie; None where they are drawn."""
        return self.weights

    def layouts(self, shapes: Mapping[str, tuple[int, ...]]) -> "Mapping[str, Layout]":
        """How weights that others wrote may lie, beside under our own names, as `models.weights` reads them. shapes: of
        the model's tensors, without aliases. By the layouts' names."""
        return {}

    def layout(self) -> str:
        """The layout in which other programs load it. Raises UsageError F01 where there is none."""
        raise UsageError(
            f"a model of kind {self.kind!r} has no layout that transformers loads",
            code="F01",
            where="model.kind",
            fix='export a model of kind "gpt"; the checkpoint itself holds the weights as safetensors',
        )

    def export(self, state: "Mapping[str, Tensor]", out: Path, tokenizer: str | None) -> dict[str, Any]:
        """Write the full tensors `state` into `out`, as `layout` says, and tell what was written."""
        return {"layout": self.layout()}


class PictureModel(ModelConfig):
    """A model of pictures of so many classes."""

    reads: ClassVar[str] = "pictures"

    dropout: Share = Field(default=0.0, description="probability of dropping an element")
    bias: bool = Field(default=True, description="biases in linear layers and norms")
    image: tuple[Count, Count, Count] | None = Field(
        default=None, description="channels, height, width; from the data when absent"
    )
    classes: Count | None = Field(
        default=None, description="mlp, convnet: classes; from the data when absent"
    )

    def targets(self, facts: Facts, code: str = "C00") -> tuple[int, tuple[int, ...]]:
        """(classes, shape of a sample). Raises UsageError where one is open."""
        facts = self.sized(facts)
        if facts.classes is None or facts.sample_shape is None:
            raise UsageError(
                f"{self.kind} needs the number of classes and the shape of a picture, which are not known without data",
                where="model.image, model.classes",
                fix="--model.image 3,224,224 --model.classes 1000",
                code=code,
            )
        return facts.classes, facts.sample_shape


class OwnModel(ModelConfig):
    """A function of the user's own, FILE.py:FUNCTION; it gets all keys that any kind has."""

    name: ClassVar[str] = "FILE.py:FUNCTION"
    grids: ClassVar[bool] = True  # the module knows
    selective: ClassVar[bool] = True

    def deals(self, axis: str) -> Sequence[DealtSize] | None:
        return () if axis == "tp" else None


MODELS: Family[ModelConfig] = Family(
    "model kind", "unisono.models", ModelConfig, "model.kind", ("C06", "C06"), folders=True
)


def listed() -> str:
    """All that `kind` may say, those that are played first."""
    shown = {name: f"{name}:PATH_OR_NAME" if MODELS.find(name).main else name for name in MODELS.names()}
    played, priced = (
        " | ".join(shown[name] for name in shown if MODELS.find(name).played is live)
        for live in (True, False)
    )
    return f"{played} | FILE.py:FUNCTION" + (f"; priced only: {priced}" if priced else "")


def kind_of(kind: str) -> type[ModelConfig]:
    """The class whose fields are the keys of `[model]` under this `kind`. Raises UsageError C06."""
    path, py, name = kind.rpartition(".py:")
    if not py:
        return MODELS.find(kind.partition(":")[0])
    return MODELS.find(kind) if _declares(Path(f"{path}.py"), name) else own_model()


def _declares(path: Path, name: str) -> bool:
    """Whether the class `name` of `path` is a kind of its own rather than a function: its file is read, not imported,
    for a function's most likely imports torch."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return False  # the recipe's problems say so
    bases = [b for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name for b in n.bases]
    return any(ast.unparse(base).endswith(("Config", "PictureModel")) for base in bases)


@cache
def own_model() -> type[ModelConfig]:
    """`OwnModel` with the keys of all kinds."""
    keys: dict[str, Any] = {
        key: (field.annotation, field) for key, field in model_keys().items() if key != "kind"
    }
    return create_model("OwnModel", __base__=OwnModel, __module__=__name__, **keys)


@cache
def model_keys() -> Mapping[str, Any]:
    """Every key of `[model]` that some kind has, as pydantic's field; those of a gpt come first."""
    keys = dict(ModelConfig.model_fields)
    for name in sorted(MODELS.names(), key=lambda name: name != "gpt"):
        for key, field in MODELS.find(name).model_fields.items():
            keys.setdefault(key, field)
    return keys


def _of_its_kind(value: Any) -> ModelConfig:
    """A declaration as it is; a mapping as the declaration of its kind, lists for tuples as JSON and TOML have them."""
    if isinstance(value, ModelConfig):
        return value
    if not isinstance(value, Mapping):
        raise ValueError("a table of keys is wanted")
    plain: dict[str, Any] = {
        key: tuple(part) if isinstance(part, list) else part for key, part in value.items()
    }
    kind = plain.get("kind", "gpt")
    return (kind_of(kind) if isinstance(kind, str) else MODELS.find("gpt")).model_validate(plain)


def restored(saved: Mapping[str, Any]) -> ModelConfig:
    """`[model]` as a checkpoint holds it; older ones hold the keys of all kinds."""
    member = kind_of(saved.get("kind", "gpt"))
    return _of_its_kind({key: value for key, value in saved.items() if key in member.model_fields})
