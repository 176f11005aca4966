"""What `hotsplit top` asks and understands: any address that people type, any server that may be behind it."""

from __future__ import annotations

import contextlib
import gzip
import re
import socket
import ssl
import threading

import pytest

from cli.metrics_server import Answers, serving, snapshot, text_of
from hotsplit.cli import scrape as scrape_module
from hotsplit.cli.scrape import ScrapeError, Target, header_of, metrics_url, parse, scrape
from hotsplit.errors import ConfigError
from patience import LIMIT_S

URL = "http://host:8000/metrics"


@pytest.fixture
def server():
    with serving(Answers(body=text_of(snapshot()).encode())) as answers:
        yield answers


def ask(server, *, timeout_s=LIMIT_S, **headers):
    return scrape(Target(url=f"{server.url}/metrics", headers=headers, timeout_s=timeout_s))


def refusal(server, **options):
    with pytest.raises(ScrapeError) as caught:
        ask(server, **options)
    assert str(caught.value).startswith(f"{server.url}/metrics: got ")
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("host", "http://host:8000/metrics"),
        ("host:9000", "http://host:9000/metrics"),
        ("localhost:8000/metrics", "http://localhost:8000/metrics"),
        ("localhost:8000/metrics/", "http://localhost:8000/metrics/"),
        ("http://host", "http://host/metrics"),
        ("https://host:8443/", "https://host:8443/metrics"),
        (" http://host:8000/v1 ", "http://host:8000/metrics"),
        ("http://host:8000/v1/", "http://host:8000/metrics"),
        ("https://gate/team/vllm", "https://gate/team/vllm/metrics"),
        ("http://host:1/federate?match[]=x", "http://host:1/federate?match[]=x"),
        ("HTTP://Host:8000#top", "http://host:8000/metrics"),
        ("[::1]:8000", "http://[::1]:8000/metrics"),
        ("127.0.0.1", "http://127.0.0.1:8000/metrics"),
    ],
)
def test_an_address_is_completed(typed, url):
    assert url == metrics_url(typed)


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        ("", "got no host"),
        ("http://", "got no host"),
        ("host:port", "port"),
        ("host:99999", "port"),
        ("::1", "port"),
        ("[::1", "ipv6"),
        ("file:///etc/passwd", "scheme 'file'"),
        ("ftp://host/metrics", "scheme 'ftp'"),
        ("two words", "characters"),
        ("host/a\x07b", "characters"),
        ("h\u00f6st", "characters"),
        ("http://a..b", "a host name that none can have"),
        ("..", "a host name that none can have"),
        (f"{'a' * 64}.com", "a host name that none can have"),
    ],
)
def test_what_is_no_address_is_refused(typed, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        metrics_url(typed)


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        ("http://me:geheim@host:8000", "--header"),
        ("http://me:geheim@host:99999", "port"),
        ("me:geheim@host:port", "port"),
        ("http://me:geheim/x@host", "port"),
        ("http://me:geheim@[::1", "wanted an address"),
        ("http://me:geheim@", "--header"),
        ("ftp://me:geheim@host", "--header"),
    ],
)
def test_a_password_in_an_address_is_refused_and_not_repeated(typed, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        metrics_url(typed)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "no colon", ": value", "a b: c", "Key: two\nlines", "Key: t\u00fcr"])
def test_what_is_no_header_is_refused(text):
    with pytest.raises(ConfigError, match="wanted 'Name: value'"):
        header_of(text)


def test_a_header_reaches_the_server_and_a_key_is_not_shown(server):
    name, value = header_of("Authorization:  Bearer geheim")
    ask(server, **{name: value})
    assert "Bearer geheim" == server.asked[-1]["authorization"]
    server.status = 401
    failure = refusal(server, **{name: value})
    assert failure.is_final
    assert "geheim" not in str(failure)


def test_every_number_of_every_rank_is_read():
    text = text_of(snapshot(0), snapshot(3, steps=5))
    reading = parse(f"process_start_time_seconds 1.5e+09\n{text}", url=URL)
    assert [0, 3] == list(reading.ranks)
    assert 1.5e9 == reading.started_s
    for rank, steps in ((0, 100), (3, 5)):
        numbers = reading.ranks[rank].numbers
        assert 24 == len(numbers)
        assert (steps, 2 * steps, 10) == tuple(numbers[key] for key in ("steps", "tokens/decode", "tokens/prefill"))
        assert (7, 2, 0) == tuple(numbers[f"swaps/{result}"] for result in ("done", "refused", "failed"))
        assert (2**30, 0.8) == (numbers["hot_bytes"], numbers["hit_ratio_window"])
        assert {"version": "0.1.0", "plan_hash": "ab12" * 16, "mode": "dynamic", "backend": "cpu-twin"} == dict(
            reading.ranks[rank].info
        )


def test_names_that_are_not_ours_are_not_even_parsed():
    reading = parse(f'vllm:broken{{" 1\nhotsplit_later_name{{rank="0"}} 4\n{text_of(snapshot())}', url=URL)
    assert "later_name" not in reading.ranks[0].numbers


def test_what_is_not_finite_is_left_out():
    text = 'hotsplit_steps_total{rank="0"} 3\nhotsplit_drift_ratio{rank="0"} NaN\nhotsplit_hot_bytes{rank="0"} +Inf\n'
    assert {"steps": 3.0} == parse(text, url=URL).ranks[0].numbers


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no hotsplit_ metrics among 0 names"),
        (
            '# HELP a b\nvllm:a{x="y"} 1\nvllm:a{x="z"} 1\nvllm:b 2\n',
            "no hotsplit_ metrics among 2 names; was the server",
        ),
        ("<html>login</html>", "a web page"),
        ('{"detail": "x"}', "a web page or JSON"),
        ('hotsplit_steps_total{rank="0"} many\n', "a line that is no metric"),
        ('hotsplit_steps_total{rank="0\n', "a line that is no metric"),
        ("hotsplit_steps_total 4\n", "rank ''"),
        ('hotsplit_steps_total{rank="-1"} 4\n', "rank '-1'"),
        (f'hotsplit_steps_total{{rank="{"1" * 5000}"}} 4\n', "rank '1111"),
        ('hotsplit_steps_total{rank="1000000000"} 4\n', "rank '1000000000'"),
        ('hotsplit_steps_total{rank="0",instance="a"} 4\nhotsplit_steps_total{rank="0",instance="b"} 4\n', "twice"),
    ],
)
def test_a_text_without_our_metrics_is_one_error_that_says_what_it_is(text, reason):
    with pytest.raises(ScrapeError, match=re.escape(reason)) as caught:
        parse(text, url=URL)
    assert str(caught.value).startswith(f"{URL}: got ")


def test_what_a_server_says_obeys_no_terminal_and_stays_a_line():
    with pytest.raises(ScrapeError) as caught:
        parse(f'hotsplit_steps_total{{rank="0\x1b[2J{"x" * 1000}"}} 4\n', url=URL)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "deflate"])
def test_a_packed_answer_is_unpacked(server, encoding):
    import zlib

    plain = server.body
    server.headers["Content-Encoding"] = encoding
    server.body = zlib.compress(plain) if encoding == "deflate" else gzip.compress(plain)
    assert 100 == ask(server).ranks[0].numbers["steps"]
    assert "gzip" in server.asked[-1]["accept-encoding"]


def test_a_packed_answer_that_is_none_and_one_that_is_cut_off_are_errors(server):
    server.headers["Content-Encoding"] = "gzip"
    assert "not HTTP" in str(refusal(server))
    server.body = gzip.compress(server.body)[:-20]
    assert "broke off" in str(refusal(server))


@pytest.mark.parametrize(
    ("status", "reason", "is_final"),
    [
        (401, "got 401 Unauthorized; wanted 200 OK; give the key", True),
        (403, "got 403 Forbidden; wanted 200 OK; give the key", True),
        (404, "got 404 Not Found", True),
        (418, "got 418", True),
        (429, "got 429 Too Many Requests", False),
        (500, "got 500 Internal Server Error", False),
        (503, "got 503 Service Unavailable", False),
        (599, "got 599 with an unknown meaning", False),
    ],
)
def test_a_status_other_than_ok_says_what_to_do(server, status, reason, is_final):
    server.status = status
    failure = refusal(server)
    assert reason in str(failure)
    assert is_final == failure.is_final


def test_a_web_page_is_known_by_its_type(server):
    server.headers["Content-Type"] = "text/html; charset=utf-8"
    failure = refusal(server)
    assert failure.is_final
    assert "a web page" in str(failure)


def test_another_path_of_the_same_server_is_followed_and_another_server_is_not(server):
    server.status, server.headers["Location"] = 302, f"{server.url}/metrics/"
    with pytest.raises(ScrapeError, match="302"):  # in a circle
        ask(server)
    assert {"/metrics", "/metrics/"} == {request["path"] for request in server.asked}
    with serving(Answers()) as other:
        server.headers["Location"] = f"{other.url}/login"
        failure = refusal(server, Authorization="Bearer geheim")
        assert [] == other.asked
    assert f"a redirection to {other.url}" in str(failure)
    assert failure.is_final


def test_an_answer_that_is_too_large_is_not_read_to_its_end(server, monkeypatch):
    monkeypatch.setattr(scrape_module, "MOST_BYTES", 2**20)
    server.body = b"x" * (2**20 + 1)
    assert "more than 1 MiB" in str(refusal(server))
    server.headers["Content-Encoding"] = "gzip"
    server.body = gzip.compress(bytes(50 * 2**20))
    assert "more than 1 MiB" in str(refusal(server))


def test_an_endless_answer_ends_at_the_bound(server, monkeypatch):
    monkeypatch.setattr(scrape_module, "MOST_BYTES", 2**20)

    def pour(wire):
        wire.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
        with contextlib.suppress(OSError):
            while True:
                wire.write(b"# " + b"x" * 65536 + b"\n")

    server.instead = pour
    assert "more than 1 MiB" in str(refusal(server))


@pytest.fixture
def over():
    """Set when a test is over: until then a server, or a name server, may keep whoever asks it waiting for ever."""
    event = threading.Event()
    yield event
    event.set()


def dripping(head, *, until):
    """An answer that begins so, and goes on byte by byte."""

    def drip(wire):
        wire.write(head)
        with contextlib.suppress(OSError):
            while not until.wait(0.05):
                wire.write(b"a")
                wire.flush()

    return drip


def test_an_answer_in_drops_and_none_at_all_end_at_the_timeout(server, over):
    drip = dripping(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n", until=over)
    for server.instead in (drip, lambda wire: over.wait()):
        failure = refusal(server, timeout_s=0.3)
        assert "no whole answer in 0.3 s" in str(failure)
        assert not failure.is_final


@pytest.mark.parametrize(
    ("sent", "reason", "is_final"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not HTTP", True),
        (b"\x15\x03\x01\x00\x02\x02\x16", "not HTTP", True),
        (b"", "broke off", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\nhotsplit", "broke off", False),
    ],
)
def test_a_server_that_speaks_something_else_is_told(server, sent, reason, is_final):
    server.instead = lambda wire: wire.write(sent)
    failure = refusal(server)
    assert reason in str(failure)
    assert is_final == failure.is_final


def test_nobody_there_is_no_reason_to_give_up(server):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/metrics"
        with pytest.raises(ScrapeError, match="connection refused; see whether") as caught:
            scrape(Target(url=url))
    assert not caught.value.is_final


def test_an_unknown_host_and_plain_http_where_tls_was_asked_for_are(server):
    with pytest.raises(ScrapeError, match="unknown host name") as caught:
        scrape(Target(url="http://no-such-host.invalid/metrics"))
    assert caught.value.is_final
    with pytest.raises(ScrapeError, match="no TLS; try http://") as caught:
        scrape(Target(url=f"{server.url}/metrics".replace("http:", "https:")))
    assert caught.value.is_final


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert 100 == ask(server).ranks[0].numbers["steps"]


def test_headers_in_drops_and_a_name_that_is_looked_up_for_ever_end_at_the_timeout(server, over, monkeypatch):
    server.instead = dripping(b"HTTP/1.1 200 OK\r\nX-Slow: ", until=over)
    assert "no whole answer in 0.3 s" in str(refusal(server, timeout_s=0.3))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait())
    assert not refusal(server, timeout_s=0.3).is_final


def test_a_name_server_that_is_away_is_no_reason_to_give_up(server, monkeypatch):
    def away(*_, **__):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", away)
    assert not refusal(server).is_final


@pytest.mark.parametrize("place", ["http://[bad/", "//[::1"])
def test_a_redirection_to_what_is_no_address_is_an_error(server, place):
    for server.status in (301, 302, 303, 307, 308):
        server.headers["Location"] = place
        failure = refusal(server)
        assert failure.is_final
        assert "no address" in str(failure)


def test_behind_a_proxy_the_server_counts_and_not_the_proxy(server, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", server.url)
    target = Target(url="http://gpu-box:8000/metrics", headers={"Authorization": "Bearer geheim"})
    server.status, server.headers["Location"] = 302, "http://gpu-box:8000/metrics/"
    with pytest.raises(ScrapeError, match="302"):  # followed, in a circle
        scrape(target)
    assert {"http://gpu-box:8000/metrics", "http://gpu-box:8000/metrics/"} == {one["path"] for one in server.asked}
    server.asked.clear()
    server.headers["Location"] = f"{server.url}/metrics"
    with pytest.raises(ScrapeError, match="a redirection to"):
        scrape(target)
    assert 1 == len(server.asked)


def test_labels_and_numbers_may_be_anything():
    text = 'hotsplit_info{rank="0",mode="a\x85b\u2028c"} 1\nprocess_start_time_seconds NaN\n'
    reading = parse(f'{text}hotsplit_hot_bytes{{rank="0"}} 1e308\nhotsplit_steps_total{{rank="0"}} 1e+06\n', url=URL)
    assert {"mode": "a\x85b\u2028c"} == reading.ranks[0].info
    assert {"steps": 1e6} == reading.ranks[0].numbers
    assert None is reading.started_s


@pytest.mark.parametrize(
    ("code", "message", "do"),
    [
        (18, "self-signed certificate", "SSL_CERT_FILE"),
        (62, "Hostname mismatch", "the name"),
        (10, "expired", "expired"),
    ],
)
def test_a_bad_certificate_is_told_with_a_cure_that_fits(server, monkeypatch, code, message, do):
    def refuse(*_, **__):
        error = ssl.SSLCertVerificationError(1, "certificate verify failed")
        error.verify_code, error.verify_message = code, message
        raise error

    monkeypatch.setattr(socket, "create_connection", refuse)
    failure = refusal(server)
    assert failure.is_final
    assert message in str(failure)
    assert do in str(failure).partition("; ")[2]
