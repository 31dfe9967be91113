"""Tables of what a config may name grow by files and by installed packages, and no name stands for two things."""

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexmarl.config import RunSettings, load_run
from flexmarl.credit import ESTIMATORS
from flexmarl.credit.shaping import SHAPING
from flexmarl.errors import ConfigError, place_of
from flexmarl.inference.settings import ENGINES
from flexmarl.plugins import SettingsTable, load_code
from flexmarl.records import Task
from flexmarl.records.scorers import SCORERS, scorer
from flexmarl.tools import SYNTAXES, TOOLS
from flexmarl.training.losses import LOSSES

TABLES: list[SettingsTable] = [ESTIMATORS, SHAPING, TOOLS, SYNTAXES, ENGINES, LOSSES]

ESTIMATOR = """
from typing import Literal

from pydantic import Field

from flexmarl.credit import estimator
from flexmarl.credit.estimators.group_relative import GroupRelative


@estimator
class {cls}(GroupRelative):
    type: Literal["{name}"] = "{name}"
    least_lead: float = Field(default=0.0, ge=0.0)
    key: tuple[str, ...] = ("task",)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs a package in a folder of its own, as pip would: its module, its name and its entry points."""
    before = set(sys.modules)

    def put(package: str, text: str, **offers: str) -> None:
        folder = tmp_path / "site-packages" / package
        info = folder / f"{package}-1.2.dist-info"
        info.mkdir(parents=True)
        (folder / f"{package}.py").write_text(text)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        lines = [line for group, offer in offers.items() for line in (f"[flexmarl.{group}]", offer)]
        (info / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(str(folder))

    yield put
    for name in set(sys.modules) - before:
        if name.startswith("plugin_"):
            del sys.modules[name]


@pytest.fixture
def config(small_run: Path) -> Callable[..., RunSettings]:
    return lambda *overrides: load_run(small_run, [f"code=[{small_run.parent / 'tasks.py'}]", *overrides])


def with_code(file: Path, *overrides: str) -> list[str]:
    return [f"code=[{file}]", "tasks.name=sums", *overrides]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.kind)
def test_a_built_in_thing_has_its_name_and_keeps_the_interface(table: SettingsTable) -> None:
    for name in table.built_in:
        assert table._checked(name, table[name]) is table[name]


def test_a_file_under_code_adds_an_estimator_with_settings_of_its_own(small_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(ESTIMATOR.format(cls="Lead", name="lead_of_a_file"))
    settings = load_run(small_run, with_code(file, "credit.estimator={type: lead_of_a_file, least_lead: 0.5}"))
    assert settings.credit.estimator.type == "lead_of_a_file"
    assert settings.credit.estimator.least_lead == 0.5  # type: ignore[attr-defined]
    assert RunSettings.model_validate(settings.model_dump(mode="json")) == settings, "the run's own config"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "{type: lead_strict, least_lead: -1}",
            "credit.estimator.least_lead must be greater than or equal to 0, got -1",
        ),
        (
            "{type: lead_strict, least_led: 1}",
            "credit.estimator.least_led is not a setting (its value: 1); did you mean",
        ),
        ("{type: lead_strict, least_lead: '1'}", "credit.estimator.least_lead must be a valid number, got '1'"),
        ("{type: lead_strickt}", "credit.estimator.type must be one of 'default', 'grpo'"),
        ("{type: lead_strickt}", "got 'lead_strickt'; did you mean 'lead_strict'?"),
        ("{least_lead: 1}", "credit.estimator.type must be one of 'default', 'grpo'"),
        ("lead_strict", "credit.estimator must be a mapping of settings with a type: 'default', 'grpo'"),
    ],
)
def test_settings_of_a_plug_in_are_refused_as_those_of_the_package(
    small_run: Path, tmp_path_factory: pytest.TempPathFactory, given: str, message: str
) -> None:
    file = small_run.parent / "strict.py"
    file.write_text(ESTIMATOR.format(cls="Strict", name="lead_strict"))
    with pytest.raises(ConfigError) as refused:
        load_run(small_run, with_code(file, f"credit.estimator={given}"))
    assert message in str(refused.value)


def test_settings_with_a_plug_in_are_sent_to_a_process_that_has_imported_nothing(
    small_run: Path, tmp_path: Path
) -> None:
    file = tmp_path / "sent.py"
    file.write_text(ESTIMATOR.format(cls="Sent", name="lead_sent"))
    settings = load_run(small_run, with_code(file, "credit.estimator={type: lead_sent, least_lead: 0.25}"))
    receive = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).credit.estimator.least_lead)"
    sent = pickle.dumps(settings)
    done = subprocess.run([sys.executable, "-c", receive], input=sent, stdout=subprocess.PIPE, check=True, cwd="/")
    assert done.stdout.decode().strip() == "0.25"
    assert pickle.loads(sent) == settings


def test_an_installed_package_adds_an_estimator_that_is_imported_when_it_is_named(
    config: Callable[..., RunSettings], install: Callable[..., None]
) -> None:
    install("plugin_lazy", ESTIMATOR.format(cls="Lazy", name="lead_lazy"), estimators="lead_lazy = plugin_lazy:Lazy")
    assert "lead_lazy" in list(ESTIMATORS)
    assert config("credit.estimator.type=grpo").credit.estimator.type == "grpo"
    assert "plugin_lazy" not in sys.modules
    chosen = config("credit.estimator={type: lead_lazy, least_lead: 0.5}").credit.estimator
    assert type(chosen) is sys.modules["plugin_lazy"].Lazy
    with pytest.raises(ConfigError, match=r"credit\.estimator\.least_lead must be greater than or equal to 0, got -1"):
        config("credit.estimator={type: lead_lazy, least_lead: -1}")


def test_a_failure_in_an_installed_plug_in_is_placed_in_its_own_line(install: Callable[..., None]) -> None:
    text = "import json\n\n\ndef own(answer, reference):\n    return json.loads(answer)\n"
    install("plugin_scorer", text, scorers="own_json = plugin_scorer:own")
    with pytest.raises(ValueError, match="Expecting") as broken:
        SCORERS["own_json"]("{", "")
    assert place_of(broken.value) == "plugin_scorer.py:5"


def test_a_package_that_cannot_be_imported_is_an_error_where_it_is_named_and_nowhere_else(
    config: Callable[..., RunSettings], install: Callable[..., None]
) -> None:
    install(
        "plugin_torn", "import no_such_module\n", estimators="lead_torn = plugin_torn:Torn", scorers="s = plugin_torn:s"
    )
    assert config("credit.estimator.type=drmas").credit.estimator.type == "drmas"
    said = (
        r"credit\.estimator: the estimator 'lead_torn' of the package plugin_torn 1\.2 cannot be used .*no_such_module"
    )
    with pytest.raises(ConfigError, match=said):
        config("credit.estimator.type=lead_torn")
    with pytest.raises(ConfigError, match=r"the scorer 's' of the package plugin_torn 1\.2 cannot be used"):
        Task(input_id="x", prompt="", scorer="s")


def test_two_things_of_one_name_are_refused_with_both_places(
    config: Callable[..., RunSettings], install: Callable[..., None], tmp_path: Path
) -> None:
    install("plugin_one", ESTIMATOR.format(cls="One", name="lead_both"), estimators="lead_both = plugin_one:One")
    file = tmp_path / "both.py"
    file.write_text(ESTIMATOR.format(cls="Both", name="lead_both"))
    load_code(file)
    with pytest.raises(ConfigError, match=r"two estimators are called 'lead_both': .*both\.py:\d+ and .*plugin_one"):
        config("credit.estimator.type=lead_both")


def test_the_name_of_a_built_in_thing_is_taken(
    config: Callable[..., RunSettings], install: Callable[..., None], tmp_path: Path
) -> None:
    file = tmp_path / "own_grpo.py"
    file.write_text(ESTIMATOR.format(cls="OwnGrpo", name="grpo"))
    with pytest.raises(
        ConfigError, match=r"two estimators are called 'grpo': flexmarl's own .* and .*own_grpo\.py:\d+"
    ):
        load_code(file)
    text = ESTIMATOR.format(cls="OwnRloo", name="rloo").replace("@estimator\n", "")
    install("plugin_rloo", text, estimators="rloo = plugin_rloo:OwnRloo")
    with pytest.raises(ConfigError, match=r"two estimators are called 'rloo': flexmarl's own .*plugin_rloo 1\.2"):
        config("credit.estimator.type=rloo")


def test_a_file_that_is_imported_twice_and_a_cell_that_is_run_again_replace_what_they_defined(tmp_path: Path) -> None:
    file = tmp_path / "again.py"
    file.write_text(ESTIMATOR.format(cls="Again", name="lead_again"))
    load_code(file)
    exec(compile("\n\n" + file.read_text(), str(file), "exec"), {"__name__": "again_by_another_name"})
    for cell in ("<cell 1>", "<cell 2>"):
        exec(compile('@scorer("typed")\ndef typed(answer, reference): return 1.0', cell, "exec"), {"scorer": scorer})
    assert SCORERS["typed"].__code__.co_filename == "<cell 2>"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Odd: pass", "the tool '' must be a subclass of flexmarl.settings.Settings, got <class"),
        ("class Odd(Settings): name: str = 'odd'", "must have the field `type: Literal['my_name'] = 'my_name'`"),
        (
            "class Odd(Settings):\n    type: Literal['odd_tool'] = 'odd_tool'\n    name: str = 'odd'",
            "the tool 'odd_tool': its class Odd lacks description, open, parameters of flexmarl.tools.interface.Tool",
        ),
    ],
)
def test_a_class_that_is_no_tool_is_refused_where_it_is_registered(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "odd.py"
    head = "from typing import Literal\nfrom flexmarl.settings import Settings\nfrom flexmarl.tools import tool\n"
    file.write_text(f"{head}@tool\n{text}\n")
    with pytest.raises(ConfigError) as refused:
        load_code(file)
    assert f"{file}:4: " in str(refused.value)
    assert message in str(refused.value)


def test_a_loss_and_a_term_must_come_from_their_base_classes(tmp_path: Path) -> None:
    file = tmp_path / "bases.py"
    file.write_text(
        "from typing import Literal\nfrom flexmarl.credit import term\nfrom flexmarl.settings import Settings\n"
        "@term\nclass Odd(Settings):\n    type: Literal['odd_term'] = 'odd_term'\n"
    )
    with pytest.raises(ConfigError, match=r"its class Odd must be a subclass of .*OutcomeTerm, or .*AddedTerm"):
        load_code(file)


def test_a_broken_file_under_code_is_named_with_its_line(small_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "torn.py"
    file.write_text("x = 1\n\nraise ValueError('torn')\n")
    with pytest.raises(ConfigError, match=r"run\.yaml: code: .*torn\.py:3: ValueError: torn"):
        load_run(small_run, [f"code=[{file}]"])


def test_settings_that_hold_one_another_may_be_a_plug_in(small_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "nested.py"
    text = ESTIMATOR.format(cls="Nested", name="lead_nested")
    file.write_text(f"{text}    inner: 'tuple[Nested, ...]' = ()\n")
    chosen = "credit.estimator={type: lead_nested, inner: [{type: lead_nested, least_lead: 1}]}"
    assert load_run(small_run, with_code(file, chosen)).credit.estimator.inner[0].least_lead == 1  # type: ignore
    with pytest.raises(ConfigError, match=r"credit\.estimator\.inner\.0\.least_lead must be greater than"):
        load_run(small_run, with_code(file, chosen.replace("lead: 1", "lead: -1")))
