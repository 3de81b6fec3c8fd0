"""Workers as torchrun starts them, without a network."""

import json

from tests import workers

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCHELASTIC_RUN_ID": "tests",  # by these two Lightning knows torchrun
    "GROUP_RANK": "0",
}


def outputs(n, *command):
    """What each of n workers prints."""
    return [worker.out for worker in workers.run_ok(n, command, ENVIRONMENT, timeout=200)]


def findings(n, module, folder):
    """What a driver has found, worker by worker."""
    return [json.loads(out.splitlines()[-1]) for out in outputs(n, "-m", f"tests.extras.{module}", folder)]
