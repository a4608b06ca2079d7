"""Tensor parallelism on two processes: norms, sums and noise of one process, and refusals by name."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from tests.distributed.tensor import CASES
from tests.distributed.world import run


@pytest.mark.deep
def test_a_divided_model_releases_the_clipped_sum_of_one_process(tmp_path):
    """Full and LoRA, tied, with heads and biases that all processes hold: norms and sums of float64 autograd."""
    results = run(tmp_path, "tests.distributed.tensor:sums", root=tmp_path)
    assert results[0].keys() == set(CASES) and results[1] == results[0]
    for of_norms, of_sum, one_unit, engine in results[0].values():
        assert engine == "TensorParallel"
        assert of_norms < 1e-6  # norms are returned in float32
        assert of_sum < 1e-9
        assert 1 - 1e-6 < one_unit < 1 + 1e-9  # rounding of the weights, from whose movement it is computed


@pytest.mark.deep
def test_each_slice_gets_its_owners_noise_and_replicas_get_one(tmp_path):
    """σC in every entry, independent between processes and steps; bit-equal where all processes hold the entries."""
    results = run(tmp_path, "tests.distributed.tensor:noise", root=tmp_path)
    steps = np.stack(results[0]["released"])
    halves = [abs(np.corrcoef(*np.array_split(step[: steps.shape[1] // 2 * 2], 2))[0, 1]) for step in steps]
    between = np.abs(np.corrcoef(steps) - np.eye(len(steps))).max()
    variance, normal = float(steps.var()), scipy.stats.kstest(steps.ravel(), "norm").pvalue
    assert abs(variance - 1) < 6 * (2 / steps.size) ** 0.5
    assert max(*halves, between) < 6 / (steps.shape[1] // 2) ** 0.5
    assert normal > 1e-8
    for one, other in zip(results[0]["common"], results[1]["common"], strict=True):
        assert one.any() and np.array_equal(one, other)


REFUSED = {
    "a plan that leaves q_norm out": "q_norm.weight is the same on all processes, and they see different gradients",
    "a plan that adds a whole norm up": "all processes see the same gradient of it",
    "an untested style": "has the style 'packed_colwise' in tp_plan, which was not compared with one process",
    "other rows": "differ in",
    "other inputs": "differ in the inputs of the model",
    "other labels": "differ in",
    "other losses": "computed different losses for the same rows",
    "other units": "differ in the units of the rows",
    "sums in .grad": "The model is tensor-parallel: a process holds parts of parameters",
    "fewer heads than processes": "has 1 heads, which 2 processes cannot share",
    "wrapped": "The model is tensor-parallel, and wrapped in DistributedDataParallel",
    "by torch": "has no tp_plan of transformers",
    "an edit on one process": "The processes hold different parameters",
    "a copied module": "is a copy of",
    "two dimensions": "layers.0.more is divided as",
    "another mesh": "other parallelism beside tensor parallelism was not compared",
    "a quantised base": "private sums were not verified for tensor parallelism",
    "the Trainer": "arallelism",  # refused by accelerate on CPUs, and by engine_for elsewhere
    "an average": "averages of its slices were not compared",
    "adapters as PEFT makes them": "in_features is 16, and its weight takes 32 features",
    "two backward passes": "Two backward passes",
    "automatic size": "found by each process separately",
}


@pytest.mark.deep
def test_what_would_mix_rows_or_count_twice_is_refused_by_name(tmp_path):
    """The same error on every process, and before the step is released."""
    results = run(tmp_path, "tests.distributed.tensor:refusals", root=tmp_path)
    for result in results:
        assert result.pop("dropout") is None  # processes with the same rows draw the same masks
        assert result.keys() == REFUSED.keys()
        for name, error in result.items():
            assert error is not None and REFUSED[name] in error[1], (name, error)
