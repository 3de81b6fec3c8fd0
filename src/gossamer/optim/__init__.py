"""Optimizers: torch's own on many replicas at once, AccumAdam, and learning rates."""

from gossamer.optim.recipe import BlockOptimizer, Recipe

__all__ = ["BlockOptimizer", "Recipe"]
