"""The machinery of `make mutation`: what is changed is what was meant, and nothing else is."""

from pathlib import Path

import pytest

pytest.importorskip("mutmut", reason="needs kvlift[mutation]")

from kvlift.core.observation import of_token
from tests.mutation.breed import Mutant, mutants_of
from tests.mutation.explained import key_of, reasons, table, written
from tests.mutation.forks import Answer, forked, limit_cpu
from tests.mutation.luck import Luck
from tests.mutation.reach import lines_run, statement_lines
from tests.mutation.swap import swap_in

ROOT = Path(__file__).resolve().parents[2]
OBSERVATION = ROOT / "kvlift" / "core" / "observation.py"


@pytest.fixture(autouse=True)
def _from_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # mutmut looks for its settings there


def _plus() -> Mutant:
    """The first token counts one less."""
    return next(
        mutant
        for mutant in mutants_of(ROOT, OBSERVATION)
        if "progress=token - 1" in mutant.text and mutant.function == "of_token"
    )


def test_a_mutant_is_one_change_of_one_function() -> None:
    mutant = _plus()
    source = OBSERVATION.read_text("utf-8")
    assert source.count(mutant.original) == 1
    line = source.splitlines()[mutant.lines[0] - 1]
    assert mutant.lines[0] == mutant.lines[1]
    assert mutant.diff() == [
        f"- {line.strip()}",
        f"+ {line.strip().replace('token +', 'token -', 1)}",
    ]
    assert mutant.name.startswith("kvlift.core.observation.x_of_token__mutmut_")


def test_a_fork_has_the_wrong_function_and_this_process_the_right_one() -> None:
    mutant, heard = _plus(), list[Answer]()

    def wrong(tell: object) -> None:
        swap_in(mutant, ROOT)
        assert callable(tell)
        tell(of_token(5).progress)

    forked([wrong], 1, lambda _number, answer: heard.append(answer))
    assert [answer.said for answer in heard] == [[4]]
    assert of_token(5).progress == 6


def test_a_fork_that_raises_or_takes_too_long_says_so() -> None:
    heard: dict[int, Answer] = {}

    def raises(tell: object) -> None:
        raise ValueError("so it is")

    def hangs(tell: object) -> None:
        limit_cpu(0.1)
        while True:
            pass

    forked([raises, hangs], 2, heard.__setitem__)
    assert heard[0].said == [{"raised": "ValueError: so it is"}]
    assert (heard[1].said, heard[1].ended_by) == ([], 27), "SIGPROF"


def test_a_test_reaches_a_mutant_by_any_line_of_its_statement(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        "def f(a, b=1):\n"  # 1
        "    if a and (\n"  # 2
        "        b\n"
        "    ):\n"  # 4
        "        return g(\n"
        "            a,\n"
        "        )\n"  # 7
        "    match b:\n"
        "        case 1:\n"  # 9
        "            return 2\n"
        "    return 3\n"  # 11
    )
    assert statement_lines(file, (3, 3)) == {2, 3, 4}
    assert statement_lines(file, (6, 6)) == {5, 6, 7}
    assert statement_lines(file, (9, 9)) == {9}
    assert statement_lines(file, (11, 11)) == {11}
    assert statement_lines(file, (1, 1)) >= {1, 11}, "a default value is used anywhere"


def test_lines_that_run_are_those_of_the_core() -> None:
    found = lines_run(ROOT, lambda: of_token(3))
    assert list(found) == ["kvlift/core/observation.py"]
    (line,) = found["kvlift/core/observation.py"]
    assert "progress=token + 1" in OBSERVATION.read_text("utf-8").splitlines()[line - 1]


def test_who_has_killed_goes_first() -> None:
    luck = Luck()
    for test, killed in (("good", True), ("bad", False)):
        luck.learn("a.py", "f", test, killed=killed)
    chances = [luck.chance("a.py", name, t) for name in ("f", "g") for t in ("good", "new", "bad")]
    assert chances[:3] == sorted(chances[:3], reverse=True)
    assert chances[3:] == sorted(chances[3:], reverse=True)
    assert chances[0] > chances[3]


def test_each_reason_is_about_one_change_and_is_a_sentence() -> None:
    assert all(why.endswith(".") for why in reasons().values())


def test_a_document_names_those_who_live_and_what_is_not_explained() -> None:
    mutant = _plus()
    text = written("a\n<!-- survivors -->\nold\n<!-- /survivors -->\nb\n", [mutant])
    assert text.startswith("a\n<!-- survivors -->\n| function")
    assert text.endswith("<!-- /survivors -->\nb\n")
    assert "**not explained**" in text
    assert "old" not in text
    assert "It is so." in table([mutant], {key_of(mutant): "It is so."})
