"""Decentralized SGD in both orders, with any optimizer d(·): "D-PSGD", and "D-Adam" when d is Adam."""

from dataclasses import dataclass
from typing import Literal

from gossamer.methods.base import Method
from gossamer.methods.step import Step

Order = Literal["awc", "atc"]  # the names of the two


@dataclass(frozen=True)
class AdaptWhileCombine(Method):
    """x <- W x - η d(x): the gradient is taken at the unmixed x while x is being mixed, so communication is hidden.

    Weight decay acts on the mixed parameters, because the optimizer runs on them.
    """

    name = "awc"

    def before_forward(self, s: Step) -> None:
        s.pending["x"] = s.mix(s.x)
        s.look()

    def before_update(self, s: Step) -> None:
        s.pending.pop("x").into(s.x)


@dataclass(frozen=True)
class AdaptThenCombine(Method):
    """x <- W (x - η d(x)): a local step, then averaging. On the complete graph with plain SGD it equals all-reduce."""

    name, plainly = "atc", True

    def after_update(self, s: Step) -> None:
        mixed = s.mix(s.x)
        s.look()
        mixed.into(s.x)
