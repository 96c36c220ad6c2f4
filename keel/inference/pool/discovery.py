"""Where the members of a pool are: a list, a DNS name, a watched file, or a list served over HTTP.

A source answers with the URLs of all members, or raises `DiscoveryError` which says what is wrong; it never answers
with half a list, and an empty one is an error: a file seen while it is rewritten, a service that restarts and a name
that lost its addresses all look like that, and members that are really gone are found out by their health. It
remembers nothing; who asks keeps the last good answer.
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
"""Of a file or an answer; a longer one is no list of members."""
MAX_MEMBERS = 4096
HTTP_TIMEOUT = 30.0
"""Seconds for an HTTP list."""


class DiscoveryError(KeelError):
    """Members that could not be found out."""


class MemberSource(Protocol):
    """What knows the members."""

    dynamic: bool
    """Whether it is worth asking again."""

    async def fetch_urls(self) -> list[str]:
        """The URLs of all members, each once."""


class StaticList:
    """Members that were given."""

    dynamic = False

    def __init__(self, urls: Iterable[str]) -> None:
        try:
            self.urls = validate_urls(urls)
        except DiscoveryError as error:
            raise ConfigError(f"pool.urls: {error}") from None

    async def fetch_urls(self) -> list[str]:
        return self.urls


class DnsName:
    """Every address of `host:port` is a member.

    Where a name has addresses of both families only the IPv4 ones are taken: they are the same servers twice.
    """

    dynamic = True

    def __init__(self, name: str) -> None:
        host, colon, port = name.rpartition(":")
        self.host = host.removeprefix("[").removesuffix("]")
        if not (colon and self.host and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise ConfigError(
                f'pool.dns = "{one_line(name)}" is not a name and a port, such as "engines.internal:8000"'
            )
        if "/" in host or (":" in host and not host.startswith("[")):
            raise ConfigError(f'pool.dns = "{one_line(name)}" must be host:port only, such as "engines.internal:8000"')
        self.port = int(port)

    async def fetch_urls(self) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise DiscoveryError(f"{self.host} has no addresses: {one_line(error)}") from None
        addresses = sorted({ipaddress.ip_address(str(item[4][0]).partition("%")[0]) for item in found}, key=_by_family)
        family = min((address.version for address in addresses), default=4)
        hosts = [f"[{each}]" if each.version == 6 else str(each) for each in addresses if each.version == family]
        return validate_urls(f"http://{host}:{self.port}" for host in hosts)


class WatchedFile:
    """One URL a line; empty lines and those that begin with # do not count.

    Replace it by renaming a finished file over it: a file that is written in place may be read half done.
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
            raise DiscoveryError(f"{one_line(self.path)} has more than {MAX_BYTES:,} bytes; give one URL a line")
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise DiscoveryError(f"{one_line(self.path)} is not text; give one URL a line") from None
        lines = [line.strip() for line in text.splitlines()]
        try:
            return validate_urls(line for line in lines if line and not line.startswith("#"))
        except DiscoveryError as error:
            raise DiscoveryError(f"{one_line(self.path)}: {error}") from None


class HttpList:
    """A JSON list of URLs at an address. The members' API key is not sent there: it is another server."""

    dynamic = True

    def __init__(self, url: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        try:
            self.url = validate_url(url)
        except DiscoveryError as error:
            raise ConfigError(f"pool.discovery_url: {error}") from None
        self._display_url = one_line(self.url.partition("?")[0], 120)  # what follows may be a token
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
                        f"{self._display_url} answered {response.status_code} instead of 200 and a list of URLs"
                    )
                async for piece in response.aiter_bytes():
                    data += piece
                    if len(data) > MAX_BYTES:
                        raise DiscoveryError(f"{self._display_url} answered with more than {MAX_BYTES:,} bytes")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise DiscoveryError(
                f"{self._display_url} did not answer: {one_line(error) or type(error).__name__}"
            ) from None
        try:
            urls = json.loads(data)
        except (ValueError, RecursionError):
            raise DiscoveryError(f"{self._display_url} did not answer with JSON: {one_line(data[:60])}") from None
        if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
            raise DiscoveryError(
                f'{self._display_url} must answer with a list of URLs, such as ["http://10.0.0.1:8000"]'
            )
        try:
            return validate_urls(urls)
        except DiscoveryError as error:
            raise DiscoveryError(f"{self._display_url}: {error}") from None


def make_source(settings: PoolSettings) -> MemberSource:
    """The source that the settings name."""
    if settings.dns:
        return DnsName(settings.dns)
    if settings.file:
        return WatchedFile(settings.file)
    if settings.discovery_url:
        return HttpList(settings.discovery_url)
    return StaticList(settings.urls)


def validate_urls(urls: Iterable[str]) -> list[str]:
    """A list of members as given, each once: all of them usable and at least one, or an error."""
    found = list(dict.fromkeys(validate_url(url).rstrip("/") for url in urls))
    for url in found:
        if "?" in url or "#" in url:
            raise DiscoveryError(
                f'"{one_line(url, 120)}" has a query; a member is only a place, like "http://10.0.0.1:8000"'
            )
    if not found:
        raise DiscoveryError("there is no member in it")
    if len(found) > MAX_MEMBERS:
        raise DiscoveryError(f"{len(found)} members are more than {MAX_MEMBERS}")
    return found


def validate_url(url: str) -> str:
    """A URL of http or https, with a host and without user and password."""
    shown = one_line(url, 120)
    example = 'give one like "http://10.0.0.1:8000"'
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
        # not shown: it holds a secret
        raise DiscoveryError(
            f"the URL of {parts.hostname} has a user or password in it; leave it out, and use pool.api_key_file"
        )
    return url


def one_line(text: object, limit: int = 200) -> str:
    """Text of others on one line, without control characters and cut, so that it can be shown anywhere."""
    words = text.decode("utf-8", "replace") if isinstance(text, bytes | bytearray) else str(text)
    line = " ".join("".join(c if c.isprintable() else " " for c in words[: 4 * limit]).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _by_family(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[int, int]:
    return address.version, int(address)
