"""Makes objective.svg, the README's picture of `keel objectives dppo_kl`, from what the command prints.

The picture ends before the parameters that every objective shares, and refers to no font or address outside itself.
"""

import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

from keel.cli.inspect.objectives import print_preset
from keel.objectives import PRESETS

WIDTH = 90
NAME = "dppo_kl"


def main() -> None:
    out = io.StringIO()
    terminal = Console(
        file=out, width=WIDTH, force_terminal=True, color_system="truecolor", markup=False, highlight=False
    )
    print_preset(terminal, PRESETS[NAME], {})
    shown = re.split(r"\n[^\n]*parameters of every objective", out.getvalue())[0].rstrip()
    picture = Console(file=io.StringIO(), width=WIDTH, record=True, highlight=False)
    picture.print(Text.from_ansi(shown))
    svg = picture.export_svg(title=f"keel objectives {NAME}", unique_id="keel")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    Path(__file__).with_suffix(".svg").write_text(re.sub(r"<text[^>]*>(?:&#160;)+[^<]*</text>", _without_indent, svg))


def _without_indent(match: re.Match[str]) -> str:
    """Indentation as a position: not every viewer keeps leading spaces."""
    text = match.group(0)
    spaces = len(re.findall(r"^<text[^>]*>((?:&#160;)*)", text)[0]) // len("&#160;")
    start, length = (float(re.findall(rf'{name}="([\d.]+)"', text)[0]) for name in ("x", "textLength"))
    width = length / (len(re.sub(r"&#?\w+;", "_", re.findall(r">([^<]*)<", text)[0])) or 1)
    text = re.sub(r'x="[\d.]+"', f'x="{start + spaces * width:.1f}"', text, count=1)
    text = re.sub(r'textLength="[\d.]+"', f'textLength="{length - spaces * width:.1f}"', text)
    return text.replace("&#160;" * spaces, "", 1)


if __name__ == "__main__":
    main()
