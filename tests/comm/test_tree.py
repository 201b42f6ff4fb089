"""One tree: whoever computes which block, in whatever order, the bits are the same."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.comm.tree import TreeSum, branch_sum, fold_, split, tree_sum


def leaves_of(n, seed=0, size=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) * 10 ** (i % 7) for i in range(n)]


@given(st.integers(2, 10_000))
def test_split_is_a_power_of_two_that_leaves_something(n):
    k = split(n)
    assert k & (k - 1) == 0 and n / 2 <= k < n


@settings(deadline=None)
@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_order_of_arrival_does_not_matter(n, random):
    leaves = leaves_of(n)
    expected = tree_sum(leaves)
    order = list(range(n))
    random.shuffle(order)
    total = TreeSum(n)
    got = [total.add(i, leaves[i].clone()) for i in order]
    assert all(x is None for x in got[:-1])
    assert torch.equal(got[-1], expected)
    assert all(torch.equal(a, b) for a, b in zip(leaves, leaves_of(n), strict=True))


@settings(deadline=None)
@given(st.integers(0, 4), st.integers(1, 9))
def test_ranks_with_aligned_blocks_compute_the_same_tree(power, ranks):
    """The promise of canonical mode: 2^k leaves a rank, any number of ranks."""
    block = 2**power
    leaves = leaves_of(block * ranks)
    partial = [tree_sum(leaves[r * block : (r + 1) * block]) for r in range(ranks)]
    assert torch.equal(tree_sum([p.clone() for p in partial]), tree_sum(leaves))


@settings(deadline=None)
@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_whoever_has_which_branches_the_whole_is_the_same(n, random):
    leaves, cut = leaves_of(n), [(0, n)]
    for _ in range(random.randrange(n)):
        low, high = cut.pop(random.randrange(len(cut)))
        middle = low + split(high - low) if high - low > 1 else high
        cut += [(low, middle), (middle, high)] if middle < high else [(low, high)]
    sums = {(low, high): tree_sum(leaves[low:high]) for low, high in cut}
    before = {branch: x.clone() for branch, x in sums.items()}
    assert torch.equal(branch_sum(sums, 0, n), tree_sum(leaves))
    assert all(torch.equal(x, before[branch]) for branch, x in sums.items()), "branches stay"


def test_a_tree_is_not_a_running_sum():
    leaves = leaves_of(8)
    running = torch.zeros(5)
    for leaf in leaves:
        running = running + leaf
    assert not torch.equal(tree_sum(leaves), running)


@settings(deadline=None)
@given(st.integers(1, 70), st.integers(1, 6))
def test_fold_gives_a_row_the_same_bits_among_any_number_of_rows(n, rows):
    x = torch.stack(leaves_of(rows, size=n))
    before = x.clone()
    got = fold_(x.clone())
    assert torch.equal(x, before)
    for row in range(rows):
        torch.testing.assert_close(got[row].double(), x[row].double().sum(), rtol=1e-4, atol=1e-1)
        assert torch.equal(fold_(x[row : row + 1].clone())[0], got[row])
