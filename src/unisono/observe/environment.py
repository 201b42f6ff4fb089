"""The environment of a run as plain data: what somebody else needs to know to repeat it, or to doubt it."""

import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from unisono.observe.files import write_whole
from unisono.observe.private import is_secret, without_secrets

PACKAGES = ("unisono", "torch", "numpy", "safetensors", "pydantic", "transformers")

# Variables that change what a run computes or how fast; everything else stays private.
_PREFIXES = ("UNISONO_", "OMP_", "MKL_", "KMP_", "TORCH", "PYTORCH_", "NCCL_", "GLOO_", "CUDA_", "SLURM_JOB")
_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTHONHASHSEED",
    "LD_PRELOAD",
)


def describe(environ: Mapping[str, str], folder: str | Path = ".") -> dict[str, Any]:
    """Python, platform, CPU, memory, package versions, the commit of `folder`, and the variables that matter.

    Never fails: what the system does not tell is None. Names that look like secrets are left out.
    """
    return {
        "schema_version": 1,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "packages": {name: version for name in PACKAGES if (version := package_version(name))},
        "git": git_commit(folder),
        "argv": without_secrets(sys.argv),
        "env": {
            name: environ[name]
            for name in sorted(environ)
            if (name in _NAMES or name.startswith(_PREFIXES)) and not is_secret(name)
        },
    }


def write(path: str | Path, environ: Mapping[str, str], folder: str | Path = ".") -> Path:
    """Write `env.json`. Raises OSError."""
    return write_whole(path, json.dumps(describe(environ, folder), indent=2) + "\n")


def package_version(name: str) -> str | None:
    """The installed version, read without importing the package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The CPU's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def git_commit(folder: str | Path = ".") -> dict[str, Any] | None:
    """`{"commit", "changed"}` of the repository around `folder`; None without git or repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if changes is None else bool(changes)}


def _git(folder: str | Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=2, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
