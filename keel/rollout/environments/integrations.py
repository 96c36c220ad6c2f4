"""Environments of other libraries, both optional: `reasoning_gym:TASK` and `verifiers:TASKSET`.

reasoning-gym: every task of the library, asked in one turn and scored by its own scorer. verifiers: tasksets of its v1
interface, as far as they can be played in this process: one answer, scored by the task's own rewards. A taskset that
needs tools, a container, a judge or its own program is refused. Nothing is pushed anywhere or run remotely.
"""

import hashlib
import importlib
import inspect
import re
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from pydantic import Field, ValidationError

from keel.common.settings import Settings, suggest_name, to_config_error
from keel.errors import ConfigError
from keel.inference.protocol import Message
from keel.rollout.environments.environment import Environment, EpisodeResult, Split, Task
from keel.rollout.environments.task_splits import TaskSetOptions, split_of
from keel.rollout.policy_client import PolicyClient

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymOptions(TaskSetOptions):
    shots: Annotated[int, Field(ge=0, le=8)] = 2
    """Solved examples before the question, never among the tasks."""
    system: str = "Answer with the final answer only."
    partial_credit: bool = True
    """Off: only full marks count. Some scorers give something for any answer at all."""
    config: dict[str, Any] = {}
    """Options of the task itself."""


class ReasoningGym:
    """One task of reasoning-gym. The reward is what its scorer says of the answer.

    The answer is what stands between <answer> and </answer>, or else the whole text. Where a question is trained or
    evaluated is decided by the question alone.
    """

    def __init__(self, task: str, **options: Any) -> None:
        self.options = ReasoningGymOptions(**options)
        library = _import_optional("reasoning_gym", "reasoning-gym")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
        if task not in known:
            raise ConfigError(f'environment.name = "reasoning_gym:{task}" is not known; {suggest_name(task, known)}')
        self.name = f"reasoning_gym:{task}"
        size = _search_limit(max(self.options.train_tasks, self.options.eval_tasks))

        def create(seed: int) -> Any:
            try:
                return library.create_dataset(task, size=size, seed=seed, **self.options.config)
            # each task checks its options in its own way, also by assert
            except Exception as error:
                raise ConfigError(
                    f"environment.options.config = {self.options.config} does not fit {task}: {error}"
                ) from error

        self._dataset = create(self.options.seed)
        self._examples = list(self._find_examples(create(self.options.seed + 1_000_003)))

    def _find_examples(self, dataset: Any) -> Iterator[tuple[str, str]]:
        found = 0
        for index in range(20 * self.options.shots):
            if found == self.options.shots:
                return
            entry = dataset[index]
            # a few tasks have no model answer, and so no examples
            if entry["answer"] and split_of(entry["question"]) == "train":
                found += 1
                yield entry["question"], str(entry["answer"])

    def tasks(self, split: Split) -> Iterator[Task]:
        wanted = self.options.train_tasks if split == "train" else self.options.eval_tasks
        seen = {question for question, _ in self._examples}
        for index in range(_search_limit(wanted)):
            if wanted == 0:
                return
            entry = self._dataset[index]
            question = entry["question"]
            if question not in seen and split_of(question) == split:
                seen.add(question)
                wanted -= 1
                yield Task(f"{self.name}/{self.options.seed}-{index}", {"question": question, "entry": entry})

    async def episode(self, task: Task, client: PolicyClient) -> EpisodeResult:
        messages: list[Message] = [{"role": "system", "content": self.options.system}] if self.options.system else []
        for question, answer in self._examples:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        reply = await client.chat([*messages, {"role": "user", "content": task.data["question"]}])
        tagged = _ANSWER_TAG.search(reply.text)
        answer = (tagged[1] if tagged else reply.text).strip()
        try:
            score = float(self._dataset.score_answer(answer, task.data["entry"]))
        # some scorers raise at an answer that they cannot read; it is the policy's mistake, and worth nothing
        except Exception:  # noqa: BLE001
            score, unread = 0.0, 1.0
        else:
            unread = 0.0
        correct = float(score >= 1)
        metrics = {"score": score, "correct": correct, "unread": unread}
        return EpisodeResult(score if self.options.partial_credit else correct, metrics=metrics)


class VerifiersOptions(Settings):
    taskset: dict[str, Any] = {}
    """Options of the taskset itself."""
    train_tasks: Annotated[int, Field(ge=1)] | None = None
    """At most so many; not given: all there are."""
    eval_tasks: Annotated[int, Field(ge=1)] | None = None


class Verifiers:
    """A taskset of verifiers (v1): its prompts, one answer, its own rewards and metrics.

    Which tasks are for evaluation is decided by their prompt, since tasksets have no splits.
    """

    def __init__(self, taskset: str, **options: Any) -> None:
        self.options = VerifiersOptions(**options)
        self._v1 = _import_optional("verifiers.v1", "verifiers")
        self._loaders = importlib.import_module("verifiers.v1.utils.loaders")
        self.name = f"verifiers:{taskset}"
        try:
            config = self._loaders.taskset_config_type(taskset)
            kind = self._loaders.taskset_class(taskset)
        except (ImportError, AttributeError, TypeError) as error:
            raise ConfigError(f'environment.name = "{self.name}" cannot be loaded: {error}') from error
        try:
            self._taskset = kind(config.model_validate({**self.options.taskset, "id": taskset}))
        except ValidationError as error:
            raise to_config_error(error, ("environment", "options", "taskset")) from error
        why = self._unsupported_reason(taskset)
        if why:
            raise ConfigError(f'environment.name = "{self.name}" cannot be played in this process: {why}')

    def _unsupported_reason(self, taskset: str) -> str | None:
        """What of the taskset would be left out, or silently not scored."""
        task = self._taskset.task_type()
        if self._loaders.environment_class(taskset) is not self._v1.SingleAgentEnv:
            return "it has an environment of its own"
        if self._loaders.default_harness_id(taskset) == taskset:
            return "it has a harness of its own"
        if task.NEEDS_CONTAINER:
            return "its tasks need a container"
        if self._taskset.toolsets(self._taskset.config) or task.toolsets(self._taskset.config.task):
            return "it has tool servers"
        if self._taskset.config.task.judges:
            return "it is scored by judges"
        for hook in ("setup", "finalize", "stage_verifier"):
            if getattr(task, hook) is not getattr(self._v1.Task, hook):
                return f"its tasks have a {hook} step in a runtime"
        return None

    def tasks(self, split: Split) -> Iterator[Task]:
        left = self.options.train_tasks if split == "train" else self.options.eval_tasks
        for task in self._taskset:
            if left == 0:
                return
            self._check_task(task)
            said = f"{task.data.system_prompt}\n{task.data.prompt_text}"
            if split_of(said) == split:
                left = left if left is None else left - 1
                name = task.data.id or task.data.name or hashlib.sha256(said.encode()).hexdigest()[:16]
                yield Task(f"{self.name}/{name}", {"task": task})

    def _check_task(self, task: Any) -> None:
        """Refuse a task of which something would be left out."""
        where = f"{self.name}: task {task.data.idx}"
        if task.data.prompt is None:
            raise ConfigError(f"{where} has no prompt: it is opened by a simulated user, which does not exist here")
        if task.data.skills or task.data.image:
            raise ConfigError(f"{where} needs skills or a container image, and is played here without any")
        for hook in (*task.hooks("reward"), *task.hooks("metric")):
            runtime = inspect.signature(hook).parameters.get("runtime")
            if runtime is not None and runtime.default is inspect.Parameter.empty:
                raise ConfigError(f"{where}: {hook.__name__} needs a runtime, and there is none here")

    async def episode(self, task: Task, client: PolicyClient) -> EpisodeResult:
        played = task.data["task"]
        data = played.data
        prompt = data.prompt if not isinstance(data.prompt, str) else [self._v1.UserMessage(content=data.prompt)]
        if data.system_prompt is not None:
            prompt = [self._v1.SystemMessage(content=data.system_prompt), *prompt]
        trace = await self._sample_trace(played, list(prompt), client)
        await played.score(trace, None)
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return EpisodeResult(float(trace.reward), rewards, metrics)

    async def _sample_trace(self, verifiers_task: Any, prompt: list[Any], client: PolicyClient) -> Any:
        """The library's own record of one answer, which its rewards read."""
        records = importlib.import_module("verifiers.v1.trace")
        graph = importlib.import_module("verifiers.v1.graph")
        types = importlib.import_module("verifiers.v1.types")
        state = importlib.import_module("verifiers.v1.state").state_cls(type(verifiers_task))
        trace = records.Trace(
            task=records.TraceTask(
                type=type(verifiers_task).__name__,
                data=verifiers_task.data,
                key=verifiers_task.key,
                hash=verifiers_task.hash,
            ),
            state=state(),
            agent=records.AgentInfo(config=self._v1.AgentConfig()),
        )
        turn = graph.prepare_turn(trace, prompt)
        reply = await client.chat([message.model_dump(exclude_none=True) for message in prompt])
        turn.commit(
            types.Response(
                id=trace.id,
                created=int(time.time()),
                model="policy",
                message=types.AssistantMessage(
                    content=reply.text, reasoning_content=reply.message.get("reasoning_content")
                ),
                finish_reason="length" if reply.generation.finish_reason == "length" else "stop",
            )
        )
        trace.is_completed = trace.ok = True
        return trace


def _search_limit(num_tasks: int) -> int:
    """How many questions are looked at to find so many: they repeat, and one in eight is for evaluation."""
    return 200 + 20 * num_tasks


def _import_optional(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"environments of {package} need the library: pip install {package}") from error


INTEGRATIONS: dict[str, Callable[..., Environment]] = {"reasoning_gym": ReasoningGym, "verifiers": Verifiers}
