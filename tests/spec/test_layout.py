"""Which module is cut how: a star is one component of a name, and the first glob that fits decides."""

from hypothesis import given
from hypothesis import strategies as st

from unisono.spec.layout import Anatomy, Split

PARTS = st.sampled_from(("blocks", "0", "17", "attn", "proj", "mlp"))
NAMES = st.lists(PARTS, min_size=1, max_size=4)


@given(name=NAMES, stars=st.sets(st.integers(0, 3)))
def test_a_star_stands_for_one_component(name, stars):
    glob = ".".join("*" if i in stars else part for i, part in enumerate(name))
    anatomy = Anatomy(splits={glob: Split.ROW})
    assert anatomy.split_of(".".join(name)) is Split.ROW
    assert anatomy.split_of(".".join([*name, "more"])) is None
    assert len(name) == 1 or anatomy.split_of(".".join(name[:-1])) is None


@given(name=NAMES)
def test_the_first_that_fits_decides(name):
    every = ".".join("*" * len(name))
    both = Anatomy(splits={".".join(name): Split.COLUMN, every: Split.ROW})
    assert both.split_of(".".join(name)) is Split.COLUMN
    assert both.split_of(".".join("x" * len(name))) is Split.ROW
