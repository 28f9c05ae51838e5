"""Serving: an engine that generates text for many requests at once. Names here load when first used."""
