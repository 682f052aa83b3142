"""The default folder of a prepared corpus, named by base model, corpus and prompt files.

The same `corpus=sharegpt` with another corpus.path= gets another folder, so that responses to one file are neither
taken for responses to another nor overwritten by them. Only file names count, not their folders: data moved to another
disk finds its responses again, and files of equal names in two places meet in one folder, where
`prepared.changed_settings` refuses the second. Bundled prompts and prompts from the hub add nothing to the name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BUNDLED_FOLDER = "data/tiny/"
FILE_ENDINGS = re.compile(r"(\.jsonl?)?(\.gz)?$")
MAX_NAME_LENGTH = 60  # characters that file names may add to the folder name


def default_folder(home: str, base: str, corpus: Any) -> str:
    """Return the folder for the responses of this base model to these prompts.

    Older versions did not put file names into the folder name; a corpus of these very files in such a folder stays
    there.

    home data, base tiny, corpus sharegpt of lima.jsonl   ->   data/tiny-sharegpt-lima

    Args:
        corpus: node of the config.
    """
    common, files = Path(home) / f"{base}-{corpus['name']}", file_names(corpus)
    own = common.with_name(f"{common.name}-{files}") if files else common
    return str(own if own.exists() or prepared_file_names(common) != files else common)


def file_names(corpus: Any) -> str:
    """Return the file names of a corpus and of its parts joined by +, or an empty string where none are given."""
    names = [FILE_ENDINGS.sub("", Path(path).name) for path in corpus_paths(corpus) if BUNDLED_FOLDER not in path]
    return re.sub(r"[^\w.+-]+", "_", "+".join(names)).strip("_.-+")[:MAX_NAME_LENGTH]


def corpus_paths(corpus: Any) -> Iterator[str]:
    """Yield the paths of a corpus config, then those of its parts."""
    path = corpus.get("path")
    yield from [path] if isinstance(path, str) else map(str, path or ())
    for part in (corpus.get("parts") or {}).values():
        yield from corpus_paths(part)


def prepared_file_names(folder: Path) -> str | None:
    """Return the names of the files that the corpus in a folder was made from, or None without such a corpus."""
    try:
        return file_names(json.loads((folder / "manifest.json").read_bytes())["settings"]["corpus"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def describe_path_changes(stored: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return "corpus.path=OLD (now NEW)" if two manifests record different paths."""
    if "settings" not in stored or "settings" not in wanted:
        return []
    before, now = (",".join(corpus_paths(one["settings"].get("corpus", {}))) or "the hub" for one in (stored, wanted))
    return [f"corpus.path={before} (now {now})"] if before != now else []
