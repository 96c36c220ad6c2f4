"""Discover the members of a pool: a fixed list, a DNS name, a watched file, or a list served over HTTP.

A source returns the URLs of all members or raises `DiscoveryError` with the reason; it never returns a partial list. An
empty list is an error as well: a file read while it is rewritten, a service that restarts and a name without addresses
all look like that, and members that are really gone are found by their health checks. Sources keep no state; the pool
keeps the last valid list.
"""

import asyncio
import ipaddress
import json
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import httpx

from keel.config.engine import PoolSettings
from keel.errors import ConfigError, KeelError

MAX_BYTES = 1_000_000
"""Maximum size of a file or response; anything longer is not a list of members."""
MAX_MEMBERS = 4096
HTTP_TIMEOUT = 30.0
"""Seconds for the request of an HTTP list."""


class DiscoveryError(KeelError):
    """The members could not be discovered."""


class MemberSource(Protocol):
    """A source of the members' URLs."""

    dynamic: bool
    """Whether the members may change, so that the source must be polled."""

    async def fetch_urls(self) -> list[str]:
        """Return the URLs of all members without duplicates."""


class StaticList:
    """A fixed list of members."""

    dynamic = False

    def __init__(self, urls: Iterable[str]) -> None:
        try:
            self.urls = validate_urls(urls)
        except DiscoveryError as error:
            raise ConfigError(f"pool.urls: {error}") from None

    async def fetch_urls(self) -> list[str]:
        return self.urls


class DnsName:
    """A DNS name `host:port`; each of its addresses is a member.

    If the name has IPv4 and IPv6 addresses only the IPv4 ones are used: both lead to the same servers.
    """

    dynamic = True

    def __init__(self, name: str) -> None:
        host, colon, port = name.rpartition(":")
        self.host = host.removeprefix("[").removesuffix("]")
        if not (colon and self.host and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise ConfigError(f'pool.dns = "{one_line(name)}" is not host:port, such as "engines.internal:8000"')
        if "/" in host or (":" in host and not host.startswith("[")):
            raise ConfigError(f'pool.dns = "{one_line(name)}" must be host:port only, such as "engines.internal:8000"')
        self.port = int(port)

    async def fetch_urls(self) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            results = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise DiscoveryError(f"{self.host} has no addresses: {one_line(error)}") from None
        addresses = sorted(
            {ipaddress.ip_address(str(result[4][0]).partition("%")[0]) for result in results}, key=_by_family
        )
        family = min((address.version for address in addresses), default=4)
        hosts = [f"[{ip}]" if ip.version == 6 else str(ip) for ip in addresses if ip.version == family]
        return validate_urls(f"http://{host}:{self.port}" for host in hosts)


class WatchedFile:
    """A file with one URL per line; empty lines and lines that start with # are skipped.

    Replace the file by renaming a complete one over it: a file written in place may be read half-written.
    """

    dynamic = True

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    async def fetch_urls(self) -> list[str]:
        return await asyncio.to_thread(self._read)

    def _read(self) -> list[str]:
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise DiscoveryError(f"{one_line(self.path)} cannot be read: {one_line(error.strerror or error)}") from None
        if len(data) > MAX_BYTES:
            raise DiscoveryError(f"{one_line(self.path)} has more than {MAX_BYTES:,} bytes; write one URL per line")
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise DiscoveryError(f"{one_line(self.path)} is not UTF-8 text; write one URL per line") from None
        lines = [line.strip() for line in text.splitlines()]
        try:
            return validate_urls(line for line in lines if line and not line.startswith("#"))
        except DiscoveryError as error:
            raise DiscoveryError(f"{one_line(self.path)}: {error}") from None


class HttpList:
    """A JSON list of URLs served over HTTP. The members' API key is not sent: this is a different server."""

    dynamic = True

    def __init__(self, url: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        try:
            self.url = validate_url(url)
        except DiscoveryError as error:
            raise ConfigError(f"pool.discovery_url: {error}") from None
        self._display_url = one_line(self.url.partition("?")[0], 120)  # the query may hold a token
        self._transport = transport

    async def fetch_urls(self) -> list[str]:
        data = bytearray()
        try:
            async with (
                asyncio.timeout(HTTP_TIMEOUT),
                httpx.AsyncClient(transport=self._transport, timeout=HTTP_TIMEOUT) as client,
                client.stream("GET", self.url, headers={"accept": "application/json"}) as response,
            ):
                if response.status_code != 200:
                    raise DiscoveryError(
                        f"{self._display_url} returned status {response.status_code} instead of 200 and a list of URLs"
                    )
                async for chunk in response.aiter_bytes():
                    data += chunk
                    if len(data) > MAX_BYTES:
                        raise DiscoveryError(f"{self._display_url} returned more than {MAX_BYTES:,} bytes")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise DiscoveryError(
                f"{self._display_url} did not respond: {one_line(error) or type(error).__name__}"
            ) from None
        try:
            urls = json.loads(data)
        except (ValueError, RecursionError):
            raise DiscoveryError(f"{self._display_url} did not return JSON: {one_line(data[:60])}") from None
        if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
            raise DiscoveryError(f'{self._display_url} must return a list of URLs, such as ["http://10.0.0.1:8000"]')
        try:
            return validate_urls(urls)
        except DiscoveryError as error:
            raise DiscoveryError(f"{self._display_url}: {error}") from None


def make_source(settings: PoolSettings) -> MemberSource:
    """Return the source that the settings select."""
    if settings.dns:
        return DnsName(settings.dns)
    if settings.file:
        return WatchedFile(settings.file)
    if settings.discovery_url:
        return HttpList(settings.discovery_url)
    return StaticList(settings.urls)


def validate_urls(urls: Iterable[str]) -> list[str]:
    """Return the URLs without duplicates, or raise if one is invalid or there is none."""
    unique = list(dict.fromkeys(validate_url(url).rstrip("/") for url in urls))
    for url in unique:
        if "?" in url or "#" in url:
            raise DiscoveryError(
                f'"{one_line(url, 120)}" has a query or fragment; a member is a base URL, such as "http://10.0.0.1:8000"'
            )
    if not unique:
        raise DiscoveryError("the list has no members")
    if len(unique) > MAX_MEMBERS:
        raise DiscoveryError(f"{len(unique)} members exceed the limit of {MAX_MEMBERS}")
    return unique


def validate_url(url: str) -> str:
    """Return a URL, or raise if it is not http(s) with a host and without user and password."""
    shown = one_line(url, 120)
    example = 'use a URL such as "http://10.0.0.1:8000"'
    if one_line(url, 2000) != url or " " in url or "\\" in url:
        raise DiscoveryError(f'"{shown}" is not a URL; {example}')
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise DiscoveryError(f'"{shown}" is not a URL; {example}')
    if "@" in parts.netloc:
        # the URL holds a secret and is not shown
        raise DiscoveryError(
            f"the URL of {parts.hostname} has a user or password in it; remove it and set pool.api_key_file"
        )
    return url


def one_line(text: object, limit: int = 200) -> str:
    """Return untrusted text on one line, truncated and without control characters, so that it is safe to display."""
    decoded = text.decode("utf-8", "replace") if isinstance(text, bytes | bytearray) else str(text)
    line = " ".join("".join(c if c.isprintable() else " " for c in decoded[: 4 * limit]).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _by_family(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[int, int]:
    return address.version, int(address)
