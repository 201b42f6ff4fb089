"""The page of the dash in a browser, with many ranks: quick, light, readable by all, and it asks nobody else.

The figures of issue and documents, at full size: `python benchmarks/dash.py`.
"""

import importlib.util
import os
import warnings
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
AXE = os.environ.get("AXE_CORE", "")


def _missing(what: str, remedy: str) -> None:
    warnings.warn(f"no {what} here: the page of the dash was NOT looked at in a browser", stacklevel=2)
    pytest.skip(f"no {what}: {remedy}")


@pytest.fixture
def bench() -> ModuleType:
    """`benchmarks/dash.py`; skips where there is no browser."""
    for name, remedy in (
        ("playwright", "pip install playwright"),
        ("starlette", "pip install 'unisono[dash]'"),
    ):
        if importlib.util.find_spec(name) is None:
            _missing(name, remedy)
    spec = importlib.util.spec_from_file_location("dash_bench", ROOT / "benchmarks" / "dash.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if module.CHROMIUM is None:
        _missing("chromium", "apt-get install chromium")
    return module


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_thousand_ranks_are_watched(bench: ModuleType, tmp_path: Path) -> None:
    axe = Path(AXE) if AXE and Path(AXE).is_file() else None
    if axe is None:
        warnings.warn(
            "AXE_CORE names no axe.min.js: faults of accessibility were NOT looked for", stacklevel=1
        )
    seen = bench.measured(tmp_path / "run", 1000, 600, axe, tmp_path, 30.0)
    assert seen["first_paint_ms"] < 1000 and seen["scroll"]["fps"] > 20 and seen["pan"]["fps"] > 20
    assert 0 < seen["tab_mib"] < 300 and seen["events_per_s"] > 5000
    assert (
        max(seen["server_share"], seen["server_share_watched"]) < 0.02
    )  # a verdict is worked out with rests
    assert seen["requests"] > 5 and seen["off_machine"] == [] and seen["errors"] == []
    assert seen["while_away"].startswith("reconnecting") and seen["back"] == "training"
    assert all(faults == [] for faults in seen.get("axe", {}).values())
    assert {path.name for path in tmp_path.glob("*.png")} == {"dash-390.png", "dash-1600.png"}
