"""ServeOptions: the options of `hotrow serve`, all of them checked before any process starts.

`engine` and `front_end` create the options of those processes, so a wrong value raises the same error at once as it
would in the process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from hotrow.config import check_options
from hotrow.credentials import public, split_login
from hotrow.errors import OptionError, choices
from hotrow.publish.bus import SCHEMES
from hotrow.serve.processes.engine_options import EngineOptions
from hotrow.serve.protocol.limits import Limits
from hotrow.tiers.remote.store import SCHEMES as REMOTE_SCHEMES
from hotrow.tiers.remote.tables import is_local
from hotrow.tiers.rows.cluster_file import RowsAddress
from hotrow.units import parse_size

if TYPE_CHECKING:
    from hotrow.serve.frontend.ports import FrontendOptions

PORTS = ("http", "grpc", "metrics")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True)
class ServeOptions:
    """The options of `hotrow serve`. Sizes are strings such as "4GiB"; times are in seconds."""

    repository: str
    models: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    http: int | None = 8000
    grpc: int | None = 8001
    metrics: int | None = 8002
    lanes: int = 1
    threads: int | None = None  # of each lane; None: an equal part of the cores
    processes: int = 1
    frontends: int = 1
    dram: str | None = None
    ssd: str | None = None
    hbm: str | None = None
    deadline: float | None = None  # None: that of the version
    policy: str | None = None  # None: that of the version
    compile: bool = True
    artifacts: str | None = None  # the folder of compiled buckets; None: the user's cache
    precision: str = "fp32"  # of towers on a GPU
    max_batch: int = 1024  # rows
    max_wait: float = 0.002
    poll: float = 0.0
    bus: tuple[str, ...] = ()  # addresses, or model=address
    remote: tuple[str, ...] = ()  # addresses, or model=address
    rows: tuple[str, ...] = ()  # row servers: addresses, or model=address
    stale_after: float | None = None
    token: str | None = field(default=None, repr=False)
    drain: float = 10.0
    loader: str | None = None
    limits: dict[str, Any] = field(default_factory=dict)  # the front ends', limits.py

    def __post_init__(self) -> None:
        if not os.path.isdir(self.repository):
            raise OptionError(
                f"there is no repository {self.repository!r}; export a model into it: hr.export(model, "
                f"'{self.repository}/ctr')"
            )
        for name in ("processes", "frontends"):
            if getattr(self, name) < 1:
                raise OptionError(f"--{name} {getattr(self, name)}: give 1 or more")
        if self.precision not in PRECISIONS:
            raise OptionError(f"--precision {self.precision}: {choices(self.precision, PRECISIONS)}")
        for name in ("dram", "hbm"):
            if (size := getattr(self, name)) is not None:
                parse_size(size, name)
        if self.stale_after is not None and not self.bus:
            raise OptionError(f"--stale-after {self.stale_after:g}s: give the bus that the model follows too (--bus)")
        for address in (*self.buses().values(), *self.remotes().values()):
            split_login(address)  # its password's file can be read
        if self.remote and self.dram is None:
            raise OptionError("--remote without --dram: say how much memory the cache over it may take: --dram 4GiB")
        self._check_rows()
        for name in ("ssd", "hbm"):
            if self.remote and getattr(self, name) is not None:
                raise OptionError(
                    f"--{name} with --remote: over a remote store DRAM is the cache; leave one of them out"
                )
        if self.processes > 1 and any(is_local(url) for url in self.remotes().values()):
            raise OptionError(
                f"--remote rocksdb:... with --processes {self.processes}: RocksDB lets one process open a folder; use "
                "more --lanes instead"
            )
        if self.ssd is not None and self.dram is None:
            raise OptionError("--ssd without --dram: say how much memory rows may take, such as --dram 4GiB")
        check_options("limits", self.limits, [option.name for option in fields(Limits)])
        self.engine(0, "")
        self.front_end({name: port for name in PORTS if (port := getattr(self, name)) is not None})

    def buses(self) -> dict[str, str]:
        """The bus of each model that follows one. An address without a model's name belongs to the only model."""
        return self._by_model("bus", self.bus, SCHEMES, "dir:/data/publications")

    def _check_rows(self) -> None:
        for name in ("remote", "ssd", "hbm", "dram"):
            if self.rows and getattr(self, name):
                raise OptionError(f"--{name} with --rows: the row servers hold all rows; leave one of them out")
        for address in self.row_servers().values():
            RowsAddress.parse(address)

    def row_servers(self) -> dict[str, str]:
        """The row servers of each model that has them. An address without a model's name belongs to the only model."""
        return self._by_model("rows", self.rows, None, "10.0.0.1:8010")

    @property
    def shares_rows(self) -> bool:
        """Whether engines read their rows from one row server of this machine, so that the rows exist once."""
        return self.processes > 1 and not (self.rows or self.remote or self.hbm or self.loader)

    def row_server(self, socket: str) -> dict[str, Any]:
        """The options of that row server, which listens at `socket`."""
        return {
            "repository": self.repository,
            "models": list(self.models),
            "listen": [f"unix:{socket}"],
            "metrics": None,
            "require_models": False,
            "dram": self.dram,
            "ssd": self.ssd,
            "bus": [f"{model}={address}" for model, address in self.buses().items()],
        }

    def remotes(self) -> dict[str, str]:
        """The remote store of each model that has one. An address without a model's name belongs to the only model."""
        return self._by_model("remote", self.remote, REMOTE_SCHEMES, "redis://10.0.0.1:6379")

    def _by_model(
        self, option: str, all_given: Sequence[str], schemes: Sequence[str] | None, example: str
    ) -> dict[str, str]:
        from hotrow.serve.repository.manifest import Repository

        found: dict[str, str] = {}
        names = list(self.models) or Repository(self.repository).models() if all_given else []
        for given in all_given:
            name, _, address = given.partition("=")
            if ":" in name or "?" in name or not address:
                name, address = "", given
            shown = f"--{option} {name + '=' if name else ''}{public(address)}"
            if not name:
                if len(names) != 1:
                    raise OptionError(
                        f"{shown}: the repository has {', '.join(names) or 'no model'}; say which model follows it, "
                        f"such as --{option} ctr={example}"
                    )
                name = names[0]
            elif name not in names:
                raise OptionError(f"{shown}: there is no model {name!r}; {choices(name, names)}")
            if name in found:
                raise OptionError(f"{shown}: model {name!r} follows {public(found[name])} already")
            if schemes is not None and address.partition(":")[0] not in schemes:
                raise OptionError(f"{shown}: {choices(address.partition(':')[0], schemes)}, such as {example}")
            found[name] = address
        return found

    def lane_threads(self) -> int:
        """Intra-op threads of each lane: the option, or an equal part of the cores. With more than four cores, one is
        left for each front end. With fewer, lanes that use all cores are faster (2,400 against 2,150 requests/s on
        two)."""
        if self.threads is not None:
            return max(1, self.threads)
        cores = len(os.sched_getaffinity(0))
        return max(1, (cores - self.frontends if cores > 4 else cores) // (self.lanes * self.processes))

    def engine(self, number: int, socket: str, shared_rows: str | None = None) -> EngineOptions:
        """The options of engine `number`. `shared_rows` is the socket of this machine's row server."""
        tiers = {} if shared_rows is not None else {name: value for name in ("dram", "ssd", "hbm") if (value := getattr(self, name)) is not None}
        if "ssd" in tiers and self.processes > 1:
            tiers["ssd"] = os.path.join(tiers["ssd"], f"engine-{number}")
        given = {
            **tiers,
            "bus": self.buses(),
            "remote": self.remotes(),
            "rows": self.row_servers() if shared_rows is None else {"": f"unix:{shared_rows}"},
            "compile": self.compile,
            "artifacts": self.artifacts,
            "precision": self.precision,
            "lanes": self.lanes,
            "threads": self.lane_threads(),
        }
        return EngineOptions(
            socket,
            self.repository,
            self.models,
            self.loader or EngineOptions.loader,
            given,
            lanes=self.lanes,
            threads=self.lane_threads(),
            policy=self.policy,
            max_rows=self.max_batch,
            max_wait=self.max_wait,
            deadline=self.deadline,
            stale_after=self.stale_after,
            poll=self.poll,
            drain=self.drain,
        )

    def front_end(self, ports: Mapping[str, int], first: bool = True) -> FrontendOptions:
        """The options of a front end on these ports. The first one has the metrics page, with the figures of all."""
        try:
            from hotrow.serve.frontend.ports import FrontendOptions
        except ModuleNotFoundError as error:
            raise OptionError(f"a server needs {error.name}: pip install 'hotrow[serve]'") from None
        return FrontendOptions(
            self.host,
            ports.get("http"),
            ports.get("grpc"),
            ports.get("metrics") if first else None,
            self.token,
            Limits(**self.limits),
            self.drain,
            reuse_port=True,
        )
