"""A recipe as a Python function: what a file cannot say, such as one size that follows from another.

unisono train examples/recipe.py:tiny
unisono verify examples/recipe.py:tiny --plan "dp=2" --plan "pp=2"
"""

from unisono import DataConfig, ModelConfig, Plan, Recipe, TrainConfig


def tiny(heads: int = 4) -> tuple[Recipe, Plan]:
    """A GPT whose width and batch follow from its heads, for a minute on two cores."""
    recipe = Recipe(
        name="tiny",
        model=ModelConfig(n_layer=heads, n_head=heads, d_model=24 * heads, context=96, norm="rms"),
        data=DataConfig(source="stdlib", tokenizer="byte"),
        train=TrainConfig(steps=200, global_batch=8 * heads, lr=8e-3 / heads, warmup_steps=20),
    )
    return recipe, Plan(dp=2)


if __name__ == "__main__":
    print(*tiny(), sep="\n")
