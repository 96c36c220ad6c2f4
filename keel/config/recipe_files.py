"""Recipes that come with the package, found by name: `larger_number` is `keel/larger_number`."""

from pathlib import Path

from keel.common.settings import suggest_name
from keel.errors import ConfigError

RECIPES_FOLDER = Path(__file__).parent.parent / "recipes"
EVALUATIONS_FOLDER = RECIPES_FOLDER / "evaluations"
"""Recipes of `keel eval NAME --model MODEL`: environments and sampling of a benchmark, nothing to train."""


def recipe_names() -> list[str]:
    """Return the names of the recipes in the package."""
    return sorted(path.stem for path in RECIPES_FOLDER.glob("*.toml"))


def evaluation_names() -> list[str]:
    """Return the names of the evaluations in the package."""
    return sorted(path.stem for path in EVALUATIONS_FOLDER.glob("*.toml"))


def find_recipe(recipe: str | Path) -> Path:
    """Return the file of a recipe: an existing path, else the recipe of that name in the package."""
    path = Path(recipe)
    if path.is_file() or path.suffix or len(path.parts) > 1:
        return path
    packaged = RECIPES_FOLDER / f"{path.name}.toml"
    if not packaged.is_file():
        raise ConfigError(
            f'recipe "{recipe}" is neither a file nor a recipe of the package;'
            f" {suggest_name(path.name, recipe_names())}"
        )
    return packaged
