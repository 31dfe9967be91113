"""What becomes of trained policies: exports of any checkpoint, model cards, the hub, and runs that begin with them."""

import base64
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from flexmarl.cli import app
from flexmarl.config import load_run
from flexmarl.errors import ConfigError, FlexmarlError
from flexmarl.orchestrator.checkpoint import CheckpointFolder

RUNNER = CliRunner()
SECRET = "hf_0123456789abcdef"


def flexmarl(*words: object, fails: type[FlexmarlError] | None = None) -> list[str]:
    """The lines that a command prints, or those of the error that it must end with."""
    result = RUNNER.invoke(app, [str(word) for word in words])
    if fails is not None:
        assert isinstance(result.exception, fails), result.output
        return str(result.exception).splitlines()
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return result.output.strip().splitlines()


@pytest.fixture(scope="module")
def adapted(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps, of which all checkpoints are kept. Its policy has an adapter."""
    config = yaml.safe_load(small_run.read_text())
    config["base"] = str(small_run.parent)
    config["policies"]["one"]["training"]["lora"] = {"rank": 2}
    config["team"]["agents"]["solver"]["system"] = f"Answer. Never say {SECRET}."
    config["steps"] = 3
    config["checkpoint"] = {"every": 1, "keep": 3, "best": {"metric": "reward/solver"}}
    config["evaluate"] = {"tasks": 4, "every": 1, "every_tasks": 4}
    folder = tmp_path_factory.mktemp("adapted")
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return Path(flexmarl("train", folder / "run.yaml", f"out={folder / 'runs'}", "--quiet")[-1])


def logits(folder: Path, **how: Any) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, **how)(torch.arange(1, 9)[None]).logits


def test_a_step_the_newest_and_the_best_are_exported(adapted: Path, tmp_path: Path) -> None:
    best = CheckpointFolder(adapted / "checkpoints").best()
    assert best in (1, 2, 3)
    found = {}
    for name, options in {"newest": [], "best": ["--best"], **{str(n): ["--step", n] for n in (1, 2, 3)}}.items():
        (path,) = flexmarl("export", adapted, tmp_path / name, *options)
        found[name] = logits(Path(path))
    assert torch.equal(found["newest"], found["3"])
    assert torch.equal(found["best"], found[str(best)])
    assert not torch.equal(found["1"], found["3"])


def test_the_form_is_chosen_when_exporting_and_adapter_on_base_equals_merged(adapted: Path, tmp_path: Path) -> None:
    (merged,) = flexmarl("export", adapted, tmp_path / "merged", "--merged")
    (adapter,) = flexmarl("export", adapted, tmp_path / "adapter", "--adapter")
    assert not list(Path(adapter).glob("model*.safetensors"))
    assert (Path(adapter) / "adapter_model.safetensors").is_file()
    assert not list(Path(merged).glob("adapter*"))
    torch.testing.assert_close(logits(Path(adapter)), logits(Path(merged)), rtol=1e-5, atol=1e-5)


def test_what_another_export_wrote_is_not_written_over(adapted: Path, tmp_path: Path) -> None:
    (path,) = flexmarl("export", adapted, tmp_path / "out", "--step", 1)
    before = {file.name: file.read_bytes() for file in Path(path).iterdir()}
    (said, *_) = flexmarl("export", adapted, tmp_path / "out", "--adapter", fails=ConfigError)
    assert f"OUT: '{path}' exists already; use another folder, or remove it" in said
    assert {file.name: file.read_bytes() for file in Path(path).iterdir()} == before


def test_the_model_card_has_tasks_figures_and_settings_and_no_secret(adapted: Path, tmp_path: Path) -> None:
    (path,) = flexmarl("export", adapted, tmp_path / "out", "--step", 2)
    card = (Path(path) / "README.md").read_text()
    head, _, text = card.removeprefix("---\n").partition("---\n")
    assert yaml.safe_load(head)["tags"] == ["flexmarl", "reinforcement-learning", "multi-agent"]
    assert text.startswith(f"# one, of the run {adapted.name}\n")
    assert "2 steps, version 2" in text
    steps = {line["step"]: line for line in map(json.loads, (adapted / "metrics.jsonl").read_text().splitlines())}
    before, after = (steps[step]["eval/reward/solver"] for step in (0, 2))
    assert "| on held-out tasks | step 0 | step 2 |" in text
    assert f"| reward/solver | {before:.3f} | {after:.3f} |" in text
    blocks = text.split("```yaml\n")[1:]
    settings = yaml.safe_load(blocks[-1].split("```")[0])
    assert settings["batch"] == load_run(adapted / "config.yaml").batch.model_dump(mode="json")
    assert "Answer. Never say ***." in text
    assert SECRET not in text
    assert str(Path.home()) + "/" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", 7], "no checkpoint of step 7 in"),
        (["--step", 1, "--best"], "--step and --best exclude each other"),
        (["--adapter", "--merged"], "--adapter and --merged exclude each other"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(adapted: Path, tmp_path: Path, options: list[Any], message: str) -> None:
    assert message in flexmarl("export", adapted, tmp_path / "out", *options, fails=FlexmarlError)[0]


class Hub(BaseHTTPRequestHandler):
    """The part of the Hugging Face hub's API that an upload of small files uses; files are in the commit itself."""

    repositories: dict[str, dict[str, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {SECRET}":
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            private = asked.get("private", asked.get("visibility") == "private")
            self.repositories[name] = {"private": private, "files": {}}
            self.answer({"url": f"http://{self.headers['Host']}/{name}", "name": name, "id": name})
        elif self.path == "/api/validate-yaml":  # The head of the model card.
            assert json.loads(body)["content"].startswith("---\nlibrary_name: transformers\n")
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]
            self.answer({"files": modes})
        elif "/commit/" in self.path:
            name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            lines = [json.loads(line) for line in body.splitlines()]
            files = {line["value"]["path"]: line["value"]["content"] for line in lines if line["key"] == "file"}
            self.repositories[name]["files"] |= files
            self.repositories[name]["summary"] = lines[0]["value"]["summary"]
            url = f"http://{self.headers['Host']}/{name}/commit/{'0' * 40}"
            self.answer({"commitUrl": url, "commitOid": "0" * 40, "pullRequestUrl": None})
        else:
            self.answer({"error": f"no such address: {self.path}"}, 404)

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/").partition("/revision/")[0].partition("?")[0]
        known = name in self.repositories
        self.answer({"id": name, "sha": "0" * 40, "siblings": []} if known else {"error": name}, 200 if known else 404)

    def answer(self, value: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


@pytest.fixture
def hub() -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Address and repositories of a hub."""
    repositories: dict[str, dict[str, Any]] = {}
    handler = type("OwnHub", (Hub,), {"repositories": repositories})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}", repositories
        server.shutdown()
        serving.join()


def pushed(folder: Path, out: Path, endpoint: str, *options: str, token: str = SECRET) -> Any:
    """A process of its own: the hub's client reads its address when it is imported."""
    environment = os.environ | {
        "HF_ENDPOINT": endpoint, "HF_TOKEN": token, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(out / "home"), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    program = "from flexmarl.cli import main; main()"
    words = ["export", str(folder), str(out), "--push", "me/sums", *options]
    return subprocess.run(
        [sys.executable, "-c", program, *words], env=environment, capture_output=True, text=True, check=False
    )


def test_an_export_is_pushed_to_the_hub_private_and_whole(adapted: Path, tmp_path: Path, hub: Any) -> None:
    endpoint, repositories = hub
    done = pushed(adapted, tmp_path / "out", endpoint, "--adapter")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{endpoint}/me/sums"
    (name,) = repositories
    assert (name, repositories[name]["private"]) == ("me/sums", True)
    assert repositories[name]["summary"] == "Policy one after step 3, trained with flexmarl"
    for path, content in repositories[name]["files"].items():
        assert base64.b64decode(content) == (tmp_path / "out" / "one" / path).read_bytes()
    assert {"README.md", "adapter_model.safetensors", "adapter_config.json"} <= set(repositories[name]["files"])
    assert SECRET not in done.stdout + done.stderr


def test_a_refused_push_says_how_to_log_in(adapted: Path, tmp_path: Path, hub: Any) -> None:
    done = pushed(adapted, tmp_path / "out", hub[0], "--public", token="hf_wrongwrongwrong")
    assert done.returncode == 1
    assert "--push me/sums (log in with `hf auth login`, or set HF_TOKEN)" in done.stderr
    assert "hf_wrong" not in done.stderr
    assert (tmp_path / "out" / "one" / "config.json").is_file()


def test_a_run_begins_with_the_weights_of_another(adapted: Path, small_run: Path, tmp_path: Path) -> None:
    (exported,) = flexmarl("export", adapted, tmp_path / "out", "--step", 2, "--merged")
    start = f"policies.one.model={{run: {adapted}, policy: one, step: 2}}"
    folder = Path(flexmarl("train", small_run, start, "steps=1", f"out={tmp_path / 'runs'}")[-1])
    theirs = load_file(Path(exported) / "model.safetensors")
    ours = load_file(folder / "start" / "one" / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert f"of the run {adapted.name}" in (folder / "start" / "one" / "README.md").read_text()
    assert load_run(folder / "config.yaml").policies["one"].model == str(folder.absolute() / "start" / "one")
    flexmarl("train", folder / "config.yaml", "steps=2", "--resume", folder)
    assert sorted(path.name for path in (folder / "checkpoints").glob("step-*"))[-1] == "step-00002"


def test_a_team_is_evaluated_with_the_policies_of_another_run(adapted: Path, small_run: Path) -> None:
    told = [f"policies.one.model={{run: {adapted}, policy: one}}", "evaluate={tasks: 4, temperature: 0}"]
    config = yaml.safe_load((adapted / "config.yaml").read_text())
    told.append(f"team.agents.solver.system={config['team']['agents']['solver']['system']!r}")
    begun = json.loads(flexmarl("eval", small_run, *told, "--json")[-1])
    trained = json.loads(flexmarl("eval", adapted, "evaluate={tasks: 4, temperature: 0}", "--json")[-1])
    assert begun["metrics"] == trained["metrics"]
    assert begun["rewards"] == trained["rewards"]


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("{run: nowhere, policy: one}", r"policies.one.model.run: '.*nowhere' is no run folder"),
        ("{run: RUN, policy: two}", r"policies.one.model.policy: 'RUN' trained no policy 'two'; it trained: one"),
        ("{run: RUN, policy: one, step: 9}", r"policies.one.model.step is 9: no checkpoint of step 9 in .*: 1, 2, 3"),
        ("{run: RUN}", r"policies\.one\.model\.policy is missing"),
        ("{run: RUN, policy: one, step: last}", r"policies\.one\.model\.step must be newest, best, or a number"),
    ],
)
def test_a_start_that_is_not_there_names_the_key(adapted: Path, small_run: Path, start: str, message: str) -> None:
    words = ["check", small_run, f"policies.one.model={start.replace('RUN', str(adapted))}"]
    assert re.search(message.replace("RUN", str(adapted)), flexmarl(*words, fails=ConfigError)[0])
