"""Sizes of a mixture of experts, of which each token takes a few (Shazeer et al., 2017), and of latent attention,
whose keys and values come out of one short vector (DeepSeek-V2, 2024)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Experts:
    """The sparse feed-forward layers of a transformer.

    count, top_k: experts, and how many of them a token takes. width: of one expert. shared_width: of the experts that
    every token takes, together; shared_gate: their result is weighed by a learned gate. every: each such layer that is
    sparse, counted after the first `dense` layers. capacity: tokens that an expert has room for, in shares of the mean
    (GShard, Lepikhin et al., 2020), padded up to it; 0: no limit. load: tokens of the fullest expert over the mean, 1
    when balanced. weighed: a loss keeps them alike in load. choosing: experts choose their tokens, not tokens them.
    """

    count: int
    top_k: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False
    capacity: float = 0.0
    load: float = 1.0
    every: int = 1
    dense: int = 0
    weighed: bool = False
    choosing: bool = False

    @property
    def factor(self) -> float:
        """Tokens of the expert that everyone waits for, in shares of the mean."""
        return self.capacity or self.load

    def sparse(self, layer: int) -> bool:
        """Whether layer number `layer`, from 0, has experts."""
        return layer >= self.dense and (layer - self.dense + 1) % self.every == 0

    def layers(self, first: int, stop: int) -> int:
        """Sparse layers among those from `first` on, below `stop`."""

        def below(n: int) -> int:
            return max(0, n - self.dense) // self.every

        return below(stop) - below(first)


def matrices(gated: bool) -> int:
    """Return the number of matrices (width x hidden) of a feed-forward layer."""
    return 3 if gated else 2


def expert_elements(experts: Experts, d_model: int, *, gated: bool, bias: bool) -> int:
    """Return the parameters of one layer's routed experts, which `ep` splits."""
    each = matrices(gated) * d_model * experts.width
    if bias:
        each += (matrices(gated) - 1) * experts.width + d_model
    return experts.count * each


def common_elements(experts: Experts, d_model: int, *, gated: bool, bias: bool) -> int:
    """Parameters of one sparse layer that every token takes: router, shared experts and their gate."""
    shared = matrices(gated) * d_model * experts.shared_width
    if bias and experts.shared_width:
        shared += (matrices(gated) - 1) * experts.shared_width + d_model
    return experts.count * d_model + shared + (d_model if experts.shared_gate else 0)


def token_products(experts: Experts, d_model: int, *, gated: bool) -> int:
    """Elements of the matrices that one token meets in a sparse layer: half of its arithmetic's operations."""
    met = experts.top_k * experts.width + experts.shared_width
    gate = d_model if experts.shared_gate else 0
    return matrices(gated) * d_model * met + experts.count * d_model + gate


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1) as it is trained: keys and values written out.

    query, key_value: widths of the two latent vectors (query 0: none); plain, turned: of a head's queries and keys
    without and with positions; value: of a head's values.
    """

    query: int
    key_value: int
    plain: int
    turned: int
    value: int

    def products(self, d_model: int, heads: int) -> tuple[tuple[int, int, bool, bool], ...]:
        """(inner, columns, whether tp deals out the inner, the columns) of the products with weights."""
        first: tuple[tuple[int, int, bool, bool], ...] = (
            (
                (d_model, self.query, False, False),
                (self.query, heads * (self.plain + self.turned), False, True),
            )
            if self.query
            else ((d_model, heads * (self.plain + self.turned), False, True),)
        )
        return (
            *first,
            (d_model, self.key_value + self.turned, False, False),
            (self.key_value, heads * (self.plain + self.value), False, True),
            (heads * self.value, d_model, True, False),
        )

    @property
    def norms(self) -> int:
        """Parameters of the norms of the latent vectors."""
        return self.query + self.key_value
