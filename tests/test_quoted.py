"""What READMEs quote is what results/ holds, and a table that says otherwise is found."""

import json
import re
import shutil

import pytest

from ctcdraft.config.cli import REPOSITORY
from ctcdraft.errors import InputError
from studies import readme_quotes
from studies.readme_tables import TABLES, written_anew

RESULTS = REPOSITORY / "results"
REPORTS = sorted(RESULTS.rglob("report.json"))


@pytest.fixture
def copy(tmp_path):
    """The READMEs with tables, and what they quote: reports, and of whole comparisons all that is known of them."""
    files = {REPOSITORY / table.file for table in TABLES}
    whole = {file for rules in RESULTS.rglob("rules.json") for file in rules.parent.glob("*.json")}
    for file in files | whole | set(REPORTS):
        place = tmp_path / file.relative_to(REPOSITORY)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    return tmp_path


def test_every_table_says_what_its_reports_say():
    """Where it does not, `python -m studies.readme_tables` writes it anew."""
    assert [str(file.relative_to(REPOSITORY)) for file in written_anew(REPOSITORY)] == []


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.file}-{table.reports[0]}")
def test_a_number_of_any_row_that_is_not_its_reports_is_found_and_mended(copy, table):
    """Of each row in turn the last digit of its last cell that is not written by hand."""
    file = copy / table.file
    right = file.read_text()
    lines = right.split("\n")
    first = lines.index(table.header()) + 2
    for place in range(first, first + len(list(table.rows(copy / "results")))):
        wrong = list(lines)
        wrong[place] = re.sub(r"(\d)(\D*)$", lambda found: f"{(int(found[1]) + 1) % 10}{found[2]}", lines[place])
        assert wrong != lines
        file.write_text("\n".join(wrong))
        assert written_anew(copy) == {file: right}


def test_a_report_that_changes_changes_every_table_that_quotes_it(copy):
    report = copy / "results" / "demo" / "report.json"
    said = json.loads(report.read_text())
    (ctc,) = [row for row in said["rows"] if row["drafter"] == "ctc"]
    ctc["tau"] = 9.876
    report.write_text(json.dumps(said))
    found = written_anew(copy)
    assert {file.relative_to(copy).as_posix() for file in found} == {"README.md", "results/README.md"}
    assert all("9.88" in text for text in found.values())


def test_a_row_less_or_more_is_found(copy):
    file = copy / "README.md"
    right = file.read_text()
    lines = right.split("\n")
    place = lines.index(TABLES[0].header()) + 2
    for wrong in ([*lines[:place], *lines[place + 1 :]], [*lines[:place], lines[place], *lines[place:]]):
        file.write_text("\n".join(wrong))
        assert written_anew(copy) == {file: right}


BY_HAND = next(table for table in TABLES if readme_quotes.BY_HAND in table.columns.values())


def rows_of(text):
    lines = text.split("\n")
    first = lines.index(BY_HAND.header()) + 2
    return lines, first, first + len(BY_HAND.reports)


def test_a_table_may_end_its_file(copy):
    file = copy / BY_HAND.file
    lines, _, last = rows_of(file.read_text())
    file.write_text("\n".join(lines[:last]))
    assert written_anew(copy) == {}


def test_what_is_written_by_hand_stays_with_its_row_whoever_comes_before_it(copy):
    """As where a report is put in front of the others: their rows are numbered anew, and say what they said."""
    file = copy / BY_HAND.file
    right = file.read_text()
    lines, first, last = rows_of(right)
    file.write_text("\n".join([*lines[:first], *reversed(lines[first:last]), *lines[last:]]))
    assert written_anew(copy) == {file: right}
    file.write_text("\n".join([*lines[:first], *lines[first + 1 :]]))  # a row that was not there yet
    (made,) = written_anew(copy).values()
    new, *others = made.split("\n")[first:last]
    assert others == lines[first + 1 : last]
    assert "|  |  |" in new


def test_words_written_by_hand_are_not_lost_with_their_row(copy):
    file = copy / BY_HAND.file
    lines, first, _ = rows_of(file.read_text())
    name = lines[first].split("|")[1].strip()
    file.write_text("\n".join(lines).replace(f"| {name} |", "| renamed |"))
    with pytest.raises(InputError, match=rf"{BY_HAND.file} has words written by hand in a row .* \(renamed: "):
        written_anew(copy)
    file.write_text("\n".join([*lines[: first + 1], *lines[first:]]))
    with pytest.raises(InputError, match="or is there twice"):
        written_anew(copy)


def test_what_is_not_there_is_one_sentence(copy):
    (copy / "results" / "demo" / "report.json").write_text("{}")
    with pytest.raises(InputError, match=r"demo/report\.json is no report\.json"):
        written_anew(copy)
    (copy / "README.md").write_text("# nothing\n")
    with pytest.raises(InputError, match=r"README\.md has no table with the header \| drafter \| tau"):
        written_anew(copy)


@pytest.mark.parametrize("file", REPORTS, ids=lambda file: file.parent.name)
def test_every_result_says_how_it_came_about(file):
    said = json.loads(file.read_text())
    environment = said["environment"]
    assert environment["command"].startswith("python ")
    assert re.fullmatch("[0-9a-f]{40}", environment["git"]["commit"])
    assert environment["versions"]["torch"]
    assert all(row["hardware"] and row["dtype"] and row["seed"] is not None for row in said["rows"])
    assert not re.search(r"/(home|root|work|tmp)/", file.read_text())
