"""`flexmarl serve` as a process, over plain HTTP: episodes by hand, rewards, accounts, and no secret on disk."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.served_team import RESPONDER, Served, asked, said, served

pytestmark = pytest.mark.xdist_group("serve")  # So that one server is started for them, and not one in each process.


@pytest.fixture(scope="module")
def server(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve") / "team"
    shutil.copytree(small_run.parent, folder)
    (folder / "speaks.py").write_text(RESPONDER.format(name="two_and_two"))
    engine = "policies.one.engine={type: scripted, name: two_and_two, scramble: true}"
    overrides = ("code=[tasks.py, speaks.py]", engine, "rollout={inter_query: 2, intra_query: 1}")
    with served(folder / small_run.name, *overrides, out=folder / "runs") as found:
        yield found


def begun(server: Served, task: object = None) -> dict:
    status, episode = server.post("/episodes", server.admin_key, {"task": task})
    assert status == 201, episode
    return episode


def test_an_episode_by_hand_from_begin_to_end(server: Served) -> None:
    episode = begun(server, {"prompt": "2+2", "reference": "4"})
    assert episode["task"]["prompt"] == "2+2"
    assert "reference" not in episode["task"]
    reply = said(episode["seats"]["solver"], "2+2")
    assert reply["choices"][0]["message"]["content"] == "2+2"
    at, key = f"/episodes/{episode['episode']}", episode["reward_key"]
    status, account = server.post(f"{at}/rewards", key, {"reward": 0.5, "call": reply["id"]})
    assert (status, account["state"]) == (200, "open")
    assert server.get(at, server.admin_key) == (200, account)
    status, ended = server.post(f"{at}/end", key)
    assert (status, ended["state"], ended["status"]) == (200, "ended", "finished")
    assert [turn["reward"] for turn in ended["rewards"]] == [0.5]
    assert ended["sampled"] == ended["delivered"] == reply["usage"]["completion_tokens"]
    assert server.get(at, key) == (200, ended)
    assert asked(f"{episode['seats']['solver']['openai_url']}/models", episode["key"])[0] == 410


def test_an_episode_without_a_reward_fails_and_says_so(server: Served) -> None:
    episode = begun(server)
    assert episode["task"]["input_id"].startswith("train-")
    said(episode["seats"]["solver"], "1+1")
    _, ended = server.post(f"/episodes/{episode['episode']}/end", episode["reward_key"])
    assert ended["status"] == "failed"
    assert "agent 'solver' got no reward" in ended["reason"]


def test_only_the_admin_key_begins_episodes_and_no_key_of_one_opens_another(server: Served) -> None:
    one, other = begun(server), begun(server)
    for key in (one["key"], one["reward_key"], "0" * 32):
        assert server.post("/episodes", key)[0] == 403
        assert server.get(f"/episodes/{other['episode']}", key)[0] == 403
        assert server.post(f"/episodes/{other['episode']}/end", key)[0] == 403
        assert asked(f"{other['seats']['solver']['openai_url']}/models", key)[0] == 403
    status, full = server.post("/episodes", server.admin_key)
    assert (status, full["error"]["code"]) == (429, "too_many_episodes")
    assert "rollout.inter_query" in full["error"]["message"]
    for episode in (one, other):
        assert server.post(f"/episodes/{episode['episode']}/end", server.admin_key)[0] == 200


@pytest.mark.parametrize("task", [{"reference": "4"}, -1, "first", {"prompt": 3}])
def test_a_task_that_is_none_is_refused(server: Served, task: object) -> None:
    status, refused = server.post("/episodes", server.admin_key, {"task": task})
    assert (status, "task" in refused["error"]["message"]) == (400, True)


def test_no_key_is_in_the_run_folder_and_stopping_ends_what_is_open(small_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "team"
    shutil.copytree(small_run.parent, folder)
    (folder / "speaks.py").write_text(RESPONDER.format(name="two_and_two_again"))
    engine = "policies.one.engine={type: scripted, name: two_and_two_again}"
    with served(folder / small_run.name, "code=[tasks.py, speaks.py]", engine, out=folder / "runs") as server:
        episode = begun(server)
        reply = said(episode["seats"]["solver"], "1+1")
        server.post(
            f"/episodes/{episode['episode']}/rewards", episode["reward_key"], {"reward": 1, "call": reply["id"]}
        )
    assert server.process.returncode == 130
    assert server.process.stderr is not None
    printed = server.process.stderr.read()
    journal = [json.loads(line) for line in (server.run / "journal.jsonl").read_text().splitlines()]
    (account,) = [event for event in journal if event["event"] == "episode_account"]
    assert account["sampled"] == account["delivered"] == reply["usage"]["completion_tokens"]
    kept = [file.read_bytes() for file in server.run.rglob("*") if file.is_file()]
    assert any(reply["choices"][0]["message"]["content"].encode() in one for one in kept), "the folder has the turn"
    for secret in (server.admin_key, episode["key"], episode["reward_key"]):
        assert not any(secret.encode() in one for one in kept)
        assert secret not in printed
