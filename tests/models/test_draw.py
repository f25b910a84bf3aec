"""The drawings are made from the code, and the documents that hold them are kept fresh."""

import itertools
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from kvlift.cli.main import main
from kvlift.core.edges import EDGES, MIRROR_EDGES
from kvlift.models.charts import CHARTS
from kvlift.models.diagram import Arrow, Box, Diagram, Stroke
from kvlift.models.draw import (
    imports_between,
    layers,
    mermaid,
    picture,
    redrawn,
    stale,
    statechart,
    tick,
)
from kvlift.models.layered import Line, Size, place
from kvlift.models.statechart import Edge, phases_of
from kvlift.models.svg import svg

DRIVER = '''"""The driver.

    1. hear: what has landed,
       and what is late
    2. agree: the verdict of the last ballot
    3. advance: decide
    4. run: the effects
    5. report: what is ready
"""
'''


@pytest.mark.parametrize(("name", "edges"), [("statechart", EDGES), ("mirror", MIRROR_EDGES)])
def test_every_arrow_of_the_table_is_in_the_text(name: str, edges: frozenset[Edge]) -> None:
    text = mermaid(name)
    drawn = set()
    notes: dict[str, str] = {}
    at = ""
    for line in (line.strip() for line in text.splitlines()):
        if "-->" in line:
            pair, _, labels = line.partition(": ")
            source, target = pair.split(" --> ")
            drawn |= {(source, event, target) for event in labels.split(", ") if event}
        elif line.startswith("note right of "):
            at = line.removeprefix("note right of ")
        elif at:
            notes[at] = f"{notes.get(at, '')} {line}".replace("stays on", ",")
            at = "" if line == "end note" else at
    for phase, words in notes.items():
        stays = words.removesuffix("end note").replace(" ", "").strip(",").split(",")
        drawn |= {(phase, event, phase) for event in stays}
    assert drawn == {tuple(part.__name__ for part in edge) for edge in edges}


def test_the_chart_begins_and_ends_where_the_machine_does() -> None:
    text = mermaid("statechart")
    assert text.count("[*] -->") == text.count("--> [*]") == 1
    assert "[*] --> Waiting" in text
    assert "Ended --> [*]" in text


def test_the_text_does_not_depend_on_the_order_of_a_set() -> None:
    assert mermaid("statechart") == mermaid("statechart")
    boxes = [box.name for box in statechart(CHARTS["request"]).boxes]
    assert boxes[:3] == ["start", "Waiting", "Asking"]
    assert sorted(boxes[1:-1]) == phases_of(EDGES)


def write_package(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_imports_are_read_from_the_source_wherever_they_stand(tmp_path: Path) -> None:
    package = write_package(
        tmp_path / "pack",
        {
            "low/__init__.py": '"""Low\nthings."""',
            "mid/a.py": "from pack.low import x\nimport pack.mid.b",
            "top/deep/a.py": "def f():\n    import pack.low.x\n    from pack import mid",
            "__main__.py": "import pack.top",
        },
    )
    assert imports_between(package) == {("mid", "low"), ("top", "low"), ("top", "mid")}
    drawn = layers(package)
    assert [box.name for box in drawn.boxes] == ["top", "mid", "low"]
    assert drawn.boxes[2].lines == ("Low things.",)
    strokes = {(arrow.source, arrow.target): arrow.stroke for arrow in drawn.arrows}
    assert strokes == {
        ("mid", "low"): Stroke.PLAIN,
        ("top", "mid"): Stroke.PLAIN,
        ("top", "low"): Stroke.IMPLIED,
    }


def test_the_core_imports_nothing_of_ours() -> None:
    assert not [arrow for arrow in layers().arrows if arrow.source == "core"]


def test_the_tick_is_read_from_the_documentation_of_the_driver(tmp_path: Path) -> None:
    file = tmp_path / "driver.py"
    file.write_text(DRIVER)
    drawn = tick(file)
    assert [box.name for box in drawn.boxes] == ["hear", "agree", "advance", "run", "report"]
    assert drawn.boxes[0].lines == ("what has landed, and what is late",)
    assert (drawn.arrows[-1].source, drawn.arrows[-1].target) == ("report", "hear")
    file.write_text(DRIVER.replace("3.", "So:"))
    with pytest.raises(ValueError, match=r"driver\.py documents no tick"):
        tick(file)


# ---- pictures

BRANCHES = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("a", "d"), ("d", "a"), ("c", "b")]


def test_boxes_and_labels_do_not_overlap_and_lines_run_from_source_to_target() -> None:
    sizes = {name: Size(90, 40) for name in "abcd"}
    lines = [Line(source=a, target=b, label=Size(60, 20)) for a, b in BRANCHES]
    placed = place(sizes, lines)
    spots = [(*placed.boxes[name], 90, 40) for name in "abcd"]
    for line, (points, label) in zip(lines, placed.lines, strict=True):
        assert label is not None
        spots.append((*label, 60, 20))
        for end, name in ((points[0], line.source), (points[-1], line.target)):
            x, y = placed.boxes[name]
            assert abs(end[0] - x) < 45
            assert abs(end[1] - y) == 20
    for (x1, y1, w1, h1), (x2, y2, w2, h2) in itertools.combinations(spots, 2):
        assert abs(x1 - x2) >= (w1 + w2) / 2 or abs(y1 - y2) >= (h1 + h2) / 2
    assert all(x >= w / 2 and x + w / 2 <= placed.width + 1e-6 for x, _, w, _ in spots)
    assert all(y >= h / 2 and y + h / 2 <= placed.height + 1e-6 for _, y, _, h in spots)


def test_a_tree_is_drawn_without_crossings() -> None:
    # given in an order that crosses twice
    sizes = {name: Size(50, 20) for name in ("a", "x", "y", "y2", "x2", "x1", "y1")}
    pairs = [("a", "x"), ("a", "y"), ("x", "x1"), ("x", "x2"), ("y", "y1"), ("y", "y2")]
    placed = place(sizes, [Line(source=a, target=b) for a, b in pairs])
    x_of = {name: x for name, (x, _) in placed.boxes.items()}
    left, right = ("x", "y") if x_of["x"] < x_of["y"] else ("y", "x")
    assert max(x_of[left + "1"], x_of[left + "2"]) < min(x_of[right + "1"], x_of[right + "2"])


@pytest.mark.parametrize("name", ["statechart", "mirror", "layers"])
def test_pictures_are_well_formed_and_the_same_every_time(name: str) -> None:
    text = picture(name)
    assert text == picture(name)
    root = ET.fromstring(text)
    words = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert words > {
        "statechart": {"Waiting", "Draining", "Ended"},
        "mirror": {"Due", "Settled"},
    }.get(name, {"core", "models"})


def test_text_in_a_picture_is_escaped() -> None:
    diagram = Diagram(
        title='"a" & <b>',
        boxes=[Box(name="<1>", lines=("x & y",)), Box(name="2")],
        arrows=[Arrow(source="<1>", target="2", labels=("a < b",))],
    )
    words = [e.text for e in ET.fromstring(svg(diagram)).iter("{http://www.w3.org/2000/svg}text")]
    assert words == ['"a" & <b>', "a < b", "<1>", "x & y", "2"]


# ---- documents

README = "# Title\n<!-- draw:statechart -->\nold\n<!-- /draw -->\ntext\n"


def test_a_document_is_redrawn_between_its_markers_alone() -> None:
    assert stale(README) == ["statechart"]
    fresh = redrawn(README)
    assert fresh.startswith("# Title\n<!-- draw:statechart -->\n```mermaid\nstateDiagram-v2\n")
    assert fresh.endswith("```\n<!-- /draw -->\ntext\n")
    assert stale(fresh) == []
    assert redrawn(fresh) == fresh


def test_check_says_that_a_document_is_stale_and_write_repairs_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(README)
    readme.chmod(0o644)
    assert main(["draw", "--check", "--readme", str(readme)]) == 1
    assert "stale in statechart: run `kvlift draw --write --readme " in capfd.readouterr().err
    assert readme.read_text() == README
    assert main(["draw", "--write", "--readme", str(readme)]) == 0
    assert readme.read_text() == redrawn(README)
    assert readme.stat().st_mode & 0o777 == 0o644
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]
    capfd.readouterr()
    assert main(["draw", "--check", "--json", "--readme", str(readme)]) == 0
    assert json.loads(capfd.readouterr().out)["stale"] == []


def test_a_drawing_goes_to_standard_output_or_to_a_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["draw", "mirror"]) == 0
    assert capfd.readouterr().out == mermaid("mirror")
    out = tmp_path / "mirror.svg"
    assert main(["draw", "mirror", "--format", "svg", "--out", str(out)]) == 0
    assert capfd.readouterr().out == ""
    assert out.read_text() == picture("mirror")


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["everything"], "everything"),
        (["--check", "--write"], "exclude each other"),
        (["mirror", "--check"], "leave NAME"),
        (["--check", "--readme", "/nowhere/README.md"], "can't be read"),
        (["mirror", "--out", "/nowhere/file"], "can't be written"),
    ],
)
def test_a_wrong_call_of_draw_ends_with_code_2(
    capfd: pytest.CaptureFixture[str], args: list[str], complaint: str
) -> None:
    assert main(["draw", *args]) == 2
    assert complaint in capfd.readouterr().err


def test_a_document_with_an_unknown_or_no_drawing_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    for text, complaint in (
        ("# nothing\n", "has no drawing"),
        ("<!-- draw:cats -->\n<!-- /draw -->\n", "no drawing is called 'cats'"),
    ):
        readme.write_text(text)
        assert main(["draw", "--check", "--readme", str(readme)]) == 2
        assert complaint in capfd.readouterr().err
