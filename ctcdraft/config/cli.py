"""Hydra entry points: resolvers, composition of configs, and errors as one sentence with a suggestion."""

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

# Hydra then raises its errors instead of printing them over a page, and `run_hydra_main` prints one sentence.
os.environ.setdefault("HYDRA_FULL_ERROR", "1")


def register_resolvers() -> None:
    """Register the OmegaConf resolvers of configs/, such as `${repo:data/tiny}`, a path inside this repository."""
    from omegaconf import OmegaConf

    from ctcdraft.corpus.part_files import default_folder

    resolvers: dict[str, Callable[..., Any]] = {
        "repo": lambda path: str(REPOSITORY / path),
        "prepared_in": default_folder,
        "basename": lambda path: Path(path).name,
        "auto_device": auto_device,
        "auto_shard": auto_shard,
        "auto_dtype": auto_dtype,
        "bfloat16_on": bfloat16_on,
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def auto_device() -> str:
    """Return a CUDA device where there is one (under torchrun, the one of this process), else cpu."""
    import torch

    rank = os.environ.get("LOCAL_RANK")
    return ("cuda" if rank is None else f"cuda:{rank}") if torch.cuda.is_available() else "cpu"


def auto_shard() -> str:
    """Return i/N for process i of the N that torchrun started, 1/1 without torchrun."""
    return f"{int(os.environ.get('RANK', 0)) + 1}/{os.environ.get('WORLD_SIZE', 1)}"


def auto_dtype(device: str) -> str:
    """Return float32 for a CPU, where tokens must equal autoregression exactly, and bfloat16 for an accelerator."""
    return "float32" if device == "cpu" else "bfloat16"


def bfloat16_on(device: str) -> bool:
    """Return whether the device has native bfloat16 matrix products; emulated ones are slower than float32."""
    import torch

    return device != "cpu" or torch.cpu._is_avx512_bf16_supported()


def entry_point(main: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a main function to print an InputError as one sentence and exit with status 1.

    Every other exception is a bug and keeps its traceback.
    """
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
                raise InputError("jobs of the sweep failed, see above; the same command tries them again") from None
            raise SystemExit(1) from None

    return guarded


def error_sentence(error: Exception) -> str | None:
    """Return the sentence for an error of the input; None where the error is a bug."""
    input_error = find_input_error(error)
    return str(input_error) if input_error is not None else target_error(error) or config_error(error)


def run_hydra_main(main: Callable[[], Any]) -> None:
    """Run a Hydra main function; errors of Hydra about the command line are printed as one sentence too."""
    try:
        main()
    except KeyboardInterrupt:
        message = "stopped by Ctrl-C; what was finished is kept, and the same command goes on from there"
        print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # `... --help | head` closed the pipe; flushing at exit must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if (sentence := error_sentence(error)) is None:
            raise
        print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)
        raise SystemExit(1) from None


def config_error(error: Exception, verb: str | None = None, more: Iterable[str] = ()) -> str | None:
    """Return the sentence for an error of Hydra or OmegaConf; None where a constructor failed, which is a bug.

    Args:
        verb: the entry point whose keys are meant, if not the running script.
        more: keys that the script takes besides those of its config.
    """
    from hydra.errors import HydraException, InstantiationException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, InstantiationException) or not isinstance(error, (HydraException, OmegaConfBaseException)):
        return None
    if missing := re.search(r"Missing mandatory value: ([\w.]+)", str(error)):
        return f"{missing[1]}= is missing; give it on the command line"
    parts = [str(part) for part in (error, error.__cause__) if part is not None]
    message = " ".join(line.strip() for part in parts for line in part.splitlines()[:1]).replace("'.", "':")
    return f"{message}; {suggest_keys(message, verb or Path(sys.argv[0]).stem, more)}"


def suggest_keys(message: str, verb: str, more: Iterable[str] = ()) -> str:
    """Return "did you mean KEY?" for the quoted names in a message, or how to print all keys."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    typed = [argument.partition("=")[0] for argument in sys.argv[1:]]
    options = [str(file.relative_to(CONFIGS).with_suffix("")) for file in CONFIGS.rglob("*/*.yaml")]
    chosen = [argument for argument in sys.argv[1:] if argument.replace("=", "/", 1) in options]
    GlobalHydra.instance().clear()  # left by the failing job
    with initialize_config_dir(str(CONFIGS), version_base=None):
        try:
            known = dotted_keys(compose(verb, chosen))
        except (HydraException, OmegaConfBaseException):  # the error that the message reports
            known = dotted_keys(compose(verb))
    known += [*more, *options]
    for name in re.findall(r"'([\w./@-]+)'", message):
        if name in known:
            continue
        close = [key for key in known if key.endswith(f".{name}")] or difflib.get_close_matches(name, known, 3)
        close = [key for key in close if key not in typed]
        if close and name != verb:
            return f"did you mean {' or '.join(close)}?"
    return f"{verb}.py --cfg job prints all keys"


def compose_config(verb: str, *overrides: str) -> Any:
    """Return the config of `python VERB.py OVERRIDES`, inside a running entry point or outside."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    if GlobalHydra.instance().is_initialized():
        return compose(verb, overrides=list(overrides))
    register_resolvers()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return compose(verb, overrides=list(overrides))


def dotted_keys(node: Any, prefix: str = "") -> list[str]:
    """Return every key of a config: `trainer.steps`, `drafter.frames`, ..."""
    keys = []
    for key in node:
        keys.append(prefix + str(key))
        value = node._get_node(key)
        if hasattr(value, "_get_node") and hasattr(value, "keys"):
            keys += dotted_keys(value, f"{prefix}{key}.")
    return keys


def find_input_error(error: BaseException | None) -> InputError | None:
    """Return the InputError that `error` is or was raised from; Hydra wraps exceptions of constructors."""
    while error is not None and not isinstance(error, InputError):
        error = error.__cause__
    return error


def target_error(error: BaseException) -> str | None:
    """Return the sentence for a `_target_=` that cannot be found; None for other errors."""
    from hydra.errors import InstantiationException

    if not isinstance(error, InstantiationException) or not str(error).startswith("Error locating target"):
        return None
    return f"{str(error).splitlines()[0].rstrip(':.')}; check the name in _target_="
