"""Learning from feedback: rollouts, rewards, advantages, losses.

`formulas/` has the arithmetic as pure functions over arrays, and algorithms as rows of choices among them.
"""
