"""Training: recipes, one loop for every objective, exact resume; see docs/training.md."""

from tilestack.train.loop import Trainer
from tilestack.train.objective import Loss, Objective
from tilestack.train.recipe import Recipe
from tilestack.train.settings import RecipeError

__all__ = ["Loss", "Objective", "Recipe", "RecipeError", "Trainer"]
