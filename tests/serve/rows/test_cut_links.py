"""Row servers on machines of their own: a link that is cut costs no answer within the deadline."""

from __future__ import annotations

import json
import time
from pathlib import Path

import forked
import pytest
from row_servers import TOKEN, until

from hotrow.bench.servers.network import Network, unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no emulated network: {unavailable()}")

ROWS = """
import sys
from hotrow.bench.servers.network import enter
enter(sys.argv[1])
sys.argv = ["hotrow", *sys.argv[2:]]
from hotrow.cli import main
main()
"""
# Asks without a pause and writes a line for each answer: whether it has the right bits, and its seconds.
TOWER = """
import json, sys, time
from hotrow.bench.servers.network import enter
namespace, folder, address = sys.argv[1:4]
enter(namespace)
sys.path.insert(0, sys.argv[4])
import hotrow as hr
from small_models import make_batch
batch = make_batch(30)
with hr.Engine(folder) as plain:
    expected = plain.logits(batch)
with hr.Engine(folder, memory=hr.Memory(rows=address)) as engine:
    servers = engine.embeddings.remote.servers
    while True:
        began = time.monotonic()
        try:
            right = bool((engine.answer(batch, "wait", began + 2.0).logits == expected).all())
        except Exception as error:
            right = str(error)
        line = [right, time.monotonic() - began, [len(of) for of in servers.topology.servers]]
        print(json.dumps(line), flush=True)
        time.sleep(0.01)
"""


def test_replicas_answer_while_a_link_is_cut(tmp_path: Path, repository: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    environment = {"OMP_NUM_THREADS": "1", "COLUMNS": "400"}
    with Network(["tower", "one", "two"], delay=0.001) as network:
        listens = {name: f"{network.addresses[name]}:8010" for name in ("one", "two")}
        options = ("--metrics", "-1", "--token-file", str(token))
        started = [
            forked.python(
                ROWS, network.namespace(name), "rows", str(repository), "--listen", listen, *options,
                log=tmp_path / name, env=environment,
            )
            for name, listen in listens.items()
        ]  # fmt: skip
        address = f"{listens['one']},{listens['two']}?token_file={token}"
        serve = str(Path(__file__).parent.parent)
        tower = forked.python(
            TOWER, network.namespace("tower"), str(repository / "ctr"), address, serve,
            log=tmp_path / "tower", env=environment,
        )  # fmt: skip
        started.append(tower)

        def answers() -> list[list[object]]:
            lines = tower.text().splitlines()[:-1]
            return [json.loads(line) for line in lines if line.startswith("[")]

        def wait_for(servers: int) -> None:
            until(lambda: answers()[-1:] and answers()[-1][2] == [servers], f"{servers} servers: {tower.text()[-500:]}")

        try:
            wait_for(2)
            for name in ("one", "two"):
                network.down(name)
                time.sleep(0.3)
                wait_for(1)
                time.sleep(0.3)
                network.up(name)
                wait_for(2)
            found = answers()
            assert all(right is True for right, _, _ in found), [one for one in found if one[0] is not True][:3]
            assert max(float(seconds) for _, seconds, _ in found) < 2.0  # type: ignore[arg-type]
            assert len(found) > 50
        finally:
            for one in started:
                one.kill()
