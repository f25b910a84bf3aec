"""What the documents say is so: code runs, drawings and figures are fresh, names exist."""

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import attrs
import click
import pytest

import kvlift
from benches import figures
from examples.conversation import main as converse
from kvlift.cli.main import kvlift as command_line
from kvlift.models import draw
from kvlift.runtime.config import Config
from kvlift.testing.story_expect import STATES
from kvlift.testing.story_parse import VERBS, parse_story
from kvlift.testing.story_run import run_text
from tests.source import ROOT, modules, paths

LAYERS = ("core", "effects", "runtime", "models", "testing", "cli")
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *paths("docs", "*.md")]
SECTIONS = ["Context", "Options", "Choice", "What would change our mind"]


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Code in documents.


def test_the_readme_shows_the_example_as_it_is() -> None:
    found = re.findall(
        r"<!-- include:(\S+) -->\n```python\n(.*?)```\n<!-- /include -->",
        text_of(ROOT / "README.md"),
        re.DOTALL,
    )
    assert [name for name, _code in found] == ["examples/embed.py"]
    for name, code in found:
        assert code == text_of(ROOT / name), f"copy {name} into README.md again"


def test_the_example_is_about_30_lines() -> None:
    tree = ast.parse(text_of(ROOT / "examples" / "embed.py"))
    lines = ast.unparse(ast.Module(tree.body[1:], [])).splitlines()
    written = text_of(ROOT / "examples" / "embed.py").splitlines()
    n_written = sum(bool(line.strip()) and not line.startswith('"""') for line in written)
    assert len(lines) <= n_written <= 32


def test_the_conversation_uses_every_tier(capsys: pytest.CaptureFixture[str]) -> None:
    converse()
    assert capsys.readouterr().out.splitlines() == [
        "turn-1 {'peer': 7}",
        "turn-2 {'device': 6, 'peer': 3}",
        "turn-3 {'host': 8, 'peer': 3}",
        "turn-4 {'storage': 10, 'peer': 3}",
    ]


def commands_in(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.startswith("    ") and re.match(r"\s+(\.venv/bin/)?(make|kvlift)\s", line):
            yield shlex.split(line.partition(" #")[0])


ALL_COMMANDS = [
    pytest.param(words, id=f"{path.stem}: {' '.join(words)}")
    for path in DOCUMENTS
    for words in commands_in(text_of(path))
]


@pytest.mark.parametrize("words", ALL_COMMANDS)
def test_a_command_of_the_documents_exists(words: list[str]) -> None:
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE)
        assert words[1] in targets
        return
    command: click.Command | None = command_line
    for word in words[1:]:
        if isinstance(command, click.Group) and not word.startswith("-"):
            command = command.get_command(click.Context(command), word)
            assert command is not None, f"there is no command {word}"
        elif word.startswith("--") and word != "--help":
            assert command is not None
            options = [name for parameter in command.params for name in parameter.opts]
            assert word.partition("=")[0] in options


# Drawings and figures.


def test_the_drawings_are_current() -> None:
    drawn: list[str] = []
    for path in DOCUMENTS:
        text = text_of(path)
        drawn += draw.marked(text)
        assert not draw.stale(text), f"run `kvlift draw --write --readme {named(path)}`"
    assert sorted(drawn) == sorted(draw.DRAWINGS), "each drawing stands in one document"


def test_the_figures_are_those_of_the_committed_results() -> None:
    for path in DOCUMENTS:
        text = text_of(path)
        if figures.names_in(text):
            assert figures.redrawn(text) == text, (
                f"run `python benches/figures.py --write {named(path)}`"
            )
    assert figures.names_in(text_of(ROOT / "README.md")), "README.md shows a table from a real run"


def test_a_figure_that_was_edited_by_hand_is_found(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("<!-- figures:copies-h200 -->\n<!-- /figures -->\n")
    assert figures.main(["--check", str(document)]) == 1
    assert figures.main(["--write", str(document)]) == 0
    assert figures.main(["--check", str(document)]) == 0
    document.write_text(document.read_text().replace("GB/s", "TB/s"))
    assert figures.main(["--check", str(document)]) == 1
    document.write_text("<!-- figures:none-such -->\n<!-- /figures -->\n")
    assert figures.main(["--check", str(document)]) == 2


def mode_of(ttft_ms: float, peer: int) -> dict[str, object]:
    spread = {"mean": ttft_ms, "p50": ttft_ms, "p90": ttft_ms, "p99": ttft_ms}
    return {
        "ttft_ms": spread,
        "tpot_ms": {"mean": 4.0, "p90": 5.0},
        "hit": {"device": 1000 - peer, "host": 0, "storage": 0, "peer": peer},
        "bytes_from_peer": peer * 1000,
        "requests": 10,
        "failed": 0,
    }


def test_a_demo_becomes_a_table_that_says_what_was_checked(tmp_path: Path) -> None:
    result: dict[str, object] = {
        "modes": {"none": mode_of(100, 1000), "device": mode_of(60, 250)},
        "tokens_identical": False,
        "logprob_diff_max": 0.00001,
        "pages_verified": 12,
        "ballots_per_tick_max": 1,
        "leaks": 0,
        "workload": "4 conversations of 6 rounds",
        "model": "tiny",
        "device": "cpu",
        "ranks": 2,
        "link_gbps": 0.02,
        "faults": ["the tokens are not identical"],
    }
    fresh = tmp_path / "fresh.json"
    fresh.write_text(json.dumps(result))
    figures.keep(fresh, "demo", "kvlift demo --json", tmp_path)
    shown = figures.rendered("demo", tmp_path)
    assert (
        "| none | 100.0 ms | 100.0 ms | 100.0 ms | 4.0 ms | 0 / 0 / 0 / 1,000 | 1.0 MB |" in shown
    )
    assert "| device | 60.0 ms (-40 %) |" in shown
    assert "tokens DIFFERENT between modes" in shown
    assert "NOT SO: the tokens are not identical." in shown
    assert "a link of 0.02 Gb/s" in shown
    assert "CPU cores" in shown
    assert "`kvlift demo --json`" in shown


def test_a_result_without_its_machine_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('{"bench": "copies", "rows": []}')
    with pytest.raises(ValueError, match="has no field"):
        figures.rendered("one", tmp_path)


# Links, names, decisions.


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(path)):
        if not re.match(r"[a-z]+:", target):
            assert (path.parent / target.partition("#")[0]).exists(), f"{target} does not exist"


@cache
def known_words() -> frozenset[str]:
    """Every identifier and word of the code, and of what surrounds it."""
    folders = ("kvlift", "examples", "benches", "tests")
    texts = [module.text for folder in folders for module in modules(folder)]
    texts = [text for text in texts if "known_words" not in text]
    texts += [text_of(ROOT / name) for name in ("Makefile", "pyproject.toml")]
    return frozenset(re.findall(r"[A-Za-z_]\w*", "\n".join(texts)))


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.parent != ROOT], ids=named)
def test_names_in_backticks_exist(path: Path) -> None:
    known = known_words()
    quoted = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text_of(path), flags=re.DOTALL))
    for name in quoted:
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)+", name):
            assert (ROOT / name).exists() or name.startswith(".."), f"{name} does not exist"
        elif re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
            missing = [part for part in name.split(".") if part not in known]
            assert not missing or name.endswith((".md", ".toml", ".txt")), f"no {name} in the code"


def test_decisions_are_numbered_without_a_gap() -> None:
    numbers = [path.name.partition("-")[0] for path in DECISIONS]
    assert numbers == [f"{n:04}" for n in range(1, len(DECISIONS) + 1)]


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_is_one_screen_with_four_sections(path: Path) -> None:
    lines = text_of(path).splitlines()
    assert lines[0].startswith(f"# {path.name[:4]}: ")
    assert [line[3:] for line in lines if line.startswith("## ")] == SECTIONS
    assert len(lines) < 60


def test_every_decision_that_is_referred_to_exists() -> None:
    numbers = {path.name[:4] for path in DECISIONS}
    texts = {module.path: module.text for module in modules("kvlift")}
    texts |= {named(path): text_of(path) for path in DOCUMENTS}
    found = {
        (where, number)
        for where, text in texts.items()
        for number in re.findall(r"\bdecision (\d{4})\b", text)
    }
    assert found, "the code names its decisions"
    assert {number for _where, number in found} <= numbers


def test_the_table_of_the_config_is_complete_and_right() -> None:
    table = text_of(ROOT / "docs" / "embedding.md").partition("<!-- config -->")[2]
    shown = dict(re.findall(r"^\| `(\w+)` \| ([^|]*?) ?\|", table, re.MULTILINE))
    config = Config()
    real = {
        field.name: str(getattr(value, "value", value))
        for field in attrs.fields(Config)
        for value in [getattr(config, field.name)]
    }
    assert shown == real


# Stories.


def test_the_story_of_the_document_holds() -> None:
    document = text_of(ROOT / "docs" / "stories.md")
    (story,) = re.findall(r"<!-- story -->\n```\n(.*?)```", document, re.DOTALL)
    verdict = run_text(story, "docs/stories.md")
    assert verdict.exit_code == 0, str(verdict)


def statements_of_the_document() -> list[str]:
    tables = text_of(ROOT / "docs" / "stories.md").partition("## Language")[2]
    cells = re.findall(r"^\| (`.*?`) \|", tables, re.MULTILINE)
    return [one for cell in cells for one in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("statement", statements_of_the_document())
def test_a_line_of_the_language_is_understood(statement: str) -> None:
    line = statement.replace("\\|", "|").replace("FIELD=VALUE ...", "write=back")
    line = re.sub(r" \.\.\.$", " A ready" if line.startswith("expect") else "", line)
    for word, example in (
        ("TIER", "host"),
        ("PORT", "store"),
        ("PAGES", "1"),
        ("N", "2"),
        ("K", "1"),
    ):
        line = re.sub(rf"\b{word}\b", example, line)
    begin = "" if line.startswith("world") else "world ranks=2\n"
    prompts = "" if line.startswith(("world", "prompt A")) else "prompt A pages=8\n"
    parse_story(f"{begin}{prompts}{line}\n")


def test_the_language_is_described_whole() -> None:
    described = {statement.split()[0] for statement in statements_of_the_document()}
    assert described == set(VERBS)
    states = text_of(ROOT / "docs" / "stories.md").partition("\nStates: ")[2].partition(".")[0]
    assert re.findall(r"`(\w+)`", states) == list(STATES)


# The package as a reader meets it.


def test_every_layer_says_in_one_sentence_what_it_is_and_the_drawing_shows_it() -> None:
    drawing = draw.mermaid("layers").replace("<br/>", " ")
    for layer in LAYERS:
        said = importlib.import_module(f"kvlift.{layer}").__doc__
        assert said is not None
        assert said.endswith(".")
        assert "\n" not in said
        assert said in drawing


def test_the_shop_window_has_what_it_shows() -> None:
    assert sorted(kvlift.__all__) == sorted(kvlift._MODULE_BY_NAME)
    for name in kvlift.__all__:
        module = importlib.import_module(kvlift._MODULE_BY_NAME[name])
        assert getattr(kvlift, name) is getattr(module, name)
    assert set(kvlift.__all__) <= set(dir(kvlift))
    with pytest.raises(AttributeError, match="no 'Drivr'"):
        getattr(kvlift, "Drivr")  # noqa: B009 - mypy knows that it is not there


def test_the_shop_window_shows_type_checkers_the_same() -> None:
    tree = ast.parse(text_of(ROOT / "kvlift" / "__init__.py"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    shown = {node.module: tuple(alias.name for alias in node.names) for node in imports}
    assert shown == kvlift._NAMES_BY_MODULE


def test_the_driver_loads_without_torch() -> None:
    script = (
        "import sys, kvlift; kvlift.Driver, kvlift.Ports, kvlift.Config, kvlift.Prompt;"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
