"""How fast the page of `gossamer watch` is with a large run: 256 ranks, 100,000 steps.

    python benchmarks/watching.py            # its store is made once, in the temporary folder (a minute or two)

Prints the store's size, the milliseconds from the start of navigation until the Overview and the Workers heat map are
drawn, those from a key pressed in the log's filter until its lines are there, and the server's memory. Every number is
the median of some pages, each in a browser context of its own; the first page also reads what the server then keeps.
Needs chromium, and the packages playwright, starlette and uvicorn.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gossamer.observe.telemetry import insert, open_store

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import collecting  # found only after the line above

STORE = Path(tempfile.gettempdir()) / "gossamer-watching" / "run.sqlite"
LOG_LINES = 100_000  # the most that a store keeps
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
DRAWN = {
    "overview": "document.querySelectorAll('#content[data-shown=overview] .uplot canvas').length >= 4",
    "workers": "document.querySelector('#content[data-shown=workers] .heat canvas').height === 256",
}
NOW = "new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"
FILTERED = """(text) => new Promise((done) => {
    const [input, lines] = [document.querySelector("#content input[type=search]"), document.querySelector(".log")];
    const began = performance.now();
    new MutationObserver(() => {
        if (lines.dataset.asked !== text) return;
        requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)));
    }).observe(lines, { attributes: true });
    input.value = text;
    input.dispatchEvent(new Event("input"));
})"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=5, help="how many are opened, each anew")
    pages = parser.parse_args().pages
    store = made()
    print(f"{collecting.RANKS} ranks x {collecting.STEPS} steps: database {store.stat().st_size / 1e6:.0f} MB")
    with served(store.parent) as (process, link), browser() as chromium:
        for tab in DRAWN:
            told(f"first paint of {tab}", [first_paint(chromium, link, tab) for _ in range(pages)])
        told("filter of the log, found", [filtered(chromium, link, "loss 0.7") for _ in range(pages)])
        told("filter of the log, not found", [filtered(chromium, link, "no such line") for _ in range(pages)])
        print(f"memory of the server at its peak: {peak(process.pid) / 1e6:.0f} MB")


def made() -> Path:
    if not STORE.exists():
        STORE.parent.mkdir(parents=True, exist_ok=True)
        growing = STORE.with_suffix(".growing")
        growing.unlink(missing_ok=True)
        db = open_store(growing)
        collecting.fill(db)
        with db:
            insert(db, "log", _lines())
            insert(db, "rank", _ranks())
            insert(db, "run", [{"key": "recipe", "value": '"EveryStep() + TopK(density=0.01)"'}])
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.close()
        growing.rename(STORE)
    return STORE


def _lines() -> Iterator[dict[str, object]]:
    for number in range(LOG_LINES):
        text = f"step {number}: loss {1 / (1 + number % 97):.4f}, a line as long as those that training loops print"
        told = {"at": 1.8e9 + number / 100, "rank": number % collecting.RANKS, "attempt": 0}
        yield {**told, "stream": "stdout", "level": "info", "text": text}


def _ranks() -> Iterator[dict[str, object]]:
    for rank in range(collecting.RANKS):
        told = {"rank": rank, "attempt": 0, "machine": f"machine-{rank // 8}", "pid": 4000 + rank, "began": 1.8e9}
        yield {**told, "state": "training"}


@contextmanager
def served(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The server as a process of its own, and its link."""
    program = [sys.executable, "-c", SERVER, str(folder)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.terminate()


SERVER = """
import sys
from pathlib import Path
from gossamer.observe.watch.runs import find_runs
from gossamer.observe.watch.server import PageServer
server = PageServer(find_runs([Path(sys.argv[1])]))
print(server.link, flush=True)
server.serve()
"""


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        raise SystemExit("chromium is not installed. On Debian, write: apt-get install chromium")
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=found, args=list(FLAGS))
        yield opened
        opened.close()


def first_paint(chromium: Any, link: str, tab: str) -> float:
    page = chromium.new_page(viewport={"width": 1280, "height": 800})
    page.goto(f"{link}#{tab}", wait_until="commit")
    page.wait_for_selector(f"#content[data-shown={tab}]")
    assert page.evaluate(DRAWN[tab]), f"{tab} is said to be shown, but is not drawn"
    passed: float = page.evaluate(NOW)
    page.close()
    return passed


def filtered(chromium: Any, link: str, text: str) -> float:
    page = chromium.new_page(viewport={"width": 1280, "height": 800})
    page.goto(f"{link}#log")
    page.wait_for_selector("#content[data-shown=log]")
    passed: float = page.evaluate(FILTERED, text)
    page.close()
    return passed


def told(what: str, each: list[float]) -> None:
    print(f"{what:<30} {statistics.median(each):6.0f} ms (first {each[0]:.0f}, longest {max(each):.0f})", flush=True)


def peak(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024.0 * float(status.split("VmHWM:")[1].split()[0])


if __name__ == "__main__":
    main()
