"""A spec says what to compare: a task, and a grid of replicas × methods × seeds × failures. TOML, checked by pydantic; no code in it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, ValidationInfo, field_validator, model_validator

from gossamer.apps import tasks
from gossamer.data.sampling import check_partition
from gossamer.dbench import failures as failing
from gossamer.dbench.failures import NONE, EventPart, FailuresPart
from gossamer.dbench.rates import LearningRatePart
from gossamer.errors import GossamerError
from gossamer.members.outages import Outage
from gossamer.methods import METHODS, Averaging
from gossamer.methods import known as known_method
from gossamer.methods import method as parse_method
from gossamer.optim import Recipe
from gossamer.optim.learning_rates import LearningRate, Scaling
from gossamer.rows.backends import Backend
from gossamer.rows.batch_norm import BatchNorm
from gossamer.rows.wires import OF_MEANS, wire
from gossamer.schedules import schedule
from gossamer.spelling import plain_name
from gossamer.toml_files import Part, Shelf, changed, explained, parsed, stored
from gossamer.trainer import Settings

CENTRALIZED = "centralized"


def _optimizer(name: str) -> str:
    Recipe(name).kind()
    return name


def _wire(name: str) -> str:
    return wire(name, OF_MEANS).name


def _backend(name: str) -> str:
    if name != "auto":
        Backend.parse(name)
    return name


def _common(algorithm: str, info: ValidationInfo) -> str:
    if not stored(info) and parse_method(algorithm).averages == "gradients":
        raise GossamerError(f"{algorithm!r} is for the method 'centralized' only; here stands the algorithm of the others")
    return algorithm


def _numbers(what: str, low: int, high: int, shown: str) -> AfterValidator:
    def check(values: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(values)) < len(values):
            raise GossamerError(f"{list(values)} names a number twice")
        if min(values) < low or max(values) > high:
            raise GossamerError(f"{list(values)}: {what} is from {low} to {shown}")
        return values

    return AfterValidator(check)


class TaskPart(Part):
    """What is trained. ``batch`` is per replica; ``data`` is a folder, if the data set is not where it usually is; ``options``
    are the task's own (see docs/tasks.md); ``batch_norm`` says how the averaged model gets its running statistics. ``validation``: this
    share of the training data is held out, and takes the place of the test data."""

    name: str
    epochs: int = Field(ge=1, le=100_000)
    batch: int = Field(ge=1)
    partition: Annotated[str, AfterValidator(check_partition)] = "reshuffled"
    init: Literal["same", "different"] = "same"
    data: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    batch_norm: BatchNorm = "reestimate"
    validation: float | None = Field(None, gt=0, lt=1, allow_inf_nan=False)


class OptimizerPart(Part):
    """``options`` go to torch.optim as they are: momentum, betas, weight_decay …"""

    name: Annotated[str, AfterValidator(_optimizer)] = "sgd"
    lr: float = Field(0.1, gt=0, allow_inf_nan=False)
    options: dict[str, Any] = Field(default_factory=dict)
    clip: float | None = Field(None, gt=0, allow_inf_nan=False)
    spare_norms: bool = False


class ProfilePart(Part):
    """A look inside every replica each ``every`` steps (0: never); at the end ``singles`` of them (default: all) are evaluated one
    by one, beside the averaged model."""

    every: int = Field(10, ge=0)
    singles: int | None = Field(None, ge=1)


class TargetPart(Part):
    """The metric to reach; the report says after how many epochs and bytes each method did."""

    value: float = Field(allow_inf_nan=False)


class ClockPart(Part):
    """``cluster``: a shipped one or a file. Each run also gets the time that it would have taken there, as the runtime model predicts
    it; ``compute_ms``: forward and backward of one replica there, if it is known."""

    cluster: str
    compute_ms: float | None = Field(None, gt=0, allow_inf_nan=False)


class SearchPart(Part):
    """Before the grid is run, each method gets the best of these learning rates, and of the ``values`` of ``option`` if it has that option.
    ``seeds`` are not those of the results. ``replicas``, ``epochs``, ``partition``: if they are not the spec's own. ``validation``: the
    share of the training data that judges. ``runs``: the budget, in all."""

    lr: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = Field(strict=False, min_length=1)
    seeds: Annotated[tuple[int, ...], Field(strict=False, min_length=1), _numbers("a seed", 0, 2**31 - 1, "2^31 - 1")]
    option: str | None = None
    values: tuple[bool | int | float | str, ...] = Field((), strict=False)
    replicas: int | None = Field(None, ge=1)
    epochs: int | None = Field(None, ge=1, le=100_000)
    partition: Annotated[str, AfterValidator(check_partition)] | None = None
    validation: float = Field(0.1, gt=0, lt=1, allow_inf_nan=False)
    runs: int = Field(200, ge=1)

    @model_validator(mode="after")
    def _option(self) -> SearchPart:
        for what, some in (("lr", self.lr), ("values", self.values)):
            if len(set(some)) < len(some):
                raise GossamerError(f"{what}: {list(some)} names a value twice")
        if (self.option is None) != (not self.values):
            raise GossamerError("option and values belong together: option = 'gamma', values = [0.2, 0.4]")
        return self


class MethodPart(Part):
    """``graph``: a graph's name or ada with its parameters (default: the method's own name). ``wire`` (float32, bfloat16; of all-reduce and
    outer methods also 8bits and 4bits) and ``local_steps`` (average every that many steps): as in the library. The others override what
    the spec says for all methods; ``options`` are added to those of the optimizer."""

    name: str = Field(min_length=1)
    graph: str | None = None
    algorithm: str | None = None
    optimizer: Annotated[str, AfterValidator(_optimizer)] | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    lr: float | None = Field(None, gt=0, allow_inf_nan=False)
    scaling: Scaling | None = None
    wire: Annotated[str, AfterValidator(_wire)] = "float32"
    local_steps: int = Field(1, ge=1)

    @property
    def centralized(self) -> bool:
        if self.algorithm is None:
            return self.name == CENTRALIZED
        try:
            return parse_method(self.algorithm).averages == "gradients"
        except GossamerError:  # results of a method of a person's own, which is not there today
            return False

    def rule(self, common: str) -> str:
        """The algorithm. ``common``: that of the other methods."""
        return self.algorithm or ("allreduce" if self.centralized else common)

    @property
    def topology(self) -> str:
        alone = self.algorithm is not None and parse_method(self.algorithm).graphless
        return "complete" if self.centralized else self.graph or ("complete" if alone else self.name)


def _named(text: str) -> dict[str, Any]:
    rule = METHODS.makers.get(known_method(plain_name(text)))
    if ", " not in text and (text == CENTRALIZED or rule is None or not rule.graphless):  # type: ignore[attr-defined]
        return {"name": text}
    how = Averaging.parse(text)
    algorithm = {"algorithm": how.method.describe()} if how.method is not None else {}
    return {"name": text, "graph": how.graph, "wire": how.wire, "local_steps": how.every} | algorithm


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    method: str
    replicas: int
    seed: int
    failures: str = NONE

    def __str__(self) -> str:
        return f"{self.method}, n={self.replicas}, seed {self.seed}" + (f", {self.failures}" if self.failures != NONE else "")


class Spec(Part):
    name: str = Field(min_length=1)
    description: str = ""
    replicas: Annotated[
        tuple[int, ...], Field(strict=False, min_length=1), _numbers("a number of replicas", 1, 100_000, "100,000")
    ]
    methods: tuple[MethodPart, ...] = Field(strict=False, min_length=1)
    seeds: Annotated[tuple[int, ...], Field(strict=False, min_length=1), _numbers("a seed", 0, 2**31 - 1, "2^31 - 1")] = (0,)
    task: TaskPart
    optimizer: OptimizerPart = Field(default_factory=lambda: OptimizerPart.model_validate({}))
    learning_rate: LearningRatePart = Field(default_factory=lambda: LearningRatePart.model_validate({}))
    algorithm: Annotated[str, AfterValidator(_common)] = "dsgd-atc"
    backend: Annotated[str, AfterValidator(_backend)] = "auto"
    profile: ProfilePart = Field(default_factory=lambda: ProfilePart.model_validate({}))
    target: TargetPart | None = None
    clock: ClockPart | None = None
    failures: dict[str, FailuresPart] = Field(default_factory=dict)
    search: SearchPart | None = None

    @field_validator("methods", mode="before")
    @classmethod
    def _short_methods(cls, value: Any) -> Any:
        """``"ring"`` is short for ``{name = "ring"}``, and ``"ring, qgm, bfloat16, H=4"`` for all four."""
        return (
            [_named(item) if isinstance(item, str) else item for item in value] if isinstance(value, (list, tuple)) else value
        )

    @model_validator(mode="after")
    def _grid(self, info: ValidationInfo) -> Spec:
        names = [method.name for method in self.methods]
        if len(set(names)) < len(names):
            raise GossamerError(
                f"methods: {next(n for n in names if names.count(n) > 1)!r} is there twice; give each a name of its own"
            )
        if not stored(info):
            self._check_methods()
        failing.check(self.failures, self.replicas, self.seeds, self.task.epochs)
        if self.search is not None:
            self._check_search(self.search)
        return self

    def _check_methods(self) -> None:
        for method in self.methods:
            parse_method(method.algorithm or self.algorithm)
            if method.centralized and method.graph not in (None, "complete"):
                raise GossamerError(
                    f"method {method.name!r}: graph = {method.graph!r} has no effect, as the gradients of all are averaged; leave it out, "
                    "or give the method another name"
                )
            if method.centralized and method.wire != "float32":
                raise GossamerError(
                    f"method {method.name!r}: wire = {method.wire!r} has no effect, as gradients go in full precision; leave it out, or "
                    "use algorithm = 'all-reduce:wire=8bits'"
                )
        if self.learning_rate.reference != 1 and all((m.scaling or self.learning_rate.scaling) == "none" for m in self.methods):
            raise GossamerError("learning_rate.reference has no effect without scaling = 'linear' or 'sqrt'")

    def _check_search(self, search: SearchPart) -> None:
        both = sorted({*self.seeds} & {*search.seeds})
        if both:
            raise GossamerError(
                f"search.seeds: {both} are seeds of the results as well; settings are chosen on seeds of their own, such as [100, 101]"
            )
        set_already = [method.name for method in self.methods if method.lr is not None]
        if set_already:
            raise GossamerError(
                f"search: method {set_already[0]!r} has a learning rate already; leave out its lr, or the search"
            )
        rules = [parse_method(method.algorithm or self.algorithm) for method in self.methods if not method.centralized]
        options = sorted({field.name for rule in rules for field in fields(rule)})
        if search.option is not None and search.option not in options:
            known = f"their options are {', '.join(options)}" if options else "they have none"
            raise GossamerError(f"search.option: no method here has an option {search.option!r}; {known}")

    # --- The grid --------------------------------------------------------------------------------------------------------

    def cells(self) -> list[Cell]:
        """Small ones first, so that something can be seen soon."""
        axes = itertools.product(sorted(self.replicas), self.seeds, self.failures or (NONE,), self.methods)
        return [Cell(m.name, n, seed, failures) for n, seed, failures, m in axes]

    def method(self, name: str) -> MethodPart:
        return next(method for method in self.methods if method.name == name)

    def outages(self, cell: Cell) -> tuple[Outage, ...]:
        """Who is away when: the same for all methods."""
        part = self.failures.get(cell.failures)
        return () if part is None else part.outages(cell.replicas, cell.seed, self.task.epochs)

    def check(self) -> None:
        """Everything about the grid that can be known before anything runs; all impossible cells are named."""
        impossible = []
        for method in self.methods:
            for n in self.replicas:
                try:
                    planned = schedule(method.topology, n)
                    how = Averaging.of(method.topology, method.rule(self.algorithm), method.wire, method.local_steps)
                    how.refuse(planned)
                except GossamerError as error:
                    impossible.append(f"method {method.name!r} with replicas={n} is impossible ({error})")
        if impossible:
            raise GossamerError("; ".join(impossible))

    def settings(self, cell: Cell) -> Settings:
        method = self.method(cell.method)
        common, rate = self.optimizer, self.learning_rate
        lr = common.lr if method.lr is None else method.lr
        return Settings(
            replicas=cell.replicas,
            epochs=self.task.epochs,
            batch=self.task.batch,
            algorithm=method.rule(self.algorithm),
            optimizer=Recipe(
                method.optimizer or common.name, lr, common.options | method.options, common.clip, common.spare_norms
            ),
            learning_rate=LearningRate(lr, rate.made(), method.scaling or rate.scaling, rate.reference),
            seed=cell.seed,
            partition=self.task.partition,
            init="same" if method.centralized else self.task.init,
            backend=self.backend,
            profile_every=self.profile.every,
            batch_norm=self.task.batch_norm,
            outages=self.outages(cell),
            wire=method.wire,
            local_steps=method.local_steps,
        )


# --- Loading ------------------------------------------------------------------------------------------------------------


SHELF = Shelf("spec", "gossamer.dbench.specs")


def shipped() -> list[str]:
    """The names of the specs that come with Gossamer."""
    return SHELF.names()


def load(what: str | Path, changes: Sequence[str] = ()) -> Spec:
    """A shipped spec by name, or a TOML file. ``changes``: keys with other values, such as ``task.epochs=2``."""
    return parse(SHELF.text(what), str(what), changes)


def parse(text: str, where: str = "spec", changes: Sequence[str] = ()) -> Spec:
    """Raises nothing but GossamerError, whatever the text."""
    raw = changed(parsed(text, where), changes)
    spec = build(raw, where)
    try:
        spec.learning_rate.refuse_idle(raw.get("learning_rate", {}))
        tasks.check(spec.task.name, spec.task.options, spec.task.data)
    except GossamerError as error:
        raise GossamerError(f"{where}: {error}") from None
    return spec


def build(raw: Mapping[str, Any], where: str = "spec", stored: bool = False) -> Spec:
    """From plain data. ``task.name`` may be any here: that of your own Task, given to ``bench``. ``stored``: of results that exist."""
    try:
        spec = Spec.model_validate(raw, context={"stored": True} if stored else None)
    except ValidationError as error:
        raise GossamerError(f"{where}: {explained(error, Spec, _PARTS)}") from None
    if not stored:
        spec.check()
    return spec


_PARTS: dict[str, type[BaseModel]] = {
    "task": TaskPart,
    "optimizer": OptimizerPart,
    "learning_rate": LearningRatePart,
    "profile": ProfilePart,
    "target": TargetPart,
    "clock": ClockPart,
    "search": SearchPart,
    "methods": MethodPart,
    "failures": FailuresPart,
    "events": EventPart,
}


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What differs between two specs as plain data, one line per key; methods by their names."""
    found: list[str] = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if key == "methods" and not prefix:
            a, b = ({method["name"]: method for method in some or ()} for some in (a, b))
            found += [f"methods: {name!r} is not there" for name in b if name not in a]
            found += [f"methods: {name!r} is not here" for name in a if name not in b]
            a, b = ({name: method for name, method in some.items() if name in a and name in b} for some in (a, b))
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}: {a!r} there, {b!r} here")
    return found
