"""Methods of the field, held to their equations and to each other (the cross-method table): on quadratics, in double precision."""

import contextlib
import itertools

import numpy as np
import pytest
import torch

from gossamer import GossamerError, Recipe, Settings, Trainer, graphs
from gossamer.methods import Averaging, method
from gossamer.schedules import schedule
from tests.models import task
from tests.test_methods import COLUMNS, OPTIMUM, A, H, N, Run, after, close

SIZES = [1, 2, 5, 8]


def of(n):
    """h and a of n replicas."""
    rows = torch.arange(n) % N
    return H[rows], A[rows]


def matrix(graph, n):
    return torch.from_numpy(graphs.parse(graph, n).matrix())


# --- Reductions -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("reduced", ["qgm:beta=0", "qgm:beta=0,nesterov=true,local_step=3", "decentlam:beta=0"])
def test_without_momentum_they_are_decentralized_sgd(reduced, n):
    close(after(40, reduced, "ring", n=n), after(40, "atc", "ring", n=n))


@pytest.mark.parametrize("n", SIZES)
def test_gut_without_tracking_is_averaging_first_and_the_gradient_there(n):
    made, (h, a), w = Run("gut:mu=0", "ring", n=n), of(n), matrix("ring", n)
    x = z = made.x.clone()  # the first z is what all start with
    for now in made.steps(40):
        x = z - 0.1 * h * (z - a)
        z = w @ x
        close(now.x, z)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("start", ["mean", "own"])
def test_momentum_tracking_without_momentum_is_gradient_tracking(n, start):
    h, a = of(n)
    made, w = Run(f"momentum-tracking:beta=0,start={start}", "ring", n=n), matrix("ring", n)
    x, y, before = made.x.clone(), torch.zeros(n, COLUMNS, dtype=torch.float64), None
    for now in made.steps(40):
        g = h * (x - a)
        y = y + g - before if before is not None else (g.mean(0).expand(n, -1) if start == "mean" else g)
        x, y, before = w @ (x - 0.1 * y), w @ y, g
        close(now.x, x, 1e-11)
    if start == "own":
        close(made.x, after(40, "tracking", "ring", n=n))


# --- The trackers' means ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
def test_the_mean_of_what_is_tracked_is_that_of_what_it_tracks(n):
    for rule, tracker, tracked in (("tracking", "y", "g"), ("momentum-tracking", "y", "m"), ("gt-nsgdm", "y", "v")):
        for now in Run(rule, "ring", n=n, lr=0.02).steps(60):
            state = now.now.state
            close(state[tracker].tensors[0].mean(0), state[tracked].tensors[0].mean(0), 1e-11)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("mu", [0.3, 0.9])
def test_the_mean_update_of_gut_is_the_mean_gradient(n, mu):
    """At every step, also when the learning rate changes: a movement is divided by the rate of its own step."""
    made, (h, a) = Run(f"gut:mu={mu}", "ring", n=n), of(n)
    x = made.x.clone()
    for t, now in enumerate(made.steps(60, lambda t: 0.1 / (1 + t // 20))):
        lr = 0.1 / (1 + t // 20)
        close((x - now.x).mean(0) / lr, (h * (x - a)).mean(0), 1e-10)
        x = now.x.clone()


def test_gut_with_momentum_is_what_the_authors_code_does():
    mu, beta, lr = 0.3, 0.5, 0.05
    made, w = Run(f"gut:mu={mu},beta={beta}", "ring", lr=lr), matrix("ring", N)
    with torch.no_grad():
        made.block.x.copy_(made.x[:1].expand(N, -1))  # all start the same
    x, buffer = made.x.clone(), torch.zeros(N, COLUMNS, dtype=torch.float64)
    x_before, gossip_before, delta_before = x.clone(), torch.zeros_like(x), None
    for t, now in enumerate(made.steps(80)):
        gossip = w @ x - x
        g = H * ((x + gossip) - A)
        delta = g - gossip / lr
        shift = w @ (x - x_before) + (1 + beta) * gossip_before if t else 0 * x
        y = delta - mu / lr * shift - (mu * delta_before if t else 0)
        buffer = beta * buffer + y
        x_before, gossip_before, delta_before = x, gossip, delta
        x = x - lr * buffer
        close(now.x, w @ x, 1e-10)


# --- Bias -----------------------------------------------------------------------------------------------------------------------


def bias(rule, count=4000, lr=0.05, graph="ring", n=N):
    made = Run(rule, graph, lr=lr, n=n)
    for _ in made.steps(count):
        pass
    return float((made.x - OPTIMUM).norm())


def test_the_order_of_bias_on_data_that_differ():
    found = [bias("atc"), bias("gut:mu=0.3"), bias("gut:mu=0.9")]
    assert found == sorted(found, reverse=True)
    assert found[2] > 1e-4
    assert found[0] > 2 * found[2]
    for rule in ("tracking", "momentum-tracking:beta=0.5", "d2"):
        assert bias(rule) < 1e-8, rule


def test_the_bias_of_gut_is_that_of_a_smaller_step():
    """Fixed point: averaging moves by η (1 - μ) g, with momentum by η (1 - μ) / (1 + β μ) g."""
    w, lr = matrix("ring", N), 0.05
    for mu, beta in ((0.5, 0.0), (0.2, 0.5)):
        made = Run(f"gut:mu={mu},beta={beta}", "ring", lr=lr)
        with torch.no_grad():
            made.block.x.copy_(made.x[:1].expand(N, -1))
        for _ in made.steps(4000):
            pass
        gossip = lr * (1 - mu) / (1 + beta * mu) * H * (made.x - A)
        close(w @ (made.x - gossip), made.x, 1e-9)


@pytest.mark.parametrize(
    ("rule", "graph"),
    [
        ("decentlam", "ring"),
        ("decentlam", "exponential"),
        ("decentlam:beta=0.5", "exponential"),
        ("gut", "torus"),
        ("gut:mu=0.3", "torus"),
        ("gut:beta=0.9", "one-peer-exponential"),
        ("gut:beta=0.9", "one-peer-ring"),
        ("gut", "directed-ring"),
    ],
)
def test_what_drives_replicas_apart_is_refused_and_nothing_else(rule, graph):
    made = Run(rule, graph, lr=0.001, n=8)
    for _ in made.steps(200):
        pass
    why = method(rule).check(made.graph)
    assert (float((made.x - made.x.mean(0)).norm()) > 1e3) == (why is not None), why
    if why:
        assert (
            f"method '{rule}' drives replicas apart on '{graph}', whatever the learning rate; use ring, a smaller beta" in why
        )


@pytest.mark.parametrize("graph", ["ring", "torus", "star"])
def test_d_squared_is_its_equation(graph):
    for lazy in (True, False):
        w = matrix(graph, N)
        least = float(np.linalg.eigvalsh(w.numpy())[0])
        if not lazy and least <= -1 / 3 + 1e-9:
            continue
        made = Run(f"d2:lazy={str(lazy).lower()}", graph, lr=0.05)
        w = (w + torch.eye(N)) / 2 if lazy else w
        x, before, g_before = made.x.clone(), None, None
        for now in made.steps(40):
            g = H * (x - A)
            x, before, g_before = w @ (x - 0.05 * g if before is None else 2 * x - before - 0.05 * (g - g_before)), x, g
            close(now.x, x, 1e-10)


def test_decentlam_and_qgm_are_their_equations():
    w, lr, beta, mu = matrix("ring", N), 0.05, 0.8, 0.7
    made = Run(f"decentlam:beta={beta}", "ring", lr=lr)
    x, m = made.x.clone(), torch.zeros(N, COLUMNS, dtype=torch.float64)
    for now in made.steps(40):
        m = beta * m + (x - w @ (x - lr * H * (x - A))) / lr
        x = x - lr * m
        close(now.x, x, 1e-10)
    made = Run(f"qgm:beta={beta},mu={mu},nesterov=true,local_step=3", "ring", lr=lr)
    x, m, moved = made.x.clone(), torch.zeros_like(x), torch.zeros_like(x)
    for t, now in enumerate(made.steps(40)):
        g, before = H * (x - A), x
        x = w @ (x - lr * (g + beta * (beta * m + g)))
        moved = moved + (before - x) / lr
        if (t + 1) % 3 == 0:
            m, moved = mu * m + (1 - mu) * moved / 3, torch.zeros_like(moved)
        close(now.x, x, 1e-10)


def test_quasi_global_adam_is_its_equation():
    w, lr, b1, b2, eps = matrix("ring", N), 0.05, 0.9, 0.95, 1e-6
    made = Run(f"qg-adam:beta1={b1},beta2={b2},eps={eps}", "ring", lr=lr)
    x = made.x.clone()
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for t, now in enumerate(made.steps(40)):
        g, before = H * (x - A), x
        a, b = (b1 * m + g) / (1 - b1 ** (t + 1)), (b2 * v + (1 - b2) * g**2) / (1 - b2 ** (t + 1))
        x = w @ (x - lr * a / (b.sqrt() + eps))
        d = (before - x) / ((before - x).norm(dim=1, keepdim=True) + 1e-8)
        m, v = b1 * m + (1 - b1) * d, b2 * v + (1 - b2) * d**2
        close(now.x, x, 1e-10)


def test_steps_of_gt_nsgdm_have_the_length_of_the_learning_rate():
    made = Run("gt-nsgdm", "complete", n=1, lr=0.01)
    x = made.x.clone()
    for now in made.steps(20):
        close((now.x - x).norm(), torch.tensor(0.01, dtype=torch.float64), 1e-9)
        x = now.x.clone()


# --- One worker, equal workers, steps without a learning rate ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule", ["qgm", "qgm:nesterov=true,local_step=2", "qg-adam", "gut", "gut:mu=0.1,beta=0.9", "decentlam", "d2"]
)
def test_a_step_with_a_learning_rate_of_0_divides_by_nothing(rule):
    made = Run(rule, "ring", lr=0.05)
    mean = None
    for t, now in enumerate(made.steps(12, lambda t: 0.0 if t in (0, 5, 6) else 0.05)):
        assert torch.isfinite(now.x).all()
        if t == 5:
            mean = now.x.mean(0)
        if t == 6 and rule != "d2":
            close(now.x.mean(0), mean, 1e-12)  # nothing but averaging


# --- Refusals -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("qgm:beta=1.5", r"method 'qgm': beta=1.5 is out of range; it is in \[0, 1\)"),
        ("qgm:local_step=0", r"local_step=0 is out of range; it is in \[1, inf\)"),
        ("gut:mu=2", r"mu=2.0 is out of range; it is in \[0, 1\]"),
        ("momentum-tracking:beta=1", r"beta=1.0 is out of range"),
        ("momentum-tracking:start=zero", "start='zero' is not mean, own"),
        ("qg-adam:eps=0", r"eps=0.0 is out of range; it is in \(0, inf\)"),
    ],
)
def test_options_out_of_range_are_named(text, message):
    with pytest.raises(GossamerError, match=message):
        method(text)


def test_d_squared_says_which_graph_it_needs():
    assert "needs a symmetric W" in method("d2").check(graphs.parse("exponential", 8))
    assert "the same W in every step" in method("d2").check(graphs.parse("one-peer-ring", 8))
    why = method("d2:lazy=false").check(graphs.parse("ring", 8))
    assert "above -1/3, and the least one of 'ring' is -0.333; use lazy=true" in why
    assert method("d2").check(graphs.parse("ring", 8)) is None


# --- Around another method ------------------------------------------------------------------------------------------------------------


def distance(x):
    return float((x - x.mean(0)).square().sum(1).mean().sqrt())


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("inner", ["atc", "awc", "qgm", "tracking"])
def test_control_without_a_target_is_the_method_alone(inner, n):
    assert torch.equal(after(40, f"{inner} + control:target=inf", "ring", n=n), after(40, inner, "ring", n=n))


@pytest.mark.parametrize("n", SIZES)
def test_control_to_nothing_on_the_complete_graph_is_exact_averaging(n):
    made = Run("atc + control:target=0,rounds=1", "complete", n=n)
    for now in made.steps(20):
        assert distance(now.x) < 1e-12


@pytest.mark.parametrize("graph", ["ring", "one-peer-exponential", "star"])
def test_control_keeps_replicas_within_the_target_that_it_names(graph):
    """The bound is one: the true distance is never above it. Rounds that are repeated keep the mean."""
    made, spent = Run("atc + control:target=0.02,rounds=40", graph), 0
    for now in made.steps(60):
        notes = now.now.notes
        assert distance(now.x) <= notes["control_reached"] * (1 + 1e-9)
        assert notes["control_reached"] <= notes["control_target"]
        spent += notes["control_rounds"]
    assert spent
    free = Run("atc", graph)
    for _ in free.steps(60):
        pass
    assert distance(made.x) < distance(free.x) / 2


@pytest.mark.parametrize("agrees", [True, False])
def test_control_repeats_no_rounds_where_workers_can_not_agree_on_them(agrees):
    """Under gossamer launch, when the store is gone: a worker that did one more round would wait for the others for ever."""
    made = Run("atc + control:target=0,rounds=3", "ring")
    made.now.mixer.agrees = agrees
    with contextlib.nullcontext() if agrees else pytest.warns(UserWarning, match="repeats no rounds any more"):
        for now in made.steps(2):
            assert now.now.notes["control_rounds"] == (3 if agrees else 0)


def test_control_ends_when_the_learning_rate_falls():
    spent = []
    for now in Run("atc + control:target=0,late=inf,rounds=2", "ring").steps(10, lambda t: 0.1 if t < 5 else 0.01):
        spent.append(now.now.notes["control_rounds"])
    assert spent == [2] * 5 + [0] * 5


def test_the_bounds_behind_control_hold_for_any_rows():
    """Θ ≤ (1 - λ_n) Ξ and Ξ ≤ Θ / (1 - ρ); after r rounds Ξ is at most ρ^r of what it was."""
    generator = torch.Generator().manual_seed(1)
    for graph in ("ring", "torus", "star", "exponential"):
        w, rho = matrix(graph, 8), 1 - graphs.parse(graph, 8).spectral_gap()
        for _ in range(20):
            x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
            theta = float((w @ x - x).square().sum(1).mean().sqrt())
            assert distance(x) <= theta / (1 - rho) * (1 + 1e-9)
            assert distance(w @ w @ x) <= rho**2 * distance(x) * (1 + 1e-9)


def test_a_mean_now_and_then():
    made = Run("atc + pga:every=4", "ring")
    for t, now in enumerate(made.steps(24)):
        assert (distance(now.x) < 1e-12) == (t % 4 == 3)
    close(after(30, "atc + pga:every=1", "ring"), after(30, "atc", "complete"))


def test_methods_around_others_are_read_and_refused():
    assert method("qgm:beta=0.5 + pga:every=4").describe() == "qgm:beta=0.5 + pga:every=4"
    assert method("qgm + control + pga").around.around.name == "qgm"
    assert method("pga").around.name == "atc"
    assert method("qgm + pga").optimizer == "plain SGD"
    with pytest.raises(
        GossamerError, match="'qgm' does not go around another method; behind [+] may stand pga, control or merge"
    ):
        method("atc + qgm")
    with pytest.raises(GossamerError, match=r"every=0 is out of range; it is in \[1, inf\)"):
        method("pga:every=0")
    assert "needs the same W in every step; use it without pga" in method("choco + pga").check(graphs.parse("ring", 8))
    assert "which 'all-reduce' does not do; leave it out" in method("all-reduce + control").check(graphs.parse("complete", 8))


# --- Compressed messages --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
def test_choco_exact_is_decentralized_sgd_in_both_orders(n):
    close(after(40, "choco:gamma=1,wire=float32", "ring", n=n), after(40, "atc", "ring", n=n), 1e-10)
    made, (h, a), w = Run("choco:gamma=1,wire=float32,order=b", "ring", n=n), of(n), matrix("ring", n)
    x, known = made.x.clone(), torch.zeros(n, COLUMNS, dtype=torch.float64)
    for now in made.steps(40):
        half = x - 0.1 * h * (x - a)
        x = half + w @ known - known
        known = x
        close(now.x, x, 1e-10)


@pytest.mark.parametrize("wire", ["8bits", "4bits", "sign", "top-10%"])
def test_choco_brings_replicas_together_on_any_wire_and_keeps_their_mean(wire):
    made = Run(f"choco:wire={wire}", "ring", h=torch.zeros_like(H))  # pure averaging
    mean, first = made.x.mean(0), distance(made.x)
    for now in made.steps(1500):
        close(now.x.mean(0), mean, 1e-4)
    assert distance(made.x) < 1e-2 * first, wire


@pytest.mark.parametrize("wire", ["8bits", "4bits"])
def test_adagossip_brings_replicas_together(wire):
    made = Run(f"adagossip:wire={wire},gamma=0.3,beta=0.9", "ring", h=torch.zeros_like(H))
    mean, first = made.x.mean(0), distance(made.x)
    for _ in made.steps(800):
        pass
    assert distance(made.x) < 0.05 * first
    assert (made.x.mean(0) - mean).abs().max() < 0.5 * first  # steps of its own for each number: the mean is not kept exactly


def test_adagossip_is_its_equation():
    gamma, beta, w = 0.2, 0.9, matrix("ring", N)
    made = Run(f"adagossip:wire=float32,gamma={gamma},beta={beta}", "ring")
    x = made.x.clone()
    known, v = torch.zeros_like(x), torch.zeros_like(x)
    for t, now in enumerate(made.steps(30)):
        half = x - 0.1 * H * (x - A)
        known = half
        e = w @ known - known
        v = beta * v + (1 - beta) * e**2
        x = half + (gamma / ((v / (1 - beta ** (t + 1))).sqrt() + 1e-8)).clamp(max=1) * e
        close(now.x, x, 1e-9)


def test_adam_with_averages_now_and_then():
    for rule, n in itertools.product(("d-adam", "cd-adam:gamma=1,wire=float32"), SIZES):
        close(after(40, rule, "ring", n=n), after(40, "atc", "ring", n=n), 1e-10)
    for rule in ("d-adam:p=3", "cd-adam:p=3,gamma=1,wire=float32"):
        made, w = Run(rule, "ring"), matrix("ring", N)
        x = made.x.clone()
        for t, now in enumerate(made.steps(20)):
            x = x - 0.1 * H * (x - A)
            x = w @ x if t % 3 == 2 else x
            close(now.x, x, 1e-10)
    why = method("d-adam:p=2").check(graphs.parse("one-peer-ring", 8))
    assert "would skip some rounds of 'one-peer-ring' for ever; use method 'd-adam' and average every 2 steps" in why
    why = method("cd-adam").check(graphs.parse("ring", 8), [torch.optim.SGD([torch.zeros(1)], 0.1)])
    assert why == "method 'cd-adam' is written for Adam and its kin; this is SGD; use 'atc' or 'choco'"
    assert method("cd-adam").check(graphs.parse("ring", 8), [torch.optim.AdamW([torch.zeros(1)], 0.1)]) is None


# --- Directed graphs ------------------------------------------------------------------------------------------------------------------


def falling(t):
    return 0.3 / (1 + t / 50)


def far_off(rule, graph, count=3000):
    made = Run(rule, graph)
    for _ in made.steps(count, falling):
        pass
    return float((made.x - OPTIMUM).abs().max())


@pytest.mark.parametrize("seed", range(5))
def test_push_sum_converges_on_random_directed_graphs_and_averaging_does_not(seed):
    graph = f"directed-random:degree=2.5,seed={seed}"
    assert not graphs.parse(graph, N).rows_sum_to_one
    assert far_off("push-sum", graph) < 0.03
    assert far_off("push-sum:wire=8bits", graph) < 0.03
    assert far_off("atc", graph) > 0.1


@pytest.mark.parametrize("graph", ["directed-random:degree=2.5,seed=3", "directed-ring"])
def test_quantized_push_sum_keeps_sums_on_any_wire(graph):
    for wire, gamma in (("8bits", 1.0), ("4bits", 0.4), ("sign", 0.1)):
        made = Run(f"push-sum:wire={wire},gamma={gamma}", graph, h=torch.zeros_like(H))
        total = made.x.sum(0)
        for now in made.steps(200):
            w = now.now.state["w"].tensors[0]
            close(w.sum(), torch.tensor(float(N), dtype=torch.float64), 1e-10)
            close((w * now.x).sum(0), total, 1e-3)


def test_quantized_push_sum_on_an_exact_wire_is_push_sum():
    graph = "directed-random:degree=2.5,seed=3"
    close(after(60, "push-sum:wire=bfloat16,gamma=1", graph), after(60, "push-sum", graph), 0.05)  # bfloat16 is no exact wire
    exact = method("push-sum:gamma=0.999999999999")  # compresses, on float32: x̂ is x
    close(after(60, exact, graph), after(60, "push-sum", graph), 1e-9)
    for n in SIZES:
        close(after(40, exact, "directed-exponential", n=n), after(40, "push-sum", "directed-exponential", n=n), 1e-9)
        close(after(40, exact, "ring", n=n), after(40, "atc", "ring", n=n), 1e-9)  # columns and rows sum to 1: gossip SGD


def test_compressed_methods_refuse_graphs_that_change():
    assert "needs the same W in every step" in method("choco").check(graphs.parse("one-peer-ring", 8))
    why = method("push-sum:wire=8bits").check(graphs.parse("one-peer-exponential", 8))
    assert (
        "'push-sum:wire=8bits' needs the same W in every step, and 'one-peer-exponential' has 3; use directed-exponential"
        in why
    )
    for text, message in (
        ("choco:p=0", r"p=0 is out of range; it is in \[1, inf\)"),
        ("choco:gamma=1.5", r"gamma=1.5 is out of range; it is in \(0, 1\]"),
        ("push-sum:gamma=0", r"gamma=0.0 is out of range"),
        ("choco:wire=float16", "wire='float16' is not float32, bfloat16, 8bits"),
    ):
        with pytest.raises(GossamerError, match=message):
            method(text)


# --- What a review found -----------------------------------------------------------------------------------------------------------------


def spread_of(algorithm, graph="ring", local_steps=1):
    made = Trainer(task(), Settings(8, 2, 8, algorithm=algorithm, optimizer=Recipe("sgd", 0.1), local_steps=local_steps), graph)
    made.run(until=9)
    return made


def test_methods_that_need_one_w_refuse_local_steps():
    for text in ("choco", "adagossip", "cd-adam", "d2", "push-sum:wire=8bits"):
        advice = f"use '{text}:p=4'" if text in ("choco", "adagossip", "cd-adam") else "leave it at 1"
        with pytest.raises(GossamerError, match=f"local_steps=4: method .* needs the same W in every step.*{advice}"):
            Averaging.of("ring", text, every=4).refuse(schedule("ring", 8))
    for text in ("choco", "choco + pga:every=8", "choco:gamma=0.5 + merge"):
        with pytest.raises(GossamerError, match="method 'choco' has a wire of its own; write 'choco:wire=bfloat16'"):
            Averaging.of("ring", text, "bfloat16").refuse(schedule("ring", 8))
    with pytest.raises(GossamerError, match="local_steps=4"):
        spread_of("choco", local_steps=4)


def test_methods_that_divide_by_the_learning_rate_need_one_of_it():
    groups = [{"params": [torch.zeros(1)], "lr": 0.01}, {"params": [torch.zeros(1)], "lr": 0.1}]
    for name in ("qgm", "gut"):
        why = method(name).check(graphs.parse("ring", 8), [torch.optim.SGD(groups)])
        assert "all parameter groups need the same one; these have 0.01, 0.1" in why
    assert method("decentlam").check(graphs.parse("ring", 8), [torch.optim.SGD(groups)]) is None
    late = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "momentum": 0.9}]
    assert "this is SGD with momentum" in method("tracking").check(graphs.parse("ring", 8), [torch.optim.SGD(late, 0.1)])
    turned = torch.optim.SGD([torch.zeros(1)], 0.1, maximize=True)
    assert "this is SGD with maximize" in method("qgm").check(graphs.parse("ring", 8), [turned])


def test_weight_decay_is_that_of_the_optimizer_under_gut():
    made = Run("gut", "complete", h=torch.zeros_like(H), lr=0.1)
    for group in made.optimizer.optimizers[0].param_groups:
        group["weight_decay"] = 0.01
    before = made.x.mean(0)
    for _ in made.steps(100):
        pass
    close(made.x.mean(0), before * (1 - 0.1 * 0.01) ** 100, 1e-9)


def test_push_sum_is_its_equation_with_any_optimizer():
    """w x <- W (w x - η d(x)), also where d does not grow with the gradient."""
    graph, n = "directed-random:degree=2.5,seed=3", N
    made, w = Run("push-sum", graph), matrix(graph, n)
    made.optimizer.optimizers[0] = torch.optim.Adam(made.optimizer.optimizers[0].param_groups[0]["params"], 0.05)
    plain = [torch.zeros(n, COLUMNS, dtype=torch.float64, requires_grad=True)]
    reference = torch.optim.Adam(plain, 0.05)
    x, weights = made.x.clone(), torch.ones(n, 1, dtype=torch.float64)
    for now in made.steps(30, lambda t: 0.05):
        with torch.no_grad():
            plain[0].copy_(x)
        plain[0].grad = H * (x - A)
        reference.step()
        pushed = weights * x + (plain[0].detach() - x)
        weights, pushed = w @ weights, w @ pushed
        x = pushed / weights
        close(now.x, x, 1e-8)


def test_control_runs_whole_cycles_from_their_first_round():
    """Of the base graph only the product from the first round on is exact."""
    made = Run("atc + control:target=0.001,rounds=3", "base:k=1", n=5)
    for now in made.steps(12):
        assert distance(now.x) <= now.now.notes["control_reached"] + 1e-9
    made = Run("choco:p=4,wire=float32,gamma=1 + control:target=0.001,rounds=60", "ring")
    for now in made.steps(12):
        assert distance(now.x) <= now.now.notes["control_reached"] * (1 + 1e-9)


def test_means_of_all_around_what_does_not_average_are_refused():
    assert "leave one out" in method("all-reduce + pga").check(graphs.parse("complete", 8))
    assert "leave one out" in method("d-adam:p=3 + pga").check(graphs.parse("ring", 8))
    assert "use it without pga" in method("push-sum:wire=8bits + pga").check(graphs.parse("ring", 8))
    with pytest.raises(GossamerError, match="late=-1.0 is out of range"):
        method("control:late=-1")
