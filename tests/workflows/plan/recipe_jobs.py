"""Jobs of recipes, made in a worker of the pool: Megatron checks their arguments."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

from megatron_patch.errors import UserError
from megatron_patch.workflows.plan import command
from megatron_patch.workflows.plan.job import Job
from megatron_patch.workflows.run import configuration
from megatron_patch.workflows.run.configuration import shipped


def job(name: str, overrides: tuple[str, ...] = ()) -> Job | str:
    """In a worker: the job of configs/models/NAME.yaml, or what was refused."""
    run = configuration.load(shipped(f"configs/models/{name}.yaml"), overrides)
    with redirect_stdout(io.StringIO()):
        try:
            return command.job_of(run, name)
        except UserError as error:
            return str(error)
