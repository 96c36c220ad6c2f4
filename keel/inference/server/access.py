"""Access rules shared by every Keel server: who may send requests, and how many per second.

Guarantees that the API key is compared in constant time, that a server without a key serves neither other machines nor
web pages through a browser on this machine, that forwarding headers are never trusted, and that no client exceeds the
rate limit. The rules do not depend on what a request asks for.
"""

import base64
import binascii
import hashlib
import hmac
import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope

from keel.errors import ConfigError

MIN_KEY_LENGTH = 16
"""Minimum length of a key that other machines may try to guess; 16 letters and digits cannot be searched."""
MAX_TRACKED_CLIENTS = 4096
"""Clients with a rate-limit bucket; above this number the least recently seen one is forgotten."""
FORWARDING_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip")


@dataclass(frozen=True)
class RateLimit:
    """Limit on the requests of one client."""

    per_second: float
    """Average rate."""
    burst: int
    """Requests allowed in a burst after a pause."""


@dataclass(frozen=True)
class AccessDenial:
    """Error response to a request that is not allowed."""

    status: int
    message: str
    retry_after: int | None = None
    """Seconds after which the client may retry."""


class RateLimiter:
    """Token bucket per client."""

    def __init__(self, limit: RateLimit, clock: Callable[[], float] = time.monotonic) -> None:
        if limit.per_second <= 0 or limit.burst < 1:
            raise ConfigError(
                f"a rate limit of {limit.per_second:g} requests per second with a burst of {limit.burst} allows no"
                " request; set both above 0"
            )
        self.limit, self._clock = limit, clock
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def seconds_until_allowed(self, client: Hashable) -> float:
        """Count a request; return 0 if it is allowed now, else the seconds until the next one is."""
        now = self._clock()
        burst = float(self.limit.burst)
        tokens, updated_at = self._buckets.pop(client, (burst, now))
        tokens = min(burst, tokens + max(0.0, now - updated_at) * self.limit.per_second)
        allowed = tokens >= 1
        self._buckets[client] = (tokens - allowed, now)
        while len(self._buckets) > MAX_TRACKED_CLIENTS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - tokens) / self.limit.per_second


class AccessControl:
    """Access rules of one server."""

    def __init__(
        self, api_key: str | None, rate: RateLimit | None, *, open_paths: frozenset[str] = frozenset()
    ) -> None:
        """Create the rules.

        Args:
            api_key: Key that clients must send; None serves this machine only.
            rate: Limit per client; None for no limit.
            open_paths: Paths served without a key and to any machine.
        """
        self._key_digest = None if api_key is None else _hash_key(api_key)
        self._open_paths = open_paths
        self._limiter = None if rate is None else RateLimiter(rate)

    def check_request(self, scope: Scope) -> AccessDenial | None:
        """Return why a request is denied, or None if it is allowed.

        Every request counts against the client's limit. Open paths, denied requests and allowed requests have separate
        buckets of the same size: clients without the key behind a shared address (a proxy, NAT) cannot use up the
        limit of those with it, and health checks keep working for a client at its limit.
        """
        if scope["path"] in self._open_paths:
            denial, bucket = None, "open"
        else:
            denial = self._authenticate(scope, Headers(scope=scope))
            bucket = "allowed" if denial is None else "denied"
        return self._check_rate((client_network(scope), bucket)) or denial

    def _authenticate(self, scope: Scope, headers: Headers) -> AccessDenial | None:
        if self._key_digest is not None:
            key = _parse_key(headers.get("authorization", ""))
            # digests have equal length and are compared in constant time, so timing reveals nothing about the key
            if key is not None and hmac.compare_digest(_hash_key(key), self._key_digest):
                return None
            message = "invalid API key" if key else "this server requires an API key: Authorization: Bearer KEY"
            return AccessDenial(401, message)
        client = scope.get("client")
        forwarded = any(name in headers for name in FORWARDING_HEADERS)
        if client is None or not is_loopback(client[0]) or forwarded:
            return AccessDenial(
                403, "this server has no API key and accepts requests from its own machine only; start it with a key"
            )
        # DNS rebinding: a web page whose domain resolves to this machine would otherwise act with the user's rights
        host = headers.get("host", "")
        host = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        if not is_loopback(host):
            return AccessDenial(403, f"host {host[:100]} is not this machine; use 127.0.0.1 or localhost")
        return None

    def _check_rate(self, client: Hashable) -> AccessDenial | None:
        if self._limiter is None:
            return None
        wait = self._limiter.seconds_until_allowed(client)
        if not wait:
            return None
        limit = f"{self._limiter.limit.per_second:g} requests per second per client"
        return AccessDenial(429, f"rate limit of {limit} exceeded; retry later", retry_after=math.ceil(wait))


def check_binding(option: str, host: str, key: str | None) -> None:
    """Raise `ConfigError` if other machines could connect without a key or with one they could guess."""
    if is_loopback(host):
        return
    if key is None:
        raise ConfigError(
            f"{option} {host} would let other machines connect without a key; pass a key file, or listen on 127.0.0.1"
        )
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigError(
            f"{option} {host} lets other machines guess a key of {len(key)} characters; use {MIN_KEY_LENGTH} or more,"
            " for example from: openssl rand -hex 24"
        )


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback address of this machine."""
    host = host.strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def client_network(scope: Scope) -> str:
    """Return the unit that is counted as one client: an IPv4 address, or the /64 network of an IPv6 address.

    A subscriber usually gets a whole /64 network, so counting single IPv6 addresses would not limit anyone.
    """
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:
        return "unknown"
    return str(address) if address.version == 4 else str(ipaddress.ip_network(f"{address}/64", strict=False))


def _parse_key(header: str) -> str | None:
    """Return the key in an Authorization header: a bearer token, or the password a browser sends as Basic."""
    scheme, _, credentials = header.partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(credentials.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return None
    return None


def _hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
