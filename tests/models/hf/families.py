"""Small models of the families of transformers that are played, and a loop that trains one by that library and torch
alone, on one process."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.models.hf.names import Names, Shape
from unisono.models.weights import Weights, read_box, shapes_there, sources_of, theirs_of

SIZES = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "head_dim": 8,
}  # fmt: skip
ENCODER = {k: SIZES[k] for k in list(SIZES)[:5]} | {
    "max_position_embeddings": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": SIZES,
    "gpt2": {
        "vocab_size": 260, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "bos_token_id": 1,
        "eos_token_id": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "qwen2": {k: v for k, v in SIZES.items() if k != "head_dim"},
    "qwen3": SIZES,
    "mistral": SIZES | {"sliding_window": 5},
    "mixtral": SIZES | {"num_local_experts": 4},
    "gemma2": SIZES | {"sliding_window": 5},
    "gemma3_text": SIZES | {"sliding_window": 5},
    "bert": ENCODER | {"architectures": ["BertForMaskedLM"]},
    "vit": ENCODER | {
        "image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10,
        "architectures": ["ViTForImageClassification"],
    },
}  # fmt: skip


def written(family: str, folder: Path, **other: Any) -> Path:
    """A folder with the family's config.json."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **(CONFIGS.get(family, {}) | other))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict() | CONFIGS.get(family, {}) | other))
    return folder


def theirs(folder: Path, seed: int = 5) -> Any:
    """The library's own model of a folder, float64, with weights of its own; its biases and norms are no constants, so
    that a mistake in them shows."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    named = (config.architectures or [None])[0]
    kind: Any = getattr(transformers, named) if named else transformers.AutoModelForCausalLM
    make = kind._from_config if named else kind.from_config
    core = "eager" if config.model_type == "gemma2" else "sdpa"  # the other leaves its soft cap out
    more = {"experts_implementation": "eager"} if config.model_type == "mixtral" else {}
    torch.manual_seed(seed)
    model = make(config, attn_implementation=core, **more).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.train()


def plain(
    model: Any, batches: Sequence[tuple[Tensor, ...]], lr: float
) -> list[tuple[float, dict[str, Tensor], dict[str, Tensor]]]:
    """Of each step: the loss, the gradients, the weights after it, by the library's names."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    told = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        pictures = inputs.dim() == 4
        logits = (
            model(pixel_values=inputs.double()).logits if pictures else model(inputs, use_cache=False).logits
        )
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        told.append((loss.item(), grads, {name: p.detach().clone() for name, p in model.named_parameters()}))
    return told


class HeldWeights(Weights):
    """Tensors in memory, as if they lay in a file."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.where, self._tensors = "memory", tensors
        self.shapes = {name: tuple(x.shape) for name, x in tensors.items()}

    def box(self, name: str, start: Shape, shape: Shape) -> Tensor:
        return self._tensors[name][tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]


def to_ours(names: Names, theirs: Mapping[str, Tensor], files: bool = False) -> dict[str, Tensor]:
    """Our whole tensors, read out of theirs."""
    dtype, layout = next(iter(theirs.values())).dtype, names.files if files else names.modules
    ours = {name: torch.empty(shape, dtype=dtype) for name, shape in names.shapes.items()}
    for name, out in ours.items():
        read_box(layout[name], HeldWeights(theirs), (0,) * out.dim(), out)
    return ours


def to_theirs(names: Names, ours: Mapping[str, Tensor], files: bool = False) -> dict[str, Tensor]:
    """Their whole tensors, put together from ours."""
    layout = names.files if files else names.modules
    shapes = shapes_there(layout)
    return {
        name: theirs_of(sources, shapes[name], ours.__getitem__)
        for name, sources in sources_of(layout).items()
    }
