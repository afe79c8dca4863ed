"""Tests lie where their module says: fxtune/a/b.py is tested in tests/a/test_b.py."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    "training/rollouts/episodes.py": "test_environment.py, by the public command",
    "estimate/weights.py": "test_memory.py, in the forecast of a step",
    "objectives/dpo.py": "test_preferences.py, a table of formulas",
    "objectives/ipo.py": "test_preferences.py, a table of formulas",
    "objectives/orpo.py": "test_preferences.py, a table of formulas",
    "objectives/simpo.py": "test_preferences.py, a table of formulas",
    "objectives/reference.py": "training/data/test_stored_numbers.py, by the public command",
    "distributed/averaging.py": "test_gradients.py, with the other ways to add up gradients",
    "distributed/powersgd.py": "test_gradients.py, with the other ways to add up gradients",
    "models/kinds/beside.py": "image_decoder/test_cost.py",
    "models/experts.py": "techniques/experts/test_adapted.py, with the experts of each family",
    "techniques/experts/full.py": "test_adapted.py",
    "techniques/experts/run.py": "test_adapted.py and test_quantized.py",
    "kernels/recurrence.py": "test_linear_attention.py, by its operator",
    "kernels/short_convolution.py": "test_linear_attention.py",
    "kernels/save_input.py": "test_tiled_mlp.py and test_fused_modules.py, inside checkpoints",
    "kernels/cross_entropy_triton.py": "test_interpreted.py",
    "kernels/expert_adapters_triton.py": "test_interpreted.py",
    "kernels/expert_layer.py": "test_gated_experts.py and test_fp8_experts.py",
    "kernels/fp8_experts_triton.py": "test_interpreted.py",
    "kernels/fp8_triton.py": "test_interpreted.py",
    "kernels/gated_experts_triton.py": "test_interpreted.py",
    "kernels/lora_triton.py": "test_interpreted.py",
    "kernels/mxfp4_triton.py": "test_interpreted.py",
    "kernels/rotary_triton.py": "test_interpreted.py",
    "kernels/swiglu_lora_triton.py": "test_interpreted.py",
    "kernels/swiglu_reduce_triton.py": "test_interpreted.py",
    "kernels/triton_parts.py": "runs inside Triton kernels only",
    "cli/train.py": "test_programs.py, by the command",
    "diagnostics/preview.py": "cli/test_preview.py, through the command",
    "diagnostics/sampler_report.py": "cli/test_doctor.py, through the command",
    "diagnostics/samples.py": "cli/test_preview.py, through the command",
    "diagnostics/verification.py": "cli/test_verify.py, through the command",
    "distributed/files.py": "cli/test_options.py, with the options that name files",
    "outputs/adapter.py": "cli/test_merge.py, through the command",
    "outputs/conversation.py": "cli/test_chat.py, through the command",
    "outputs/text_classifier.py": "objectives/test_classification.py, through `fxtune chat`",
    "reports/held_out.py": "test_page.py, and objectives/test_classification.py, through the commands",
    "outputs/evaluation.py": "cli/test_evaluate.py, through the command",
    "outputs/merge.py": "cli/test_merge.py, through the command",
    "outputs/export.py": "cli/test_export.py, through the command",
    **dict.fromkeys(
        [f"outputs/targets/{name}.py" for name in ("gguf", "llama_cpp", "ollama", "source", "target", "vllm")],
        "cli/test_export.py, through the command",
    ),
    "outputs/refresh.py": "cli/test_refresh.py, through the command",
    **dict.fromkeys(
        [f"drafts/{name}.py" for name in ("draft", "recipe", "rows")],
        "cli/test_new.py, through the command",
    ),
    **dict.fromkeys(
        [
            f"migration/{name}.py"
            for name in ("account", "axolotl", "llamafactory", "openai", "swift", "trainer_arguments", "trl")
        ],
        "cli/test_import_config.py, through the command",
    ),
    "data/batches/layout.py": "test_plan.py and test_growing_rows.py",
    "data/chat/calls.py": "test_tool_calls.py",
    "data/chat/remarks.py": "texts",
    "data/chat/rewriting.py": "test_reasoning.py",
    "data/images/placeholders.py": "tests/data/chat/test_images.py",
    "facts/execution.py": "plain data; estimate/test_memory.py",
    "objectives/base.py": "a protocol",
    "training/generation.py": "test_answers.py, with the answers to questions",
    **dict.fromkeys(
        [f"training/rollouts/{name}.py" for name in ("client", "evaluation", "folder", "made_up", "pending", "plan")],
        "training/rollouts/test_collector.py, by the command",
    ),
    "training/rollouts/server_process.py": "test_vllm.py, with the server that it starts",
    "reports/exports.py": "cli/test_export.py, through the commands",
    "upstream/llama_cpp.py": "cli/test_export.py, with the converter that it runs",
    "training/rollouts/reward_functions.py": "test_scoring.py, with the workers that call them",
    "objectives/registry.py": "test_plugins.py, with the other registries",
    "techniques/assemble.py": "test_pipeline.py, with the order of the techniques",
    "techniques/base.py": "a contract; its implementations are tested",
    "techniques/smoke_tests.py": "test_package_checks.py, with the checks",
    "system/machine/packages.py": "a table; test_package_checks.py runs its tests",
    "system/terminal/units.py": "a constant",
    "training/run/export.py": "test_trainer.py, by whole runs",
    "training/run/extension.py": "run/test_end.py, by whole runs",
    "training/steps.py": "test_trainer.py and faults/test_memory.py, by whole runs",
    "training/trial.py": "test_step_monitor.py, with runs that are not finite",
    "training/visits.py": "test_evaluation.py of its folder",
    "upstream/fla.py": "techniques/smoke_tests.py: needs a GPU",
    "upstream/flash_attn.py": "test_flash4.py of tests/gpu: needs a GPU",
}
"""Modules without a test file of their name, and what tests them or why nothing does."""
TOGETHER = {
    "techniques/attention/backends": "registry.py",
    "data/formats": "registry.py",
    "models/kinds/image_decoder": "images.py",
}
"""Folders whose modules have one table of tests, with the module that lists them."""


def modules() -> list[Path]:
    package = ROOT / "fxtune"
    return sorted(path.relative_to(package) for path in package.rglob("*.py") if not path.name.startswith("__"))


def test_every_module_has_a_test_file_of_its_name():
    tested = [path.with_name(TOGETHER.get(str(path.parent), path.name)) for path in modules()]
    missing = {str(path) for path in tested if not (ROOT / "tests" / path.parent / f"test_{path.name}").exists()}
    assert missing == set(ELSEWHERE)


def test_gpu_tests_are_named_after_a_module_or_a_package():
    names = (
        {path.stem for path in modules()} | {path.parent.name for path in modules()} | {"deterministic", "two_cards"}
    )
    assert {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "gpu").glob("test_*.py")} <= names
