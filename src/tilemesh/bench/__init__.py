"""Measurements of kernels, collectives, training steps, serving and more, beside what a user would use instead.

A benchmark is values, and `harness.py` says which; it takes turns, checks and makes rows (`measure.row.Row`) the same
way for all. What runs on several ranks is called there with `launch.call`. Commands parse, call and print; pages and
pictures are `report`'s.
"""
