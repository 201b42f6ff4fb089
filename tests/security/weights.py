"""Kinds of hostile input that are weights of others: safetensors and their folders, files of `torch.save`, checkpoints
of DCP, DeepSpeed and Megatron. Each is made of a good one."""

import io
import json
import os
import pickle
import random
from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch

from tests.security.confined import Kind
from tests.security.harm import TENSORS, good_file, program, snippet, torch_file
from tests.security.mutate import JUNK, bytes_changed
from tests.security.words import with_errors
from tests.train.state.checkpoint.fuzz import mutate
from unisono.train.foreign import open_weights


def play_weights(files: dict[str, bytes | str]) -> str:
    """All that a place holds, read whole."""
    for name, data in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        _put(name, data)
    try:
        weights = open_weights(next(iter(files)).partition("/")[0])
        read = 0
        for name, shape in list(weights.shapes.items())[:6]:
            if prod(shape) > 1 << 20:
                continue
            found = weights.box(name, (0,) * len(shape), shape)
            if tuple(found.shape) != tuple(shape):
                raise AssertionError(f"{name} is {tuple(found.shape)}, not {shape}")
            found.clone()
            read += 1
        return f"{read} tensors read"
    finally:
        for name in files:
            os.unlink(name)


def _put(name: str, data: bytes | str) -> None:
    """Bytes into a file, or what a word says in the place of one."""
    if isinstance(data, bytes):
        Path(name).write_bytes(data)
    elif data == "pipe":
        os.mkfifo(name)
    else:
        os.symlink(data, name)


# --- safetensors ---


@cache
def _safetensors() -> bytes:
    from safetensors.torch import save

    return save(TENSORS)


def _one_safetensors(order: random.Random) -> bytes:
    data = _safetensors()
    if order.random() < 0.2:
        return bytes_changed(data, order)
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    for _ in range(order.choice((1, 1, 2, 3))):
        if order.random() < 0.3:  # what fits its bytes, and is none
            header[order.choice(list(header))] = {
                "dtype": "F32", "shape": order.choice(([2.0], [-2, -1], [True, 2], [2, 1.0], [[2]], ["2"], [2, 0], [1] * 200, [1 << 62, 0], [10**4000] * 900)),
                "data_offsets": order.choice(([0, 8], [0, 0], [8, 0], [0, 8.0], [-8, 0], [True, 9], ["0", "8"])),
            }  # fmt: skip
        elif header:
            mutate(header, order)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    if order.random() < 0.05:
        text = order.choice(
            (
                b"[" * 200_000,
                b'{"a":' * 90_000,
                b"null",
                b"[]",
                b"1" * 5000,
                b"",
                b"\xff",
                text + text,
                _twice(order),
            )
        )
    stated = order.choice((len(text),) * 9 + (0, 1, 2**40, 2**63, 2**64 - 1))
    return stated.to_bytes(8, "little") + text + rest


def _twice(order: random.Random) -> bytes:
    """Many keys, of which the last one is given twice."""
    many = b",".join(b'"%d":0' % i for i in range(order.choice((3, 80_000))))
    return b"{" + many + b',"2":1}'


def _folder(order: random.Random) -> dict[str, bytes | str]:
    if order.random() < 0.6:
        return {"one.safetensors": _one_safetensors(order)}
    index: dict[str, Any] = {
        "metadata": {"total_size": 9},
        "weight_map": dict.fromkeys(TENSORS, "part.safetensors"),
    }
    names = (
        "../one.safetensors",
        "/etc/passwd",
        "..",
        "",
        ".",
        "pipe",
        "part.safetensors\0",
        "a" * 300,
        "\ud800",
        *JUNK[:20],
    )
    for _ in range(order.choice((0, 1, 2))):
        index["weight_map"][order.choice((*TENSORS, "other"))] = order.choice(
            (*names, 3, None, [], {}, "part.safetensors")
        )
    if order.random() < 0.2:
        mutate(index, order)
    text = json.dumps(index).encode("utf-8", "surrogatepass")
    if order.random() < 0.1:
        text = order.choice(
            (b"[" * 200_000, b'{"weight_map":' * 60_000, b"null", b"[]", b"{}", b"\xff", b"1" * 5000)
        )
    part = order.choice(
        (
            _one_safetensors(order),
            _safetensors(),
            "pipe",
            "/dev/zero",
            "/etc/passwd",
            "folder/part.safetensors",
        )
    )
    files: dict[str, bytes | str] = {
        "folder/model.safetensors.index.json": text,
        "folder/part.safetensors": part,
        "folder/pipe": "pipe",
    }
    return files if order.random() < 0.9 else {"folder/model.safetensors": part}


# --- files of torch.save ---


def _pickles(order: random.Random) -> dict[str, bytes | str]:
    return {order.choice(("x.pt", "x.bin", "x.ckpt", "x.pth")): torch_file(order)}


# --- folders of other programs ---


def _tree(order: random.Random, depth: int = 0) -> Any:
    """Something that may stand where weights are meant."""
    if depth < 3 and order.random() < 0.4:
        return order.choice(
            (
                lambda: {order.choice(("a", "param", "module", 3)): _tree(order, depth + 1)},
                lambda: [_tree(order, depth + 1)],
            )
        )()
    return order.choice(
        (
            None,
            0,
            -1,
            1 << 70,
            "x",
            0.5,
            (),
            [],
            {},
            True,
            torch.ones(2),
            torch.ones(2, 3),
            torch.zeros(0),
            torch.tensor(1),
        )
    )


def _shaken(tree: Any, order: random.Random) -> Any:
    """A copy in which some branches are others."""
    if order.random() < 0.08:
        return _tree(order)
    if isinstance(tree, dict):
        return {key: _shaken(value, order) for key, value in tree.items() if order.random() > 0.04}
    if isinstance(tree, list):
        return [_shaken(value, order) for value in tree if order.random() > 0.04]
    return tree


def _saved(tree: Any) -> bytes:
    out = io.BytesIO()
    torch.save(tree, out)
    return out.getvalue()


def _zero(order: random.Random) -> dict[str, bytes | str]:
    shapes = [{"a.weight": torch.Size((2, 3)), "a.bias": torch.Size((3,))}]
    stage = order.choice((1, 2, 3))
    about = {
        "module": dict(TENSORS),
        "param_shapes": shapes,
        "buffer_names": ["n"],
        "shared_params": {"b.weight": "a.weight"},
    }
    times = order.choice((1, 1, 1, 2, 4_000))  # the same weights, or numbers, as often as a few bytes say
    about["param_shapes"] = shapes * times
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    parts = {
        "optimizer_state_dict": {
            "zero_stage": stage,
            key: [torch.arange(9.0 * times)] * order.choice((1, times)),
        }
    }
    ranks = order.choice(("0", "0", "0", "x", "²", "-1", ""))
    return {
        "zero/mp_rank_00_model_states.pt": _saved(_shaken(about, order)),
        f"zero/zero_pp_rank_{ranks}_mp_rank_00_optim_states.pt": _saved(_shaken(parts, order)),
        "zero/latest": order.choice((b"zero", b"..", b"\xff", b"../../etc", b"a\0b", b"", b"/", b"pipe")),
    }  # fmt: skip


def _universal(order: random.Random) -> dict[str, bytes | str]:
    return {f"uni/zero/{name}/fp32.pt": _saved(_shaken({"param": x}, order)) for name, x in TENSORS.items()}


def _megatron(order: random.Random) -> dict[str, bytes | str]:
    model = {
        "embedding.word_embeddings.weight": torch.ones(4, 2),
        "decoder.layers.0.mlp.linear_fc1.weight": torch.ones(4, 2),
    }
    files: dict[str, bytes | str] = {}
    for rank in range(order.choice((1, 2))):
        number = order.choice((f"{rank:02d}", f"{rank:02d}", "²", f"{rank:02d}_000", "9" * 30))
        files[f"mega/mp_rank_{number}/model_optim_rng.pt"] = _saved(
            _shaken({"model": model, "args": {"swiglu": True}}, order)
        )
    files["mega/latest_checkpointed_iteration.txt"] = order.choice(
        (b"10", b"release", b"..", "²".encode(), b"9" * 5000, b"\xff", b"a\0b")
    )
    return files


@cache
def dcp() -> tuple[bytes, bytes]:
    """(.metadata, the file of one tensor)."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    data, size = _saved(TENSORS["a.weight"]), torch.Size((2, 3))
    about = TensorStorageMetadata(
        TensorProperties(torch.float32), size, [ChunkStorageMetadata(torch.Size((0, 0)), size)]
    )
    place = _StorageInfo("__0_0.distcp", 0, len(data))
    index = MetadataIndex("model.a", torch.Size((0, 0)))
    made = Metadata({"model.a": about, "epoch": BytesStorageMetadata()}, storage_data={index: place})
    return pickle.dumps(made), data


@cache
def _dcp_of_shared_chunks() -> bytes:
    """A list of chunks that many tensors have in common, in few bytes."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    size = torch.Size((2, 3))
    chunks = [ChunkStorageMetadata(torch.Size((0, 0)), size)] * 4_000
    about = TensorStorageMetadata(TensorProperties(torch.float32), size, chunks)
    (place,) = pickle.loads(dcp()[0]).storage_data.values()  # noqa: S301 - made here
    index = {MetadataIndex(f"model.{i}", torch.Size((0, 0))): place for i in range(4_000)}
    return pickle.dumps(Metadata({f"model.{i}": about for i in range(4_000)}, storage_data=index))


def _one_dcp(order: random.Random) -> dict[str, bytes | str]:
    metadata, data = dcp()
    match order.randrange(5):
        case 4:
            metadata = _dcp_of_shared_chunks()
        case 0:
            metadata = bytes_changed(metadata, order)
        case 1:
            metadata = program(order)
        case 2:
            at = order.randrange(2, len(metadata))
            metadata = metadata[:at] + snippet(order) + metadata[at:]
        case _:
            old = order.choice((b"__0_0.distcp", b"model.a", b"offsets", b"chunks", b"length", b"size"))
            metadata = metadata.replace(old, bytes(order.choice(b"abc../") for _ in old))
    file: bytes | str = order.choice((data, data, torch_file(order), "pipe", "/dev/zero"))
    return {"dcp/.metadata": metadata, "dcp/__0_0.distcp": file}


def _others(order: random.Random) -> dict[str, bytes | str]:
    return order.choice((_zero, _universal, _megatron, _one_dcp))(order)


# --- a config.json ---

LLAMA = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "intermediate_size": 32, "max_position_embeddings": 32, "architectures": ["LlamaForCausalLM"], "attention_dropout": 0.0, "head_dim": 4,
}  # fmt: skip
OTHER = {
    "gpt2": {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.1},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    "deepseek_v3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "kv_lora_rank": 4, "qk_nope_head_dim": 4,
                    "qk_rope_head_dim": 4, "v_head_dim": 4},
}  # fmt: skip


def _config(order: random.Random) -> bytes | str:
    if order.random() < 0.05:
        return order.choice(
            (
                "pipe",
                "/dev/zero",
                "/etc/passwd",
                b"[" * 200_000,
                b'{"a":' * 90_000,
                b"null",
                b"[]",
                b"",
                b"\xff",
                b"1" * 5000,
            )
        )
    kind = order.choice(("llama", *OTHER))
    config: dict[str, Any] = {**LLAMA, **OTHER.get(kind, {}), "model_type": kind}
    code = {
        "auto_map": {"AutoConfig": "canary.Own", "AutoModelForCausalLM": "canary.Own"},
        "trust_remote_code": True,
    }
    config |= order.choice(
        ({}, {}, code, {"model_type": "canary.Own"}, {"quantization_config": {"a": 1}}, {"image_size": 8})
    )
    for _ in range(order.choice((1, 1, 2, 4))):
        mutate(config, order)
        if not config:
            break
    return json.dumps(config).encode("utf-8", "surrogatepass")


def play_config(data: bytes | str) -> str:
    """A model by its config.json: as a recipe names it, as a plan asks it, as the planner prices it."""
    from unisono.models.hf import HFConfig
    from unisono.models.hf.described import read_config
    from unisono.planner.hf_config import transformer_of

    Path("model").mkdir(exist_ok=True)
    _put("model/config.json", data)
    try:
        config = HFConfig.model_validate({"kind": "hf:model"})
        if problems := list(config.problems()):
            return f"U-{problems[0].code}"
        found = (
            config.depth,
            config.window,
            [config.deals(axis) for axis in ("tp", "cp", "ep")],
            config.begins_from(),
            config.layout(),
        )
        priced = transformer_of(read_config(Path("model/config.json")), None)
        return "a model" if priced is not None and found else "a model without a price"
    finally:
        os.unlink("model/config.json")


def _ready() -> None:
    good_file(), _safetensors(), dcp(), _dcp_of_shared_chunks()
    torch.set_num_threads(1)
    makers: Iterator[Callable[[random.Random], Any]] = iter(
        (_folder, _pickles, _zero, _universal, _megatron, _one_dcp)
    )
    for draw in makers:
        for number in range(3):
            with_errors(play_weights, draw(random.Random(number)))
    for number in range(9):
        with_errors(play_config, _config(random.Random(number)))


SAFETENSORS = Kind("safetensors", _folder, play_weights, _ready, 8)
PICKLES = Kind("pickles", _pickles, play_weights, _ready, 8)
OTHERS = Kind("checkpoints", _others, play_weights, _ready, 6)
CONFIGS = Kind("configs", _config, play_config, _ready, 4)
