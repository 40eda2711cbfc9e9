"""Credentials: passwords and tokens come from files, and are kept out of messages.

Every user of a machine can read the arguments of its processes (`ps`). So a secret comes from a file:

    redis://user@host:6379/0?stream=ctr&password_file=/run/secrets/redis
    hotrow serve repository/ --token-file /run/secrets/token

An address may hold the password itself (`redis://user:password@host`), for job files and programs that keep their text
private. Errors, logs and records show only `public(address)`, which has no login. A server or library may repeat a
password in its error about a failed login; `Login.redact` removes it.

Any thread may call any of this.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote, unquote_plus

from hotrow.errors import OptionError

_FOLDERS = ("dir", "rocksdb", "export")  # schemes of paths, which have no login
# Keeps a model's name and the scheme. The login ends at the last @, because a password may contain one.
_LOGIN = re.compile(r"^((?:[\w.-]+=)?[a-z][a-z0-9+]*://|(?:redis|rediss|kafka)\b[a-z+]*:/*)?.*@", re.DOTALL)
_SECRET_OPTION = re.compile(r"pass|secret|token|username", re.IGNORECASE)
_LONGEST_FILE = 4096


@dataclass(frozen=True)
class Login:
    """A user and a password; either may be empty."""

    user: str = ""
    password: str = field(default="", repr=False)

    def redact(self, text: object) -> str:
        """The text of a server or library, without the password.

        >>> Login("me", "hunter2").redact("unknown command 'AUTH', with args beginning with: 'hunter2'")
        "unknown command 'AUTH', with args beginning with: '***'"
        """
        redacted = str(text)
        for secret in {self.password, quote(self.password, safe="")} - {""}:
            redacted = redacted.replace(secret, "***")
            if len(secret) > 32:  # servers truncate long arguments
                redacted = re.sub(re.escape(secret[:16]) + r"[^\s']*", "***", redacted)
        return redacted


def public(address: str) -> str:
    """An address without its login, for messages and files. The address may be malformed.

    >>> public("redis://me:hunter2@host:6379/0?stream=ctr&password_file=/run/secrets/redis")
    'redis://host:6379/0?stream=ctr'
    """
    if address.partition(":")[0] in _FOLDERS:
        return address
    place, _, query = _LOGIN.sub(r"\1", address).partition("?")
    options = [part for part in query.split("&") if part and not _SECRET_OPTION.search(part.partition("=")[0])]
    return place + ("?" + "&".join(options) if options else "")


def split_login(address: str) -> tuple[str, Login]:
    """An address without its login, and the login. Reads the file of `password_file=`.

    >>> split_login("redis://me:p%40ss@host:6379/0?stream=ctr")
    ('redis://host:6379/0?stream=ctr', Login(user='me'))
    """
    scheme, mark, rest = address.partition("://")
    if address.partition(":")[0] in _FOLDERS or not (mark or "@" in address):
        return address, Login()
    place, _, query = rest.partition("?")
    host, slash, path = place.partition("/")
    login, _, host = host.rpartition("@")
    if not mark or "@" in path + query:  # may be the end of a login that contains / or ?
        raise OptionError(
            f"{public(address)!r}: write redis://user@host:6379?password_file=/path; where an address has the password "
            "itself, or an @ behind the host, its characters / ? @ are written %2F %3F %40"
        )
    user, _, password = (unquote(part) for part in login.partition(":"))
    options = query.split("&") if query else []
    files = [part.partition("=")[2] for part in options if part.startswith("password_file=")]
    if files:
        if password or len(files) > 1:
            raise OptionError(f"{public(address)!r} has several passwords: give one, by password_file=")
        password = read_secret(unquote_plus(files[0]), "password_file=")
        options = [part for part in options if not part.startswith("password_file=")]
    bare = f"{scheme}://{host}{slash}{path}" + ("?" + "&".join(options) if options else "")
    return bare, Login(user, password)


def shows_password(address: str) -> bool:
    """Whether the address itself contains a password."""
    if address.partition(":")[0] in _FOLDERS:
        return False
    login, at, _ = re.split("[/?]", address.partition("://")[2])[0].rpartition("@")
    return bool(at and ":" in login) or re.search(r"[?&]password=.", address) is not None


def kafka_settings(login: Login, options: dict[str, str], address: str) -> dict[str, str]:
    """librdkafka's settings for a login. Removes tls=, ca= and sasl= from the options of the address.

    >>> kafka_settings(Login("me", "hunter2"), {"sasl": "SCRAM-SHA-256"}, "")["security.protocol"]
    'SASL_SSL'
    """
    tls = options.pop("tls", "yes" if login.password else "no")
    mechanism, authority = options.pop("sasl", "PLAIN"), options.pop("ca", "")
    if tls not in ("yes", "no") or mechanism not in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"):
        raise OptionError(
            f"tls={tls}, sasl={mechanism} of {public(address)!r}: say tls=yes or no, and sasl=PLAIN, SCRAM-SHA-256 or "
            "SCRAM-SHA-512"
        )
    if bool(login.user) != bool(login.password):
        raise OptionError(f"{public(address)!r}: Kafka's login is a user and a password; give both")
    security = {"security.protocol": ("SASL_" if login.user else "") + ("SSL" if tls == "yes" else "PLAINTEXT")}
    if login.user:
        security |= {"sasl.mechanism": mechanism, "sasl.username": login.user, "sasl.password": login.password}
    return security | ({"ssl.ca.location": authority} if authority else {})


def read_secret(path: str, option: str) -> str:
    """The single line of a file that only its owner, and perhaps its group, can read."""
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(_LONGEST_FILE + 1).decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise OptionError(f"{option}{path!r} cannot be read: {why}; give a file with the secret in one line") from None
    if mode & stat.S_IRWXO:
        raise OptionError(
            f"{option}{path!r} is readable by every user of this machine (mode {mode:04o}): chmod 600 {Path(path).name}"
            " (or 640, for a group)"
        )
    if not text or len(text) > _LONGEST_FILE or "\n" in text or "\0" in text:
        raise OptionError(f"{option}{path!r} holds no secret: write it as one line, of {_LONGEST_FILE} bytes at most")
    return text
