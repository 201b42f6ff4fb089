"""A model as `transformers` writes it down, hf:PATH_OR_NAME: priced from its config.json, not yet played."""

from typing import ClassVar

from pydantic import Field

from unisono.spec.model import ModelConfig
from unisono.spec.training import Count


class HFConfig(ModelConfig):
    """The config.json of a folder, or of a model that transformers has loaded before."""

    name: ClassVar[str] = "hf"
    main: ClassVar[str] = "kind"
    played: ClassVar[bool] = False

    kind: str = Field(pattern="^hf:.", description="hf:PATH_OR_NAME")
    context: Count | None = Field(default=None, description="tokens of a sample; the model's own when absent")
