"""How fast shards of pictures become batches, and who loses samples when ranks are killed and their number changes.

    python benchmarks/streaming.py --peers PYTHON --rounds 5 --pictures 4000

PYTHON is an interpreter with webdataset, torchdata, mosaicml-streaming, litdata and grain; those that it lacks are
left out. All read the same JPEG files of 96 x 96 from 50 shards of their own format on this disk, decode them by the
same function, with the same number of worker processes; ours in threads stand beside it. A round is an epoch of each
loader in turn, its first batch not counted. Ratios are of the epochs of a round, their median with its 90 % interval.

The second table is of kills: three epochs on 4, 2, 3 and 4 ranks. After so many batches the ranks end, and other ranks
go on from what each saved (a rank that is new takes the state of rank 0). It says how many samples of three epochs
never came, and how many came more than once in an epoch's worth of samples.

--kinds measures our threads beside our processes, with a function of the user's in Python and without one.

The third line is of a store that takes 20 ms a request: the share of a step of so many ms that waits for a batch.
"""

import argparse
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from axes import interval

RANK = Path(__file__).with_name("streaming_rank.py")
SHARDS, BATCH = 50, 16
PEERS = ("webdataset", "torchdata", "mosaicml-streaming", "litdata", "grain")
WRITE = """
import json, sys
from pathlib import Path
folder, kind = sys.argv[1:]
bodies = [path.read_bytes() for path in sorted(Path(folder, "jpg").iterdir())]
if kind == "mds":
    from streaming import MDSWriter
    size = sum(map(len, bodies)) // 50
    with MDSWriter(out=folder + "/mds", columns={"jpg": "bytes", "number": "int"}, size_limit=size) as out:
        for i, body in enumerate(bodies):
            out.write({"jpg": body, "number": i})
else:
    import litdata
    def pair(i):
        return {"jpg": Path(folder, "jpg", f"{i:06d}.jpg").read_bytes(), "number": i}
    if __name__ == "__main__":
        litdata.optimize(pair, list(range(len(bodies))), folder + "/lit", chunk_size=len(bodies) // 50, num_workers=1)
"""


AUGMENT = """
import numpy as np
from axes import interval

def slow(picture, draw):
    pixels = np.asarray(picture.resize((64, 64))).transpose(2, 0, 1).copy()
    for row in range(64):  # what holds Python's lock
        for _ in range(20):
            pixels[:, row] = pixels[:, row, ::-1] if draw.random() < 0.5 else pixels[:, row]
    return pixels
"""


def pictures(folder: Path, count: int) -> None:
    """JPEG files, and the same in tars, with a table of where they lie."""
    from PIL import Image

    draw = np.random.default_rng(0)
    (folder / "jpg").mkdir()
    (folder / "tar").mkdir()
    spans = []
    for shard, numbers in enumerate(np.array_split(np.arange(count), SHARDS)):
        path = folder / "tar" / f"{shard:03d}.tar"
        with tarfile.open(path, "w") as tar:
            for number in numbers.tolist():
                rough = Image.fromarray(draw.integers(0, 256, (12, 12, 3), dtype=np.uint8))
                body = io.BytesIO()
                rough.resize((96, 96), Image.Resampling.BICUBIC).save(body, "JPEG", quality=85)
                (folder / "jpg" / f"{number:06d}.jpg").write_bytes(body.getvalue())
                for field, value in (("jpg", body.getvalue()), ("cls", str(number).encode())):
                    info = tarfile.TarInfo(f"{number:06d}.{field}")
                    info.size = len(value)
                    tar.addfile(info, io.BytesIO(value))
        with tarfile.open(path) as tar:
            spans += [(shard, m.offset_data, m.size) for m in tar.getmembers() if m.name.endswith("jpg")]
    np.save(folder / "spans.npy", np.array(spans))


def start(python: str, how: dict[str, Any]) -> "subprocess.Popen[str]":
    """A rank under way, in a session of its own. What it says goes to files: its workers may outlive it."""
    environ = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    command = [python, "-P", str(RANK), json.dumps(how)]
    with open(f"{how['seen']}.out", "w") as out, open(f"{how['seen']}.err", "w") as err:
        return subprocess.Popen(
            command, stdout=out, stderr=err, text=True, env=environ, start_new_session=True
        )


def answer(rank: "subprocess.Popen[str]", seen: str, seconds: float) -> dict[str, Any]:
    """What it said last. Raises RuntimeError with its last line of error, or where it hangs."""
    try:
        code = rank.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError("hangs") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
    if code:
        lines = [line for line in Path(f"{seen}.err").read_text().splitlines() if line.strip()]
        raise RuntimeError((lines or ["died"])[-1][:160])
    return json.loads(Path(f"{seen}.out").read_text().strip().splitlines()[-1])


def free_port() -> int:
    """A port that nobody has."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def speeds(
    folder: Path,
    pythons: dict[str, str],
    rounds: int,
    workers: int,
    more: dict[str, dict[str, str]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Samples a second of each, and the cost of a snapshot. more: what else a rank of that name is told."""
    rates: dict[str, list[float]] = {name: [] for name in pythons}
    costs: dict[str, list[float]] = {name: [] for name in pythons}
    for turn in range(rounds):
        for name in [*pythons][:: 1 if turn % 2 else -1]:
            how = {
                "loader": name, "folder": str(folder), "rank": 0, "world": 1, "batch": 64, "epochs": 1,
                "port": free_port(), "workers": workers, "shards": SHARDS, "seen": str(folder / "seen"),
                "snapshots": turn == rounds - 1, **(more or {}).get(name, {}),
            }  # fmt: skip
            try:
                said = answer(start(pythons[name], how), how["seen"], 300)
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            rates[name].append(said["rate"])
            costs[name] += [said["snapshot_ms"]] if said["snapshot_ms"] is not None else []
    return {
        name: {"samples_per_s": median(each), "rounds": each, "snapshot_ms": costs[name]}
        for name, each in rates.items()
        if each
    }


def kinds(folder: Path, rounds: int, workers: int) -> dict[str, dict[str, Any]]:
    """As `speeds`: threads beside processes, with the function of AUGMENT and without it."""
    (folder / "augment.py").write_text(AUGMENT)
    functions = {"decoding": "", "a function in Python": f"{folder}/augment.py:slow"}
    more = {
        f"{kind}, {about}": {"loader": "ours", "worker_kind": kind, "transform": text}
        for about, text in functions.items()
        for kind in ("threads", "processes")
    }
    return speeds(folder, dict.fromkeys(more, sys.executable), rounds, workers, more)


def kills(folder: Path, name: str, python: str, count: int) -> dict[str, Any]:
    """Samples lost and doubled in three epochs on 4, 2, 3 and 4 ranks."""
    seen, states = folder / f"seen-{name}", list[Path]()
    seen.unlink(missing_ok=True)
    for turn, (world, share) in enumerate(((4, 0.25), (2, 0.25), (3, 0.25), (4, 1.0))):
        steps = int(3 * count * share / (world * BATCH)) if share < 1 else -1
        port, ranks, saved = free_port(), [], list[Path]()
        for rank in range(world):
            saved.append(folder / f"{name}-{turn}-{rank}")
            state = str(states[rank] if rank < len(states) else states[0]) if states else ""
            how = {
                "loader": name, "folder": str(folder), "rank": rank, "world": world, "batch": BATCH, "epochs": 3,
                "port": port, "workers": 1, "shards": SHARDS, "seen": f"{seen}-{turn}-{rank}", "steps": steps,
                "state": state,
                "save": str(saved[-1]),
            }  # fmt: skip
            ranks.append((start(python, how), how["seen"]))
        failures = []
        for rank, said in ranks:
            try:
                answer(rank, said, 120)
            except RuntimeError as error:
                failures.append(str(error))
        if failures:
            return {"refused": f"with {world} ranks: {failures[0]}"}
        states = saved
    lines = [
        json.loads(line) for path in folder.glob(f"seen-{name}-?-?") for line in path.read_text().splitlines()
    ]
    times = Counter(number for _, numbers in lines for number in numbers)
    return {
        "lost": sum(max(0, 3 - times[number]) for number in range(count)),
        "doubled": sum(max(0, times[number] - 3) for number in range(count)),
    }


def waiting(folder: Path, step_ms: float) -> dict[str, float]:
    """The share of a step that waits for its batch, where each request takes 20 ms; the first step is not counted."""
    from fsspec.implementations.memory import MemoryFileSystem

    from unisono.library.streaming import StreamingLoader

    system, read = MemoryFileSystem(), MemoryFileSystem.cat_file
    for path in (folder / "tar").iterdir():
        system.pipe_file(f"/bucket/{path.name}", path.read_bytes())

    def cat_file(self: Any, path: str, **more: Any) -> bytes:
        time.sleep(0.02)
        return read(self, path, **more)

    MemoryFileSystem.cat_file = cat_file  # type: ignore[method-assign]
    loader = StreamingLoader(
        f"tar:memory://bucket/{{000..{SHARDS - 1:03d}}}.tar,cache_gb=1e-6", BATCH, image=(3, 64, 64), epochs=2,
        workers=1, cache=str(folder / "remote"),
    )  # fmt: skip
    walk = iter(loader)
    next(walk)
    waits = []
    while True:
        time.sleep(step_ms / 1e3)
        before = time.perf_counter()
        if next(walk, None) is None:
            break
        waits.append(time.perf_counter() - before)
    whole = len(waits) * step_ms / 1e3 + sum(waits)
    return {"share": sum(waits) / whole, "median_ms": 1e3 * median(waits), "longest_ms": 1e3 * max(waits)}


def main() -> None:
    """Print tables, and with --json an object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default="", help="an interpreter that has the other loaders")
    parser.add_argument("--only", nargs="*", default=PEERS, help="which of them")
    parser.add_argument("--pictures", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=100.0, help="of the step that waits for a store")
    parser.add_argument("--kills", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--kinds", action="store_true", help="our threads beside our processes, and nothing else"
    )
    parser.add_argument("--json", default="", help="a file for all figures")
    asked = parser.parse_args()
    result: dict[str, Any] = {"pictures": asked.pictures, "workers": asked.workers}
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as place:
        folder = Path(place)
        pictures(folder, asked.pictures)
        if asked.kinds:
            for name, said in kinds(folder, asked.rounds, asked.workers).items():
                print(f"{name:34} {said['samples_per_s']:8.0f} samples/s")
            return
        pythons = {"ours": sys.executable}
        for name in asked.only if asked.peers else ():
            kind = {"mosaicml-streaming": "mds", "litdata": "lit"}.get(name)
            if kind is not None:
                (folder / "write.py").write_text(WRITE)
                made = subprocess.run(
                    [asked.peers, "-P", str(folder / "write.py"), place, kind], capture_output=True, text=True
                )
                if made.returncode:
                    print(f"{name}: {made.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                    continue
            pythons[name] = asked.peers
        # As the peers' workers ours are processes here; in threads beside it.
        more = {"ours": {"worker_kind": "processes"}, "ours in threads": {"loader": "ours"}}
        racing = {**pythons, "ours in threads": sys.executable}
        result["speed"] = speeds(folder, racing, asked.rounds, asked.workers, more)
        ours = result["speed"]["ours"]["rounds"]
        for name, said in result["speed"].items():
            cost = f"{said['snapshot_ms'][0]:.3f} ms a snapshot" if said["snapshot_ms"] else ""
            paired = [mine / its for mine, its in zip(ours, said["rounds"], strict=False)]
            low, high = interval(sorted(paired))
            print(
                f"{name:20} {said['samples_per_s']:8.0f} samples/s  ours/it {median(paired):5.2f}"
                f" (90 %: {low:.2f} to {high:.2f})  {cost}"
            )
        result["waiting"] = waiting(folder, asked.step_ms)
        print(
            f"waiting for a store of 20 ms a request, steps of {asked.step_ms:g} ms: {result['waiting']['share']:.2%}"
        )
        for name, python in pythons.items() if asked.kills else ():
            said = result.setdefault("kills", {})[name] = kills(folder, name, python, asked.pictures)
            print(f"{name:20} {json.dumps(said)}", flush=True)
    if asked.json:
        Path(asked.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
