"""The pictures of a run are drawn, and say what the run was."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from matplotlib import image

from dpllm.config import ConfigError
from dpllm.report.figures import plot_epsilon_curve, plot_epsilon_over_steps, plot_tradeoff, plot_training


def test_the_picture_shows_losses_epsilon_and_held_out_points(tmp_path):
    """A PNG with something on it, whatever is known of the run."""
    path = plot_training(
        [1, 2, 3], [3.0, 2.5, 2.0], [1, 2, 3], [1.0, 1.5, 2.0], tmp_path / "a.png", [(0, 3.1), (3, 2.1)]
    )
    pixels = image.imread(path)
    assert pixels.shape[0] > 500 and pixels.shape[1] > 700
    assert pixels.std() > 0.05
    bare = image.imread(plot_training([1, 2, 3], [3.0, 2.5, 2.0], [], [], tmp_path / "b.png"))
    assert (pixels != bare).any()


def test_a_run_without_noise_is_drawn_as_not_private(tmp_path):
    """An infinite ε is not a curve; the picture says so instead of failing."""
    infinite = float("inf")
    private = plot_training([1, 2], [3.0, 2.0], [1, 2], [0.5, 1.0], tmp_path / "private.png")
    not_private = plot_training([1, 2], [3.0, 2.0], [1, 2], [infinite, infinite], tmp_path / "not_private.png")
    assert (image.imread(private) != image.imread(not_private)).any()


def test_lists_of_different_length_are_refused(tmp_path):
    """A loss without a step is a mistake of the caller."""
    with pytest.raises(ConfigError, match="2 steps have 1 losses"):
        plot_training([1, 2], [1.0], [], [], tmp_path / "a.png")
    with pytest.raises(ConfigError, match="1 steps have 0 epsilons"):
        plot_training([1], [1.0], [1], [], tmp_path / "a.png")


RATES = [1e-6, 1e-4, 1e-2, 1.0]
DELTAS = {"zero-out": [0.1, 1e-3, 1e-6, None], "replace-one": [0.2, 2e-3, 1e-5, 1e-8]}


def drawn():
    return {
        "tradeoff": plot_tradeoff(RATES, [1e-5, 1e-3, 0.05, 1.0], [1e-4, 1e-2, 0.5, 1.0]),
        "steps": plot_epsilon_over_steps([1, 5, 10], [0.2, 0.6, 1.0], 1.5),
        "delta": plot_epsilon_curve([0.0, 1.0, 2.0, 3.0], DELTAS, 1e-5, 1.8),
    }


def words(svg):
    return [text.text for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_pictures_are_parts_of_a_page():
    """Well-formed, nothing to load, no fixed size, no date, the page's colours, and no name used twice in a page."""
    pictures = drawn()
    for svg in pictures.values():
        root = ElementTree.fromstring(svg)
        assert root.tag.endswith("}svg") and "width" not in root.attrib and "viewBox" in root.attrib
        assert not re.search(r"<metadata|<\?xml|<!DOCTYPE|Matplotlib|20\d\d-", svg)
        assert set(re.findall(r"https?://[^\"]*", svg)) <= {
            "http://www.w3.org/1999/xlink",
            "http://www.w3.org/2000/svg",
        }
        assert "var(--orange" in svg and "currentColor" in svg and "#6b6b6b" not in svg and "#000000" not in svg
        assert set(re.findall(r"(?:url\(#|href=\"#)([\w.-]+)", svg)) <= set(re.findall(r'id="([^"]+)"', svg))
    names = [name for svg in pictures.values() for name in re.findall(r'id="([^"]+)"', svg)]
    assert len(names) == len(set(names))


def test_pictures_of_the_same_numbers_are_the_same_text():
    """A page can be made again and compared; other numbers make another picture."""
    assert drawn() == drawn()
    assert plot_epsilon_over_steps([1, 5], [0.2, 0.6]) != plot_epsilon_over_steps([1, 5], [0.2, 0.7])


def test_pictures_name_their_lines():
    """Each line has its name, and axes are labelled in plain powers of ten."""
    tradeoff, steps, delta = (words(svg) for svg in drawn().values())
    assert {"blind guessing", "from ε and δ alone", "10⁻⁶", "1"} <= set(tradeoff)
    assert {"ε spent", "budget", "private step"} <= set(steps)
    assert {"zero-out", "replace-one", "stated in this report", "δ", "ε"} <= set(delta)
    assert "budget" not in words(plot_epsilon_over_steps([1, 5], [0.2, 0.6]))
    alone = plot_epsilon_curve([0.0, 1.0], {"zero-out": [0.1, 0.01], "replace-one": [None, None]}, 0.01, 1.0)
    assert "replace-one" not in words(alone)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plot_tradeoff(RATES, RATES, RATES[1:]),
        lambda: plot_tradeoff([], [], []),
        lambda: plot_epsilon_over_steps([1], [0.1, 0.2]),
        lambda: plot_epsilon_curve([0.0, 1.0], DELTAS, 1e-5, 1.0),
    ],
)
def test_curves_of_different_length_are_refused(draw):
    """A value without its counterpart is a mistake of the caller, and nothing can't be drawn."""
    with pytest.raises(ConfigError, match="lists of one length that are not empty"):
        draw()
