"""Settings of a data set and of the reward functions that score its completions."""

import tomllib
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from keel.common.settings import Settings, setting_error
from keel.config.secrets import secret_in_url, secret_names
from keel.errors import ConfigError

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
    eval_fraction: Fraction = 0.05
    """Fraction of the prompts of `path` held out for evaluation when there is no eval_path. It is chosen by a hash of
    the prompt, so equal prompts are never in both parts, and contains at least one of several prompts. With 1 the data
    set is for evaluation only."""
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
    max_invalid_fraction: Fraction = 0.0
    """Highest fraction of unusable rows (missing column, empty prompt, repeated id) with which a run starts."""


RewardScope = Literal["completion", "group"]


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
    `code`, which ends slow programs itself, to 10 more than its `total_timeout`, and it must be above that; to 60 for
    each request of `judge`, and to 300 for `reward_model`, which includes loading the model."""
    scope: RewardScope | None = None
    """"completion" calls the function for each completion as it finishes, "group" once for all completions of a task
    that did not fail. Defaults to "group" for a function of lists, with a parameter `completions`."""
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

    @model_validator(mode="after")
    def _check_no_secrets(self) -> Self:
        for name in secret_names(self.options):
            raise setting_error(
                f"option {name.replace('{', '(').replace('}', ')')} of a reward looks like a secret, and settings are"
                " written into the run's folder; name an environment variable with api_key_env"
            )
        return self

    def apply(self, value: float) -> float:
        """Return a value of the function normalised and clipped."""
        if self.normalize is not None:
            zero, one = self.normalize
            value = (value - zero) / (one - zero)
        return value if self.clip is None else min(max(value, self.clip[0]), self.clip[1])


RewardTotal = Literal["sum", "mean"]


def expand_reward(text: str) -> dict[str, Any]:
    """Return the table of a reward from its name, or from an inline TOML table such as `{name = "exact"}`."""
    if not text.startswith("{"):
        return {"name": text}
    try:
        table: dict[str, Any] = tomllib.loads(f"reward = {text}")["reward"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"rewards: {text[:200]} is not an inline TOML table: {error}") from error
    return table


DEFAULT_RUBRIC = (
    "Judge how well the completion does what the task asks: it is correct, complete and follows the instructions."
)


class JudgeSettings(Settings):
    """Options of the reward "judge": a model behind an OpenAI-compatible endpoint that scores completions."""

    url: Annotated[str, Field(pattern=r"^https?://")]
    """Base URL of the endpoint, such as `http://127.0.0.1:8000/v1`."""
    model: Annotated[str, Field(min_length=1)]
    """Name of the model at the endpoint."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key. The key itself is never a setting."""
    mode: Literal["absolute", "relative", "rank"] = "absolute"
    """"absolute" scores each completion on its own; "relative" scores all completions of a group against each other in
    one request; "rank" orders them, and the rank from worst to best is mapped to 0 to 1. Ties are allowed."""
    rubric: Annotated[str, Field(min_length=1)] = DEFAULT_RUBRIC
    """What makes a completion good."""
    rubric_file: str | None = None
    """A text file with the rubric, instead of `rubric`."""
    columns: list[str] = []
    """Columns of the row that the judge sees, such as "answer" for a reference answer."""
    min_score: float = 0.0
    """Lowest score that the judge may give."""
    max_score: float = 10.0
    """Highest score that the judge may give."""
    raw: bool = False
    """Return scores as the judge gives them, instead of mapping min_score to 0 and max_score to 1."""
    votes: Annotated[int, Field(ge=1)] = 1
    """Requests for each verdict. The reward is the mean of the usable ones; their standard deviation is recorded."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Further requests after a failed one or an unusable reply. Then the judge abstains, or, if the endpoint failed,
    the rollout fails."""
    max_concurrent: Annotated[int, Field(ge=1)] = 8
    """Highest number of requests in flight."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature of the judge. With several votes in absolute mode it should be above 0."""
    max_tokens: Annotated[int, Field(ge=0)] = 1024
    """Tokens of a reply. 0: the endpoint's default."""
    response_format: Literal["json_schema", "json_object", "none"] = "json_schema"
    """How the endpoint is asked for JSON. One that does not accept it is asked with the next simpler one; replies are
    validated in any case."""
    max_characters: Annotated[int, Field(ge=100)] = 30_000
    """Characters of a completion that the judge sees. Of a longer one the middle is left out."""
    cache_folder: str | None = None
    """Folder that keeps verdicts for other runs. Verdicts are always cached in memory."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the order in which completions are shown, and of the endpoint's sampling."""
    check_at_start: bool = True
    """Connect to the endpoint before the run starts, so that a wrong url or key is an error then."""
    body: dict[str, Any] = {}
    """Other fields of each request, such as `{reasoning_effort = "low"}`."""

    @field_validator("api_key_env")
    @classmethod
    def _check_variable_name(cls, name: str | None) -> str | None:
        if name is not None and not name.replace("_", "a").isalnum():  # not in the message: it may be a key
            raise setting_error(
                "api_key_env is not the name of an environment variable; the key itself is not a setting"
            )
        return name

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.min_score >= self.max_score:
            raise setting_error(
                "{min_score} must be lower than {max_score}", min_score=self.min_score, max_score=self.max_score
            )
        if (part := secret_in_url(self.url)) is not None:
            raise setting_error(f"url contains {part}; put the key into a variable and name it with api_key_env")
        if self.rubric_file is not None and self.rubric != DEFAULT_RUBRIC:
            raise setting_error("rubric and rubric_file cannot be combined")
        return self


class RewardModelSettings(Settings):
    """Options of the reward "reward_model": a Hugging Face sequence-classification model."""

    model: Annotated[str, Field(min_length=1)]
    """A folder with a sequence-classification model, or the name of one in the local Hugging Face cache. Nothing is
    downloaded."""
    label: Annotated[int, Field(ge=0)] | None = None
    """Index of the label whose logit is the reward. Needed if the model has more than one."""
    sigmoid: bool = False
    """Map the logit to 0 to 1."""
    max_length: Annotated[int, Field(ge=8)] | None = None
    """Tokens of prompt and completion. Of a longer text the end is kept, and a first special token. Defaults to the
    longest sequence of the model, or 4096 if it does not state one."""
    batch_size: Annotated[int, Field(ge=1)] = 8
    """Completions of a group that are scored together."""
    device: str = "cpu"
    """A torch device, such as "cuda:1"."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights."""
