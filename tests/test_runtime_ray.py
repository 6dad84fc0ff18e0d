"""Processes of a run as actors on a Ray cluster: the same links, the same weights, whoever is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
import torch
from ray.cluster_utils import Cluster
from ray_works import LIMIT_S, listen, take_weights
from test_runtime import SETTINGS, start
from test_runtime_stream import SYNC, assert_same_run, harm_everyone, pid_of, wait_for, write_recipe
from tiny_models import small_llama

from slipstream.config import Config, load_config
from slipstream.models.weights import fingerprint, named_weights
from slipstream.observe.store import RunStore
from slipstream.runtime import ray_link, ray_runtime
from slipstream.runtime.local import run_training
from slipstream.runtime.processes import Doorbell, PipeClosed
from slipstream.runtime.ray_actor import Closed, Mailbox, SharedFolder
from slipstream.runtime.ray_link import RefusedLink, what_became
from slipstream.runtime.ray_runtime import on_ray, resources_of
from slipstream.runtime.ray_tree import Grove
from slipstream.runtime.ray_weights import Parcel, ParcelPost, take_in
from slipstream.runtime.rollout_messages import Broke, TakeWeights
from slipstream.stream.publisher import Publisher
from slipstream.stream.receiver import Receiver

# Without a cluster.


def test_a_mailbox_is_a_pipe() -> None:
    mailbox = Mailbox()
    mailbox.inbox.put(1)
    mailbox.inbox.put(2)
    assert mailbox.hear(1.0) == [1, 2] and mailbox.hear() == []
    mailbox.say("yes")
    assert mailbox.outbox.get() == "yes"
    mailbox.inbox.put(Closed())
    with pytest.raises(PipeClosed):
        mailbox.hear(1.0)
    with pytest.raises(PipeClosed):
        mailbox.say("anybody?")


def test_a_folder_is_the_same_only_with_its_token(tmp_path: Path) -> None:
    (tmp_path / "marker").write_text("abc")
    same = SharedFolder(tmp_path, tmp_path / "marker", "abc", tmp_path / "weights")
    other = SharedFolder(tmp_path, tmp_path / "marker", "abd", tmp_path / "weights")
    absent = SharedFolder(tmp_path, tmp_path / "nothing", "abc", tmp_path / "weights")
    assert same.is_here and not other.is_here and not absent.is_here


def test_who_was_not_started_says_why_once() -> None:
    link = RefusedLink("rollout-7", "no room", Doorbell())
    assert link.is_gone and link.receive() == [Broke("no room")] and link.receive() == []
    assert "rollout-7" in link.how_it_ended()


def test_a_process_asks_for_a_gpu_if_there_are_any_else_for_its_threads() -> None:
    assert dict(resources_of(4, has_gpus=True, is_own=False)) == {"GPU": 1.0, "CPU": 1.0}
    assert dict(resources_of(4, has_gpus=False, is_own=False)) == {"CPU": 4.0}
    assert "CPU" not in dict(resources_of(4, has_gpus=False, is_own=True)), "processes share this machine's cores"


def test_the_client_of_another_machine_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    with (
        pytest.raises(ValueError, match=r"start the run on a node of the cluster"),
        on_ray(config_for(Path("x")), 1, 1),
    ):
        pass


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("The actor died because its node has died. Node Id: abc", "was lost with its node"),
        ("Worker exit detail: Worker unexpectedly exits with a connection error", "ended without a word"),
        (
            "The actor died because of an error raised in its creation task, ray::Coat\n"
            "ModuleNotFoundError: No module named 'slipstream'\n",
            "could not start: ModuleNotFoundError: No module named 'slipstream'",
        ),
        ("", "was lost: Ray does not say why"),
    ],
)
def test_what_is_said_of_a_lost_actor_names_the_first_cause(error: str, words: str) -> None:
    assert words in what_became(error)


# On a cluster of this machine.


def config_for(run_dir: Path, **changes: Any) -> Config:
    return Config.model_validate(SETTINGS | SYNC | {"run": {"dir": str(run_dir)}, "runtime": "ray"} | changes)


def until(condition: Callable[[], Any], bell: Doorbell) -> Any:
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        found = condition()
        if found:
            return found
        bell.wait(0.2)
    raise AssertionError("it did not come")


class Stage:
    """A runtime, and how links of it are made."""

    def __init__(self, runtime: Any, folder: Path) -> None:
        self.runtime, self.folder, self.bell, self.born = runtime, folder, Doorbell(), dict[str, int]()

    def start(self, name: str, work: Callable[..., None], *arguments: Any) -> Any:
        log_file = self.folder / "logs" / f"{name}.log"
        log_file.parent.mkdir(exist_ok=True)
        return self.runtime.start(
            name, log_file, 1, work, *arguments, bell=self.bell, born=lambda who, pid: self.born.update({who: pid})
        )

    def heard(self, link: Any) -> list[Any]:
        return until(link.receive, self.bell)  # type: ignore[no-any-return]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """For one test: a process has one connection to Ray, and other tests want other clusters."""
    folder = tmp_path / "stage"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    with on_ray(config_for(folder), 1, 1) as runtime:
        yield Stage(runtime, folder)


@pytest.mark.slow
def test_an_actor_hears_and_answers_in_order_and_ends_when_the_link_is_closed(stage: Stage) -> None:
    link = stage.start("rollout-0", listen)
    for number in range(200):
        link.send(number)
    answers: list[Any] = []
    until(lambda: answers.extend(link.receive()) or len(answers) == 200, stage.bell)
    assert answers == list(range(200))
    assert stage.born["rollout-0"] == link.pid and not link.is_gone
    assert "I listen" in (stage.folder / "logs" / "rollout-0.log").read_text()
    pid = link.pid
    link.close()
    assert link.is_gone and "ended with 0" in link.how_it_ended()
    until(lambda: not Path(f"/proc/{pid}").exists(), stage.bell)


@pytest.mark.slow
def test_an_actor_that_is_killed_hangs_or_fails_is_told_by_name_log_and_cause(stage: Stage) -> None:
    links = [stage.start(name, listen) for name in ("rollout-0", "rollout-1", "rollout-2")]
    for link in links:
        link.send("hello")
        assert stage.heard(link) == ["hello"]
    killed, hanging, failing = links
    os.kill(killed.pid, signal.SIGKILL)
    os.kill(hanging.pid, signal.SIGSTOP)
    failing.send("fail")
    until(lambda: killed.is_gone and failing.is_gone, stage.bell)
    assert not hanging.is_gone
    hanging.kill()
    assert hanging.is_gone
    until(lambda: not Path(f"/proc/{hanging.pid}").exists(), stage.bell)
    said = [link.how_it_ended() for link in links]
    assert "rollout-0 (process" in said[0] and "ended without a word" in said[0] and "rollout-0.log" in said[0]
    assert "rollout-1 (process" in said[1] and "was killed" in said[1]
    assert "ended with 1" in said[2] and "RuntimeError: it failed" in said[2]
    assert not any("ActorDied" in one for one in said)
    again = stage.start("rollout-0", listen)  # in the same place
    again.send("hello")
    assert stage.heard(again) == ["hello"]
    again.close()


@pytest.mark.slow
def test_a_worker_that_comes_later_has_its_own_place_or_says_that_there_is_none(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = stage.start("rollout-9", listen)
    link.send("hello")
    assert stage.heard(link) == ["hello"]
    link.close()
    monkeypatch.setattr(ray_runtime, "room", lambda which: {"10.0.0.1": {ray_runtime.OWN_ROOM: 0.0}})
    refused = stage.start("rollout-10", listen)
    (broke,) = refused.receive()
    assert refused.is_gone and "too small: this run asks for 1 slipstream (rollout-10" in broke.reason


@pytest.mark.slow
def test_weights_reach_a_node_that_does_not_see_them_with_their_hashes(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated: the marker that it is told to look for is another, so it takes the run's folder for another node's."""
    blind = SharedFolder(stage.folder, stage.folder / "no marker", "f" * 32, stage.folder / "weights")
    monkeypatch.setattr(stage.runtime, "_folder_for", lambda name: blind)
    model = small_llama(0)
    publisher = Publisher(blind.weights, dtype=torch.float32, bucket_bytes=4096)
    link = stage.start("rollout-0", take_weights, blind.weights)
    for number in range(1, 5):
        with torch.no_grad():
            next(iter(model.parameters())).view(-1)[:7] += number
        version = publisher.publish(named_weights(model), number)
        link.send(TakeWeights(number))
        ((got, found, folder),) = stage.heard(link)
        assert got == version and found == fingerprint(model)
        assert folder == str(blind.elsewhere / "weights") != str(blind.weights)
    there = sorted(path.name for path in (blind.elsewhere / "weights").iterdir())
    assert there == ["000001.full", "000002.on.000001", "000003.on.000002", "000004.on.000003"], "what changed, no more"
    assert "which does not see the run's folder" in link.how_it_ended()
    link.close()
    parcel = ParcelPost(blind.weights).parcel(4, None)
    take_in(parcel, tmp_path / "copy")
    assert Receiver(tmp_path / "copy", "other").catch_up(small_llama(3), 4) == version
    with pytest.raises(LookupError, match="leads to version 7"):
        ParcelPost(blind.weights).parcel(7, None)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with processes of this machine."""
    folder = tmp_path_factory.mktemp("local")
    assert run_training(load_config(write_recipe(folder, "run", **SYNC)), quiet=True).reason == "done"
    return folder / "run"


@pytest.mark.slow
def test_a_run_on_ray_has_the_weights_of_a_local_one_whoever_is_killed(local: Path, tmp_path: Path) -> None:
    recipe, run_dir = write_recipe(tmp_path, "run", **SYNC, runtime="ray"), tmp_path / "run"
    run = start(recipe)
    hanging, killed = harm_everyone(run_dir, run)
    said, _ = run.communicate(timeout=600)
    assert run.returncode == 0, said
    assert "rollout workers: 3 instead of 2" in said
    assert f"{killed} is started again" in said and f"{hanging} has said nothing for" in said
    assert "trainer (process" in said and "ended without a word" in said
    assert "ActorDied" not in said and "(raylet)" not in said
    assert_same_run(run_dir, local)
    assert {"rollout-0.log", "rollout-1.log", "rollout-2.log", "trainer.log"} == {
        path.name for path in (run_dir / "logs").iterdir()
    }
    assert not (run_dir / ".here").exists()


@pytest.mark.slow
def test_a_run_on_ray_that_is_told_to_stop_saves_leaves_nobody_behind_and_goes_on(local: Path, tmp_path: Path) -> None:
    recipe, run_dir = write_recipe(tmp_path, "run", **SYNC, runtime="ray"), tmp_path / "run"
    run = start(recipe, start_new_session=True)
    wait_for(run_dir, 1, run)
    others = [pid_of(run_dir, name) for name in ("rollout-0", "rollout-1", "trainer")]
    os.killpg(run.pid, signal.SIGTERM)  # as a batch system does: Ray's own processes get it too
    said, _ = run.communicate(timeout=300)
    assert run.returncode == 130 and "saved " in said, said
    deadline_s = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in others):
        assert time.monotonic() < deadline_s, "a process outlives the run"
        time.sleep(0.1)
    again = start(recipe, "--resume")
    said, _ = again.communicate(timeout=600)
    assert again.returncode == 0, said
    assert_same_run(run_dir, local)


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two nodes on this machine, of two and one CPUs, as others may share a cluster."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=1, labels={"ray.io/availability-region": "east"})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_a_cluster_that_is_too_small_says_so_at_once_and_one_that_is_not_is_filled(
    two_nodes: Cluster, one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path, "run", **SYNC, runtime="ray")
    with pytest.raises(ValueError, match=r"asks for 4 CPU .*free now: .* has 2 CPU; .* has 1 CPU \(of 3 CPU in all\)"):
        run_training(load_config(recipe, ["rollout.workers=3", "rollout.threads=1"]), quiet=True)
    assert not (tmp_path / "run").exists(), "nothing was begun"
    with blind_worker(monkeypatch) as seen:
        assert run_training(load_config(recipe, ["rollout.threads=1"]), quiet=True).reason == "done"
    assert len({seen["trainer"], seen["rollout-0"], seen["rollout-1"]}) == 2
    assert "000004.on.000003" in seen["shelf"] and seen["parcels"] == "", "weights came to the other node by the tree"
    assert seen["left"] == "", "and are gone with the run"
    assert seen["site"] == "east"
    with RunStore(tmp_path / "run", read_only=True) as store:
        workers = {one.device for one in store.ledger() if one.account == "decode"}
    assert workers == {"rollout-0", "rollout-1"}


@contextmanager
def blind_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The second worker takes the run's folder for one that it does not see: simulated by a marker that is not there,
    since both nodes are this machine. What was seen of the run."""
    plain, plain_close = ray_runtime.RayRuntime._folder_for, ray_runtime.RayRuntime.close
    plain_parcel = ParcelPost.parcel
    seen: dict[str, str] = {"parcels": ""}

    def folder_for(self: ray_runtime.RayRuntime, name: str) -> SharedFolder:
        folder = plain(self, name)
        if name != "rollout-1":
            return folder
        return SharedFolder(folder.path, folder.path / "no marker", folder.token, folder.weights)

    def close(self: ray_runtime.RayRuntime) -> None:
        seen.update({link.name: link.where.node_id for link in self._links if link.where is not None})
        seen["shelf"] = " ".join(path.name for path in self._folder.weights_elsewhere.iterdir())
        seen["site"] = ray_runtime._sites()[seen["rollout-1"]]
        plain_close(self)
        seen["left"] = " ".join(path.name for path in self._folder.elsewhere.iterdir() if path.is_dir())

    def parcel(self: ParcelPost, number: int, held: int | None) -> Parcel:
        seen["parcels"] += f"{number} "
        return plain_parcel(self, number, held)

    monkeypatch.setattr(ray_runtime.RayRuntime, "_folder_for", folder_for)
    monkeypatch.setattr(ray_runtime.RayRuntime, "close", close)
    monkeypatch.setattr(ParcelPost, "parcel", parcel)
    yield seen


@pytest.mark.slow
def test_when_the_tree_breaks_weights_come_by_the_object_store(
    two_nodes: Cluster, one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_link, "TREE_S", 0.5)
    groves: list[Grove] = []
    plain_send = ray_link.RayLink._send_weights

    def send(self: ray_link.RayLink, messages: list[Any]) -> None:
        if self.name == "rollout-1" and any(isinstance(one, TakeWeights) and one.number == 2 for one in messages):
            for relay in groves[-1].relays.values():
                ray.kill(relay)  # after it has brought this one
        plain_send(self, messages)

    def grove(*arguments: Any) -> Any:
        groves.append(Grove(*arguments))
        return groves[-1]

    monkeypatch.setattr(ray_link.RayLink, "_send_weights", send)
    monkeypatch.setattr(ray_runtime, "Grove", grove)
    recipe = write_recipe(tmp_path, "run", **SYNC, runtime="ray")
    with blind_worker(monkeypatch) as seen:
        assert run_training(load_config(recipe, ["rollout.threads=1"]), quiet=True).reason == "done"
    assert len(groves) == 1 and seen["parcels"].split() == ["3", "4"], "the first came by the tree"
    assert "is broken" in (tmp_path / "run" / "logs" / "trainer.log").read_text()


@pytest.mark.slow
def test_ranks_on_ray_meet_over_the_network(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "run", **SYNC, runtime="ray")
    changes = ["train.ranks=2", "train.steps=1", "warmup.steps=1", "rollout.workers=1", "eval.before_train=false"]
    assert run_training(load_config(recipe, changes), quiet=True).reason == "done"
    assert {"trainer-0.log", "trainer-1.log", "rollout-0.log"} == {
        path.name for path in (tmp_path / "run" / "logs").iterdir()
    }
