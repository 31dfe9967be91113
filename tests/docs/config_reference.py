"""Makes docs/howto/config.md from the settings classes.

    python tests/docs/config_reference.py > docs/howto/config.md

The page cannot say what the code does not: keys, types, defaults and meanings are read from the classes.
"""

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from flexmarl.config.run_settings import RunSettings
from flexmarl.plugins import SettingsTable

HEAD = """# Every key of a config

Made from the settings classes by `python tests/docs/config_reference.py`; a test compares the two.

A config is one YAML file. It may stand on top of others, `extends: [workload.yaml, system.yaml]`, relative to the file
that says so: its own keys count, then those of later files. Any key can be overridden on the command line, by its
dotted path. A value must be what it looks like: a whole number where a number of things is wanted (`1e3` is one), no
`true` for 1, no text in quotes for a number, and nothing infinite:

```bash
flexmarl train examples/math_team/cpu.yaml batch.groups=8 policies.solver.training.optimizer.learning_rate=3e-4
```

An unknown key is an error that names the nearest valid one. A key without default must be given.
`NAME` stands for a name of yours, `[]` for an item of a list.
Where a section has several kinds, `type` chooses one and must be given.

## The keys that matter, by goal

Begin with a config of `examples/`, and touch these keys first. [metrics.md](metrics.md) says what each metric means.

| goal, or what you see | keys | what to do |
|---|---|---|
"""

GOALS = (
    (
        "A first try in a minute",
        "steps batch.groups evaluate.tasks",
        "2, 4 and 8; then raise them",
    ),
    (
        "It learns too slowly",
        "policies.NAME.training.optimizer.learning_rate batch.groups batch.episodes",
        "Raise the rate by 2 to 3 while `train/{policy}/entropy` falls slowly; larger batches are less noisy, "
        "not faster",
    ),
    (
        "Rewards are flat, groups are dropped",
        "batch.episodes credit.filter.refill tasks credit.shaping",
        "See `filter/{agent}/...`. Too hard: easier tasks or more episodes; too easy: harder tasks; "
        "`refill=true` plays others in place of those dropped",
    ),
    (
        "It gets better, then collapses",
        "policies.NAME.training.optimizer.learning_rate policies.NAME.training.kl policies.NAME.training.entropy_coef",
        "Lower the rate by 3; `kl={coef: 0.05}`; an entropy bonus of 0.001 to 0.03",
    ),
    (
        "One agent learns, another does not",
        "credit.estimator.type credit.per_agent credit.agent_balance",
        "`default` compares each agent's turns with its own; `agent_balance=equal` if both share a policy",
    ),
    (
        "Out of memory in training",
        "policies.NAME.training.max_tokens_per_forward policies.NAME.training.activation_checkpointing "
        "policies.NAME.training.lora",
        "Halve the first until it fits: the result is the same ([memory](own_model.md#memory))",
    ),
    (
        "Out of memory in an engine",
        "policies.NAME.engine.kv_gib policies.NAME.engine.slots",
        "The first bounds keys and values; what does not fit waits, and is computed again",
    ),
    (
        "Replies are cut",
        "team.agents.NAME.sampling.max_tokens policies.NAME.engine.max_len credit.untrained_finish",
        "Raise the first two; `[length]` leaves cut replies out of training",
    ),
    (
        "Conversations outgrow `max_len`",
        "team.agents.NAME.context policies.NAME.engine.max_len",
        "`{last: 2}` forgets acts, `{compact: ...}` lets the agent sum up, and trains it to ([context](context.md))",
    ),
    (
        "Rollout is slow, engines are idle",
        "rollout.inter_query rollout.intra_query policies.NAME.engine.slots",
        "Their product is the number of episodes that play at once: raise it until `slots` are in use",
    ),
    (
        "One slow episode holds up the step",
        "rollout.episode_timeout_s mode",
        "Bound it; or use `mode=async`, which trains on what has finished",
    ),
    (
        "Rollout waits for training",
        "mode policies.NAME.training.micro_batch pipeline.lag",
        "`microbatch` trains while others play and stays on-policy; `one_step_off` and `async` overlap more, "
        "with `correction`",
    ),
    (
        "Training waits for rollout",
        "policies.NAME.instances rollout.inter_query",
        "With `cluster.backend=ray`, more engines",
    ),
    (
        "Two runs differ",
        "seed deterministic",
        "The same seed gives the same tasks and calls; `deterministic=true` the same weights, bit for bit",
    ),
    (
        "The disk fills up",
        "checkpoint.every checkpoint.keep checkpoint.budget_gb",
        "Fewer checkpoints; [what a checkpoint holds](resume.md)",
    ),
)
"""What a reader wants or sees, the keys to touch first, separated by spaces, and what to do with them."""


def reference() -> str:
    """The whole page."""
    goals = (f"| {goal} | {', '.join(f'`{key}`' for key in those.split())} | {do} |" for goal, those, do in GOALS)
    return "\n".join([HEAD + "\n".join(goals) + "\n", *_sections(RunSettings, "")])


def keys(model: type[BaseModel] = RunSettings, path: str = "") -> Iterator[str]:
    """Every key and section by its dotted path, with `NAME` and `[]` as on the page."""
    for name, field in model.model_fields.items():
        yield (where := f"{path}.{name}".removeprefix("."))
        for below, kind in _models(field.annotation, where, field.metadata):
            yield from (below, *keys(kind, below))


def _sections(model: type[BaseModel], path: str, like: type[BaseModel] | None = None) -> Iterator[str]:
    """One table per settings class, the class's own keys first, then those below them.

    `like`: another kind with the same keys; only what differs from it is said.
    """
    kind = model.model_fields.get("type")
    chosen = f" (type: {kind.default})" if path and kind and isinstance(kind.default, str) else ""
    yield f"## {path or 'The run'}{chosen}\n"
    yield _first_sentence(model) + "\n"
    fields = {name: field for name, field in model.model_fields.items() if not _as_in(like, name, field)}
    if like:
        yield f"The keys of `{like.model_fields['type'].default}`, with these defaults:\n"
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in sorted(fields.items(), key=lambda item: item[0] != "type"):
        yield f"| `{name}` | {_type(field)} | {_default(field)} | {_meaning(model, name, field)} |"
    yield ""
    told: list[list[type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        kinds: list[type[BaseModel]] = []
        of_field = list(_models(field.annotation, f"{path}.{name}".removeprefix("."), field.metadata))
        # Of two keys with the same kinds, such as credit.estimator and credit.per_agent.NAME, the first has the tables.
        told.append([kind for _, kind in of_field])
        for where, below in of_field if told[-1] not in told[:-1] or len(told[-1]) < 2 else []:
            same = (
                kind
                for kind in kinds
                if "type" in kind.model_fields and kind.model_fields.keys() == below.model_fields.keys()
            )
            yield from _sections(below, where, next(same, None))
            kinds.append(below)


def _as_in(other: type[BaseModel] | None, name: str, field: FieldInfo) -> bool:
    return other is not None and other.model_fields[name].default == field.default


def _table(metadata: typing.Iterable[Any]) -> SettingsTable[Any] | None:
    """The table that a field's settings are chosen from, if there is one."""
    return next((one for one in metadata if isinstance(one, SettingsTable)), None)


def _models(annotation: Any, path: str, metadata: typing.Iterable[Any] = ()) -> Iterator[tuple[str, type[BaseModel]]]:
    """The settings classes that a field may hold, and their dotted paths: of a table, those of the package."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if table := _table(metadata):
        yield from ((path, table[name]) for name in table.built_in)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield path, annotation
    elif origin is typing.Annotated:
        yield from _models(arguments[0], path, arguments[1:])
    elif origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from _models(argument, path)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        yield from _models(arguments[1], f"{path}.NAME")
    elif origin in (list, tuple) and arguments:
        yield from _models(arguments[0], f"{path}[]")


def _type(field: FieldInfo) -> str:
    shown = _name(field.annotation, field.metadata)
    for constraint in field.metadata:
        for sign, attribute in ((">=", "ge"), (">", "gt"), ("<=", "le"), ("<", "lt")):
            bound = getattr(constraint, attribute, None)
            if bound is not None:
                shown += f", {sign} {bound:g}"
    return shown


def _name(annotation: Any, metadata: typing.Iterable[Any] = ()) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if _table(metadata):
        return "section"
    if annotation is type(None):
        return "null"
    if origin is typing.Annotated:
        return _name(arguments[0], arguments[1:])
    if origin is typing.Literal:
        return " / ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_name, arguments)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"{_name(arguments[1])} by name" if arguments[1] is not Any else "mapping"
    if origin in (list, tuple):
        return f"list of {_name(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " / ".join(f"`{member.value}`" for member in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    plain = {str: "text", int: "integer", float: "number", bool: "true / false"}
    return plain.get(annotation, getattr(annotation, "__name__", str(annotation)).lower())


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "*required*"
    if isinstance(default, BaseModel):
        kind = getattr(default, "type", None)
        return f"type `{kind}`" if kind else "see below"
    if isinstance(default, Enum):
        default = default.value
    if default is None or isinstance(default, bool):
        return f"`{str(default).lower().replace('none', 'null')}`"
    if isinstance(default, tuple | list):
        return f"`[{', '.join(map(str, default))}]`"
    shown = str(default).replace("\n", "\\n")
    return f"`{shown}`" if shown else "empty"


def _meaning(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    """What the field says of itself, or what the settings class that it holds says."""
    own = field.description or _docstrings(model).get(name, "")
    if not own and name == "type":
        own = "This kind."
    kinds = [below for _, below in _models(field.annotation, "", field.metadata)]
    if not own and kinds:
        own = _first_sentence(kinds[0])
    if len(kinds) > 1:
        own = "One of " + ", ".join(f"`{kind.model_fields['type'].default}`" for kind in kinds) + "."
    return " ".join(own.split()).replace("|", "\\|")


@cache
def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Texts below the fields of a class and its bases, by field."""
    found: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if not issubclass(owner, BaseModel) or owner is BaseModel:
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                    found[name] = said
    return found


def _first_sentence(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


if __name__ == "__main__":
    print(reference())
