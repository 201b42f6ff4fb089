"""Links in numbers and in commands: pure functions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.spec.errors import UsageError
from unisono_contrib.lab import links
from unisono_contrib.lab.links import LabLink, dealt, delay_of, rate_of


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100mbit", 1e8), ("1gbit", 1e9), ("2.5Gbit", 2.5e9), ("640kbit", 64e4), ("0", 0.0), ("100000bit", 1e5)],
)
def test_rates_are_read_as_tc_reads_them(text: str, rate: float) -> None:
    assert rate_of(text) == rate


@pytest.mark.parametrize(("text", "delay"), [("20ms", 0.02), ("500us", 5e-4), ("0.1s", 0.1), ("0", 0.0)])
def test_delays_are_read(text: str, delay: float) -> None:
    assert delay_of(text) == pytest.approx(delay)


@pytest.mark.parametrize("text", ["", "fast", "100", "-1mbit", "1mbyte", "20ms", "1kbit", "1 0mbit"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"mbit|carries"):
        rate_of(text)


@pytest.mark.parametrize("text", ["", "soon", "20", "100mbit", "11s", "-1ms"])
def test_what_is_no_delay_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"ms|ten seconds"):
        delay_of(text)


@given(st.integers(1, links.HOSTS), st.integers(0, 200))
def test_ranks_are_dealt_evenly_and_all(hosts: int, more: int) -> None:
    counts = dealt(hosts + more, hosts)
    assert sum(counts) == hosts + more
    assert len(counts) == hosts
    assert max(counts) - min(counts) <= 1
    assert list(counts) == sorted(counts, reverse=True)


@pytest.mark.parametrize(("ranks", "hosts"), [(3, 4), (0, 0), (100, links.HOSTS + 1)])
def test_a_host_without_ranks_is_refused(ranks: int, hosts: int) -> None:
    with pytest.raises(UsageError) as refused:
        dealt(ranks, hosts)
    assert refused.value.code == "C02"
    assert refused.value.fix


@given(st.floats(64e3, 1e11))
def test_no_packet_is_larger_than_what_may_pass_at_once(rate: float) -> None:
    """The kernel would cut it, frame by frame; and a frame with its head must fit too."""
    link = LabLink(rate)
    assert 1514 < link.packet < link.burst


def test_both_ends_are_shaped_and_alike() -> None:
    link = LabLink(1e8)
    host, switch = links.host_side(0, link), links.switch_side(0, link)
    own = [words for words in host if words[0] == "tc"]
    other = [words for words in switch if words[0] == "tc"]
    assert len(own) == len(other) == 1
    assert own[0][own[0].index("root") :] == other[0][other[0].index("root") :]
    assert "100000000bit" in own[0]


def test_a_link_without_a_rate_is_not_shaped() -> None:
    assert not [words for words in links.host_side(0, LabLink(0.0)) if words[0] == "tc"]


def test_every_host_has_an_address_and_knows_all_names() -> None:
    known = links.hosts_file(links.HOSTS)
    addresses = {links.address(host) for host in range(links.HOSTS)}
    assert len(addresses) == links.HOSTS
    for host in range(links.HOSTS):
        assert f"\n{links.address(host)} {links.host_name(host)}\n" in known
    assert all(len(links.port(host)) < 16 for host in range(links.HOSTS)), "names of devices have 15 letters"
