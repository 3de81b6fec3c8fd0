"""AccumAdam and AccumAdamW: Adam for workers that average parameters and not gradients.

A worker's gradient comes from its own small batch, so its square is mostly noise, and Adam's second moment with it. AccumAdam
updates the parameters in every step, but its moments only once in ``accum_iter`` steps, with the mean gradient of those
steps, which stands for a larger batch (*From Promise to Practice*, appendix C). With one step it is Adam.

They are ordinary torch optimizers: alone, with ``DecentralizedDataParallel.gossip(optimizer)``, and in DBench by the names
``accumadam`` and ``accumadamw``. All arithmetic is elementwise, so one instance serves a whole block of replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from gossamer.errors import GossamerError

_TOGETHER = 1 << 19  # elements that go through all operations at a time on a CPU, so that temporaries stay in its cache
_STATE = {"step", "exp_avg", "exp_avg_sq", "accum"}  # t, m̂ and v̂ of the completed windows, b of the present one
_REFUSED = ("amsgrad", "capturable", "differentiable", "fused")


class AccumAdam(torch.optim.Optimizer):
    """Adam with gradients accumulated over ``accum_iter`` steps in its moments; arguments as in ``torch.optim.Adam``.

    ``weight_decay`` is added to the gradient (L2). ``accum_iter`` should grow with the number of workers: the authors used 4
    for 8 workers and 8 for 16 and 32. ``foreach=False`` runs the plain reference, which is several times slower.
    """

    _decoupled = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        accum_iter: int = 4,
        foreach: bool | None = None,
        maximize: bool = False,
        **refused: Any,
    ) -> None:
        self._refuse(refused)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "accum_iter": accum_iter}
        super().__init__(params, {**options, "foreach": foreach, "maximize": maximize})

    def _refuse(self, options: dict[str, Any]) -> None:
        for name, value in options.items():
            if name not in _REFUSED:
                raise TypeError(f"{type(self).__name__} got an unexpected argument {name!r}")
            if value:
                raise GossamerError(f"{type(self).__name__} has no {name}; leave it out")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._refuse({name: group[name] for name in _REFUSED if name in group})
            _check(group)
        except GossamerError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for state in state_dict["state"].values():
            if set(state) != _STATE:
                raise GossamerError(
                    f"this is not the state of an {type(self).__name__}: it holds {', '.join(sorted(state))} and "
                    f"should hold {', '.join(sorted(_STATE))}"
                )
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for p in trained:
                self._begin(p)
            if group["foreach"] is False:
                for p in trained:
                    reference(p, p.grad, self.state[p], group, self._decoupled)
            else:
                self._foreach(trained, group)
        return loss

    def _begin(self, p: Tensor) -> None:
        """Count the step, which is a parameter's own: one without a gradient does not take part in it."""
        if p.grad is not None and p.grad.is_sparse:
            raise GossamerError(f"{type(self).__name__} does not take sparse gradients; use a dense embedding")
        state = self.state[p]
        if not state:
            state["step"] = 0
            for name in sorted(_STATE - {"step"}):
                state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["step"] += 1

    def _foreach(self, params: list[Tensor], group: dict[str, Any]) -> None:
        alike: dict[Any, list[list[Tensor]]] = {}
        for p in params:
            state = self.state[p]
            tensors = [p.detach(), p.grad.detach(), state["exp_avg"], state["exp_avg_sq"], state["accum"]]  # type: ignore[union-attr]
            alike.setdefault((state["step"], p.device, p.dtype), []).append(tensors)
        for (t, device, _), tensors in alike.items():
            together = _TOGETHER if device.type == "cpu" else None
            for x, g, m, v, b in _portions(tensors, together):
                many(x, g, m, v, b, t, group, self._decoupled)


class AccumAdamW(AccumAdam):
    """:class:`AccumAdam` with decoupled weight decay, as ``torch.optim.AdamW`` has it: parameters shrink by lr·weight_decay."""

    _decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **options)


def reference(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], decoupled: bool) -> None:
    """One parameter, as the method is written down; :func:`many` is held to it. ``state["step"]`` counts this step already."""
    lr, (beta1, beta2), eps, wd, s = (group[key] for key in ("lr", "betas", "eps", "weight_decay", "accum_iter"))
    t, m_hat, v_hat, b = state["step"], state["exp_avg"], state["exp_avg_sq"], state["accum"]
    k = (t + s - 1) // s
    g = -grad if group["maximize"] else grad
    if decoupled:
        p.mul_(1 - lr * wd)
    else:
        g = g + wd * p
    b += g / s
    m = beta1 * m_hat + (1 - beta1) * g
    v = beta2 * v_hat + (1 - beta2) * g**2
    p.sub_(lr / (1 - beta1**k) * m / (v.sqrt() / math.sqrt(1 - beta2**k) + eps))
    if t % s == 0:
        m_hat.copy_(beta1 * m_hat + (1 - beta1) * b)
        v_hat.copy_(beta2 * v_hat + (1 - beta2) * b**2)
        b.zero_()


def many(
    x: list[Tensor],
    g: list[Tensor],
    m_hat: list[Tensor],
    v_hat: list[Tensor],
    b: list[Tensor],
    t: int,
    group: dict[str, Any],
    decoupled: bool,
) -> None:
    """The same for many tensors, with as few passes over them as there are operations to do: six in most steps, where torch's
    Adam has seven. All that is the same for all elements is gathered into two numbers, ``rate`` and ``eps``."""
    lr, (beta1, beta2), wd, s = (group[key] for key in ("lr", "betas", "weight_decay", "accum_iter"))
    k = (t + s - 1) // s
    if group["maximize"]:
        g = list(torch._foreach_neg(g))
    if wd and decoupled:
        torch._foreach_mul_(x, 1 - lr * wd)
    elif wd:
        g = list(torch._foreach_add(g, x, alpha=wd))  # never in place: p.grad is the caller's
    if s > 1:
        torch._foreach_add_(b, g, alpha=1 / s)
    # v/β2 instead of v: its factor is one of the numbers gathered, and v̂ needs no multiplication of its own.
    inside = math.sqrt((1 - beta2**k) / beta2) if beta2 else 1.0
    rate, eps = lr * inside / (1 - beta1**k), group["eps"] * inside
    m = torch._foreach_lerp(m_hat, g, 1 - beta1)
    v = torch._foreach_addcmul(v_hat, g, g, (1 - beta2) / beta2) if beta2 else torch._foreach_mul(g, g)
    torch._foreach_sqrt_(v)
    torch._foreach_add_(v, eps)
    torch._foreach_addcdiv_(x, m, v, -rate)
    if t % s == 0:
        whole = b if s > 1 else g
        torch._foreach_lerp_(m_hat, whole, 1 - beta1)
        torch._foreach_mul_(v_hat, beta2)
        torch._foreach_addcmul_(v_hat, whole, whole, 1 - beta2)
        if s > 1:
            torch._foreach_zero_(b)


def _portions(tensors: list[list[Tensor]], together: int | None) -> Iterator[tuple[list[Tensor], ...]]:
    """The same tensors in portions of about ``together`` elements: small ones side by side, large ones in pieces."""
    portion: list[tuple[Tensor, ...]] = []
    filled = 0
    for some in tensors:
        pieces = [tuple(some)]
        if together and some[0].numel() > together and all(t.is_contiguous() for t in some):
            pieces = list(zip(*(t.view(-1).split(together) for t in some), strict=True))
        for piece in pieces:
            size = piece[0].numel()
            if together and portion and filled + size > together:
                yield tuple(map(list, zip(*portion, strict=True)))
                portion, filled = [], 0
            portion.append(piece)
            filled += size
    if portion:
        yield tuple(map(list, zip(*portion, strict=True)))


def _check(group: dict[str, Any]) -> None:
    """The options of one parameter group."""
    lr, betas, eps, wd, s = (group[key] for key in ("lr", "betas", "eps", "weight_decay", "accum_iter"))
    if isinstance(lr, Tensor):
        raise GossamerError("lr is a tensor; AccumAdam takes a number")
    if lr < 0 or eps < 0 or wd < 0:
        raise GossamerError(f"lr={lr}, eps={eps}, weight_decay={wd}: none of them may be below 0")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise GossamerError(f"betas={betas}: two numbers of at least 0 and below 1, such as (0.9, 0.999)")
    if isinstance(s, bool) or not isinstance(s, int) or s < 1:
        raise GossamerError(f"accum_iter={s!r}: the number of steps whose gradients are accumulated, a whole number from 1")
    for p in group["params"]:
        if not p.dtype.is_floating_point:
            raise GossamerError(f"a parameter is {p.dtype}; AccumAdam takes real floating-point ones")
