"""Where members are: each source gives all of them or says what is wrong, and never half a list."""

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


def find(source: Any) -> list[str]:
    return asyncio.run(source.fetch_urls())


def http_list(handler: Any, url: str = "http://registry/members") -> HttpList:
    return HttpList(url, transport=httpx.MockTransport(handler))


def test_settings_choose_the_source() -> None:
    assert isinstance(make_source(PoolSettings(urls=["http://a"])), StaticList)
    assert isinstance(make_source(PoolSettings(dns="a:1")), DnsName)
    assert isinstance(make_source(PoolSettings(file="a")), WatchedFile)
    assert isinstance(make_source(PoolSettings(discovery_url="http://a")), HttpList)


def test_only_a_static_list_is_asked_once() -> None:
    assert not StaticList(["http://a"]).dynamic
    assert DnsName("a:1").dynamic and WatchedFile("a").dynamic and HttpList("http://a").dynamic


# URLs


def test_members_are_listed_once_and_in_order() -> None:
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
def test_what_is_no_url_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(DiscoveryError, match=r"http://10\.0\.0\.1:8000") as refused:
        validate_urls(["http://good", url])
    assert str(refused.value).isprintable()


def test_a_password_in_a_url_is_refused_and_not_shown() -> None:
    with pytest.raises(DiscoveryError, match=r"pool\.api_key") as refused:
        validate_urls(["http://me:secret@host:1"])
    assert "secret" not in str(refused.value)


def test_a_static_list_is_checked_when_it_is_made() -> None:
    assert find(StaticList(["http://a/"])) == ["http://a"]
    with pytest.raises(ConfigError, match=r'pool\.urls: "a:1" is not a URL'):
        StaticList(["a:1"])


@given(st.text() | st.binary())
@example("\x1b]0;title\x07[bold]")
@example("a" * 10_000)
def test_plain_text_is_one_printable_line(text: str | bytes) -> None:
    line = one_line(text)
    assert len(line) <= 200
    assert line.isprintable()
    assert one_line(line) == line


# DNS


def addresses(monkeypatch: pytest.MonkeyPatch, *found: str) -> None:
    def getaddrinfo(host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        assert host == "engines.internal"
        return [
            (socket.AF_INET6 if ":" in each else socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port))
            for each in found
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_every_address_of_a_name_is_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses(monkeypatch, "10.0.0.10", "10.0.0.9", "10.0.0.10")
    assert find(DnsName("engines.internal:8000")) == ["http://10.0.0.9:8000", "http://10.0.0.10:8000"]


def test_of_two_families_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses(monkeypatch, "fd00::1", "10.0.0.1")
    assert find(DnsName("engines.internal:8000")) == ["http://10.0.0.1:8000"]
    addresses(monkeypatch, "fd00::2", "fe80::1%eth0")
    assert find(DnsName("engines.internal:8000")) == ["http://[fd00::2]:8000", "http://[fe80::1]:8000"]


def test_addresses_are_names_too() -> None:
    assert find(DnsName("127.0.0.1:80")) == ["http://127.0.0.1:80"]
    assert find(DnsName("[::1]:80")) == ["http://[::1]:80"]


@pytest.mark.parametrize(
    "name", ["", "host", "host:", ":80", "host:0", "host:65536", "host:x", "http://host:80", "::1"]
)
def test_a_name_without_a_port_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r'such as "engines\.internal:8000"'):
        DnsName(name)


@pytest.mark.parametrize("error", [socket.gaierror(-2, "Name or service not known"), UnicodeError("label too long")])
def test_a_name_that_is_not_known_is_an_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(DiscoveryError, match=r"engines\.internal has no addresses"):
        find(DnsName("engines.internal:8000"))


# files


def test_a_file_has_one_url_a_line(tmp_path: Path) -> None:
    file = tmp_path / "members"
    file.write_text("\ufeff# engines\n\n  http://a:1  \nhttp://b:2\r\nhttp://a:1\n")
    assert find(WatchedFile(str(file))) == ["http://a:1", "http://b:2"]


def test_a_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "members"
    source = WatchedFile(str(file))
    with pytest.raises(DiscoveryError, match="No such file"):
        find(source)
    file.write_text("http://a\n")
    assert find(source) == ["http://a"]
    file.write_text("http://b\n")
    assert find(source) == ["http://b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the list has no members"),
        (b"# nobody\n", "the list has no members"),
        (b"http://a\nhttp//b\n", '"http//b" is not a URL'),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"http://a\n" * MAX_BYTES, "has more than 1,000,000 bytes"),
        (b"".join(b"http://a:1/%d\n" % i for i in range(5000)), "5000 members exceed the limit of 4096"),
    ],
)
def test_a_bad_file_is_refused_whole(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "members"
    file.write_bytes(content)
    with pytest.raises(DiscoveryError, match=message) as refused:
        find(WatchedFile(str(file)))
    assert str(file) in str(refused.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryError, match="Is a directory"):
        find(WatchedFile(str(tmp_path)))


# HTTP lists


def test_a_list_is_read_from_an_address() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json=["http://a:1/", "http://b:2"])

    assert find(http_list(answer)) == ["http://a:1", "http://b:2"]
    assert "authorization" not in seen[0].headers


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
def test_a_bad_answer_is_refused_whole(response: httpx.Response, message: str) -> None:
    with pytest.raises(DiscoveryError, match=message) as refused:
        find(http_list(lambda _: response))
    assert str(refused.value).startswith("http://registry/members")
    assert str(refused.value).isprintable()


def test_an_address_that_does_not_answer_is_an_error() -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectTimeout("")

    with pytest.raises(DiscoveryError, match="did not respond: ConnectTimeout"):
        find(http_list(fail))


def test_a_token_in_the_address_is_not_shown() -> None:
    source = http_list(lambda _: httpx.Response(403), "http://registry/members?token=secret")
    with pytest.raises(DiscoveryError, match=r"^http://registry/members returned status 403") as refused:
        find(source)
    assert "secret" not in str(refused.value)


def test_an_address_is_checked_when_the_source_is_made() -> None:
    with pytest.raises(ConfigError, match=r"pool\.discovery_url"):
        HttpList("registry:80")


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=4), max_leaves=8))
def test_any_answer_is_a_list_of_urls_or_an_error(answer: Any) -> None:
    try:
        found = find(http_list(lambda _: httpx.Response(200, text=json.dumps(answer))))
    except DiscoveryError:
        return
    assert found and all(url.startswith("http") for url in found)
