"""Measurements of kernels, collectives, training steps and gradient exchange, beside what a user would use instead.

A benchmark predicts first, then measures ours and its peers in turns, and gives rows (`measure.row.Row`). What runs on
several ranks is called there with `launch.call`. Commands parse, call and print; pages and pictures are `report`'s.
"""
