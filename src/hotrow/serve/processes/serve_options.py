"""ServeOptions: the options of `hotrow serve`, all of them checked before any process starts.

`engine` and `front_end` create the options of those processes, so a wrong value raises the same error at once as it
would in the process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hotrow.config import Memory, check_options
from hotrow.credentials import split_login
from hotrow.errors import OptionError, choices
from hotrow.publish.bus import SCHEMES
from hotrow.serve.processes import gpus
from hotrow.serve.processes.devices import GPU_INSIDE, Device, Placement, parse_devices, place
from hotrow.serve.processes.engine_options import EngineOptions
from hotrow.serve.processes.model_addresses import address_by_model, addresses_by_model
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
    devices: str = "auto"  # of engines (devices.py)
    processes: int = 1  # engines of each device
    frontends: int = 1
    dram: str | None = None
    ssd: str | None = None
    ssd_limit: str | None = None  # of each version of a model
    hbm: str | None = None
    deadline: float | None = None  # None: that of the version
    policy: str | None = None  # None: that of the version
    compile: bool = True
    artifacts: str | None = None  # the folder of compiled buckets; None: the user's cache
    precision: str = "fp32"  # of towers on a GPU
    user_cache: str | None = None  # of each engine and each version: encodings of users
    max_batch: int = 1024  # rows
    max_wait: float = 0.002
    poll: float = 0.0
    bus: tuple[str, ...] = ()  # addresses, or model=address
    remote: tuple[str, ...] = ()  # addresses, or model=address; several of a model are read in this order
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
        for name in ("dram", "hbm", "ssd_limit", "user_cache"):
            if (size := getattr(self, name)) is not None:
                parse_size(size, name)
        if self.stale_after is not None and not self.bus:
            raise OptionError(f"--stale-after {self.stale_after:g}s: give the bus that the model follows too (--bus)")
        stores = [url for urls in self.remotes().values() for url in urls]
        for address in (*self.buses().values(), *stores):
            split_login(address)  # its password's file can be read
        if self.remote and self.dram is None:
            raise OptionError("--remote without --dram: say how much memory the cache over it may take: --dram 4GiB")
        row_servers = self.row_servers()
        for model in {*row_servers, *self.remotes()}:
            Memory(
                dram=self.dram,
                ssd=self.ssd,
                hbm=self.hbm,
                ssd_limit=self.ssd_limit,
                remote=self.remotes().get(model),
                rows=row_servers.get(model),
            )
        for address in row_servers.values():
            RowsAddress.parse(address)
        if self.ssd_limit is not None and not (self.remote or self.rows):
            raise OptionError(
                "--ssd-limit without --remote or --rows: without them the SSD folder has to hold all rows"
            )
        if self.ssd is not None and self.dram is None:
            raise OptionError("--ssd without --dram: say how much memory rows may take, such as --dram 4GiB")
        check_options("limits", self.limits, [option.name for option in fields(Limits)])
        parse_devices(self.devices)
        self._engine_options(0, "", Device(), 1)
        self.front_end({name: port for name in PORTS if (port := getattr(self, name)) is not None})
        self._check_devices()

    def _check_devices(self) -> None:
        """The checks for which the GPUs of this machine must be known. They come last: a driver may take seconds."""
        engines = self.engine_devices
        if len(engines) > 1 and any(is_local(url) for urls in self.remotes().values() for url in urls):
            raise OptionError(
                f"--remote rocksdb:... with {len(engines)} engines (--processes {self.processes}, devices "
                f"{', '.join(device.name for device in self.placement.devices)}): RocksDB lets one process open a "
                "folder; give one of --devices, and more --lanes instead of --processes"
            )
        on_gpu = next((device for device in engines if device.gpu is not None), None)
        if self.precision != "fp32" and self.hbm is None and on_gpu is not None:
            raise OptionError(
                f"--precision {self.precision} on {on_gpu.name} without --hbm: these towers run in fp32; give --hbm too"
            )

    @cached_property
    def placement(self) -> Placement:
        """The devices that --devices means on this machine."""
        return place(self.devices, self.hbm, gpus.usable_gpus)

    @property
    def engine_devices(self) -> list[Device]:
        """The device of each engine, by its number: --processes engines for each device."""
        return [device for device in self.placement.devices for _ in range(self.processes)]

    def buses(self) -> dict[str, str]:
        """The bus of each model that follows one. An address without a model's name belongs to the only model."""
        return address_by_model("bus", self.bus, self._names, SCHEMES, "dir:/data/publications")

    def row_servers(self) -> dict[str, str]:
        """The row servers of each model that has them. An address without a model's name belongs to the only model."""
        return address_by_model("rows", self.rows, self._names, None, "10.0.0.1:8010")

    @property
    def shares_rows(self) -> bool:
        """Whether engines read their rows from one row server of this machine, so that the rows exist once."""
        return len(self.engine_devices) > 1 and not (self.rows or self.remote or self.hbm or self.loader)

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

    def remotes(self) -> dict[str, list[str]]:
        """The remote stores of each model that has any, in the order in which they are read. An address without a
        model's name belongs to the only model."""
        return addresses_by_model("remote", self.remote, self._names, REMOTE_SCHEMES, "redis://10.0.0.1:6379")

    def _names(self) -> list[str]:
        """The models that options may name."""
        from hotrow.serve.repository.manifest import Repository

        return list(self.models) or Repository(self.repository).models()

    def lane_threads(self, engines: int) -> int:
        """Intra-op threads of each lane: the option, or an equal part of the cores for all lanes of all engines. With
        more than four cores, one is left for each front end. With fewer, lanes that use all cores are faster (2,400
        against 2,150 requests/s on two)."""
        if self.threads is not None:
            return max(1, self.threads)
        cores = len(os.sched_getaffinity(0))
        return max(1, (cores - self.frontends if cores > 4 else cores) // (self.lanes * engines))

    def engine(self, number: int, socket: str, shared_rows: str | None = None) -> EngineOptions:
        """The options of engine `number`. `shared_rows` is the socket of this machine's row server."""
        engines = self.engine_devices
        return self._engine_options(number, socket, engines[number], len(engines), shared_rows)

    def _engine_options(
        self, number: int, socket: str, device: Device, engines: int, shared_rows: str | None = None
    ) -> EngineOptions:
        """The options of engine `number` of `engines`, on a device."""
        tiers = {
            name: value for name in ("dram", "ssd", "ssd_limit", "hbm") if (value := getattr(self, name)) is not None
        }
        if shared_rows is not None:  # they are the row server's
            tiers = {}
        if "ssd" in tiers and engines > 1:
            tiers["ssd"] = os.path.join(tiers["ssd"], f"engine-{number}")
        given = {
            **tiers,
            **({} if device.gpu is None else {"device": GPU_INSIDE}),
            "bus": self.buses(),
            "remote": self.remotes(),
            "rows": self.row_servers() if shared_rows is None else {"": f"unix:{shared_rows}"},
            "compile": self.compile,
            "artifacts": self.artifacts,
            "precision": self.precision,
            "user_cache": self.user_cache,
            "lanes": self.lanes,
            "threads": self.lane_threads(engines),
        }
        return EngineOptions(
            socket,
            self.repository,
            self.models,
            self.loader or EngineOptions.loader,
            given,
            lanes=self.lanes,
            threads=self.lane_threads(engines),
            device=device.name,
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
