"""Settings of supervised fine-tuning: the table [sft] of a recipe, for `keel sft`."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from keel.common.settings import Settings, setting_error
from keel.config.dataset import DatasetSettings

Count = Annotated[int, Field(ge=1)]


class SftDatasetSettings(DatasetSettings):
    """A data set of conversations. `dataset = "train.jsonl"` is short for `dataset = {path = "train.jsonl"}`.

    A row has a column of messages, or a prompt and a completion.
    """

    messages: str = "messages"
    """Column of a conversation: a list of messages. A row with this column has no need of the other two."""
    completion: str = "completion"
    """Column of the completion of `prompt`: text, or a list of messages. Replies inside the prompt are not trained."""
    tools: str = "tools"
    """Column of the tools that the chat template describes, if there is one."""

    @model_validator(mode="after")
    def _check_options_have_effect(self) -> Self:
        if self.answer is not None:
            raise setting_error(
                "{answer} has no effect: it is for rewards; name the column of the completion in `completion`",
                answer=self.answer,
            )
        if self.few_shot:
            raise setting_error("{few_shot} has no effect in supervised fine-tuning", few_shot=self.few_shot)
        return self


class SftSettings(Settings):
    """Supervised fine-tuning with `keel sft`: cross-entropy on the assistant's tokens of recorded conversations."""

    dataset: SftDatasetSettings | None = None
    """The conversations to train on."""
    environment: str | None = None
    """In place of a data set: an environment of this recipe that can show solutions of its tasks (a method
    `demonstration`). Its eval split is held out."""
    shuffle: bool = True
    """Whether rows are drawn in an order that depends on `seed`, anew in each epoch, or in the order of the data."""
    rows_per_step: Count = 32
    """Conversations in a step."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training rows, instead of `steps`."""
    max_sequence_tokens: Count = 4096
    """Maximum number of tokens in a training sample."""
    on_overlength: Literal["drop", "truncate"] = "drop"
    """What happens to a longer conversation: it counts as unusable, or is truncated at the limit."""
    train_on: Literal["all", "last"] = "all"
    """Which replies of a conversation are trained: all of them, or the last one."""
    eval_rows: Count = 256
    """Held-out conversations whose loss is measured, at the times set in [evaluation]."""

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("dataset"), str):
            return {**values, "dataset": {"path": values["dataset"]}}
        return values

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.dataset is None) == (self.environment is None):
            raise setting_error('sft needs a data set, dataset = "train.jsonl", or an environment, and not both')
        return self
