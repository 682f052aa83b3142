"""Write docs/configuration.md from the YAML files in configs/: `python docs/generate_configuration.py`.

Entry points and config groups are copied with their comments, so that the page and the defaults cannot differ.
Experiments only combine options of these groups; of each the first comment is listed.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIGS, PAGE = ROOT / "configs", ROOT / "docs" / "configuration.md"
ENTRY_POINTS = {"train": "train.py", "evaluate": "evaluate.py", "prepare": "data/prepare.py"}
HEADER = """# Configuration

Every key and its default, copied from `configs/` by `docs/generate_configuration.py`. Do not edit this page.

A config group is a folder and an option a file in it: `drafter=medusa` chooses `configs/drafter/medusa.yaml`. A value
is set by its path: `drafter.frames=8`, `trainer.steps=500`. `python train.py --cfg job` prints the composed config, and
an unknown key is refused with the nearest known one. `${...}` is computed: from another key, or by a resolver of
`ctcdraft/config/cli.py`. Where an option has `defaults`, it starts from those options; `/` separates nested groups
(`drafter/body=residual` sets `drafter.body`). With `# @package _global_` a file also sets keys of other groups.
"""


def generate_page() -> str:
    """Return the text of docs/configuration.md."""
    entries = [section(f"## {script}", CONFIGS / f"{name}.yaml") for name, script in ENTRY_POINTS.items()]
    folders = sorted({file.parent for file in CONFIGS.rglob("*.yaml")} - {CONFIGS, CONFIGS / "experiment"})
    for folder in folders:
        group = folder.relative_to(CONFIGS).as_posix()
        entries.append(f"## {group}")
        entries += [section(f"### {group}={file.stem}", file) for file in sorted(folder.glob("*.yaml"))]
    rows = [
        f"| `experiment={file.stem}` | {first_comment(file)} |" for file in sorted(CONFIGS.glob("experiment/*.yaml"))
    ]
    experiments = ["## experiment\n\nPresets: options and values of the groups above, by one name.", "\n".join(rows)]
    experiments[1] = "| option | purpose |\n|---|---|\n" + experiments[1]
    return "\n\n".join([HEADER.strip(), *entries, *experiments]) + "\n"


def section(heading: str, file: Path) -> str:
    return f"{heading}\n\n```yaml\n{file.read_text().strip()}\n```"


def first_comment(file: Path) -> str:
    """Return the first sentence of the comment at the top of a YAML file, as a cell of a table."""
    lines = [line.removeprefix("#").strip() for line in file.read_text().splitlines() if line.startswith("#")]
    text = " ".join(line for line in lines if not line.startswith("@package"))
    return text.partition(". ")[0].removesuffix(".").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(generate_page())
