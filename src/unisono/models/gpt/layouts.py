"""Our GPT's weights as others lay them out: GPT-2's and Llama's of `transformers`, and Megatron's.

Only names, orders and transposes differ. Shapes in the comments: D width, H query heads, G key/value heads, K head
width.
"""

from collections.abc import Callable, Mapping, Sequence

from unisono.models.gpt import GPTConfig
from unisono.models.hf.names import Layout, NamedPart, Shape
from unisono.models.weights import same

Shapes = Mapping[str, Shape]


def layouts_of(config: GPTConfig, shapes: Shapes) -> dict[str, Layout]:
    """How others write this model's weights. shapes: of its tensors, without aliases."""
    fits = {"gpt2": as_gpt2, "llama": as_llama}
    fitting = {name: fits[name](config, shapes) for name in config.fits()}
    return {"megatron": as_megatron(config, shapes), **fitting}


def as_gpt2(config: GPTConfig, shapes: Shapes) -> Layout:
    """GPT-2 keeps a layer's weight as [in, out], and queries, keys, values one after the other."""
    names = {
        "stem.tok.weight": "transformer.wte.weight",
        "stem.pos.weight": "transformer.wpe.weight",
        "head.norm.weight": "transformer.ln_f.weight",
        "head.norm.bias": "transformer.ln_f.bias",
        "head.out.weight": "lm_head.weight",
    }
    parts = {
        "norm1": "ln_1",
        "norm2": "ln_2",
        "attn.proj": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }

    def placed(ours: str, shape: Shape) -> tuple[NamedPart, ...]:
        if ours in names:
            return (same(shape, names[ours]),)
        block, part, kind = _apart(ours)
        theirs = f"transformer.h.{block}"
        if part != "attn.qkv":
            turned = kind == "weight" and not part.startswith("norm")
            return (same(shape, f"{theirs}.{parts[part]}.{kind}", turned),)
        starts = {"q": 0, "k": config.d_model, "v": 2 * config.d_model}
        return _heads(
            config, shape, lambda letter: (f"{theirs}.attn.c_attn.{kind}", starts[letter]), kind == "weight"
        )

    return {ours: placed(ours, shape) for ours, shape in shapes.items()}


def as_llama(config: GPTConfig, shapes: Shapes) -> Layout:
    """Llama keeps a layer's weight as [out, in] as we do, and queries, keys, values as three layers."""
    names = {
        "stem.tok.weight": "model.embed_tokens.weight",
        "head.norm.weight": "model.norm.weight",
        "head.out.weight": "lm_head.weight",
    }
    parts = {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "attn.proj": "self_attn.o_proj",
        **{f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    }

    def placed(ours: str, shape: Shape) -> tuple[NamedPart, ...]:
        if ours in names:
            return (same(shape, names[ours]),)
        block, part, kind = _apart(ours)
        theirs = f"model.layers.{block}"
        if part != "attn.qkv":
            return (same(shape, f"{theirs}.{parts[part]}.{kind}"),)
        return _heads(config, shape, lambda letter: (f"{theirs}.self_attn.{letter}_proj.{kind}", 0))

    return {ours: placed(ours, shape) for ours, shape in shapes.items()}


def as_megatron(config: GPTConfig, shapes: Shapes) -> Layout:
    """Megatron-LM groups the rows of queries, keys and values by key/value head as we do; where feed-forward layers are
    gated, the gate lies before the other in one tensor."""
    names = {
        "stem.tok": "embedding.word_embeddings",
        "stem.pos": "embedding.position_embeddings",
        "head.norm": "decoder.final_layernorm",
        "head.out": "output_layer",
    }
    parts = {
        "norm1": "input_layernorm",
        "norm2": "pre_mlp_layernorm",
        "attn.qkv": "self_attention.linear_qkv",
        "attn.proj": "self_attention.linear_proj",
        "mlp.up": "mlp.linear_fc1",
        "mlp.gate": "mlp.linear_fc1",
        "mlp.down": "mlp.linear_fc2",
    }

    def placed(ours: str, shape: Shape) -> tuple[NamedPart, ...]:
        module, _, kind = ours.rpartition(".")
        if module in names:
            return (same(shape, f"{names[module]}.{kind}"),)
        block, part, kind = _apart(ours)
        zeros = (0,) * len(shape)
        after = config.ff_width if part == "mlp.up" and config.activation == "swiglu" else 0
        theirs = f"decoder.layers.{block}.{parts[part]}.{kind}"
        return (NamedPart(theirs, zeros, shape, (after, *zeros[1:])),)

    return {ours: placed(ours, shape) for ours, shape in shapes.items()}


def _apart(ours: str) -> tuple[str, str, str]:
    """`blocks.3.attn.qkv.weight` as (3, attn.qkv, weight)."""
    _, block, *part, kind = ours.split(".")
    return block, ".".join(part), kind


def _heads(
    config: GPTConfig, shape: Shape, place: Callable[[str], tuple[str, int]], turned: bool = False
) -> tuple[NamedPart, ...]:
    """Rows of our qkv, [G (H/G + 2) K, ...]: of each group its queries, its key, its value. place(letter): whose rows
    they are there, and where queries, keys or values begin."""
    width, groups = config.d_model // config.n_head, config.kv_heads
    queries = config.n_head // groups
    rest = shape[1:]
    zeros: Sequence[int] = (0,) * len(rest)
    parts, row = [], 0
    for group in range(groups):
        for letter, rows in (("q", queries * width), ("k", width), ("v", width)):
            theirs, first = place(letter)
            there = (first + group * rows, *zeros)
            at = there[::-1] if turned else there
            parts.append(NamedPart(theirs, (row, *zeros), (rows, *rest), at, turned))
            row += rows
    return tuple(parts)
