"""Who computes which token: scores, choices, the room of an expert, and what keeps experts alike in load.

Whatever is asked of a leaf as a whole (its tokens' order, sums over them) is asked of `LeafTokens`, because a rank may
hold some of the leaf's positions alone. Nothing here depends on what other leaves hold.

Shapes: B batch, T positions of a leaf, t of them here, D width, E experts, W choices of a token (top_k of them; where
experts choose, as many as the most chosen token has).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.models.moe import MoEConfig
from unisono.models.noise import Noise

PARTS = (
    4  # of `Router.loads` behind the experts' counts: tokens, choices made, choices dropped, sum of entropies
)


class LeafTokens:
    """A leaf all of whose positions are here. Ranks that hold some of them put another one in its place."""

    def sum(self, x: Tensor) -> Tensor:
        """x of all ranks that share the leaf, added up, in a tensor of its own or x itself."""
        return x

    def tokens(self, x_Bt: Tensor) -> int:
        """B · T of x [B, t, ...]."""
        return x_Bt.shape[0] * x_Bt.shape[1]

    def gather(self, x_Bt: Tensor) -> Tensor:
        """[B, t, ...] → [B, T, ...], by position."""
        return x_Bt

    def local(self, x_BT: Tensor) -> Tensor:
        """[B, T, ...] → [B, t, ...]: the positions that are here."""
        return x_BT


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """What a router says of tokens [B, t]. expert: int64 [B, t, W]. weight: of that expert's result, [B, t, W]. kept:
    bool [B, t, W], False where the expert has no room, or the token fewer experts than others."""

    expert: Tensor
    weight: Tensor
    kept: Tensor


class Attached(torch.autograd.Function):
    """x as it is; the scalar `loss` counts as if it had been added to the step's. scale: with what that one begins its
    backward; 1 if None."""

    @staticmethod
    def forward(ctx, x, loss, scale):  # type: ignore[override]
        ctx.begins = loss.new_ones(()) if scale is None else scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad, ctx.begins.to(grad.dtype), None


class Router(nn.Module):
    """x [B, t, D] → TokenChoice.

    votes: int64 [E], how many more steps found an expert under the mean load than over it. `bias_rate` of them are
    added to its scores where a token chooses, not where its result is weighed (Wang et al., Auxiliary-loss-free load
    balancing, 2024). loads: by micro-batch of the step, float64 [E + PARTS], of what is here: tokens that chose each
    expert, and see `PARTS`. scale: see `Attached`.
    """

    votes: Tensor

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.d_model))
        self.register_buffer("votes", torch.zeros(config.n_experts, dtype=torch.int64))
        self.leaf = LeafTokens()
        self.loads: dict[int, Tensor] = {}
        self.scale: Tensor | None = None

    @property
    def met(self) -> int:
        """Matrix elements that a token meets."""
        return self.config.n_experts * self.config.d_model

    @property
    def additions(self) -> int:
        """Of one token, forward and backward: the product, a softmax, the weights' sum."""
        return self.config.d_model + 5 * self.config.n_experts + 4 * self.config.top_k

    def forward(self, x_BtD: Tensor, noise: Noise | None) -> TokenChoice:
        config = self.config
        # few numbers decide: they are not rounded
        with torch.autocast(casting(x_BtD), enabled=False):
            z_BtE = F.linear(x_BtD.to(self.weight.dtype), self.weight)
            score_BtE = z_BtE.softmax(-1) if config.gate == "softmax" else z_BtE.sigmoid()
            choose = self._experts_choose if config.router == "expert_choice" else self._tokens_choose
            choice = choose(score_BtE)
            if noise is not None and noise.weight:
                assigned = choice.kept if config.router == "expert_choice" else torch.ones_like(choice.kept)
                counts_E = tally(choice.expert.flatten(), config.n_experts, assigned.flatten())
                loss = self._loss(z_BtE, score_BtE, counts_E) * noise.weight
                choice = TokenChoice(
                    choice.expert, Attached.apply(choice.weight, loss, self.scale), choice.kept
                )  # type: ignore[arg-type]
                self.loads[noise.micro] = self._load(score_BtE, counts_E, choice)
        return choice

    def _tokens_choose(self, score_BtE: Tensor) -> TokenChoice:
        config, K = self.config, self.config.top_k
        ranked_BtE = score_BtE.detach()
        if config.bias_rate:
            ranked_BtE = ranked_BtE + config.bias_rate * self.votes.to(ranked_BtE.dtype)
        # of equal scores the first expert's is the better one, on every device
        expert_BtK = ranked_BtE.sort(dim=-1, descending=True, stable=True).indices[..., :K]
        weight_BtK = score_BtE.gather(-1, expert_BtK)
        if config.router == "topk" and config.renormalize and K > 1:
            weight_BtK = weight_BtK / weight_BtK.sum(-1, keepdim=True)
        kept_BtK = torch.ones_like(expert_BtK, dtype=torch.bool)
        if config.capacity_factor:
            all_BTK = self.leaf.gather(expert_BtK)
            room = math.ceil(config.capacity_factor * all_BTK.numel() / config.n_experts)
            kept_BtK = self.leaf.local(places(all_BTK, config.n_experts) < room)
        return TokenChoice(expert_BtK, weight_BtK, kept_BtK)

    def _experts_choose(self, score_BtE: Tensor) -> TokenChoice:
        """The best tokens of the leaf for each expert (Zhou et al., Mixture-of-experts with expert choice routing,
        2022), of equal ones the first. Tokens with the same past tie, such as blanks at the beginning of a sample, and
        their scores differ by rounding alone, otherwise on each number of ranks: a third of the bits does not count."""
        config, E = self.config, self.config.n_experts
        steps = 2.0 ** round(-math.log2(torch.finfo(score_BtE.dtype).eps) * 2 / 3)
        all_NE = (all_BTE := self.leaf.gather((score_BtE.detach() * steps).round())).flatten(0, 1)
        room = min(len(all_NE), math.ceil(len(all_NE) * config.top_k / E))
        best_CE = all_NE.sort(dim=0, descending=True, stable=True).indices[:room]
        taken_BTE = torch.zeros_like(all_NE, dtype=torch.bool).scatter_(0, best_CE, True).view_as(all_BTE)
        most = config.top_k if taken_BTE.is_meta else int(taken_BTE.sum(-1).max())
        taken_BtE = self.leaf.local(taken_BTE)
        # the experts that took a token come first, in their order
        expert_BtW = (~taken_BtE).to(torch.uint8).sort(dim=-1, stable=True).indices[..., :most]
        return TokenChoice(expert_BtW, score_BtE.gather(-1, expert_BtW), taken_BtE.gather(-1, expert_BtW))

    def _loss(self, z_BtE: Tensor, score_BtE: Tensor, counts_E: Tensor) -> Tensor:
        """What this rank's tokens add to the leaf's losses for balance (Fedus et al., Switch transformers, 2021) and
        for small numbers (Zoph et al., ST-MoE, 2022), where the loss of one token counts 1."""
        config = self.config
        loss = z_BtE.new_zeros(())
        if config.aux_loss:
            share_E = self.leaf.sum(counts_E.to(z_BtE.dtype))
            share_E = share_E / (self.leaf.tokens(score_BtE) * config.top_k)
            chance_BtE = score_BtE / score_BtE.sum(-1, keepdim=True)
            loss = loss + config.aux_loss * config.n_experts * (chance_BtE.sum((0, 1)) * share_E).sum()
        if config.z_loss:
            loss = loss + config.z_loss * z_BtE.logsumexp(-1).square().sum()
        return loss

    @torch.no_grad()
    def _load(self, score_BtE: Tensor, counts_E: Tensor, choice: TokenChoice) -> Tensor:
        chance_BtE = score_BtE / score_BtE.sum(-1, keepdim=True)
        entropy = torch.special.entr(chance_BtE).sum()
        tokens, assignments = score_BtE.shape[0] * score_BtE.shape[1], counts_E.sum()
        rest = torch.stack(
            [entropy.new_tensor(tokens), assignments, assignments - choice.kept.sum(), entropy]
        )
        return torch.cat([counts_E, rest.double()]).double()

    def vote(self, counts_E: Tensor) -> None:
        """After a step: experts under the mean load gain a vote, those over it lose one. counts: of all leaves."""
        if self.config.bias_rate:
            self.votes += (counts_E.sum() - counts_E * len(counts_E)).sign().to(self.votes.dtype)


def casting(x: Tensor) -> str:
    """The kind of device by which torch's autocast knows that of x."""
    return "cpu" if x.is_meta else x.device.type


def tally(expert_M: Tensor, experts: int, counts_M: Tensor) -> Tensor:
    """int64 [E]: of each expert the sum of what its choices count. Unlike `bincount` it has a shape without numbers."""
    none_E = torch.zeros(experts, dtype=torch.int64, device=expert_M.device)
    return none_E.scatter_add_(0, expert_M, counts_M.to(torch.int64))


def places(expert_BTK: Tensor, experts: int) -> Tensor:
    """[B, T, K] → int64 of the same shape: how many choices stand before each one at its expert. First choices stand
    before second ones (GShard, Lepikhin et al., 2020), then tokens in the order of the leaf."""
    first = expert_BTK.movedim(-1, 0).flatten()  # [K · B · T]
    order = first.argsort(stable=True)
    begins_E = tally(first, experts, torch.ones_like(first)).cumsum(0).roll(1)
    begins_E[0] = 0
    sorted_places = torch.arange(len(first), device=first.device) - begins_E[first[order]]
    place = torch.empty_like(first).index_copy_(0, order, sorted_places)
    K = expert_BTK.shape[-1]
    return place.view(K, *expert_BTK.shape[:-1]).movedim(0, -1)
