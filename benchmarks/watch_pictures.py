"""Draw the pictures of docs/how-to/watch.md: every tab of the page, light and dark, and the terminal view.

    python benchmarks/watch_pictures.py                # of benchmarks/slow_loader.py: two minutes; needs root
    python benchmarks/watch_pictures.py --run FOLDER   # of another run

The tabs are drawn while slow_loader.py goes on and its straggler is known, the log and the terminal at its end. The
pictures go to docs/watch. Needs chromium and the package playwright.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from PIL import Image
from rich.console import Console

from gossamer.observe.watch.runs import find_runs
from gossamer.observe.watch.server import PageServer
from gossamer.observe.watch.terminal_view import watch_in_terminal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.watching import browser  # found only after the line above

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "how-to" / "watch"
TABS = ("overview", "workers", "network", "compression", "log")
SIZES = {"": (1280, 860), "-phone": (375, 740)}
DRAWN_MS = 600  # until a tab's answers are drawn
COLORS = 256  # of the palette, which keeps a picture below 150 kB

RUN = ["--workers", "4", "--network", "100mbit,20ms", "--recipe", "PowerSGD(rank=4)"]
FOLDER = Path(tempfile.gettempdir()) / "gossamer-pictures"
DRAWN_AT_STEP = 160  # of 240: the loader is slow since 80
MOST_SECONDS = 400.0  # until then


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="the folder of the run to draw")
    parser.add_argument("--to", type=Path, default=PICTURES)
    parser.add_argument("--phone", action="store_true", help="as on a phone, too")
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    if given.run is not None:
        draw_tabs(given.run, given.to, TABS, given.phone)
        draw_terminal(given.run, given.to)
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    shutil.copy(ROOT / "benchmarks" / "slow_loader.py", FOLDER / "train.py")
    shutil.copytree(ROOT / "examples", FOLDER / "examples")
    logs = FOLDER / "slow-loader"
    command = [sys.executable, "-m", "gossamer", "run", *RUN, "--logs", str(logs), "train.py"]
    with subprocess.Popen(command, cwd=FOLDER) as run:
        wait_for(logs)
        draw_tabs(logs, given.to, TABS[:-1], given.phone)
        run.wait()
    draw_tabs(logs, given.to, TABS[-1:], given.phone)
    draw_terminal(logs, given.to)


def wait_for(logs: Path) -> None:
    """Until the store knows of the step. Raises SystemExit where it does not in time."""
    end = time.monotonic() + MOST_SECONDS
    while time.monotonic() < end:
        with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{logs}/run.sqlite?mode=ro", uri=True)) as db:
            if (db.execute("SELECT max(step) FROM step").fetchone()[0] or 0) >= DRAWN_AT_STEP:
                return
        time.sleep(1.0)
    raise SystemExit(f"the run in {logs} came to no step {DRAWN_AT_STEP} in {MOST_SECONDS:.0f} seconds")


def draw_tabs(run: Path, to: Path, tabs: Sequence[str], phone: bool) -> None:
    with browser() as chromium, PageServer(find_runs([run])).in_thread() as link:
        for suffix, (width, height) in SIZES.items():
            if suffix and not phone:
                continue
            for scheme in ("light", "dark"):
                page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.goto(link)
                for tab in tabs:
                    page.keyboard.press(str(TABS.index(tab) + 1))
                    page.wait_for_selector(f"#content[data-shown={tab}]")
                    page.wait_for_timeout(DRAWN_MS)
                    dark = "-dark" if scheme == "dark" else ""
                    whole = tab not in ("log", "compression")  # those are as long as there are lines and tensors
                    keep(page.screenshot(full_page=whole), to / f"{tab}{dark}{suffix}.png")
                page.close()


def draw_terminal(run: Path, to: Path) -> None:
    said = Console(record=True, width=110, file=io.StringIO(), force_terminal=False)
    watch_in_terminal(find_runs([run]), said)
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": 1180, "height": 400})
        page.set_content(f"<body style='margin:0'>{said.export_svg(title='gossamer watch --terminal')}</body>")
        keep(page.locator("svg").first.screenshot(), to / "terminal.png")


def keep(picture: bytes, path: Path) -> None:
    with Image.open(io.BytesIO(picture)) as whole:
        whole.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE, kmeans=2).save(path, optimize=True)
    print(f"{path} {path.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
