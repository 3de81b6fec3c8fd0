"""AccumAdam: with one step it is Adam, with more it is what the method says, and its state is whole."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import nn

from gossamer import AccumAdam, AccumAdamW, GossamerError, Replicas, decay_groups
from gossamer.apps.models import CifarResNet
from gossamer.optim import accum_adam
from gossamer.optim.accum_adam import reference

BOTH = [(AccumAdam, torch.optim.Adam), (AccumAdamW, torch.optim.AdamW)]


def module(dtype=torch.float32):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 1)).to(dtype)
    made[0].to(memory_format=torch.channels_last)
    return made


def give_gradients(made, step, leave_out=()):
    for k, p in enumerate(made.parameters()):
        g = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + k), dtype=torch.float64)
        p.grad = None if k in leave_out else (g * 10.0 ** (k % 3 - 2)).to(p.dtype)


def groups(made, **options):
    """Three groups, each with options of its own."""
    conv, norm, first, last = made[0], made[1], made[3], made[4]
    return [
        {"params": [*conv.parameters(), *norm.parameters()]},
        {"params": list(first.parameters()), "lr": 0.003, "betas": (0.8, 0.95), "weight_decay": 0.0, **options},
        {"params": list(last.parameters()), "eps": 1e-4, "weight_decay": 0.3, "betas": (0.0, 0.9)},
    ]


def values(made):
    return [p.detach().clone() for p in made.parameters()]


def assert_close(a, b, tolerance=1e-6):
    for x, y in zip(values(a), values(b), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize(("ours", "theirs"), BOTH)
def test_one_accumulation_step_is_torchs_adam(ours, theirs, foreach, maximize):
    mine, other = module(), module()
    options = {"lr": 0.01, "weight_decay": 0.1, "maximize": maximize}
    a = ours(groups(mine), accum_iter=1, foreach=foreach, **options)
    b = theirs(groups(other), **options)
    for step in range(100):
        for made, optimizer in ((mine, a), (other, b)):
            give_gradients(made, step, leave_out=(3,) if step % 7 == 2 else ())
            optimizer.step()
    assert_close(mine, other)


def by_hand(made, steps, s, lr, betas, eps, wd, decoupled):
    """The method once more, in float64 and with numbers only where it says numbers."""
    xs = [p.detach().double().clone() for p in made.parameters()]
    m_hat, v_hat, b = ([torch.zeros_like(x) for x in xs] for _ in range(3))
    for t in range(1, steps + 1):
        give_gradients(made, t - 1)
        k = -(-t // s)
        for i, p in enumerate(made.parameters()):
            g = p.grad.double()
            if decoupled:
                xs[i] = xs[i] * (1 - lr * wd)
            else:
                g = g + wd * xs[i]
            b[i] = b[i] + g / s
            m = betas[0] * m_hat[i] + (1 - betas[0]) * g
            v = betas[1] * v_hat[i] + (1 - betas[1]) * g * g
            xs[i] = xs[i] - lr / (1 - betas[0] ** k) * m / (v.sqrt() / (1 - betas[1] ** k) ** 0.5 + eps)
            if t % s == 0:
                m_hat[i] = betas[0] * m_hat[i] + (1 - betas[0]) * b[i]
                v_hat[i] = betas[1] * v_hat[i] + (1 - betas[1]) * b[i] * b[i]
                b[i] = torch.zeros_like(b[i])
    return xs


@examples(max_examples=40, deadline=None)
@given(
    s=st.integers(1, 9),
    steps=st.integers(1, 30),
    betas=st.tuples(st.sampled_from([0.0, 0.5, 0.9, 0.974]), st.sampled_from([0.0, 0.9, 0.98, 0.999])),
    wd=st.sampled_from([0.0, 0.2]),
    eps=st.sampled_from([1e-8, 1e-3]),
    ours=st.sampled_from([AccumAdam, AccumAdamW]),
)
def test_reference_and_foreach_are_the_method(s, steps, betas, wd, eps, ours):
    options = {"lr": 0.01, "betas": betas, "eps": eps, "weight_decay": wd, "accum_iter": s}
    expected = by_hand(module(torch.float64), steps, s, 0.01, betas, eps, wd, ours is AccumAdamW)
    for foreach in (False, None):
        made = module(torch.float64)
        optimizer = ours(made.parameters(), foreach=foreach, **options)
        for step in range(steps):
            give_gradients(made, step)
            optimizer.step()
        for p, x in zip(made.parameters(), expected, strict=True):
            torch.testing.assert_close(p.detach(), x, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("ours", [AccumAdam, AccumAdamW])
@pytest.mark.parametrize("together", [None, 1, 50, 1 << 20])
def test_foreach_equals_the_reference_with_groups_and_missing_gradients(ours, together, monkeypatch):
    """Also however the tensors are cut into portions."""
    monkeypatch.setattr(accum_adam, "_TOGETHER", together)
    plain, fast = module(), module()
    made = [ours(groups(m, accum_iter=3), 0.01, weight_decay=0.1, foreach=f) for m, f in ((plain, False), (fast, True))]
    for step in range(40):
        for m, optimizer in zip((plain, fast), made, strict=True):
            give_gradients(m, step, leave_out=(step % 5, 6) if step % 2 else ())
            optimizer.step()
    assert_close(plain, fast)
    states = [optimizer.state_dict()["state"] for optimizer in made]
    assert [s["step"] for s in states[0].values()] == [s["step"] for s in states[1].values()]
    assert len({s["step"] for s in states[0].values()}) > 1
    for i, state in states[0].items():
        for key in ("exp_avg", "exp_avg_sq", "accum"):
            torch.testing.assert_close(state[key], states[1][i][key], rtol=1e-5, atol=1e-7)


def test_portions_hold_every_element_once_and_are_small():
    tensors = [[torch.arange(float(n))] for n in (5, 300, 7, 7, 64, 129)]
    tensors.append([torch.arange(400.0).reshape(20, 20).t()])  # with gaps between neighbours: stays whole
    portions = [portion for (portion,) in accum_adam._portions(tensors, 64)]
    assert sum(t.numel() for portion in portions for t in portion) == sum(t.numel() for (t,) in tensors)
    assert [sum(t.numel() for t in portion) for portion in portions][:-1] == [5, 64, 64, 64, 64, 58, 64, 64, 64, 1]
    assert portions[-1][0].shape == (20, 20)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("ours", [AccumAdam, AccumAdamW])
def test_gradients_stay_the_callers(ours, foreach):
    made = module()
    optimizer = ours(made.parameters(), weight_decay=0.5, foreach=foreach, accum_iter=2, maximize=True)
    for step in range(4):
        give_gradients(made, step)
        before = [p.grad.clone() for p in made.parameters()]
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(made.parameters(), before, strict=True))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("stop", [1, 4, 6, 8])
def test_resuming_inside_a_window_is_exact(stop, foreach, tmp_path):
    def make():
        m = module()
        return m, AccumAdamW(groups(m, accum_iter=3), 0.01, foreach=foreach)

    first, optimizer = make()
    for step in range(stop):
        give_gradients(first, step)
        optimizer.step()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    second, resumed = make()
    saved = torch.load(tmp_path / "a.pt", weights_only=True)
    second.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    copied = copy.deepcopy(resumed)
    assert [group["accum_iter"] for group in copied.param_groups] == [4, 3, 4]
    for m, o in ((first, optimizer), (second, resumed)):
        for step in range(stop, 13):
            give_gradients(m, step)
            o.step()
    assert all(torch.equal(a, b) for a, b in zip(values(first), values(second), strict=True))


def test_moments_change_at_the_end_of_a_window_only():
    p = nn.Parameter(torch.zeros(3))
    optimizer = AccumAdam([p], accum_iter=4)
    seen = []
    for step in range(8):
        p.grad = torch.full((3,), float(step))
        before = p.detach().clone()
        optimizer.step()
        assert step == 0 or not torch.equal(p, before)  # parameters move in every step
        seen.append(float(optimizer.state[p]["exp_avg"][0]))
    assert seen[:3] == [0.0] * 3
    assert seen[3] == seen[6] == pytest.approx(0.1 * 1.5)
    assert seen[7] == pytest.approx(0.9 * 0.15 + 0.1 * 5.5)
    assert not optimizer.state[p]["accum"].any()


def test_half_precision_closure_and_schedulers():
    p = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    optimizer = AccumAdamW([p], lr=0.1, accum_iter=2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)  # changes lr and betas

    def closure():
        optimizer.zero_grad()
        loss = (p.float() ** 2).sum()
        loss.backward()
        return loss

    losses = []
    for _ in range(8):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert losses[-1] < losses[0]
    assert p.dtype == torch.bfloat16


def ordinary():
    return [nn.Parameter(torch.zeros(2))]


BAD = [
    (lambda: AccumAdam(ordinary(), accum_iter=0), "accum_iter=0"),
    (lambda: AccumAdam(ordinary(), accum_iter=2.5), "accum_iter=2.5"),
    (lambda: AccumAdam(ordinary(), betas=(0.9, 1.0)), "betas=.0.9, 1.0."),
    (lambda: AccumAdam(ordinary(), lr=-1), "lr=-1"),
    (lambda: AccumAdam(ordinary(), lr=torch.tensor(0.1)), "lr is a tensor"),
    (lambda: AccumAdamW([{"params": ordinary(), "accum_iter": -1}]), "accum_iter=-1"),
    (lambda: AccumAdamW(ordinary(), amsgrad=True), "AccumAdamW has no amsgrad"),
    (lambda: AccumAdam(ordinary(), fused=True), "AccumAdam has no fused"),
    (lambda: AccumAdam([{"params": ordinary(), "capturable": True}]), "AccumAdam has no capturable"),
    (lambda: AccumAdam([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]), "complex64"),
    (lambda: decay_groups(module(), -1.0), "weight_decay=-1.0"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_mistakes_are_named(make, message):
    with pytest.raises(GossamerError, match=message):
        make()


def test_unknown_arguments_other_states_and_sparse_gradients_are_refused():
    with pytest.raises(TypeError, match="'momentum'"):
        AccumAdam(ordinary(), momentum=0.9)
    AccumAdam(ordinary(), amsgrad=False, fused=None)  # what torch's own default would be
    made = module()
    adam = torch.optim.Adam(made.parameters())
    give_gradients(made, 0)
    adam.step()
    with pytest.raises(GossamerError, match="not the state of an AccumAdam"):
        AccumAdam(made.parameters()).load_state_dict(adam.state_dict())
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(GossamerError, match="sparse gradients"):
        AccumAdam(embedding.parameters()).step()


def test_reference_is_what_foreach_false_runs():
    p, q = (nn.Parameter(torch.ones(3)) for _ in range(2))
    p.grad = q.grad = torch.tensor([1.0, -2.0, 0.5])
    optimizer = AccumAdam([p], foreach=False)
    optimizer.step()
    state = {"step": 1, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3), "accum": torch.zeros(3)}
    with torch.no_grad():
        reference(q, q.grad, state, optimizer.param_groups[0], decoupled=False)
    assert torch.equal(p, q)


# --- Weight decay goes to weights ------------------------------------------------------------------------------------------


class Misleading(nn.Module):
    """Names that say nothing, or the wrong thing."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm((4, 2, 2)))
        self.bn_like = nn.Linear(16, 5)
        self.embed = nn.Embedding(7, 5)
        self.bias_table = nn.Parameter(torch.ones(3, 3))
        self.gain = nn.PReLU(4)
        self.rms = nn.RMSNorm((5, 5))


DECAYED = {"layers.0.weight", "bn_like.weight", "embed.weight", "bias_table"}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, AccumAdam, AccumAdamW])
def test_weight_decay_goes_to_weights_whatever_their_names(kind):
    made = Misleading()
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    for p in made.parameters():
        p.grad = torch.zeros_like(p)
    kind(decay_groups(made, 0.5), lr=0.1).step()
    changed = {name for name, p in made.named_parameters() if not torch.equal(p, before[name])}
    assert changed == DECAYED


def test_blocks_and_groups_share_one_definition():
    made = Misleading()
    assert {s.name for block in Replicas(made, 2).blocks for s in block.slots if not s.spared} == DECAYED
    names = {id(p): name for name, p in made.named_parameters()}
    decayed, spared = decay_groups(made, 0.5)
    assert {names[id(p)] for p in decayed["params"]} == DECAYED
    assert len(decayed["params"]) + len(spared["params"]) == len(names)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.5, 0.0)


def test_decay_groups_of_a_resnet_with_group_norm():
    made = CifarResNet(8, norm="group")
    decayed, spared = decay_groups(made, 0.1)
    assert all(p.ndim in (2, 4) for p in decayed["params"])
    assert len(decayed["params"]) == 8  # the stem, six convolutions, the last matrix
    assert len(spared["params"]) == len(list(made.parameters())) - 8
    assert len(decay_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1
