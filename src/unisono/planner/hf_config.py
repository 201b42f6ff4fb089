"""A `config.json` of transformers as numbers: GPT-2, and the families that are Llama with changes. Without torch.

Multi-token prediction (DeepSeek-V3) is left out, as transformers leaves it out.
"""

from collections.abc import Callable, Mapping
from typing import Any

from unisono.planner.work.experts import Experts, Latent
from unisono.planner.work.transformer import Transformer
from unisono.spec.errors import UsageError

Config = Mapping[str, Any]
_MOST = 1 << 40


def transformer_of(
    config: Config, context: int | None = None, where: str = "config.json"
) -> Transformer | None:
    """The numbers, or None for a family or a variant that is not known here. context: tokens of a sample; the
    longest that the model is made for when None. Raises UsageError where a key is missing."""
    kind = str(config.get("model_type", ""))
    read = _FAMILIES.get(kind)
    large = [
        key for key, value in config.items() if isinstance(value, int | float) and not abs(value) < _MOST
    ]
    if large:
        raise UsageError(f"{large[0]} of {where} is no size", where=where, fix="a smaller one", code="C22")
    if read is None or config.get("mlp_bias") or config.get("is_encoder_decoder"):
        return None
    try:
        return read(config, context)
    except KeyError as missing:
        raise UsageError(
            f"a model of type {kind} has no {missing.args[0]} in its config",
            where=where,
            fix="the config.json as transformers writes it",
            code="C22",
        ) from None
    except (TypeError, ValueError, ArithmeticError) as error:
        what = f"the config of a model of type {kind[:40]} has a size that is none: {error}"
        fix = "the config.json as transformers writes it"
        raise UsageError(what, where=where, fix=fix, code="C22") from None


def _gpt2(config: Config, context: int | None) -> Transformer:
    longest, width = int(config["n_positions"]), int(config["n_embd"])
    dropped = (config.get(key, 0.1) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop"))
    return Transformer(
        n_layer=int(config["n_layer"]), n_head=int(config["n_head"]), d_model=width, context=context or longest,
        vocab=int(config["vocab_size"]), kv_heads=int(config["n_head"]), d_ff=int(config.get("n_inner") or 4 * width),
        noisy=any(p > 0 for p in dropped), tied=bool(config.get("tie_word_embeddings", True)), rows=longest,
    )  # fmt: skip


def _llama(config: Config, context: int | None, **other: Any) -> Transformer:
    """Rotary positions, RMS norms, gated feed-forward, no bias but where the family has one."""
    heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
    bias = bool(config.get("attention_bias", False))
    return Transformer(
        n_layer=int(config["num_hidden_layers"]), n_head=heads, d_model=width,
        context=context or int(config["max_position_embeddings"]), vocab=int(config["vocab_size"]),
        kv_heads=int(config.get("num_key_value_heads") or heads), d_ff=int(config["intermediate_size"]),
        bias=False, tied=bool(config.get("tie_word_embeddings", False)), learned=False, gated=True, rms=True,
        apart=True,
        **{
            "head": int(config.get("head_dim") or width // heads),
            "qkv_bias": bias, "proj_bias": bias, "noisy": float(config.get("attention_dropout") or 0.0) > 0.0,
        } | other,
    )  # fmt: skip


def _qwen2(config: Config, context: int | None) -> Transformer:
    return _llama(config, context, qkv_bias=True, proj_bias=False)


def _qwen3(config: Config, context: int | None) -> Transformer:
    return _llama(config, context, head=int(config.get("head_dim") or 128), head_norms=True)


def _sparse(
    config: Config,
    context: int | None,
    count: str = "num_local_experts",
    width: str = "moe_intermediate_size",
    shared: str = "",
    **other: Any,
) -> Transformer | None:
    """As `_llama`, with experts. count, width: keys of their number and width. shared: key of the width of those that
    every token takes, behind a gate. None where single layers are named dense, which `every` cannot say."""
    if config.get("mlp_only_layers"):
        return None
    size = int(config[width])
    experts = Experts(
        count=int(config.get("num_experts") or config[count]),  # the name of transformers 4, of 5
        top_k=int(config["num_experts_per_tok"]),
        width=size,
        shared_width=int(config[shared]) if shared else int(config.get("n_shared_experts") or 0) * size,
        shared_gate=bool(shared),
        every=int(config.get("decoder_sparse_step") or 1),
        dense=int(config.get("first_k_dense_replace") or 0),
    )
    return _llama(config, context, experts=experts, **other)


def _mixtral(config: Config, context: int | None) -> Transformer | None:
    return _sparse(config, context, width="intermediate_size")


def _qwen2_moe(config: Config, context: int | None) -> Transformer | None:
    bias = bool(config.get("qkv_bias", True))
    gated = "shared_expert_intermediate_size"
    return _sparse(config, context, shared=gated, qkv_bias=bias, proj_bias=False)


def _qwen3_moe(config: Config, context: int | None) -> Transformer | None:
    return _sparse(config, context, head_norms=True)


def _deepseek_v3(config: Config, context: int | None) -> Transformer | None:
    if config.get("attention_bias") or int(config.get("moe_layer_freq") or 1) != 1:
        return None
    latent = Latent(
        query=int(config.get("q_lora_rank") or 0),
        key_value=int(config["kv_lora_rank"]),
        plain=int(config["qk_nope_head_dim"]),
        turned=int(config["qk_rope_head_dim"]),
        value=int(config["v_head_dim"]),
    )
    return _sparse(config, context, "n_routed_experts", latent=latent)


_FAMILIES: Mapping[str, Callable[[Config, int | None], Transformer | None]] = {
    "gpt2": _gpt2, "llama": _llama, "mistral": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe, "qwen3_moe": _qwen3_moe, "deepseek_v3": _deepseek_v3, "deepseek_v2": _deepseek_v3,
}  # fmt: skip
