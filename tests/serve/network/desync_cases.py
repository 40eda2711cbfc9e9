"""Requests on which two parsers may disagree about where the next one starts.

A case is the bytes before the marker, a well-formed request. SERVED cases must be handled in full, the marker too; of
REFUSED ones nothing from the first fault on may be; of EITHER both are right, and the parsers must only agree. Where
RFC 9112 lets a recipient read something that h11 never does, the case has the same requests in a form that h11 reads.
"""

from __future__ import annotations

from typing import NamedTuple

SERVED, REFUSED, EITHER = "served", "refused", "either"
SMUGGLED = b"GET /v2/smuggled HTTP/1.1\r\nHost: h\r\n\r\n"
GET = b"GET /v2/a HTTP/1.1\r\nHost: h\r\n"
POST = b"POST /v2/a HTTP/1.1\r\nHost: h\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"
LAST = b"0\r\n\r\n"


class Case(NamedTuple):
    """Bytes before the marker, and how they must be handled."""

    name: str
    data: bytes
    wanted: str
    plain: bytes | None = None  # what h11 is given instead


def _bodies() -> list[Case]:
    """Lengths and codings that disagree."""
    abc = b"\r\nabc"
    found = []
    for name, lines, wanted in [
        ("one length", b"Content-Length: 3\r\n", SERVED),
        ("length with leading zeros", b"Content-Length: 0003\r\n", EITHER),
        ("two equal lengths", b"Content-Length: 3\r\nContent-Length: 3\r\n", EITHER),
        ("two lengths", b"Content-Length: 3\r\nContent-Length: 4\r\n", REFUSED),
        ("two lengths, the first 0", b"Content-Length: 0\r\nContent-Length: 3\r\n", REFUSED),
        ("two lengths, other case", b"Content-Length: 3\r\ncontent-length: 0\r\n", REFUSED),
        ("a list of equal lengths", b"Content-Length: 3, 3\r\n", EITHER),
        ("a list of lengths", b"Content-Length: 3, 4\r\n", REFUSED),
        ("signed +", b"Content-Length: +3\r\n", REFUSED),
        ("signed -", b"Content-Length: -3\r\n", REFUSED),
        ("-0", b"Content-Length: -0\r\n", REFUSED),
        ("hexadecimal", b"Content-Length: 0x3\r\n", REFUSED),
        ("a fraction", b"Content-Length: 3.0\r\n", REFUSED),
        ("an exponent", b"Content-Length: 3e0\r\n", REFUSED),
        ("underscore", b"Content-Length: 0_3\r\n", REFUSED),
        ("empty length", b"Content-Length:\r\n", REFUSED),
        ("blank length", b"Content-Length:  \r\n", REFUSED),
        ("spaces around", b"Content-Length: \t 3 \t \r\n", SERVED),
        ("space within", b"Content-Length: 0 3\r\n", REFUSED),
        ("vertical tab", b"Content-Length: \x0b3\r\n", REFUSED),
        ("NUL behind", b"Content-Length: 3\x00\r\n", REFUSED),
        ("other digits", "Content-Length: ٣\r\n".encode(), REFUSED),
        ("beyond 64 bits", b"Content-Length: 18446744073709551619\r\n", REFUSED),
        ("64 bits", b"Content-Length: 18446744073709551615\r\n", REFUSED),
        ("length by an underscore name", b"Content_Length: 3\r\nContent-Length: 0\r\n", EITHER),
        ("folded length", b"Content-Length:\r\n 3\r\n", EITHER),
        ("length folded onto another", b"Content-Length: 0\r\n 3\r\n", REFUSED),
        ("length with a semicolon", b"Content-Length: 3;x\r\n", REFUSED),
        ("quoted length", b'Content-Length: "3"\r\n', REFUSED),
        ("length behind a bare CR", b"X: a\rContent-Length: 3\r\n", REFUSED),
        ("length behind a bare LF", b"X: a\nContent-Length: 3\r\n", REFUSED),
    ]:
        found.append(Case(name, POST + lines + abc, wanted))
    found.append(Case("length of GET", GET + b"Content-Length: 3\r\n" + abc, SERVED))
    found.append(
        Case("body that is a request", POST + b"Content-Length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED, SERVED)
    )
    found.append(Case("body longer than its length", POST + b"Content-Length: 3\r\n\r\nabcd", REFUSED))
    found.append(Case("CRLF behind a body", POST + b"Content-Length: 3\r\n\r\nabc\r\n", SERVED))
    found.append(Case("zeros behind a body", POST + b"Content-Length: 3\r\n\r\nabc\0\0", REFUSED))
    found.append(Case("body without a length", POST + b"\r\n" + b"abc", REFUSED))
    return found


def _codings() -> list[Case]:
    whole = b"\r\n3\r\nabc\r\n" + LAST
    found = [Case("chunked", CHUNKED + whole, SERVED)]
    for name, lines, wanted in [
        ("chunked in capitals", b"Transfer-Encoding: CHUNKED\r\n", SERVED),
        ("chunked and a length", b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", REFUSED),
        ("chunked, then a length", b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", REFUSED),
        ("chunked and length 0", b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n", REFUSED),
        ("identity", b"Transfer-Encoding: identity\r\n", REFUSED),
        ("identity and a length", b"Transfer-Encoding: identity\r\nContent-Length: 3\r\n", REFUSED),
        ("chunked, identity", b"Transfer-Encoding: chunked, identity\r\n", REFUSED),
        ("identity, chunked", b"Transfer-Encoding: identity, chunked\r\n", REFUSED),
        ("gzip, chunked", b"Transfer-Encoding: gzip, chunked\r\n", REFUSED),
        ("chunked twice in a list", b"Transfer-Encoding: chunked, chunked\r\n", REFUSED),
        ("chunked in two headers", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", REFUSED),
        (
            "chunked and identity in two headers",
            b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
            REFUSED,
        ),
        (
            "identity and chunked in two headers",
            b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n",
            REFUSED,
        ),
        ("xchunked", b"Transfer-Encoding: xchunked\r\n", REFUSED),
        ("chunkedx", b"Transfer-Encoding: chunkedx\r\n", REFUSED),
        ("chunked and a space", b"Transfer-Encoding: chunked \r\n", EITHER),
        ("tab before chunked", b"Transfer-Encoding:\tchunked\r\n", EITHER),
        ("vertical tab before chunked", b"Transfer-Encoding: \x0bchunked\r\n", REFUSED),
        ("no space before chunked", b"Transfer-Encoding:chunked\r\n", SERVED),
        ("quoted chunked", b'Transfer-Encoding: "chunked"\r\n', REFUSED),
        ("chunked with a parameter", b"Transfer-Encoding: chunked;q=1\r\n", REFUSED),
        ("comma before chunked", b"Transfer-Encoding: ,chunked\r\n", EITHER),
        ("comma behind chunked", b"Transfer-Encoding: chunked,\r\n", EITHER),
        ("folded chunked", b"Transfer-Encoding:\r\n chunked\r\n", EITHER),
        ("folded behind chunked", b"Transfer-Encoding: chunked\r\n , identity\r\n", REFUSED),
        ("empty coding and a length", b"Transfer-Encoding:\r\nContent-Length: 3\r\n", REFUSED),
        ("space before the colon", b"Transfer-Encoding : chunked\r\n", REFUSED),
        ("tab before the colon", b"Transfer-Encoding\t: chunked\r\n", REFUSED),
        ("space before the name", b"X: y\r\n Transfer-Encoding: chunked\r\n", EITHER),
        ("space before the first name", b" Transfer-Encoding: chunked\r\n", EITHER),
        ("underscore in the name", b"Transfer_Encoding: chunked\r\n", REFUSED),
        ("NUL in the value", b"Transfer-Encoding: chun\0ked\r\n", REFUSED),
        ("NUL in the name", b"Transfer\0Encoding: chunked\r\n", REFUSED),
        ("bare CR before it", b"X: y\rTransfer-Encoding: chunked\r\n", REFUSED),
        ("bare LF before it", b"X: y\nTransfer-Encoding: chunked\r\n", REFUSED),
    ]:
        found.append(Case(f"coding: {name}", POST + lines + whole, wanted))
    old = POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\nConnection: keep-alive\r\n"
    found.append(Case("chunked in HTTP/1.0", old + whole, REFUSED))
    found.append(Case("chunked GET", CHUNKED.replace(b"POST", b"GET") + whole, SERVED))
    return found


def _chunks() -> list[Case]:
    found = []
    for name, chunks, wanted in [
        ("hexadecimal digits", b"A\r\n0123456789\r\na\r\n0123456789\r\n" + LAST, SERVED),
        ("leading zeros", b"0003\r\nabc\r\n000\r\n\r\n", EITHER),
        ("0x", b"0x3\r\nabc\r\n" + LAST, REFUSED),
        ("signed +", b"+3\r\nabc\r\n" + LAST, REFUSED),
        ("signed -", b"-3\r\nabc\r\n" + LAST, REFUSED),
        ("no digit", b"g\r\nabc\r\n" + LAST, REFUSED),
        ("empty size", b"\r\nabc\r\n" + LAST, REFUSED),
        ("only an extension", b";a\r\nabc\r\n" + LAST, REFUSED),
        ("sixteen digits", b"ffffffffffffffff\r\nabc\r\n" + LAST, REFUSED),
        ("seventeen digits", b"10000000000000003\r\nabc\r\n" + LAST, REFUSED),
        ("forty digits", b"1" + b"0" * 38 + b"3\r\nabc\r\n" + LAST, REFUSED),
        ("space before the size", b" 3\r\nabc\r\n" + LAST, REFUSED),
        ("space behind the size", b"3 \r\nabc\r\n" + LAST, EITHER),
        ("tab behind the size", b"3\t\r\nabc\r\n" + LAST, EITHER),
        ("underscore", b"0_3\r\nabc\r\n" + LAST, REFUSED),
        ("comma", b"3,3\r\nabc\r\n" + LAST, REFUSED),
        ("bare LF behind the size", b"3\nabc\r\n" + LAST, REFUSED),
        ("bare CR behind the size", b"3\rabc\r\n" + LAST, REFUSED),
        ("extension", b"3;a=b\r\nabc\r\n" + LAST, SERVED),
        ("quoted extension", b'3;a="b;c"\r\nabc\r\n' + LAST, SERVED),
        ("quoted CRLF in an extension", b'3;a="\r\nabc\r\n0\r\n\r\n"\r\n' + LAST, REFUSED),
        ("extension with a bare LF", b"3;a\nabc\r\n" + LAST, REFUSED),
        ("extension with a bare CR", b"3;a\rabc\r\n" + LAST, REFUSED),
        ("extension with a bare CR within", b"3;a\rb\r\nabc\r\n" + LAST, EITHER),
        ("extension with NUL", b"3;a\0\r\nabc\r\n" + LAST, EITHER),
        ("extension of the last chunk with a bare LF", b"3\r\nabc\r\n0;a\n\r\n", REFUSED),
        ("TERM.EXT of the two-byte kind", b"3;\nxx\r\nabc\r\n" + LAST, REFUSED),
        ("data without CRLF", b"3\r\nabc0\r\n\r\n", REFUSED),
        ("data with a bare LF", b"3\r\nabc\n" + LAST, REFUSED),
        ("data with a bare CR", b"3\r\nabc\r" + LAST, REFUSED),
        ("data with two other bytes", b"3\r\nabcXX" + LAST, REFUSED),
        ("data longer than its size", b"3\r\nabcd\r\n" + LAST, REFUSED),
        ("data shorter than its size", b"5\r\nabc\r\n" + LAST, REFUSED),
        ("last chunk with a bare LF", b"3\r\nabc\r\n0\n\r\n", REFUSED),
        ("end with a bare LF", b"3\r\nabc\r\n0\r\n\n", REFUSED),
        ("end with a bare CR", b"3\r\nabc\r\n0\r\n\r", REFUSED),
        ("no end", b"3\r\nabc\r\n0\r\n", REFUSED),
        ("trailer", b"3\r\nabc\r\n0\r\nX-T: y\r\n\r\n", SERVED),
        ("folded trailer", b"3\r\nabc\r\n0\r\nX-T: y\r\n z\r\n\r\n", EITHER),
        ("trailer without a colon", b"3\r\nabc\r\n0\r\nX-T\r\n\r\n", REFUSED),
        ("trailer with a bare LF", b"3\r\nabc\r\n0\r\nX-T: y\n\r\n", REFUSED),
        ("trailer that is a length", b"3\r\nabc\r\n0\r\nContent-Length: 30\r\n\r\n", EITHER),
        ("trailer that is a coding", b"3\r\nabc\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n", EITHER),
        ("trailer that closes", b"3\r\nabc\r\n0\r\nConnection: close\r\n\r\n", EITHER),
        ("trailer that is a Host", b"3\r\nabc\r\n0\r\nHost: evil.example\r\n\r\n", EITHER),
        ("trailer that is a request", b"3\r\nabc\r\n0\r\n" + SMUGGLED, REFUSED),
        ("body behind the last chunk", b"3\r\nabc\r\n" + LAST + b"3\r\nabc\r\n", REFUSED),
        ("data that is a request", b"%x\r\n%b\r\n" % (len(SMUGGLED), SMUGGLED) + LAST, SERVED),
    ]:
        found.append(Case(f"chunk: {name}", CHUNKED + b"\r\n" + chunks, wanted))
    zeros, plain = b"0" * 30 + b"3\r\nabc\r\n" + LAST, b"3\r\nabc\r\n" + LAST  # h11 takes 20 digits at most
    found.append(Case("chunk: many leading zeros", CHUNKED + b"\r\n" + zeros, EITHER, CHUNKED + b"\r\n" + plain))
    return found


def _lines() -> list[Case]:
    found = []
    for name, line, wanted in [
        ("absolute target", b"GET http://h/v2/a HTTP/1.1", SERVED),
        ("absolute target of another host", b"GET http://evil.example/v2/a HTTP/1.1", EITHER),
        ("absolute target without a path", b"GET http://h HTTP/1.1", EITHER),
        ("absolute target of another scheme", b"GET ftp://h/v2/a HTTP/1.1", EITHER),
        ("authority", b"GET h:80 HTTP/1.1", EITHER),
        ("asterisk", b"OPTIONS * HTTP/1.1", EITHER),
        ("asterisk of GET", b"GET * HTTP/1.1", EITHER),
        ("CONNECT", b"CONNECT h:80 HTTP/1.1", REFUSED),
        ("two slashes", b"GET //evil.example/v2/a HTTP/1.1", EITHER),
        ("fragment", b"GET /v2/a#b HTTP/1.1", EITHER),
        ("no slash", b"GET v2/a HTTP/1.1", EITHER),
        ("query", b"GET /v2/a?b=c&d HTTP/1.1", SERVED),
        ("no target", b"GET HTTP/1.1", REFUSED),
        ("empty target", b"GET  HTTP/1.1", REFUSED),
        ("space in the target", b"GET /v2/a b HTTP/1.1", REFUSED),
        ("request in the target", b"GET /v2/a HTTP/1.1 HTTP/1.1", REFUSED),
        ("tab in the target", b"GET /v2/a\tb HTTP/1.1", REFUSED),
        ("tab behind the method", b"GET\t/v2/a HTTP/1.1", REFUSED),
        ("tab before the version", b"GET /v2/a\tHTTP/1.1", REFUSED),
        ("space behind the version", b"GET /v2/a HTTP/1.1 ", REFUSED),
        ("NUL in the target", b"GET /v2/a\0b HTTP/1.1", REFUSED),
        ("DEL in the target", b"GET /v2/a\x7fb HTTP/1.1", REFUSED),
        ("bytes above 127 in the target", b"GET /v2/\xff\xfe HTTP/1.1", REFUSED),
        ("bare CR in the target", b"GET /v2/a\rb HTTP/1.1", REFUSED),
        ("HTTP/1.2", b"GET /v2/a HTTP/1.2", EITHER),
        ("HTTP/2.0", b"GET /v2/a HTTP/2.0", REFUSED),
        ("HTTP/0.9", b"GET /v2/a HTTP/0.9", REFUSED),
        ("HTTP/1", b"GET /v2/a HTTP/1", REFUSED),
        ("HTTP/1.10", b"GET /v2/a HTTP/1.10", REFUSED),
        ("HTTP/11", b"GET /v2/a HTTP/11", REFUSED),
        ("HTTP/01.1", b"GET /v2/a HTTP/01.1", REFUSED),
        ("HTTP/1,1", b"GET /v2/a HTTP/1,1", REFUSED),
        ("http/1.1", b"GET /v2/a http/1.1", REFUSED),
        ("HTTPS/1.1", b"GET /v2/a HTTPS/1.1", REFUSED),
        ("lower-case method", b"get /v2/a HTTP/1.1", EITHER),
        ("unknown method", b"BREW /v2/a HTTP/1.1", EITHER),
        ("method with a colon", b"GET: /v2/a HTTP/1.1", REFUSED),
        ("space before the method", b" GET /v2/a HTTP/1.1", REFUSED),
        ("no version", b"GET /v2/a", REFUSED),
        ("no version and a space", b"GET /v2/a ", REFUSED),
        ("no version, HTTP/0.9's own", b"GET /", REFUSED),
        ("PRI", b"PRI * HTTP/2.0", REFUSED),
    ]:
        found.append(Case(f"line: {name}", line + b"\r\nHost: h\r\n\r\n", wanted))
    for line in ("GET /v2/a RTSP/1.1", "OPTIONS /v2/a RTSP/1.1", "SOURCE /v2/a ICE/1.1"):  # llhttp reads them as HTTP's
        data = line.encode() + b"\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"
        plain = data.replace(b"RTSP", b"HTTP").replace(b"ICE", b"HTTP")
        found.append(Case(f"line: {line}", data, EITHER, plain))
    whole = GET + b"\r\n"
    return [
        *found,
        Case("HTTP/0.9", b"GET /v2/a\r\n", REFUSED),
        Case("HTTP/0.9 with a bare LF", b"GET /v2/a\n", REFUSED),
        Case("HTTP/0.9 and a bare LF, then headers", b"GET /v2/a\nHost: h\r\n\r\n", REFUSED),
        Case("HTTP/0.9 with a body that is a request", b"POST /v2/a\nContent-Length: 38\r\n\r\n" + SMUGGLED, REFUSED),
        Case("preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", REFUSED),
        Case("CRLF before the line", b"\r\n\r\n" + whole, SERVED),
        Case("LF before the line", b"\n" + whole, EITHER),
        Case("CR before the line", b"\r" + whole, EITHER),
        Case("two spaces behind the method", whole.replace(b"GET ", b"GET  "), EITHER, whole),
        Case("two spaces before the version", whole.replace(b" HTTP", b"  HTTP"), EITHER, whole),
        Case("NUL before the line", b"\0" + whole, REFUSED),
        Case("byte order mark", b"\xef\xbb\xbf" + whole, REFUSED),
        Case("TLS hello", b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + whole, REFUSED),
        Case("line that ends with a bare LF", GET.replace(b"\r\n", b"\n", 1) + b"\r\n", REFUSED),
        Case("line that ends with a bare CR", GET.replace(b"\r\n", b"\r", 1) + b"\r\n", REFUSED),
        Case("line that ends with CR CR LF", GET.replace(b"\r\n", b"\r\r\n", 1) + b"\r\n", REFUSED),
    ]


def _headers() -> list[Case]:
    found = []
    for name, lines, wanted in [
        ("no Host", b"", REFUSED),
        ("two Hosts", b"Host: a\r\nHost: b\r\n", REFUSED),
        ("two equal Hosts", b"Host: h\r\nHost: h\r\n", REFUSED),
        ("a list of Hosts", b"Host: a, b\r\n", EITHER),
        ("empty Host", b"Host:\r\n", EITHER),
        ("empty and other Host", b"Host:\r\nHost: h\r\n", REFUSED),
        ("Host with a path", b"Host: h/v2\r\n", EITHER),
        ("obs-fold", b"Host: h\r\nX: a\r\n b\r\n", EITHER),
        ("obs-fold by a tab", b"Host: h\r\nX: a\r\n\tb\r\n", EITHER),
        ("obs-fold of the first header", b" X: a\r\nHost: h\r\n", EITHER),
        ("obs-fold of an empty line", b"Host: h\r\nX: a\r\n \r\n", EITHER),
        ("NUL in a value", b"Host: h\r\nX: a\0b\r\n", REFUSED),
        ("NUL in a name", b"Host: h\r\nX\0Y: b\r\n", REFUSED),
        ("DEL in a name", b"Host: h\r\nX\x7fY: b\r\n", REFUSED),
        ("bytes above 127 in a name", b"Host: h\r\nX\xc3\xa9: b\r\n", REFUSED),
        ("bytes above 127 in a value", b"Host: h\r\nX: \xc3\xa9\r\n", EITHER),
        ("control characters in a value", b"Host: h\r\nX: a\x01b\x1f\r\n", EITHER),
        ("bare LF", b"Host: h\nX: a\r\n", REFUSED),
        ("bare LF before an end", b"Host: h\r\nX: a\n\r\n", REFUSED),
        ("bare LFs alone", b"Host: h\nX: a\n\n", REFUSED),
        ("bare CR", b"Host: h\rX: a\r\n", REFUSED),
        ("bare CR within a value", b"Host: h\r\nX: a\rb\r\n", REFUSED),
        ("CR CR LF", b"Host: h\r\r\nX: a\r\n", REFUSED),
        ("space before the colon", b"Host: h\r\nX : a\r\n", REFUSED),
        ("space before the colon of Host", b"Host : h\r\n", REFUSED),
        ("space within a name", b"Host: h\r\nX Y: a\r\n", REFUSED),
        ("empty name", b"Host: h\r\n: a\r\n", REFUSED),
        ("no colon", b"Host: h\r\nX\r\n", REFUSED),
        ("empty value", b"Host: h\r\nX:\r\n", SERVED),
        ("colons in a value", b"Host: h\r\nX: a:b:c\r\n", SERVED),
        ("parentheses in a name", b"Host: h\r\nX(Y): a\r\n", REFUSED),
        ("a pipelined request that closes", b"Host: h\r\nConnection: close\r\n", REFUSED),
        ("close among others", b"Host: h\r\nConnection: x, Close ,y\r\n", REFUSED),
        ("close in a second header", b"Host: h\r\nConnection: keep-alive\r\nConnection: close\r\n", REFUSED),
        ("keep-alive", b"Host: h\r\nConnection: keep-alive\r\n", SERVED),
        ("Expect", b"Host: h\r\nExpect: 100-continue\r\n", SERVED),
        ("h2c", b"Host: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n", EITHER),
        ("Upgrade without Connection", b"Host: h\r\nUpgrade: h2c\r\n", EITHER),
    ]:
        found.append(Case(f"header: {name}", b"GET /v2/a HTTP/1.1\r\n" + lines + b"\r\n", wanted))
    old = GET.replace(b"1.1", b"1.0")
    offer = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    length = b"Content-Length: %d\r\n" % len(SMUGGLED)
    piece = b"%x\r\n%b\r\n" % (len(SMUGGLED), SMUGGLED) + LAST
    return [
        *found,
        Case("h2c with a body that is a request", POST + offer + length + b"\r\n" + SMUGGLED, EITHER),
        Case("h2c with a chunk that is a request", CHUNKED + offer + b"\r\n" + piece, EITHER),
        Case("h2c GET with a body that is a request", GET + offer + length + b"\r\n" + SMUGGLED, EITHER),
        Case("HEAD", b"HEAD /v2/a HTTP/1.1\r\nHost: h\r\n\r\n", SERVED),
        Case("HEAD with a body", b"HEAD /v2/a HTTP/1.1\r\nHost: h\r\n" + length + b"\r\n" + SMUGGLED, SERVED),
        Case("DELETE with a body", POST.replace(b"POST", b"DELETE") + length + b"\r\n" + SMUGGLED, SERVED),
        Case("HTTP/1.0", old + b"\r\n", REFUSED),
        Case("HTTP/1.0 that is kept", old + b"Connection: keep-alive\r\n\r\n", SERVED),
        Case("HTTP/1.0 that is kept and closed", old + b"Connection: keep-alive\r\nConnection: close\r\n\r\n", REFUSED),
        Case("HTTP/1.0 that is closed and kept", old + b"Connection: close, keep-alive\r\n\r\n", REFUSED),
        Case("HTTP/1.0 without a Host", b"GET /v2/a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", SERVED),
        Case(
            "Expect with a body that is a request",
            POST + b"Expect: 100-continue\r\n" + length + b"\r\n" + SMUGGLED,
            SERVED,
        ),
        Case(
            "ten pipelined",
            (GET + b"\r\n" + POST + b"Content-Length: 3\r\n\r\nabc" + CHUNKED + b"\r\n" + LAST) * 10,
            SERVED,
        ),
        Case("pipelined, then a fault", GET + b"\r\n" + POST + b"Content-Length: x\r\n\r\n", REFUSED),
        Case("pipelined, then close", GET + b"\r\n" + GET + b"Connection: close\r\n\r\n", REFUSED),
    ]


CASES = [*_bodies(), *_codings(), *_chunks(), *_lines(), *_headers()]
