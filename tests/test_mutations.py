"""The tests can fail: deleting what privacy rests on turns them red.

Each mutation is one edit to a copy of the package; the tests named beside it are run on the copy, and at least one of
them has to fail. ``python -m tests.test_mutations`` prints which ones.
"""

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import children, tiers

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutation:
    """One edit, and the tests that must notice it."""

    what: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    quick: bool = False
    """Whether ``make test`` runs it as well; ``make test-deep`` runs all."""
    needs: str | None = None
    """Module of an extra without which its tests are skipped."""


MUTATIONS = [
    Mutation(
        "a recipe with rows of TRL's shapes is audited on other rows",
        "dpllm/config/recipe.py",
        'if recipe.train.get("trainer") is not None:',
        "if False:",
        ("tests/training/test_trl_recipe.py::test_programs_that_make_rows_themselves_refuse_such_a_recipe",),
    ),
    Mutation(
        "options of TRL's trainers are not checked before the records are read",
        "dpllm/training/preflight.py",
        'refuse_options(args, table_of(section.get("trainer")))',
        "pass",
        ("tests/training/test_trl_recipe.py::test_options_are_refused_before_anything_is_read",),
        needs="trl",
    ),
    Mutation(
        "texts are generated from a folder that does not verify, beside its ε",
        "dpllm/cli/generating.py",
        "    failed = standing.failed\n",
        "    failed = None\n",
        ("tests/cli/test_generating.py::test_a_folder_that_does_not_verify_is_refused",),
    ),
    Mutation(
        "a run without privacy has a guarantee beside its texts",
        "dpllm/report/standing.py",
        "if plan.seeded or contents.seeded or math.isinf(spent):",
        "if False:",
        ("tests/report/test_standing.py::test_a_run_without_privacy_has_no_guarantee",),
    ),
    Mutation(
        "the padding of a batch of prompts is seen",
        "dpllm/models/generation.py",
        "[0] * (longest - len(row)) + [1] * len(row)",
        "[1] * longest",
        ("tests/models/test_generation.py::test_a_text_does_not_depend_on_the_batch",),
    ),
    Mutation(
        "the batch of a new recipe follows the number of records of a user",
        "dpllm/tuning/new_recipe.py",
        "batch, steps = rules.batch_and_steps(num_units)",
        "batch, steps = rules.batch_and_steps(len(records))",
        ("tests/tuning/test_new_recipe.py::test_settings_do_not_depend_on_lengths_or_on_rows_per_user",),
    ),
    Mutation(
        "a new recipe is computed from the weights of a private run",
        "dpllm/tuning/new_recipe.py",
        "    refuse_private_start(wishes.model, wishes.start_is_independent)\n",
        "",
        ("tests/tuning/test_new_recipe.py::test_a_model_that_saw_private_records_is_refused",),
    ),
    Mutation(
        "options of TrainingArguments that break the guarantee are accepted",
        "dpllm/training/argument_table.py",
        "if entry.kind == REFUSED and hasattr(args, name):",
        "if False:",
        ("tests/training/test_argument_table.py::test_a_refused_option_is_refused_before_data_are_read",),
        quick=True,
    ),
    Mutation(
        "an option that nobody has looked at is accepted",
        "dpllm/training/argument_table.py",
        "    for name in unlisted(type(args), table):",
        "    for name in ():",
        ("tests/training/test_argument_table.py::test_an_unknown_option_is_refused_unless_it_has_its_default",),
    ),
    Mutation(
        "a loss that sorts all pairs is accepted",
        "dpllm/models/preference.py",
        "            if kind in COUPLED:",
        "            if False:",
        ("tests/models/test_preference.py::test_losses_that_couple_pairs_are_refused_with_the_reason",),
    ),
    Mutation(
        "the reference of a pair is that of the first pair of its microbatch",
        "dpllm/data/preferences.py",
        "self.reference[numbers]",
        "self.reference[numbers[:1].repeat(len(numbers))]",
        ("tests/data/test_preferences.py",),
        needs="trl",
    ),
    Mutation(
        "a reference of a private run needs no declaration",
        "dpllm/training/dpo_trainer.py",
        "self._reference_points += check_start(ref_model, args.output_dir, independent)",
        "pass",
        ("tests/training/test_dpo_trainer.py::test_a_reference_that_was_trained_privately_is_refused_unless_declared",),
        needs="trl",
    ),
    Mutation(
        "a reference that came with the data raises no question",
        "dpllm/training/dpo_trainer.py",
        "self._reference_points = [GIVEN_REFERENCE]",
        "pass",
        ("tests/training/test_dpo_trainer.py::test_the_reference_is_the_model_at_the_start_or_another_one_or_given",),
        needs="trl",
    ),
    Mutation(
        "prompts that pairs share raise no question",
        "dpllm/training/dpo_trainer.py",
        "*([SHARED_PROMPTS] if self._shares_prompts else [])",
        "",
        ("tests/training/test_dpo_trainer.py::test_prompts_that_pairs_share_are_an_open_point_unless_users_are_units",),
        needs="trl",
    ),
    Mutation(
        "a pair's second sequence is not counted in its tokens",
        "dpllm/data/preferences.py",
        "return longest * self.SEQUENCES",
        "return longest",
        ("tests/data/test_preferences.py",),
        needs="trl",
    ),
    Mutation(
        "options of TRL that couple rows are accepted",
        "dpllm/training/argument_table.py",
        "if entry.kind == REFUSED and hasattr(args, name):",
        "if False:",
        ("tests/training/test_sft_trainer.py::test_options_are_refused_before_data_are_read",),
        needs="trl",
    ),
    Mutation(
        "the column of users is lost when examples are prepared",
        "dpllm/training/sft_trainer.py",
        "keep = [privacy.unit_column] if privacy.unit_column else []",
        "keep = []",
        ("tests/training/test_sft_trainer.py::test_users_are_units_and_the_model_may_be_a_folder_with_an_adapter",),
        needs="trl",
    ),
    Mutation(
        "a column 'record' of raw examples makes one unit of several",
        "dpllm/data/supervised.py",
        "        if parts is None:  # tokenized",
        "        if True:  # tokenized",
        ("tests/data/test_supervised.py",),
        needs="trl",
    ),
    Mutation(
        "the mark that a tokenizer cut long texts is lost when rows are prepared",
        "dpllm/data/supervised.py",
        "for name in MARKS_OF_UNITS if",
        "for name in MARKS_OF_UNITS[:1] if",
        ("tests/training/test_sft_trainer.py::test_pieces_of_longer_texts_need_the_number_of_their_text",),
        needs="trl",
    ),
    Mutation(
        "an example has the keys of other examples",
        "dpllm/data/examples.py",
        "own_value(value) if _has_objects(value) else value",
        "value",
        ("tests/data/test_supervised.py",),
        needs="trl",
    ),
    Mutation(
        "a chat has the keys of other chats",
        "dpllm/data/chat.py",
        "return [own_value(message) for message in chat]",
        "return [{k: v for k, v in message.items() if v is not None} for message in chat]",
        ("tests/data/test_rows.py",),
    ),
    Mutation(
        "an adapter is merged with any weights",
        "dpllm/training/merge_run.py",
        "        _refuse_another_base(run, recipe.model)\n",
        "",
        ("tests/cli/test_releasing.py::test_an_adapter_is_not_added_to_other_weights",),
    ),
    Mutation(
        "private pairs may be declared public",
        "dpllm/data/own_rows.py",
        'sorted(name for name in row if name.endswith("_input_ids"))',
        "[]",
        ("tests/data/test_own_rows.py",),
    ),
    Mutation(
        "the shape of the first example is taken for that of all",
        "dpllm/data/examples.py",
        "if conversational not in (None, chats[0]):",
        "if False:",
        ("tests/data/test_supervised.py",),
        needs="trl",
    ),
    Mutation(
        "scales of quantised weights are not watched",
        "dpllm/training/checks/fixed.py",
        "for attribute, tensor in scales_of(module).items():",
        "for attribute, tensor in ():",
        ("tests/models/test_quantization.py::test_scales_of_quantised_weights_are_watched_like_the_weights",),
    ),
    Mutation(
        "a quantised weight may be trained",
        "dpllm/ghost/rules.py",
        "if is_packed(parameter):",
        "if False:",
        ("tests/models/test_quantization.py::test_a_quantised_weight_is_never_trained",),
    ),
    Mutation(
        "weights that were calibrated with texts raise no question",
        "dpllm/models/starting_point.py",
        "points += calibration_points(model)",
        "pass",
        ("tests/training/test_quantized.py::test_a_base_quantised_with_texts_is_an_open_point",),
    ),
    Mutation(
        "a recipe may ask for outlier columns of LLM.int8",
        "dpllm/config/quantization.py",
        "if self.outlier_threshold:",
        "if False:",
        ("tests/config/test_quantization.py",),
    ),
    Mutation(
        "the merged model is not named in the ledger",
        "dpllm/training/trainer.py",
        "note_release(self.ledger, folder / MERGED_FOLDER, {})",
        "pass",
        ("tests/training/test_quantized.py::test_a_changed_merged_model_is_found",),
    ),
    Mutation(
        "the training rows may be declared public for evaluation",
        "dpllm/data/own_rows.py",
        "if shared and 2 * shared > len(dataset):",
        "if False:",
        ("tests/data/test_own_rows.py",),
    ),
    Mutation(
        "in bfloat16, a small loss allows any difference of norms",
        "dpllm/training/checks/differences.py",
        "min(_LOOSEST, _LARGEST / tolerance)",
        "_LOOSEST",
        ("tests/training/checks/test_differences.py::test_coarse_arithmetic_hides_no_coupling_of_small_losses",),
    ),
    Mutation(
        "numbers in objects of the standard library are passed over",
        "dpllm/training/checks/kept.py",
        "isinstance(one, _SPACES) or ",
        "",
        ("tests/training/checks/test_kept_objects.py",),
    ),
    Mutation(
        "methods of a Trainer of one's own are no open point",
        "dpllm/training/outlets.py",
        "for name in own_methods(self):",
        "for name in ():",
        ("tests/training/test_outlets.py::test_methods_of_ones_own_that_run_within_training_are_an_open_point",),
    ),
    Mutation(
        "the clip is deleted",
        "dpllm/mechanism/clipping.py",
        "return (self.clip_norm / norm_GU).clamp_max(1)",
        "return 0 * norm_GU + 1",
        ("tests/ghost/test_factors.py", "tests/training/test_step.py", "tests/ghost/test_book.py"),
        quick=True,
    ),
    Mutation(
        "rows may take each other's images",
        "dpllm/ghost/hooks.py",
        "        refuse_shared_media(kwargs, self._placeholders)\n",
        "",
        ("tests/ghost/test_media.py",),
    ),
    Mutation(
        "a row with several images beside one with none",
        "dpllm/training/microbatches.py",
        "    _check_media(inputs, rows, collate)\n",
        "",
        ("tests/training/test_media.py",),
    ),
    Mutation(
        "the noise is deleted",
        "dpllm/mechanism/generators.py",
        "block.add_(draw(block), alpha=noise_stddev)",
        "pass",
        ("tests/mechanism/test_generators.py", "tests/training/test_step.py"),
        quick=True,
    ),
    Mutation(
        "the noise is not added in the step",
        "dpllm/training/release.py",
        "            self._noise.add_share_(name, total, stddev, *self._engine.division.of_noise(parameter))\n",
        "",
        ("tests/training/test_step.py",),
    ),
    Mutation(
        "every process draws all of the noise",
        "dpllm/training/release.py",
        "self._noise.add_share_(name, total, stddev, *self._engine.division.of_noise(parameter))",
        "self._noise.add_share_(name, total, stddev, 0, 1)",
        ("tests/distributed/test_engines.py::test_noise_is_drawn_exactly_once[ddp]",),
    ),
    Mutation(
        "the noise is added in every microbatch",
        "dpllm/training/release.py",
        "                if last:  # each",
        "                if True:  # each",
        ("tests/training/test_step.py",),
    ),
    Mutation(
        "the sums of the processes are not added up",
        "dpllm/engines/ddp.py",
        "        dist.all_reduce(flat)\n",
        "",
        ("tests/distributed/test_engines.py::test_noise_is_drawn_exactly_once[ddp]",),
    ),
    Mutation(
        "DeepSpeed's mean over processes is not undone",
        "dpllm/engines/deepspeed.py",
        "engine.backward(self.processes.size * scale * ",
        "engine.backward(scale * ",
        ("tests/distributed/test_engines.py::test_noise_is_drawn_exactly_once[zero2]",),
    ),
    Mutation(
        "trained parameters in a leaf module of ZeRO-3 are accepted",
        "dpllm/engines/zero3.py",
        "if leaf is not None and parameter.requires_grad:",
        "if False:",
        ("tests/engines/test_deepspeed_config.py::test_trained_parameters_in_a_leaf_module_are_refused_by_name",),
    ),
    Mutation(
        "DeepSpeed makes a leaf module of a mixture of experts",
        "dpllm/engines/zero3.py",
        'leaves.setdefault("classes", [])',
        "pass",
        (
            "tests/engines/test_deepspeed_config.py::"
            "test_the_leaf_modules_that_deepspeed_chooses_by_itself_are_switched_off",
        ),
    ),
    Mutation(
        "frozen experts that ZeRO-3 partitioned call as many modules as experts have tokens",
        "dpllm/ghost/hooks.py",
        "self._handles += attach_partitioned(model, host)",
        "pass",
        ("tests/ghost/test_experts.py::test_frozen_experts_that_are_partitioned_call_the_same_modules_for_any_tokens",),
    ),
    Mutation(
        "a stack of experts with LoRA is not gathered by the module that computes it",
        "dpllm/engines/zero3.py",
        "deepspeed.zero.register_external_parameter(wrapper.get_base_layer(), stack)",
        "pass",
        ("tests/distributed/test_engines.py::test_mixtures_of_experts_are_exact_on_engines[zero3-unfetched]",),
    ),
    Mutation(
        "each process draws units of its own",
        "dpllm/training/checks/turns.py",
        "return self._processes.int64s_from_main(drawn, count)",
        "return draw_on_main()",
        ("tests/distributed/test_agreement.py",),
    ),
    Mutation(
        "the guard looks away",
        "dpllm/engines/guard.py",
        "            raise _refusal(",
        "            _refusal(",
        ("tests/engines/test_guard.py",),
        quick=True,
    ),
    Mutation(
        "norms and sums are rounded under autocast",
        "dpllm/ghost/kernels.py",
        'torch.autocast("cpu", enabled=False),\n        torch.autocast(accelerator, enabled=False),',
        "contextlib.nullcontext(),",
        ("tests/ghost/test_kernels.py",),
    ),
    Mutation(
        "padding rows get weight 1",
        "dpllm/ghost/book.py",
        "weight_B = (one.rows.unit_B >= 0).to(loss_B.dtype)",
        "weight_B = torch.ones_like(loss_B)",
        ("tests/ghost/test_book.py", "tests/training/test_step.py"),
    ),
    Mutation(
        "one unit at a time, a unit is not clipped",
        "dpllm/ghost/per_unit.py",
        "total.add_(gradient.to(total.dtype), alpha=factor)",
        "total.add_(gradient.to(total.dtype))",
        ("tests/ghost/test_per_unit.py",),
        quick=True,
    ),
    Mutation(
        "one unit at a time, no noise is added",
        "dpllm/training/release.py",
        "                if last:  # each",
        "                if last and not self._clipper.one_unit:  # each",
        ("tests/training/test_per_unit.py::test_the_noise_is_added_once",),
        quick=True,
    ),
    Mutation(
        "one unit at a time, padding rows get weight 1",
        "dpllm/ghost/per_unit.py",
        "(unit_B >= 0).to(losses)",
        "torch.ones_like(losses)",
        ("tests/ghost/test_per_unit.py",),
    ),
    Mutation(
        "one unit at a time, a call of padding rows only is a unit",
        "dpllm/ghost/per_unit.py",
        "        if num_units == 0:\n            return self._nothing(losses)\n",
        "",
        ("tests/ghost/test_per_unit.py",),
    ),
    Mutation(
        "one unit at a time, the rows that a unit had before are forgotten",
        "dpllm/ghost/per_unit.py",
        "                held[key] += wide",
        "                held[key] = wide",
        ("tests/ghost/test_per_unit.py", "tests/training/test_per_unit.py"),
    ),
    Mutation(
        "one unit at a time, a unit that is not finite stays in the sum",
        "dpllm/ghost/per_unit.py",
        "        if factor == 0:",
        "        if False:",
        ("tests/ghost/test_per_unit.py",),
    ),
    Mutation(
        "one unit at a time, a call gets rows of several units",
        "dpllm/training/microbatches.py",
        "return [(unit, unit + 1) for unit in range(len(rows_U))]",
        "return [(0, len(rows_U))] if len(rows_U) else []",
        ("tests/training/test_per_unit.py",),
    ),
    Mutation(
        "one unit at a time, the product is rounded to the parameters' dtype",
        "dpllm/ghost/per_unit.py",
        "total.add_(gradient.to(total.dtype), alpha=factor)",
        "total.add_((gradient * factor).to(total.dtype))",
        ("tests/ghost/test_per_unit.py",),
    ),
    Mutation(
        "running statistics are kept from unit to unit",
        "dpllm/ghost/per_unit.py",
        'elif getattr(module, "track_running_stats", False):',
        "elif False:",
        ("tests/ghost/test_per_unit.py",),
    ),
    Mutation(
        "padding rows stay in the sum",
        "dpllm/ghost/passes.py",
        "torch.where(unit_B >= 0, factor_U[unit_B.clamp_min(0)] if factor_U.numel() else 0, 0)",
        "torch.where(unit_B >= 0, factor_U[unit_B.clamp_min(0)] if factor_U.numel() else 1.0, 1.0)",
        ("tests/ghost/test_book.py", "tests/training/test_step.py"),
    ),
    Mutation(
        "the cross term of a tied head is deleted",
        "dpllm/ghost/contributions.py",
        "sq_norm_U = sq_norm_U + 2 * _cross(x, y, rows, sq_norm_U)",
        "pass",
        ("tests/ghost/test_contributions.py",),
        quick=True,
    ),
    Mutation(
        "the cross term between a unit's rows is deleted",
        "dpllm/ghost/contributions.py",
        "        sq_norm_G, mass_G = norm_method.outer_norms("
        "units.fold(group[0].input), [units.fold(c.grad) for c in group])\n",
        "        each = norm_method.outer_norms(group[0].input, [c.grad for c in group])\n"
        "        sq_norm_G, mass_G = (x_B[units.rows_GN].sum(1) for x_B in each)\n",
        ("tests/ghost/test_contributions.py",),
    ),
    Mutation(
        "the norm of experts is deleted",
        "dpllm/ghost/routed.py",
        "both_U2.index_add_(0, part.number_M // self.num_experts, torch.stack([sq_norm_M, slack * mass_M], 1))",
        "pass",
        ("tests/ghost/test_routed.py",),
        quick=True,
    ),
    Mutation(
        "a unit's tokens in different experts are one segment",
        "dpllm/ghost/routed.py",
        "unit_B1 * self.num_experts + self.index_BS, -1",
        "unit_B1 * self.num_experts + 0 * self.index_BS, -1",
        ("tests/ghost/test_routed.py",),
    ),
    Mutation(
        "padding behind a segment counts",
        "dpllm/ghost/routed.py",
        " * is_real_MN[:, :, None]",
        "",
        ("tests/ghost/test_routed.py",),
    ),
    Mutation(
        "the tokens of an expert all get the factor of the first row",
        "dpllm/ghost/routed.py",
        "factor_B[row_N]",
        "factor_B[0 * row_N]",
        ("tests/ghost/test_routed.py",),
    ),
    Mutation(
        "the backward pass reads the stack of experts as it was before ZeRO-3 released it",
        "dpllm/ghost/grouped.py",
        "ctx.save_for_backward(stack, ",
        "ctx.save_for_backward(stack.detach(), ",
        ("tests/ghost/test_experts.py::test_a_stack_that_is_released_after_the_forward_pass_is_read_again",),
    ),
    Mutation(
        "a second use of experts is forgotten",
        "dpllm/ghost/routed.py",
        "        if not rest:\n            return first\n",
        "        return first\n",
        ("tests/ghost/test_routed.py",),
    ),
    Mutation(
        "the gradient of LoRA factors of experts is not scaled",
        "dpllm/ghost/expert_adapters.py",
        "_times(use, use.right_BTR, rhs_EKR.mT) * scaling",
        "_times(use, use.right_BTR, rhs_EKR.mT)",
        ("tests/ghost/test_experts.py::test_variants_of_lora_on_experts_are_exact",),
    ),
    Mutation(
        "adapters of experts that are switched off get a gradient",
        "dpllm/ghost/expert_adapters.py",
        '        if name not in getattr(module, "parametrizations", {}) or',
        "        if",
        ("tests/ghost/test_experts.py::test_adapters_that_are_switched_off_are_refused",),
    ),
    Mutation(
        "experts with a capacity are accepted",
        "dpllm/ghost/routing.py",
        '        if _above_zero(held.get(name)):\n            return (\n                f"an expert drops',
        '        if False:\n            return (\n                f"an expert drops',
        ("tests/ghost/test_routing.py",),
    ),
    Mutation(
        "a use within a function of another library is taken for ZeRO-3's own",
        "dpllm/ghost/twins.py",
        "            raise unseen_use(found.names[0])\n",
        "            pass\n",
        ("tests/ghost/test_functional_products.py",),
    ),
    Mutation(
        "non-finite units stay in the sum",
        "dpllm/ghost/factors.py",
        "finite_GU = torch.isfinite(upper_GU)\n",
        "finite_GU = torch.ones_like(upper_GU, dtype=torch.bool)\n",
        ("tests/ghost/test_factors.py", "tests/ghost/test_book.py"),
    ),
    Mutation(
        "rows of a large unit are forgotten",
        "dpllm/ghost/passes.py",
        "join(self._contributions.get(key, []), contributions, one.norm_method)",
        "join([], contributions, one.norm_method)",
        ("tests/invariant/test_large_units.py",),
    ),
    Mutation(
        "the second pass is not compared with the first",
        "dpllm/ghost/book.py",
        "        if bool(((sq_norm_GU > again.sq_norm_GU + again.slack_GU) & (factor_GU > 0)).any()):\n",
        "        if False:\n",
        ("tests/ghost/test_two_passes.py",),
    ),
    Mutation(
        "a norm's strips are not mirrored",
        "dpllm/ghost/kernels.py",
        "2 * terms[:, :, :start].sum((1, 2))",
        "terms[:, :, :start].sum((1, 2))",
        ("tests/ghost/test_norm_method.py",),
    ),
    Mutation(
        "rows that are drawn singly are accounted for as whole units",
        "dpllm/mechanism/noise.py",
        "rows_per_unit=draw.rows_per_unit or 1,",
        "rows_per_unit=1,",
        ("tests/privacy/test_plan.py",),
    ),
    Mutation(
        "a resumed run goes on with the cycle before",
        "dpllm/privacy/ledger_reader.py",
        "not (begins and step.restarts)",
        "True",
        ("tests/privacy/test_stated.py",),
    ),
    Mutation(
        "a run that is resumed exceeds its target",
        "dpllm/privacy/stated.py",
        "    return None if fits == left else taken + fits\n",
        "    return None\n",
        ("tests/privacy/test_stated.py",),
    ),
    Mutation(
        "units are drawn from all groups in every step",
        "dpllm/mechanism/banded.py",
        "                size = min(int(rng.binomial(len(group), self.sampling_rate)), self.max_batch_size)\n",
        "                group = np.arange(self.num_units)\n"
        "                size = min(int(rng.binomial(len(group), self.sampling_rate)), self.max_batch_size)\n",
        ("tests/mechanism/test_banded.py",),
    ),
    Mutation(
        "a run does not compare the units of its draws",
        "dpllm/training/draws.py",
        "        self._apart.check(drawn)",
        "        ",
        ("tests/mechanism/test_order.py",),
    ),
    Mutation(
        "a loop of one's own does not compare the units of its draws",
        "dpllm/mechanism/starts.py",
        "            self._apart.check(drawn)\n",
        "",
        ("tests/mechanism/test_order.py",),
    ),
    Mutation(
        "the noise before is added and not taken back",
        "dpllm/mechanism/banded.py",
        "noise.sub_(before, alpha=coefficient)",
        "noise.add_(before, alpha=coefficient)",
        ("tests/mechanism/test_banded.py",),
    ),
    Mutation(
        "the columns of a strategy may have any norm",
        "dpllm/mechanism/strategies.py",
        "    if norm**2 > 1 + _NORM_SLACK:\n",
        "    if norm > 2:\n",
        ("tests/mechanism/test_banded.py", "tests/privacy/test_noise_choice.py"),
    ),
    Mutation(
        "geometric noise keeps the noise of the step before",
        "dpllm/mechanism/banded.py",
        "alpha=-scale * self._ratio",
        "alpha=0.0",
        ("tests/mechanism/test_banded.py",),
    ),
    Mutation(
        "geometric noise forgets the cycle before",
        "dpllm/mechanism/banded.py",
        ".mul_(self._ratio**self._bands)",
        ".mul_(0.0)",
        ("tests/mechanism/test_banded.py",),
    ),
    Mutation(
        "a unit in a fixed order comes again in the next step",
        "dpllm/mechanism/fixed_order.py",
        "            first = (first + self.batch_size) % self.num_units\n",
        "            first = (first + 1) % self.num_units\n",
        ("tests/mechanism/test_fixed_order.py", "tests/mechanism/test_blt.py"),
    ),
    Mutation(
        "a draw without a step has no correlated noise",
        "dpllm/mechanism/correlated.py",
        "for _ in range(skipped):",
        "for _ in range(0):",
        ("tests/mechanism/test_correlated.py",),
    ),
    Mutation(
        "the buffers of earlier noise are added and not taken back",
        "dpllm/mechanism/blt.py",
        "noise.sub_(buffer, alpha=weight)",
        "noise.add_(buffer, alpha=weight)",
        ("tests/mechanism/test_blt.py",),
    ),
    Mutation(
        "the sensitivity of a fixed order counts one pass",
        "dpllm/mechanism/buffered.py",
        "    visits[: separation * participations : separation] = 1.0\n",
        "    visits[0] = 1.0\n",
        ("tests/mechanism/test_buffered.py", "tests/mechanism/test_blt.py"),
    ),
    Mutation(
        "steps in a fixed order cost as if a run were complete",
        "dpllm/mechanism/blt.py",
        "self.noise_multiplier / self.sensitivity(num_steps)",
        "self.noise_multiplier",
        ("tests/mechanism/test_blt.py",),
    ),
    Mutation(
        "the column of a buffered strategy may rise",
        "dpllm/mechanism/buffered.py",
        " or math.fsum(weights) > 1:\n",
        ":\n",
        ("tests/mechanism/test_buffered.py",),
    ),
    Mutation(
        "each layer may have the norm of all layers together",
        "dpllm/mechanism/per_layer.py",
        "self.clip_norm / math.sqrt(num_groups) / norm_U",
        "self.clip_norm / norm_U",
        ("tests/mechanism/test_per_layer.py",),
    ),
    Mutation(
        "a clipping may become another one when it gets the sizes of the groups",
        "dpllm/ghost/held_clipping.py",
        "if type(sized) is not type(clipping):",
        "if False:",
        ("tests/ghost/test_sized_groups.py",),
    ),
    Mutation(
        "a clipping may raise its bound when it gets the sizes of the groups",
        "dpllm/ghost/held_clipping.py",
        "if changed := self._bound.change_of(sized):",
        "if False:",
        ("tests/ghost/test_sized_groups.py",),
    ),
    Mutation(
        "a group that is clipped during the backward pass is not weighted",
        "dpllm/ghost/passes.py",
        "self._pass.weigh_group(group, self._factors.one(group, *self.norms[group]))",
        "self._pass.weigh_group(group, self._factors.one(group, *self.norms[group]) * 0 + 1)",
        ("tests/ghost/test_group_wise.py",),
    ),
    Mutation(
        "the count of a quantile is divided by the realised batch",
        "dpllm/training/adapting.py",
        ".clamp(-0.5, 0.5).sum()",
        ".clamp(-0.5, 0.5).mean().nan_to_num() * self._plan.expected_batch_size",
        ("tests/mechanism/test_quantile.py",),
    ),
    Mutation(
        "the count of a quantile gets no noise",
        "dpllm/training/adapting.py",
        "        self._noise.add_share_(STATISTIC, total, deviation, processes.rank, processes.size)\n",
        "",
        ("tests/mechanism/test_quantile.py",),
    ),
    Mutation(
        "every process adds noise to the count of a quantile",
        "dpllm/training/adapting.py",
        "add_share_(STATISTIC, total, deviation, processes.rank, processes.size)",
        "add_share_(STATISTIC, total, deviation, 0, 1)",
        (
            "tests/distributed/test_engines.py::test_the_count_of_a_clipping_that_adapts_gets_its_noise_from_one_process",
        ),
    ),
    Mutation(
        "the count of a quantile is not charged",
        "dpllm/mechanism/parts.py",
        "return self.gradient_noise_multiplier * self.clipping.clip_norm",
        "return self.noise_multiplier * self.clipping.clip_norm",
        ("tests/mechanism/test_quantile.py",),
    ),
    Mutation(
        "the count of a quantile counts for half",
        "dpllm/mechanism/parts.py",
        "(noise_multiplier / (2 * statistic_noise)) ** 2",
        "(noise_multiplier / (4 * statistic_noise)) ** 2",
        ("tests/mechanism/test_quantile.py",),
    ),
    Mutation(
        "gradients below the threshold keep their length while the others are scaled",
        "dpllm/mechanism/quantile.py",
        "self.clip_norm / norm_GU.clamp_min(self.threshold)",
        "self.clip_norm / norm_GU.clamp_max(self.threshold)",
        ("tests/ghost/test_factors.py",),
    ),
    Mutation(
        "a unit that is not finite counts as below the threshold",
        "dpllm/mechanism/quantile.py",
        "(norm_U <= self.threshold)",
        "(~(norm_U > self.threshold))",
        ("tests/mechanism/test_quantile.py",),
    ),
    Mutation(
        "a step is clipped to another threshold than it is charged with",
        "dpllm/training/run.py",
        "            self._threshold.give_to(attached.clipper, self.plan)\n",
        "            pass\n",
        ("tests/mechanism/test_quantile.py", "tests/training/test_mechanisms.py"),
    ),
    Mutation(
        "a first noise may lack a parameter of the clipper",
        "dpllm/mechanism/starts.py",
        "            if missing:",
        "            if False:",
        ("tests/mechanism/test_starts.py",),
    ),
    Mutation(
        "a clipper may bound contributions otherwise than the noise of a start",
        "dpllm/mechanism/starts.py",
        "            if not self._mechanism.allows(clipper.clipping):",
        "            if False:",
        ("tests/mechanism/test_starts.py",),
    ),
    Mutation(
        "a gradient after a step that failed reaches the weights",
        "dpllm/training/checks/watch.py",
        "            if given:  # the guard",
        "            if False:  # the guard",
        ("tests/training/checks/test_watch.py",),
    ),
    Mutation(
        "weights enter an average before the watch has confirmed them",
        "dpllm/training/averaging.py",
        "        source.watch.confirm()\n",
        "",
        ("tests/training/test_averaging.py",),
    ),
    Mutation(
        "the values of a saved average are not compared",
        "dpllm/training/averaging.py",
        "        if sums != state",
        "        if False and sums != state",
        ("tests/training/test_averaging.py",),
    ),
    Mutation(
        "a second run may move the threshold",
        "dpllm/training/shared_ledger.py",
        "        if self._handed_over:\n",
        "        if False:\n",
        ("tests/mechanism/test_quantile.py",),
    ),
    Mutation(
        "verify takes any movement of a threshold",
        "dpllm/report/verify_thresholds.py",
        "    return (wrong is None, f",
        "    return (True, f",
        ("tests/mechanism/test_quantile.py",),
    ),
    Mutation(
        "each group of parameters has the whole clip norm",
        "dpllm/mechanism/group_clipping.py",
        "self.clip_norm * math.sqrt(share / whole)",
        "self.clip_norm",
        ("tests/mechanism/test_group_clipping.py",),
    ),
    Mutation(
        "a parameter may be in two groups",
        "dpllm/mechanism/group_clipping.py",
        "if len(found) > 1:",
        "if False:",
        ("tests/mechanism/test_group_clipping.py",),
    ),
    Mutation(
        "adaptive scaling divides by less than the norm",
        "dpllm/mechanism/automatic.py",
        "(norm_GU + self.stability / (norm_GU + self.stability))",
        "(norm_GU - self.stability / (norm_GU + self.stability)).clamp_min(1e-9)",
        ("tests/ghost/test_factors.py",),
    ),
    Mutation(
        "the budget of the data set is not asked",
        "dpllm/privacy/budget.py",
        "        _check_fits(budget, plan.event, plan.num_steps)\n        entry = ",
        "        entry = ",
        ("tests/privacy/test_budget.py",),
    ),
    Mutation(
        "the budget of a run that a resume cuts short counts the steps that it may take",
        "dpllm/privacy/budget_entry.py",
        "taken, self.steps_planned or self.steps_reserved)",
        "taken)",
        ("tests/privacy/test_stated.py",),
    ),
    Mutation(
        "the Fourier transform is not tilted",
        "dpllm/privacy/accounting.py",
        "pld.compose(parts, pld.tilt_for(parts, delta=delta))",
        "pld.compose(parts)",
        ("tests/privacy/test_accounting.py",),
    ),
    Mutation(
        "long norms are added up entry by entry",
        "dpllm/ghost/kernels.py",
        "    return pieces.square().sum(1) + rest.square()",
        "    return torch.linalg.vector_norm(flat, dim=1).square()",
        ("tests/ghost/test_kernels.py",),
    ),
    Mutation(
        "the sum is divided by the realised batch",
        "dpllm/training/release.py",
        "last=last, scale=self._scale, to_total",
        "last=last, scale=1 / max(1, microbatch.num_units), to_total",
        ("tests/training/test_step.py",),
    ),
    Mutation(
        "half of a microbatch on which memory ran out is lost",
        "dpllm/training/out_of_memory.py",
        "self._waiting.extendleft(reversed(halves))",
        "self._waiting.appendleft(halves[0])",
        ("tests/training/test_out_of_memory.py",),
    ),
    Mutation(
        "a unit whose rows are divided for lack of memory is clipped part by part",
        "dpllm/training/microbatches.py",
        "self.taken[:cut].microbatch(unit_B[:cut], 0, continues=True)",
        "self.taken[:cut].microbatch(unit_B[:cut], 1)",
        ("tests/training/test_out_of_memory.py",),
    ),
    Mutation(
        "a function that begins later is not measured for rows that depend on each other",
        "dpllm/ghost/functional.py",
        "            self.host.measure_rows_again()\n",
        "            pass\n",
        ("tests/ghost/test_functional.py",),
        quick=True,
    ),
    Mutation(
        "a use that begins between watched calls is not seen",
        "dpllm/ghost/uses.py",
        "                raise unseen_use(name) if self.active else late_use(name)\n",
        "                pass\n",
        ("tests/ghost/test_functional.py",),
    ),
    Mutation(
        "a value of the form of a matrix is taken for the matrix",
        "dpllm/ghost/experiments.py",
        "            if turned(usage.tensors[place]) is None:\n",
        "            if False:\n",
        ("tests/ghost/test_functional.py",),
    ),
    Mutation(
        "a module may be called with another tensor in place of its weight",
        "dpllm/ghost/hooks.py",
        "            served.refuse_replaced(parameters)\n",
        "",
        ("tests/ghost/test_functional.py",),
    ),
    Mutation(
        "a gradient that reaches a parameter past all rules is dropped",
        "dpllm/ghost/origins.py",
        "            raise unseen_use(self.name)\n",
        "            pass\n",
        ("tests/ghost/test_functional.py",),
    ),
    Mutation(
        "the functions of a model that uses parameters in them are watched in some calls only",
        "dpllm/ghost/uses.py",
        "        self._needed = True\n        self._note(parameters.values())\n        usage",
        "        self._note(parameters.values())\n        usage",
        ("tests/ghost/test_functional.py",),
    ),
    Mutation(
        "a selection's order is looked at in some calls only",
        "dpllm/ghost/uses.py",
        "            self._needed |= orders.needs_every_call(tensors)\n",
        "",
        ("tests/ghost/test_orders.py",),
    ),
    Mutation(
        "a layer takes selected entries for its rows",
        "dpllm/ghost/hooks.py",
        "                self.uses.refuse_other_order(served.site.path, (args, kwargs))\n",
        "",
        ("tests/ghost/test_orders.py",),
    ),
    Mutation(
        "the parts of a value that was expanded have each the gradient of all rows",
        "dpllm/ghost/origins.py",
        "            alone = torch.zeros_like(grad)\n",
        "            alone = grad.clone()\n",
        ("tests/ghost/test_functional.py",),
    ),
    Mutation(
        "a value computed from a parameter counts as one use, however often it is used",
        "dpllm/ghost/uses.py",
        "self._host.note_uses(parameters + parameters)",
        "self._host.note_uses(parameters)",
        ("tests/ghost/test_functional.py",),
    ),
    Mutation(
        "a pass on which memory ran out counts as watched",
        "dpllm/ghost/hooks.py",
        "        output = self.uses.end(output)\n",
        "        output = self.uses.end(output)\n        self.uses.proved = True\n",
        ("tests/training/test_out_of_memory.py",),
    ),
    Mutation(
        "the step is not charged",
        "dpllm/training/step.py",
        "    ledger.append_step(number, plan.event)\n",
        "",
        ("tests/training/test_step.py",),
        quick=True,
    ),
    Mutation(
        "the loss is averaged over the batch's tokens",
        "dpllm/models/losses.py",
        "(target_BT != IGNORE).sum(1).clamp_min(1)",
        "(target_BT != IGNORE).sum().clamp_min(1)",
        ("tests/models/test_losses.py",),
    ),
    Mutation(
        "of packed rows the first alone is probed",
        "dpllm/ghost/checks.py",
        "[real[::2], real[1::2], real[-1:]] if packed",
        "[real[:1]] if packed",
        ("tests/ghost/test_packed.py",),
    ),
    Mutation(
        "the loss of an answer includes padding",
        "dpllm/models/losses.py",
        "logits_BT.masked_fill(~own_BT, torch.finfo(logits_BT.dtype).min).log_softmax(1)",
        "logits_BT.log_softmax(1)",
        ("tests/models/test_losses.py",),
    ),
    Mutation(
        "labels that do not fit the outputs are broadcast over the rows",
        "dpllm/models/losses.py",
        "if logits.ndim != 2 or labels.shape != logits.shape:",
        "if logits.ndim != 2:",
        ("tests/models/test_losses.py",),
    ),
    Mutation(
        "a packed row's last token predicts the next row's first",
        "dpllm/models/losses.py",
        ".index_fill(0, boundaries[1:] - 1, IGNORE)",
        "",
        ("tests/models/test_losses.py",),
    ),
    Mutation(
        "values that aren't finite may pass from one packed row to another",
        "dpllm/ghost/clipper.py",
        "            self._book.probe_spread(losses_of_row, unit_B, num_units)\n",
        "            pass\n",
        ("tests/ghost/test_packed.py",),
    ),
    Mutation(
        "the sampler ignores the sampling rate",
        "dpllm/mechanism/sampling.py",
        "rng.binomial(self.num_units, self.sampling_rate)",
        "rng.binomial(self.num_units, 0.5)",
        ("tests/mechanism/test_sampling.py",),
        quick=True,
    ),
    Mutation(
        "the independence of rows is not measured",
        "dpllm/training/checks/independence.py",
        "        if self._steps & (self._steps - 1) and not is_last and not self._has_failed:\n",
        "        if True:\n",
        ("tests/training/checks/test_independence.py::test_a_coupling_that_starts_later_is_refused",),
    ),
    Mutation(
        "the processes draw one stream of noise",
        "dpllm/mechanism/generators.py",
        "np.random.SeedSequence([seed, stream])",
        "np.random.SeedSequence([seed, 0])",
        ("tests/mechanism/test_noise.py::test_streams_of_a_seed_and_fresh_entropy_differ_between_ranks",),
    ),
    Mutation(
        "ChaCha20 draws the same blocks again",
        "dpllm/mechanism/chacha20.py",
        "            self._block += len(part)\n",
        "",
        ("tests/mechanism/test_chacha20.py::test_a_stream_goes_on_where_it_was_and_keys_are_independent",),
    ),
    Mutation(
        "a fork draws the noise of its parent",
        "dpllm/mechanism/keys.py",
        "        if os.getpid() != self._process:\n",
        "        if False:\n",
        ("tests/mechanism/test_keys.py::test_a_key_is_refused_in_a_fork",),
    ),
    Mutation(
        "noise that can be drawn again is that of the first step in every step",
        "dpllm/mechanism/generators.py",
        "        self._draw += 1\n",
        "",
        ("tests/mechanism/test_regenerated.py::test_no_number_is_drawn_for_two_places",),
    ),
    Mutation(
        "two processes with one key draw the same noise",
        "dpllm/mechanism/regenerated.py",
        "self._numbers.at(name, *of, number)",
        "self._numbers.at(name, number)",
        ("tests/mechanism/test_regenerated.py::test_the_noise_is_the_inverse_of_the_strategy_times_the_numbers",),
    ),
    Mutation(
        "a regenerated block begins at the present step",
        "dpllm/mechanism/regenerated.py",
        "            if self._order.step:\n",
        "            if False:\n",
        ("tests/mechanism/test_regenerated.py::test_the_noise_is_the_inverse_of_the_strategy_times_the_numbers",),
    ),
    Mutation(
        "nothing is watched between the steps",
        "dpllm/training/checks/watch.py",
        "        self._raise_deferred()\n        self._check_trainable_set()\n"
        '        self._fixed.check("between two private steps")\n',
        "        return\n",
        ("tests/training/checks/test_watch.py::test_a_frozen_parameter_written_between_steps_is_refused",),
    ),
    Mutation(
        "buffers and frozen weights may change within a step",
        "dpllm/training/checks/watch.py",
        "        self._fixed.check(_DURING, everything=due)\n",
        "",
        ("tests/training/checks/test_watch.py::test_a_frozen_embedding_with_max_norm_is_refused",),
    ),
    Mutation(
        "norms of slices are not added up over tensor-parallel processes",
        "dpllm/ghost/shards.py",
        "total_GU, total_slack_GU = of_R[0].sum(0), of_R[1].sum(0)",
        "total_GU, total_slack_GU = of_R[0][self.rank].clone(), of_R[1][self.rank].clone()",
        ("tests/distributed/test_tensor_parallel.py::test_a_divided_model_releases_the_clipped_sum_of_one_process",),
    ),
    Mutation(
        "each tensor-parallel process adds gradients that all of them see whole",
        "dpllm/ghost/shards.py",
        "part.dim is not None or part.in_parts or self.rank == 0",
        "True",
        ("tests/distributed/test_tensor_parallel.py::test_a_divided_model_releases_the_clipped_sum_of_one_process",),
    ),
    Mutation(
        "summands of a gradient are squared before they are added up",
        "dpllm/ghost/shards.py",
        "summand_RUP.sum(0).square().sum(1), slack_U",
        "summand_RUP.square().sum((0, 2)), slack_U",
        ("tests/distributed/test_tensor_parallel.py::test_a_divided_model_releases_the_clipped_sum_of_one_process",),
    ),
    Mutation(
        "a slice gets a part of its noise only",
        "dpllm/engines/division.py",
        "return (0, 1) if id(parameter) in self.owned else self.sums",
        "return self.sums",
        ("tests/distributed/test_tensor_parallel.py::test_each_slice_gets_its_owners_noise_and_replicas_get_one",),
    ),
    Mutation(
        "tokens of other slices are looked up in this one",
        "dpllm/ghost/shards.py",
        "use.right_BTR.masked_fill(elsewhere_BT[:, :, None], 0)",
        "use.right_BTR",
        ("tests/ghost/test_shards.py",),
        quick=True,
    ),
    Mutation(
        "replicas are not compared",
        "dpllm/engines/replicas.py",
        "if any(first_of.setdefault(triple[0], triple) != triple for triple in triples):",
        "if False:",
        ("tests/distributed/test_replicas.py::test_only_processes_with_the_same_shard_are_compared",),
    ),
    Mutation(
        "the processes' places in the run are not compared",
        "dpllm/training/checks/turns.py",
        "        if any(one[:2] != everywhere[0][:2] for one in everywhere):\n",
        "        if False:\n",
        ("tests/training/checks/test_turns.py",),
    ),
    Mutation(
        "the processes' units are not compared",
        "dpllm/training/checks/turns.py",
        "            if any(one[part] != everywhere[0][part] for one in everywhere):\n",
        "            if False:\n",
        ("tests/training/checks/test_turns.py",),
    ),
    Mutation(
        "a draw can be stepped over twice",
        "dpllm/training/checks/outstanding.py",
        "        drawn, charged, self._unit_ids, self._charged = self._unit_ids, self._charged, None, None\n"
        "        return drawn, charged\n",
        "        return self._unit_ids, Charged(self._charged.num_steps, self._charged.step)\n",
        ("tests/training/test_run.py::test_only_the_outstanding_draw_is_stepped_over_and_once",),
    ),
    Mutation(
        "a checkpoint's place in the ledger is not compared",
        "dpllm/privacy/identity.py",
        "    if steps_at(ledger, head.chain) == head.num_steps:\n",
        "    if True:\n",
        ("tests/privacy/test_identity.py::test_a_checkpoint_of_another_run_is_refused",),
    ),
    Mutation(
        "a copied ledger goes on",
        "dpllm/privacy/ledger.py",
        "    if noted not in possible:\n",
        "    if False:\n",
        ("tests/privacy/test_ledger.py::test_a_copied_ledger_is_not_continued_unless_adopted",),
    ),
    Mutation(
        "a run that stops early states the steps it took",
        "dpllm/privacy/stated.py",
        "    return (*before, (event, taken + left))\n",
        "    return tuple(history)\n",
        ("tests/report/test_statement.py::test_a_run_that_stops_early_states_the_epsilon_of_its_plan",),
    ),
    Mutation(
        "released weights are not compared",
        "dpllm/report/verify_release.py",
        "for name, difference in checkpoints.differing(folder, named).items()",
        "for name, difference in {}.items()",
        ("tests/report/test_verify.py::test_other_weights_in_the_folder",),
    ),
    Mutation(
        "people settle a point that says that an audit refutes the claim",
        "dpllm/report/checklist.py",
        'Do not release it (see below).", _REPORT_IT)',
        'Do not release it (see below).", None)',
        ("tests/report/test_checklist.py::test_a_refuted_or_unselected_run_is_never_settled",),
    ),
    Mutation(
        "an earlier form of a report is accepted beside a later ledger",
        "dpllm/report/earlier_reports.py",
        "    older = contents.notes.format < LEDGER_FORMAT\n",
        "    older = True\n",
        ("tests/report/test_earlier_reports.py::test_an_earlier_report_beside_a_later_ledger_is_found",),
    ),
    Mutation(
        "ids in a CSV file are read as numbers",
        "dpllm/data/readers.py",
        "pa.array([cell or None for cell in column], pa.string())",
        "pa.array([str(int(cell)) if cell.isdigit() else cell or None for cell in column], pa.string())",
        ("tests/data/test_records.py::TestText::test_ids_of_a_csv_stay_as_they_are_written",),
    ),
    Mutation(
        "private records in the public text are not counted",
        "dpllm/models/starting_point.py",
        "return sum(any(key in known for key in _keys(texts, _SHORTEST_LINE))",
        "return sum(False",
        (
            "tests/models/test_starting_point.py::test_one_of_many_records_in_the_public_text_is_refused",
            "tests/tuning/test_rehearsal.py::test_public_text_with_private_records_is_refused_without_their_number",
        ),
    ),
    Mutation(
        "a rehearsal takes the private file for public text",
        "dpllm/tuning/public_text.py",
        "    if same is not None:",
        "    if False:",
        ("tests/tuning/test_rehearsal.py::test_public_text_that_is_the_private_data_is_refused_by_name",),
    ),
    Mutation(
        "a rehearsal takes a smaller batch without less noise",
        "dpllm/tuning/rehearsal.py",
        "noise_multiplier=plan.noise_multiplier * batch / plan.expected_batch_size,",
        "noise_multiplier=plan.noise_multiplier,",
        (
            "tests/tuning/test_rehearsal.py::test_a_small_public_text_has_smaller_batches_with_the_same_noise_of_the_mean",
        ),
    ),
    Mutation(
        "everything in the folder is uploaded",
        "dpllm/report/publishing.py",
        "    return sorted(names)\n",
        "    return sorted(path.name for path in folder.iterdir() if path.is_file())\n",
        ("tests/training/test_outlets.py::test_pushing_takes_an_allow_list",),
    ),
    Mutation(
        "the command publishes without looking at the report",
        "dpllm/report/publishing.py",
        "    require_publishable(folder, force_open_points=force_open_points)\n    names = published_files(",
        "    names = published_files(",
        ("tests/cli/test_releasing.py::test_open_points_and_changed_files_are_refused_before_anything_is_created",),
    ),
    Mutation(
        "weights that the ledger does not name are merged under its guarantee",
        "dpllm/training/merge_run.py",
        "    failed = [check for check in verify(run).checks if not check.ok]\n",
        "    failed: list[Any] = []\n",
        ("tests/cli/test_releasing.py::test_a_folder_that_is_not_that_of_a_run_with_an_adapter_is_refused",),
    ),
    Mutation(
        "the rows of a resumed run are not compared",
        "dpllm/privacy/same_rows.py",
        "    if not hmac.compare_digest(str(noted[-1]), _digest(key, contents)):\n",
        "    if False:\n",
        ("tests/privacy/test_same_rows.py::test_other_rows_of_the_same_number_are_refused_and_nothing_is_written",),
    ),
    Mutation(
        "rounding to the grid and in sums is left out of the sensitivity",
        "dpllm/mechanism/discrete.py",
        "return 1 + SUM_SHARE * max_batch_size + GRID_SHARE * noise_multiplier",
        "return 1.0",
        ("tests/mechanism/test_discrete.py",),
    ),
    Mutation(
        "a run with discrete noise does not count the trained parameters",
        "dpllm/training/attached.py",
        "        plan.mechanism.require_entries(sum(parameter.numel() for parameter in clipper.parameters.values()))\n",
        "",
        ("tests/training/test_run.py",),
    ),
    Mutation(
        "a truncated draw of discrete noise costs nothing",
        "dpllm/mechanism/discrete.py",
        "lambda epsilons: failure * (1 + np.exp(epsilons))",
        "lambda epsilons: 0 * epsilons",
        ("tests/mechanism/test_discrete.py",),
    ),
    Mutation(
        "the sum below discrete noise is not rounded",
        "dpllm/mechanism/generators.py",
        "    block.copy_(torch.from_numpy(whole * step))\n",
        "    block.add_(torch.from_numpy((whole - rounded) * step))\n",
        ("tests/mechanism/test_discrete.py",),
    ),
    Mutation(
        "discrete noise is added by every process to the whole sum",
        "dpllm/engines/single.py",
        "    own = slice_of(total, rank, size)\n    change(own)\n",
        "    own = slice_of(total, rank, size)\n    change(total)\n",
        ("tests/distributed/test_engines.py::test_discrete_noise_is_added_once_to_complete_sums[ddp]",),
    ),
    Mutation(
        "the number of runs of a selection is left out of its cost",
        "dpllm/mechanism/selection.py",
        "dp_event.RepeatAndSelectDpEvent(run, self.mean_runs, ",
        "dp_event.RepeatAndSelectDpEvent(run, 1.0, ",
        ("tests/mechanism/test_selection.py",),
    ),
    Mutation(
        "a run of a selection states its own cost",
        "dpllm/privacy/stated.py",
        "if plan.selection is not None and contents.num_steps:",
        "if plan.selection is None and contents.num_steps < 0:",
        ("tests/privacy/test_selection_plans.py",),
    ),
    Mutation(
        "a run that no tuning selected has no open point",
        "dpllm/report/definition.py",
        "if plan.selection is None or SELECTED in contents.notes.facts:",
        "if plan.selection is None or SELECTED:",
        ("tests/privacy/test_selection_plans.py",),
    ),
    Mutation(
        "the draws of a tuning can be made again",
        "dpllm/tuning/record.py",
        "os.link(half, path)",
        "os.replace(half, path)",
        ("tests/tuning/test_record.py",),
    ),
    Mutation(
        "a copy of a tuning's record is continued",
        "dpllm/tuning/record.py",
        'if record.draws["file"] not in possible:',
        "if not possible:",
        ("tests/tuning/test_record.py",),
    ),
]


def failing_tests(mutation: Mutation) -> tuple[int | None, list[str]]:
    """Run the mutation's tests on a mutated copy; return pytest's exit code and the names of the tests that failed."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("dpllm", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        (copy / mutation.file).write_text(changed(mutation))
        options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-rfE", *([] if __name__ == "__main__" else ["-x"])]
        code, printed = children.run_pytest(copy, [*options, *mutation.tests])
        return code, re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, flags=re.MULTILINE)


def changed(mutation: Mutation) -> str:
    """The mutated file."""
    source = (ROOT / mutation.file).read_text()
    assert mutation.before in source, f"{mutation.file} no longer contains {mutation.before!r}"
    return source.replace(mutation.before, mutation.after)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.what)
def test_a_mutation_is_of_the_code_as_it_is(mutation):
    """It changes the file, which can still be compiled, and its tests exist."""
    assert changed(mutation) != (ROOT / mutation.file).read_text()
    compile(changed(mutation), mutation.file, "exec")
    for test in mutation.tests:
        file, *names = test.partition("[")[0].split("::")
        text = (ROOT / file).read_text()
        assert all(re.search(rf"^\s*(?:def|class) {name}\b", text, flags=re.MULTILINE) for name in names), test


@pytest.mark.parametrize(
    "mutation",
    [pytest.param(one, id=one.what, marks=() if one.quick else tiers.deep) for one in MUTATIONS],
)
def test_a_deletion_turns_a_test_red(mutation):
    """Exit code 1 means that tests ran and some failed; a copy that can't be imported would not count."""
    if mutation.needs is not None:
        pytest.importorskip(mutation.needs)
    code, failed = failing_tests(mutation)
    assert code == 1 and failed, f"{mutation.what}: exit code {code}, no test failed"


def main() -> None:
    for mutation in MUTATIONS:
        code, failed = failing_tests(mutation)
        print(f"{mutation.what}: {len(failed)} red (exit code {code})")
        for name in failed:
            print(f"    {name}")


if __name__ == "__main__":
    main()
