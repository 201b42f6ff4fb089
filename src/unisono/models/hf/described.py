"""The config.json of a foreign model: where it lies, and the sizes that a plan asks for. No torch, no transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.spec.doubtful import read_text
from unisono.spec.errors import UsageError

_LARGEST = 1 << 24  # bytes: some name thousands of classes


def config_of(name: str, environ: Mapping[str, str]) -> Path | None:
    """The config.json of a folder, of a file, or of a model that transformers has loaded before."""
    saved_at = Path(name)
    if saved_at.is_file():
        return saved_at
    if (saved_at / "config.json").is_file():
        return saved_at / "config.json"
    home = Path(environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    seen = (
        Path(environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}" / "snapshots"
    )
    return max(seen.glob("*/config.json"), key=lambda path: path.stat().st_mtime, default=None)


def described(kind: str) -> tuple[dict[str, Any], Path]:
    """(what the config.json says, where it lies) of `hf:PATH_OR_NAME`. Raises UsageError C22 where there is none."""
    name = kind.removeprefix("hf:")
    path = config_of(name, {})
    if path is None:
        what = f"no config.json of {name}: neither such a folder nor in the cache of transformers"
        fix = "hf:FOLDER with a config.json; nothing is loaded from the network"
        raise UsageError(what, where="model.kind", fix=fix, code="C22")
    config = read_config(path)
    if "model_type" not in config:
        what = f"{path} names no model_type"
        raise UsageError(
            what, where="model.kind", fix="the config.json as transformers writes it", code="C22"
        )
    return config, path


def read_config(path: Path) -> dict[str, Any]:
    """What a config.json says. Raises UsageError C22."""
    try:
        config = json.loads(read_text(path, _LARGEST))
    except (ValueError, OSError, RecursionError) as error:
        raise _unread(f"{path} is not JSON: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(config, dict):
        raise _unread(f"{path} holds no object")
    return config


def size(config: Mapping[str, Any], *names: str) -> int:
    """The first of these keys that is there; 0 where none is. Raises UsageError C22 for what is no size."""
    name = next((name for name in names if config.get(name)), "")
    value = config[name] if name else 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 40:
        raise _unread(f"{name} of config.json is {str(value)[:40]!r}, which is no size")
    return value


def _unread(what: str) -> UsageError:
    return UsageError(what, where="model.kind", fix="the file as transformers writes it", code="C22")
