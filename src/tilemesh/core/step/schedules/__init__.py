"""Pipeline schedules, one file each: whoever makes `SCHEDULES` here is in the book (`core/step/book.py`)."""
