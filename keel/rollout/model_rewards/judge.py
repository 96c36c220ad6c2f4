"""The reward "judge": a language model scores completions, each on its own or all of a group against each other.

Equal completions get equal scores: they are shown once. The order in which completions are shown is drawn from the seed
and the content, and differs between votes and retries, so that a preference for a position averages out and a verdict
does not depend on timing. A reply without a valid verdict is asked for again and then counts as an abstention that
failed; an endpoint that fails raises, and the rollout fails. Verdicts are cached by content, and identical questions in
flight are asked once.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from keel.common import safe_read
from keel.common.settings import to_config_error
from keel.common.tasks import gather_or_cancel
from keel.config.dataset import JudgeSettings, RewardScope
from keel.errors import ConfigError
from keel.rollout.environments.dataset_rows import find_path
from keel.rollout.environments.rewards.workers import RewardError, RewardScore
from keel.rollout.model_rewards.endpoint import EndpointError, JudgeEndpoint
from keel.rollout.model_rewards.judge_prompt import JudgeCase, JudgePrompt, UnusableReply
from keel.rollout.model_rewards.verdict_cache import VerdictCache, content_key

REQUEST_TIMEOUT = 60.0
RETRY_BACKOFF, MAX_RETRY_BACKOFF = 0.5, 30.0
"""Seconds before a request that failed is sent again, doubled for each further one up to the maximum."""
MAX_RUBRIC_BYTES = 2**20


class Verdict(NamedTuple):
    """The outcome of one question to the judge."""

    scores: tuple[float, ...] | None
    """One score per completion; None: no usable reply."""
    failure: RewardError | None
    requests: int
    """Requests that were sent."""
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    cached: bool = False


@dataclass
class _Cost:
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Judge:
    """Scores completions by requests to an endpoint; a `RewardSource`."""

    def __init__(self, options: Mapping[str, Any], timeout: float | None = None) -> None:
        """`timeout` is the limit of one request in seconds. Raises ConfigError for options that cannot work."""
        try:
            settings = JudgeSettings.model_validate(dict(options))
        except ValidationError as error:
            raise to_config_error(error, ("rewards", "judge", "options")) from error
        self._settings = settings
        self.scope: RewardScope = "completion" if settings.mode == "absolute" else "group"
        self._rubric = _read_rubric(settings)
        self._prompt = JudgePrompt(settings, self._rubric)
        self.timeout = timeout or REQUEST_TIMEOUT
        self._endpoint = JudgeEndpoint(settings, self.timeout)
        self._cache = VerdictCache(Path(settings.cache_folder).expanduser() if settings.cache_folder else None)
        self._in_flight: dict[str, asyncio.Task[Verdict]] = {}

    async def score(self, items: Sequence[Mapping[str, Any]]) -> list[RewardScore]:
        """Return the score of each completion; they belong to one prompt unless the mode is "absolute"."""
        if self._settings.mode != "absolute":
            return await self._score_case(items)
        return [
            score for scores in await gather_or_cancel([self._score_case([item]) for item in items]) for score in scores
        ]

    async def close(self) -> None:
        """Cancel what is in flight and close the connections."""
        tasks = list(self._in_flight.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._endpoint.close()

    async def _score_case(self, items: Sequence[Mapping[str, Any]]) -> list[RewardScore]:
        case = self._make_case(items)
        if self._settings.mode == "rank" and len(case.completions) == 1:
            return [RewardScore(0.5) for _ in items]  # nothing to compare
        votes = range(self._settings.votes)
        results = await asyncio.gather(*(self._ask_once(case, vote) for vote in votes), return_exceptions=True)
        verdicts = [result for result in results if isinstance(result, Verdict)]
        failed = [result for result in results if isinstance(result, BaseException)]
        if failed and not any(verdict.scores for verdict in verdicts):
            raise failed[0]
        metrics = _cost_metrics(verdicts, len(items))
        usable = [verdict.scores for verdict in verdicts if verdict.scores is not None]
        if not usable:
            failure = next(verdict.failure for verdict in verdicts)
            return [RewardScore(None, metrics | {"abstained": 1.0}, failure) for _ in items]
        by_text = dict(zip(case.completions, zip(*usable, strict=True), strict=True))
        return [self._combine(by_text[str(item["completion"])], metrics) for item in items]

    def _make_case(self, items: Sequence[Mapping[str, Any]]) -> JudgeCase:
        missing = [name for name in self._settings.columns if name not in items[0]]
        if missing:
            raise RewardError("exception", f'options.columns: the row has no column "{missing[0]}"')
        columns = {name: items[0][name] for name in self._settings.columns}
        completions = tuple(sorted({str(item["completion"]) for item in items}))
        return JudgeCase(tuple(items[0]["messages"]), columns, completions)

    def _combine(self, scores: Sequence[float], metrics: Mapping[str, float]) -> RewardScore:
        """Return the mean of the votes, mapped to 0 to 1."""
        low, high = self._settings.min_score, self._settings.max_score
        if self._settings.mode != "rank" and not self._settings.raw:
            scores = [(score - low) / (high - low) for score in scores]
        own = {"abstained": 0.0}
        if self._settings.votes > 1:
            own["disagreement"] = statistics.pstdev(scores)
        return RewardScore(statistics.fmean(scores), {**metrics, **own})

    async def _ask_once(self, case: JudgeCase, vote: int) -> Verdict:
        """Return the cached verdict, or ask; the same question in flight is not asked again."""
        key = self._key(case, vote)
        scores = self._cache.get(key)
        if scores is not None and len(scores) == len(case.completions):
            return Verdict(scores, None, 0, 0, 0, 0.0, cached=True)
        task = self._in_flight.get(key)
        shared = task is not None and task.get_loop() is asyncio.get_running_loop()
        if task is None or not shared:
            task = asyncio.ensure_future(self._ask(case, key))
            self._in_flight[key] = task
            task.add_done_callback(lambda ended: self._forget(key, ended))
        # a rollout that is cancelled must not cancel the question of another
        verdict = await asyncio.shield(task)
        return Verdict(*verdict[:2], 0, 0, 0, 0.0, cached=True) if shared else verdict

    def _forget(self, key: str, task: asyncio.Task[Verdict]) -> None:
        if self._in_flight.get(key) is task:
            del self._in_flight[key]
        if not task.cancelled():
            task.exception()  # asyncio would log it if every rollout that waited was cancelled

    async def _ask(self, case: JudgeCase, key: str) -> Verdict:
        start, cost = time.monotonic(), _Cost()
        problem: UnusableReply | None = None
        for attempt in range(self._settings.retries + 1):
            try:
                scores = await self._request(case, f"{key}{attempt}", str(problem) if problem else None, cost)
            except UnusableReply as error:
                problem = error
                continue
            except EndpointError as error:
                if not error.transient or attempt == self._settings.retries:
                    raise
                await asyncio.sleep(min(RETRY_BACKOFF * 2**attempt, MAX_RETRY_BACKOFF))
                continue
            self._cache.remember(key, scores)
            await asyncio.to_thread(self._cache.store, key, scores)
            return Verdict(
                scores, None, cost.requests, cost.prompt_tokens, cost.completion_tokens, time.monotonic() - start
            )
        failure = RewardError(
            "exception", f"the judge gave no valid verdict in {cost.requests} requests; the last problem: {problem}"
        )
        return Verdict(
            None, failure, cost.requests, cost.prompt_tokens, cost.completion_tokens, time.monotonic() - start
        )

    async def _request(self, case: JudgeCase, name: str, problem: str | None, cost: _Cost) -> tuple[float, ...]:
        """Send one request, with an order and a seed that depend on its name, and return the scores."""
        rng = random.Random(f"{self._settings.seed}/{name}")
        order = rng.sample(range(len(case.completions)), len(case.completions))
        messages = self._prompt.messages(case, order, problem)
        cost.requests += 1
        reply = await self._endpoint.complete(messages, self._prompt.schema, rng.randrange(2**31))
        cost.prompt_tokens += reply.prompt_tokens
        cost.completion_tokens += reply.completion_tokens
        return self._prompt.read(reply.text, order)

    def _key(self, case: JudgeCase, vote: int) -> str:
        """Return a hash of everything that a verdict depends on."""
        excluded = {
            "api_key_env",
            "raw",
            "votes",
            "retries",
            "max_concurrent",
            "cache_folder",
            "check_at_start",
            "rubric_file",
        }
        settings = self._settings.model_dump(exclude=excluded) | {"rubric": self._rubric}
        return content_key([settings, list(case.messages), dict(case.columns), case.completions, vote])


def _cost_metrics(verdicts: Sequence[Verdict], count: int) -> dict[str, float]:
    """Return the metrics of each completion: tokens and requests are divided among them, seconds are not."""
    return {
        "requests": sum(verdict.requests for verdict in verdicts) / count,
        "prompt_tokens": sum(verdict.prompt_tokens for verdict in verdicts) / count,
        "completion_tokens": sum(verdict.completion_tokens for verdict in verdicts) / count,
        "seconds": max((verdict.seconds for verdict in verdicts), default=0.0),
        "cached": statistics.fmean(verdict.cached for verdict in verdicts) if verdicts else 0.0,
    }


def _read_rubric(settings: JudgeSettings) -> str:
    if settings.rubric_file is None:
        return settings.rubric
    try:
        path = find_path(settings.rubric_file) or Path(settings.rubric_file)
        text = safe_read.read_text(path, MAX_RUBRIC_BYTES).strip()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f'reward "judge": options.rubric_file = "{settings.rubric_file}" cannot be read: {error}'
        ) from error
    if not text:
        raise ConfigError(f'reward "judge": options.rubric_file = "{settings.rubric_file}" is empty')
    return text
