"""Prompts that cover the shapes of the prefix cache: long and short common prefixes, and prompts without any."""

LONG_STEM = [*range(40, 80)]
BRANCHING_PROMPTS = [
    [*LONG_STEM, 1, 2, 3],  # short branches of a long prefix, which is not stored again for them
    [*LONG_STEM, 4, 5],
    [*range(20), *range(100, 140)],  # long branches of a short prefix, which is stored with each
    [*range(20), *range(90, 120)],
    [7] * 30,
    [9],
]
