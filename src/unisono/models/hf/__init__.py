"""A model of `transformers` by its config.json, hf:PATH_OR_NAME: played by its own code, cut as its modules show."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from unisono.models.hf.described import described, size
from unisono.plan.grammar import member
from unisono.spec.errors import Problem, UsageError
from unisono.spec.model import DealtSize, Facts, ModelConfig
from unisono.spec.training import Count

if TYPE_CHECKING:
    from torch import Tensor, nn

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PICKLED = "pytorch_model.bin"
# What a run does not begin from, though it is weights: beginning from the seed instead would tell nobody.
_OTHERS = ("quantised.safetensors", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")

_LOOKING_BOTH_WAYS = ("bert", "roberta", "distilbert", "electra", "vit", "deit")


class HFConfig(ModelConfig):
    """The config.json of a folder, or of a model that transformers has loaded before."""

    name: ClassVar[str] = "hf"
    main: ClassVar[str] = "kind"
    selective: ClassVar[bool] = True
    imports: ClassVar[bool] = True
    depth_key: ClassVar[str] = "model.kind"

    kind: str = Field(pattern="^hf:.", description="hf:PATH_OR_NAME")
    context: Count | None = Field(default=None, description="tokens of a sample; the model's own when absent")
    pretrained: bool | None = Field(
        default=None, description="hf: begin from the folder's weights; absent: where it holds some"
    )

    @property
    def described(self) -> Mapping[str, Any]:
        """What the config.json says; {} where there is none."""
        try:
            return described(self.kind)[0]
        except UsageError:
            return {}

    @property
    def reads(self) -> str:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        """Pictures where the model says how large they are."""
        described = self.described
        return "" if not described else "pictures" if "image_size" in described else "tokens"

    @property
    def packs(self) -> bool:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        """Language models that look back are told of documents; others compute positions themselves."""
        return self.deals("cp") is not None

    @property
    def depth(self) -> int | None:
        return size(self.described, "num_hidden_layers", "n_layer") or None

    @property
    def window(self) -> int:
        """Tokens of a sample; 0 where samples are pictures."""
        described = self.described
        if "image_size" in described:
            return 0
        return self.context or size(described, "max_position_embeddings", "n_positions")

    def problems(self) -> Iterator[Problem]:
        try:
            described(self.kind)
        except UsageError as error:
            yield Problem(error.code, error.what, error.where, error.fix)
            return
        longest = size(self.described, "max_position_embeddings", "n_positions")
        if self.context and 0 < longest < self.context:
            what = f"context {self.context} is longer than the {longest} positions of {self.kind}"
            yield Problem("C22", what, "model.context", f"--model.context {longest}")

    def deals(self, axis: str) -> Sequence[DealtSize] | None:
        described = self.described
        heads = size(described, "num_attention_heads", "n_head")
        if not heads or described.get("model_type") in _LOOKING_BOTH_WAYS:
            return None
        experts = size(described, "num_local_experts", "num_experts")
        if axis == "ep":
            return (DealtSize("the experts", "model.kind", experts),) if experts else None
        groups = DealtSize(
            "the key-value heads", "model.kind", size(described, "num_key_value_heads") or heads
        )
        positions = DealtSize("the context", "model.context", self.window)
        if axis == "cp":
            return positions, DealtSize("the heads", "model.kind", heads), groups
        return (groups, positions) if axis == "tp" else None

    def refuses(self, plan: Any) -> Iterator[Problem]:
        virtual = getattr(member("sync", plan.sync), "virtual", 1)
        if virtual > 1:
            what = f"sync={plan.sync}: virtual shards compute layers of our own, not those of {self.kind}"
            yield Problem("P12", what, "plan.sync, model.kind", "sync=canonical")

    def begins_from(self) -> str | None:
        if self.weights is not None or self.pretrained is False:
            return self.weights
        folder = described(self.kind)[1].parent
        if "quantization_config" in self.described:
            raise self._unlearnable(folder, "config.json has a quantization_config")
        if any((folder / name).is_file() for name in WEIGHTS):
            return str(folder)
        if (folder / PICKLED).is_file():
            return str(folder / PICKLED)
        if odd := [name for name in _OTHERS if (folder / name).is_file()]:
            raise self._unlearnable(folder, f"it holds {odd[0]}")
        if self.pretrained:
            what = f"{folder} holds no weights, only a config.json"
            fix = "a folder with model.safetensors, or pretrained = false for weights drawn from the seed"
            raise UsageError(what, where="model.pretrained, model.kind", fix=fix, code="W01")
        return None

    def _unlearnable(self, folder: Path, why: str) -> UsageError:
        what = f"no run begins from the weights of {folder}: {why}"
        fix = "a folder of whole weights in safetensors; pretrained = false draws them from the seed"
        return UsageError(what, where="model.kind", fix=fix, code="W01")

    def layout(self) -> str:
        return str(self.described.get("model_type", ""))

    def export(self, state: "Mapping[str, Tensor]", out: Path, tokenizer: str | None) -> dict[str, Any]:
        from unisono.models.hf.folder import write_folder

        return write_folder(self, state, out, tokenizer)

    def build(self, facts: Facts) -> "nn.Module":
        from unisono.models.hf.build import foreign_model

        config, path = described(self.kind)
        return foreign_model(config, self.window, facts, str(path))
