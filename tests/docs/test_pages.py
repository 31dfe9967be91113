"""What the pages say is so: links, the tree, the words, the laws, the way to the gradient, the keys of a config."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flexmarl.records
from benchmarks.common import config_of_135m
from flexmarl.analysis.summary import Summary
from flexmarl.config import load_run
from tests.docs import journal_reference, model_memory
from tests.docs.config_reference import keys, reference
from tests.docs.pages import PAGES, ROOT, anchors, blocks, links, prose, read, rows

PACKAGE = ROOT / "src" / "flexmarl"
OWN_MODEL = "docs/howto/own_model.md"
VOCABULARY = (
    "Task Agent Policy Team Workflow Environment Turn Episode Group Sample Micro-batch Step Instance "
    "Process_group Rule loop backend"
)


@pytest.fixture(scope="module")
def counted() -> dict[str, list[str]]:
    """The files of both journeys, counted while a tiny team trains."""
    command = [sys.executable, "benchmarks/journey.py", "--files"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return json.loads(lines[-1])


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link} leads nowhere"
        if anchor:
            assert anchor in anchors(str(target.resolve().relative_to(ROOT))), f"{page}: no heading {link}"


def test_every_page_is_reached_from_the_readme() -> None:
    assert {page for page in PAGES if page != "README.md"} <= set(links("README.md"))


def test_the_tree_of_the_readme_is_the_tree() -> None:
    (tree,) = (block for block in re.findall(r"^```\n(src/flexmarl/\n.*?)^```", read("README.md"), re.M | re.S))
    names = [line.split()[0] for line in tree.splitlines()]
    inside = [name for name, line in zip(names, tree.splitlines(), strict=True) if line.startswith("  ")]
    folders = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    assert set(inside) == folders | modules
    assert [name for name in names if name not in inside] == [
        "src/flexmarl/",
        "examples/",
        "benchmarks/",
        "tests/",
        "docs/",
    ]
    assert all((ROOT / name).is_dir() for name in names if name not in inside)


def test_the_readme_and_the_tour_list_the_layers_in_their_order() -> None:
    contract = (ROOT / "pyproject.toml").read_text().split("layers = [", 1)[1].split("]", 1)[0]
    layers = [re.findall(r"\((\w+)\)|\b(\w+)\b", line) for line in contract.splitlines()]
    order = [
        a or b
        for layer in layers
        for a, b in layer
        if (PACKAGE / (a or b)).is_dir() or (a or b) in ("assemble", "errors")
    ]
    for page, start, pattern in (
        ("README.md", "## The tree", r"^  (\w+)(?:/|\.py) "),
        ("docs/architecture.md", "## Layers", r"^ (\w+(?: \| \w+)?) {2,}[\w-]"),
    ):
        section = read(page).split(start, 1)[1]
        listed = [word for line in re.findall(pattern, section, re.M) for word in line.split(" | ")]
        assert [name for name in listed if name in order] == order, page


def test_the_glossary_has_every_word_of_the_vocabulary() -> None:
    defined = {word.lower() for word in re.findall(r"\*\*([\w\- ]+)\*\*", read("docs/glossary.md"))}
    assert {word.replace("_", " ").lower() for word in VOCABULARY.split()} <= defined


def test_the_glossary_has_every_record() -> None:
    defined = {word.lower().replace("-", " ") for word in re.findall(r"\*\*([\w\- ]+)\*\*", read("docs/glossary.md"))}
    nouns = {"Task", "Turn", "VersionRun", "Episode", "Sample", "MicroBatch", "Divisors", "Version"}
    assert nouns <= set(flexmarl.records.__all__)
    assert {re.sub(r"(?<=[a-z])(?=[A-Z])", " ", noun).lower() for noun in nouns} <= defined


def test_the_laws_name_tests_that_there_are() -> None:
    laws = list(rows("docs/laws.md", "## The laws"))
    assert [law for law, *_ in laws] == [str(number) for number in range(1, 16)]
    for law, _, proofs in laws:
        tests = re.findall(r"\]\(\.\./([^)]+)\)(?: `(test_\w+)`)?", proofs)
        assert tests or proofs.startswith("not yet: "), f"law {law} is neither tried nor said to be missing"
        for path, test in tests:
            assert f"def {test}" in (ROOT / path).read_text(), f"law {law}: {path} has no {test}"


def test_every_conformance_check_is_on_the_page_of_laws() -> None:
    listed = set(re.findall(r"`flexmarl\.testing\.(\w+)\.(check_\w+)`", read("docs/laws.md")))
    shipped = {
        (path.stem, name)
        for path in (PACKAGE / "testing").glob("*.py")
        for name in re.findall(r"^(?:async )?def (check_\w+)", path.read_text(), re.M)
    }
    assert listed == shipped


def test_the_way_to_the_gradient_is_at_most_nine_files() -> None:
    hops = [
        (file.strip("`"), text.strip("`")) for _, file, text, _ in rows("docs/architecture.md", "`loss.backward()`")
    ]
    assert hops[0][0] == "cli/__init__.py"
    assert hops[-1][1] == ".backward()"
    assert len({file for file, _ in hops}) <= 9
    for file, text in hops:
        assert text in (PACKAGE / file).read_text(), f"{file} does not hold {text!r}"


@pytest.mark.xdist_group("journeys")  # So that they are counted in one process of the tests, and not in two.
@pytest.mark.parametrize(
    ("journey", "heading"), [("tokens", "### The tokens of one call"), ("weights", "### A version of the weights")]
)
def test_both_journeys_name_every_file_that_is_counted(
    counted: dict[str, list[str]], journey: str, heading: str
) -> None:
    (section,) = (part for part in re.split(r"\n(?=##)", read("docs/architecture.md")) if part.startswith(heading))
    named = [
        file for row in section.splitlines() if row.startswith("|") for file in re.findall(r"\[`(.+?\.py)`\]", row)
    ]
    assert sorted(named) == sorted(counted[journey])


def test_the_page_of_keys_is_what_the_settings_classes_say() -> None:
    wanted = reference().rstrip() + "\n"
    remedy = "run: python tests/docs/config_reference.py > docs/howto/config.md"
    assert read("docs/howto/config.md").rstrip() + "\n" == wanted, remedy


def test_the_page_of_the_journal_is_what_the_catalogue_says() -> None:
    remedy = "run: python tests/docs/journal_reference.py > docs/howto/journal.md"
    assert read("docs/howto/journal.md").rstrip() == journal_reference.reference().rstrip(), remedy


def test_every_key_of_a_config_has_a_meaning() -> None:
    assert [line for line in reference().splitlines() if line.endswith("|  |")] == []


def test_the_keys_that_matter_are_keys() -> None:
    known, named = set(keys()), set[str]()
    for goal, cell, advice in rows("docs/howto/config.md", "## The keys that matter, by goal"):
        of_goal = set(re.findall(r"`([^`]+)`", cell))
        assert of_goal, goal
        assert advice, goal
        assert of_goal <= known, f"{goal}: there is no key {of_goal - known}"
        named |= of_goal
    assert len(named) >= 20


@pytest.mark.parametrize("heading", ["## A reward function of TRL", "## A config of verl"])
def test_concepts_of_others_lead_to_keys(heading: str) -> None:
    known = set(keys())
    for theirs, cell, note in rows("docs/howto/from_others.md", heading):
        named = set(re.findall(r"`([^`]+)`", cell))
        assert named <= known, f"{theirs}: there is no key {named - known}"
        assert named or note, f"{theirs} leads nowhere, and no note says why"


def test_the_page_of_ones_own_model_names_keys() -> None:
    """A dotted name whose first part is a part of some key ends a key."""
    known = set(keys())
    parts = {part for key in known for part in key.split(".")}
    dotted = re.findall(r"`((?:\w+\.)+\w+)\b[^`]*`", prose(OWN_MODEL))
    meant = [name.replace(".X.", ".NAME.") for name in dotted if name.split(".")[0] in parts]
    assert len(meant) >= 10
    for name in meant:
        assert any(f".{key}".endswith(f".{name}") for key in known), f"there is no key {name}"


def test_the_table_of_memory_is_what_the_settings_say() -> None:
    assert marked("memory") == model_memory.table(), "put the output of python tests/docs/model_memory.py there"


def test_the_table_of_what_a_larger_model_changes_is_what_the_configs_say() -> None:
    assert marked("changes") == model_memory.changes(), "put the output of python tests/docs/model_memory.py there"


def marked(what: str) -> str:
    """A table of the page on one's own model."""
    return read(OWN_MODEL).split(f"<!-- {what} -->\n", 1)[1].split(f"\n<!-- end of {what} -->", 1)[0]


def test_the_memory_that_check_says_is_that_of_the_config() -> None:
    """What depends on the machine aside: its libraries, and what is free."""
    lines = re.findall(r"^  ([a-z' ]+?) {2,}(\d+\.\d\d) GiB", read(OWN_MODEL), re.M)
    said = {name: float(gib) for name, gib in lines}
    sum_of_all = float(re.findall(r"^memory +(\d+\.\d\d) GiB at the peak", read(OWN_MODEL), re.M)[0])
    assert sum(said.values()) == pytest.approx(sum_of_all, abs=0.005 * (len(said) + 1)), "each is rounded"
    (most,) = re.findall(r"at most (\d+\.\d\d); lower it by\n +engine.kv_gib", read(OWN_MODEL))
    found = model_memory.memory(load_run(model_memory.SMALL), config_of_135m())
    assert said.keys() == found.keys()
    known = {name: gib for name, gib in found.items() if name not in ("libraries", "keys and values")}
    assert {name: said[name] for name in known} == {name: float(f"{gib:.2f}") for name, gib in known.items()}
    assert float(most) == float(f"{found['keys and values']:.2f}")


def test_the_learning_rates_are_those_of_the_configs_and_their_figures_stand_where_they_are_measured() -> None:
    tried = list(rows(OWN_MODEL, "## Learning rate"))
    assert len(tried) >= 5
    for config, _, rate, success, source in tried:
        (path,) = re.findall(r"\]\(([^)]+)\)", config)
        policies = load_run((ROOT / OWN_MODEL).parent / path).policies
        assert {float(rate)} == {policy.training.optimizer.learning_rate for policy in policies.values()}
        figures = re.findall(r"\d\.\d{3}", success)
        assert figures or success == "not run", config
        for page in re.findall(r"\]\(([^)#]+)", source):
            measured = ((ROOT / OWN_MODEL).parent / page).read_text()
            assert all(figure in measured for figure in figures), f"{config}: {figures} are not all in {page}"
        assert bool(source) == bool(figures), config


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_kind_that_is_checked(page: str) -> None:
    kinds = set(re.findall(r"^```(\w+)", read(page), re.M))
    assert kinds <= {"python", "bash", "yaml", "toml"}, f"{page}: nothing checks blocks of {kinds}"
    assert not (blocks(page, "yaml") or blocks(page, "toml")) or page.startswith("docs/howto/")


@pytest.mark.parametrize("page", PAGES)
def test_no_page_names_a_machine(page: str) -> None:
    assert not re.search(r"/(?:home|root|work|tmp|mnt)/", prose(page))
    assert Path.home().name not in {"", "root"} or "/root" not in read(page)


def test_the_figures_of_the_example_are_those_that_its_workflow_reports() -> None:
    source = (ROOT / "examples" / "math_team" / "workflow.py").read_text()
    names = re.findall(r"^\|[^|]*\| `(?:eval\.\w+\.)?([\w/]+)` \|", read("docs/math_team.md"), re.M)
    assert len(names) >= 10
    for name in names:
        reported = re.sub(r"/(easy|expression|hard)$", "/{level}", name)
        assert reported in source or name in Summary.__slots__, f"nothing reports {name}"


def test_every_guarantee_names_a_test_that_there_is() -> None:
    for heading in ("## Other users of this machine", "## Texts that agents read", "## The network"):
        for guarantee, proofs in rows("docs/security.md", heading):
            file, tests = "", 0
            for path, test in re.findall(r"\]\(\.\./([^)]+)\)|`(test_\w+)`", proofs):
                file = path or file
                if test:
                    assert f"def {test}(" in (ROOT / file).read_text(), f"{guarantee} {file} has no {test}"
                    tests += 1
            assert tests, f"nothing tries: {guarantee}"
