"""Our GPT as the models that `transformers` knows: GPT-2's layout or Llama's, whichever computes the same.

Only names and shapes change (`layouts.py`), and GPT-2 gets zeros where it wants a bias and ours has none. Tensors are
read, put together and written one by one.
"""

from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.models.folder import TOKENIZER, Outgoing, byte_tokenizer, write_model
from unisono.models.gpt import GPTConfig
from unisono.models.gpt.layouts import as_gpt2, as_llama
from unisono.models.weights import dtype_of, shapes_of, shapes_there, sources_of, theirs_of

_NORM_EPS = 1e-5  # of our norms, in both variants


def export_state(
    state: Mapping[str, Tensor], model: GPTConfig, out: Path, *, tokenizer: str | None = None
) -> dict[str, Any]:
    """Write safetensors, `config.json` and `generation_config.json` into `out`.

    state: full tensors by their names in our GPT; a tied head may be absent. tokenizer: "byte" adds the files by
    which AutoTokenizer makes the same tokens. Returns layout, files, parameters, dtype, tokenizer.
    Raises UsageError F01 where no layout fits, F02 where `out` cannot be written.
    """
    layout = model.layout()
    dtype, shapes = dtype_of(state), shapes_of(state)
    entries = entries_of(state, model, layout)
    ends = 0 if tokenizer == "byte" else None  # documents are set apart by the byte 0
    config = _config(layout, model, vocab=shapes["stem.tok.weight"][0])
    name = str(dtype).removeprefix("torch.")
    config |= {"torch_dtype": name, "bos_token_id": ends, "eos_token_id": ends}
    generation = {"_from_model_config": True, "bos_token_id": ends, "eos_token_id": ends}
    texts = {"config.json": config, "generation_config.json": generation}
    if tokenizer == "byte":
        texts |= byte_tokenizer(model.context)
    words = tokenizer or ""
    copies = [(Path(words.removeprefix("hf:")), TOKENIZER)] if words.startswith("hf:") else []
    files = write_model(out, entries, texts, copies)
    return {
        "layout": layout,
        "files": sorted(files),
        "parameters": sum(prod(entry.shape) for entry in entries),
        "dtype": name,
        "tokenizer": tokenizer,
    }


def entries_of(state: Mapping[str, Tensor], model: GPTConfig, layout: str) -> list[Outgoing]:
    """What is written of the full tensors `state`, each made when its turn comes; a tied head may be absent or not."""
    aliases = {"head.out.weight"} if model.tie_embeddings else set()
    shapes = {name: shape for name, shape in shapes_of(state).items() if name not in aliases}
    dtype = dtype_of(state)
    table = as_gpt2(model, shapes) if layout == "gpt2" else as_llama(model, shapes)
    there = shapes_there(table)
    entries = [
        Outgoing(theirs, dtype, there[theirs], partial(theirs_of, made_of, there[theirs], state.__getitem__))
        for theirs, made_of in sources_of(table).items()
    ]
    if layout == "gpt2" and not model.bias:  # which wants some
        for entry in list(entries):
            module, _, kind = entry.name.rpartition(".")
            if (kind == "weight" and "transformer.h." in module) or module == "transformer.ln_f":
                width = (entry.shape[-1],)
                entries.append(
                    Outgoing(f"{module}.bias", dtype, width, partial(torch.zeros, width, dtype=dtype))
                )
    return entries


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
