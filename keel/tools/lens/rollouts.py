"""Read one step in detail: its groups, its rollouts, and single rollouts token by token, one page at a time.

Every query reads one parquet file and only the columns it needs. Text is returned as recorded, except that long token
texts are truncated, with their length; escaping it is the task of the page. Counts are of trainable tokens.
"""

from pathlib import Path
from typing import Any

from keel.errors import KeelError
from keel.tools.lens.database import Database
from keel.tools.lens.run_reader import replace_non_finite

PAGE_ROWS = 200
"""Rows of one page of a list."""
PAGE_TOKENS = 2000
"""Tokens of one page of a rollout."""
MAX_TOKEN_CHARACTERS = 400
"""Characters of a token's text that are returned."""

_NUM_DROPPED_SQL = "list_count(drop_reason)"
_MAX_LOG_RATIO_SQL = "list_max(list_transform(list_zip(logprobs, sampler_logprobs), lambda x: abs(x[1] - x[2])))"

GROUPS_QUERY = f"""
SELECT "group", any_value(environment) AS environment, any_value(left(task_id, 200)) AS task_id,
    count(DISTINCT (member, attempt)) AS rollouts, count(*) FILTER (outcome = 'trained') AS trained,
    any_value(reason) AS reason, avg(reward) AS reward, min(reward) AS min_reward, max(reward) AS max_reward,
    coalesce(sum({_NUM_DROPPED_SQL}), 0)::BIGINT AS dropped, max({_MAX_LOG_RATIO_SQL}) AS max_log_ratio,
    coalesce(sum(len(list_filter(trainable, lambda x: x))), 0)::BIGINT AS tokens, count(*) OVER () AS total
FROM {{files}} GROUP BY "group" ORDER BY {{order}} LIMIT ? OFFSET ?
"""

GROUP_ORDERS = {
    "name": 'length("group"), "group"',
    "dropped": "dropped DESC, 1",
    "log_ratio": "max_log_ratio DESC NULLS LAST, 1",
    "reward": "reward DESC NULLS LAST, 1",
    "reward_range": "max_reward - min_reward DESC NULLS LAST, 1",
    "tokens": "tokens DESC, 1",
}
"""ORDER BY clause of each order of groups. No text of a request reaches it."""

MEMBERS_QUERY = f"""
SELECT "group", environment, task_id, member, attempt, sample, outcome, reason, left(error, 300) AS error, reward,
    advantage, turns, split_reason, coalesce(len(token_ids), 0) AS length,
    coalesce(len(list_filter(trainable, lambda x: x)), 0) AS tokens,
    coalesce(len(list_filter(drop_reason, lambda x: x LIKE '% low')), 0) AS low,
    coalesce(len(list_filter(drop_reason, lambda x: x LIKE '% high')), 0) AS high,
    coalesce({_NUM_DROPPED_SQL}, 0) AS dropped, {_MAX_LOG_RATIO_SQL} AS max_log_ratio, count(*) OVER () AS total
FROM {{files}} WHERE "group" = ? ORDER BY member, attempt, sample LIMIT ? OFFSET ?
"""

SAMPLE_QUERY = """
SELECT "group", member, attempt, sample, version, environment, task_id, outcome, reason,
    left(error, 2000) AS error, COLUMNS('^(reward|reward_components|environment_metrics)$'), advantage, turns,
    split_reason, temperature,
    coalesce(len(token_ids), 0) AS length,
    list_slice(token_ids, $first, $last) AS token_ids,
    list_transform(list_slice(token_text, $first, $last), lambda p: left(p, $max_characters)) AS token_text,
    list_transform(list_slice(token_text, $first, $last), lambda p: length(p)) AS num_characters,
    list_slice(trainable, $first, $last) AS trainable,
    list_slice(versions, $first, $last) AS versions,
    list_slice(sampler_logprobs, $first, $last) AS sampler_logprobs,
    list_slice(logprobs, $first, $last) AS logprobs,
    list_slice(reference_logprobs, $first, $last) AS reference_logprobs,
    list_slice(entropy, $first, $last) AS entropy,
    list_slice(dloss_dlogprob, $first, $last) AS dloss_dlogprob,
    list_slice(drop_reason, $first, $last) AS drop_reason
FROM {files} WHERE "group" = ? {condition} ORDER BY member, attempt, sample
"""


def list_groups(database: Database, file: Path, order: str = "name", offset: int = 0) -> dict[str, Any]:
    """Return a page of the groups of a step."""
    if order not in GROUP_ORDERS:
        raise KeelError(f"order = {order[:40]!r} must be one of {', '.join(GROUP_ORDERS)}")
    query = GROUPS_QUERY.replace("{order}", GROUP_ORDERS[order])
    return _page_of_rows(database.query_rows(query, [file], [PAGE_ROWS, offset]), "groups")


def list_members(database: Database, file: Path, group: str, offset: int = 0) -> dict[str, Any]:
    """Return a page of the samples of a group's rollouts; a rollout without samples has one row too."""
    return _page_of_rows(database.query_rows(MEMBERS_QUERY, [file], [group, PAGE_ROWS, offset]), "samples")


def read_sample(
    database: Database, file: Path, sample_id: tuple[str, int, int, int], offset: int = 0, limit: int = PAGE_TOKENS
) -> dict[str, Any]:
    """Return one sample, named by (group, member, attempt, sample), with a page of its tokens as columns."""
    rows = _read_samples(database, file, "AND member = ? AND attempt = ? AND sample = ?", sample_id, offset, limit)
    if not rows:
        raise KeelError(f"{file.name} has no sample {sample_id[0][:80]}/{'/'.join(map(str, sample_id[1:]))}")
    return rows[0]


def read_group_samples(database: Database, file: Path, group: str) -> list[dict[str, Any]]:
    """Return all samples of a group, each as from `read_sample`, with one query."""
    return _read_samples(database, file, "", (group,), 0, PAGE_TOKENS)


def _read_samples(
    database: Database, file: Path, condition: str, sample_id: tuple[object, ...], offset: int, limit: int
) -> list[dict[str, Any]]:
    query = SAMPLE_QUERY.replace("{condition}", condition)
    for key, value in {
        "first": offset + 1,
        "last": offset + min(limit, PAGE_TOKENS),
        "max_characters": MAX_TOKEN_CHARACTERS,
    }.items():
        query = query.replace(f"${key}", str(int(value)))
    return [replace_non_finite(row) | {"offset": offset} for row in database.query_rows(query, [file], sample_id)]


def _page_of_rows(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    total = rows[0]["total"] if rows else 0
    return {
        name: [replace_non_finite({key: row[key] for key in row if key != "total"}) for row in rows],
        "total": total,
    }
