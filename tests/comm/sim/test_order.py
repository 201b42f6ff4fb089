"""What a simulated device can know of its streams: an access that nobody has waited for is a race, any other is none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono_contrib.comm.sim.memory import DeviceMemory
from unisono_contrib.comm.sim.order import Access, DeviceBuffer, SimStream, StreamTimeline, joined

WHOLE = (0, 8)


def access(stream: SimStream, spoiled: list[str] | None = None, name: str = "x") -> Access:
    return Access(
        stream.number, stream.begin(), name, lambda: spoiled.append(name) if spoiled is not None else None
    )


def buffer(timeline: StreamTimeline) -> DeviceBuffer:
    return DeviceBuffer(timeline, timeline.streams[0], 8, lambda nbytes: None)


@pytest.fixture
def timeline() -> StreamTimeline:
    made = StreamTimeline()
    made.stream()
    made.stream()
    return made


def test_a_read_before_its_write_was_waited_for_is_a_race(timeline):
    main, side = timeline.streams
    x = buffer(timeline)
    x.overwrite(access(main), WHOLE, main.clock)
    assert not x.read(access(side), WHOLE, side.clock)
    assert [race.kind for race in timeline.races] == ["read before it was written"]


def test_who_has_waited_reads_what_was_written(timeline):
    main, side = timeline.streams
    x = buffer(timeline)
    x.overwrite(access(main), WHOLE, main.clock)
    joined(side.clock, main.clock)
    assert x.read(access(side), WHOLE, side.clock) and not timeline.races


def test_what_the_host_has_waited_for_is_known_to_all(timeline):
    main, side = timeline.streams
    x = buffer(timeline)
    x.overwrite(access(main), WHOLE, main.clock)
    timeline.wait_on_host(main.clock)
    assert x.read(access(side), WHOLE, side.clock) and not timeline.races
    assert timeline.waits.total() == 1


def test_a_write_over_what_is_read_makes_the_reader_wrong(timeline):
    main, side = timeline.streams
    x, wrong = buffer(timeline), list[str]()
    x.read(access(side, wrong, "copy"), WHOLE, side.clock)
    x.overwrite(access(main), WHOLE, main.clock)
    assert wrong == ["copy"]


def test_writes_beside_each_other_are_no_race(timeline):
    main, side = timeline.streams
    x = buffer(timeline)
    x.overwrite(access(main), (0, 4), main.clock)
    x.overwrite(access(side), (4, 8), side.clock)
    assert not timeline.races


@pytest.mark.parametrize("kept", [True, False])
def test_memory_is_not_taken_again_while_another_stream_has_it(timeline, kept):
    main, side = timeline.streams
    x, wrong = buffer(timeline), list[str]()
    x.read(access(side, wrong, "copy"), WHOLE, side.clock)
    if kept:
        x.keepers.add(side.number)
    del x
    main.begin()
    assert not timeline.races, "it is free, and nobody has it yet"
    main.take()
    assert wrong == ([] if kept else ["copy"])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans()), max_size=30))
def test_streams_that_wait_for_all_before_each_operation_never_race(steps):
    timeline = StreamTimeline()
    streams = [timeline.stream() for _ in range(3)]
    x = buffer(timeline)
    for number, writes, by_host in steps:
        stream = streams[number]
        if by_host:
            timeline.wait_on_host(timeline.everything())
        else:
            for other in streams:
                joined(stream.clock, other.clock)
        now = access(stream)
        if writes:
            x.overwrite(now, WHOLE, stream.clock)
        else:
            assert x.read(now, WHOLE, stream.clock)
    assert not timeline.races


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.booleans()), min_size=2, max_size=20))
def test_streams_that_never_wait_race_as_soon_as_one_writes_what_the_other_has_touched(steps):
    timeline = StreamTimeline()
    streams = [timeline.stream() for _ in range(2)]
    x, touched, expected = buffer(timeline), {0: set[bool](), 1: set[bool]()}, False
    for number, writes in steps:
        other = touched[1 - number]
        expected |= bool(other) if writes else True in other
        now = access(streams[number])
        if writes:
            x.overwrite(now, WHOLE, streams[number].clock)
            touched = {number: {True}, 1 - number: touched[1 - number]}
        else:
            x.read(now, WHOLE, streams[number].clock)
        touched[number].add(writes)
    assert bool(timeline.races) == expected


def test_memory_has_an_end_and_a_peak():
    memory = DeviceMemory(4096)
    memory.take(1)
    memory.take(1025)
    assert (memory.taken, memory.most) == (512 + 1536, 2048)
    memory.give_back(1025)
    with pytest.raises(MemoryError):
        memory.take(4096)
    assert (memory.taken, memory.most) == (512, 2048)
