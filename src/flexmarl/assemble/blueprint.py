"""Makes from settings the parts of a run that need no weights: tasks, renderers, team. `flexmarl check` stops here."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from string import printable
from typing import Any

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from flexmarl.agents import ChatRenderer, TeamSpec
from flexmarl.agents.characters import character_renderer
from flexmarl.agents.telling import Told, told_of_tools
from flexmarl.assemble.boxes import sandbox_of
from flexmarl.cluster.interpreters import require_interpreter
from flexmarl.cluster.settings import ClusterSettings
from flexmarl.config import RunSettings, load_run
from flexmarl.config.run_settings import FromRun
from flexmarl.errors import CheckpointError, ConfigError, MissingExtra, described
from flexmarl.events.journal import check_format
from flexmarl.events.run_folder import RunFolder
from flexmarl.inference.settings import VllmSettings, own_python
from flexmarl.orchestrator.checkpoint import CheckpointFolder
from flexmarl.records import IntArray, PolicyName
from flexmarl.tasks import TaskSource, check_disjoint, shared_prompts
from flexmarl.training.backends.causal_lm import check_model_files, some_of

HUB_ANSWER_S = 10.0
"""Seconds that the Hugging Face hub may take to answer."""
TOKENIZER_FILE = "tokenizer_config.json"
"""Files that every `save_pretrained` of a tokenizer writes."""
MOST_RENDERERS = 16
"""Renderers that are kept for policies of the same model. One of a large vocabulary takes a second to make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """The parts of a run that need no weights."""

    settings: RunSettings
    source: TaskSource
    team: TeamSpec


def draw_up(settings: RunSettings, *, disjoint: bool = True) -> Blueprint:
    """Opens the tasks, builds the team, and checks the models' files. Raises ConfigError that names the key.

    Without `disjoint`, prompts that are trained on may be held out too; see `trained_on`.
    """
    check_device(settings.cluster)
    if settings.cluster.backend != "simulated":
        for policy in settings.policies:
            check_model(settings, policy)
            check_library(settings, policy)
    return Blueprint(settings=settings, source=open_tasks(settings, disjoint=disjoint), team=seat_team(settings))


def refuse_simulated(settings: RunSettings) -> None:
    """Raises ConfigError if the run is to be simulated, for commands whose engines and trainers compute."""
    if settings.cluster.backend == "simulated":
        raise ConfigError(
            "cluster.backend is 'simulated', whose seconds are virtual; use `flexmarl simulate`, or "
            "cluster.backend=inline or ray"
        )


def check_device(cluster: ClusterSettings) -> None:
    """Raises ConfigError if this machine lacks the device. A Ray cluster is asked for its devices at the start."""
    if cluster.backend != "inline" or cluster.device == "cpu":
        return
    if not torch.cuda.is_available():
        raise ConfigError(f"cluster.device={cluster.device}, but torch sees no CUDA device; use cluster.device=cpu")
    if (torch.device(cluster.device).index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"cluster.device={cluster.device}, but torch sees {torch.cuda.device_count()} CUDA devices; use cuda:0 to "
            f"cuda:{torch.cuda.device_count() - 1}"
        )


def open_tasks(settings: RunSettings, *, disjoint: bool = True) -> TaskSource:
    """Opens the tasks; training and held-out ones must be disjoint, unless `disjoint` is False."""
    source = settings.tasks.open(seed=settings.seed, base=settings.base)
    num_train = settings.batch.groups * settings.steps
    if source.num_train is not None and source.num_train < num_train:
        most = {"steps": source.num_train // settings.batch.groups, "batch.groups": source.num_train // settings.steps}
        fewer = "".join(f"at most {key}={number}, or " for key, number in most.items() if number)
        raise ConfigError(
            f"tasks: steps={settings.steps} of batch.groups={settings.batch.groups} need {num_train} tasks, there are "
            f"{source.num_train}; use {fewer}a higher tasks.epochs"
        )
    if settings.evaluate.tasks and not source.held_out(1):
        raise ConfigError(
            f"evaluate.tasks is {settings.evaluate.tasks}, but the tasks hold none out; use evaluate.tasks=0, or "
            f"tasks.held_out_share=0.1"
        )
    if disjoint:
        check_disjoint(source, num_train=num_train, num_held_out=settings.evaluate.tasks)
    return source


def trained_on(blueprint: Blueprint) -> str:
    """Returns a text that counts and names the held-out tasks whose prompts are trained on; empty without any."""
    settings = blueprint.settings
    num_train, num_held_out = settings.batch.groups * settings.steps, settings.evaluate.tasks
    shared = shared_prompts(blueprint.source, num_train=num_train, num_held_out=num_held_out)
    found = {held_out: f"{held_out} ({task.input_id})" for _, task, held_out in shared}
    said = f"{len(found)} held-out tasks have the prompts of training tasks, in parentheses, so they are not new"
    return f"{said}: {some_of([*found.values()])}" if found else ""


def seat_team(settings: RunSettings) -> TeamSpec:
    """Builds the team, with a chat renderer on each policy's own tokenizer; a simulated team needs no model."""
    renderers = {PolicyName(name): load_renderer(settings, name) for name in settings.policies}
    trained = [PolicyName(name) for name in settings.trained]
    adapters = [name for name in trained if settings.policies[name].training.lora is not None]
    one_base = len({str(settings.policies[name].model) for name in adapters}) == 1
    code = [settings.path(path).absolute() for path in settings.code]
    return TeamSpec.build(
        settings.team, renderers, trained, adapters if one_base else (), code=code, sandbox=sandbox_of(settings)
    )


def told_of(settings: RunSettings, agent: str) -> Told:
    """Returns how an agent learns of its tools, the syntax of its calls, and the renderer of its conversations."""
    asked = settings.team.agents[agent]
    return told_of_tools(asked, load_renderer(settings, asked.policy))


def load_renderer(settings: RunSettings, policy: str) -> ChatRenderer:
    """Makes a renderer on a policy's tokenizer; in a simulation without the model's folder, on characters.

    Policies of one model share it, for as long as the model's files stay as they are.
    """
    if settings.cluster.backend == "simulated" and not has_folder(settings, policy):
        return character_renderer()
    source, end_ids = model_source(settings, policy), load_end_ids(settings, policy)
    key = (source, end_ids, _state(Path(source)))
    if key not in _RENDERERS:
        renderer = ChatRenderer(load_tokenizer(settings, policy), end_ids=end_ids)
        if len(_RENDERERS) == MOST_RENDERERS:
            del _RENDERERS[next(iter(_RENDERERS))]
        _RENDERERS[key] = renderer
    return _RENDERERS[key]


_RENDERERS: dict[Hashable, ChatRenderer] = {}


def _state(folder: Path) -> Hashable:
    """Names, sizes and times of the files that a tokenizer is loaded from; empty for a name on the hub."""
    files = [*folder.glob("*"), *folder.glob("*/*.jinja")]
    states = [(str(file), file.stat()) for file in sorted(files) if file.is_file()]
    return tuple((name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states)


def load_end_ids(settings: RunSettings, policy: str) -> tuple[int, ...]:
    """Loads the ids that end a response, of the model's generation config, or of its config where it has no such file;
    none without either."""
    source, key = model_source(settings, policy), f"policies.{policy}.model"
    for name, kind in {"generation_config.json": GenerationConfig, "config.json": AutoConfig}.items():
        try:
            loaded = kind.from_pretrained(source)
            ids: Any = getattr(loaded, "text_config", loaded).eos_token_id
        except OSError:  # The file is not there, neither in the folder nor on the hub.
            continue
        except Exception as error:  # A broken file may raise anything.
            raise ConfigError(f"{key}: the {name} of '{source}' cannot be read: {error}") from error
        found = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
        if bad := [one for one in found if not isinstance(one, int) or one < 0]:
            raise ConfigError(f"{key}: eos_token_id in the {name} of '{source}' must be ids, got {bad[0]!r}")
        return tuple(found)
    return ()


def has_folder(settings: RunSettings, policy: str) -> bool:
    """Says whether the policy's model is in a folder of this machine."""
    model = settings.policies[policy].model
    if isinstance(model, FromRun):
        return Path(model_source(settings, policy)).is_dir()
    return (settings.path(model) / "config.json").is_file()


def load_tokenizer(settings: RunSettings, policy: str) -> PreTrainedTokenizerBase:
    """Loads a policy's tokenizer from its model's folder or name."""
    source, key = model_source(settings, policy), f"policies.{policy}.model"
    if Path(source).is_dir() and not (Path(source) / TOKENIZER_FILE).is_file():
        # Without it transformers guesses one from the kind of model, with no words in it or with other rules.
        raise ConfigError(
            f"{key}: '{source}' has no {TOKENIZER_FILE}; save the model's own tokenizer there with `save_pretrained`"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        ids = tokenizer(printable).input_ids
    except Exception as error:  # Whatever a file of the user's or the hub leads to; often many lines.
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"{key}: no tokenizer from '{source}': {why[0]}") from error
    if not ids:
        raise ConfigError(
            f"{key}: the tokenizer of '{source}' knows {len(tokenizer)} tokens and turns letters and digits into none; "
            f"its vocabulary is missing: save it there with `save_pretrained`"
        )
    return tokenizer


def decoder_of(settings: RunSettings) -> Callable[[PolicyName, IntArray], str]:
    """Text of ids by the policy's tokenizer, special tokens included. A tokenizer is loaded when first needed."""
    tokenizers: dict[PolicyName, PreTrainedTokenizerBase] = {}

    def decode(policy: PolicyName, ids: IntArray) -> str:
        if policy not in tokenizers:
            tokenizers[policy] = load_tokenizer(settings, policy)
        text = tokenizers[policy].decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str), "one sequence of ids, not several"
        return text

    return decode


@contextmanager
def training_of(policy: str) -> Iterator[None]:
    """Puts the policy into errors about section `training`, whose code does not know it."""
    try:
        yield
    except ConfigError as error:
        if not str(error).startswith("training."):
            raise
        raise ConfigError(f"policies.{policy}.{error}") from error


def check_model(settings: RunSettings, policy: str) -> None:
    """Raises ConfigError if a policy's files are not one whole model with its tokenizer; reads no weight.

    A model that runs on a server has only its tokenizer here.
    """
    source, key = model_source(settings, policy), f"policies.{policy}.model"
    if not Path(source).is_dir():
        _ask_hub(source, key)
    if not settings.policies[policy].needs_weights:
        load_tokenizer(settings, policy)
        return
    try:
        model = check_model_files(source)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    embeddings: Any = model.get_input_embeddings()
    tokens, rows = len(load_tokenizer(settings, policy)), embeddings.num_embeddings
    if tokens > rows:
        raise ConfigError(
            f"{key}: the tokenizer of '{source}' has {tokens} tokens, the model only {rows}; save the tokenizer that "
            f"belongs to the model"
        )


def check_library(settings: RunSettings, policy: str) -> None:
    """Raises ConfigError if a policy's engine lacks its library, here or in the environment that it asks for."""
    engine, at = settings.policies[policy].engine, f"policies.{policy}.engine"
    needs = ("vllm",) if isinstance(engine, VllmSettings) else ()
    if (python := own_python(engine)) is not None:
        require_interpreter(settings.path(python).absolute(), f"{at}.python", packages=needs)
    elif needs and find_spec("vllm") is None:
        raise MissingExtra("vllm", f"{at}.type vllm without {at}.python")


def _ask_hub(source: str, key: str) -> None:
    """Raises ConfigError if the hub has to be asked for a model and does not answer.

    It asks once. Transformers would ask for every file again and again, for a minute.
    """
    if isinstance(try_to_load_from_cache(source, "config.json"), str):
        return
    try:
        HfApi().model_info(source, timeout=HUB_ANSWER_S)
    except HfHubHTTPError:
        return  # It answers. What is wrong is told where the model is loaded.
    except Exception as error:  # The network's or the proxy's, which have no common type.
        raise ConfigError(
            f"{key}: the Hugging Face hub does not answer ({described(error)}), and '{source}' is not in its cache; "
            f"give the folder of a model, as `save_pretrained` writes it"
        ) from error


def settings_of_run(settings: RunSettings, start: FromRun, key: str) -> tuple[RunSettings, RunFolder]:
    """Returns the settings and the folder of the run that a policy begins with. Raises ConfigError that names `key`."""
    folder = RunFolder(settings.path(start.run))
    if not folder.config.is_file():
        raise ConfigError(
            f"{key}.run: '{folder.path}' is no run folder: it has no config.yaml; give the path that `train` printed"
        )
    check_format(folder.journal)
    theirs = load_run(folder.config)
    if start.policy not in theirs.trained:
        raise ConfigError(
            f"{key}.policy: '{folder.path}' trained no policy '{start.policy}'; it trained: "
            f"{', '.join(sorted(theirs.trained))}"
        )
    try:
        CheckpointFolder(folder.checkpoints).named(start.step)
    except CheckpointError as error:
        raise ConfigError(f"{key}.step is {start.step!r}: {error}") from error
    return theirs, folder


def model_source(settings: RunSettings, policy: str) -> str:
    """Finds a policy's model: a folder, or a name on the Hugging Face hub. Raises ConfigError.

    For a policy that begins as one of another run, it is the model that the other run began with: the same but for the
    weights.
    """
    model = settings.policies[policy].model
    if isinstance(model, FromRun):
        theirs, _ = settings_of_run(settings, model, f"policies.{policy}.model")
        return model_source(theirs, model.policy)
    folder = settings.path(model)
    if has_folder(settings, policy):
        return str(folder)
    if folder.exists() or model.count("/") != 1 or model.startswith((".", "/")):
        raise ConfigError(
            f"policies.{policy}.model: '{model}' is no Hugging Face model folder ({folder / 'config.json'} does not "
            f"exist); give a folder with config.json and weights, or a hub name such as Qwen/Qwen3-0.6B"
        )
    return model
