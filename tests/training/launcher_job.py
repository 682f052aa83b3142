"""train.py without a model, for sweeps by several processes: a job writes which GPU it sees and the output of a run.

The jobs of seeds 0 and 1 wait for each other. Seed 2 fails, and seed 3 is killed where KILL is set.
"""

from __future__ import annotations

import os
import signal
import time

import hydra
from omegaconf import OmegaConf

from ctcdraft.config.cli import REPOSITORY, entry_point, error_sentence, run_hydra_main
from ctcdraft.config.sweep_jobs import run_directory, run_title, sweep_directory, track_job
from ctcdraft.errors import InputError


@hydra.main(version_base=None, config_path=str(REPOSITORY / "configs"), config_name="train")
@entry_point
def main(config):
    with track_job(config, error_sentence):
        run, sweep = run_directory(config), sweep_directory(config)
        if config.seed == 2:
            raise InputError("seed 2 cannot be trained")
        if config.seed == 3 and "KILL" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        if run.metrics.is_file():
            return
        run.path.mkdir(exist_ok=True)
        (run.path / "seen").write_text(f"{os.environ.get('CUDA_VISIBLE_DEVICES')} {run_title(run.path, sweep)[0]}")
        deadline = time.monotonic() + 120
        while config.seed < 2 and len(list(sweep.glob("[01]/seen"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        run.config.write_text(OmegaConf.to_yaml(config, resolve=True))
        run.metrics.write_text('{"step": 1, "tau": 1.5, "loss": 2}\n')


if __name__ == "__main__":
    run_hydra_main(main)
