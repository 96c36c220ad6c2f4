"""Adapter for reasoning-gym: every task of the library as a single-turn environment with the library's own scorer.

The library is optional; `reasoning_gym:TASK` names an environment.
"""

import importlib
import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from keel.common.settings import suggest_name
from keel.errors import ConfigError
from keel.inference.protocol import Message
from keel.rollout.environments.environment import EpisodeResult, Split, Task
from keel.rollout.environments.optional_import import import_optional
from keel.rollout.environments.task_splits import TaskSetOptions, split_of
from keel.rollout.policy_client import PolicyClient

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymOptions(TaskSetOptions):
    shots: Annotated[int, Field(ge=0, le=8)] = 2
    """Solved examples shown before the question; they are never tasks."""
    system: str = "Answer with the final answer only."
    partial_credit: bool = True
    """False: the reward is 1 for full marks and 0 otherwise. Some scorers give partial credit for any text."""
    config: dict[str, Any] = {}
    """Options of the task itself."""


class ReasoningGym:
    """One task of reasoning-gym, with the score of the library's scorer as reward.

    The scorer gets the text between <answer> and </answer>, or else the whole completion. The split of a question
    depends on the question alone.
    """

    def __init__(self, task: str, **options: Any) -> None:
        self.options = ReasoningGymOptions(**options)
        library = import_optional("reasoning_gym", "reasoning-gym")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
        if task not in known:
            raise ConfigError(f'environment.name = "reasoning_gym:{task}" is not known; {suggest_name(task, known)}')
        self.name = f"reasoning_gym:{task}"
        size = _search_limit(max(self.options.train_tasks, self.options.eval_tasks))

        def create(seed: int) -> Any:
            try:
                return library.create_dataset(task, size=size, seed=seed, **self.options.config)
            # tasks validate their options in different ways, some by assert
            except Exception as error:
                raise ConfigError(
                    f"environment.options.config = {self.options.config} does not fit {task}: {error}"
                ) from error

        self._dataset = create(self.options.seed)
        self._examples = list(self._find_examples(create(self.options.seed + 1_000_003)))

    def _find_examples(self, dataset: Any) -> Iterator[tuple[str, str]]:
        num_found = 0
        for index in range(20 * self.options.shots):
            if num_found == self.options.shots:
                return
            entry = dataset[index]
            # a few tasks have no reference answer, and so no examples
            if entry["answer"] and split_of(entry["question"]) == "train":
                num_found += 1
                yield entry["question"], str(entry["answer"])

    def tasks(self, split: Split) -> Iterator[Task]:
        remaining = self.options.train_tasks if split == "train" else self.options.eval_tasks
        seen = {question for question, _ in self._examples}
        for index in range(_search_limit(remaining)):
            if remaining == 0:
                return
            entry = self._dataset[index]
            question = entry["question"]
            if question not in seen and split_of(question) == split:
                seen.add(question)
                remaining -= 1
                yield Task(f"{self.name}/{self.options.seed}-{index}", {"question": question, "entry": entry})

    def reference_answer(self, task: Task) -> Any:
        return task.data["entry"]["answer"]

    async def episode(self, task: Task, client: PolicyClient) -> EpisodeResult:
        messages: list[Message] = [{"role": "system", "content": self.options.system}] if self.options.system else []
        for question, answer in self._examples:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        reply = await client.chat([*messages, {"role": "user", "content": task.data["question"]}])
        tagged = _ANSWER_TAG.search(reply.text)
        answer = (tagged[1] if tagged else reply.text).strip()
        try:
            score = float(self._dataset.score_answer(answer, task.data["entry"]))
        # some scorers raise on text that they cannot parse; that is the policy's mistake and scores 0
        except Exception:  # noqa: BLE001
            score, unread = 0.0, 1.0
        else:
            unread = 0.0
        correct = float(score >= 1)
        metrics = {"score": score, "correct": correct, "unread": unread}
        return EpisodeResult(score if self.options.partial_credit else correct, metrics=metrics)


def _search_limit(num_tasks: int) -> int:
    """Return how many questions to generate to find `num_tasks`: questions repeat, and one in eight is in eval."""
    return 200 + 20 * num_tasks
