"""Hydra entry points: resolvers, composition of configs, and errors as one sentence with a suggestion."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, InstantiationException
from hydra.utils import get_object
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ctcdraft.config.allowed import GET_METHOD
from ctcdraft.distributed import LostProcessError
from ctcdraft.errors import InputError, first_line

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "configs"
# Of Hydra: the target, what was called with wrong arguments, and how Python says so.
WRONG_ARGUMENT = re.compile(
    r"""target '([\w.]+)':\nTypeError\(["']([\w.]+)\(\) """
    r"""(got an unexpected keyword argument '\w+'|missing .* required positional arguments?: [^"]+)"""
)
KEPT = "what was finished is kept, and the same command goes on from there"

# Hydra then raises its errors instead of printing them over a page, and `run_hydra_main` prints one sentence.
os.environ.setdefault("HYDRA_FULL_ERROR", "1")


def register_resolvers() -> None:
    """Register the OmegaConf resolvers of configs/, such as `${repo:data/tiny}`, a path inside this repository."""

    from ctcdraft.corpus.part_files import default_folder

    resolvers: dict[str, Callable[..., Any]] = {
        "repo": lambda path: str(REPOSITORY / path),
        "prepared_in": default_folder,
        "basename": lambda path: Path(path).name,
        "auto_device": auto_device,
        # On a CPU tokens must equal autoregression exactly.
        "auto_dtype": lambda device: "float32" if device == "cpu" else "bfloat16",
        "bfloat16_on": bfloat16_on,
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def auto_device() -> str:
    """Return a CUDA device where there is one (under torchrun, the one of this process), else cpu."""
    import torch  # seconds; only commands that need the device pay them

    rank = os.environ.get("LOCAL_RANK")
    return ("cuda" if rank is None else f"cuda:{rank}") if torch.cuda.is_available() else "cpu"


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
            print_error(sentence if job is None else f"job {job}: {sentence}")
            if job is not None:  # Hydra runs the other jobs before it raises this
                raise InputError("jobs of the sweep failed, see above; the same command tries them again") from None
            raise SystemExit(1) from None

    return guarded


def run_hydra_main(main: Callable[[], Any]) -> None:
    """Run a Hydra main function; errors of Hydra about the command line are printed as one sentence too."""
    from ctcdraft.config.sweep_jobs import reported_sweep

    try:
        with raise_on_sigterm(), reported_sweep():
            main()
    except KeyboardInterrupt as interrupt:
        cause = str(interrupt) or "Ctrl-C"
        print_error(f"stopped by {cause}; {KEPT}")
        raise SystemExit(128 + (signal.SIGTERM if str(interrupt) else signal.SIGINT)) from None  # as shells report it
    except BrokenPipeError:  # `... --help | head` closed the pipe; flushing at exit must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if (sentence := error_sentence(error)) is None:
            raise
        print_error(sentence)
        raise SystemExit(1) from None


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM, which torchrun sends to the other processes where one has ended."""

    def interrupt(number: int, frame: Any) -> None:
        job = ", which torchrun sends where another process has ended" if "TORCHELASTIC_RUN_ID" in os.environ else ""
        raise KeyboardInterrupt(f"SIGTERM{job}")

    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return
    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def print_error(sentence: str) -> None:
    print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)


def error_sentence(error: Exception) -> str | None:
    """Return the sentence for an error of the input; None where the error is a bug."""
    if (input_error := find_input_error(error)) is not None:
        return str(input_error) + (f"; {KEPT}" if isinstance(input_error, LostProcessError) else "")
    if isinstance(error, InstantiationException) and str(error).startswith("Error locating target"):
        return f"{str(error).splitlines()[0].rstrip(':.')}; check the name in _target_"
    if isinstance(error, ImportError) and str(error).startswith("Error loading '"):  # of hydra.utils.get_object
        first, cause = str(error).splitlines()[:2]
        return f"{first.rstrip(':')} ({cause}); check the name in _target_, and what its module imports"
    if isinstance(error, InstantiationException) and (sentence := wrong_argument(error)) is not None:
        return sentence
    if isinstance(error.__cause__, ImportError) and f"'{GET_METHOD}'" in str(error):
        return f"{first_line(error.__cause__).rstrip(':.')}; check the name of the function in path="
    if type(error).__module__.split(".")[0] in ("joblib", "submitit"):  # the process of a job was killed
        return f"a job of the sweep has ended without a result ({first_line(error)}); the same command continues"
    return config_error(error)


def wrong_argument(error: Exception) -> str | None:
    """Return the sentence where keys do not fit the target; None where a call within it failed, which is a bug."""
    if (wrong := WRONG_ARGUMENT.search(str(error))) is None:
        return None
    target = get_object(wrong[1])
    called = inspect.getattr_static(target, "__init__") if isinstance(target, type) else target
    if called.__qualname__ != wrong[2]:
        return None
    return f"{wrong[1].rpartition('.')[2]}() {wrong[3]}; correct the keys beside _target_ in its YAML"


def find_input_error(error: BaseException | None) -> InputError | None:
    """Return the InputError that `error` is or was raised from; Hydra wraps exceptions of constructors."""
    while error is not None and not isinstance(error, InputError):
        error = error.__cause__
    return error


def config_error(error: Exception, verb: str | None = None, more: Iterable[str] = ()) -> str | None:
    """Return the sentence for an error of Hydra or OmegaConf; None where a constructor failed, which is a bug.

    Args:
        verb: the entry point whose keys are meant, if not the running script.
        more: keys that the script takes besides those of its config.
    """
    if isinstance(error, InstantiationException) or not isinstance(error, HydraException | OmegaConfBaseException):
        return None
    if missing := re.search(r"Missing mandatory value: ([\w.]+)", str(error)):
        return f"{missing[1]}= is missing; give it on the command line"
    parts = [str(part) for part in (error, error.__cause__) if part is not None]
    message = " ".join(line.strip() for part in parts for line in part.splitlines()[:1]).replace("'.", "':")
    return f"{message}; {suggest_keys(message, verb or Path(sys.argv[0]).stem, more)}"


def suggest_keys(message: str, verb: str, more: Iterable[str] = ()) -> str:
    """Return "did you mean KEY?" for the quoted names in a message, or how to print all keys."""
    typed = [argument.partition("=")[0] for argument in sys.argv[1:]]
    options = [str(file.relative_to(CONFIGS).with_suffix("")) for file in CONFIGS.rglob("*/*.yaml")]
    chosen = [argument for argument in sys.argv[1:] if argument.replace("=", "/", 1) in options]
    GlobalHydra.instance().clear()  # left by the failing job
    try:
        known = dotted_keys(compose_config(verb, *chosen))
    except (HydraException, OmegaConfBaseException):  # the error that the message reports
        known = dotted_keys(compose_config(verb))
    known += [*more, *options]
    for name in re.findall(r"'([\w./@-]+)'", message):
        if name in known:
            continue
        # Keys whose parents were left out come first; a misspelling may resemble a key of another part.
        close = [key for key in known if key.endswith(f".{name}")] or difflib.get_close_matches(name, known, 3)
        close = [key for key in close if key not in typed]
        if close and name != verb:
            return f"did you mean {' or '.join(close)}?"
    return f"{verb}.py --cfg job prints all keys"


def compose_config(verb: str, *overrides: str) -> Any:
    """Return the config of `python VERB.py OVERRIDES`, inside a running entry point or outside."""
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
        value = node._get_node(key)  # unresolved: an interpolation may not be resolvable yet
        if OmegaConf.is_dict(value):
            keys += dotted_keys(value, f"{prefix}{key}.")
    return keys
