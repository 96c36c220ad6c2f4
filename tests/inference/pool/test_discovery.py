"""Member discovery: each source returns all members or an error, and never a partial list."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keel.config import PoolSettings
from keel.errors import ConfigError
from keel.inference.pool.discovery import (
    MAX_BYTES,
    DiscoveryError,
    DnsName,
    HttpList,
    StaticList,
    WatchedFile,
    make_source,
    one_line,
    validate_urls,
)


def fetch(source: Any) -> list[str]:
    return asyncio.run(source.fetch_urls())


def http_list(handler: Any, url: str = "http://registry/members") -> HttpList:
    return HttpList(url, transport=httpx.MockTransport(handler))


def test_settings_select_the_source() -> None:
    assert isinstance(make_source(PoolSettings(urls=["http://a"])), StaticList)
    assert isinstance(make_source(PoolSettings(dns="a:1")), DnsName)
    assert isinstance(make_source(PoolSettings(file="a")), WatchedFile)
    assert isinstance(make_source(PoolSettings(discovery_url="http://a")), HttpList)


def test_only_a_static_list_is_not_polled() -> None:
    assert not StaticList(["http://a"]).dynamic
    assert DnsName("a:1").dynamic and WatchedFile("a").dynamic and HttpList("http://a").dynamic


# URLs


def test_members_are_listed_in_order_without_duplicates() -> None:
    assert validate_urls(["http://b:1/", "https://a", "http://b:1", "http://[::1]:8000/v1"]) == [
        "http://b:1",
        "https://a",
        "http://[::1]:8000/v1",
    ]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a:8000",
        "ftp://a",
        "http://",
        "http://a:99999",
        "http://a:0",
        "http://a b",
        "http://a\n",
        "http://a\x1b[31m",
        "http://\u202ea",
        "http://[::1",
        "file:///etc/passwd",
        "http://a?x=1",
        "http://a#b",
        "http://a\\b",
    ],
)
def test_an_invalid_url_is_an_error_with_an_example(url: str) -> None:
    with pytest.raises(DiscoveryError, match=r"http://10\.0\.0\.1:8000") as error:
        validate_urls(["http://good", url])
    assert str(error.value).isprintable()


def test_a_password_in_a_url_is_an_error_and_not_shown() -> None:
    with pytest.raises(DiscoveryError, match=r"pool\.api_key") as error:
        validate_urls(["http://me:secret@host:1"])
    assert "secret" not in str(error.value)


def test_a_static_list_is_validated_on_construction() -> None:
    assert fetch(StaticList(["http://a/"])) == ["http://a"]
    with pytest.raises(ConfigError, match=r'pool\.urls: "a:1" is not a URL'):
        StaticList(["a:1"])


@given(st.text() | st.binary())
@example("\x1b]0;title\x07[bold]")
@example("a" * 10_000)
def test_one_line_returns_one_printable_line(text: str | bytes) -> None:
    line = one_line(text)
    assert len(line) <= 200
    assert line.isprintable()
    assert one_line(line) == line


# DNS


def set_addresses(monkeypatch: pytest.MonkeyPatch, *ips: str) -> None:
    """Let the DNS name resolve to these addresses."""

    def getaddrinfo(host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        assert host == "engines.internal"
        return [(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ips]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_each_address_of_a_name_is_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    set_addresses(monkeypatch, "10.0.0.10", "10.0.0.9", "10.0.0.10")
    assert fetch(DnsName("engines.internal:8000")) == ["http://10.0.0.9:8000", "http://10.0.0.10:8000"]


def test_ipv4_is_preferred_if_a_name_has_both_families(monkeypatch: pytest.MonkeyPatch) -> None:
    set_addresses(monkeypatch, "fd00::1", "10.0.0.1")
    assert fetch(DnsName("engines.internal:8000")) == ["http://10.0.0.1:8000"]
    set_addresses(monkeypatch, "fd00::2", "fe80::1%eth0")
    assert fetch(DnsName("engines.internal:8000")) == ["http://[fd00::2]:8000", "http://[fe80::1]:8000"]


def test_an_ip_address_can_be_the_name() -> None:
    assert fetch(DnsName("127.0.0.1:80")) == ["http://127.0.0.1:80"]
    assert fetch(DnsName("[::1]:80")) == ["http://[::1]:80"]


@pytest.mark.parametrize(
    "name", ["", "host", "host:", ":80", "host:0", "host:65536", "host:x", "http://host:80", "::1"]
)
def test_a_name_without_a_valid_port_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r'such as "engines\.internal:8000"'):
        DnsName(name)


@pytest.mark.parametrize("error", [socket.gaierror(-2, "Name or service not known"), UnicodeError("label too long")])
def test_an_unknown_name_is_an_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(DiscoveryError, match=r"engines\.internal has no addresses"):
        fetch(DnsName("engines.internal:8000"))


# files


def test_a_file_has_one_url_per_line(tmp_path: Path) -> None:
    file = tmp_path / "members"
    file.write_text("\ufeff# engines\n\n  http://a:1  \nhttp://b:2\r\nhttp://a:1\n")
    assert fetch(WatchedFile(str(file))) == ["http://a:1", "http://b:2"]


def test_a_file_is_reread(tmp_path: Path) -> None:
    file = tmp_path / "members"
    source = WatchedFile(str(file))
    with pytest.raises(DiscoveryError, match="No such file"):
        fetch(source)
    file.write_text("http://a\n")
    assert fetch(source) == ["http://a"]
    file.write_text("http://b\n")
    assert fetch(source) == ["http://b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the list has no members"),
        (b"# no members\n", "the list has no members"),
        (b"http://a\nhttp//b\n", '"http//b" is not a URL'),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"http://a\n" * MAX_BYTES, "has more than 1,000,000 bytes"),
        (b"".join(b"http://a:1/%d\n" % i for i in range(5000)), "5000 members exceed the limit of 4096"),
    ],
)
def test_an_invalid_file_is_an_error_and_not_a_partial_list(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "members"
    file.write_bytes(content)
    with pytest.raises(DiscoveryError, match=message) as error:
        fetch(WatchedFile(str(file)))
    assert str(file) in str(error.value)


def test_a_folder_instead_of_a_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryError, match="Is a directory"):
        fetch(WatchedFile(str(tmp_path)))


# HTTP lists


def test_an_http_list_is_read_without_the_members_key() -> None:
    requests: list[httpx.Request] = []

    def respond(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200, json=["http://a:1/", "http://b:2"])

    assert fetch(http_list(respond)) == ["http://a:1", "http://b:2"]
    assert "authorization" not in requests[0].headers


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(500, text="oops"), "returned status 500 instead of 200"),
        (httpx.Response(302, headers={"location": "http://elsewhere"}), "returned status 302 instead of 200"),
        (httpx.Response(200, text="<html>\x1b[31m"), "did not return JSON: <html>"),
        (httpx.Response(200, text="[" * 100_000), "did not return JSON"),
        (httpx.Response(200, json={"urls": []}), "must return a list of URLs"),
        (httpx.Response(200, json=["http://a", 3]), "must return a list of URLs"),
        (httpx.Response(200, json=[]), "the list has no members"),
        (httpx.Response(200, json=["a"]), '"a" is not a URL'),
        (httpx.Response(200, content=b" " * (MAX_BYTES + 1)), "more than 1,000,000 bytes"),
    ],
)
def test_an_invalid_response_is_an_error_and_not_a_partial_list(response: httpx.Response, message: str) -> None:
    with pytest.raises(DiscoveryError, match=message) as error:
        fetch(http_list(lambda _: response))
    assert str(error.value).startswith("http://registry/members")
    assert str(error.value).isprintable()


def test_an_http_list_that_does_not_respond_is_an_error() -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectTimeout("")

    with pytest.raises(DiscoveryError, match="did not respond: ConnectTimeout"):
        fetch(http_list(fail))


def test_a_token_in_the_discovery_url_is_not_shown() -> None:
    source = http_list(lambda _: httpx.Response(403), "http://registry/members?token=secret")
    with pytest.raises(DiscoveryError, match=r"^http://registry/members returned status 403") as error:
        fetch(source)
    assert "secret" not in str(error.value)


def test_a_discovery_url_is_validated_on_construction() -> None:
    with pytest.raises(ConfigError, match=r"pool\.discovery_url"):
        HttpList("registry:80")


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=4), max_leaves=8))
def test_any_response_is_a_list_of_urls_or_an_error(payload: Any) -> None:
    try:
        urls = fetch(http_list(lambda _: httpx.Response(200, text=json.dumps(payload))))
    except DiscoveryError:
        return
    assert urls and all(url.startswith("http") for url in urls)
