"""The trainer's decoder: the same results for three frameworks, every cut, and split and whole backward."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from llama import config
from llama.config import AdamW, Model, Part, initial_parameters
from llama.data import Batches, corpus
from llama.stage import framework

from xvcomm.errors import ArgumentError, XvcommError

MODEL = Model(layers=3, dim=24, heads=6, kv_heads=2, hidden=40, context=10)
WHOLE = Part(first=0, stop=3, embeds=True, predicts=True)
OTHERS = ("torch", "jax")


@pytest.fixture
def lively(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm gains far from one, so that a gradient that ignores them is detected."""
    draw = config.draw

    def uneven(model: Model, name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
        value = draw(model, name, shape, seed)
        return value if value.ndim > 1 else value + np.linspace(-0.5, 0.5, shape[0], dtype=np.float32)

    monkeypatch.setattr(config, "draw", uneven)


def build(name: str, part: Part):
    if name != "numpy":
        pytest.importorskip(name)
    return framework(name)(MODEL, part, 3, AdamW(lr=1e-2))


def tokens(step: int = 0) -> tuple[np.ndarray, np.ndarray]:
    windows = Batches(corpus(1 << 16), 4, MODEL.context, seed=1).step(step)
    return windows[:, :-1], windows[:, 1:]


def arrays(values: dict) -> dict[str, np.ndarray]:
    return {name: np.asarray(value.detach() if hasattr(value, "detach") else value) for name, value in values.items()}


def assert_same(left: dict, right: dict, tolerance: float) -> None:
    left, right = arrays(left), arrays(right)
    assert left.keys() == right.keys()
    for name in left:
        scale = np.abs(left[name]).max()
        np.testing.assert_allclose(right[name], left[name], rtol=0, atol=tolerance * max(scale, 1e-6), err_msg=name)


@pytest.mark.parametrize("other", OTHERS)
def test_numpy_gradients_are_those_of_automatic_differentiation(other: str, lively: None) -> None:
    x, targets = tokens()
    hand, auto = build("numpy", WHOLE), build(other, WHOLE)
    y, saved = hand.forward(x, targets)
    y_auto, saved_auto = auto.forward(x, targets)
    assert float(y) == pytest.approx(float(y_auto), rel=1e-6)
    _, gradients = hand.backward(saved, hand.scalar(0.5))
    _, gradients_auto = auto.backward(saved_auto, auto.scalar(0.5))
    assert_same(gradients_auto, gradients, 2e-5)


def test_numpy_gradient_is_the_slope_of_the_loss(lively: None) -> None:
    x, targets = tokens()
    part = build("numpy", WHOLE)
    _, saved = part.forward(x, targets)
    _, gradients = part.backward(saved, part.scalar(1.0))
    for name in ("embedding", "1.attention.key", "2.mlp.gate", "0.attention.norm"):
        start, step = part.parameters[name].copy(), 1e-2 * gradients[name] / np.linalg.norm(gradients[name])
        losses = []
        for sign in (1, -1):
            part.parameters[name] = start + sign * step
            losses.append(float(part.forward(x, targets)[0]))
        part.parameters[name] = start
        assert losses[0] - losses[1] == pytest.approx(2e-2 * np.linalg.norm(gradients[name]), rel=2e-2, abs=1e-6), name


@pytest.mark.parametrize("name", ("numpy", *OTHERS))
def test_cutting_the_model_changes_nothing(name: str, lively: None) -> None:
    x, targets = tokens()
    whole = build(name, WHOLE)
    y, saved = whole.forward(x, targets)
    _, expected = whole.backward(saved, whole.scalar(1.0))
    cuts = [Part(0, 1, True, False), Part(1, 2, False, False), Part(2, 3, False, True)]
    parts = [build(name, part) for part in cuts]
    stored, h = [], x
    for part in parts:
        h, kept = part.forward(h, targets if part.part.predicts else None)
        stored.append(kept)
    assert float(h) == pytest.approx(float(y), rel=1e-6)
    gradients, dy = {}, parts[-1].scalar(1.0)
    for part, kept in zip(reversed(parts), reversed(stored), strict=True):
        dy, found = part.backward(kept, dy)
        gradients |= found
    assert_same(dict(sorted(expected.items())), dict(sorted(gradients.items())), 1e-5)


@pytest.mark.parametrize("name", ("numpy", *OTHERS))
@pytest.mark.parametrize("part", (Part(0, 1, True, False), Part(1, 2, False, False), Part(2, 3, False, True)))
def test_two_halves_of_backward_make_the_whole(name: str, part: Part, lively: None) -> None:
    x, targets = tokens()
    made = build(name, part)
    shape = (*x.shape, MODEL.dim)
    random = np.random.default_rng(0)
    feed = x if part.embeds else made.arrays.asarray(random.normal(size=shape).astype(np.float32))
    dy = made.scalar(1.0) if part.predicts else made.arrays.asarray(random.normal(size=shape).astype(np.float32))
    dx, expected = made.backward(made.forward(feed, targets if part.predicts else None)[1], dy)
    _, saved = made.forward(feed, targets if part.predicts else None)
    halves = made.backward_input(saved, dy), made.backward_weight(saved, dy)
    assert_same(expected, halves[1], 1e-6)
    if part.embeds:
        return
    assert_same({"dx": dx}, {"dx": halves[0]}, 1e-6)


@pytest.mark.parametrize("other", OTHERS)
def test_frameworks_train_alike(other: str) -> None:
    runs = []
    for name in ("numpy", other):
        part, losses = build(name, WHOLE), []
        for step in range(12):
            x, targets = tokens(step)
            y, saved = part.forward(x, targets)
            losses.append(float(y))
            part.update(part.backward(saved, part.scalar(1.0))[1], step + 1)
        runs.append(losses)
    assert runs[0][-1] < 0.8 * runs[0][0]
    np.testing.assert_allclose(runs[1], runs[0], rtol=1e-4)


def test_optimizer_is_adamw_as_torch_knows_it() -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(7)
    ours = AdamW(lr=1e-2, weight_decay=0.3)
    value, mean, square = random.normal(size=(5, 4)), np.zeros((5, 4)), np.zeros((5, 4))
    theirs = torch.tensor(value, requires_grad=True)
    optimizer = torch.optim.AdamW([theirs], lr=ours.lr, betas=ours.betas, eps=ours.eps, weight_decay=ours.weight_decay)
    for step in range(1, 6):
        gradient = random.normal(size=(5, 4)) * 10.0**-step
        value, mean, square = ours.update(value, gradient, mean, square, step)
        theirs.grad = torch.tensor(gradient)
        optimizer.step()
        np.testing.assert_allclose(value, theirs.detach().numpy(), rtol=1e-12)


def test_parameters_do_not_depend_on_the_cut() -> None:
    whole = initial_parameters(MODEL, WHOLE, 5)
    middle = initial_parameters(MODEL, Part(1, 2, False, False), 5)
    assert middle and all(np.array_equal(value, whole[name]) for name, value in middle.items())
    assert not np.array_equal(whole["1.mlp.up"], whole["2.mlp.up"])
    assert sum(value.size for value in whole.values()) == MODEL.parameters


def test_batches_are_the_same_everywhere_and_differ_by_step() -> None:
    text = corpus(1 << 16)
    batches = Batches(text, 6, 32, seed=2)
    assert np.array_equal(batches.step(4), Batches(corpus(1 << 16), 6, 32, seed=2).step(4))
    assert not np.array_equal(batches.step(4), batches.step(5))
    assert batches.step(0).shape == (6, 33)
    assert b"def " in text.tobytes()


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"heads": 5}, "multiple of heads"),
        ({"kv_heads": 4}, "divide evenly"),
        ({"layers": 0}, "layers is 0"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], words: str) -> None:
    defaults = {"layers": 3, "dim": 24, "heads": 6, "kv_heads": 2, "hidden": 40, "context": 10}
    with pytest.raises(ArgumentError, match=words):
        Model(**(defaults | sizes))


def test_unknown_and_missing_frameworks_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(XvcommError, match="numpy, torch, jax"):
        framework("tensorflow")
    monkeypatch.setattr("llama.stage.util.find_spec", lambda name: None)
    with pytest.raises(XvcommError, match=r"pip install 'xvcomm\[jax\]'"):
        framework("jax")
