"""Clipping by named groups: each has its share of C², a parameter is in exactly one, and noise is σC everywhere.

The groups are written out here, and the gradients come from a float64 loop over single units.
"""

import pytest
import torch
from transformers import LlamaForCausalLM

from dpllm import GhostClipper, PrivacyConfig, make_plan
from dpllm.config import ConfigError, load_recipe
from dpllm.engines.guard import UpdateError
from dpllm.ghost.sums import clip_factors
from dpllm.mechanism.clipping import GroupClipping
from dpllm.mechanism.events import Step
from dpllm.mechanism.generators import NoiseSource
from dpllm.mechanism.noise import IndependentStream
from dpllm.privacy.ledger import Ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.report.definition import mechanism
from dpllm.training.step import private_step
from tests.conftest import tiny_llama_config
from tests.mechanism.test_per_layer import METHODS, QUICKSTART, ids_of, losses
from tests.mutations import kills
from tests.training.test_step import Rows, engine_of, loss_of

PARAMETERS = {"rest": "*", "embeddings": ["*embed_tokens*", "lm_head.*"], "norms": "*norm.weight"}
SHARES = {"embeddings": 1, "norms": 0.5, "rest": 2.5}
IN_C = {"embeddings": 0.25**0.5, "norms": 0.125**0.5, "rest": 0.625**0.5}
"""C_k / C of each group, in the order of the names."""


def named_groups(model):
    of = {"embeddings": [], "norms": [], "rest": []}
    for name, _ in model.named_parameters():
        first = "embeddings" if "embed_tokens" in name or name == "lm_head.weight" else "rest"
        of["norms" if name.endswith("norm.weight") else first].append(name)
    assert all(of.values()) and sum(map(len, of.values())) == len(list(model.parameters()))
    return of


def loop(model, ids):
    """Each unit's gradient by autograd: name to (U, ...)."""
    names = [name for name, _ in model.named_parameters()]
    rows = [torch.autograd.grad(losses(model, row[None]).sum(), list(model.parameters())) for row in ids]
    return {name: torch.stack(grads) for name, grads in zip(names, zip(*rows, strict=True), strict=True)}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", METHODS, ids=["default", "instance", "two passes"])
def test_the_sum_is_that_of_a_loop_over_single_units(method, tied):
    """Some groups of a unit are clipped, others are not."""
    model, ids = LlamaForCausalLM(tiny_llama_config(tie_word_embeddings=tied)).double(), ids_of(4)
    of_unit, groups = loop(model, ids), named_groups(model)
    norms = {k: sum(of_unit[n].flatten(1).square().sum(1) for n in names).sqrt() for k, names in groups.items()}
    clip_norm = max(float(norms[group].median()) / IN_C[group] for group in groups) * 0.9
    clipper = GhostClipper(model, clipping=GroupClipping(clip_norm, PARAMETERS, SHARES), norm_method=method)
    result = clipper.backward(losses(model, ids))
    clipper.remove()
    factors = {group: (IN_C[group] * clip_norm / norms[group]).clamp_max(1) for group in groups}
    assert torch.cat(list(factors.values())).lt(1).any() and torch.cat(list(factors.values())).eq(1).any()
    torch.testing.assert_close(result.factors.double(), torch.stack(list(factors.values())), rtol=1e-5, atol=0)
    for group, names in groups.items():
        for name in names:
            expected = torch.einsum("u...,u->...", of_unit[name], factors[group])
            torch.testing.assert_close(model.get_parameter(name).grad, expected, rtol=1e-5, atol=1e-9)


@kills(
    "each group of parameters has the whole clip norm",
    "dpllm/mechanism/clipping.py",
    "self.clip_norm * math.sqrt(share / whole)",
    "self.clip_norm",
)
def test_one_unit_reaches_its_share_in_each_group_and_the_clip_norm_over_all():
    """C_k in each group, C in all, never more. Float32, as models are trained."""
    model, clip_norm = LlamaForCausalLM(tiny_llama_config()), 1e-4
    clipper = GhostClipper(model, clipping=GroupClipping(clip_norm, PARAMETERS, SHARES))
    clipper.backward(losses(model, ids_of(1)))
    clipper.remove()
    for group, names in named_groups(model).items():
        norm = torch.cat([model.get_parameter(name).grad.double().flatten() for name in names]).norm()
        assert float(norm) == pytest.approx(IN_C[group] * clip_norm, rel=1e-4)
    total = float(torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm())
    assert clip_norm * (1 - 1e-4) < total <= clip_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bound_over_all_groups_holds_after_rounding(dtype):
    """Over thirty orders of magnitude, also where all groups are clipped, so that no room is left."""
    count, generator = 37, torch.Generator().manual_seed(3)
    clipping = GroupClipping(0.3, {f"g{n}": f"{n}.*" for n in range(count)}, {f"g{n}": 1.7**n for n in range(count)})
    exponents = torch.empty(count, 500, dtype=dtype).uniform_(-15, 15, generator=generator)
    exponents[:, :100] = exponents[:, :100].abs() + 1
    norm_GU = 10**exponents
    total_U = (clip_factors(clipping, norm_GU.square()).double() * norm_GU.double()).norm(dim=0)
    assert (total_U <= 0.3).all() and (total_U[:100] >= 0.3 * (1 - 1e-5)).all()
    norm_GU = torch.ones(count, 2, dtype=dtype)
    norm_GU[3, 1] = float("inf")
    factors = clip_factors(clipping, norm_GU)
    assert factors[3, 1] == 0 and (factors[:, 0] > 0).all() and int((factors[:, 0] != factors[:, 1]).sum()) == 1


@kills("a parameter may be in two groups", "dpllm/mechanism/clipping.py", "if len(found) > 1:", "if False:")
@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"embeddings": "*embed*"}, "the parameter model.layers.0.self_attn.q_proj.weight is in no group"),
        ({"a": "*embed*", "b": "model.*", "rest": "*"}, "embed_tokens.weight is in the groups a and b"),
        ({"a": "*wte*", "rest": "*"}, "the group a contains no trainable parameter.*such as model.embed_tokens.weight"),
        ({"a": "*EMBED*", "rest": "*"}, "the group a contains no trainable parameter"),
    ],
)
def test_a_parameter_in_no_group_or_in_two_is_refused(parameters, text):
    """Without a group it would have no bound; in two, a share that is not its own."""
    with pytest.raises(ValueError, match=text):
        GhostClipper(LlamaForCausalLM(tiny_llama_config()), clipping=GroupClipping(1.0, parameters))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "needs parameters"),
        ({"parameters": "*"}, r"parameters is '\*'; it must map"),
        ({"parameters": {1: "x", "1": ["y"]}}, "the option name 1 is not text; write it in quotes: '1'"),
        ({"parameters": {"a": []}}, r"parameters.a is \[\]; it must be"),
        ({"parameters": {"a": "*", "b": "*"}}, r'has "\*" for two groups'),
        ({"parameters": {"a": "*"}, "shares": {"b": 1}}, "shares has the groups b, but parameters has a"),
        ({"parameters": {"a": "*"}, "shares": {"a": 0}}, "shares.a is 0; it must be a number above 0"),
    ],
)
def test_options_that_name_no_groups_are_refused(options, text):
    """In one line, when the recipe is read."""
    with pytest.raises(ConfigError, match=text) as raised:
        PrivacyConfig(
            noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=8, clipping={"kind": "groups", **options}
        )
    assert "\n" not in str(raised.value)


def plan_of(**change):
    clipping = {"kind": "groups", "parameters": PARAMETERS, "shares": SHARES}
    settings = {"noise_multiplier": 1.0, "clip_norm": 0.5, "expected_batch_size": 8, "clipping": clipping}
    return make_plan(PrivacyConfig(**{**settings, **change}), 40, 3)


def test_a_plan_is_saved_and_read_back_and_its_report_names_the_groups(tmp_path):
    """Its event is that of DP-SGD; a recipe gives the options as a mapping."""
    plan = plan_of()
    plan.save(tmp_path / PLAN_FILE)
    again = PrivacyPlan.load(tmp_path / PLAN_FILE)
    assert again == plan and again.hash == plan.hash
    assert again.mechanism.clipping == GroupClipping(0.5, PARAMETERS, SHARES)
    assert hash(again.mechanism.clipping) == hash(plan.mechanism.clipping)
    assert isinstance(plan.event, Step) and plan.event == plan_of(clipping="flat").event
    words = (
        "(embeddings to norm 0.25, norms to norm 0.176777, rest to norm 0.395285), and over all groups together to norm"
    )
    assert words in mechanism(again)
    named = load_recipe(QUICKSTART, ["privacy.clipping={kind: groups, parameters: {a: ['*embed*'], b: '*'}}"]).privacy
    assert make_plan(named, 100_000, 3).mechanism.clipping.parameters == (("a", ("*embed*",)), ("b", ("*",)))


class OwnNoise(IndependentStream):
    """Noise of deviation σC_k in each of three groups with equal shares, without the √K."""

    def add_share_(self, name, total, stddev, rank, size):
        super().add_share_(name, total, stddev / 3**0.5, rank, size)


@pytest.mark.parametrize("stream", [IndependentStream, OwnNoise])
def test_every_group_gets_noise_of_deviation_sigma_c(tmp_path, stream):
    """Noise that is scaled to the bound of a group is refused at the first update."""
    model = LlamaForCausalLM(tiny_llama_config())
    plan = plan_of(clipping={"kind": "groups", "parameters": PARAMETERS})
    clipper, optimizer = GhostClipper(model, clipping=plan.mechanism.clipping), torch.optim.SGD(model.parameters(), 0.1)
    ledger, noise = Ledger.create(tmp_path / "ledger.jsonl", plan), stream(NoiseSource(0))
    engine = engine_of(model, lambda _: type(engine_of(model))(optimizer))
    private_step(clipper, Rows().batches([]), loss_of(model), plan, engine, ledger, noise)
    clipper.remove()
    if stream is OwnNoise:
        with pytest.raises(UpdateError, match="norm"):
            optimizer.step()
        return
    for names in named_groups(model).values():
        noise_of_group = torch.cat([model.get_parameter(name).grad.flatten() for name in names])
        assert float(noise_of_group.std()) * 8 == pytest.approx(0.5, abs=4 * 0.5 / (2 * noise_of_group.numel()) ** 0.5)
    optimizer.step()
