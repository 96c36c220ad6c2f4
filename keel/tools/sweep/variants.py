"""Build variants from command-line arguments: a list of objectives, or all combinations of values of settings."""

import itertools
from collections.abc import Sequence

from keel.config.toml_writer import to_toml
from keel.errors import ConfigError
from keel.tools.compare.candidates import parse_candidates, split_list
from keel.tools.sweep.plan import Variant

MAX_VARIANTS = 1000
"""Maximum number of variants of a sweep, to catch large products by mistake."""


def variants_from_objectives(text: str) -> list[Variant]:
    """Return a variant for each objective of a list such as `icepop,ipo_kl(kl_tau=0.01),mine.toml`.

    Each replaces the complete [objective] of the recipe.
    """
    return [
        Variant(candidate.name, (f"--objective={to_toml(candidate.table)}",)) for candidate in parse_candidates(text)
    ]


def variants_from_settings(texts: Sequence[str]) -> list[Variant]:
    """Return all combinations of values such as `["a.b=1,2", "c=x,y"]`, the last setting changing fastest."""
    axes = [_parse_axis(text) for text in texts]
    names = [name for name, _ in axes]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--set {name} is given twice; give all its values separated by commas")
    ends = [name.rpartition(".")[2] for name in names]
    # the last part of a name is enough, unless two names have the same one
    shown = [end if ends.count(end) == 1 else name for name, end in zip(names, ends, strict=True)]
    size = 1
    for _, values in axes:
        size *= len(values)
    if size > MAX_VARIANTS:
        raise ConfigError(
            f"--set gives {size:,} variants, but a sweep can have at most {MAX_VARIANTS:,}; remove some values"
        )
    variants = []
    for chosen in itertools.product(*(values for _, values in axes)):
        name = ", ".join(f"{short}={value}" for short, value in zip(shown, chosen, strict=True))
        variants.append(Variant(name, tuple(f"--{full}={v}" for full, v in zip(names, chosen, strict=True))))
    return variants


def _parse_axis(text: str) -> tuple[str, list[str]]:
    name, equals, rest = text.partition("=")
    name = name.strip().removeprefix("--")
    values = split_list(rest, f"--set {name}")
    if not (name and equals) or not all(values):
        raise ConfigError(f"--set {text}: write name.of.setting=value,value with TOML values")
    if name == "seed":
        raise ConfigError(f"--set {text}: results are averaged over seeds; use --seeds {len(values)} instead")
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(f"--set {name} lists {value} twice; remove one of them")
    return name, values
