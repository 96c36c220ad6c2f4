"""Take the screenshots of the lens (lens-*.png) of run folders with headless Chromium.

    python docs/images/lens.py [RUN_OR_FOLDER [RUN]]    # default: synthetic runs

RUN is the run whose details are shown; default: the most recently started one.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tests.support.lens_browser import Browser, browser
from tests.support.lens_runs import make_run

HERE = Path(__file__).parent
SCREENSHOTS = {
    "overview": ("light", "view=overview"),
    "region": ("light", "view=region"),
    "tokens": ("light", "view=tokens&colour=ratio&scope=run&outcome=dropped&advantage=positive"),
    "tokens-dark": ("dark", "view=tokens&colour=reason&scope=run&outcome=dropped&advantage=positive"),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else make_runs(Path(temporary) / "runs")
        run = sys.argv[2] if len(sys.argv) > 2 else ""
        command = [sys.executable, "-m", "keel.cli", "lens", str(folder), "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parent.parent)
        assert server.stdout is not None
        try:
            address = server.stdout.readline().split()[-1]
            with browser(1440, 860) as window:
                for name, (scheme, params) in SCREENSHOTS.items():
                    window.scheme(scheme)
                    window.open("about:blank")
                    window.open(f"{address}/#{params}{f'&run={run}' if run else ''}")
                    wait_until_drawn(window, params)
                    window.picture(HERE / f"lens-{name}.png")
        finally:
            server.terminate()
            server.wait(20)


def wait_until_drawn(window: Browser, params: str) -> None:
    """Wait until the view is drawn; in the tokens view, select the first match."""
    window.wait("return document.body.dataset.ready", seconds=60)
    if "view=overview" in params:
        window.wait("return document.querySelectorAll('.outcomes tr').length > 0", seconds=60)
    if "view=tokens" in params:
        window.wait("return document.querySelectorAll('.hits .hit').length > 0", seconds=60)
        window.run("document.querySelectorAll('.hits .hit')[0].click()")
        window.wait("return document.querySelector('.t.at') !== null")
    window.wait("return new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(true), 300)))")


def make_runs(root: Path) -> Path:
    """Write three synthetic runs."""
    sizes = {"groups": 8, "members": 8, "noise": 0.2}
    make_run(root / "opsm", seed=5, steps=48, objective="opsm", paragraphs=2, **sizes)
    make_run(root / "dppo_tv", seed=3, steps=52, objective="dppo_tv", paragraphs=2, **sizes)
    make_run(root / "icepop", steps=60, paragraphs=5, **sizes)
    return root


if __name__ == "__main__":
    main()
