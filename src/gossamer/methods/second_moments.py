"""Adam's second moments as those of the mean gradient, which no worker has seen: ``moments=shared`` of outer steps, for no bytes more.

Between two means each replica's exp_avg_sq takes in its own g², and that is (mean g)² + the noise of its own small batch. Of the mean over
n replicas it would be (mean g)² + noise / n. Over a period, own g² on the average is what exp_avg_sq has grown by. And (mean g)² is known
from the mean movement Δ, which arrives anyway: Adam moves by η g / √v, so (mean g)² = v (Δ / Σ η)², with little noise left in it. So

    shared = (mean g)² + (own g² - (mean g)²) / n        between own g² / n and own g²

and what exp_avg_sq has taken in beyond that is taken off it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gossamer.methods.step import Step
from gossamer.rows.vector import Vector

if TYPE_CHECKING:
    from gossamer.methods.outer import Fragment

_NAME = "exp_avg_sq"
# Of each fragment in ``rates``: Σ η and updates since the last movement set out, and of the period before, which has moved so.
_RATE, _UPDATES, _RATE_BEFORE, _UPDATES_BEFORE = range(4)


def state(like: Vector, delay: int, fragments: int) -> dict[str, Vector]:
    """``second``: exp_avg_sq when the last movement set out, corrected. ``second.sent``: the same, as it was."""
    own = {"second": like.zeros(), "rates": like.ones(4 * fragments).mul_(0.0)}
    return own | ({"second.sent": like.zeros()} if delay else {})


def count(s: Step, own: Fragment) -> None:
    """After an update."""
    rates = own.state["rates"].tensors[0]
    rates[:, _RATE] += s.lr
    rates[:, _UPDATES] += 1


def depart(s: Step, own: Fragment) -> None:
    """The movement of a period sets out."""
    rates = own.state["rates"].tensors[0]
    rates[:, _RATE_BEFORE:] = rates[:, :_RATE_BEFORE]
    rates[:, :_RATE_BEFORE] = 0
    if "second.sent" in own.state:
        own.state["second.sent"].copy_(own.part(s.moments(_NAME)[_NAME]))


def arrive(s: Step, own: Fragment, moved: Vector) -> None:
    """``moved``: the mean movement of that period."""
    _, later, rate, updates = own.state["rates"].tensors[0][0].tolist()
    made = s.moments(_NAME)
    now, before = own.part(made[_NAME]), own.state["second"]
    sent = own.state.get("second.sent", now)
    beta, n, done = s.optimizers[0].param_groups[0]["betas"][1], s.graph.n, s.updates() - later
    keep = float(beta) ** updates
    if not rate or done < 1:
        before.copy_(sent)
        return
    for v, start, end, far in zip(now.tensors, before.tensors, sent.tensors, moved.tensors, strict=True):
        own_square = (end - keep * start).div_(1 - keep).clamp_(min=0)
        mean_square = (far / rate).square_().mul_(end).div_(1 - float(beta) ** done)
        beyond = (own_square - mean_square).clamp_(min=0).minimum(own_square).mul_((1 - 1 / n) * (1 - keep))
        torch.sub(end, beyond, out=start)
        v.sub_(beyond, alpha=float(beta) ** later)
    s.set_moments(made)
