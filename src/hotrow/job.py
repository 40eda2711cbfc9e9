"""A job file: a whole training run in TOML, for `hotrow train job.toml`. docs/jobs.md has every option.

    [data]
    source = "criteo"                # synthetic, parquet, criteo, criteo-tsv, avazu; to follow: parquet, kafka, redis
    path = "train/*.csv"
    test = "test/*.csv"              # evaluated at the end (and every evaluate_every steps)
    [embeddings]
    dim = 16
    optimizer = { kind = "RowWiseAdagrad", lr = 0.02 }
    [tower]
    kind = "dlrm"
    [[tasks]]                        # several things to predict; docs/tasks.md
    name = "click"
    [checkpoints]
    folder = "runs/ctr"              # the model is saved there at the end, too
    every = 1000
    [ranks]                          # for torchrun and --ranks; docs/ranks.md
    wire = "bf16"
    [cluster]                        # rows and towers in processes of their own
    towers = 2
    rows = 4

Every section is checked against the options that its part takes, so a wrong one is an error before data is read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from hotrow import data, optim
from hotrow._core import set_threads
from hotrow.cluster import resources
from hotrow.config import Initial, Memory, check_options
from hotrow.data import FollowSource, Source
from hotrow.data.synthetic_log.clicks import SyntheticClicks
from hotrow.errors import OptionError, choices
from hotrow.features import FeatureSpec, Label
from hotrow.models import build_tower
from hotrow.nn import EmbeddingCollection, Recommender
from hotrow.parallel.job_token import TOKEN_VARIABLE
from hotrow.parallel.rank_batches import NoBatches
from hotrow.parallel.ranks import Ranks, join_ranks
from hotrow.publish.publisher import Publish
from hotrow.table import Table
from hotrow.task import Task, tasks_from_json
from hotrow.tiers.host.store import SHARDS
from hotrow.train.interrupt import Interrupted
from hotrow.train.report import Report, SaveReport
from hotrow.train.trainer import Trainer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TEXT_LAYOUTS = ("criteo", "criteo-tsv", "avazu")
SOURCES = ("synthetic", "parquet", "kafka", "redis", *TEXT_LAYOUTS)
FOLLOWABLE = ("parquet", "kafka", "redis")
SECTIONS = {
    "data": [
        "source",
        "path",
        "test",
        "features",
        "batch_size",
        "on_error",
        "histories",
        "examples",
        "test_examples",
        "keys",
        "drift",
        "ray",
        "follow",
        "flush",
    ],
    "embeddings": ["dim", "dtype", "optimizer", "initial", "seed", "pooling"],
    "tower": None,
    "tables": None,
    "tasks": None,
    "train": [
        "dense_optimizer",
        "steps",
        "epochs",
        "accumulate",
        "precision",
        "evaluate_every",
        "clip_dense_norm",
        "log_dir",
        "lookahead",
        "trace",
        "window",
        "device",
    ],
    "publish": ["bus", "every_steps", "every_seconds", "values", "spool", "spool_size", "memory", "heartbeat"],
    "memory": ["dram", "hbm", "ssd", "hbm_policy"],
    "checkpoints": ["folder", "every", "keep"],
    "ranks": ["timeout", "wire", "backend", "token_file"],
    "cluster": ["towers", "rows", *resources.OPTIONS],
    "output": ["path"],
}
RAY_OPTIONS = ["address", "workers", "ahead", "memory", "cpus", "resources", "timeout"]
DENSE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True)
class Cluster:
    """[cluster]: how many ranks have a tower, and how many own rows (docs/ranks.md)."""

    towers: int
    rows: int

    @staticmethod
    def of(values: Mapping[str, Any]) -> Cluster | None:
        """The job's, checked; None where every rank does both."""
        if "cluster" not in values:
            return None
        given = values["cluster"]
        check_options("[cluster]", given, SECTIONS["cluster"] or [])
        resources.check_rank_options(given)
        if given and not {"towers", "rows"} & given.keys():
            return None  # only what each rank takes
        for name, most in (("towers", None), ("rows", SHARDS)):
            number = given.get(name)
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise OptionError(
                    f"[cluster] {name}={number!r}: give a whole number of ranks, 1 or more; for ranks that have both "
                    "rows and a tower, leave [cluster] out and use --ranks"
                )
            if most is not None and number > most:
                raise OptionError(
                    f"[cluster] {name}={number}: rows are divided into {most} shards; give {most} at most"
                )
        return Cluster(given["towers"], given["rows"])

    @property
    def ranks(self) -> int:
        """How many processes the job has."""
        return self.towers + self.rows

    def check_world(self, world: int) -> None:
        """Refuse another number of processes."""
        if world != self.ranks:
            raise OptionError(
                f"[cluster] asks for {self.towers} towers and {self.rows} row ranks, {self.ranks} processes, but the "
                f"launcher started {world}; change one of them"
            )


@dataclass(frozen=True)
class Job:
    """Everything that a run needs, built and checked."""

    trainer: Trainer
    source: Source
    test: Source | None
    steps: int | None
    epochs: int
    evaluate_every: int | None
    output: str | None

    @property
    def follows(self) -> bool:
        """Whether the source never ends."""
        return isinstance(self.source, FollowSource)

    def run(self, progress: bool = True, resume: bool = False) -> tuple[Report, dict[str, float] | None]:
        """Train (with `resume` from the newest checkpoint), evaluate, save. Returns the report and test metrics."""
        if self.follows and self.trainer.checkpoints is None:
            raise OptionError(
                "--follow needs checkpoints, or nothing is left when it ends: give the job [checkpoints] with folder = "
                '"runs/ctr"'
            )
        if resume and self.trainer.checkpoints is None:
            raise OptionError('--resume needs checkpoints: give the job [checkpoints] with folder = "runs/ctr"')
        with self.trainer.stoppable():
            report = self.trainer.fit(
                self.source,
                steps=self.steps,
                epochs=self.epochs,
                evaluate=self.test,
                evaluate_every=self.evaluate_every,
                resume=resume,
                progress=progress,
            )
            tested = self.trainer.evaluate(self.test, progress=progress) if self.test is not None else None
            number = self.trainer.asked_to_stop()
            if number:
                tested = None  # it covers only some of the examples
            saved = None if self.output is None else self.trainer.save(self.output, notes={"metrics": {"test": tested}})
            if self.trainer.team is not None:
                self.trainer.team.ranks.barrier()  # no rank exits while others need its replies
            if number:
                self._stopped_after_training(report, saved, number)
        return report, tested

    def _stopped_after_training(self, report: Report, saved: SaveReport | None, number: int) -> NoReturn:
        """A signal ended the last evaluation early; the model has been saved."""
        checkpoint, why = None, "nothing was saved: the job has neither [checkpoints] nor [output]"
        if saved is not None:
            checkpoint = saved.path if self.trainer.checkpoints is not None else None
            why = f"the model is in {saved.path}, and was not evaluated"
        raise Interrupted(self.trainer.steps, checkpoint, why, report, number)


def cluster_of(path: str | os.PathLike[str], towers: int | None = None, rows: int | None = None) -> Cluster | None:
    """A job file's [cluster]. `towers` and `rows` replace the file's."""
    return Cluster.of(_with_cluster(_read(Path(path)), towers, rows))


def token_file_of(path: str | os.PathLike[str]) -> str | None:
    """[ranks] token_file of a job file; None if a launcher has set the token already."""
    if os.environ.get(TOKEN_VARIABLE):
        return None
    found = _read(Path(path)).get("ranks", {}).get("token_file")
    return None if found is None else str(found)


def read_job(path: str | os.PathLike[str], ray: str | None = None) -> dict[str, Any]:
    """A job file's values. `ray` replaces where its data is read."""
    return _with_ray(_read(Path(path)), ray)


def _with_cluster(values: dict[str, Any], towers: int | None, rows: int | None) -> dict[str, Any]:
    given = {name: number for name, number in (("towers", towers), ("rows", rows)) if number is not None}
    return {**values, "cluster": {"towers": 1, "rows": 1, **values.get("cluster", {}), **given}} if given else values


def load_job(
    path: str | os.PathLike[str],
    ray: str | None = None,
    follow: bool = False,
    towers: int | None = None,
    rows: int | None = None,
) -> Job:
    """Read a job file and build it. The other arguments replace what the file says."""
    values = _with_cluster(_read(Path(path)), towers, rows)
    if follow:
        values.setdefault("data", {})["follow"] = True
    return build_job(_with_ray(values, ray))


def _with_ray(values: dict[str, Any], ray: str | None) -> dict[str, Any]:
    if ray is not None:
        options = values.setdefault("data", {})
        options["ray"] = {**_ray_options(options.get("ray", {})), "address": ray}
    return values


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise OptionError(
            f"there is no job file {str(file)!r}; `hotrow train --help` shows one to start from"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"{file} is not valid TOML: {error}") from None


def recorded_tower(path: str | os.PathLike[str], spec: FeatureSpec | None) -> dict[str, Any]:
    """How the tower of a job file is built, as `hotrow train` records it in checkpoints.

    The number of dense features comes from the feature spec, or else from the data.
    """
    values = _read(Path(path))
    if spec is not None:
        dense = len(spec.dense_names)
    else:
        sample = next(iter(_sources(dict(values.get("data", {})))[0].batches()), None)
        dense = 0 if sample is None or sample[0].dense is None else sample[0].dense.shape[1]
    return _tower_record(values, dense)


def build_recorded_tower(record: Mapping[str, Any], embeddings: EmbeddingCollection) -> torch.nn.Module:
    """The tower that a checkpoint's record describes, with fresh weights."""
    tasks = tasks_from_json(record.get("tasks", ()))
    return _tower(dict(record["tower"]), embeddings, int(record["dense_features"]), tasks)


def _tower_record(values: Mapping[str, Any], dense: int) -> dict[str, Any]:
    tasks = [{name: task[name] for name in ("name", "kind") if name in task} for task in values.get("tasks", [])]
    return {"tower": values.get("tower", {}), "dense_features": dense, **({"tasks": tasks} if tasks else {})}


def _tasks(values: Mapping[str, Any]) -> tuple[tuple[Task, ...], tuple[str, ...]]:
    """The tasks of a job, and the column of each one's labels, "" if the job does not name it."""
    given = values.get("tasks", [])
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise OptionError('tasks: give each task a section [[tasks]] with a name, such as name = "click"')
    tasks = tasks_from_json([{name: value for name, value in one.items() if name != "column"} for one in given])
    return tasks, tuple(one.get("column", "") for one in given)


def _with_labels(spec: FeatureSpec, tasks: tuple[Task, ...], columns: tuple[str, ...]) -> FeatureSpec:
    """The spec with the labels of a job's tasks. The spec's own column stays where the job names none."""
    own = {label.name: label.column for label in spec.labels}
    if len(tasks) == 1 and isinstance(spec.label, str):
        own = {tasks[0].name: spec.label}
    named = zip(tasks, columns, strict=True)
    return replace(spec, label=tuple(Label(task.name, task.kind, at or own.get(task.name, "")) for task, at in named))


def build_job(values: Mapping[str, Any]) -> Job:
    """Build a job from a job file's values."""
    check_options("the job", values, list(SECTIONS))
    for section, known in SECTIONS.items():
        if known is not None and section in values:
            check_options(f"[{section}]", values[section], known)
    cluster = Cluster.of(values)
    options = {**values.get("ranks", {})}
    if os.environ.get(TOKEN_VARIABLE):
        options.pop("token_file", None)  # a launcher has made or read the token
    ranks = join_ranks(**options, rows=0 if cluster is None else cluster.rows)
    if cluster is not None:
        cluster.check_world(1 if ranks is None else ranks.world)
    if ranks is not None:
        here = {name: option for name, option in values.get("ranks", {}).items() if name != "token_file"}
        ranks.agree("the job file", {**values, "ranks": here})  # the token's path may differ
        _limit_threads()
    train, saves = dict(values.get("train", {})), dict(values.get("checkpoints", {}))
    if saves and "folder" not in saves:
        raise OptionError('[checkpoints] needs folder=, such as folder = "runs/ctr"')
    tasks, columns = _tasks(values)
    begin = partial(_open, dict(values.get("data", {})), saves.get("folder"), tasks, columns)
    source, test, (names, dense) = begin() if ranks is None else _open_on_ranks(begin, ranks)
    embeddings = _embeddings(values, names, ranks)
    record = _tower_record(values, dense)
    has_tower = ranks is None or ranks.has_tower
    tower = build_recorded_tower(record, embeddings) if has_tower else torch.nn.Identity()
    trainer = Trainer(
        Recommender(embeddings, tower),
        _dense_optimizer(train.get("dense_optimizer", {}), tower) if has_tower else None,
        tasks=tasks or None,
        precision=train.get("precision", "fp32"),
        accumulate=train.get("accumulate", 1),
        clip_dense_norm=train.get("clip_dense_norm"),
        log_dir=train.get("log_dir"),
        checkpoints=saves.get("folder"),
        checkpoint_every=saves.get("every"),
        keep=saves.get("keep", 3),
        lookahead=train.get("lookahead"),
        trace=train.get("trace"),
        publish=_publish(values.get("publish")),
        window=train.get("window"),
    )
    trainer.job = record
    return Job(
        trainer,
        source,
        test,
        train.get("steps"),
        train.get("epochs", 1),
        train.get("evaluate_every"),
        values.get("output", {}).get("path") or saves.get("folder"),
    )


def _open(
    options: dict[str, Any], home: str | None, tasks: tuple[Task, ...], columns: tuple[str, ...]
) -> tuple[Source, Source | None, tuple[list[str], int]]:
    """The training and test source of a job, on Ray if the job says so, and the shape of the batches."""
    source, test = _sources(options, home, tasks, columns)
    shape = _shape(source)
    if "ray" in options:
        chosen = _ray_options(options["ray"])
        source, test = data.on_ray(source, **chosen), None if test is None else data.on_ray(test, **chosen)
    return source, test, shape


def _open_on_ranks(
    begin: Callable[[], tuple[Source, Source | None, tuple[list[str], int]]], ranks: Ranks
) -> tuple[Source, Source | None, tuple[list[str], int]]:
    """As `_open`, on ranks. Row ranks open nothing: they hear the batches' shape and whether there is test data."""
    opened = ranks.collective("opening the data", lambda: begin() if ranks.has_tower else None)
    shape, tests = ranks.broadcast_json(None if opened is None else [opened[2], opened[1] is not None])
    if opened is not None:
        return opened
    names, dense = shape
    source = NoBatches(names, ranks)
    return source, source if tests else None, (names, dense)


def _shape(source: Source) -> tuple[list[str], int]:
    """The names of the features that give ids, and how many dense ones there are."""
    if isinstance(source, FollowSource):  # there may be no event yet
        return list(source.features.id_names), len(source.features.dense_names)
    sample = next(iter(source.batches()), None)
    if sample is None:
        raise OptionError(f"[data] has no examples: {source.describe()}")
    dense = sample[0].dense
    return list(sample[0].ids), 0 if dense is None else dense.shape[1]


def _publish(options: Mapping[str, Any] | None) -> Publish | None:
    if options is None:
        return None
    if "bus" not in options:
        raise OptionError('[publish] needs bus=, such as bus = "dir:/data/publications"')
    return Publish(**options)


def _sources(
    options: dict[str, Any], home: str | None = None, tasks: tuple[Task, ...] = (), columns: tuple[str, ...] = ()
) -> tuple[Source, Source | None]:
    kind = options.get("source", "synthetic")
    if kind not in SOURCES:
        raise OptionError(f"[data] source={kind!r}: {choices(kind, SOURCES)}")
    batch_size = options.get("batch_size", 4096)
    if kind == "synthetic":
        if "path" in options:
            raise OptionError(
                f"[data] path={options['path']!r} with synthetic data: name the file's format, such as source = "
                f'"criteo"; {choices(kind, SOURCES)}'
            )
        shared = {name: options[name] for name in ("keys", "drift") if name in options}
        count, tests = options.get("examples", 1_000_000), options.get("test_examples", 100_000)
        train = SyntheticClicks.criteo_like(examples=count, batch_size=batch_size, **shared)
        test = SyntheticClicks.criteo_like(examples=tests, offset=count, batch_size=batch_size, **shared)
        return train, test if tests else None
    if "path" not in options:
        raise OptionError(f'[data] source={kind!r} needs path=, such as path = "train/*.{kind}"')
    spec = FeatureSpec.load(options["features"]) if "features" in options else None
    if spec is not None and tasks:
        spec = _with_labels(spec, tasks, columns)
    elif len(tasks) > 1 or any(columns):
        raise OptionError(f"[[tasks]] with source={kind!r} and no features=: give a feature spec to read their columns")
    common: dict[str, Any] = {"batch_size": batch_size, "on_error": options.get("on_error", "raise")}
    if kind in FOLLOWABLE and spec is None:
        raise OptionError(f"[data] source={kind!r} needs features=, the path of a feature spec in JSON")
    if options.get("follow", False):
        return _follow_source(kind, options, spec, home), None
    if kind in ("kafka", "redis"):
        raise OptionError(f"[data] source={kind!r} never ends: say so with follow = true, or hotrow train --follow")
    opened = []
    for name in ("path", "test"):
        if name in options:
            # The events of the training files are in the histories of the test.
            built = _histories(options, before=options["path"] if name == "test" else None)
            given = {"features": spec, "histories": built, **common}
            path = options[name]
            opened.append(data.parquet(path, **given) if kind == "parquet" else data.text(path, layout=kind, **given))
    return opened[0], opened[1] if len(opened) > 1 else None


def _histories(options: dict[str, Any], before: Any = None) -> data.Histories | None:
    """[data] histories: a table of what `hr.data.Histories` takes."""
    given = options.get("histories")
    if given is None:
        return None
    names = ["user", "columns", "events", "examples", "memory", "before"]
    if not isinstance(given, dict) or not {"user", "columns"} <= given.keys():
        raise OptionError(f"[data] histories={given!r}: give a table with user and columns")
    for name in given:
        if name not in names:
            raise OptionError(f"[data] histories: unknown option {name!r}; {choices(name, names)}")
    return data.Histories(**{"before": before, **given} if before is not None else given)


def _follow_source(kind: str, options: dict[str, Any], spec: FeatureSpec | None, home: str | None) -> Source:
    """A source that follows a growing folder or stream."""
    if kind not in FOLLOWABLE:
        raise OptionError(f"[data] follow = true with source={kind!r}: {choices(kind, FOLLOWABLE)}")
    for name in ("ray", "test"):
        if name in options:
            raise OptionError(f"[data] {name}={options[name]!r} with follow = true: leave one of them out")
    assert spec is not None
    return data.follow(
        options["path"],
        spec,
        batch_size=options.get("batch_size", 4096),
        on_error=options.get("on_error", "raise"),
        flush=options.get("flush", 1.0),
        journal=None if home is None else Path(home) / ".follow",
        histories=_histories(options),
    )


def _ray_options(given: Any) -> dict[str, Any]:
    """[data] ray: an address, or a table of what `hr.data.on_ray` takes."""
    if isinstance(given, str):
        return {"address": given}
    if not isinstance(given, dict):
        raise OptionError(f'[data] ray={given!r}: give an address, such as ray = "10.0.0.5:6379", or a table with it')
    check_options("[data] ray", given, RAY_OPTIONS)
    return given


def _embeddings(values: Mapping[str, Any], features: list[str], ranks: Ranks | None) -> EmbeddingCollection:
    options = dict(values.get("embeddings", {}))
    dim, dtype = options.get("dim", 16), options.get("dtype", "fp32")
    initial = Initial.from_dict(options["initial"]) if "initial" in options else Initial()
    tables = [Table.from_dict({"dim": dim, "dtype": dtype, **table}) for table in values.get("tables", [])]
    placed = {feature for table in tables for feature in table.poolings}
    pooling = options.get("pooling", "sum")
    own = [name for name in features if name not in placed]
    tables += [Table(name, dim, {name: pooling}, initial, dtype=dtype) for name in own]
    return EmbeddingCollection(
        tables,
        optimizer=optim.from_dict(options["optimizer"]) if "optimizer" in options else None,
        memory=Memory(**values.get("memory", {})),
        seed=options.get("seed", 0),
        ranks=ranks,
        device=values.get("train", {}).get("device"),
    )


def _limit_threads() -> None:
    """The ranks of a machine share its cores: a rank takes as many threads as its launcher gave to OpenMP."""
    cores = len(os.sched_getaffinity(0))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    set_threads(int(os.environ.get("OMP_NUM_THREADS", max(1, cores // local))))


def _tower(
    options: dict[str, Any], embeddings: EmbeddingCollection, dense: int, tasks: tuple[Task, ...] = ()
) -> torch.nn.Module:
    kind = options.pop("kind", "dlrm")
    torch.manual_seed(options.pop("seed", 0))
    return build_tower(
        kind,
        features=embeddings.features,
        sequences=embeddings.sequences,
        dense_features=dense,
        tasks=tasks,
        **options,
    )


def _dense_optimizer(options: Mapping[str, Any], tower: torch.nn.Module) -> torch.optim.Optimizer:
    given = dict(options)
    kind = str(given.pop("kind", "adam")).lower()
    if kind not in DENSE_OPTIMIZERS:
        raise OptionError(f"dense_optimizer kind={kind!r}: {choices(kind, DENSE_OPTIMIZERS)}")
    try:
        return DENSE_OPTIMIZERS[kind](tower.parameters(), **given)
    except TypeError as error:
        raise OptionError(f"dense_optimizer {kind!r}: {error}; see torch.optim's options") from None
