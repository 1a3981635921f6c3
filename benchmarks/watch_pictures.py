"""Draw the pictures of docs/watch.md: every tab of the page, light and dark, and the terminal view.

    python benchmarks/watch_pictures.py RUN            # a run's folder; needs chromium and the package playwright

The pictures go to docs/watch. `gossamer run --workers 4 examples/bytelm.py` makes one.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from PIL import Image
from rich.console import Console

from gossamer.watch.runs import find_runs
from gossamer.watch.server import PageServer
from gossamer.watch.terminal_view import watch_in_terminal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.watching import browser  # found only after the line above

PICTURES = Path(__file__).parents[1] / "docs" / "watch"
TABS = ("overview", "workers", "network", "compression", "log")
SIZES = {"": (1280, 860), "-phone": (375, 740)}
COLORS = 192  # of the palette, which keeps a picture below 150 kB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of the run to draw")
    parser.add_argument("--to", type=Path, default=PICTURES)
    parser.add_argument("--phone", action="store_true", help="as on a phone, too")
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    runs = find_runs([given.run])
    with browser() as chromium, PageServer(runs).in_thread() as link:
        for suffix, (width, height) in SIZES.items():
            if suffix and not given.phone:
                continue
            for scheme in ("light", "dark"):
                page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.goto(link)
                for number, tab in enumerate(TABS, start=1):
                    page.keyboard.press(str(number))
                    page.wait_for_selector(f"#content[data-shown={tab}]")
                    dark = "-dark" if scheme == "dark" else ""
                    keep(page.screenshot(full_page=tab != "log"), given.to / f"{tab}{dark}{suffix}.png")
                page.close()
        said = Console(record=True, width=110, file=io.StringIO(), force_terminal=False)
        watch_in_terminal(runs, said)
        page = chromium.new_page(viewport={"width": 1180, "height": 400})
        page.set_content(f"<body style='margin:0'>{said.export_svg(title='gossamer watch --terminal')}</body>")
        keep(page.locator("svg").first.screenshot(), given.to / "terminal.png")


def keep(picture: bytes, path: Path) -> None:
    with Image.open(io.BytesIO(picture)) as whole:
        whole.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path} {path.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
