"""A transformer with experts (Shazeer et al., "Outrageously large neural networks", 2017)."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from unisono.models.gpt import GPTConfig
from unisono.spec.errors import Problem
from unisono.spec.model import DealtSize, Facts
from unisono.spec.training import Count, Natural, NotNegative

if TYPE_CHECKING:
    from torch import nn


class MoEConfig(GPTConfig):
    """A gpt in which each token takes some of many feed-forward layers."""

    name: ClassVar[str] = "moe"
    grids: ClassVar[bool] = False

    kind: Literal["moe"] = Field(default="moe", description="moe")
    n_experts: Count = Field(default=8, description="moe: experts of a sparse layer")
    top_k: Count = Field(
        default=2, description="moe: experts that a token takes; on average where experts choose tokens"
    )
    d_expert: Count | None = Field(default=None, description="moe: width of one expert; d_ff's when absent")
    n_shared_experts: Natural = Field(
        default=0, description="moe: experts of d_expert that every token takes"
    )
    router: Literal["topk", "switch", "expert_choice"] = Field(
        default="topk",
        description="moe: a token takes its top_k experts, or its best one with the gate as it is (switch), or each"
        " expert takes its best tokens of a micro-batch (expert_choice)",
    )
    gate: Literal["softmax", "sigmoid"] = Field(
        default="softmax",
        description="moe: what makes a score of an expert, and its weight, of a router's number",
    )
    renormalize: bool = Field(
        default=True,
        description="moe: the weights of the experts that a token takes add up to 1 (router topk)",
    )
    aux_loss: NotNegative = Field(
        default=0.0, description="moe: weight of the loss that keeps experts alike in load; 0: none"
    )
    z_loss: NotNegative = Field(
        default=0.0, description="moe: weight of the loss that keeps the router's numbers small; 0: none"
    )
    bias_rate: NotNegative = Field(
        default=0.0,
        description="moe: by how much a step moves the bias that balances the load without a loss; 0: none",
    )
    capacity_factor: NotNegative = Field(
        default=0.0,
        description="moe: room of an expert for tokens of one micro-batch, in shares of the mean; 0: no limit",
    )
    load_factor: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = Field(
        default=1.0,
        description="moe: tokens of the fullest expert over the mean, for prices; 1 when balanced",
    )
    moe_every: Count = Field(
        default=1, description="moe: how many layers there are for each sparse one, which is the last of them"
    )
    n_dense_first: Natural = Field(default=0, description="moe: first layers that are dense")

    @property
    def expert_width(self) -> int:
        """Hidden width of one expert as played."""
        return self.d_expert or self.ff_width

    def sparse(self, layer: int) -> bool:
        """Whether layer number `layer`, from 0, has experts."""
        return layer >= self.n_dense_first and (layer - self.n_dense_first + 1) % self.moe_every == 0

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.top_k > self.n_experts:
            what = f"a token takes top_k {self.top_k} of n_experts {self.n_experts}"
            yield Problem("C06", what, "model.top_k, model.n_experts", f"--model.top_k {self.n_experts}")
        if self.router == "switch" and self.top_k != 1:
            what = f'router "switch" sends a token to one expert, top_k is {self.top_k}'
            yield Problem("C06", what, "model.router, model.top_k", "--model.top_k 1")
        balanced = [key for key in ("aux_loss", "bias_rate", "capacity_factor") if getattr(self, key)]
        if self.router == "expert_choice" and balanced:
            what = f"experts that choose their tokens are balanced as they are, without {', '.join(balanced)}"
            where = ", ".join(f"model.{key}" for key in ("router", *balanced))
            yield Problem("C06", what, where, f"leave {', '.join(balanced)} out, or --model.router topk")

    def deals(self, axis: str) -> Sequence[DealtSize] | None:
        if axis != "ep":
            return super().deals(axis)
        return (DealtSize("the experts", "model.n_experts", self.n_experts),)

    def build(self, facts: Facts) -> "nn.Module":
        from unisono.models.moe.net import MoE

        return MoE(self.with_vocab(facts))

    def layout(self) -> str:
        return super(GPTConfig, self).layout()
