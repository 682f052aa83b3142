"""Fork server: a process with all imports done and a base loaded that forks a child for every command line.

    python tests/fork_server.py SCRIPT BASE      stdin: one JSON list of arguments per line
                                             stdout: {"pid"}, then the exit {"status"}; < 0: killed by a signal

For tests that start a script twenty times; a fresh start takes many seconds.
"""

from __future__ import annotations

import json
import os
import runpy
import sys


def main(script: str, folder: str) -> None:
    import hydra  # noqa: F401

    from ctcdraft.corpus import prepared  # noqa: F401
    from ctcdraft.corpus.generation.requests import MultiTurnGenerator, Sample
    from ctcdraft.corpus.generation.transformers import TransformersAnswers
    from ctcdraft.corpus.types import Prompt
    from ctcdraft.models.loading import load_base

    base = load_base(folder, "float32", "cpu")
    # Trigger the imports that happen on first use.
    generate = TransformersAnswers(1, 2, 1.0, 0, 1).start(base)
    MultiTurnGenerator(base, generate)([Sample(Prompt("p", "test", ("Hi",), None), 0)])
    out = os.dup(1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.dup2(2, 1)
            sys.argv = [script, *json.loads(line)]
            status = 1
            try:
                runpy.run_path(script, run_name="__main__")
                status = 0
            finally:
                sys.stdout.flush()
                os._exit(status)  # not back into this loop
        os.write(out, (json.dumps({"pid": pid}) + "\n").encode())
        _, status = os.waitpid(pid, 0)
        os.write(out, (json.dumps({"status": os.waitstatus_to_exitcode(status)}) + "\n").encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
