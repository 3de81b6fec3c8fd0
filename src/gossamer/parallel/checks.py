"""What a person may give to ``DecentralizedDataParallel`` and ``gossip()``, and what is refused, with a word on what would be right."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gossamer.errors import GossamerError
from gossamer.graphs import told_hosts
from gossamer.methods import Averaging, Method
from gossamer.parallel.wrapper import Wrapper

if TYPE_CHECKING:
    from gossamer.parallel.module import DecentralizedDataParallel


def refuse_unfit(module: nn.Module) -> None:
    """FSDP, DTensor and DDP hold parameters in ways that can't be averaged as one row."""
    for name, p in module.named_parameters():
        if type(p.data).__name__ == "DTensor" or type(p).__name__ == "DTensor":
            raise GossamerError(
                f"parameter {name!r} is a DTensor: Gossamer averages whole models and can't work on sharded ones (FSDP, tensor "
                "parallelism)"
            )
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise GossamerError(f"parameter {name!r} has no shape yet; run one forward of the lazy module before wrapping it")
    devices = {p.device: name for name, p in module.named_parameters()}
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise GossamerError(f"all parameters must be on one device, and have values; there are {where}")
    for name, part in module.named_modules():
        kind = type(part).__name__
        if kind in ("FullyShardedDataParallel", "FSDPModule"):
            raise GossamerError(f"module {name or kind!r} is sharded by {kind}: Gossamer averages whole models")
        if isinstance(part, nn.parallel.DistributedDataParallel) or (isinstance(part, Wrapper) and not part.is_copy):
            raise GossamerError(f"module {name or kind!r} is a {kind} already; give Gossamer the bare module")
        if isinstance(part, nn.SyncBatchNorm) and any(device.type == "cpu" for device in devices):
            raise GossamerError(
                f"module {name or kind!r} is a SyncBatchNorm, which runs on GPUs only; leave convert_sync_batchnorm() out: each worker "
                "has statistics of its own, and consensus() and average_() average them"
            )


def same_start(model: DecentralizedDataParallel) -> dict[str, str]:
    """What all workers must have alike when training begins, if they were left as they are and the method never makes them alike."""
    driver = model._driver
    rule = next((method for method in driver.methods if method.starts_alike), None)
    if rule is None or driver.steps or model._watch is None or model._watch.alike_at == 0:
        return {}
    digest = hashlib.sha256()
    for p in driver.flat.parameters():
        digest.update(p.detach().flatten().view(torch.uint8).cpu().numpy().tobytes())
    why = (
        f"gossip(): method {rule.name!r} {rule.starts_alike}, so with init='keep' replicas must start the same; use init='broadcast', or a "
        "gossip graph such as 'one-peer-exponential'; the digest of the parameters"
    )
    return {why: digest.hexdigest()[:12]}


def own_optimizers(given: Sequence[Any], module: nn.Module, averaged: Mapping[int, str]) -> tuple[torch.optim.Optimizer, ...]:
    """What is given to ``gossip()`` must be optimizers that train this module, and only what is averaged of it (``averaged``: the
    names, by id). Around one there may be another object, as accelerate and Lightning have it; the inner one's ``step()`` counts."""
    optimizers = [_inner(optimizer) for optimizer in given]
    if not optimizers:
        raise GossamerError("gossip() needs the optimizer, or the optimizers, that train this model")
    if len(set(map(id, optimizers))) < len(optimizers):
        raise GossamerError("gossip() was given the same optimizer twice")
    mine = {id(p) for p in module.parameters()}
    for k, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise GossamerError(f"gossip() takes optimizers; argument {k} is a {type(optimizer).__name__}")
        trained = [p for group in optimizer.param_groups for p in group["params"] if id(p) in mine]
        if not trained:
            raise GossamerError(
                f"gossip(): {type(optimizer).__name__} (argument {k}) trains no parameter of this model; "
                "make it from model.parameters()"
            )
        if any(id(p) not in averaged for p in trained):
            raise GossamerError(
                f"gossip(): {type(optimizer).__name__} (argument {k}) trains a parameter that the module got after it was "
                "wrapped, and which is not averaged; wrap the module when it is complete"
            )
    return tuple(optimizers)


def _inner(optimizer: Any) -> Any:
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and isinstance(
        getattr(optimizer, "optimizer", None), torch.optim.Optimizer
    ):
        optimizer = optimizer.optimizer
    return optimizer


_DDPS = {  # arguments of torch's DDP that would make a difference here, and what to do instead
    "device_ids": "move the module to its device first",
    "output_device": "outputs stay on the module's device",
    "process_group": "all workers take part",
    "mixed_precision": "use torch.autocast, and gossip(scaler=…)",
    "init_sync": "init='keep' leaves each worker its own parameters",
    "delay_all_reduce_named_params": "parameters travel as one row",
    "param_to_hook_all_reduce": "parameters travel as one row",
    "device_mesh": "all workers take part",
}
_NO_DIFFERENCE = (  # buffers: each worker keeps its own; consensus() and average_() average them
    *(
        "find_unused_parameters",
        "static_graph",
        "gradient_as_bucket_view",
        "bucket_cap_mb",
        "broadcast_buffers",
        "check_reduction",
    ),
    *("dim", "skip_all_reduce_unused_params", "bucket_cap_mb_list"),
)


def take_ddps(given: Mapping[str, object], module: nn.Module) -> None:
    """Arguments of torch's DDP, with values that mean nothing else here than there."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    for key, value in given.items():
        if key in _NO_DIFFERENCE or (key in _DDPS and value is None):
            continue
        if key not in _DDPS:
            raise TypeError(f"DecentralizedDataParallel() got an unexpected keyword argument {key!r}")
        if key in ("device_ids", "output_device") and all(_is(device, one) for one in _listed(value)):
            continue
        if (key == "init_sync" and value is True) or (key == "process_group" and value is torch.distributed.group.WORLD):
            continue
        where = f", and the module is on {device}" if key in ("device_ids", "output_device") else ""
        raise GossamerError(
            f"{key}={value!r}{where}: {key} is an argument of torch's DDP which does not exist here; leave it out: {_DDPS[key]}"
        )


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else [value]


def _is(device: torch.device, other: Any) -> bool:
    """A number is a GPU's."""
    return device.type != "cpu" and torch.device(other) == device if isinstance(other, int) else torch.device(other) == device


def refuse_merge(method: Method | None) -> None:
    """In a person's own loop no step is known to be the last one."""
    if method is not None and method.does("merge"):
        raise GossamerError(
            f"method {method.describe()!r}: a training loop of your own does not say which step is the last; leave out merge, and call "
            "model.average_() after that step"
        )


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise GossamerError(f"{key}={value!r} is not known; use {' or '.join(map(repr, choices))}")


def refuse_moment(
    model: DecentralizedDataParallel, what: str, *, uneven: bool = True, averaged: bool = False, busy: bool = False
) -> None:
    """A call at a wrong moment: of a copy; and, where it matters, inside ``uneven()``, inside ``consensus()``, or with rows in flight."""
    if model.is_copy:
        raise GossamerError(
            f"{what} on a closed DecentralizedDataParallel, or a copy of one: it takes no part in the averaging"
        )
    driver, step = model._driver, model.steps
    if uneven and driver.stretch is not None:
        raise GossamerError(f"{what} inside uneven() (step {step}): not all workers may get there; call it after the block")
    if averaged and driver.averaged:
        raise GossamerError(f"{what} inside consensus() (step {step}): call it after the block")
    if busy and driver.busy:
        raise GossamerError(
            f"{what} after a training-mode forward and before step() (step {step}), while parameters are being sent; "
            "call it after optimizer.step() (also for micro-batches that are left over), or run that forward in eval mode or "
            "under torch.no_grad()"
        )


def with_graph(how: Averaging) -> Averaging:
    """With the graph that is meant: a graph over hosts takes the workers per host from torchrun; ``auto`` beside a method, or beside local
    steps, is the cheapest graph for these hosts."""
    # A worker that joins a job has other numbers than the first workers, and must find the same graph: the launcher says what they were.
    env, graph = os.environ, how.graph
    n = int(env.get("GOSSAMER_WORKERS") or env.get("WORLD_SIZE") or 1)
    local = int(env.get("GOSSAMER_WORKERS_PER_HOST") or env.get("LOCAL_WORLD_SIZE") or 1)
    if graph == "auto" and (how.method is not None or how.every > 1):
        hosts, rest = divmod(n, local)
        over_hosts = local > 1 and hosts > 1 and not rest and not hosts & (hosts - 1)
        graph = "alternating-exponential-ring" if over_hosts else "one-peer-exponential"
    return replace(how, graph=told_hosts(graph, local) if "LOCAL_WORLD_SIZE" in env else graph)
