"""The guide: chapters that run, with predictions asked for before anything is measured.

`book.py` lists the chapters, `runner.py` runs one, `lesson.py` is what a chapter holds while it runs (predictions,
rows, exercises), `exercise.py` checks answers and says why a wrong one is wrong, `progress.py` remembers what was done.
A chapter is a folder: `chapter.py` (percent format), `exercises.py`, `figures.py` and what its ranks run. Its page is
`docs/guide/<folder>/README.md`.
"""
