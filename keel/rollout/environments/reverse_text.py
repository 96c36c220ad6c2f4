"""The built-in environment `reverse_text`: write a text backwards, in tags.

The task is the example of prime-rl. A model first learns the format by supervised fine-tuning on demonstrations, and
then improves by reinforcement learning on a reward with partial credit.
"""

import random
import re
import string
from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from keel.common.settings import setting_error
from keel.inference.protocol import Message
from keel.rollout.environments.environment import EpisodeResult, Split, Task
from keel.rollout.environments.task_splits import TaskSetOptions, sample_tasks
from keel.rollout.policy_client import PolicyClient

_ANSWER = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)


class ReverseTextOptions(TaskSetOptions):
    min_length: Annotated[int, Field(ge=1)] = 4
    """Fewest letters of a text."""
    max_length: Annotated[int, Field(ge=1, le=1000)] = 8
    """Most letters of a text."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.min_length > self.max_length:
            raise setting_error(
                "{min_length} must not be above {max_length}", min_length=self.min_length, max_length=self.max_length
            )
        return self


class ReverseText:
    """Reverse a text of random letters.

    The reward is 2 LCS / (length of the answer + length of the solution), where the answer is the text in
    `<reversed_text>` tags and LCS the length of the longest common subsequence; 0 without the tags. The metric
    `formatted` says whether the tags are there.
    """

    name = "reverse_text"
    system = "Reverse the text character by character. Put your answer in <reversed_text> tags."

    def __init__(self, **options: Any) -> None:
        self.options = ReverseTextOptions(**options)

    def _sample_text(self, rng: random.Random) -> str:
        length = rng.randint(self.options.min_length, self.options.max_length)
        return "".join(rng.choices(string.ascii_lowercase, k=length))

    def tasks(self, split: Split) -> Sequence[Task]:
        texts = sample_tasks(self._sample_text, lambda text: f"{self.name}/{text}", split, self.options)
        return [Task(f"{self.name}/{text}", {"text": text, "answer": text[::-1]}) for text in texts]

    def prompt(self, task: Task) -> list[Message]:
        return [{"role": "system", "content": self.system}, {"role": "user", "content": task.data["text"]}]

    def demonstration(self, task: Task) -> list[Message]:
        """Return a conversation in which the task is solved, for supervised fine-tuning."""
        answer = f"<reversed_text>{task.data['answer']}</reversed_text>"
        return [*self.prompt(task), {"role": "assistant", "content": answer}]

    async def episode(self, task: Task, client: PolicyClient) -> EpisodeResult:
        reply = await client.chat(self.prompt(task))
        match = _ANSWER.search(reply.text)
        answer = "" if match is None else match[1].strip()
        return EpisodeResult(lcs_ratio(answer, task.data["answer"]), metrics={"formatted": float(match is not None)})


def lcs_ratio(first: str, second: str) -> float:
    """Return 2 LCS / (sum of the lengths): 1 for equal texts, 0 for texts without a common character."""
    if not first or not second:
        return 0.0
    # a row of the usual table; a completion is short
    row = [0] * (len(second) + 1)
    for a in first:
        diagonal = 0
        for index, b in enumerate(second, 1):
            diagonal, row[index] = row[index], diagonal + 1 if a == b else max(row[index], row[index - 1])
    return 2 * row[-1] / (len(first) + len(second))
