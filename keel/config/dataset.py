"""Settings of a data set and of the reward functions that score its completions."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from keel.common.settings import Settings, setting_error

Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0)]


class DatasetSettings(Settings):
    """A data set of prompts. `dataset = "train.jsonl"` is short for `dataset = {path = "train.jsonl"}`."""

    path: Annotated[str, Field(min_length=1)]
    """A .jsonl, .json, .csv or .parquet file, or a folder saved by Hugging Face `datasets`, in the current folder or
    next to the recipe; or the name of a data set of the Hugging Face hub, such as "openai/gsm8k"."""
    split: str = "train"
    """Split of a data set of the hub."""
    config_name: str | None = None
    """Configuration of a data set of the hub, such as "main" of openai/gsm8k."""
    eval_path: str | None = None
    """A data set for evaluation. Training rows with one of its prompts are left out. By default a part of `path` is
    held out."""
    eval_split: str = "test"
    """Split of an `eval_path` that is a data set of the hub."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Fraction of the prompts of `path` held out for evaluation when there is no eval_path. It is chosen by a hash of
    the prompt, so equal prompts are never in both parts."""
    prompt: str = "prompt"
    """Column of the prompt: text, or a list of messages."""
    answer: str | None = None
    """Column that rewards receive as `answer`. Defaults to the column "answer" if there is one."""
    id: str | None = None
    """Column of the task id. Defaults to the number of the row."""
    system: str | None = None
    """System message before every prompt."""
    template: str | None = None
    """Jinja template of the user message, with the columns of the row as variables, instead of the column `prompt`."""
    few_shot: Annotated[int, Field(ge=0)] = 0
    """Number of rows, the first usable ones, shown before every prompt with their answers. They are not tasks."""
    shuffle: bool = True
    """Shuffle the training rows by `seed`."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the shuffling."""
    max_invalid_fraction: Fraction = 0.0
    """Highest fraction of unusable rows (missing column, empty prompt, repeated id) with which a run starts."""


class RewardSettings(Settings):
    """One reward function. `"exact"` is short for `{name = "exact"}`."""

    name: Annotated[str, Field(min_length=1)]
    """A built-in reward, or `module:function`."""
    weight: float = 1.0
    """Factor of this reward in the total."""
    options: dict[str, Any] = {}
    """Keyword arguments of a built-in reward, such as `{pattern = "..."}` of "regex"."""
    timeout: Seconds | None = None
    """Seconds that one call may take. A call that takes longer is killed and its rollout fails. Defaults to 10; for
    `code`, which ends slow programs itself, to 10 more than its `total_timeout`, and it must be above that."""
    normalize: tuple[float, float] | None = None
    """Values of this reward that become 0 and 1, such as [0, 10] for marks out of ten; the others are mapped linearly.
    The first may be the higher one. The mapped value is recorded, clipped and weighted."""
    clip: tuple[float, float] | None = None
    """Lowest and highest value of this reward, after `normalize` and before it is weighted."""

    @model_validator(mode="after")
    def _check_clip(self) -> Self:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise setting_error("{clip} must be a lower and a higher number", clip=list(self.clip))
        if self.normalize is not None and self.normalize[0] == self.normalize[1]:
            raise setting_error("{normalize} must be two different numbers", normalize=list(self.normalize))
        return self

    def apply(self, value: float) -> float:
        """Return a value of the function normalised and clipped."""
        if self.normalize is not None:
            zero, one = self.normalize
            value = (value - zero) / (one - zero)
        return value if self.clip is None else min(max(value, self.clip[0]), self.clip[1])


RewardTotal = Literal["sum", "mean"]
