"""Online training from event to publication: killed anywhere, resumed, the same rows and the same bus."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import forked
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import runs

import hotrow as hr
from hotrow.features import Dense, FeatureSpec, Key
from hotrow.train.interrupt import Interrupted

SPEC = FeatureSpec(
    [Key("user", hash="none"), Key("item", hash="none"), *(Dense(f"d{i}") for i in range(3))], label="click", time="at"
)


def write(folder: Path, number: int, start: int, count: int) -> None:
    batch = runs.clicks().batch(start, count)
    assert batch.dense is not None and batch.labels is not None and batch.time is not None
    columns = {name: pa.array(batch.ids[name].values.numpy()) for name in ("user", "item")}
    columns |= {f"d{i}": pa.array(batch.dense[:, i].numpy()) for i in range(3)}
    columns |= {"click": pa.array(batch.labels.numpy()), "at": pa.array(batch.time.numpy())}
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / ".part")
    (folder / ".part").rename(folder / f"{number:05d}.parquet")


def follow(folder: Path, home: Path) -> hr.data.FollowSource:
    return hr.data.follow(str(folder), SPEC, batch_size=32, flush=0.3, journal=home / ".follow")


def stop_after(trainer: hr.Trainer, steps: int) -> None:
    def watch() -> None:
        while trainer.steps < steps:
            time.sleep(0.01)
        trainer.stop()

    threading.Thread(target=watch, daemon=True).start()


@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_followed_run_stops_after_a_step_and_resumes_exactly(tmp_path: Path, lookahead: int) -> None:
    folder = tmp_path / "events"
    for number, (start, count) in enumerate([(0, 50), (50, 100), (150, 70)]):
        write(folder, number, start, count)
    losses: dict[str, list[float]] = {}
    state = {}
    for name, stops in (("whole", [7]), ("cut", [3, 7])):
        home, losses[name] = tmp_path / name, []
        home.mkdir()
        if name == "cut":  # the batches that a clock cut short in the first run
            (home / ".follow").write_bytes((tmp_path / "whole" / ".follow").read_bytes())
        for stop in stops:
            trainer = runs.make_trainer(home, lookahead=lookahead)
            stop_after(trainer, stop)
            with pytest.raises(Interrupted) as stopped:
                trainer.fit(follow(folder, home), resume=True, progress=False)
            assert stopped.value.checkpoint is not None and stopped.value.report is not None
            losses[name] += stopped.value.report.losses
            state[name] = runs.bits(trainer)
            if stopped.value.step >= 7:
                break
    assert losses["whole"] == losses["cut"]
    assert state["whole"] == state["cut"]
    assert len(losses["whole"]) == 7  # six full batches of 32, and the 28 that were left


def test_an_idle_stream_publishes_only_heartbeats(tmp_path: Path) -> None:
    folder, home = tmp_path / "events", tmp_path / "home"
    write(folder, 0, 0, 64)
    bus = f"dir:{tmp_path / 'bus'}"
    publish = hr.Publish(bus, every_seconds=0.3, heartbeat=0.05)
    trainer = runs.make_trainer(home, publish=publish)
    reader, beats, watermarks = hr.Subscriber(bus), [], []

    def watch() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for one in reader.poll(0.1):
                (beats if one.kind == "heartbeat" else watermarks).append(one.watermark)
            if watermarks and beats and beats[-1] >= watermarks[-1] + 500:
                break
        trainer.stop()

    watcher = threading.Thread(target=watch)
    watcher.start()
    with pytest.raises(Interrupted):
        trainer.fit(follow(folder, home), resume=True, progress=False)
    watcher.join()
    newest = int(runs.clicks().batch(0, 64).time.max())  # type: ignore[union-attr]
    assert watermarks[-1] == newest  # what was left for the clock to cut went out, with the time of its events
    assert newest + 500 <= beats[-1] < newest + 60_000 and beats == sorted(beats)
    assert trainer.publisher is None or trainer.publisher.watermark == newest


def test_killed_between_publications_the_bus_gets_each_once(tmp_path: Path) -> None:
    from hotrow.publish.subscriber import Subscriber

    folder, home, bus = tmp_path / "events", tmp_path / "run", f"dir:{tmp_path / 'bus'}"
    for number in range(6):
        write(folder, number, number * 100, 100)
    code = f"""
import os, sys, threading, time
sys.path[:0] = {[str(Path(__file__).parent)]!r}
import hotrow as hr, test_follow_train as t, runs
from pathlib import Path
trainer = runs.make_trainer(Path({str(home)!r}), publish=hr.Publish({bus!r}, every_steps=2), checkpoint_every=5)
if len(sys.argv) > 1:
    def die():
        while trainer.steps < int(sys.argv[1]): time.sleep(0.002)
        os.kill(os.getpid(), 9)
    threading.Thread(target=die, daemon=True).start()
else:
    t.stop_after(trainer, 19)
try:
    trainer.fit(t.follow(Path({str(folder)!r}), Path({str(home)!r})), resume=True, progress=False)
except KeyboardInterrupt:
    print("differed", trainer.publisher.counters.differed, "steps", trainer.steps)
"""
    for arguments in (["8"], ["13"], []):
        run = forked.python(code, *arguments, log=tmp_path / "log")
        assert run.wait(300) == (-signal.SIGKILL if arguments else 0), run.text()[-2000:]
    assert "differed 0" in run.text()
    seen = []
    reader = Subscriber(bus, after=0)
    for publication in reader:
        if publication.kind != "heartbeat":
            seen.append((publication.number, publication.step))
        if publication.step >= 18:
            break
    assert [number for number, _ in seen] == list(range(1, len(seen) + 1))
    steps = [step for _, step in seen]
    assert steps == sorted(set(steps)) and set(range(2, 19, 2)) <= set(steps)


def test_sigterm_ends_hotrow_train_follow_with_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    write(folder, 0, 0, 100)
    SPEC.save(tmp_path / "features.json")
    job = tmp_path / "job.toml"
    job.write_text(
        f'[data]\nsource = "parquet"\npath = "{folder}"\nfeatures = "{tmp_path / "features.json"}"\nbatch_size = 32\n'
        f'flush = 0.2\n[embeddings]\ndim = 4\n[train]\nwindow = 50\n[checkpoints]\nfolder = "{tmp_path / "run"}"\n'
        f'[publish]\nbus = "dir:{tmp_path / "bus"}"\nevery_steps = 1\n'
    )
    for stop in (100, 160):
        process = forked.hotrow("train", str(job), "--follow", "--resume", log=tmp_path / "log")
        end = time.monotonic() + 120
        number = 4 if stop == 100 else 6
        while not _published(tmp_path / "bus", number) and time.monotonic() < end and process.poll() is None:
            time.sleep(0.1)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        code, out = process.wait(60), process.text()
        assert code == 0, out
        assert "saved to" in " ".join(out.split())
        assert "windows" in out
        write(folder, 1, 100, 60)
    assert (tmp_path / "run" / "step-000000000006").is_dir()  # 32 32 32 4, then 32 28


def _published(bus: Path, number: int) -> bool:
    from hotrow.publish.bus import open_bus
    from hotrow.publish.history import newest_commit

    opened = open_bus(f"dir:{bus}")
    newest = newest_commit(opened)
    opened.close()
    return newest is not None and newest.number >= number
