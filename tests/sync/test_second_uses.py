"""What a codec keeps of a tied weight, each use by itself on the stages that have it: all of it is there where the
uses are joined again."""

import pytest
import torch

from tests.codecs.test_training import trained
from tests.sync.test_kept import sums
from tests.train.step.test_gradients import text  # noqa: F401
from unisono.train.state.checkpoint import latest

pytestmark = pytest.mark.timeout(120)
CODEC = "codec=powersgd:r=2+ef"


@pytest.mark.parametrize("replicas", [2, 4])
def test_what_stages_kept_of_both_uses_is_kept_of_their_sum(text, tmp_path, threads, replicas) -> None:  # noqa: F811
    """By as many replicas, and by more."""
    was = sums(threads(trained, 4, text=text, plan=f"dp=2 pp=2 {CODEC}", steps=2, folder=str(tmp_path)))
    now = sums(
        threads(
            trained,
            replicas,
            text=text,
            plan=f"dp={replicas} {CODEC}",
            steps=0,
            first=2,
            resume=str(latest(tmp_path)),
        )
    )
    owner, second = "stem.tok.weight/left", "head.out.weight/left"
    assert bool(was[second].any()) and bool(was[owner].any()), "both uses left something"
    was[owner], was[second] = was[owner] + was[second], torch.zeros_like(was[second])
    assert was.keys() == now.keys()
    for key, x in was.items():
        torch.testing.assert_close(now[key], x, rtol=1e-9, atol=1e-12)
