"""The page of `unisono dash` in Chromium, with the events of 1,000 ranks and 10,000 steps: its costs, and whom it asks.

    python benchmarks/dash.py [--ranks 1000] [--steps 10000] [--folder F] [--axe axe.min.js] [--shots FOLDER]

It writes a run folder of synthetic events (4.6 GB at full size; an existing one is taken again), serves it, and has a
browser look: time to first paint, frames a second while scrolling, memory of the tab, faults that axe-core names, and
all requests. Then it appends ten events a second and rank for a while and takes the server's share of a core. Last it
kills the server, starts it again, and waits until the page follows it. Prints one JSON object.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psutil

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LATE_RANK, LATE_S = 417, 0.2
_BEGAN = 1_700_000_000.0
_STEP_S = 0.1  # ten steps a second


def line_of(rank: int, step: int, late: float) -> str:
    """A line of a rank's events; two buckets, before the second of which a late rank is late, and the others wait."""
    waited = LATE_S if step % 1000 > 700 and rank != LATE_RANK else 0.0
    over = max(late, waited)
    start = round(_BEGAN + _STEP_S * step, 6)
    first = 0.041 + 0.0004 * ((rank * 7919 + step) % 5)
    time = f'"data":0.0002,"forward":0.021,"backward":{0.04 + late:.6f},"comm_exposed":{0.004 + waited:.6f}'
    calls = (
        f'["dp","all_reduce",935616,"backward","blocks.2.mlp",{first:.6f},{0.064 + over:.6f},{0.062 + late:.6f},0],'
        f'["dp","all_reduce",935616,"backward","stem.tok",{0.062 + late:.6f},{0.066 + over:.6f},{0.062 + late:.6f},1]'
    )
    return (
        f'{{"kind":"step","step":{step},"rank":{rank},"time":{{{time},"comm_hidden":0.003,"wait":0.0,"optim":0.002,'
        f'"other":0.001}},"bytes":{{"dp.all_reduce":1871232}},"mem_mib":{900 + rank % 50}.5,"start":{start},'
        f'"calls":[{calls}]}}\n'
    )


def late_by(rank: int, step: int) -> float:
    """Rank 417 is late in a stretch of steps, and now and then somebody for once."""
    if rank == LATE_RANK and step % 1000 > 700:
        return LATE_S
    return 0.03 if (rank * 31 + step * 17) % 9973 == 0 else 0.0


def write_run(folder: Path, ranks: int, steps: int) -> Path:
    """A run folder; one of the same size that is there already is taken."""
    done = folder / "written"
    if done.exists() and done.read_text() == f"{ranks} {steps}":
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "events").mkdir(parents=True)
    (folder / "config.resolved.toml").write_text(
        f'name = "large"\nseed = 0\nplan = "dp={ranks}"\n[model]\nkind = "gpt"\nn_layer = 4\nn_head = 4\nd_model = 96\n'
        f'context = 128\n[data]\nsource = "stdlib"\n[train]\nsteps = {2 * steps}\nglobal_batch = {ranks}\n'
        "micro_batch = 1\n"
    )
    luck = random.Random(0)
    with (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(1, steps + 1):
            metrics.write(metric_of(step, luck))
    history = {"at": _BEGAN, "event": "start", "step": 0, "ranks": ranks, "plan": f"dp={ranks}"}
    (folder / "history.jsonl").write_text(json.dumps(history) + "\n")
    with (folder / "log.jsonl").open("w") as log:
        for at in range(2000):
            said = {
                "at": _BEGAN + at,
                "rank": at % ranks,
                "kind": "output",
                "text": f"epoch {at}: nothing unusual",
            }
            log.write(json.dumps(said) + "\n")
    for rank in range(ranks):
        place = {"kind": "info", "rank": rank, "host": f"host{rank // 8}", "coords": {"pp": 0, "dp": rank}}
        head = json.dumps(place, separators=(",", ":")) + "\n"
        text = head + "".join(line_of(rank, step, late_by(rank, step)) for step in range(1, steps + 1))
        (folder / "events" / f"rank{rank}.jsonl").write_text(text)
    done.write_text(f"{ranks} {steps}")
    return folder


def metric_of(step: int, luck: random.Random) -> str:
    """A line of metrics."""
    loss = 2.0 + 3.0 * 0.999**step + 0.02 * luck.random()
    return (
        json.dumps(
            {
                "step": step,
                "loss": loss,
                "lr": 1e-3,
                "grad_norm": 1.0,
                "tokens": 128000,
                "tokens_per_s": 1.28e6 + 1e4 * luck.random(),
            }
        )
        + "\n"
    )


@contextmanager
def served(folder: Path, port: int, home: Path) -> Iterator[tuple[str, psutil.Process]]:
    """(address, process) of a dash that shows the folder."""
    command = [sys.executable, "-m", "unisono", "dash", str(folder), "--port", str(port)]
    environ = {**os.environ, "XDG_CACHE_HOME": str(home)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ
    ) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1"), f"no address, but {address!r}"
            yield address, psutil.Process(server.pid)
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()


def free_port() -> int:
    """A port that nobody has now; the server is started twice on it."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Writer(threading.Thread):
    """Appends events of all ranks at ten a second each, in turns of half a second as ranks do, until `over` is set."""

    def __init__(self, folder: Path, ranks: int, first: int) -> None:
        super().__init__(daemon=True)
        self.folder, self.ranks, self.step, self.over, self.lines = folder, ranks, first, threading.Event(), 0

    def run(self) -> None:
        luck, begun, first = random.Random(1), time.monotonic(), self.step
        while not self.over.is_set():
            until = first + int((time.monotonic() - begun) / _STEP_S)
            new = range(self.step, until)
            for rank in range(self.ranks):
                text = "".join(line_of(rank, step, late_by(rank, step)) for step in new)
                with (self.folder / "events" / f"rank{rank}.jsonl").open("a") as file:
                    file.write(text)
                self.lines += len(new)
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write("".join(metric_of(step, luck) for step in new))
            self.step = until
            self.over.wait(0.5)


def cpu_share(process: psutil.Process, seconds: float) -> float:
    """Of a core, that a process takes for so long."""
    before = process.cpu_times()
    begun = time.monotonic()
    time.sleep(seconds)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / (time.monotonic() - begun)


def settle(process: psutil.Process, limit: float) -> float:
    """Seconds until a process has read the past: until it takes less than a tenth of a core for two seconds."""
    begun = time.monotonic()
    while time.monotonic() - begun < limit:
        if cpu_share(process, 2.0) < 0.1:
            break
    return time.monotonic() - begun


_FRAMES = """async ([selector, drag]) => {
  const target = document.querySelector(selector), frames = [];
  let on = true;
  const count = now => { frames.push(now); if (on) requestAnimationFrame(count); };
  requestAnimationFrame(count);
  const until = performance.now() + 3000;
  let y = 0;
  while (performance.now() < until) {
    const more = { shiftKey: true, bubbles: true, cancelable: true };
    if (drag) target.dispatchEvent(new WheelEvent("wheel", { deltaY: (y++ % 40) < 20 ? 40 : -40, ...more }));
    else { scrollBy(0, (y++ % 120) < 60 ? 30 : -30); }
    await new Promise(requestAnimationFrame);
  }
  on = false;
  const gaps = frames.slice(1).map((at, i) => at - frames[i]).sort((a, b) => a - b);
  const fps = 1000 * (frames.length - 1) / (frames.at(-1) - frames[0]);
  return { fps, slowest_ms: gaps.at(-1), p99_ms: gaps[Math.floor(gaps.length * .99)] };
}"""


def tab_mib(browser_pid: int) -> float:
    """The memory that the renderers of a browser have for themselves, the largest of them."""
    sizes = []
    for process in psutil.Process(browser_pid).children(recursive=True):
        try:
            if any(word.startswith("--type=renderer") for word in process.cmdline()):
                sizes.append(process.memory_full_info().uss / 2**20)
        except psutil.Error:
            continue
    return max(sizes, default=0.0)


def look(address: str, axe: Path | None, shots: Path | None) -> Generator[dict[str, Any]]:
    """What a browser sees, first; then, when it is asked again, whether the page follows a server that was killed."""
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None
    arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
    with sync_playwright() as play, play.chromium.launch(executable_path=CHROMIUM, args=arguments) as browser:
        context = browser.new_context(viewport={"width": 1600, "height": 1000}, bypass_csp=False)
        page = context.new_page()
        asked: list[str] = []
        wrong: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.goto(address)
        page.wait_for_selector('[data-testid="heat"] canvas')
        page.wait_for_timeout(2500)
        paint = page.evaluate(
            "Object.fromEntries(performance.getEntriesByType('paint').map(e => [e.name, e.startTime]))"
        )
        result: dict[str, Any] = {"first_paint_ms": paint.get("first-contentful-paint")}
        result["scroll"] = page.evaluate(_FRAMES, ["body", False])
        page.evaluate("document.querySelector('[data-testid=heat]').scrollIntoView()")
        result["pan"] = page.evaluate(_FRAMES, ["[data-testid=heat] canvas[role=application]", True])
        result["heat"] = page.evaluate("document.querySelector('[data-testid=heat] .keys').textContent")
        result["tab_mib"] = max(tab_mib(os.getpid()), 0.0)
        if axe is not None:
            result["axe"] = {str(wide): faults(page, axe, wide) for wide in (390, 1600)}
        for wide in (390, 1600) if shots else ():
            page.set_viewport_size({"width": wide, "height": 1000})
            page.wait_for_timeout(600)
            page.screenshot(path=str(shots / f"dash-{wide}.png"), full_page=True)
            over = page.evaluate("document.documentElement.scrollWidth > innerWidth")
            assert not over, f"at {wide} pixels the page is wider than the window"
        host = address.split("?")[0]
        result["requests"] = len(asked)
        result["off_machine"] = sorted({url for url in asked if not url.startswith((host, "data:"))})
        result["errors"] = wrong[:5]
        step = page.inner_text("#marks")
        yield result
        page.wait_for_selector('#state[data-state="away"]', timeout=20_000)
        said = page.inner_text("#state")
        yield {"while_away": said}
        page.wait_for_selector('#state:not([data-state="away"])', timeout=30_000)
        page.wait_for_function(
            "before => document.getElementById('marks').innerText !== before", arg=step, timeout=60_000
        )
        yield {
            "back": page.inner_text("#state"),
            "requests_off_machine": [u for u in asked if not u.startswith((host, "data:"))],
        }


def faults(page: Any, axe: Path, wide: int) -> list[str]:
    """Serious faults that axe-core names."""
    page.set_viewport_size({"width": wide, "height": 1000})
    page.wait_for_timeout(400)
    page.evaluate(axe.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run().then(result => result.violations)")
    return [
        f"{one['impact']}: {one['id']}: {one['nodes'][0]['html'][:120]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "unisono-dash-run"))
    parser.add_argument("--axe", type=Path, help="axe.min.js of the npm package axe-core")
    parser.add_argument("--shots", type=Path, help="where pictures of the page go")
    parser.add_argument("--seconds", type=float, default=20.0, help="that the server is watched for")
    args = parser.parse_args()
    result = measured(args.folder, args.ranks, args.steps, args.axe, args.shots, args.seconds)
    print(json.dumps(result, indent=1))


def measured(
    folder: Path, ranks: int, steps: int, axe: Path | None, shots: Path | None, seconds: float
) -> dict[str, Any]:
    """All figures of one run."""
    begun = time.monotonic()
    write_run(folder, ranks, steps)
    result: dict[str, Any] = {"ranks": ranks, "steps": steps, "written_s": round(time.monotonic() - begun, 1)}
    port = free_port()
    (folder / "written").unlink()  # it grows from now on
    with tempfile.TemporaryDirectory() as home, ExitStack() as looking:
        with served(folder, port, Path(home)) as (address, process):
            result["past_read_s"] = round(settle(process, 400), 1)
            result["server_mib"] = round(process.memory_info().rss / 2**20)
            writer = Writer(folder, ranks, steps + 1)
            writer.start()
            time.sleep(8.0)
            lines, began = writer.lines, time.monotonic()
            result["server_share"] = round(cpu_share(process, seconds), 4)
            result["events_per_s"] = round((writer.lines - lines) / (time.monotonic() - began))
            eyes = looking.enter_context(closing(look(address, axe, shots)))
            result |= next(eyes)
            result["server_share_watched"] = round(cpu_share(process, seconds), 4)
        result |= next(eyes)
        with served(folder, port, Path(home)):
            result |= next(eyes)
        writer.over.set()
        writer.join(10)
    return result


if __name__ == "__main__":
    main()
