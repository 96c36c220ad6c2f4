"""Who may talk to a server, and how often: holders of its key, or without one this machine alone.

Guarantees that a key is compared in constant time, that without a key neither another machine is answered nor a web
page through a browser on this one, that forwarded headers are never believed, and that no client is answered more often
than the limit; strangers cannot use up what holders of the key have. It knows nothing of what is asked.
"""

import base64
import binascii
import hashlib
import hmac
import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope

from keel.errors import ConfigError

MIN_KEY_LENGTH = 16
"""Characters of a key that other machines may guess at: this many letters and digits are more than can be tried."""
MAX_TRACKED_CLIENTS = 4096
"""Clients whose requests are counted; beyond it the one that was not heard of longest is forgotten."""


@dataclass(frozen=True)
class RateLimit:
    """How often one client is answered."""

    per_second: float
    """On average."""
    burst: int
    """At once, after a pause."""


UNAUTHENTICATED_RATE = RateLimit(per_second=10, burst=50)
"""Refusals for want of a key; beyond it they are refused without one being looked at."""


@dataclass(frozen=True)
class AccessDenial:
    """Why a request is not answered."""

    status: int
    message: str
    retry_after: int | None = None
    """Seconds after which it may be."""


class RateLimiter:
    """A bucket of requests for each client, which fills with time."""

    def __init__(self, limit: RateLimit, clock: Callable[[], float] = time.monotonic) -> None:
        if limit.per_second <= 0 or limit.burst < 1:
            raise ConfigError(
                f"a rate of {limit.per_second:g} requests a second with {limit.burst} at once answers none"
            )
        self.limit, self._clock = limit, clock
        self._buckets: OrderedDict[object, tuple[float, float]] = OrderedDict()

    def seconds_until_allowed(self, client: object) -> float:
        """Count a request: 0 when it may be answered now, else the seconds until the next one may."""
        now = self._clock()
        left, before = self._buckets.pop(client, (float(self.limit.burst), now))
        left = min(float(self.limit.burst), left + max(0.0, now - before) * self.limit.per_second)
        taken = left >= 1
        self._buckets[client] = (left - taken, now)
        while len(self._buckets) > MAX_TRACKED_CLIENTS:
            self._buckets.popitem(last=False)
        return 0.0 if taken else (1 - left) / self.limit.per_second


class AccessControl:
    """The rule of one server."""

    def __init__(
        self, api_key: str | None, rate: RateLimit | None, *, open_paths: frozenset[str] = frozenset()
    ) -> None:
        """`open_paths` are answered without a key, as often as everything else. `rate`: none for no limit."""
        self._key_digest = None if api_key is None else _hash_key(api_key)
        self._open_paths = open_paths
        self._limiter = None if rate is None else RateLimiter(rate)
        self._unauthenticated_limiter = RateLimiter(UNAUTHENTICATED_RATE)

    def check_request(self, scope: Scope) -> AccessDenial | None:
        """Why a request is not answered; none when it is."""
        headers, client = Headers(scope=scope), client_network(scope)
        if scope["path"] in self._open_paths:
            return _check_rate(self._limiter, (client, "open"))
        why = self._authenticate(scope, headers)
        if why is not None:
            return _check_rate(self._unauthenticated_limiter, client) or why
        return _check_rate(self._limiter, client)

    def _authenticate(self, scope: Scope, headers: Headers) -> AccessDenial | None:
        if self._key_digest is not None:
            key = _parse_key(headers.get("authorization", ""))
            # digests are of one length and compared in constant time: neither tells how much of a guess was right
            if key is not None and hmac.compare_digest(_hash_key(key), self._key_digest):
                return None
            message = "the API key is wrong" if key else "this server needs an API key: Authorization: Bearer KEY"
            return AccessDenial(401, message)
        client = scope.get("client")
        forwarded = any(name in headers for name in ("forwarded", "x-forwarded-for", "x-real-ip"))
        if client is None or not is_loopback(client[0]) or forwarded:
            return AccessDenial(403, "without an API key this server answers its own machine only; start it with one")
        # a page whose domain was pointed at this machine would otherwise speak with the user's rights
        host = headers.get("host", "")
        host = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        if not is_loopback(host):
            return AccessDenial(403, f"host {host[:100]} is not this machine; ask for 127.0.0.1 or localhost")
        return None


def check_binding(option: str, host: str, key: str | None) -> None:
    """Refuse to let other machines in without a key, or with one that they could guess."""
    if is_loopback(host):
        return
    if key is None:
        raise ConfigError(
            f"{option} {host} would let other machines in without a key; give a key by file, or listen on 127.0.0.1"
        )
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigError(
            f"{option} {host} lets other machines guess at a key of {len(key)} characters; make it {MIN_KEY_LENGTH} or more,"
            " for example with: openssl rand -hex 24"
        )


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    host = host.strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def client_network(scope: Scope) -> str:
    """Who is counted as one client: an address, or in IPv6 the network that one subscriber has."""
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:
        return "unknown"
    return str(address) if address.version == 4 else str(ipaddress.ip_network(f"{address}/64", strict=False))


def _parse_key(header: str) -> str | None:
    """The key in a header: as programs send it, or as a browser sends what was typed as a password."""
    scheme, _, sent = header.partition(" ")
    if scheme.lower() == "bearer":
        return sent.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(sent.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return None
    return None


def _check_rate(limiter: RateLimiter | None, client: object) -> AccessDenial | None:
    wait = 0.0 if limiter is None else limiter.seconds_until_allowed(client)
    if limiter is None or not wait:
        return None
    limit = f"{limiter.limit.per_second:g} requests a second from one client"
    return AccessDenial(429, f"this server answers {limit}; try again later", retry_after=math.ceil(wait))


def _hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
