"""Draw the pictures of docs/watch.md: every tab of the page, light and dark, and the terminal view.

    python benchmarks/watch_pictures.py                # of a run that it makes: two minutes; needs root for its network
    python benchmarks/watch_pictures.py --run FOLDER   # of another

The run that it makes has four workers on an emulated network. After a third of its steps rank 2's loader is slow; at
the end rank 1 raises an error. The pictures go to docs/watch. Needs chromium and the package playwright.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from rich.console import Console

from gossamer.watch.runs import find_runs
from gossamer.watch.server import PageServer
from gossamer.watch.terminal_view import watch_in_terminal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.watching import browser  # found only after the line above

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "watch"
TABS = ("overview", "workers", "network", "compression", "log")
SIZES = {"": (1280, 860), "-phone": (375, 740)}
DRAWN_MS = 400  # until a tab's answers are drawn
COLORS = 128  # of the palette, which keeps a picture below 150 kB

RUN = "--workers 4 --network 100mbit,20ms --recipe PowerSGD(rank=4)".split()
STEPS, SLOW_RANK, FAILING_RANK = 240, 2, 1
DEVICE_SECONDS, SLOW_SECONDS = 0.05, 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="the folder of the run to draw")
    parser.add_argument("--to", type=Path, default=PICTURES)
    parser.add_argument("--phone", action="store_true", help="as on a phone, too")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return work()
    given.to.mkdir(parents=True, exist_ok=True)
    if given.run is not None:
        return draw(given.run, given.to, given.phone)
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder) / "slow-loader"
        command = [sys.executable, "-m", "gossamer", "run", *RUN, "--logs", str(logs), __file__, "--worker"]
        subprocess.run(command, cwd=ROOT, check=False)  # it ends with rank 1's error
        draw(logs, given.to, given.phone)


def work() -> None:
    import torch

    import gossamer
    from examples.bytelm import ByteLM, data_of

    torch.set_num_threads(1)
    torch.manual_seed(0)
    world = gossamer.init()
    texts, _ = data_of(world, 8, 0)
    model = ByteLM(64, 4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with gossamer.attach(model, optimizer) as session:
        for step in range(STEPS):
            if world.rank == SLOW_RANK and step > STEPS // 3:
                time.sleep(SLOW_SECONDS)
            loss = model(next(texts))
            time.sleep(DEVICE_SECONDS)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=loss.item(), perplexity=loss.exp().item())
            if step % 20 == 0:
                print(f"step {step}, loss {loss.item():.3f}", flush=True)
        if world.rank == FAILING_RANK:
            raise ValueError("a batch of no rows: shard-17 is empty")


def draw(run: Path, to: Path, phone: bool) -> None:
    runs = find_runs([run])
    with browser() as chromium, PageServer(runs).in_thread() as link:
        for suffix, (width, height) in SIZES.items():
            if suffix and not phone:
                continue
            for scheme in ("light", "dark"):
                page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.goto(link)
                for number, tab in enumerate(TABS, start=1):
                    page.keyboard.press(str(number))
                    page.wait_for_selector(f"#content[data-shown={tab}]")
                    page.wait_for_timeout(DRAWN_MS)
                    dark = "-dark" if scheme == "dark" else ""
                    whole = tab not in ("log", "compression")  # those are as long as there are lines and tensors
                    keep(page.screenshot(full_page=whole), to / f"{tab}{dark}{suffix}.png")
                page.close()
        said = Console(record=True, width=110, file=io.StringIO(), force_terminal=False)
        watch_in_terminal(runs, said)
        page = chromium.new_page(viewport={"width": 1180, "height": 400})
        page.set_content(f"<body style='margin:0'>{said.export_svg(title='gossamer watch --terminal')}</body>")
        keep(page.locator("svg").first.screenshot(), to / "terminal.png")


def keep(picture: bytes, path: Path) -> None:
    with Image.open(io.BytesIO(picture)) as whole:
        whole.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path} {path.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
