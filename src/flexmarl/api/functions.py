"""Functions of the Python interface: each opens a world in this process, one at a time, and returns what came of it.

Those that block run in the caller's thread. Those named `*_async` run in a thread of their own, with an event loop of
its own, so that the caller's loop stays free: engines and trainers of this process hold up theirs.
"""

import asyncio
import contextvars
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from flexmarl.api.handle import Run, load_run_folder
from flexmarl.config import Overrides, RunSettings, cautions, load_run
from flexmarl.errors import ConfigError, FlexmarlError
from flexmarl.events.event import Notice
from flexmarl.events.progress import SafeConsole
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.safe_json import masked
from flexmarl.imports import Lazy

# The modules below import torch, which takes seconds: they are loaded by the first call that needs them.
if TYPE_CHECKING:
    from flexmarl.assemble import commands, ending, simulation
    from flexmarl.assemble import export as exports
    from flexmarl.assemble.commands import EvaluatedOnce
    from flexmarl.assemble.ending import Supervisor
    from flexmarl.assemble.export import Form
    from flexmarl.orchestrator.checkpoint import Which
    from flexmarl.orchestrator.evaluation import Evaluation
else:
    commands, ending = Lazy("flexmarl.assemble.commands"), Lazy("flexmarl.assemble.ending")
    exports, simulation = Lazy("flexmarl.assemble.export"), Lazy("flexmarl.assemble.simulation")

Source = RunSettings | Path | str
"""Settings, or the path of a YAML file."""
Callbacks = Mapping[type[Notice], Callable[[Any], object]]
"""Functions by type of event, e.g. `{StepEnded: print}`; the key `Event` stands for all types."""
T = TypeVar("T")


def load(path: Path | str, overrides: Mapping[str, Any] | None = None, /, **settings: Any) -> RunSettings:
    """Returns the settings in a YAML file. `overrides` change them by dotted key, keywords those of the top level.

    >>> flexmarl.load("run.yaml", {"batch.groups": 8}, steps=4)  # doctest: +SKIP

    Raises ConfigError with one line per problem: the key, the value, and what would work.
    """
    return load_run(_path(path, "path", "the path of a YAML file"), {**(overrides or {}), **settings})


def open_run(folder: Path | str) -> Run:
    """Returns the run in a run folder. Raises ConfigError if there is none, FlexmarlError if it is of another format.

    The run may have failed, or may still go on in another process.
    """
    _, files = load_run_folder(_folder(folder, "folder"))
    return Run(files.path)


def train(
    source: Source, *, resume: Run | Path | str | None = None, on: Callbacks | None = None, show: bool = True
) -> Run:
    """Trains a team to its last step, in a run folder of its own.

    `resume`: the run, or its folder, to continue from its newest checkpoint; `source` must have its settings. `on`:
    functions to call with events, in the run's thread; the first one that raises ends the run with an error that names
    it. `show`: print the progress.

    Ctrl-C ends it after the step under way, and a second one at once; both raise KeyboardInterrupt. Raises ConfigError
    for settings that do not fit, FlexmarlError for everything else that ends a run; a note on the error says where
    the run can be continued.
    """
    _refuse_loop("train")
    return _train(source, resume, ending.Supervisor(on), show)


async def train_async(
    source: Source, *, resume: Run | Path | str | None = None, on: Callbacks | None = None, show: bool = True
) -> Run:
    """Trains as `train` does, in a thread of its own; callbacks are called there, too.

    If the caller is cancelled, by the interrupt of a notebook's cell say, the run ends after the step under way, within
    `checkpoint.on_interrupt_s`; then the caller gets its CancelledError. A second cancellation ends the run at once.
    """
    return await _in_thread(lambda supervisor: _train(source, resume, supervisor, show), on)


def _train(source: Source, resume: Run | Path | str | None, supervisor: "Supervisor", show: bool) -> Run:
    settings, folder = _settings(source), None if resume is None else _folder(resume, "resume")
    for caution in cautions(settings):
        warnings.warn(str(caution), stacklevel=3)
    with _alone("train"):
        command = commands.assemble_run(settings, resume_from=folder)
        command.train(SafeConsole(quiet=not show), supervisor=supervisor)
        return Run(command.folder)


def evaluate(source: Run | Source, overrides: Overrides | None = None, *, which: "Which" = "newest") -> "Evaluation":
    """Plays held-out tasks: with a checkpoint of a run, or with the models of settings as they are.

    `source`: a run or its folder; settings or a YAML file. `overrides` change its settings by dotted key, e.g.
    `{"evaluate.tasks": 64}`. `which`: "newest", "best", or the step of a checkpoint. Raises ConfigError if there is
    nothing to play, CheckpointError without such a checkpoint.
    """
    _refuse_loop("evaluate")
    return _cautioned(evaluate_and_keep(source, overrides or (), which))


async def evaluate_async(
    source: Run | Source, overrides: Overrides | None = None, *, which: "Which" = "newest"
) -> "Evaluation":
    """Evaluates as `evaluate` does, in a thread of its own. Cancellation ends it at once."""
    played = await _in_thread(lambda supervisor: evaluate_and_keep(source, overrides or (), which, supervisor))
    return _cautioned(played)


def _cautioned(played: "EvaluatedOnce") -> "Evaluation":
    if played.caution:
        warnings.warn(played.caution, stacklevel=3)
    return played.evaluation


def evaluate_and_keep(
    source: Run | Source, overrides: Overrides = (), which: "Which" = "newest", supervisor: "Supervisor | None" = None
) -> "EvaluatedOnce":
    """Evaluates. Returns also what was played, the folder that keeps it, if it could, and a failure of each kind."""
    settings, run = _played(source, overrides)
    if run is None and which != "newest":
        raise ConfigError(f"'{source}' has no checkpoint to choose (best, or a step); give the folder of a run")
    with _alone("evaluate"):
        return commands.evaluate_once(settings, run, which=which, supervisor=supervisor)


def _played(source: Run | Source, overrides: Overrides) -> tuple[RunSettings, RunFolder | None]:
    """Returns the settings with which a source is evaluated, and its run folder; None if it has none.

    Raises ConfigError if it is neither a run folder nor a YAML file, or if settings come with overrides.
    """
    if isinstance(source, RunSettings):
        if overrides:
            raise ConfigError(f"overrides {overrides!r} are for a path; give them to flexmarl.load")
        return source, None
    # One evaluation is compared with no other.
    if isinstance(overrides, Mapping):
        overrides = {**overrides, "checkpoint.best": None, "stop": None}
    else:
        overrides = [*overrides, "checkpoint.best=null", "stop=null"]
    path = source.folder if isinstance(source, Run) else _path(source, "source", "a run, settings or a path")
    if path.is_dir():
        return load_run_folder(path, overrides)
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"'{path}' is neither a run folder nor a YAML file; give the path that `train` printed last")
    return load_run(path, overrides), None


def export(
    run: Run | Path | str, out: Path | str, *, which: "Which" = "newest", form: "Form | None" = None
) -> list[Path]:
    """Writes each trained policy of a run as a Hugging Face folder `out/{policy}`, and returns the folders.

    `which`: "newest", "best", or the step of a checkpoint. `form`: "merged" or "adapter"; None: as
    `training.lora.export` says. Raises ConfigError if `run` is no run folder, CheckpointError if it has no such
    checkpoint.
    """
    _refuse_loop("export")
    return _export(run, out, which, form)


async def export_async(
    run: Run | Path | str, out: Path | str, *, which: "Which" = "newest", form: "Form | None" = None
) -> list[Path]:
    """Exports as `export` does, in a thread of its own. A cancelled caller waits for its end."""
    return await _in_thread(lambda _: _export(run, out, which, form))


def _export(run: Run | Path | str, out: Path | str, which: "Which", form: "Form | None") -> list[Path]:
    settings, folder = load_run_folder(_folder(run, "run"))
    with _alone("export"):
        return [
            one.path
            for one in exports.export_policies(settings, folder, Path(out).expanduser(), which=which, form=form)
        ]


def simulate(source: Source, *, on: Callbacks | None = None, show: bool = True) -> Run:
    """Plays a run on modelled devices, in virtual time; needs no model and no device. The cluster is set to simulated.

    `on` and `show` are those of `train`. Raises ConfigError for what has no model, such as an agent without replies.
    """
    _refuse_loop("simulate")
    return _simulate(source, ending.Supervisor(on), show)


async def simulate_async(source: Source, *, on: Callbacks | None = None, show: bool = True) -> Run:
    """Simulates as `simulate` does, in a thread of its own. Cancellation ends it at its next event."""
    return await _in_thread(lambda supervisor: _simulate(source, supervisor, show), on)


def _simulate(source: Source, supervisor: "Supervisor", show: bool) -> Run:
    settings, console = _settings(source), SafeConsole(quiet=not show)
    with _alone("simulate"):
        return Run(simulation.simulate(settings, show=console.print, supervisor=supervisor))


def _settings(source: Source) -> RunSettings:
    if isinstance(source, RunSettings):
        return source
    return load(_path(source, "source", "settings or the path of a YAML file"))


def _path(given: object, name: str, wanted: str) -> Path:
    """Returns the path that an argument is. Raises ConfigError naming the argument if it is none."""
    if isinstance(given, str | PathLike):
        return Path(given).expanduser()
    made = "; make settings with flexmarl.load('run.yaml', {'batch.groups': 8}, steps=4)" if name == "source" else ""
    raise ConfigError(f"{name} must be {wanted}, got {masked(repr(given))[:80]}{made}")


def _folder(run: object, name: str) -> Path:
    """Returns the folder of a run, or the path that an argument is. Raises as `_path` does."""
    return run.folder if isinstance(run, Run) else _path(run, name, "a run or the path of its folder")


_PRESENT: dict[str, threading.Thread] = {}
"""The function that is at work in this process, and its thread."""
_CHANGING = threading.Lock()


@contextmanager
def _alone(function: str) -> Iterator[None]:
    """Raises FlexmarlError if a function that opens a world is at work in this process already.

    Two worlds would share torch's threads and determinism, the Ray of the process, and the names of workflows.
    """
    with _CHANGING:
        if _PRESENT:
            raise FlexmarlError(
                f"flexmarl.{function} cannot begin: flexmarl.{next(iter(_PRESENT))} is at work in this process; wait "
                f"for its end, or use another process"
            )
        _PRESENT[function] = threading.current_thread()
    try:
        yield
    finally:
        _PRESENT.clear()


def _refuse_loop(function: str) -> None:
    """Raises FlexmarlError if an event loop runs in this thread: a function that blocks would stop it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise FlexmarlError(
        f"flexmarl.{function} blocks, and an event loop runs here, as in every notebook: use "
        f"`await flexmarl.{function}_async(...)`"
    )


async def _in_thread(work: "Callable[[Supervisor], T]", on: Callbacks | None = None) -> T:
    """Runs `work` in a thread of its own. A cancelled caller stops it, and gets its CancelledError when it has ended,
    with the notes of the error that ended the work.

    The thread has the caller's context, by which a notebook knows the cell that a line is printed for.
    """
    supervisor, outcome = ending.Supervisor(on), Future[T]()

    def working() -> None:
        try:
            outcome.set_result(work(supervisor))
        except BaseException as error:
            outcome.set_exception(error)

    context, cancelled = contextvars.copy_context(), None
    threading.Thread(target=context.run, args=(working,), name="flexmarl", daemon=True).start()
    ended = asyncio.wrap_future(outcome)
    while not ended.done():
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError as error:
            cancelled = error
            supervisor.stop("its caller was cancelled")
    error = ended.exception()
    if cancelled is not None:
        for note in getattr(error, "__notes__", ()):
            cancelled.add_note(note)
        raise cancelled
    if error is not None:
        _raise(error)
    return ended.result()


def _raise(error: BaseException) -> NoReturn:
    """Raises an error of another thread. Those that would end the caller's event loop become errors of the run."""
    if isinstance(error, Exception):
        raise error
    ended = FlexmarlError(f"code of the run raised {type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", ()):
        ended.add_note(note)
    raise ended from error
