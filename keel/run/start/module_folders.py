"""Make modules importable that settings name as `module:attribute`.

A module may be next to the recipe, in the current folder, or anywhere on Python's path. A run and a sweep record the
folder of their recipe, so they can be resumed and evaluated from any folder. Rows and reward functions that
`keel.train` received are in the folder of the run itself. Processes started with multiprocessing inherit the path;
those of `keel launch` run this code again with `--resume`.
"""

import sys
from pathlib import Path

from keel.common.safe_read import read_json

RECIPE_FOLDER = "recipe_folder"
"""The key in `run.json` and `trials.json`."""
INPUTS_FOLDER = "inputs"
"""Folder in that of a run with the rows and functions that it received from Python."""


def add_module_folders(*sources: str | Path | None) -> None:
    """Make modules importable from the folder of each source, then from the current folder.

    A source is a recipe, which stands for the folder it is in, or the folder of a run or of trials, which stands for
    the folder of the recipe it was started with and for its own inputs. None and anything else are skipped: they name
    no module.
    """
    folders = [folder for source in sources if source is not None and (folder := _folder_of(Path(source)))]
    known = {Path(entry).resolve() for entry in sys.path}
    for folder in reversed([*folders, Path.cwd()]):
        if folder.resolve() not in known:
            sys.path.insert(0, str(folder.resolve()))
            known.add(folder.resolve())
    for run in (Path(source) for source in sources if source is not None):
        inputs = (run / INPUTS_FOLDER).resolve()
        if (run / "run.json").is_file() and inputs.is_dir() and inputs not in known:
            sys.path.append(str(inputs))  # last, so that a file in it cannot replace a module
            known.add(inputs)


def _folder_of(source: Path) -> Path | None:
    if source.is_file():
        return source.parent
    for name in ("run.json", "trials.json"):
        try:
            recorded = read_json(source / name)
        except (OSError, ValueError):
            continue  # not a run, or damaged: the code that opens it reports that
        folder = recorded.get(RECIPE_FOLDER) if isinstance(recorded, dict) else None
        if isinstance(folder, str) and Path(folder).is_dir():
            return Path(folder)
    return None
