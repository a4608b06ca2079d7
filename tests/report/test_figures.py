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
    with pytest.raises(ConfigError, match="2 steps"):
        plot_training([1, 2], [1.0], [], [], tmp_path / "a.png")
    with pytest.raises(ConfigError, match="epsilons"):
        plot_training([1], [1.0], [1], [], tmp_path / "a.png")


RATES = [1e-6, 1e-4, 1e-2, 1.0]
DELTAS = {"zero-out": [0.1, 1e-3, 1e-6, None], "replace-one": [0.2, 2e-3, 1e-5, 1e-8]}


def drawn():
    return {
        "tradeoff": plot_tradeoff(RATES, [1e-5, 1e-3, 0.05, 1.0], [1e-4, 1e-2, 0.5, 1.0]),
        "steps": plot_epsilon_over_steps([1, 5, 10], [0.2, 0.6, 1.0], 1.5),
        "delta": plot_epsilon_curve([0.0, 1.0, 2.0, 3.0], DELTAS, 1e-5, 1.8),
    }


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


def test_pictures_of_the_same_numbers_are_the_same_text():
    """A page can be made again and compared; other numbers make another picture."""
    assert drawn() == drawn()
    assert plot_epsilon_over_steps([1, 5], [0.2, 0.6]) != plot_epsilon_over_steps([1, 5], [0.2, 0.7])
