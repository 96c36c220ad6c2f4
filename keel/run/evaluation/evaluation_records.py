"""The completions of evaluations on disk: `evaluations/step_N.parquet` of a run, or any file of `keel eval --output`.

One row per episode, with the last prompt and completion of the episode; a prompt of a later turn contains the turns
before it. A file is written under a temporary name and renamed. An evaluation that is repeated, for example after a
kill, replaces the rows of its environment and keeps those of the others. No pickle.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from keel.common.atomic_files import atomic_file
from keel.common.safe_read import check_parquet_size
from keel.errors import StorageError
from keel.rollout.policy_client import Exchange
from keel.rollout.rollout import Rollout
from keel.run.records import step_path

logger = logging.getLogger("keel")

PASS_THRESHOLD = 1 - 1e-9
"""Smallest reward that counts as a pass: 1 up to rounding. Partial credit counts in the reward, not in pass@k."""

_FLOAT_MAP = pa.map_(pa.string(), pa.float64())

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),  # step of the evaluated checkpoint; null for a model that is not from a run
        ("environment", pa.string()),  # its name in the run
        ("task_id", pa.string()),
        ("sample", pa.int32()),  # index among the episodes of the task
        ("prompt", pa.string()),  # the messages of the last request, as JSON; null if nothing was requested
        ("completion", pa.string()),  # text of the last completion, including thinking
        ("token_ids", pa.list_(pa.int32())),  # of the last completion; empty from an endpoint that returns text only
        ("sampler_logprobs", pa.list_(pa.float64())),
        ("finish_reason", pa.string()),
        ("reward", pa.float64()),  # 0 for a failed episode, as in the mean
        ("passed", pa.bool_()),
        ("reward_components", _FLOAT_MAP),
        ("environment_metrics", _FLOAT_MAP),
        ("answer", pa.string()),  # the reference answer, if the task has one
        ("completion_tokens", pa.int32()),  # over all turns
        ("turns", pa.int32()),
        ("seconds", pa.float64()),
        ("error", pa.string()),
        ("error_kind", pa.string()),
    ]
)
"""The columns of a file of evaluation completions."""


@dataclass(frozen=True, slots=True)
class EvaluatedEpisode:
    """One episode of an evaluation."""

    rollout: Rollout
    sample: int
    """Index among the episodes of the task."""
    exchange: Exchange | None
    """The last prompt and completion; None if the episode requested none."""
    answer: str | None = None
    """The reference answer of the task, if it has one."""

    @property
    def reward(self) -> float:
        """The reward; 0 for a failed episode."""
        return self.rollout.reward if self.rollout.error is None and self.rollout.reward is not None else 0.0

    @property
    def passed(self) -> bool:
        return self.reward >= PASS_THRESHOLD

    def as_row(self, step: int | None, environment: str) -> dict[str, Any]:
        """Return the values of the columns."""
        rollout, row = self.rollout, dict[str, Any]()
        if self.exchange is not None:
            row = {
                "prompt": json.dumps(self.exchange.messages, ensure_ascii=False, default=str),
                "completion": self.exchange.completion,
                "token_ids": self.exchange.token_ids,
                "sampler_logprobs": self.exchange.logprobs,
                "finish_reason": self.exchange.finish_reason,
            }
        # a lone surrogate in text of a model cannot be stored as UTF-8
        texts = {name: value for name, value in row.items() if isinstance(value, str)}
        row |= {name: value.encode("utf-8", "replace").decode() for name, value in texts.items()}
        return row | {
            "step": step,
            "environment": environment,
            "task_id": rollout.task_id,
            "sample": self.sample,
            "reward": self.reward,
            "passed": self.passed,
            "reward_components": list(rollout.reward_components.items()),
            "environment_metrics": list(rollout.metrics.items()),
            "answer": self.answer,
            "completion_tokens": rollout.completion_tokens,
            "turns": rollout.turns,
            "seconds": rollout.seconds,
            "error": rollout.error,
            "error_kind": rollout.error_kind,
        }


def write_evaluation(folder: Path, step: int, environment: str, episodes: Sequence[EvaluatedEpisode]) -> Path:
    """Write the episodes of one environment to the file of a step; rows of other environments in it are kept."""
    target = step_path(folder, step)
    others = SCHEMA.empty_table()
    if target.exists():
        try:
            table = _read_table(target)
            others = table.filter(pc.not_equal(table["environment"], environment))
        except StorageError as error:
            # not needed to resume the run, so it must not stop it
            logger.warning("%s; it is replaced", error)
    _write_table(target, pa.concat_tables([others, _to_table(step, environment, episodes)]))
    return target


def write_episodes(path: Path, step: int | None, episodes: Mapping[str, Sequence[EvaluatedEpisode]]) -> None:
    """Write the episodes of an evaluation, by environment, to a file."""
    _write_table(path, pa.concat_tables([_to_table(step, name, each) for name, each in episodes.items()]))


def read_evaluation(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of evaluation completions; maps are dictionaries."""
    rows: list[dict[str, Any]] = _read_table(path).to_pylist(maps_as_pydicts="lossy")
    return rows


def _to_table(step: int | None, environment: str, episodes: Sequence[EvaluatedEpisode]) -> pa.Table:
    return pa.Table.from_pylist([episode.as_row(step, environment) for episode in episodes], schema=SCHEMA)


def _write_table(path: Path, table: pa.Table) -> None:
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def _read_table(path: Path) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            check_parquet_size(path, file.metadata)
            return file.read(columns=SCHEMA.names).cast(SCHEMA)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise StorageError(f"{path} cannot be read as a file of evaluation completions: {error}") from error
