"""Beyond one all-reduce per step: parameter servers, bounded staleness, compressed and local updates, asynchronous
pipelines, and programs on MapReduce. `docs/methods/README.md` says what calls what."""
