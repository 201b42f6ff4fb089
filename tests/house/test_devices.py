"""What is particular to a kind of device stands in comm/device.py: another kind is an edit of that file."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.house.source import FILES, file_at, place_of, tree_of

HOME = "comm/device.py"
WORDS = ("cuda", "nccl", "nvidia", "xpu", "mps", "rocm")
# Who may use such words, and why.
ALLOWED = {
    "config/models.py": "names of backends are part of the contract",
    "lab/play.py": "a variable of the environment, set before torch looks at devices",
    "launch/agree.py": "a remedy, in words of the contract",
    "launch/error_record.py": "what backends say of a rank that left, in their own words",
    "launch/local_host.py": "a variable of the environment, for a process that has no torch yet",
    "launch/backend.py": "names of backends, which are part of the contract, and which devices they serve",
    "spec/elsewhere.py": "words of other programs, and a variable of the environment in a remedy",
    "spec/frames.py": "what backends say of a variable that is wrong, in their own words",
    "launch/transport.py": "variables of the environment that a backend reads; no torch there",
    "verbs/train/room.py": "whether GPUs have the memory that is asked for; no torch there",
    "sweep/room.py": "which GPUs a trial of a sweep may use; no torch there",
    "config/sections/job.py": "names of backends, and modules of a site, in descriptions",
    "config/sections/k8s.py": "the name by which Kubernetes counts devices",
    "config/sections/network.py": "variables of the environment that backends read; no torch there",
    "launch/on_ray.py": "a variable of the environment that Ray sets",
    "submit/job.py": "names of backends, which are part of the contract",
    "report/profile/pieces.py": "names of kernels by which tools know communication; no torch there",
    "observe/environment.py": "variables that are noted beside a run; no torch there",
}
CATALOGUES = ("planner/", "zoo/bugs/")  # what one can buy and what runs on it; addresses of issues
KINDS = ("cpu", *WORDS)
BEGINS = re.compile(rf"(?<![a-z])({'|'.join(WORDS)})")


def _device_words(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of names, texts and comparisons that tell one kind of device from another; docstrings may."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.Attribute | ast.Name | ast.alias | ast.arg | ast.keyword):
            text = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None)
            text = text or getattr(node, "arg", None) or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            text = node.value
        if text and BEGINS.search(text.lower()):
            yield node.lineno, text
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(getattr(side, "attr", "") == "type" for side in sides) and any(
                isinstance(c, ast.Constant) and c.value in KINDS for side in sides for c in ast.walk(side)
            ):
                yield node.lineno, ast.unparse(node)


def test_only_one_file_knows_kinds_of_devices() -> None:
    found = [
        f"{place}:{line}: {text}"
        for path in FILES
        if (place := place_of(path)) != HOME and place not in ALLOWED and not place.startswith(CATALOGUES)
        for line, text in _device_words(tree_of(path))
    ]
    assert found == []


@pytest.mark.parametrize("place", ALLOWED)
def test_no_allowance_outlives_its_reason(place: str) -> None:
    assert list(_device_words(tree_of(file_at(place))))


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()", "p.is_cuda", 'if x.device.type == "cpu": pass', "backend == 'nccl'",
        "Path('/dev').glob('nvidia[0-9]*')", "x = 'cpu:gloo,cuda:nccl'", "from torch import xpu", "f(cuda_peak=1)",
    ],
)  # fmt: skip
def test_such_words_are_recognised(line: str) -> None:
    assert list(_device_words(ast.parse(line)))


@pytest.mark.parametrize("line", ['"""About CUDA."""', "torch.device('cpu')", "node.type == 'x'", "maps = 1"])
def test_others_are_not(line: str) -> None:
    assert not list(_device_words(ast.parse(line)))
