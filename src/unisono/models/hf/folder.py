"""A foreign model's weights back in a folder, as its library writes and loads it."""

from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from unisono.models.folder import TOKENIZER, Outgoing, byte_tokenizer, write_model
from unisono.models.hf.described import described
from unisono.models.hf.names import Names
from unisono.models.weights import dtype_of, shapes_there, sources_of, theirs_of
from unisono.spec.model import Facts

if TYPE_CHECKING:
    from unisono.models.hf import HFConfig

_GENERATION = "generation_config.json"


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
    kept = {k: v for k, v in said.items() if k not in ("torch_dtype", "dtype", "quantization_config")}
    texts: dict[str, Any] = {"config.json": {**kept, "dtype": word, "torch_dtype": word}}
    copies: list[tuple[Path, tuple[str, ...]]] = [(path.parent, (_GENERATION,))]
    is_text = "image_size" not in said
    if is_text and not (path.parent / _GENERATION).is_file():
        ends = {key: said[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in said}
        texts[_GENERATION] = {"_from_model_config": True, **ends}
    words_of = tokenizer or ""
    folder = Path(words_of.removeprefix("hf:")) if words_of.startswith("hf:") else path.parent
    if words_of == "byte" and is_text:  # not that of the folder: the run knows bytes
        texts |= byte_tokenizer(config.window)
    else:
        copies.append((folder, TOKENIZER))
    files = write_model(out, entries, texts, copies)
    has_tokenizer = not {*TOKENIZER}.isdisjoint(files)
    return {
        "layout": said["model_type"],
        "files": sorted(files),
        "parameters": sum(prod(entry.shape) for entry in entries),
        "dtype": word,
        "tokenizer": ("byte" if words_of == "byte" else str(folder)) if has_tokenizer else None,
    }
