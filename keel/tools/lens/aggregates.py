"""Aggregates over many steps that are computed incrementally, with a time limit for each request.

A run of ten gigabytes is not read before the page is drawn: each request reads steps until its time is up, evenly
spaced over the range so that a part is representative, and the next request continues from there. Steps that a running
run adds are picked up. Only the aggregate stays in memory. A file that cannot be read is counted and reported.
"""

import re
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keel.errors import KeelError
from keel.tools.lens.database import Database
from keel.tools.lens.run_reader import RunReader, replace_non_finite
from keel.tools.lens.trust_region_bands import BINS_PER_UNIT, Statistic

CHUNK_BYTES = 24_000_000
"""Bytes of parquet that one query reads, which takes a fraction of a second."""
MAX_STALENESS = 8
"""Tokens of this staleness and above are counted together."""
MAX_TEXTS = 200_000
"""Number of distinct token ids that are counted; larger than common vocabularies."""
MAX_ROWS = 50
"""Maximum number of rows of a list."""

OUTCOME_SQL = (
    "CASE WHEN drop_reason IS NULL THEN 'trained' WHEN drop_reason LIKE '% high' THEN 'high'"
    " WHEN drop_reason LIKE '% low' THEN 'low' ELSE 'other' END"
)
"""A gate drops on the low or the high side; other reasons, such as the token's role, have no side."""
TOKEN_OUTCOMES = ("trained", "low", "high", "other")
ADVANTAGE_SIGN_SQL = "CASE WHEN advantage > 0 THEN 'positive' WHEN advantage < 0 THEN 'negative' ELSE 'zero' END"
ADVANTAGE_SIGNS = ("positive", "negative", "zero")

_POSITION_COLUMNS = """filename, "group", member, attempt, sample, advantage,
    generate_subscripts(token_ids, 1) - 1 AS position,
    unnest(dloss_dlogprob) AS gradient, unnest(entropy) AS entropy,"""
_TEXT_COLUMNS = "unnest(token_ids) AS token_id, unnest(token_text) AS text,"


def token_rows_sql(*columns: str) -> str:
    """Return a query with one row per token of trained samples. duckdb reads every list that is named in it."""
    return f"""
    SELECT {" ".join(columns)} {ADVANTAGE_SIGN_SQL} AS advantage_sign, version - unnest(versions) AS staleness,
        unnest(logprobs) AS l, unnest(sampler_logprobs) AS b, unnest(drop_reason) AS drop_reason
    FROM {{files}} WHERE outcome = 'trained' AND logprobs IS NOT NULL
    """


VALID_TOKEN_SQL = "isfinite(l) AND isfinite(b)"
"""`l` and `b` are the log-probs of the policy and of the sampler (behaviour policy), as in `LensHistogram.sql`."""


class Aggregate(ABC):
    """An aggregate over a range of a run's steps, of which a part may have been read."""

    def __init__(self, database: Database, run: RunReader, first: int, last: int | None) -> None:
        self.database, self.run = database, run
        self.first, self.last = first, last
        self._steps_read: set[int] = set()
        self._unreadable: dict[int, str] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def add_files(self, files: Sequence[Path]) -> None:
        """Add the contents of files, or raise without having added anything."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Return the aggregate as the page needs it."""

    def advance(self, seconds: float) -> dict[str, Any]:
        """Read for about `seconds`, at least one query, and return the aggregate and how much of it was read."""
        end = time.monotonic() + seconds
        with self._lock:
            steps = [step for step in self.run.recorded_steps() if self.first <= step <= (self.last or step)]
            # multiples of the golden ratio fill the range evenly, however many steps are read
            unread = sorted(
                set(steps) - self._steps_read - set(self._unreadable), key=lambda step: step * 0.6180339887498949 % 1
            )
            while unread:
                self._read_files(_next_chunk(self.run, unread))
                if time.monotonic() >= end:
                    break
            return {
                "read": len(self._steps_read),
                "steps": len(steps),
                "first": steps[0] if steps else None,
                "last": steps[-1] if steps else None,
                "unreadable": [f"step {step}: {reason}" for step, reason in sorted(self._unreadable.items())][:5],
                **replace_non_finite(self.as_json()),
            }

    def _read_files(self, steps: Sequence[int]) -> None:
        try:
            self.add_files([self.run.rollout_file(step) for step in steps])
        except KeelError as error:
            if len(steps) == 1:
                self._unreadable[steps[0]] = str(error)[:300]
                return
            for step in steps:
                self._read_files([step])
        else:
            self._steps_read.update(steps)


def _next_chunk(run: RunReader, unread: list[int]) -> list[int]:
    """Remove and return the next steps of the list, about CHUNK_BYTES of them."""
    steps, size = [], 0
    while unread and size < CHUNK_BYTES:
        steps.append(unread.pop(0))
        try:
            size += run.rollout_file(steps[-1]).stat().st_size
        except (OSError, KeelError):
            break
    return steps


class TrustRegionHistograms(Aggregate):
    """Histograms of the distance between policy and sampler, by staleness, sign of the advantage, and outcome."""

    def __init__(
        self, database: Database, run: RunReader, first: int, last: int | None, statistics: Sequence[Statistic]
    ) -> None:
        super().__init__(database, run, first, last)
        self.statistics = statistics
        self._counts: Counter[tuple[str, int, str, str, int]] = Counter()
        self._abs_log_ratio_sums: Counter[tuple[int, str]] = Counter()
        tokens = [statistic for statistic in statistics if statistic.scope == "token"]
        samples = [statistic for statistic in statistics if statistic.scope == "sample"]
        self._queries = [(tokens, _histograms_sql(tokens, token_rows_sql()))]
        if samples:
            self._queries.append((samples, _histograms_sql(samples, _SAMPLE_ROWS_SQL)))

    def add_files(self, files: Sequence[Path]) -> None:
        results = [(statistics, self.database.query_rows(query, files)) for statistics, query in self._queries]
        for statistics, rows in results:
            for row in rows:
                name, sign = statistics[row["statistic_index"]].name, row["advantage_sign"]
                self._counts[name, row["staleness"], sign, row["outcome"], row["bin"]] += row["count"]
                if name == "ratio":
                    self._abs_log_ratio_sums[row["staleness"], sign] += row["abs_log_ratio"]

    def as_json(self) -> dict[str, Any]:
        """Return counts as lists that begin at bin `start`; the page sums over the signs it shows."""
        bins_by_key: dict[tuple[str, int, str, str], dict[int, int]] = {}
        for (name, *key, bin_index), count in self._counts.items():
            bins_by_key.setdefault((name, *key), {})[bin_index] = count  # type: ignore[arg-type]
        series = [
            {
                "statistic": name,
                "staleness": staleness,
                "advantage_sign": sign,
                "outcome": outcome,
                "start": min(bins),
                "counts": [bins.get(index, 0) for index in range(min(bins), max(bins) + 1)],
            }
            for (name, staleness, sign, outcome), bins in sorted(bins_by_key.items())
        ]
        return {
            "statistics": [statistic.as_json() for statistic in self.statistics],
            "bins": BINS_PER_UNIT,
            "max_staleness": MAX_STALENESS,
            "series": series,
            "abs_log_ratio": [[*key, value] for key, value in sorted(self._abs_log_ratio_sums.items())],
        }


_SAMPLE_ROWS_SQL = f"""
SELECT {ADVANTAGE_SIGN_SQL} AS advantage_sign, version - list_min(list_filter(versions, lambda v: v >= 0)) AS staleness,
    1.0 AS l, 0.0 AS b,
    list_sum(list_transform(list_zip(logprobs, sampler_logprobs), lambda x: x[1] - x[2])) AS d,
    list_count(logprobs) AS n, logprobs, sampler_logprobs,
    CASE WHEN list_count(drop_reason) = list_count(logprobs) THEN list_any_value(drop_reason) END AS drop_reason
FROM {{files}} WHERE outcome = 'trained' AND list_count(logprobs) > 0
"""


def _histograms_sql(statistics: Sequence[Statistic], rows: str) -> str:
    """Return a query that counts all histograms in one scan: index of the statistic, bin, and count."""
    bins = [
        f"floor(asinh(({statistic.expression}) / {statistic.scale!r}) * {BINS_PER_UNIT})::INT AS bin{n}"
        for n, statistic in enumerate(statistics)
    ]
    names = [f"bin{n}" for n in range(len(statistics))]
    sets = ", ".join(f"(staleness, advantage_sign, outcome, {name})" for name in names)
    # a bin is never null, so in a row of a grouping set only the bin of that set is not null
    index = " ".join(f"WHEN {name} IS NOT NULL THEN {n}" for n, name in enumerate(names))
    return f"""
    SELECT staleness, advantage_sign, outcome, CASE {index} END AS statistic_index, coalesce({", ".join(names)}) AS bin,
        count(*) AS count, sum(abs(l - b)) AS abs_log_ratio
    FROM (SELECT least(greatest(staleness, 0), {MAX_STALENESS}) AS staleness, advantage_sign, {OUTCOME_SQL} AS outcome,
              l, b, {", ".join(bins)}
          FROM ({rows}) WHERE {VALID_TOKEN_SQL})
    GROUP BY GROUPING SETS ({sets})
    """


class DroppedTexts(Aggregate):
    """The token texts that are dropped most often."""

    QUERY = f"""
    SELECT token_id, any_value(left(text, 80)) AS text, advantage_sign, {OUTCOME_SQL} AS outcome, count(*) AS count
    FROM ({token_rows_sql(_TEXT_COLUMNS)}) WHERE {VALID_TOKEN_SQL} GROUP BY token_id, advantage_sign, outcome
    """

    def __init__(self, database: Database, run: RunReader, first: int, last: int | None) -> None:
        super().__init__(database, run, first, last)
        self._texts: dict[int, str] = {}
        self._counts: Counter[tuple[int, str, str]] = Counter()

    def add_files(self, files: Sequence[Path]) -> None:
        for row in self.database.query_rows(self.QUERY, files):
            token = row["token_id"]
            if token in self._texts or len(self._texts) < MAX_TEXTS:
                self._texts.setdefault(token, row["text"] or "")
                self._counts[token, row["advantage_sign"], row["outcome"]] += row["count"]

    def as_json(self) -> dict[str, Any]:
        dropped: Counter[int] = Counter()
        for (token, _, outcome), count in self._counts.items():
            if outcome != "trained":
                dropped[token] += count
        texts = []
        for token, count in dropped.most_common(MAX_ROWS):
            counts = {(sign, out): self._counts[token, sign, out] for sign in ADVANTAGE_SIGNS for out in TOKEN_OUTCOMES}
            texts.append(
                {
                    "token_id": token,
                    "text": self._texts[token],
                    "dropped": count,
                    "all": sum(counts.values()),
                    **{sign: sum(counts[sign, out] for out in TOKEN_OUTCOMES[1:]) for sign in ADVANTAGE_SIGNS},
                    **{out: sum(counts[sign, out] for sign in ADVANTAGE_SIGNS) for out in TOKEN_OUTCOMES[1:]},
                }
            )
        return {"texts": texts, "dropped": dropped.total(), "distinct": len(dropped)}


TOKEN_ORDERS = {
    "distance": ("abs(l - b)", "DESC"),
    "high": ("l - b", "DESC"),
    "low": ("l - b", "ASC"),
    "difference": ("abs(exp(l) - exp(b))", "DESC"),
    "gradient": ("abs(gradient)", "DESC"),
    "entropy": ("entropy", "DESC"),
}
"""SQL expression and direction of each order. No other text of a request reaches ORDER BY."""
OUTCOME_FILTERS = {
    "any": "true",
    "trained": "drop_reason IS NULL",
    "dropped": "drop_reason IS NOT NULL",
    "low": "drop_reason LIKE '% low'",
    "high": "drop_reason LIKE '% high'",
}
ADVANTAGE_FILTERS = {"any": "true", "positive": "advantage > 0", "negative": "advantage < 0"}


class ExtremeTokens(Aggregate):
    """The most extreme tokens in some order, among those that match a filter."""

    def __init__(
        self,
        database: Database,
        run: RunReader,
        first: int,
        last: int | None,
        *,
        order: str = "distance",
        outcome: str = "any",
        advantage: str = "any",
        text: str = "",
    ) -> None:
        super().__init__(database, run, first, last)
        for name, value, known in (
            ("order", order, TOKEN_ORDERS),
            ("outcome", outcome, OUTCOME_FILTERS),
            ("advantage", advantage, ADVANTAGE_FILTERS),
        ):
            if value not in known:
                raise KeelError(f"{name} = {value[:40]!r} must be one of {', '.join(known)}")
        self.text, self._tokens, self._matching = text, list[dict[str, Any]](), 0
        value, direction = TOKEN_ORDERS[order]
        self._sign = -1 if direction == "DESC" else 1
        condition = (
            f"{VALID_TOKEN_SQL} AND {OUTCOME_FILTERS[outcome]} AND {ADVANTAGE_FILTERS[advantage]}"
            " AND (? = '' OR contains(text, ?))"
        )
        self._count_query = (
            f"SELECT count(*) AS matching FROM ({token_rows_sql('advantage,', _TEXT_COLUMNS)}) WHERE {condition}"
        )
        self._query = f"""
        SELECT filename, "group", member, attempt, sample, position, left(text, 80) AS text, advantage, staleness,
            drop_reason, l AS logprob, b AS sampler_logprob, gradient, entropy, {value} AS value
        FROM ({token_rows_sql(_POSITION_COLUMNS, _TEXT_COLUMNS)})
        WHERE {condition} AND {value} IS NOT NULL ORDER BY {value} {direction} LIMIT {MAX_ROWS}
        """

    def add_files(self, files: Sequence[Path]) -> None:
        matching = self.database.query_rows(self._count_query, files, [self.text, self.text])
        rows = self.database.query_rows(self._query, files, [self.text, self.text])
        for row in rows:
            row["step"] = int(re.findall(r"step_(\d+)\.parquet$", row.pop("filename"))[0])
        self._matching += sum(row["matching"] for row in matching)
        self._tokens = sorted(self._tokens + rows, key=lambda row: row["value"] * self._sign)[:MAX_ROWS]

    def as_json(self) -> dict[str, Any]:
        return {"tokens": self._tokens, "matching": self._matching}
