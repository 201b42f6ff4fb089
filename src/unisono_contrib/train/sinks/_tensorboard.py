"""Event files, written and read with TensorBoard's messages. Each connection has a file of its own: TensorBoard reads
those of a folder value after the other, and what a file ends with half an event harms nothing but itself."""

import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tensorboardX.crc32c import crc32c  # pyright: ignore
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore

from unisono.observe.files import Appender
from unisono_contrib.trackers import Point, TrackedRun, TrackerConnection

_MASK = 0xA282EAD8  # of the checksums in a file of records (TensorFlow, tfrecord format)


class EventFiles(TrackerConnection):
    """The folder `tensorboard` of a run, or `DIR/KEY`."""

    def __init__(self, run: TrackedRun, folder: str) -> None:
        self.folder = Path(folder, run.key) if folder else run.folder / "tensorboard"
        self._began = run.began
        self._file: Appender | None = None

    def held(self, after: int) -> Mapping[int, Mapping[str, float]]:
        held: dict[int, dict[str, float]] = {}
        for path in sorted(self.folder.glob("events.out.tfevents.*")):
            for event in events_in(path):
                values = {
                    value.tag: value.simple_value
                    for value in event.summary.value
                    if value.HasField("simple_value")
                }
                if event.step > after and values:
                    held.setdefault(event.step, {}).update(values)
        return held

    def send(self, points: Sequence[Point]) -> None:
        events = [
            Event(
                step=point.step,
                wall_time=point.at,
                summary=Summary(
                    value=[Summary.Value(tag=k, simple_value=v) for k, v in point.values.items()]
                ),
            )
            for point in points
        ]
        self._append(events)

    def describe(self, run: TrackedRun) -> None:
        """Nothing: TensorBoard knows no state of a run. What the run is stands in `run.md` beside the events."""
        lines = [
            *(f"- {k}: {v}" for k, v in run.tags.items()),
            *(f"- {k}: {v}" for k, v in run.recipe.items()),
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "run.md").write_text("\n".join([f"# {run.key}", "", *lines, ""]), encoding="utf-8")

    def forget(self) -> None:
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _append(self, events: Sequence[Event]) -> None:
        first = []
        if self._file is None:
            count = len(list(self.folder.glob("events.out.tfevents.*")))
            self._file = Appender(self.folder / f"events.out.tfevents.{count:010d}.unisono")
            first = [Event(wall_time=self._began, file_version="brain.Event:2")]
        self._file.append(b"".join(_framed(event.SerializeToString()) for event in [*first, *events]))


def events_in(path: Path) -> Iterator[Event]:
    """The whole events of a file."""
    data, at = path.read_bytes(), 0
    while at + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        end = at + 12 + size
        if end + 4 > len(data) or struct.unpack_from("<I", data, end)[0] != _checksum(data[at + 12 : end]):
            return
        yield Event.FromString(data[at + 12 : end])
        at = end + 4


def _framed(body: bytes) -> bytes:
    head = struct.pack("<Q", len(body))
    return head + struct.pack("<I", _checksum(head)) + body + struct.pack("<I", _checksum(body))


def _checksum(data: bytes) -> int:
    value = crc32c(data)
    return (((value >> 15) | (value << 17)) + _MASK) & 0xFFFFFFFF
