"""README.md and docs/: commands compose, paths and links exist, examples run, generated pages are current."""

import fnmatch
import re
import shlex
import subprocess
import sys
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from tiny_models import random_base

from ctcdraft.config.cli import CONFIGS, REPOSITORY, register_resolvers
from ctcdraft.config.command_line import parse_override, quote_paths
from ctcdraft.config.contestants import build_contestant, resolve
from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.verification import match
from ctcdraft.drafters.autoregressive import Autoregressive

README = REPOSITORY / "README.md"
PAGES = [README, *sorted((REPOSITORY / "docs").glob("*.md"))]
PROSE = [page for page in PAGES if page.name != "configuration.md"]  # generated, and held to the YAML files below
ENTRY_POINTS = {"train.py": "train", "evaluate.py": "evaluate", "data/prepare.py": "prepare"}
OTHER_COMMANDS = {"pip", "jupyter", "."}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
OVERRIDE = re.compile(r"[+~]{0,2}([a-z_]+(?:[./@][a-z_]+)*)=(\S*)")
FOLDERS = ("benchmarks", "configs", "ctcdraft", "data/tiny", "docs", "notebooks", "results", "studies", "tests")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def commands() -> list[tuple[str, str]]:
    """Every command of a shell block, and every inline one that begins with python or make."""
    found = []
    for page in PROSE:
        blocks = [text for kind, text in FENCE.findall(page.read_text()) if kind in ("bash", "console")]
        lines = [line.removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        lines += [text for text in INLINE.findall(prose(page)) if text.startswith(("python ", "make ", "torchrun "))]
        found += [(page.name, part) for line in lines for part in line.split(" && ") if part.strip()]
    return found


COMMANDS = commands()


def first_values(arguments: list[str]) -> list[str]:
    """Overrides of a sweep with the first value of each."""
    chosen = []
    for argument in arguments:
        override = parse_override(argument)
        assert override is not None, argument
        key = argument.partition("=")[0]
        if "=glob(" in argument:
            pattern = argument.partition("=glob(")[2].removesuffix(")")
            chosen.append(f"{key}={sorted(fnmatch.filter(options(key), pattern))[0]}")
        elif override.is_sweep_override():
            chosen.append(f"{key}={next(iter(override.sweep_string_iterator()))}")
        else:
            chosen.append(argument)
    return chosen


@cache
def options(group: str) -> list[str]:
    return [file.stem for file in (CONFIGS / group).glob("*.yaml")]


@pytest.fixture(scope="module")
def hydra_configs():
    register_resolvers()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        yield


def check_python(arguments: list[str]) -> None:
    """Raise where `python WORDS` names no module or file, or overrides that do not compose."""
    if arguments[0] == "-m":
        if arguments[1] != "venv" and not arguments[1].startswith("vllm."):  # has an environment of its own
            assert find_spec(arguments[1]) is not None, arguments[1]
        return
    script, rest = arguments[0], [argument for argument in arguments[1:] if argument not in ("-m", "--cfg", "job")]
    assert (REPOSITORY / script).is_file(), script
    if script == "sweep.py":
        rest = first_values(
            [argument for argument in rest if not argument.startswith(("trials=", "jobs=", "search_seed="))]
        )
        compose("train", [argument for argument in rest if not argument.startswith("run=")])
    elif script in ENTRY_POINTS:
        compose(ENTRY_POINTS[script], first_values(quote_paths(rest)))


@pytest.mark.parametrize(("page", "command"), sorted(set(COMMANDS)))
def test_a_command_can_be_run(hydra_configs, page, command):
    arguments = shlex.split(command, comments=True)
    while arguments and re.fullmatch(r"[A-Z_]+=\S*", arguments[0]):  # environment variables
        arguments = arguments[1:]
    if not arguments:
        return
    if arguments[0] == "make":
        assert re.search(rf"^{arguments[1]}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE), command
    elif arguments[0] in ("python", "python3"):
        check_python(arguments[1:])
    elif arguments[0] == "torchrun":
        check_python(arguments[next(n for n, argument in enumerate(arguments) if argument.endswith(".py")) :])
    else:
        assert arguments[0] in OTHER_COMMANDS, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_paths_exist(page):
    text = prose(page)
    for link in LINK.findall(text):
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in headings], link
        if page != README:  # the site holds docs/ alone
            assert file.parent == page.parent, link
    package = "ctcdraft/" if page == README else ""
    for name in INLINE.findall(text):
        if re.fullmatch(rf"({'|'.join(FOLDERS)})(/[\w./*]*)?|\w+\.py|constraints\.txt|mkdocs\.yml", name):
            assert list(REPOSITORY.glob(re.sub("[A-Z]{4,}", "*", name).rstrip("/"))), name
        elif re.fullmatch(r"[a-z]+(/[a-z_]+)+\.py", name):
            assert (REPOSITORY / name).is_file() or (REPOSITORY / package / name).is_file(), name


@cache
def known_keys() -> frozenset[str]:
    """Every key of configs/, by its full path, and every group."""

    def walk(node, above):
        for key, value in node.items() if isinstance(node, dict) else ():
            path = f"{above}.{key}" if above else str(key)
            yield path
            yield from walk(value, path)

    keys = {folder.relative_to(CONFIGS).as_posix() for folder in CONFIGS.rglob("*") if folder.is_dir()}
    for file in CONFIGS.rglob("*.yaml"):
        text = file.read_text()
        group = file.parent.relative_to(CONFIGS).as_posix().replace("/", ".").strip(".")
        keys |= set(walk(yaml.safe_load(text), "" if "@package _global_" in text else group))
    return frozenset(keys)


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.stem)
def test_keys_and_options_in_the_text_exist(page):
    """`group=option` names a YAML file, `key=value` a key of one; keys of mappings without keys of their own pass."""
    study = REPOSITORY / "studies" / page.stem / f"{page.stem}.yaml"  # a study with a command of its own has own keys
    own = set(yaml.safe_load(study.read_text())) if study.is_file() else set()
    for name in INLINE.findall(prose(page)):
        for key, value in OVERRIDE.findall(name) if "{" not in name and not name.startswith("pip") else ():
            key = key.removeprefix("corpus.parts.sharegpt.").removeprefix("corpus.parts.gsm8k.")
            if key.partition(".")[0] in own:
                continue
            if (CONFIGS / key).is_dir() and re.fullmatch(r"[a-z_0-9]+", value):
                assert value in options(key), name
            elif key not in ("group", "key"):
                key = key.rpartition(".")[0] if name.startswith("+") else key  # `+` adds a key below an existing one
                assert key in known_keys() or key.startswith("base.of."), name


def test_the_readme_is_short():
    text = README.read_text()
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 1200


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.stem)
def test_a_page_is_short_and_in_the_navigation(page):
    text = page.read_text()
    assert text.startswith("# ")
    assert len(text.splitlines()) <= 150
    if page != README:
        pages = [
            file for entry in yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"] for file in entry.values()
        ]
        assert page.name in pages


def test_the_page_of_all_keys_is_current():
    """Where it is not, `python docs/generate_configuration.py` writes it again."""
    script = REPOSITORY / "docs" / "generate_configuration.py"
    printed = f"import runpy; print(runpy.run_path({str(script)!r})['generate_page'](), end='')"
    page = subprocess.run([sys.executable, "-c", printed], capture_output=True, text=True, check=True).stdout
    assert page == (REPOSITORY / "docs" / "configuration.md").read_text()


def test_the_drafter_of_the_readme_decodes_losslessly(tmp_path, monkeypatch):
    blocks = {kind: text for kind, text in FENCE.findall(README.read_text()) if "parrot" in text}
    parrot = module_from_spec(spec_from_loader("ctcdraft.drafters.parrot", loader=None))
    exec(blocks["python"], parrot.__dict__)
    monkeypatch.setitem(sys.modules, parrot.__name__, parrot)
    monkeypatch.setattr("ctcdraft.drafters.parrot", parrot, raising=False)
    file = tmp_path / "parrot.yaml"
    file.write_text(blocks["yaml"])
    base = random_base()
    drafter = build_contestant(resolve(str(file), trust=["ctcdraft.drafters.parrot.Parrot"]), base).drafter
    settings = DecodingSettings(24, nodes=4, temperature=0.0, top_k=0, top_p=1.0, verify=match, lossless=True)
    prompt_L = torch.tensor([0, 7, 9, 9, 30])
    drafted, plain = (
        generate(base, one, prompt_L, settings, base.stop_token_ids, seed=0) for one in (drafter, Autoregressive(base))
    )
    assert drafted.tokens == plain.tokens
    assert all(step.nodes == 4 for step in drafted.passes[:3])  # the root and three draft tokens
