"""RowServerOptions: the options of `hotrow rows`, all of them checked before anything starts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from hotrow.config import Memory
from hotrow.credentials import public, split_login
from hotrow.errors import OptionError, choices
from hotrow.publish.bus import SCHEMES
from hotrow.serve.frontend.authorization import is_loopback_host
from hotrow.serve.processes.model_addresses import address_by_model
from hotrow.serve.repository.manifest import Repository
from hotrow.serve.rows.shards import ALL, Shards
from hotrow.tiers.rows.cluster_file import check_address
from hotrow.tiers.rows.handshake import token_key
from hotrow.units import parse_size

LEAST_HISTORY = 1 << 20


@dataclass(frozen=True)
class RowServerOptions:
    """The options of a row server. Sizes are strings such as "4GiB"; times are in seconds."""

    repository: str
    models: tuple[str, ...] = ()  # (): all of the repository
    shards: Shards = ALL
    listen: tuple[str, ...] = ("127.0.0.1:8010",)
    metrics: int | None = 8012
    dram: str | None = None
    ssd: str | None = None
    bus: tuple[str, ...] = ()  # addresses, or model=address
    token: str | None = field(default=None, repr=False)
    tls_cert: str | None = None  # PEM
    tls_key: str | None = None
    threads: int = 1
    history: str = "64MiB"
    register: str | None = None  # redis://host/0?set=rows, and the address to register
    advertise: str | None = None  # the address that clients should use
    drain: float = 5.0
    require_models: bool = True  # False: models may be missing or damaged at the start, and come later

    def __post_init__(self) -> None:
        if not os.path.isdir(self.repository):
            raise OptionError(
                f"there is no repository {self.repository!r}; export a model into it: hr.export(model, "
                f"'{self.repository}/ctr')"
            )
        known = Repository(self.repository).models()
        if self.require_models and not known:
            raise OptionError(f"{self.repository} has no model; export one: hr.export(model, '{self.repository}/ctr')")
        for name in self.models if self.require_models else ():
            if name not in known:
                raise OptionError(f"--model {name}: {choices(name, known)}")
        if not self.listen:
            raise OptionError("--listen: give HOST:PORT or unix:/path, at least once")
        for address in self.listen:
            if address.startswith("unix:"):
                continue
            if not address.endswith(":0"):
                check_address(address)
            if not is_loopback_host(address) and self.token is None:
                raise OptionError(
                    f"--listen {address} without a token: every machine that reaches this port could read all rows; "
                    "make one with `openssl rand -hex 32 > rows.token; chmod 600 rows.token`, and give --token-file "
                    "rows.token to row servers and tower servers"
                )
        token_key(self.token)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionError("--tls-cert and --tls-key: give both, or neither")
        for path in (self.tls_cert, self.tls_key):
            if path is not None and not os.path.isfile(path):
                raise OptionError(f"--tls-cert, --tls-key: there is no file {path}; give PEM files")
        if self.threads < 1:
            raise OptionError(f"--threads {self.threads}: give 1 or more")
        if parse_size(self.history, "history") < LEAST_HISTORY:
            raise OptionError(f"--history {self.history}: give at least 1MiB")
        if not self.drain > 0:
            raise OptionError(f"--drain {self.drain:g}: give seconds above 0")
        if self.register is not None and not self.register.startswith(("redis://", "rediss://")):
            raise OptionError(f"--register {public(self.register)}: give redis://HOST:PORT/0?set=NAME")
        if self.register is not None:
            split_login(self.register)  # its password's file can be read
        if self.register is not None and self.advertise is None:
            raise OptionError("--register without --advertise: say which address tower servers should use: HOST:PORT")
        if self.advertise is not None:
            check_address(self.advertise)
        Memory(dram=self.dram, ssd=self.ssd)
        for address in self.buses().values():
            split_login(address)

    def served_models(self) -> list[str]:
        """The models that are served."""
        return list(self.models) or Repository(self.repository).models()

    def memory(self, model: str, version: int) -> Memory:
        """The tiers of one version's rows."""
        ssd = None if self.ssd is None else os.path.join(self.ssd, model, str(version))
        return Memory(dram=self.dram, ssd=ssd)

    def buses(self) -> dict[str, str]:
        """The bus of each model that follows one. An address without a model's name belongs to the only model."""
        return address_by_model("bus", self.bus, self.served_models, SCHEMES, "dir:/data/publications")
