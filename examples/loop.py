"""The whole idea in one file: a recipe becomes an adapter, step by step, by the functions that `fxtune` itself calls.

    python examples/loop.py                            # the quickstart: less than a minute on two CPU cores
    python examples/loop.py train.max_steps=20         # any key of the recipe, overridden

Settle -> data -> build -> step -> save. `fxtune/training/trainer.py` is the same loop with everything that a long run
needs around it: checkpoints, resuming, signals, evaluations, trackers, a report. Read this file first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import fxtune
from fxtune.data.batches.loader import Loader
from fxtune.export.save import save_model
from fxtune.training.answers import answer, exact_match, load_questions
from fxtune.training.builder import RunBuilder


def main(overrides: Sequence[str]) -> None:
    # The recipe: YAML and overrides become typed dataclasses. An unknown key or a wrong type ends here.
    config = fxtune.load_recipe("quickstart", overrides)

    # Settle: what will run on this machine. Every `auto` is decided, and what cannot run is refused with all reasons
    # at once. No weight and no row has been read yet. `builder.settled` holds the result, frozen.
    builder = RunBuilder(config)
    for note in builder.settled.notes:
        print(f"settled   {note}")

    # Data: rows -> messages -> text -> tokens, with a mask of the supervised tokens. The plan knows the documents of
    # every step: the batch of step s is a function of (data, seed, s), so a resumed run needs one integer.
    tokenizer, data = builder.read()
    plan = data.training
    supervised = sum(plan.supervised(step) for step in range(plan.steps))
    print(f"data      {plan.steps} steps, {supervised:,} supervised tokens")

    # Build: the model with every technique applied, in the order of techniques/pipeline.py, and the evidence that each
    # technique acts. A technique that was asked for and does not act is an error.
    model, evidence = builder.proven_model()
    for proof in evidence:
        print(f"evidence  {proof.technique}: {proof.observed}")

    # The held-out questions before training: the base answers fluently, but knows nothing of the task.
    questions = load_questions(config.data, tokenizer, data.images)

    def print_score(when: str) -> None:
        limit = config.data.questions.max_new_tokens
        answers = answer(model.prepared, tokenizer, questions, max_new_tokens=limit, images=data.images)
        print(f"questions {when}: {exact_match(answers, questions):.0%} right, the first answer: {answers[0]}")

    print_score("before")

    # Step: forward and backward of each micro-batch, the sum of losses divided by the supervised tokens of the whole
    # step, clipping, update. The objective says what is minimised. A step that is not finite changes nothing.
    take_step = builder.train_step(model, config.objective)
    model.model.train()
    with closing(Loader(builder.own(plan), config.loader, builder.world.device)) as loader:
        for step in loader.steps():
            metrics = take_step(plan, step, builder.learning_rate(step.index, plan.steps))
            if step.index % config.train.log_every == 0:  # reading a figure waits for the device
                print(
                    f"step {step.index + 1:4} loss {metrics['loss']:.3f}, gradient's norm {metrics['grad_norm']:.2f}"
                )

    print_score("after")

    # Save: the folder is written, read back and compared with the trained model before it counts.
    print(f"saved     {save_model(model.prepared, tokenizer, Path('runs/loop/adapter'))}: plain peft loads it")


if __name__ == "__main__":
    main(sys.argv[1:])
