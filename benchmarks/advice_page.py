"""Draw the pictures of docs/how-to/advise.md: the page of an advice, light, dark and as on a phone.

    python benchmarks/advice_page.py                    # bytelm base at 100mbit,20ms: half an hour
    python benchmarks/advice_page.py --advice FILE      # of an advice that is there

The pictures go to docs/advise, beside what the command printed. Needs chromium and the package playwright.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.watch_pictures import keep  # found only after the line above
from benchmarks.watching import browser

from gossamer.plan.advise.advice_file import read_advice
from gossamer.plan.advise.page import write_advice_page

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "how-to" / "advise"
SIZES = {"": 1280, "-phone": 400}
SCRIPT = ["examples/bytelm.py", "--size", "base", "--steps", "100000", "--evaluate-every", "100000"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--advice", type=Path, metavar="FILE", help="the advice to draw")
    parser.add_argument("--network", default="100mbit,20ms")
    parser.add_argument("--workers", default="4")
    parser.add_argument("--minutes", default="30")
    parser.add_argument("--to", type=Path, default=PICTURES)
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    draw(given.advice or advised(given.to, given.workers, given.network, given.minutes), given.to)


def advised(to: Path, workers: str, network: str, minutes: str) -> Path:
    """Have the advice made; what is printed is kept beside the pictures."""
    file = to / "advice.json"
    command = ["gossamer", "advise", "--own-machines", "--workers", workers, "--network", network]
    command += ["--minutes", minutes, "--json", str(file), *SCRIPT]
    made = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    (to / "said.txt").write_text(made.stdout, encoding="utf-8")
    return file


def draw(advice: Path, to: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        file = Path(folder, "advice.html")
        write_advice_page(file, read_advice(advice))
        for suffix, width in SIZES.items():
            for scheme in ("light", "dark"):
                page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
                page.goto(file.as_uri())
                keep(page.screenshot(full_page=True), to / f"page{'-dark' * (scheme == 'dark')}{suffix}.png")
                page.close()


if __name__ == "__main__":
    main()
