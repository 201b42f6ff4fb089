"""Our GPT as the models that `transformers` knows: GPT-2's layout or Llama's, whichever computes the same.

Only names and shapes change, and GPT-2 gets zeros where it wants a bias and ours has none. Shapes in the comments:
D width, H query heads, G key/value heads, K head width.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from unisono.models.gpt import GPTConfig
from unisono.observe.files import replaced, write_whole
from unisono.spec.errors import UsageError

_NORM_EPS = 1e-5  # of our norms, in both variants


def export_state(
    state: Mapping[str, Tensor], model: GPTConfig, out: Path, *, tokenizer: str | None = None
) -> dict[str, Any]:
    """Write `model.safetensors`, `config.json` and `generation_config.json` into `out`.

    state: full tensors by their names in our GPT; a tied head may be absent. tokenizer: "byte" adds the files by
    which AutoTokenizer makes the same tokens. Returns layout, files, parameters, dtype, tokenizer.
    Raises UsageError F01 where no layout fits, F02 where `out` cannot be written.
    """
    layout = model.layout()
    renamed = _as_gpt2(state, model) if layout == "gpt2" else _as_llama(state, model)
    dtype = str(state["stem.tok.weight"].dtype).removeprefix("torch.")
    ends = 0 if tokenizer == "byte" else None  # documents are set apart by the byte 0
    config = _config(layout, model, vocab=state["stem.tok.weight"].shape[0])
    config |= {"torch_dtype": dtype, "bos_token_id": ends, "eos_token_id": ends}
    generation = {"_from_model_config": True, "bos_token_id": ends, "eos_token_id": ends}
    texts = {"config.json": config, "generation_config.json": generation}
    if tokenizer == "byte":
        texts |= _byte_tokenizer(model.context)
    try:
        out.mkdir(parents=True, exist_ok=True)
        _write_tensors(renamed, out / "model.safetensors")
        for name, content in texts.items():
            write_whole(out / name, json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UsageError(
            f"cannot write the exported model: {error.strerror or error}",
            code="F02",
            where=str(out),
            fix="--out FOLDER that can be written",
        ) from error
    return {
        "layout": layout,
        "files": sorted([*texts, "model.safetensors"]),
        "parameters": sum(tensor.numel() for tensor in renamed.values()),
        "dtype": dtype,
        "tokenizer": tokenizer if tokenizer == "byte" else None,
    }


def _write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """By safetensors' own writer, so that a model is not held in memory twice."""
    with replaced(path) as aside:
        aside.touch(0o644)
        mode = (
            aside.stat().st_mode
        )  # as that of the other files, by umask: the writer lets its owner alone read it
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, aside, {"format": "pt"})
        aside.chmod(mode)


def _config(layout: str, model: GPTConfig, vocab: int) -> dict[str, Any]:
    """The fields of GPT2Config or LlamaConfig that decide what is computed; the others keep their defaults."""
    if layout == "gpt2":
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": vocab,
            "n_positions": model.context,
            "n_embd": model.d_model,
            "n_layer": model.n_layer,
            "n_head": model.n_head,
            "n_inner": model.ff_width,
            "activation_function": "gelu",  # the exact one; GPT-2's own is an approximation by tanh
            "layer_norm_epsilon": _NORM_EPS,
            "embd_pdrop": model.dropout,
            "attn_pdrop": model.dropout,
            "resid_pdrop": model.dropout,
            "tie_word_embeddings": model.tie_embeddings,
        }
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "max_position_embeddings": model.context,
        "hidden_size": model.d_model,
        "num_hidden_layers": model.n_layer,
        "num_attention_heads": model.n_head,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.d_model // model.n_head,
        "intermediate_size": model.ff_width,
        "hidden_act": "silu",
        "rms_norm_eps": _NORM_EPS,
        "rope_theta": model.rope_theta,  # read by transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},  # read by transformers 5
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
        "attention_dropout": model.dropout,
        "tie_word_embeddings": model.tie_embeddings,
    }


def _heads(tensor: Tensor, model: GPTConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of our qkv, [G (H/G + 2) K, ...], as queries [H K, ...], keys [G K, ...] and values [G K, ...]."""
    width, groups = model.d_model // model.n_head, model.kv_heads
    rows = tensor.unflatten(0, (groups, model.n_head // groups + 2, width))
    return rows[:, :-2].flatten(0, 2), rows[:, -2].flatten(0, 1), rows[:, -1].flatten(0, 1)


def _as_gpt2(state: Mapping[str, Tensor], model: GPTConfig) -> dict[str, Tensor]:
    """GPT-2 keeps a layer's weight as [in, out], and queries, keys, values one after the other."""
    out = {
        "transformer.wte.weight": state["stem.tok.weight"],
        "transformer.wpe.weight": state["stem.pos.weight"],
    }

    def put(theirs: str, weight: Tensor, bias: Tensor | None) -> None:
        out[f"{theirs}.weight"] = weight
        out[f"{theirs}.bias"] = torch.zeros(weight.shape[-1], dtype=weight.dtype) if bias is None else bias

    norms = {"head.norm": "transformer.ln_f"}
    for n in range(model.n_layer):
        ours, theirs = f"blocks.{n}", f"transformer.h.{n}"
        norms |= {f"{ours}.norm1": f"{theirs}.ln_1", f"{ours}.norm2": f"{theirs}.ln_2"}
        bias = state.get(f"{ours}.attn.qkv.bias")
        put(
            f"{theirs}.attn.c_attn",
            torch.cat(_heads(state[f"{ours}.attn.qkv.weight"], model)).T,
            None if bias is None else torch.cat(_heads(bias, model)),
        )
        for part, name in (("attn.proj", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
            put(f"{theirs}.{name}", state[f"{ours}.{part}.weight"].T, state.get(f"{ours}.{part}.bias"))
    for ours, theirs in norms.items():
        put(theirs, state[f"{ours}.weight"], state.get(f"{ours}.bias"))
    if not model.tie_embeddings:
        out["lm_head.weight"] = state["head.out.weight"]
    return out


def _as_llama(state: Mapping[str, Tensor], model: GPTConfig) -> dict[str, Tensor]:
    """Llama keeps a layer's weight as [out, in] as we do, and queries, keys, values as three layers."""
    out = {
        "model.embed_tokens.weight": state["stem.tok.weight"],
        "model.norm.weight": state["head.norm.weight"],
    }
    for n in range(model.n_layer):
        ours, theirs = f"blocks.{n}", f"model.layers.{n}"
        out[f"{theirs}.input_layernorm.weight"] = state[f"{ours}.norm1.weight"]
        out[f"{theirs}.post_attention_layernorm.weight"] = state[f"{ours}.norm2.weight"]
        for kind in ("weight", "bias") if model.bias else ("weight",):
            for letter, part in zip("qkv", _heads(state[f"{ours}.attn.qkv.{kind}"], model), strict=True):
                out[f"{theirs}.self_attn.{letter}_proj.{kind}"] = part
            out[f"{theirs}.self_attn.o_proj.{kind}"] = state[f"{ours}.attn.proj.{kind}"]
            for part in ("gate", "up", "down"):
                out[f"{theirs}.mlp.{part}_proj.{kind}"] = state[f"{ours}.mlp.{part}.{kind}"]
    if not model.tie_embeddings:
        out["lm_head.weight"] = state["head.out.weight"]
    return out


def _byte_tokenizer(context: int) -> dict[str, Any]:
    """A byte is a token: byte-pair encoding without any pair, over the letters by which GPT-2 writes bytes.

    Those are the printable characters of Latin-1 for themselves, and for the other bytes, in order, the characters
    from 256 on (Radford et al., GPT-2, 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {letters[byte]: byte for byte in range(256)},
        "merges": [],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model,
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}
