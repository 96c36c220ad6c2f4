"""Variants from the words of the command line: a list of objectives, or values of settings and their product."""

import itertools
from collections.abc import Sequence

from keel.config.toml_writer import to_toml
from keel.errors import ConfigError
from keel.tools.compare.candidates import parse_candidates, split_list
from keel.tools.sweep.plan import Variant

MAX_VARIANTS = 1000
"""Variants of one sweep. A product grows faster than one thinks."""


def variants_from_objectives(text: str) -> list[Variant]:
    """`icepop,ipo_kl(kl_tau=0.01),mine.toml`: each takes the place of the recipe's whole [objective]."""
    return [Variant(one.name, (f"--objective={to_toml(one.table)}",)) for one in parse_candidates(text)]


def variants_from_settings(texts: Sequence[str]) -> list[Variant]:
    """`["a.b=1,2", "c=x,y"]`: every value of one with every value of the others, the last one changing fastest."""
    axes = [_parse_axis(text) for text in texts]
    names = [name for name, _ in axes]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--set {name} is given twice; write all its values with commas between them")
    ends = [name.rpartition(".")[2] for name in names]
    # the last part of a name says enough, unless two of them end alike
    shown = [end if ends.count(end) == 1 else name for name, end in zip(names, ends, strict=True)]
    size = 1
    for _, values in axes:
        size *= len(values)
    if size > MAX_VARIANTS:
        raise ConfigError(
            f"--set gives {size:,} variants, and a sweep has at most {MAX_VARIANTS:,}; leave some values out"
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
        raise ConfigError(f"--set {text}: write name.of.setting=value,value; a value is as in TOML")
    if name == "seed":
        raise ConfigError(f"--set {text}: seeds are not compared but averaged over; use --seeds {len(values)}")
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(f"--set {name} has {value} twice")
    return name, values
