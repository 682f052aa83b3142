"""The front door: where config becomes plain values, and a bad input one sentence. No room behind imports it."""

from __future__ import annotations

import difflib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ctcdraft.errors import InputError

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "configs"

# Hydra then raises what it finds wrong instead of printing a page about it, and `from_command_line` says it.
os.environ.setdefault("HYDRA_FULL_ERROR", "1")


def register_resolvers() -> None:
    """`${repo:data/tiny}`: a path inside this repository, whatever the working directory; `${auto_device:}`."""
    from omegaconf import OmegaConf

    from ctcdraft.corpus.default_folder import default_folder

    OmegaConf.register_new_resolver("repo", lambda path: str(REPOSITORY / path), replace=True)
    OmegaConf.register_new_resolver("prepared_in", default_folder, replace=True)
    OmegaConf.register_new_resolver("basename", lambda path: Path(path).name, replace=True)
    OmegaConf.register_new_resolver("auto_device", auto_device, replace=True)
    OmegaConf.register_new_resolver("auto_shard", auto_shard, replace=True)
    OmegaConf.register_new_resolver("auto_dtype", auto_dtype, replace=True)
    OmegaConf.register_new_resolver("bfloat16_on", bfloat16_on, replace=True)


def auto_device() -> str:
    """A CUDA device where there is one; under torchrun, this process's own."""
    import torch

    rank = os.environ.get("LOCAL_RANK")
    return ("cuda" if rank is None else f"cuda:{rank}") if torch.cuda.is_available() else "cpu"


def auto_shard() -> str:
    """This process among those that torchrun started together, else all of the work."""
    return f"{int(os.environ.get('RANK', 0)) + 1}/{os.environ.get('WORLD_SIZE', 1)}"


def auto_dtype(device: str) -> str:
    """float32 on a CPU, where equality with autoregression is a law; bfloat16 on an accelerator."""
    return "float32" if device == "cpu" else "bfloat16"


def bfloat16_on(device: str) -> bool:
    """Whether matrix products in bfloat16 are native there; emulated they are slower than float32."""
    import torch

    return device != "cpu" or torch.cpu._is_avx512_bf16_supported()


def entry_point(main: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Print an InputError as its one sentence and exit with status 1; every other error keeps its traceback."""
    register_resolvers()

    @functools.wraps(main)
    def guarded(config: Any) -> Any:
        try:
            return main(config)
        except Exception as error:
            if (sentence := error_sentence(error)) is None:
                raise
            from ctcdraft.config.sweep_jobs import job_number

            job = job_number()
            print(f"{Path(sys.argv[0]).name}: {'' if job is None else f'job {job}: '}{sentence}", file=sys.stderr)
            if job is not None:  # Hydra runs the other jobs before it raises this
                raise InputError("jobs of the sweep failed, as said above; the same command tries them again") from None
            raise SystemExit(1) from None

    return guarded


def error_sentence(error: Exception) -> str | None:
    """Return what is wrong with the input, in a sentence; None where the error is a bug of ours."""
    refused = find_input_error(error)
    return str(refused) if refused is not None else target_error(error) or config_error(error)


def run_hydra_main(main: Callable[[], Any]) -> None:
    """Run a Hydra main; what Hydra finds wrong with the command line becomes a sentence too."""
    try:
        main()
    except KeyboardInterrupt:
        stopped = "stopped by Ctrl-C; what was finished is kept, and the same command goes on from there"
        print(f"{Path(sys.argv[0]).name}: {stopped}", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # `... --help | head`: nobody reads on; what is left to flush goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if (sentence := error_sentence(error)) is None:
            raise
        print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)
        raise SystemExit(1) from None


def config_error(error: Exception, verb: str | None = None, more: Iterable[str] = ()) -> str | None:
    """What Hydra or OmegaConf finds wrong, in a sentence; None where a constructor failed, which is a bug of ours.
    verb: whose keys they are, if not this script's; more: keys that this script takes besides."""
    from hydra.errors import HydraException, InstantiationException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, InstantiationException) or not isinstance(error, (HydraException, OmegaConfBaseException)):
        return None
    if missing := re.search(r"Missing mandatory value: ([\w.]+)", str(error)):
        return f"{missing[1]}= is missing; give it on the command line"
    parts = [str(part) for part in (error, error.__cause__) if part is not None]
    words = " ".join(line.strip() for part in parts for line in part.splitlines()[:1]).replace("'.", "':")
    return f"{words}; {suggest_keys(words, verb or Path(sys.argv[0]).stem, more)}"


def suggest_keys(words: str, verb: str, more: Iterable[str] = ()) -> str:
    """The keys or options that come nearest to what was quoted, or where to look for all of them."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    typed = [word.partition("=")[0] for word in sys.argv[1:]]
    options = [str(file.relative_to(CONFIGS).with_suffix("")) for file in CONFIGS.rglob("*/*.yaml")]
    chosen = [word for word in sys.argv[1:] if word.replace("=", "/", 1) in options]
    GlobalHydra.instance().clear()  # of the job that ends with this sentence
    with initialize_config_dir(str(CONFIGS), version_base=None):
        try:
            known = dotted_keys(compose(verb, chosen))
        except (HydraException, OmegaConfBaseException):  # which is what is being told
            known = dotted_keys(compose(verb))
    known += [*more, *options]
    for word in re.findall(r"'([\w./@-]+)'", words):
        if word in known:  # where it was said, and right
            continue
        close = [key for key in known if key.endswith(f".{word}")] or difflib.get_close_matches(word, known, 3)
        close = [key for key in close if key not in typed]
        if close and word != verb:
            return f"did you mean {' or '.join(close)}?"
    return f"{verb}.py --cfg job prints all keys"


def compose_config(verb: str, *overrides: str) -> Any:
    """The config of `python VERB.py WORDS`, inside another entry point or outside of any."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    if GlobalHydra.instance().is_initialized():
        return compose(verb, overrides=list(overrides))
    register_resolvers()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return compose(verb, overrides=list(overrides))


def dotted_keys(node: Any, above: str = "") -> list[str]:
    """Every key of a config: `trainer.steps`, `drafter.frames`, ..."""
    keys = []
    for key in node:
        keys.append(above + str(key))
        value = node._get_node(key)
        if hasattr(value, "_get_node") and hasattr(value, "keys"):
            keys += dotted_keys(value, f"{above}{key}.")
    return keys


def find_input_error(error: BaseException | None) -> InputError | None:
    """The InputError that this is, or was raised from: Hydra wraps what a constructor raises."""
    while error is not None and not isinstance(error, InputError):
        error = error.__cause__
    return error


def target_error(error: BaseException) -> str | None:
    """A `_target_=` that names nothing, in a sentence."""
    from hydra.errors import InstantiationException

    if not isinstance(error, InstantiationException) or not str(error).startswith("Error locating target"):
        return None
    return f"{str(error).splitlines()[0].rstrip(':.')}; check what _target_= names, as configs/ does it"
