"""Every case of test_parity.py in this layout: writes my rows of the result."""

from dataclasses import replace

import safetensors.torch
import torch

from gossamer import LearningRate, Recipe, Settings, Trainer
from gossamer.data.tasks import Task
from gossamer.members.store import open_link
from gossamer.methods import method
from gossamer.optim.learning_rates import WarmupCosine
from gossamer.transport.exchange import Exchange
from tests.models import OWN_METHODS, Cnn, mlp, task

N, STEPS = 8, 20  # two epochs
# One graph for each kind of Round, in both orders; more of the same kinds, in one.
KINDS = (
    "complete",
    "ring",
    "torus",
    "one-peer-exponential",
    "alternating-exponential-ring:per_node=2",
    "hierarchical:per_node=2",
)
EAGER = "ada-auto:tolerance=0.65"  # changes its mind in few steps
# Codes are added up one after the other, in the order of replicas: so here not one of them differs.
OUTER = (
    "local:H=4,moments=mean",
    "local:H=4,delay=3,wire=4bits",
    "diloco:H=4,delay=2",
    "diloco:H=4,wire=8bits,moments=reset",
    "slowmo:H=4,wire=bfloat16",
    "diloco:H=6,delay=3,wire=8bits,fragments=3",
    "diloco:H=4,delay=2,fragments=2,moments=shared",
    "noloco:H=4,delay=2,fragments=2",
    "all-reduce:wire=8bits",
    "all-reduce:wire=4bits,feedback=true",
)
MORE = ("lattice:k=4", "exponential", "base:k=2", "ada")
LONGER = {EAGER, "ada", "slowmo"}  # graphs that change with time, and a long period: three epochs


def cases():
    """(name, task, settings, graph)"""
    momentum = Recipe("sgd", 0.05, {"momentum": 0.9, "weight_decay": 1e-3})
    base = Settings(N, 4, 8, optimizer=momentum, backend="loop", seed=5)
    toy = task(mlp)
    exact = Task("exact", lambda: mlp().double(), (toy.train[0].double(), toy.train[1]), (toy.test[0].double(), toy.test[1]))
    for kind in ("double", "float"):
        which = exact if kind == "double" else toy
        for graph in KINDS if kind == "double" else KINDS[:4]:
            for order in ("dsgd-awc", "dsgd-atc") if kind == "double" else ("dsgd-awc",):
                yield f"{kind} {order} {graph}", which, replace(base, algorithm=order), graph
        yield f"{kind} allreduce", which, replace(base, algorithm="allreduce"), "complete"
    for graph in MORE:
        yield f"double dsgd-atc {graph}", exact, base, graph
    adam = replace(base, optimizer=Recipe("adam", 0.01), init="different")
    for order in ("dsgd-awc", "dsgd-atc"):
        yield f"double {order} adam, different starts, exponential", exact, replace(adam, algorithm=order), "exponential"
    plain = replace(base, optimizer=Recipe("sgd", 0.05))
    for name in OWN_METHODS:
        rule = method(name)
        graph = (
            "directed-random:degree=2.5"
            if rule.sums == "columns"
            else "complete"
            if rule.graphless
            else "ring"
            if name == "gut"
            else "torus"
        )
        recipe = Recipe("adam", 0.01) if rule.optimizer == "Adam" else plain.optimizer
        yield f"double {name}, {graph}", exact, replace(plain, algorithm=name, optimizer=recipe), graph
        # What differs in the last digit may be rounded to another code, once in a while; so 8 bits are held to less.
    yield "double qgm + pga + merge, ring", exact, replace(plain, algorithm="qgm + pga + merge"), "ring"
    adam = replace(plain, optimizer=Recipe("adam", 0.01))
    for rule in OUTER:
        yield f"double {rule}", exact, replace(adam, algorithm=rule), "complete"
    norm = task(Cnn)
    for algorithm in ("dsgd-awc", "dsgd-atc", "allreduce", "atc + merge"):
        yield f"float {algorithm} BatchNorm, ring", norm, replace(base, algorithm=algorithm), "ring"
    falling = replace(base, learning_rate=LearningRate(0.05, shape=WarmupCosine()))
    for order in ("dsgd-awc", "dsgd-atc"):
        yield f"double {order} ada-auto", exact, replace(falling, algorithm=order), EAGER
    for order in ("dsgd-awc", "dsgd-atc"):
        yield f"double {order} 8 bits", exact, replace(base, algorithm=order), "periodic:every=2,bits=8"
    for graph in ("one-peer-exponential", "ring"):
        # In double, because what differs in the last digit may be rounded to another bfloat16.
        yield f"double bfloat16 wire, {graph}", exact, replace(base, wire="bfloat16"), graph


def every_case(world):
    link = open_link(torch.device("cpu"), timeout=60) if world.size > 1 else None
    exchange = Exchange(link) if link else None
    tensors = {}
    for name, toy, settings, graph in cases():
        trainer = Trainer(toy, settings, graph, exchange=exchange)
        steps = STEPS if LONGER.isdisjoint((graph, settings.algorithm)) else STEPS + 10
        trainer.run(until=trainer.steps if trainer.method.does("merge") else steps)
        for k, block in enumerate(trainer.replicas.blocks):
            tensors[f"{name}|x{k}"] = block.x.clone()
        for key, stacked in trainer.replicas.buffers.items():
            tensors[f"{name}|{key}"] = stacked.clone()
        tensors[f"{name}|value"] = torch.tensor(
            [trainer.value(), trainer.history[-1].train_loss, trainer.history[-1].consensus_distance]
        )
        if graph == EAGER:
            tensors[f"{name} decisions|value"] = torch.tensor([change.step for change in trainer.schedule.changes])
            assert len(trainer.schedule.changes) > 2, trainer.schedule.changes
    safetensors.torch.save_file(tensors, world.folder / f"rank-{world.rank}.safetensors")
    if link is not None:
        link.close()
