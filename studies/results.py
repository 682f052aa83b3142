"""Archives, summaries and tables of the studies in results/.

python -m studies.results unpack STUDY [FOLDER]   unpack the raw reports, by default into runs/results/STUDY
python -m studies.results rebuild [STUDY...]      write CSV files and figures from the raw reports
python -m studies.results readme                  write the tables of README.md, results/**/README.md, docs/*.md

results.yaml lists columns and figures, results_tables.yaml the tables. A row of summary.csv is one method on one
benchmark at one temperature, tree size and seed.
"""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import yaml

from ctcdraft.config.cli import REPOSITORY
from ctcdraft.errors import InputError, run_cli
from ctcdraft.io import write_text
from ctcdraft.report import latency
from ctcdraft.report.html import files
from studies.comparison import store
from studies.comparison import tables as comparison

Row = dict[str, Any]
RESULTS = REPOSITORY / "results"
HERE = Path(__file__).parent
CONFIG: Row = yaml.safe_load("".join(file.read_text() for file in sorted(HERE.glob("results*.yaml"))))
CONFIG["tables"] |= yaml.safe_load((HERE / "comparison" / "tables.yaml").read_text())["tables"]
STUDIES: dict[str, Row] = CONFIG["studies"]
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def unpack(study: str, folder: Path) -> Path:
    if study not in STUDIES:
        raise InputError(f"there is no study {study}; there are {', '.join(STUDIES)}")
    file = RESULTS / study / "raw.tar.gz"
    if not file.is_file():
        raise InputError(f"{study} has no archive: its raw reports are in {RESULTS / study / store.EVALUATIONS}")
    with tarfile.open(file) as archive:
        for member in archive:
            unpack_member(archive, member, folder)
    return folder


def unpack_member(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write a plain file of an archive; `extractall` has no filter before Python 3.11.4."""
    place = folder / member.name
    if not place.resolve().is_relative_to(folder.resolve()) or not (member.isfile() or member.isdir()):
        raise InputError(f"{archive.name!s} holds {member.name}, which is no plain file below it; restore the archive")
    if content := archive.extractfile(member):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.read())


def rebuild(study: str, out: Path | None = None) -> None:
    out, rules = out or RESULTS / study, load(RESULTS / study / store.RULES)
    if rules:
        return comparison.rebuild(rules, store.ResultStore(out, RESULTS / study), out)
    with TemporaryDirectory() as place:
        raw = unpack(study, Path(place))
        figures, texts = (STUDIES[study].get(key, {}) for key in ("figures", "text"))
        for folder in {(raw / file).parent for file in figures.values()}:
            if folder.name == "figures":
                files.rebuild_page(folder.parent)
            elif report := load(folder / "report.json"):
                latency.write(folder, report)
        rows = [row for file in sorted(raw.rglob("report.json")) for row in of_report(raw, file)]
        rows += [row for name, patterns in texts.items() for row in of_text(raw / name, patterns)]
        pairs = [row for file in sorted(raw.rglob("verdict.json")) for row in of_verdict(raw, file)]
        for name, lines in {"summary": rows, "differences": pairs}.items():
            # convert_dtypes, or whole numbers of a column with gaps become floats.
            frame = pd.DataFrame(lines).dropna(axis="columns", how="all").convert_dtypes()
            if lines:
                frame.to_csv(out / f"{name}.csv", index=False, float_format="%.8g", lineterminator="\n")
        for name, file in figures.items():
            shutil.copyfile(raw / file, out / name)


def load(file: Path) -> Row:
    return json.loads(file.read_text()) if file.is_file() else {}


def at(row: Any, path: str) -> Any:
    for key in path.split("."):
        if row is None:  # reports of earlier versions lack some fields
            return None
        row = row[int(key)] if isinstance(row, list) else row.get(key)
    return row


def of_report(raw: Path, file: Path) -> Iterator[Row]:
    report, heads = load(file), trained(raw, file.parent)
    for row in report["rows"]:
        line: Row = {"run": str(file.parent.relative_to(raw))}
        line |= {key: at(row, path) for key, path in CONFIG["columns"].items()}
        draft = [at(row, "time.draft"), at(row, "time.tree")]
        line |= {"draft_ms": None if None in draft else 1e3 * sum(draft), "replayed": "replay" in row or None}
        sizes = (report["environment"].get("sizes") or {}).get(row["drafter"])
        line["predicted"] = at(sizes, "predicted") or at(sizes, "policy.rate")  # the latter in older reports
        head = heads.get(row["drafter"]) or heads.get(row["drafter"].partition("@")[0], {})
        yield {**line, **head, "commit": report["environment"]["git"]["commit"][:7]}
    for method, choice in (report["environment"].get("sizes") or {}).items():
        for part in choice.get("reliability", []):  # of the calibrated probabilities of adaptive trees
            line = {"run": str(file.parent.relative_to(raw)), "measure": "accepted share", "method": method}
            line |= {key: part[key] for key in ("from", "nodes", "probability")}
            yield line | {"value": part["accepted"]}


def trained(raw: Path, place: Path) -> dict[str, Row]:
    """Return the training of each head, by its name in a report, from training.json in the nearest folder above."""
    above = (parent for parent in place.parents if parent.is_relative_to(raw) and (parent / "training.json").is_file())
    top, heads = next(above, place), dict[str, Row]()
    labels = load(top / "rules.json").get("readings_as")
    for key, entry in load(top / "training.json").items():
        if "arm" not in entry:  # of benchmarks/methods.py
            heads[key] = {"steps": entry["steps"]}
            heads[key]["train_seconds"] = entry["processor_seconds"] - entry["of_which_start"]
        for number, reading in enumerate(entry["readings"]) if entry.get("arm") == "steps" else ():
            tree = f"@{reading}" if reading else ""
            line = {"method": f"{entry['entrant']}{tree}", "tree": labels[number] if labels else None}
            line |= {one: entry[one] for one in ("seed", "steps", "learning_rate")} | entry["factors"]
            heads[f"{key}{tree}"] = {**line, "train_seconds": entry["seconds"].get("processor")}
    return heads


def of_text(file: Path, patterns: Mapping[str, str]) -> Iterator[Row]:
    """Yield a row per match with the group `value` in a script's output; other matches add columns to later rows."""
    carried: Row = {"run": file.name}
    for line in file.read_text().splitlines():
        for measure, pattern in patterns.items():
            match = re.search(pattern, line)
            groups = {key: number(text) for key, text in match.groupdict().items() if text} if match else {}
            if "value" in groups:
                yield {**carried, "measure": measure, **groups}
            carried |= groups if "value" not in groups else {}


def number(text: str) -> float | str:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return text.strip()


def of_verdict(raw: Path, file: Path) -> Iterator[Row]:
    """Yield paired differences (`more` minus `less`) and effects of factors."""
    for row in [one for part in load(file).values() for one in part]:
        row["run"] = str(file.parent.relative_to(raw))
        yield {key: at(row, path) for key, path in CONFIG["difference_columns"].items()}


def selected(spec: Row, root: Path) -> pd.DataFrame:
    frame = pd.read_csv(root / "results" / spec["file"], keep_default_na=False, na_values=[""])
    frame = frame.query(" ".join(spec.get("where", "index >= 0").split()), engine="python")
    if "group" in spec:
        groups = frame.groupby(spec["group"], sort=False, dropna=False)
        frame = groups.agg(**{key: tuple(how) for key, how in spec["totals"].items()}).reset_index()
    if order := spec.get("sort"):  # whether ascending, by column
        frame = frame.sort_values([*order], ascending=[*order.values()], kind="stable")
    names = {**CONFIG["names"], **spec.get("names", {})}
    return frame.replace({column: names[column] for column in names if column in frame})


def table(name: str, root: Path = REPOSITORY) -> str:
    """Return a table as Markdown."""
    if name not in CONFIG["tables"]:
        raise InputError(f"there is no table {name}; there are {', '.join(CONFIG['tables'])}")
    spec, lines = CONFIG["tables"][name], dict[tuple[str, ...], dict[str, str]]()
    for row in selected(spec, root).to_dict("records"):
        line = lines.setdefault(tuple(cell(form, row) for form in spec["rows"].values()), {})
        for header, form in spec["cells"].items():
            title, text = header.format(**row), cell(form, row)
            if line.setdefault(title, text) != text:
                both = f"{line[title]} and {text} are both in column {title}"
                raise InputError(f"table {name}: {both}; narrow `where`: {row}")
    titles = list(dict.fromkeys(title for line in lines.values() for title in line))
    body = [[*key, *(line.get(title, "-") for title in titles)] for key, line in lines.items()]
    head = [*spec["rows"], *titles]
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *body])


def cell(form: str, row: Row) -> str:
    return "-" if "nan" in (text := form.format(**row)) else text


def rewritten(root: Path = REPOSITORY) -> dict[Path, str]:
    """Return the pages whose tables differ from the CSV files, each with its text as it should be."""
    pages = [root / "README.md", *root.glob("results/**/README.md"), *root.glob("docs/*.md")]
    texts = {page: page.read_text() for page in sorted(pages)}
    now = {page: MARKED.sub(lambda match: match[1] + table(match[2], root) + match[3], texts[page]) for page in texts}
    return {page: text for page, text in now.items() if text != texts[page]}


def main(arguments: list[str]) -> None:
    match arguments:
        case ["unpack", study, *rest] if len(rest) <= 1:
            print(unpack(study, Path(rest[0] if rest else f"runs/results/{study}")))
        case ["rebuild", *studies]:
            list(map(rebuild, studies or STUDIES))
        case ["readme"]:
            for page, text in rewritten().items():
                write_text(page, text)
                print(f"wrote {page}")
        case _:
            raise InputError(f"unknown command\n{__doc__}")


if __name__ == "__main__":
    run_cli("results", main)
