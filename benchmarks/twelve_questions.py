"""Twelve questions that people ask, the plan that `unisono plan` takes, and what is run in practice:
`python benchmarks/twelve_questions.py [NUMBER ...]`. Nothing is run and no GPU is needed; the table is Markdown.

Each question is asked as the command does it, by its flags alone, of the default stack. `bolder` is the quickest plan
by its price where that is another one, with what of it nobody has measured.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.config import load
from unisono.planner import tie_breaks
from unisono.planner.error_bars import untried
from unisono.planner.search import search
from unisono.planner.simulate import PlanResult, gain
from unisono.planner.space import space_of
from unisono.spec.words import seconds
from unisono.verbs._sizes import model_of

LLAMA: Mapping[str, Any] = {
    "kind": "gpt", "activation": "swiglu", "norm": "rms", "positions": "rotary", "bias": False,
    "tie_embeddings": False, "context": 8192, "vocab": 128256, "n_kv_head": 8,
}  # fmt: skip
M1B = {**LLAMA, "n_layer": 24, "n_head": 16, "n_kv_head": 16, "d_model": 2048, "d_ff": 5504, "context": 2048}
M1B["vocab"] = 50368
M7B = {**LLAMA, "n_layer": 32, "n_head": 32, "n_kv_head": 32, "d_model": 4096, "d_ff": 11008, "vocab": 32000}
M8B = {**LLAMA, "n_layer": 32, "n_head": 32, "d_model": 4096, "d_ff": 14336}
M70B = {**LLAMA, "n_layer": 80, "n_head": 64, "d_model": 8192, "d_ff": 28672}
M405B = {**LLAMA, "n_layer": 126, "n_head": 128, "d_model": 16384, "d_ff": 53248}
MIXTRAL = {
    **M8B,
    "kind": "moe",
    "context": 4096,
    "vocab": 32000,
    "n_experts": 8,
    "top_k": 2,
    "d_expert": 14336,
}
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "hidden_size": 7168,
    "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280, "max_position_embeddings": 4096,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
VIT = {
    "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 1024, "image_size": 224,
    "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096, "patch_size": 16,
    "num_channels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """model: keys of `[model]`, or with `model_type` a config.json. practice: what is run, and who says so. why: what
    the planner takes otherwise, and for what reason."""

    name: str
    model: Mapping[str, Any]
    cluster: str
    batch: int
    practice: str
    why: str
    train: Mapping[str, Any] = field(default_factory=dict)


QUESTIONS = (
    Asked("1B, 8 A100", M1B, "dgx-a100:1", 512, "FSDP over 8 (llm-foundry's MPT-1B)",
          "the same axis; weights are not sharded, because they fit"),
    Asked("8B, 8 H100", M8B, "dgx-h100:1", 128, "FSDP over 8 (torchtitan); cp=2 (NeMo)",
          "tp=2 in chunks halves the kept activations, so no block is recomputed"),
    Asked("8B, 64 H100", M8B, "dgx-h100:8", 512, "FSDP over 64 (torchtitan)",
          "as above; sharding stays inside a node, and replicas sum gradients once a step"),
    Asked("8B, 256 H100", M8B, "dgx-h100:32", 1024, "FSDP over 128 (torchtitan)",
          "the same but for tp=2; gradients and optimiser state are sharded, weights are not"),
    Asked("70B, 64 H100", M70B, "dgx-h100:8", 128, "tp=4 pp=4 cp=2, 5 chunks (NeMo)",
          "FSDP with tp=2; our own runs keep fp32 weights, so blocks are recomputed"),
    Asked("70B, 512 H100", M70B, "dgx-h100:64", 512, "FSDP over 32, tp=8 (torchtitan, 256)",
          "FSDP alone: in the price, the gathering of weights hides behind recomputed blocks"),
    Asked("405B, 16,384 H100", M405B, "dgx-h100:2048", 2048, "tp=8 pp=16, sharded, no recomputation (Llama 3)",
          "the same but for half the stages; fp32 weights leave no room to keep activations"),
    Asked("Mixtral 8x7B, 256 H100", MIXTRAL, "dgx-h100:32", 512, "pp=4 ep=8 (NeMo)", "the same, with tp=2"),
    Asked("DeepSeek-V3, 2,048 H800", DEEPSEEK, "hgx-h800:256", 15360,
          "pp=16 ep=64 zero=1, DualPipe, no tp (its report)",
          "the same but for tp=4: our runs keep fp32 weights and lack DeepSeek's kernels, which save memory"),
    Asked("7B LoRA, 8 H100", M7B, "dgx-h100:1", 32, "replicas or FSDP (torchtune, NeMo)",
          "frozen weights are in fp32 too, so shard=4 makes room for activations",
          {"lora_rank": 16}),
    Asked("8B at 131,072 tokens, 64 H100", {**M8B, "context": 131072}, "dgx-h100:8", 32,
          "cp=8 to 16 (Llama 3, NeMo)", "the same: cp gains more here than the error of its price"),
    Asked("ViT-L, 8 A100", VIT, "dgx-a100:1", 1024, "replicas alone (timm, DINOv2)",
          "equally fast: sharding costs nothing inside a node"),
)  # fmt: skip


def answers(asked: Asked) -> tuple[PlanResult, ...]:
    """The best plans of a question, the chosen one first."""
    keys = {"train.global_batch": asked.batch} | {f"train.{key}": value for key, value in asked.train.items()}
    with tempfile.TemporaryDirectory() as folder:
        if "model_type" in asked.model:
            (Path(folder) / "config.json").write_text(json.dumps(dict(asked.model)))
            keys["model.kind"] = f"hf:{folder}"
        else:
            keys |= {f"model.{key}": value for key, value in asked.model.items()}
        said = [
            (key, str(value).lower() if isinstance(value, bool) else str(value))
            for key, value in keys.items()
        ]
        given = load(None, said)
        within = space_of(given, model_of(given, {}), None, asked.cluster, None)
    return search(within, 8).best


def row(asked: Asked) -> str:
    """A line of the table."""
    best, *others = answers(asked)
    bold = next((one for one in others if one.price.step < best.price.step), None)
    said = "-"
    if bold is not None:
        new = ", ".join(untried(bold.request.plan, bold.request.stack))
        sure = 100 * tie_breaks.unsure(bold.request)
        said = f"`{_short(bold)}`: {100 * gain(bold, best):.0f} %, within ± {sure:.0f} %; unmeasured: {new}"
    took = f"{seconds(best.price.step)}, MFU {100 * best.mfu:.0f} %"
    return f"| {asked.name} | `{_short(best)}` | {took} | {said} | {asked.practice} | {asked.why} |"


def _short(answer: PlanResult) -> str:
    """A plan without its precision, which is the same for all, with its micro-batch."""
    words = [
        word for word in str(answer.request.plan).split() if not word.startswith(("precision=", "blocks="))
    ]
    return " ".join([*words, f"(micro-batch {answer.request.micro_batch})"])


def main() -> int:
    numbers = [int(text) for text in sys.argv[1:]] or range(1, len(QUESTIONS) + 1)
    print("| question | first plan | a step | bolder | practice | why they differ |")
    print("| --- | --- | --- | --- | --- | --- |")
    for number in numbers:
        print(row(QUESTIONS[number - 1]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
