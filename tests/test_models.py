"""The models have the sizes that people know, and run as replicas under every backend."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gossamer import GossamerError
from gossamer.apps.models import (
    GPT,
    GPT2_SMALL,
    GPT2_SMALL_NO_BIAS,
    GPT_NANO,
    CifarResNet,
    DenseNet,
    GPTShape,
    ResNet50,
    WordLSTM,
    cnn,
    mlp,
    norm_layer,
)
from gossamer.rows.replicas import Replicas


def word_lstm_size(v, e, h, tied=False):
    """Embedding, two layers of four gates with two biases each, output."""
    return v * e + 4 * h * (e + h + 2) + 4 * h * (h + h + 2) + (0 if tied else v * h) + v


SIZES = [
    (lambda: CifarResNet(20), 269_722),
    (lambda: CifarResNet(20, norm="group"), 269_722),
    (lambda: CifarResNet(8), 75_290),
    (DenseNet, 769_162),
    (ResNet50, 25_557_032),
    (lambda: ResNet50(norm="group"), 25_557_032),
    (cnn, 20_538),
    (lambda: mlp(784, 10), 784 * 128 + 128 + 128 * 128 + 128 + 1290),
    (lambda: GPT(GPT2_SMALL), 124_439_808),
    (lambda: GPT(GPT2_SMALL_NO_BIAS), 124_373_760),
    (GPT, 220_544),
    (lambda: WordLSTM(33278, 650, 650), word_lstm_size(33278, 650, 650)),
    (lambda: WordLSTM(33278, 200, 200, tied=True), word_lstm_size(33278, 200, 200, tied=True)),
    (lambda: WordLSTM(1000, 50, 70), word_lstm_size(1000, 50, 70)),
]


@pytest.mark.parametrize(("make", "expected"), SIZES)
def test_parameter_counts(make, expected):
    with torch.device("meta"):
        assert sum(p.numel() for p in make().parameters()) == expected


def test_the_layers_of_resnet50():
    with torch.device("meta"):
        model = ResNet50()
        x = torch.zeros(2, 3, 224, 224)
    seen = {}
    for name in ("conv1", "layer1", "layer2", "layer3", "layer4", "fc"):
        model.get_submodule(name).register_forward_hook(lambda _, __, out, name=name: seen.update({name: tuple(out.shape)}))
    model(x)
    assert seen == {
        "conv1": (2, 64, 112, 112),
        "layer1": (2, 256, 56, 56),
        "layer2": (2, 512, 28, 28),
        "layer3": (2, 1024, 14, 14),
        "layer4": (2, 2048, 7, 7),
        "fc": (2, 1000),
    }
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    expected = {
        "conv1.weight": (64, 3, 7, 7),
        "layer1.0.conv1.weight": (64, 64, 1, 1),
        "layer1.0.conv2.weight": (64, 64, 3, 3),
        "layer1.0.conv3.weight": (256, 64, 1, 1),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.2.conv1.weight": (64, 256, 1, 1),
        "layer2.0.conv1.weight": (128, 256, 1, 1),
        "layer2.0.downsample.0.weight": (512, 256, 1, 1),
        "layer2.3.conv2.weight": (128, 128, 3, 3),
        "layer3.5.conv3.weight": (1024, 256, 1, 1),
        "layer4.0.conv2.weight": (512, 512, 3, 3),
        "layer4.0.downsample.0.weight": (2048, 1024, 1, 1),
        "layer4.2.conv3.weight": (2048, 512, 1, 1),
        "layer4.2.bn3.weight": (2048,),
        "fc.weight": (1000, 2048),
        "fc.bias": (1000,),
    }
    assert {name: shapes[name] for name in expected} == expected
    assert [len(model.get_submodule(f"layer{k}")) for k in (1, 2, 3, 4)] == [3, 4, 6, 3]
    assert len(shapes) == 161
    strided = {name: m.stride for name, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.stride != (1, 1)}
    first = [f"layer{k}.0.{part}" for k in (2, 3, 4) for part in ("conv2", "downsample.0")]  # the 3×3, not the 1×1 before it
    assert strided == dict.fromkeys(["conv1", *first], (2, 2))


def test_densenet_100s_stages():
    with torch.device("meta"):
        model = DenseNet()
        x = torch.zeros(1, 3, 32, 32)
    shapes = []
    for part in model.parts:
        part.register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape[1:])))
    assert model(x).shape == (1, 10)
    assert len(shapes) == 50
    assert [shapes[k] for k in (15, 16, 32, 33, 49)] == [(216, 32, 32), (108, 16, 16), (300, 16, 16), (150, 8, 8), (342, 8, 8)]


def test_starts():
    """Usual initialisations: signals neither vanish nor explode."""
    torch.manual_seed(0)
    he = CifarResNet(20).blocks[8].conv2.weight
    assert he.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.03)
    gpt = GPT()
    assert gpt.layers[0].up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert gpt.layers[0].down.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert gpt.out.weight is gpt.embed.weight
    tokens = torch.randint(0, 256, (4, 64))
    loss = F.cross_entropy(gpt(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(5.545, abs=0.1)  # log 256: it knows nothing yet


def test_gpt_looks_at_the_past_only():
    gpt = GPT(GPTShape(50, 12, 2, 2, 16)).eval()
    a = torch.randint(0, 50, (3, 12))
    b = a.clone()
    b[:, 7:] = (b[:, 7:] + 1) % 50
    torch.testing.assert_close(gpt(a)[:, :7], gpt(b)[:, :7])
    assert not torch.allclose(gpt(a)[:, 7:], gpt(b)[:, 7:])
    assert gpt(a[:, :5]).shape == (3, 5, 50)


def test_attention_written_out_is_torchs():
    attention = GPT().layers[0].attention
    q, k, v = torch.randn(3, 2, 4, 20, 16).double()
    torch.testing.assert_close(attention.attend(q, k, v, True), attention.attend(q, k, v, False))


# --- As replicas -----------------------------------------------------------------------------------------------------------


def images(size, channels=3):
    return lambda g: (torch.randn(3, 4, channels, size, size, generator=g), torch.randint(0, 10, (3, 4), generator=g))


def texts(vocabulary, length=6):
    def make(g):
        return tuple(torch.randint(0, vocabulary, (3, 4, length), generator=g) for _ in range(2))

    return make


def loss(model, x, y):
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


SMALL_GPT = GPTShape(20, 6, 2, 2, 8)
REPLICATED = {
    "mlp": (lambda: mlp(48, 10, (6,)), images(4)),
    "cnn": (lambda: cnn(width=2, size=8), images(8, 1)),
    "cnn-group": (lambda: cnn(width=4, size=8, norm="group"), images(8, 1)),
    "resnet8": (lambda: CifarResNet(8, width=4), images(8)),
    "resnet8-group": (lambda: CifarResNet(8, width=4, norm="group"), images(8)),
    "densenet": (lambda: DenseNet(10, 4), images(8)),
    "densenet-group": (lambda: DenseNet(10, 3, norm="group"), images(8)),
    "resnet50": (lambda: ResNet50(10, 2, blocks=(1, 2, 1, 1)), images(64)),
    "resnet50-group": (lambda: ResNet50(10, 4, "group", (1, 1, 1, 1)), images(32)),
    "lstm": (lambda: WordLSTM(30, 6, 5, batch=4), texts(30)),
    "lstm-tied": (lambda: WordLSTM(30, 6, 6, tied=True, batch=4), texts(30)),
    "gpt": (lambda: GPT(SMALL_GPT), texts(20)),
    "gpt-no-bias": (lambda: GPT(GPTShape(20, 6, 1, 2, 8, bias=False, tied=False)), texts(20)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", REPLICATED)
def test_every_backend_computes_the_loops_gradients(name):
    build, data = REPLICATED[name]
    batch = data(torch.Generator().manual_seed(3))
    # In float64: BatchNorm over few samples makes some gradients of float32 differ in the fourth digit, by any backend.
    built = lambda: build().double()  # noqa: E731
    batch = tuple(t.double() if t.is_floating_point() else t for t in batch)
    expected = Replicas(built, 3, init="different", backend="loop")
    losses = [expected.gradients(loss, batch, step) for step in (0, 1)]
    for backend in ("vmap", "tape", "vmap:2", "tape:2"):
        replicas = Replicas(built, 3, init="different", backend=backend)
        for step in (0, 1):
            torch.testing.assert_close(replicas.gradients(loss, batch, step), losses[step], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(replicas.blocks[0].grad, expected.blocks[0].grad, rtol=1e-5, atol=1e-7)
        for key, stacked in replicas.buffers.items():
            torch.testing.assert_close(stacked, expected.buffers[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "build", [lambda: WordLSTM(30, 6, 5, dropout=0.5, batch=4), lambda: GPT(GPTShape(30, 6, 1, 2, 8, dropout=0.3))]
)
@pytest.mark.parametrize("backend", ["loop", "vmap", "tape"])
def test_dropout_runs_under_every_backend_and_differs_between_replicas(build, backend):
    replicas = Replicas(build, 3, backend=backend)
    tokens = torch.randint(0, 30, (1, 4, 6)).expand(3, 4, 6)
    losses = replicas.gradients(loss, (tokens, tokens))
    assert len(set(losses.tolist())) == 3
    with replicas.replica(0) as model:
        assert torch.equal(model(tokens[0]), model(tokens[0]))


# --- The state of the LSTM -------------------------------------------------------------------------------------------------


def of_torch(model, tokens, state):
    """The same by torch's own LSTM, with its own carried state."""
    lstm = nn.LSTM(7, 9, 2, batch_first=True)
    lstm.load_state_dict(model.lstm.state_dict())
    out, (h, c) = lstm(model.embed(tokens), state)
    return model.out(out), (h.detach(), c.detach()), lstm


@pytest.mark.parametrize("backend", ["loop", "vmap", "tape", "tape:2"])
def test_training_carries_each_replicas_state_as_a_plain_loop_does(backend):
    """Three consecutive windows with an update after each, against nn.LSTM that is handed (h, c) detached."""
    build = lambda: WordLSTM(40, 7, 9, batch=4)  # noqa: E731
    replicas = Replicas(build, 3, init="different", backend=backend)
    modules = []
    for i in range(3):
        with replicas.replica(i) as row:
            modules.append(copy.deepcopy(row))
    states = [(torch.zeros(2, 4, 9), torch.zeros(2, 4, 9)) for _ in range(3)]
    text = torch.randint(0, 40, (3, 4, 16), generator=torch.Generator().manual_seed(1))
    block = replicas.blocks[0]
    for window in range(3):
        x, y = text[:, :, 5 * window : 5 * window + 5], text[:, :, 5 * window + 1 : 5 * window + 6]
        losses = replicas.gradients(loss, (x, y), window)
        for i, module in enumerate(modules):
            logits, states[i], lstm = of_torch(module, x[i], states[i])
            expected = F.cross_entropy(logits.flatten(0, 1), y[i].flatten())
            expected.backward()
            torch.testing.assert_close(losses[i], expected.detach(), rtol=1e-5, atol=1e-6)
            for name, p in [*((f"lstm.{n}", p) for n, p in lstm.named_parameters()), ("embed.weight", module.embed.weight)]:
                torch.testing.assert_close(block.tensors(block.grad)[name][i], p.grad, rtol=1e-4, atol=1e-6)
            for name, value in zip("hc", states[i], strict=True):
                torch.testing.assert_close(replicas.buffers[name][i], value, rtol=1e-5, atol=1e-6)
            with torch.no_grad():
                for name, p in module.named_parameters():
                    p.sub_(0.5 * block.tensors(block.grad)[name][i])
                    p.grad = None
        block.x.sub_(0.5 * block.grad)
    assert not torch.allclose(replicas.buffers["h"][0], replicas.buffers["h"][1])


@pytest.mark.parametrize("backend", ["loop", "vmap", "tape"])
def test_a_fresh_start_is_one_from_zeros(backend):
    def fresh_loss(model, x, y, fresh):
        return F.cross_entropy(model(x, fresh).flatten(0, 1), y.flatten())

    build = lambda: WordLSTM(30, 6, 5, batch=4)  # noqa: E731
    g = torch.Generator().manual_seed(0)
    batches = [texts(30)(g) for _ in range(2)]
    all_at_once = torch.tensor([True, False, True])
    one_text = torch.tensor([[True, False, False, False]] * 3)
    seen = {}
    for name, fresh in (("carried", None), ("replicas", all_at_once), ("texts", one_text)):
        replicas = Replicas(build, 3, init="different", backend=backend)
        replicas.gradients(loss, batches[0])
        if fresh is None:
            replicas.gradients(loss, batches[1])
        else:
            replicas.gradients(fresh_loss, (*batches[1], fresh))
        seen[name] = replicas.buffers["h"].clone()
    zeroed = Replicas(build, 3, init="different", backend=backend)
    zeroed.gradients(loss, batches[1])
    start = zeroed.buffers["h"]  # [replica, layer, text, hidden]
    torch.testing.assert_close(seen["replicas"], torch.where(all_at_once[:, None, None, None], start, seen["carried"]))
    torch.testing.assert_close(seen["texts"], torch.where(one_text[:, None, :, None], start, seen["carried"]))
    assert not torch.allclose(start, seen["carried"])


def test_the_cell_written_out_is_torchs():
    model = WordLSTM(30, 6, 5, layers=3, batch=4).double()
    x, state = torch.randn(4, 7, 6).double(), (torch.randn(3, 4, 5).double(), torch.randn(3, 4, 5).double())
    torch.testing.assert_close(model.written_out(x, state), model.lstm(x, state))


def test_evaluation_starts_from_zeros_and_read_carries():
    model = WordLSTM(30, 6, 5, batch=4)
    model(torch.randint(0, 30, (4, 9)))
    assert model.h.any()
    before = model.h.clone()
    model.eval()
    tokens = torch.randint(0, 30, (2, 12))  # any number of texts
    whole = model(tokens)
    torch.testing.assert_close(whole, model(tokens))
    first, state = model.read(tokens[:, :5])
    second, _ = model.read(tokens[:, 5:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(model(tokens[:, 5:]), second)
    assert torch.equal(model.h, before)


def test_the_averaged_model_leaves_local_buffers_out():
    replicas = Replicas(lambda: nn.Sequential(WordLSTM(30, 6, 5, batch=4)), 3, init="different", backend="loop")
    replicas.gradients(loss, texts(30)(torch.Generator()))
    state = replicas.mean_state()
    assert torch.equal(state["0.h"], replicas.buffers["0.h"][0])
    torch.testing.assert_close(state["0.out.weight"], replicas.blocks[0].tensors(replicas.blocks[0].x)["0.out.weight"].mean(0))
    with replicas.averaged() as model:
        model.train()
        model(torch.zeros(4, 2, dtype=torch.long))  # what somebody does with it does not reach the replicas
    assert torch.equal(state["0.h"], replicas.buffers["0.h"][0])


BAD = [
    (lambda: CifarResNet(19), "depth 19"),
    (lambda: DenseNet(12), "depth 12"),
    (lambda: norm_layer("layer"), "norm 'layer'"),
    (lambda: WordLSTM(30, 6, 5, tied=True), "embedding=6 and hidden=5"),
    (lambda: WordLSTM(30, 6, 5, batch=4)(torch.zeros(3, 2, dtype=torch.long)), "3 texts at a time.*batch=4"),
    (lambda: GPT(GPTShape(20, 6, 2, 3, 8)), "width=8 does not split over 3 heads"),
    (lambda: GPT(GPT_NANO)(torch.zeros(1, 65, dtype=torch.long)), "65 tokens.*context=64"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_mistakes_are_named(make, message):
    with pytest.raises(GossamerError, match=message):
        make()
