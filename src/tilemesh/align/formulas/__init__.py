"""The arithmetic of learning from feedback: pure functions over arrays, which know of no model, engine or rank."""
