"""``gossamer init``: a spec to begin with, for any task, that says of each key what it means."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gossamer.apps import tasks
from gossamer.apps.data import catalog
from gossamer.dbench.spec import parse


@dataclass(frozen=True)
class Start:
    """Values at which a task learns something within minutes on a laptop; no more than that."""

    epochs: int
    batch: int
    lr: float
    optimizer: str = 'name = "sgd"'
    options: str = "momentum = 0.9"
    clip: str = "# clip = 1.0           # the norm of each replica's gradient, at most"
    more: str = ""  # options of the task that make it small


_STARTS = {
    "cifar10/densenet100": Start(3, 16, 0.1, more="depth = 22, train = 4000, test = 500"),
    "cifar10/resnet20": Start(3, 16, 0.1, more="train = 4000, test = 500"),
    "cifar10/resnet8": Start(3, 16, 0.1, more="train = 4000, test = 500"),
    "digits/mlp": Start(5, 4, 0.2),
    "fashion-mnist/cnn": Start(2, 16, 0.05, more="train = 6000, test = 1000"),
    "fashion-mnist/mlp": Start(3, 16, 0.1, more="train = 20000, test = 2000"),
    "imagenet/resnet50": Start(1, 16, 0.05, more="train = 1000, test = 200, complete = false"),
    "text/gpt-nano": Start(1, 8, 0.003, 'name = "adamw"', "weight_decay = 0.01", "clip = 1.0", "train = 200000, test = 20000"),
    "wikitext2/lstm": Start(
        1,
        1,
        20.0,
        options="",
        clip="clip = 0.25",
        more="embedding = 64, hidden = 64, dropout = 0.0, train = 100000, test = 20000",
    ),
}

_TEMPLATE = """\
# What is compared: {task}, trained by several methods, on the same seeds.
# Run it:     gossamer bench {file}
# Change it:  here, or for once on the command line: gossamer bench {file} 'seeds=[0]' task.epochs=1
# All keys:   docs/spec.md
name = {name}
description = "What this is about: it stands on top of the report."
replicas = [8]              # copies of the model; several numbers, such as [8, 16, 32], are compared as scales
seeds = [0, 1, 2]           # with three or more the report can say how sure a difference is

# "centralized" is all-reduce of gradients, what DDP does. Others average parameters over a graph: gossamer graph ring -n 8 draws one.
# A method may say more: "ring, qgm, bfloat16, H=4" is a graph, an algorithm (docs/methods.md), a wire, and an average each 4th step.
methods = ["centralized", "ring", "one-peer-exponential", "ada"]

[task]
name = {task_name}
epochs = {epochs}
batch = {batch}                   # per replica and step
# partition = "dirichlet:alpha=0.3"   # who holds which training data; this: each replica has other labels
# validation = 0.1          # hold out this share of the training data, and judge by it instead of the test data
# The task's own options, and what they are if they are not given:
{defaults}
options = {{ {more} }}

[optimizer]
{optimizer}                # any of torch.optim
lr = {lr}
options = {{ {options} }}      # for torch.optim, as they are
{clip}

[learning_rate]
shape = "warmup-cosine"     # constant, warmup-cosine, step-decay, inverse-sqrt
warmup = 0.1                # a share of all steps
# scaling = "linear"        # with replicas: lr is right for so many:
# reference = 8

[profile]
every = 10                  # steps between two looks inside each replica; 0: never

# [target]
# value = 0.9               # the report says after how many epochs and bytes each method was there

# [search]                  # find each method's learning rate first, on seeds of its own
# lr = [0.1, 0.2, 0.4]
# seeds = [100]
"""


def spec_for(task: str, name: str) -> str:
    """The text of a spec called ``name``."""
    tasks.check(task)
    start = _STARTS[task]
    defaults = "\n".join(f"#   {key} = {json.dumps(value)}" for key, value in _plain(tasks.defaults(task)).items())
    text = _TEMPLATE.format(
        task=task, task_name=json.dumps(task), name=json.dumps(name), file=f"{name}.toml", defaults=defaults, **vars(start)
    ).replace("{  }", "{}")
    parse(text, name)  # what is wrong in the template is said here, and not to the person who runs it
    return text


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {key: "all of them" if value is None else value for key, value in options.items()}


def missing_data(task: str) -> str:
    """How to get the task's data set, or nothing if it is here."""
    dataset = catalog.named(task.partition("/")[0])
    return "" if not dataset.marks or dataset.find() else f"{dataset.title}; {dataset.advice}"
