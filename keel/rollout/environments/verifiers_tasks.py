"""Adapter for verifiers: tasksets of its v1 interface that can be played in this process.

The library is optional; `verifiers:TASKSET` names an environment. An episode is one completion, scored by the task's
own rewards and metrics. Tasksets that need tools, a container, a judge or their own program raise `ConfigError`: they
would otherwise be scored incompletely. No server is started, and nothing is uploaded or run remotely.
"""

import hashlib
import importlib
import inspect
import time
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, ValidationError

from keel.common.settings import Settings, to_config_error
from keel.errors import ConfigError
from keel.rollout.environments.environment import EpisodeResult, Split, Task
from keel.rollout.environments.optional_import import import_optional
from keel.rollout.environments.task_splits import split_of
from keel.rollout.policy_client import PolicyClient


class VerifiersOptions(Settings):
    taskset: dict[str, Any] = {}
    """Options of the taskset itself."""
    train_tasks: Annotated[int, Field(ge=1)] | None = None
    """The maximum number of tasks; None: all of them."""
    eval_tasks: Annotated[int, Field(ge=1)] | None = None


class Verifiers:
    """A taskset of verifiers (v1): its prompts, one completion, its own rewards and metrics.

    The split of a task is decided by its prompt, since tasksets have no splits.
    """

    def __init__(self, taskset: str, **options: Any) -> None:
        self.options = VerifiersOptions(**options)
        self._v1 = import_optional("verifiers.v1", "verifiers")
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
        reason = self._unsupported_reason(taskset)
        if reason:
            raise ConfigError(f'environment.name = "{self.name}" cannot be played in this process: {reason}')

    def _unsupported_reason(self, taskset: str) -> str | None:
        """Return which feature of the taskset would be ignored or silently not scored, or None."""
        task = self._taskset.task_type()
        if self._loaders.environment_class(taskset) is not self._v1.SingleAgentEnv:
            return "it has its own environment"
        if self._loaders.default_harness_id(taskset) == taskset:
            return "it has its own harness"
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
        remaining = self.options.train_tasks if split == "train" else self.options.eval_tasks
        for task in self._taskset:
            if remaining == 0:
                return
            self._check_task(task)
            prompt = f"{task.data.system_prompt}\n{task.data.prompt_text}"
            if split_of(prompt) == split:
                remaining = remaining if remaining is None else remaining - 1
                name = task.data.id or task.data.name or hashlib.sha256(prompt.encode()).hexdigest()[:16]
                yield Task(f"{self.name}/{name}", {"task": task})

    def _check_task(self, task: Any) -> None:
        """Raise if the task needs something that this adapter does not provide."""
        task_name = f"{self.name}: task {task.data.idx}"
        if task.data.prompt is None:
            raise ConfigError(f"{task_name} has no prompt: it needs a simulated user, which is not supported")
        if task.data.skills or task.data.image:
            raise ConfigError(f"{task_name} needs skills or a container image, which are not supported")
        for hook in (*task.hooks("reward"), *task.hooks("metric")):
            runtime = inspect.signature(hook).parameters.get("runtime")
            if runtime is not None and runtime.default is inspect.Parameter.empty:
                raise ConfigError(f"{task_name}: {hook.__name__} needs a runtime, which is not supported")

    async def episode(self, task: Task, client: PolicyClient) -> EpisodeResult:
        verifiers_task = task.data["task"]
        data = verifiers_task.data
        prompt = data.prompt if not isinstance(data.prompt, str) else [self._v1.UserMessage(content=data.prompt)]
        if data.system_prompt is not None:
            prompt = [self._v1.SystemMessage(content=data.system_prompt), *prompt]
        trace = await self._sample_trace(verifiers_task, list(prompt), client)
        await verifiers_task.score(trace, None)
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return EpisodeResult(float(trace.reward), rewards, metrics)

    async def _sample_trace(self, verifiers_task: Any, prompt: list[Any], client: PolicyClient) -> Any:
        """Sample one completion and return it as the library's `Trace`, which its rewards read."""
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
