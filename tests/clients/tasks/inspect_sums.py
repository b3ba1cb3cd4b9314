"""An Inspect task as its users write one: eight samples, logprobs asked for, two scorers."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes, match
from inspect_ai.solver import generate, system_message


@task
def sums() -> Task:
    return Task(
        dataset=[Sample(id=i, input=f"What is {i} plus {i}?", target=str(2 * i)) for i in range(1, 5)],
        solver=[system_message("Answer with the sum."), generate()],
        scorer=[includes(), match()],
        config=GenerateConfig(max_tokens=16, temperature=1.0, logprobs=True, top_logprobs=2),
        epochs=2,
    )
