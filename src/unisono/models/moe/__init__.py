"""A transformer with experts (Shazeer et al., "Outrageously large neural networks", 2017): priced, not yet played."""

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from unisono.models.gpt import GPTConfig
from unisono.spec.errors import Problem
from unisono.spec.model import DealtSize
from unisono.spec.training import Count, Natural, NotNegative


class MoEConfig(GPTConfig):
    """A gpt in which each token takes some of many feed-forward layers."""

    name: ClassVar[str] = "moe"
    played: ClassVar[bool] = False

    kind: Literal["moe"] = Field(default="moe", description="moe")
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

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.top_k > self.n_experts:
            what = f"a token takes top_k {self.top_k} of n_experts {self.n_experts}"
            yield Problem("C06", what, "model.top_k, model.n_experts", f"--model.top_k {self.n_experts}")

    def deals(self, axis: str) -> Sequence[DealtSize] | None:
        if axis != "ep":
            return super().deals(axis)
        return (DealtSize("the experts", "model.n_experts", self.n_experts),)

    def layout(self) -> str:
        return super(GPTConfig, self).layout()
