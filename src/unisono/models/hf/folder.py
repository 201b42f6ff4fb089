"""A foreign model's weights back in a folder, as its library writes and loads it."""

from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from unisono.models.folder import (
    TOKENIZER,
    Outgoing,
    byte_tokenizer,
    copied,
    not_written,
    write_json,
    write_tensors,
)
from unisono.models.hf.described import described
from unisono.models.hf.names import Names
from unisono.models.weights import dtype_of, shapes_there, sources_of, theirs_of
from unisono.spec.model import Facts

if TYPE_CHECKING:
    from unisono.models.hf import HFConfig


def write_folder(
    config: "HFConfig", state: Mapping[str, Tensor], out: Path, tokenizer: str | None
) -> dict[str, Any]:
    """As `save_pretrained`: safetensors (several files and an index above 5 GB), config.json, generation_config.json,
    and the tokenizer's files where it is one of the library's, or bytes. Raises UsageError F02."""
    said, path = described(config.kind)
    names: Names = config.build(Facts()).names  # type: ignore[assignment]
    there, dtype = shapes_there(names.files), dtype_of(state)
    entries = [
        Outgoing(theirs, dtype, there[theirs], partial(theirs_of, made_of, there[theirs], state.__getitem__))
        for theirs, made_of in sources_of(names.files).items()
    ]
    word = str(dtype).removeprefix("torch.")
    tensors = {
        key: value
        for key, value in said.items()
        if key not in ("torch_dtype", "dtype", "quantization_config")
    }
    ends = {key: said[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in said}
    generation = {"_from_model_config": True, **ends}
    words_of = tokenizer or ""
    folder = Path(words_of.removeprefix("hf:")) if words_of.startswith("hf:") else path.parent
    try:
        out.mkdir(parents=True, exist_ok=True)
        files = write_tensors(out, entries)
        write_json(out / "config.json", {**tensors, "dtype": word, "torch_dtype": word})
        written = ["config.json", *copied(path.parent, out, ("generation_config.json",))]
        if len(written) == 1 and "image_size" not in said:
            write_json(out / "generation_config.json", generation)
            written.append("generation_config.json")
        if words_of == "byte" and "image_size" not in said:  # not that of the folder: the run knows bytes
            words = [*byte_tokenizer(config.window)]
            for name, content in byte_tokenizer(config.window).items():
                write_json(out / name, content)
        else:
            words = copied(folder, out, TOKENIZER)
    except OSError as error:
        raise not_written(out, error) from error
    return {
        "layout": said["model_type"],
        "files": sorted([*written, *files, *words]),
        "parameters": sum(prod(entry.shape) for entry in entries),
        "dtype": word,
        "tokenizer": ("byte" if words_of == "byte" else str(folder)) if words else None,
    }
