"""A cluster: hosts with so many workers each, what connects them, and how even their computing is. Written as TOML, without code.

name = "office"
hosts = 8
per_host = 1

[inter]              # a host's network interface: all its workers share it; each direction has this much
gbit = 0.94
latency_us = 100

[noise]              # of compute times: constant, normal, lognormal, stragglers or trace
kind = "lognormal"
sigma = 0.05

[[host]]             # what is different about one of them
index = 3
compute = 1.5        # times as long as on the others
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gossamer.errors import GossamerError
from gossamer.runtime.noise import KINDS, Noise
from gossamer.runtime.workload import Workload
from gossamer.toml_files import Shelf, explained, parsed

_MOST = 10_000_000  # workers


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Inter(Part):
    """Between hosts. ``gbit``: what a host's interface really carries per second in one direction, for all its workers together."""

    gbit: float = Field(gt=0, allow_inf_nan=True)
    latency_us: float = Field(0.0, ge=0)


class Intra(Part):
    """Inside a host. ``gbit`` per second and direction: of one worker, or if it is ``shared`` (memory, one PCIe root) of all."""

    gbit: float = Field(gt=0, allow_inf_nan=True)
    latency_us: float = Field(0.0, ge=0)
    shared: bool = False


class NoisePart(Part):
    kind: Literal["constant", "normal", "lognormal", "stragglers", "trace"] = "constant"
    sigma: float | None = Field(None, ge=0, le=2)
    share: float | None = Field(None, ge=0, le=1)
    factor: float | None = Field(None, ge=1)
    factors: tuple[float, ...] | None = None

    @model_validator(mode="after")
    def _fits(self) -> NoisePart:
        takes = {field.name: field for field in dataclasses.fields(KINDS[self.kind])}
        needed = {name for name, field in takes.items() if field.default is dataclasses.MISSING}
        if missing := sorted(needed - self._given.keys()):
            raise GossamerError(f"kind {self.kind!r} needs {' and '.join(missing)}")
        if extra := sorted(self._given.keys() - takes):
            raise GossamerError(f"kind {self.kind!r} takes no {' and no '.join(extra)}; they contradict each other")
        if self.factors is not None and (not self.factors or min(self.factors) < 0):
            raise GossamerError("factors: a trace is one or more factors, none negative")
        return self

    @property
    def _given(self) -> dict[str, Any]:
        return self.model_dump(exclude={"kind"}, exclude_none=True)

    def made(self) -> Noise:
        return KINDS[self.kind](**self._given)


class Costs(Part):
    """What communication costs the processor, in nanoseconds per byte of parameters or gradients (1 ns/B is 1 s per GB).

    ``traffic``: by how much computing gets longer for each byte sent while it computes; ``drag``: by which share transfers take longer
    while it computes. ``reduce``: added to each byte of an all-reduce; ``ring``: what such a byte takes of the time that one of
    a row does on the same wire. ``combine``: mixing what has arrived into the parameters. ``apply``: the same for slices, between
    and after their two stages. ``copy``: gradients into the buffers of an all-reduce and back, or parameters into a copy. ``narrow``:
    rounding to bfloat16 before it is sent; ``widen``: taking it in afterwards, instead of ``combine``. ``encode``, ``decode``: to 8 bits
    and back, where means travel so. ``step_us``: microseconds that each averaging step takes in any case, for its own bookkeeping.
    """

    traffic: float = Field(0.0, ge=0)
    drag: float = Field(0.0, ge=0)
    reduce: float = Field(0.0, ge=0)
    ring: float = Field(1.0, ge=0.5, le=1.5)
    combine: float = Field(0.0, ge=0)
    apply: float = Field(0.0, ge=0)
    copy_: float = Field(0.0, ge=0, alias="copy")
    narrow: float = Field(0.0, ge=0)
    widen: float = Field(0.0, ge=0)
    encode: float = Field(0.0, ge=0)
    decode: float = Field(0.0, ge=0)
    step_us: float = Field(0.0, ge=0)


class HostPart(Part):
    """What is different about one host. ``compute``: how many times as long it takes."""

    index: int = Field(ge=0)
    compute: float = Field(1.0, gt=0)
    gbit: float | None = Field(None, gt=0)


class WorkloadPart(Part):
    """One worker's step as it was measured: see ``Workload``. Times in ms, sizes in bytes."""

    name: str = "measured"
    forward_ms: float = Field(ge=0)
    backward_ms: float = Field(ge=0)
    update_ms: float = Field(0.0, ge=0)
    bytes: tuple[int, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _positive(self) -> WorkloadPart:
        if min(self.bytes) <= 0:
            raise GossamerError(
                "bytes: the sizes of the gradient tensors, in the order in which backward makes them; all above 0"
            )
        return self

    def made(self) -> Workload:
        return Workload.of_tensors(self.bytes, self.forward_ms / 1e3, self.backward_ms / 1e3, self.update_ms / 1e3, self.name)


class Cluster(Part):
    """``tflops``: what one worker really computes per second, if times are to be estimated from a number of parameters.
    ``uncertainty``: by how much (as a share) compute times and bandwidths may be wrong; the planner's error bars come from it."""

    name: str = Field(min_length=1)
    description: str = ""
    hosts: int = Field(ge=1)
    per_host: int = Field(1, ge=1)
    inter: Inter | None = None
    intra: Intra | None = None
    tflops: float | None = Field(None, gt=0)
    uncertainty: float = Field(0.1, ge=0, lt=1)
    noise: NoisePart = Field(default_factory=lambda: NoisePart.model_validate({}))
    costs: Costs = Field(default_factory=lambda: Costs.model_validate({}))
    host: tuple[HostPart, ...] = ()
    workload: tuple[WorkloadPart, ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> Cluster:
        if self.hosts > 1 and self.inter is None:
            raise GossamerError(f"inter is missing: {self.hosts} hosts are connected by something; give inter.gbit")
        if self.per_host > 1 and self.intra is None:
            raise GossamerError(
                f"intra is missing: {self.per_host} workers on a host are connected by something; give intra.gbit"
            )
        if self.n > _MOST:
            raise GossamerError(f"hosts × per_host is {self.n}; at most {_MOST:,} workers")
        seen: set[int] = set()
        for one in self.host:
            if one.index >= self.hosts:
                raise GossamerError(f"host.index={one.index}, but there are {self.hosts} hosts, counted from 0")
            if one.index in seen:
                raise GossamerError(f"host.index={one.index} is there twice")
            if one.gbit is not None and self.inter is None:
                raise GossamerError(f"host {one.index} has a gbit of its own, but there is no [inter] network")
            seen.add(one.index)
        names = [one.name for one in self.workload]
        if len(set(names)) < len(names):
            raise GossamerError("workload: two have the same name")
        return self

    @property
    def n(self) -> int:
        return self.hosts * self.per_host

    def sized(self, n: int) -> Cluster:
        """The same cluster with n workers: whole hosts, as many as that takes, or part of one."""
        if n < 1:
            raise GossamerError(f"{n} workers; a cluster has at least one")
        per_host = min(n, self.per_host)
        hosts, rest = divmod(n, per_host)
        if rest:
            raise GossamerError(
                f"{n} workers do not fill hosts of {per_host} (cluster {self.name!r}); use {n - rest} or {n - rest + per_host}"
            )
        if hosts > 1 and self.inter is None:
            raise GossamerError(f"cluster {self.name!r} is one host of {self.per_host}; for {n} workers it needs [inter]")
        kept = tuple(h for h in self.host if h.index < hosts)
        return self.model_copy(update={"hosts": hosts, "per_host": per_host, "host": kept})

    def scaled(self, bandwidth: float) -> Cluster:
        """All bandwidths multiplied: for error bars and what-ifs."""

        def faster(part: Any) -> Any:
            return part and part.model_copy(update={"gbit": part.gbit and part.gbit * bandwidth})

        hosts = tuple(faster(one) for one in self.host)
        return self.model_copy(update={"inter": faster(self.inter), "intra": faster(self.intra), "host": hosts})

    # --- As arrays, for the model --------------------------------------------------------------------------------------

    def compute_factors(self) -> np.ndarray:
        """By how much each worker is slower, ``[n]``."""
        factor = np.ones(self.hosts)
        for one in self.host:
            factor[one.index] = one.compute
        return np.repeat(factor, self.per_host)

    def host_rates(self) -> np.ndarray:
        """Bytes per second through each host's interface, ``[hosts]``; infinite if there is one host only."""
        rate = np.full(self.hosts, np.inf if self.inter is None else self.inter.gbit * 1e9 / 8)
        for one in self.host:
            if one.gbit is not None:
                rate[one.index] = one.gbit * 1e9 / 8
        return rate

    @property
    def intra_rate(self) -> float:
        return np.inf if self.intra is None else self.intra.gbit * 1e9 / 8

    @property
    def inter_latency(self) -> float:
        return 0.0 if self.inter is None else self.inter.latency_us * 1e-6

    @property
    def intra_latency(self) -> float:
        return 0.0 if self.intra is None else self.intra.latency_us * 1e-6


_PARTS: dict[str, type[BaseModel]] = {
    "inter": Inter,
    "intra": Intra,
    "noise": NoisePart,
    "costs": Costs,
    "host": HostPart,
    "workload": WorkloadPart,
}


def build(raw: Mapping[str, Any], where: str = "cluster") -> Cluster:
    try:
        return Cluster.model_validate(raw)
    except ValidationError as error:
        raise GossamerError(f"{where}: {explained(error, Cluster, _PARTS)}") from None


def parse(text: str, where: str = "cluster") -> Cluster:
    """Raises nothing but GossamerError, whatever the text."""
    return build(parsed(text, where), where)


SHELF = Shelf("cluster", "gossamer.runtime.clusters")


def shipped() -> list[str]:
    """The names of the clusters that come with Gossamer."""
    return SHELF.names()


def load(what: str | Path) -> Cluster:
    """A shipped cluster by name, or a TOML file."""
    return parse(SHELF.text(what), str(what))


# --- Writing ------------------------------------------------------------------------------------------------------------


def dumps(cluster: Cluster) -> str:
    """As TOML. Only what a cluster holds: tables, lists of tables, numbers, strings and lists of numbers."""
    raw = cluster.model_dump(exclude_none=True, by_alias=True)
    plain = {k: v for k, v in raw.items() if not isinstance(v, dict) and k not in ("host", "workload")}
    lines = [f"{key} = {_value(value)}" for key, value in plain.items()]
    for key, table in raw.items():
        if isinstance(table, dict):
            lines += ["", f"[{key}]", *(f"{k} = {_value(v)}" for k, v in table.items())]
    for key in ("host", "workload"):
        for table in raw[key]:
            lines += ["", f"[[{key}]]", *(f"{k} = {_value(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\u{ord(c):04x}" for c in value)
        return f'"{escaped}"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(one) for one in value) + "]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def save(cluster: Cluster, path: Path) -> None:
    """All of the file or nothing of it."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(dumps(cluster))
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise GossamerError(f"{path} can't be written: {error.strerror}") from None
