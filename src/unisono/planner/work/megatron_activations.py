"""Bytes that Megatron's fused kernels keep for the backward pass, with a residual stream in half precision
(Korthikanti et al., 2022). What our own keep: `work.activations`."""

from unisono.planner.work.experts import matrices
from unisono.planner.work.transformer import Transformer


def block_bytes(
    model: Transformer,
    *,
    micro_batch: int,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    sequence_parallel: bool = True,
    fused: bool = True,
    recompute: str = "none",
    itemsize: int = 2,
    eight: bool = False,
) -> float:
    """Bytes that one block of one micro-batch keeps on one rank for the backward pass; of dense and sparse blocks the
    mean.

    fused: attention that never writes its scores (Dao et al., 2022). recompute: none; selective, which computes the
    scores again; full, which keeps the block's input alone. eight: what dense products read is kept as they read it, in
    eight bits, as Transformer Engine does; of attention's result also in half precision, which attention itself reads.
    """
    tokens = micro_batch * model.context / cp
    h, e = model.d_model, itemsize
    shared = tp if sequence_parallel else 1
    if recompute == "full":
        return tokens * h * e / shared
    read, dense, hidden = 1 if eight else e, 1.0 - model.sparse_share, matrices(model.gated) * e
    # Inputs of both norms and of both first products; dropout's masks are one byte an element.
    whole = h * (2 * e + read * (1.0 + dense) + e * model.sparse_share) + (2 * h if model.noisy else 0)
    dealt = e * model.attended + (hidden - e + read) * model.d_ff * dense
    dealt += model.n_head * model.score_widths[1] if eight else 0
    if model.latent:
        whole += 2 * e * (model.latent.query + model.latent.key_value)  # before and after their norms
    if model.experts:
        experts = model.experts
        # The router's logits and their softmax in fp32; tokens as they come to experts and as they leave.
        whole += model.sparse_share * 8 * experts.count
        routed = experts.top_k * experts.factor * (2 * h * e * max(1, tp // ep) + hidden * experts.width)
        dealt += model.sparse_share * (routed + hidden * experts.shared_width)
    if fused:
        scores = 4.0 * model.n_head  # one fp32 logarithm a row
    elif recompute == "selective":
        scores = 0.0
    else:
        # After softmax, after dropout, and the mask between.
        scores = model.n_head * model.context * (e + (e + 1 if model.noisy else 0))
    return tokens * (whole / shared + (dealt + scores) / tp)


def head_bytes(model: Transformer, *, micro_batch: int, tp: int = 1, cp: int = 1, itemsize: int = 2) -> float:
    """Bytes of the last norm, of the logits and of their fp32 copy in the loss, on the last stage."""
    tokens = micro_batch * model.context / cp
    return tokens * (2 * model.d_model * itemsize / tp + model.vocab * (itemsize + 4) / tp)


def owed_bytes(model: Transformer, *, micro_batch: int, tp: int = 1, cp: int = 1, itemsize: int = 2) -> float:
    """Bytes from which the classifier's gradient is made where weight gradients come apart (Qi et al., 2023): what it
    read, and the gradient of the logits."""
    return micro_batch * model.context / cp * itemsize * (model.d_model + model.vocab) / tp


def stem_bytes(model: Transformer, *, micro_batch: int, tp: int = 1, cp: int = 1) -> float:
    """Bytes of the embedding's dropout mask, on the first stage."""
    return micro_batch * model.context / cp * model.d_model / tp if model.noisy else 0.0
