"""What local steps cost in loss: for the advice of ``gossamer plan``. ``gossamer bench studies/specs/outer.toml`` measures it; the
numbers are not here yet.

That is AdamW on a nano GPT over bytes, 4 replicas, 400 steps, one learning rate, one seed: of another model, or of a longer run, it says
only that there is a price.
"""

from __future__ import annotations

from gossamer.methods import DiLoCo, NoLoCo
from gossamer.runtime.methods import Gossip, Method

SPEC = "studies/specs/outer.toml"
# To be filled from that run. Perplexity of the averaged model at the end, above all-reduce's, by family and H.
MEASURED: dict[str, dict[int, float]] = {}


def price(method: Method, every: float) -> str:
    """As it stands after "if you accept". Where this H was not measured, that of the nearest one that was."""
    rule = method.rule if isinstance(method, Gossip) else None
    family = "diloco" if isinstance(rule, DiLoCo) else "noloco" if isinstance(rule, NoLoCo) else "local"
    known = MEASURED.get(family)
    if not known:
        return f"that {every:g} steps without an exchange cost loss, by how much {SPEC} measures"
    nearest = min(known, key=lambda h: abs(h - every))
    beyond = f"; H={every:g} was not measured" if nearest != every else ""
    return (
        f"a loss of quality ({known[nearest]:+.0%} in perplexity for {family}:H={nearest} in {SPEC}, AdamW, one seed{beyond})"
    )
