"""The picture of a run is written, and says what the run was."""

import pytest
from matplotlib import image

from dpllm.config import ConfigError
from dpllm.figures import plot_training


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
