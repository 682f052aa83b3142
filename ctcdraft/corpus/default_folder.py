"""The folder of a prepared corpus where prepared= is not given: named by base, corpus and prompt files.

Two files read as one kind of corpus (corpus=sharegpt corpus.path=FILE) have a folder each, so that the answers to one
are neither taken for answers to the other nor in their way. Files count by their names alone: data that moves to
another disk finds its answers again, and files of equal names in two places meet in one folder, which then refuses the
second (`prepared.changes`). Prompts that ship with this repository, or come from the hub, add nothing to the name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BUNDLED_FOLDER = "data/tiny/"
FILE_ENDINGS = re.compile(r"(\.jsonl?)?(\.gz)?$")
MAX_NAME_LENGTH = 60  # characters that the files' names add


def default_folder(home: str, base: str, corpus: Any) -> str:
    """Return where the answers of this base to these prompts are, or will be.

    corpus: the config node. Answers to these files in the folder of base and corpus alone, the name of old, stay there.

    home data, base tiny, corpus sharegpt of lima.jsonl   ->   data/tiny-sharegpt-lima
    """
    common, files = Path(home) / f"{base}-{corpus['name']}", file_names(corpus)
    own = common.with_name(f"{common.name}-{files}") if files else common
    return str(own if own.exists() or prepared_file_names(common) != files else common)


def file_names(corpus: Any) -> str:
    """Return the names of the files of a corpus and of its parts joined by +; "" where none are given."""
    names = [FILE_ENDINGS.sub("", Path(path).name) for path in corpus_paths(corpus) if BUNDLED_FOLDER not in path]
    return re.sub(r"[^\w.+-]+", "_", "+".join(names)).strip("_.-+")[:MAX_NAME_LENGTH]


def corpus_paths(corpus: Any) -> Iterator[str]:
    """Yield every path of the values of a corpus, those of its parts behind its own."""
    path = corpus.get("path")
    yield from [path] if isinstance(path, str) else map(str, path or ())
    for part in (corpus.get("parts") or {}).values():
        yield from corpus_paths(part)


def prepared_file_names(folder: Path) -> str | None:
    """Return the names of the files that the corpus in a folder was made from; None where there is no such corpus."""
    try:
        return file_names(json.loads((folder / "manifest.json").read_bytes())["settings"]["corpus"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def describe_path_changes(stored: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return, for a sentence, the paths of two manifests where both are written down and differ."""
    if "settings" not in stored or "settings" not in wanted:
        return []
    before, now = (",".join(corpus_paths(one["settings"].get("corpus", {}))) or "the hub" for one in (stored, wanted))
    return [f"corpus.path={before} (now {now})"] if before != now else []
