"""The methods of room 5, held to their equations: on quadratics in double precision, where optimum and bias are known exactly."""

import contextlib
import itertools
from dataclasses import dataclass

import networkx as nx
import numpy as np
import pytest
import torch
from torch import nn

from gossamer import DecentralizedDataParallel, GossamerError, Recipe, Settings, Trainer, graphs
from gossamer.dbench.spec import build
from gossamer.methods import METHODS, Averaging, GradientTracking, Method, PushSum, Step, method
from gossamer.optim import BlockOptimizer
from gossamer.rows.replicas import Replicas
from gossamer.rows.vector import Gradients, Parameters
from gossamer.transport.mixer import Mixer
from tests.models import OWN_METHODS, mlp, task

N, COLUMNS = 6, 8
GENERATOR = torch.Generator().manual_seed(7)
H = 0.5 + torch.rand(N, COLUMNS, generator=GENERATOR, dtype=torch.float64)
A = torch.randn(N, COLUMNS, generator=GENERATOR, dtype=torch.float64)
OPTIMUM = (H * A).sum(0) / H.sum(0)


class Run:
    """f_i(x) = h_i/2 ‖x - a_i‖² on each of n replicas, with full gradients."""

    def __init__(self, rule, graph="ring", n=N, lr=0.1, h=H, a=A):
        self.rule = method(rule)
        self.graph = graphs.parse(graph, n) if isinstance(graph, str) else graph
        rows = torch.arange(n) % N
        self.h, self.a, self.lr = h[rows], a[rows], lr
        replicas = Replicas(lambda: nn.Linear(4, 2, bias=False).double(), n)
        self.block = replicas.blocks[0]
        assert self.block.x.shape == (n, COLUMNS)
        x = Parameters(replicas.blocks, in_place=False)
        self.now = Step(Mixer(n), x, Gradients(replicas.blocks), lambda: None, lambda t: False)
        self.rule.begin(self.now)
        self.optimizer = BlockOptimizer(Recipe("sgd", lr), replicas)
        with torch.no_grad():
            self.block.x.copy_(torch.arange(n * COLUMNS, dtype=torch.float64).reshape(n, COLUMNS) / 10)

    @property
    def x(self):
        return self.block.x

    def steps(self, count, lr=lambda t: None):
        for _ in range(count):
            now, rule = self.now, self.rule
            now.lr = self.lr if lr(now.t) is None else lr(now.t)
            self.optimizer.set_lr(now.lr)
            now.graph, now.round = self.graph, self.graph.round(now.t)
            with torch.no_grad():
                rule.before_forward(now)
                self.block.grad.copy_(self.h * (self.x - self.a))
                rule.after_backward(now)
                rule.before_update(now)
                self.optimizer.step()
                rule.after_update(now)
            now.t += 1
            yield self


def after(count, *args, **options):
    made = Run(*args, **options)
    for _ in made.steps(count):
        pass
    return made.x.clone()


def close(a, b, tolerance=1e-12):
    assert float((a - b).abs().max()) <= tolerance, float((a - b).abs().max())


@contextlib.contextmanager
def registered():
    """Methods that are defined inside are known for as long as the block lasts."""
    before = dict(METHODS.makers)
    try:
        yield
    finally:
        METHODS.makers.clear()
        METHODS.makers.update(before)


# --- Plain averaging and all-reduce -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", ["ring", "exponential", "complete"])
def test_decentralized_sgd_has_the_bias_of_its_closed_form(graph):
    w = torch.from_numpy(graphs.parse(graph, N).matrix())
    for order in ("atc", "awc"):
        found = after(4000, order, graph)
        for column in range(COLUMNS):
            h, a, lr, one = H[:, column], A[:, column], 0.1, torch.eye(N, dtype=torch.float64)
            step = lr * torch.diag(h)
            # The fixed point of x = W (x - η H (x - a)), or of x = W x - η H (x - a).
            left, right = (one - w @ (one - step), w @ (lr * h * a)) if order == "atc" else (one - w + step, lr * h * a)
            close(found[:, column], torch.linalg.solve(left, right), 1e-10)
        if graph != "complete":
            assert (found - OPTIMUM).abs().max() > 1e-2  # a bias


def test_all_reduce_keeps_replicas_equal_and_finds_the_optimum():
    made = Run("all-reduce", "complete")
    with torch.no_grad():
        made.block.x.fill_(1.0)
    for now in made.steps(600):
        assert (now.x == now.x[0]).all()
    close(made.x, OPTIMUM.expand(N, -1))


# --- Quasi-global momentum ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", ["ring", "one-peer-exponential", "complete"])
@pytest.mark.parametrize("reduced", ["qgm:beta=0", "qgm:mu=1"])
def test_without_momentum_qgm_is_decentralized_sgd(graph, reduced):
    assert torch.equal(after(50, reduced, graph), after(50, "atc", graph))


def test_alone_qgm_is_momentum_with_a_known_factor():
    beta, mu, lr = 0.9, 0.9, 0.05
    made, q = Run(f"qgm:beta={beta},mu={mu}", "ring", n=1, lr=lr), torch.zeros(1, COLUMNS, dtype=torch.float64)
    x = made.x.clone()
    for now in made.steps(200):
        g = H[:1] * (x - A[:1])
        x = x - lr * (g + beta * q)
        q = (mu + (1 - mu) * beta) * q + (1 - mu) * g
        close(now.x, x)


def test_qgm_measures_momentum_in_units_of_the_gradient():
    """The displacement is divided by the learning rate of the very step; with a rate of 0 nothing is divided."""
    rates = [0.1, 0.01, 0.0, 0.05]
    made, m = Run("qgm:beta=0.5,mu=0.5", "complete"), torch.zeros_like(A)
    x = made.x.clone()
    for t, now in enumerate(made.steps(len(rates), lambda t: rates[t])):
        before, lr = x, rates[t]
        x = (x - lr * (H * (x - A) + 0.5 * m)).mean(0).expand(N, -1)
        if lr:
            m = 0.5 * m + 0.5 * (before - x) / lr
        close(now.x, x)


# --- Gradient tracking --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", ["ring", "one-peer-exponential", "torus"])
def test_tracking_has_no_bias_and_its_mean_is_that_of_the_gradients(graph):
    made = Run("tracking", graph, lr=0.05)
    for now in made.steps(3000):
        close(now.now.state["y"].tensors[0].mean(0), now.now.state["g"].tensors[0].mean(0), 1e-11)
    close(made.x, OPTIMUM.expand(N, -1), 1e-9)


def test_after_a_change_of_members_tracking_goes_on_without_a_bias():
    made = Run("tracking", "ring", lr=0.05)
    for _ in made.steps(20):
        pass
    made.now.state = {name: vector.take(torch.tensor([0, 1, 2, 3, 4, 0])) for name, vector in made.now.state.items()}
    with torch.no_grad():
        made.rule.members_changed(made.now)
    for _ in made.steps(3000):
        pass
    close(made.x, OPTIMUM.expand(N, -1), 1e-9)


def test_without_its_correction_tracking_would_keep_a_bias():
    """The test above can fail."""
    with registered():

        @dataclass(frozen=True)
        class Careless(GradientTracking):
            name = "careless"

            def members_changed(self, s):
                pass

        made = Run(Careless(), "ring", lr=0.05)
        for _ in made.steps(20):
            pass
        made.now.state = {name: vector.take(torch.tensor([0, 1, 2, 3, 4, 0])) for name, vector in made.now.state.items()}
        made.rule.members_changed(made.now)
        for _ in made.steps(3000):
            pass
        assert (made.x - OPTIMUM).abs().max() > 1e-3


# --- CHOCO --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", ["ring", "exponential", "complete"])
def test_choco_with_an_exact_wire_is_decentralized_sgd(graph):
    close(after(60, "choco:gamma=1,wire=float32", graph), after(60, "atc", graph), 1e-10)


@pytest.mark.parametrize("wire", ["8bits", "bfloat16", "float32"])
def test_choco_keeps_the_mean_and_brings_replicas_together(wire):
    made = Run(f"choco:wire={wire}", "ring", h=torch.zeros_like(H))  # pure averaging
    mean, apart = made.x.mean(0), []
    for now in made.steps(120):
        close(now.x.mean(0), mean, 1e-5)
        apart.append(float((now.x - mean).abs().max()))
    assert apart[-1] < 1e-3 * apart[0]


def test_the_copies_are_what_the_neighbours_know():
    made = Run("choco", "ring")
    w = torch.from_numpy(made.graph.matrix())
    for now in made.steps(30):
        copy, mixed = (now.now.state[name].tensors[0] for name in ("copy", "mixed"))
        close(mixed, w @ copy, 1e-5)
        assert (now.x - copy).abs().max() > 0


def test_each_vector_that_travels_is_counted():
    made = {name: Run(name, "ring") for name in ("atc", "tracking")}
    for run in made.values():
        for _ in run.steps(4):
            pass
    assert made["tracking"].now.bytes == 2 * made["atc"].now.bytes > 0


def test_choco_counts_the_bytes_of_its_wire():
    made = {wire: Run(f"choco:wire={wire}", "ring") for wire in ("float32", "8bits")}
    for run in made.values():
        for _ in run.steps(3):
            pass
    assert made["float32"].now.bytes == 3 * graphs.ring(N).round(0).cost(COLUMNS * 8)
    assert made["8bits"].now.bytes == 3 * 2 * 129  # two neighbours; a row of up to 128 numbers takes 129 bytes


# --- Push-sum -----------------------------------------------------------------------------------------------------------------

DIRECTED = "directed-random:degree=2.5,seed=3"


def falling(t):
    return 0.3 / (1 + t / 50)


def apart(rule, graph=DIRECTED, count=6000):
    made = Run(rule, graph)
    for _ in made.steps(count, falling):
        pass
    return float((made.x - OPTIMUM).abs().max())


def test_push_sum_finds_the_optimum_on_a_directed_graph_and_averaging_does_not():
    graph = graphs.parse(DIRECTED, N)
    assert graph.columns_sum_to_one
    assert not graph.rows_sum_to_one
    assert len({int((graph.matrix()[:, j] > 0).sum()) for j in range(N)}) > 1  # unequal numbers of receivers
    assert apart("push-sum") < 0.02
    assert apart("atc") > 0.2


def test_without_the_division_push_sum_is_wrong():
    with registered():

        @dataclass(frozen=True)
        class Undivided(PushSum):
            name = "undivided"

            def after_update(self, s):
                s.mix(s.x).into(s.x)

        assert apart(Undivided()) > 0.2


def test_pushed_weights_sum_to_n_and_numbers_to_their_sum():
    made = Run("push-sum", DIRECTED, h=torch.zeros_like(H))
    total = made.x.sum(0)
    for now in made.steps(100):
        w = now.now.state["w"].tensors[0]
        close(w.sum(), torch.tensor(float(N), dtype=torch.float64))
        close((w * now.x).sum(0), total, 1e-10)
    close(made.x, (total / N).expand(N, -1), 1e-8)
    assert (w - 1).abs().max() > 0.05


def test_on_an_undirected_graph_push_sum_is_decentralized_sgd():
    close(after(60, "push-sum", "ring"), after(60, "atc", "ring"))


# --- All methods --------------------------------------------------------------------------------------------------------------


def keeps_the_mean(name):
    """In adagossip each number has a step of its own, in qg-adam each replica."""
    return not method(name).graphless and name not in ("adagossip", "qg-adam")


def graph_for(rule):
    return DIRECTED if rule.sums == "columns" else "complete" if rule.graphless else "ring"


@pytest.mark.parametrize("name", OWN_METHODS)
def test_replicas_that_are_equal_and_see_the_same_are_as_one_alone(name):
    compressed = name in ("choco", "cd-adam", "adagossip")  # 8 bits round at random, and on each replica in another way
    text = f"{name}:wire=float32" if compressed else name
    for graph, n in itertools.product(("ring", "complete"), (2, 5, 8)):
        made = Run(text, graph, n=n, h=H[:1].expand(N, -1), a=A[:1].expand(N, -1))
        with torch.no_grad():
            made.block.x.copy_(made.block.x[:1].expand(n, -1))
        for now, alone in zip(made.steps(40), Run(text, graph, n=1).steps(40), strict=True):
            close(now.x, alone.x.expand(n, -1))


@pytest.mark.parametrize("name", [name for name in OWN_METHODS if keeps_the_mean(name)])
def test_without_gradients_the_mean_stays(name):
    for n in (1, 2, 5, 8):
        made = Run(name, "ring", n=n, h=torch.zeros_like(H))
        mean = made.x.mean(0)
        for now in made.steps(30):
            close(now.x.mean(0), mean, 1e-5 if name in ("choco", "cd-adam") else 1e-12)


@pytest.mark.parametrize("name", OWN_METHODS)
def test_a_resumed_run_is_the_same_run(name, tmp_path):
    rule = method(name)
    toy = task(lambda: mlp().double())
    toy = type(toy)("toy", toy.build, (toy.train[0].double(), toy.train[1]), (toy.test[0].double(), toy.test[1]))
    recipe = Recipe("adam", 0.001) if rule.optimizer == "Adam" else Recipe("sgd", 0.05)
    settings = Settings(5, 2, 8, algorithm=name, optimizer=recipe, backend="loop")
    whole = Trainer(toy, settings, graph_for(rule))
    whole.run(until=14)
    first = Trainer(toy, settings, graph_for(rule))
    first.run(until=7)
    first.save(tmp_path / "state")
    second = Trainer(toy, settings, graph_for(rule))
    assert second.load(tmp_path / "state")
    second.run(until=14)
    assert torch.equal(whole.replicas.blocks[0].x, second.replicas.blocks[0].x)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("name", OWN_METHODS)
def test_any_number_of_replicas_works(name, n):
    made = after(5, name, "ring", n=n)
    assert torch.isfinite(made).all()


# --- Names, options, refusals -------------------------------------------------------------------------------------------------


def test_a_method_without_a_name_is_an_error_at_its_definition():
    with pytest.raises(GossamerError, match=r"class Nameless: a method needs a name of its own, as in name = 'my-method'"):

        class Nameless(GradientTracking):
            pass


def test_two_methods_of_one_name_are_an_error_at_the_definition_of_the_second():
    with pytest.raises(GossamerError, match=r"class Mine: there is a method 'qgm' already, gossamer\.methods\.momentum\.Quasi"):

        class Mine(Method):
            name = "qgm"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("qmg", r"there is no method 'qmg'; did you mean 'qgm'\?"),
        (
            "qgm:bata=1",
            r"method 'qgm' has no parameter 'bata'; it takes beta \(default 0.9\), mu \(default 0.9\), nesterov \(default false\), local_step \(default 1\); did you mean 'beta'\?",
        ),
        ("qgm:beta=much", r"method 'qgm:beta=much': beta='much' is not a number"),
        (
            "choco:wire=3bits",
            r"method 'choco:wire=3bits': wire='3bits' is not float32, bfloat16, 8bits, 4bits, sign, top-1%, top-10%",
        ),
        ("qgm:beta", r"method 'qgm:beta': 'beta' is not of the form key=value"),
        (7, r"method=7: a method is a name such as 'atc', or a Method"),
    ],
)
def test_a_wrong_method_is_one_line_that_says_what_would_be_right(text, message):
    with pytest.raises(GossamerError, match=f"^{message}$"):
        method(text)


def test_a_method_is_written_as_it_is_read():
    for text in ("awc", "qgm", "qgm:beta=0.5", "choco:gamma=0.3,wire=bfloat16"):
        assert method(text).describe() == text
    assert method("dsgd-atc").describe() == "atc"
    assert method("DDP").describe() == method("centralized").describe() == "all-reduce"


@pytest.mark.parametrize(
    ("rule", "graph", "recipe", "message"),
    [
        ("atc", DIRECTED, Recipe(), "rows of W do not sum to 1.*push-sum"),
        ("tracking", DIRECTED, Recipe(), "rows of W do not sum to 1.*push-sum"),
        ("choco", "one-peer-exponential", Recipe(), "the same W in every step.*ring"),
        ("qgm", "ring", Recipe("adam"), "needs SGD without momentum; this is Adam"),
        ("tracking", "ring", Recipe("sgd", 0.1, {"momentum": 0.9}), "this is SGD with momentum"),
    ],
)
def test_what_a_method_can_not_work_with_is_refused_with_advice(rule, graph, recipe, message):
    with pytest.raises(GossamerError, match=message):
        Trainer(task(mlp), Settings(N, 1, 8, algorithm=rule, optimizer=recipe), graph)
    kind = torch.optim.Adam if recipe.name == "adam" else torch.optim.SGD
    if graph in ("ring", "one-peer-exponential") and recipe.name == "adam":
        model = DecentralizedDataParallel(mlp(), "complete", method=rule)
        with pytest.raises(GossamerError, match=message):
            model.gossip(kind(model.parameters(), 0.1))


def test_a_graph_that_does_not_keep_the_mean_is_refused_by_methods_that_need_it():
    uneven = graphs.from_matrix(np.array([[0.5, 0.5, 0], [0, 0.5, 0.5], [0.2, 0.2, 0.6]]))
    for rule in ("qgm", "push-sum"):
        assert "keeps the mean" in method(rule).check(uneven)
    assert method("atc").check(uneven) is None


# --- Directed graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["directed-ring", "directed-exponential", "directed-random", "directed-random:degree=3,seed=5"]
)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 13])
def test_directed_graphs_lose_nothing_and_reach_everybody(name, n):
    if "degree=3" in name and n < 4:
        pytest.skip("as many others are not there")
    if name == "directed-random" and n == 2:
        name += ":degree=1"
    graph = graphs.parse(name, n)
    w = graph.matrix()
    assert np.allclose(w.sum(axis=0), 1)
    assert (np.linalg.matrix_power(w, 4 * n) > 0).all()
    assert 0 < graph.spectral_gap() <= 1


def test_a_directed_graph_of_networkx_splits_a_row_between_its_receivers():
    own = nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)])
    graph = graphs.from_networkx(own, sums="columns")
    assert np.allclose(graph.matrix()[:, 0], 1 / 3)
    assert graph.columns_sum_to_one
    assert not graph.rows_sum_to_one
    assert graphs.from_networkx(own).rows_sum_to_one
    with pytest.raises(GossamerError, match="sums='both' is not known"):
        graphs.from_networkx(own, sums="both")


@pytest.mark.parametrize(("n", "degree"), [(2, 2), (5, 0.5), (5, 5)])
def test_a_degree_that_is_out_of_range_is_named(n, degree):
    with pytest.raises(GossamerError, match=f"degree={degree:g} is out of range for n={n}; it is from 1 to {n - 1}"):
        graphs.directed_random(n, degree=degree)


# --- One description of how to average ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("ring", "ring"),
        ("ring, atc", "ring, atc"),
        ("ring, dsgd-atc, H=1", "ring, atc"),
        ("one-peer-exponential, qgm:beta=0.5, bfloat16, H=4", "one-peer-exponential, qgm:beta=0.5, bfloat16, H=4"),
        ("allreduce", "all-reduce"),
        ("centralized", "all-reduce"),
    ],
)
def test_a_way_to_average_has_one_spelling(text, spelled):
    made = Averaging.parse(text)
    assert made.describe() == spelled
    assert Averaging.parse(spelled) == made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "ring, sideways",
            "method 'ring, sideways': 'sideways' is not known; after a graph may stand a method .*bfloat16, or H=4",
        ),
        ("ring, H=0", "local_steps=0: workers average every that many steps, so it is at least 1"),
        ("all-reduce, H=4", "local_steps=4: method 'all-reduce' averages gradients in every step; leave it at 1"),
        ("ring, qgm:beta=x", "method 'qgm:beta=x': beta='x' is not a number"),
    ],
)
def test_a_wrong_way_to_average_is_one_line(text, message):
    with pytest.raises(GossamerError, match=message):
        Averaging.parse(text)


def test_a_spec_says_what_the_library_says():
    spec = build(
        {
            "name": "x",
            "replicas": [4],
            "methods": [
                "ring, qgm:beta=0.5, bfloat16, H=4",
                {"name": "b", "graph": "ring", "wire": "bfloat16", "local_steps": 2},
            ],
            "task": {"name": "mine", "epochs": 1, "batch": 4},
        }
    )
    settings = [spec.settings(cell) for cell in spec.cells()]
    assert [(s.algorithm, s.wire, s.local_steps) for s in settings] == [
        ("qgm:beta=0.5", "bfloat16", 4),
        ("dsgd-atc", "bfloat16", 2),
    ]
    assert spec.methods[0].topology == "ring"
    with pytest.raises(GossamerError, match="wire='bfloat17' is not known; rows travel as 'float32' or 'bfloat16'"):
        build({**spec.model_dump(), "methods": [{"name": "ring", "wire": "bfloat17"}]})


def test_a_trainer_averages_every_so_many_steps():
    toy = task(lambda: mlp().double())
    toy = type(toy)("toy", toy.build, (toy.train[0].double(), toy.train[1]), (toy.test[0].double(), toy.test[1]))
    settings = Settings(4, 1, 8, optimizer=Recipe("sgd", 0.05), local_steps=3, backend="loop", init="different")
    trainer = Trainer(toy, settings, "complete")
    together = []
    for step in range(6):
        trainer.run(until=step + 1)
        x = trainer.replicas.blocks[0].x
        together.append(bool(torch.allclose(x, x[:1], atol=1e-12)))
    assert together == [False, False, True, False, False, True]
    with pytest.raises(GossamerError, match="'ada-auto' decides by itself how often to average"):
        Trainer(toy, settings, "ada-auto")
