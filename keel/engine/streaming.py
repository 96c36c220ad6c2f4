"""The engine in this process, handing out tokens while it samples.

Guarantees that the pieces of a stream joined are what `generate` gives, and that a stream which is closed frees its row
at once. Tokens are looked for every few milliseconds, so that decoding never waits for whoever reads them.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar

from keel.config import Sampling
from keel.engine.answers import Piece
from keel.engine.batch import Request
from keel.engine.local import LocalEngine

INTERVAL = 0.01
"""Seconds between two looks: below one decode step of any model that is worth watching."""

_begun: ContextVar[list[Request] | None] = ContextVar("begun", default=None)
"""Where the request of the stream that is being started is noted."""


class StreamingLocalEngine(LocalEngine):
    """A `LocalEngine` that also implements `keel.engine.jobs.StreamingEngine`."""

    def _request(self, prompt: Sequence[int], sampling: Sampling) -> Request:
        request = super()._request(prompt, sampling)
        begun = _begun.get()
        if begun is not None:
            begun.append(request)
        return request

    async def stream(
        self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None
    ) -> AsyncIterator[Piece]:
        """As `generate`, in pieces as they are sampled."""
        begun: list[Request] = []
        before = _begun.set(begun)
        try:
            # the task has a copy of this context; its other requests, if any, come from other tasks
            answer = asyncio.ensure_future(self.generate(prompt, sampling, group=group))
        finally:
            _begun.reset(before)
        sent = 0
        try:
            while not (await asyncio.wait({answer}, timeout=INTERVAL))[0]:
                if begun:
                    # the list that a token is added to last: what is counted there is in the others too
                    now = len(begun[0].versions)
                    if now > sent:
                        part = slice(sent, now)
                        request = begun[0]
                        yield Piece(
                            tuple(request.tokens[part]), tuple(request.logprobs[part]), tuple(request.versions[part])
                        )
                        sent = now
            whole = answer.result()
            yield Piece(whole.token_ids[sent:], whole.logprobs[sent:], whole.versions[sent:], whole.finish)
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
