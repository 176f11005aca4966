"""A server's /metrics, asked for and read: `URL -> text -> hotsplit's numbers, per rank`.

The server is somebody else's and may be anything: what it sends is bounded in size and time, and whatever is not
Prometheus text with our names in it is one error that says what was found instead.
"""

from __future__ import annotations

import http.client
import math
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import IO, Any, Final

from prometheus_client.parser import text_string_to_metric_families

from hotsplit.cli.console import printable
from hotsplit.cli.wire import KeptLines
from hotsplit.errors import ConfigError, HotsplitError
from hotsplit.metrics import METRICS

MOST_BYTES: Final = 64 * 2**20
"""Of an answer, unpacked: a thousand times what vLLM sends."""
DEFAULT_PORT: Final = 8000
"""vLLM's own, where an address has neither scheme nor port."""

_MOST: Final = 2.0**63
"""Of a number that a rank may show; sums of such are finite, too."""
_LONGEST: Final = 300
"""Characters of an error that may quote the server."""
_CHUNK: Final = 2**16
_STARTED: Final = "process_start_time_seconds"
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_NO_AUTHORITY: Final = (2, 18, 19, 20, 21)
"""OpenSSL's codes for a certificate that nobody known has signed; others are of its name and its dates."""
_REFUSED: Final = (401, 403, 407)
_PASSING: Final = (408, 425, 429)
"""Answers that ask for patience, as those from 500 on do."""

Numbers = Mapping[str, float]
"""A rank's numbers: name without "hotsplit_" and "_total", and behind a "/" the label: "tokens/decode", "hot_bytes"."""


class ScrapeError(HotsplitError):
    """A server's metrics could not be had.

    Args:
        what: The address.
        got: What came instead.
        wanted: What would have been right.
        do: The next step.
        is_final: Whether asking again is of no use.
    """

    def __init__(
        self, what: str, *, got: str, wanted: str | None = None, do: str | None = None, is_final: bool = False
    ) -> None:
        # Part of it may be the server's: it is to obey no terminal, and to stay a line.
        super().__init__(what, got=printable(got)[:_LONGEST], wanted=wanted, do=do)
        self.is_final = is_final


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Whom to ask, and how."""

    url: str
    """Of /metrics, as `metrics_url` makes it."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """More of the request."""
    timeout_s: float = 5.0
    """For the whole answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankNumbers:
    """What one rank shows."""

    numbers: Numbers
    """By short name; what is not finite, or beyond any count, is left out."""
    info: Mapping[str, str]
    """Labels of hotsplit_info: version, plan_hash, mode, backend; empty without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One answer."""

    ranks: Mapping[int, RankNumbers]
    """By rank, at least one."""
    started_s: float | None
    """When the answering process started, as it says, in seconds since 1970; None where it does not say."""


def metrics_url(text: str) -> str:
    """The full address of /metrics: scheme, port and path may be left out, an API's base (.../v1) will do.

    Args:
        text: As somebody types it.

    Raises:
        ConfigError: It is no address, or one that would send a password.

    >>> metrics_url("gpu-box"), metrics_url("https://host/vllm/v1")
    ('http://gpu-box:8000/metrics', 'https://host/vllm/metrics')
    """
    given = text.strip()
    has_scheme = "://" in given
    try:
        parts = urllib.parse.urlsplit(given if has_scheme else f"http://{given}")
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        # Where a port should be may be part of a password.
        raise _bad_address(text, got="a port or address that is none" if "@" in text else str(error).lower()) from None
    if parts.username is not None or parts.password is not None:
        # The address is shown; what is in it would be too.
        raise ConfigError("the URL", got="a user name or password", do="give --header 'Authorization: Basic ...'")
    if parts.scheme not in ("http", "https"):
        raise _bad_address(text, got=f"scheme {parts.scheme!r}")
    if not host:
        raise _bad_address(text, got="no host")
    if not given.isascii() or not given.isprintable() or " " in given:
        raise _bad_address(text, got="characters that no address has")
    if any(not 0 < len(label) < 64 for label in host.removesuffix(".").split(".")):
        raise _bad_address(text, got="a host name that none can have")
    if port is None and not has_scheme:
        port = DEFAULT_PORT
    netloc = (f"[{host}]" if ":" in host else host) + ("" if port is None else f":{port}")
    return urllib.parse.urlunsplit((parts.scheme, netloc, _path_of(parts), parts.query, ""))


def _path_of(parts: urllib.parse.SplitResult) -> str:
    """The path, with /metrics at its end; one with a query is somebody's own, and stays."""
    path = parts.path.rstrip("/")
    if parts.query or path.endswith("/metrics"):
        return parts.path
    return f"{path.removesuffix('/v1')}/metrics"


def _bad_address(text: str, *, got: str) -> ConfigError:
    # Before an @ somebody's password may stand, whatever else is wrong.
    shown = re.sub(r"(^|://).*@", r"\1...@", text, flags=re.DOTALL)
    return ConfigError(f"URL {shown!r}", got=got, wanted="an address, as in http://127.0.0.1:8000/metrics")


def header_of(text: str) -> tuple[str, str]:
    """A header's name and value.

    Args:
        text: "Name: value".

    Raises:
        ConfigError: It is not of that form. The value is not shown: it may be a key.
    """
    name, colon, value = text.partition(":")
    name, value = name.strip(), value.strip()
    is_name = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    if not colon or not is_name or not value.isascii() or not value.isprintable():
        raise ConfigError("--header", got="something else", wanted="'Name: value', as in 'Authorization: Bearer KEY'")
    return name, value


def scrape(target: Target) -> Reading:
    """Ask once.

    Args:
        target: Whom.

    Raises:
        ScrapeError: There is no answer, or one without our metrics.
    """
    return parse(_fetch(target), url=target.url)


def parse(text: str, *, url: str) -> Reading:
    """Our numbers out of Prometheus text.

    Args:
        text: The body of an answer.
        url: For the message.

    Raises:
        ScrapeError: The text is something else, has none of our metrics, or one of them twice.
    """
    if text.lstrip()[:1] in ("<", "{", "["):
        raise ScrapeError(url, got="a web page or JSON", wanted="Prometheus text", do=_IS_IT_VLLM, is_final=True)
    numbers: dict[int, dict[str, float]] = {}
    infos: dict[int, Mapping[str, str]] = {}
    started_s: float | None = None
    for sample in _samples(text, url=url):
        if sample.name == _STARTED:
            started_s = sample.value if math.isfinite(sample.value) else None
        elif sample.name == "hotsplit_info":
            rank = _rank_of(sample, url=url)
            infos[rank] = {key: value for key, value in sample.labels.items() if key != "rank"}
            numbers.setdefault(rank, {})
        elif sample.name in METRICS:
            of_rank, key = numbers.setdefault(_rank_of(sample, url=url), {}), _key_of(sample)
            if key in of_rank:
                do = "ask one server, not what gathers several"
                raise ScrapeError(url, got=f"{sample.name} of one rank twice", do=do, is_final=True)
            of_rank[key] = sample.value
    if not numbers:
        raise _without_ours(text, url=url)
    return Reading(
        ranks={
            rank: RankNumbers(
                numbers={key: value for key, value in of_rank.items() if abs(value) <= _MOST},
                info=infos.get(rank, {}),
            )
            for rank, of_rank in sorted(numbers.items())
        },
        started_s=started_s,
    )


_IS_IT_VLLM: Final = "give the address of vLLM's own server, as in http://HOST:8000"


def _samples(text: str, *, url: str) -> Iterator[Any]:
    """Samples that matter; lines of others are not even parsed."""
    # A label may hold what str.splitlines() takes for the end of a line.
    lines = [line for line in text.split("\n") if line.startswith(("hotsplit_", _STARTED))]
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            yield from family.samples
    # The parser promises no error of its own: what a broken line raises depends on where it breaks.
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ScrapeError(url, got=f"a line that is no metric: {error}", wanted="Prometheus text") from error


def _rank_of(sample: Any, *, url: str) -> int:
    rank = sample.labels.get("rank", "")
    if not re.fullmatch("[0-9]{1,6}", rank):
        raise ScrapeError(url, got=f"{sample.name} of rank {rank!r}", wanted="a number", is_final=True)
    return int(rank)


def _key_of(sample: Any) -> str:
    """The short name and the value of the label beside rank."""
    label = "".join(f"/{sample.labels.get(name, '')}" for name in METRICS[sample.name].labels)
    return str(sample.name).removeprefix("hotsplit_").removesuffix("_total") + label


def _without_ours(text: str, *, url: str) -> ScrapeError:
    others = len({line.split("{")[0].split(" ")[0] for line in text.splitlines() if line and not line.startswith("#")})
    do = "was the server started with a HOTSPLIT_ variable, or by hotsplit serve? one whose experts all fit has none"
    return ScrapeError(url, got=f"no hotsplit_ metrics among {others} names", do=do, is_final=True)


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows a server to another path of its own; headers, a key among them, go to no other host."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        # Behind a proxy req.host is the proxy.
        here, there = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if (there.scheme, there.netloc.lower()) != (here.scheme, here.netloc.lower()):
            fp.close()
            do = "log in there or give its address, if that is the server"
            raise ScrapeError(
                req.full_url, got=f"a redirection to {there.scheme}://{there.netloc}", do=do, is_final=True
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)

    def http_error_302(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage
    ) -> Any:
        try:
            return super().http_error_302(req, fp, code, msg, headers)
        except ValueError as error:
            fp.close()
            raise ScrapeError(req.full_url, got="a redirection to what is no address", is_final=True) from error

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _fetch(target: Target) -> str:
    """The text behind an address, or the end of patience.

    The library's timeout is for each byte, and names are looked up without any: so a thread asks, and this one waits.
    """
    lines, answer = KeptLines(), Future[str]()

    def ask() -> None:
        try:
            answer.set_result(_asked(target, lines=lines))
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            answer.set_exception(error)

    threading.Thread(target=ask, name="hotsplit-scrape", daemon=True).start()
    try:
        return answer.result(timeout=target.timeout_s)
    # ValueError: a length or a size of the server's that is no number, on some of Python's releases.
    except (OSError, http.client.HTTPException, zlib.error, ValueError) as error:
        raise _reason(error, target=target) from error
    finally:
        if not answer.done():
            lines.hang_up()


def _asked(target: Target, *, lines: KeptLines) -> str:
    """Ask, and read the answer."""
    request = urllib.request.Request(target.url, headers={"Accept": "text/plain", "Accept-Encoding": "gzip"})  # noqa: S310 - metrics_url lets http and https through, nothing else
    for name, value in target.headers.items():
        request.add_header(name, value)
    handlers: list[urllib.request.BaseHandler] = [_SameHost(), lines]
    if urllib.parse.urlsplit(target.url).hostname in _LOOPBACK:
        handlers.append(urllib.request.ProxyHandler({}))  # a proxy's own loopback is another one
    end_s = time.monotonic() + target.timeout_s
    with urllib.request.build_opener(*handlers).open(request, timeout=target.timeout_s) as answer:
        if "html" in answer.headers.get_content_type():
            raise ScrapeError(target.url, got="a web page", wanted="Prometheus text", do=_IS_IT_VLLM, is_final=True)
        return _body(answer, target=target, end_s=end_s).decode("utf-8", errors="replace")


def _body(answer: Any, *, target: Target, end_s: float) -> bytes:
    """What was sent, unpacked, as long as it is neither too large nor too slow."""
    is_packed = answer.headers.get("Content-Encoding", "").lower() in ("gzip", "x-gzip", "deflate")
    unpack = zlib.decompressobj(zlib.MAX_WBITS | 32) if is_packed else None
    body = bytearray()
    while chunk := answer.read1(_CHUNK):
        body += chunk if unpack is None else unpack.decompress(chunk, MOST_BYTES + 1 - len(body))
        if len(body) > MOST_BYTES:
            got = f"an answer of more than {MOST_BYTES >> 20} MiB"
            raise ScrapeError(target.url, got=got, do=_IS_IT_VLLM, is_final=True)
        if time.monotonic() > end_s:
            raise TimeoutError
    # read1() takes the end of the connection for the end of the answer.
    if answer.length or (unpack is not None and not unpack.eof):
        raise http.client.IncompleteRead(bytes(body))
    return bytes(body)


def _reason(error: Exception, *, target: Target) -> ScrapeError:
    """What an exception of the library means to whoever typed the address."""
    if isinstance(error, urllib.error.HTTPError):
        with error:
            return _status(error.code, url=target.url)
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        got = f"no whole answer in {target.timeout_s:g} s"
        return ScrapeError(target.url, got=got, do="look whether the server is busy, or raise --timeout")
    if isinstance(cause, socket.gaierror):
        is_final = cause.errno != socket.EAI_AGAIN  # the name server is away, not the name
        return ScrapeError(target.url, got="an unknown host name", do="check the name", is_final=is_final)
    if isinstance(cause, ssl.SSLCertVerificationError):
        got = f"a certificate that is not trusted ({cause.verify_message})"
        do = "use the name that it is for, and see that it has not expired"
        if cause.verify_code in _NO_AUTHORITY:
            do = "add its authority: SSL_CERT_FILE=CA.pem"
        return ScrapeError(target.url, got=got, do=do, is_final=True)
    if isinstance(cause, ssl.SSLError):
        return ScrapeError(target.url, got="no TLS", do="try http://", is_final=True)
    if isinstance(cause, ConnectionRefusedError):
        return ScrapeError(target.url, got="connection refused", do="see whether the server is up, and this its port")
    if isinstance(cause, (ConnectionError, http.client.IncompleteRead)):
        return ScrapeError(target.url, got="a connection that broke off")
    if isinstance(cause, (http.client.HTTPException, zlib.error, ValueError)):
        do = "check the port; where TLS is spoken, write https://"
        return ScrapeError(target.url, got="an answer that is not HTTP", do=do, is_final=True)
    return ScrapeError(target.url, got=str(getattr(cause, "strerror", None) or cause).lower())


def _status(code: int, *, url: str) -> ScrapeError:
    """What an answer other than 200 means."""
    got = f"{code} {http.client.responses.get(code, 'with an unknown meaning')}"
    if code in _REFUSED:
        do = "give the key, if it takes one: --header 'Authorization: Bearer KEY'"
    elif code == 404:
        do = "vLLM has its metrics at /metrics of the API's port"
    else:
        do = "ask again later, or look into the server's log"
    is_passing = code >= 500 or code in _PASSING
    return ScrapeError(url, got=got, wanted="200 OK", do=do, is_final=not is_passing)
