"""Python imports this where the folder is on its path: the processes that a test starts record what they reach."""

import os

if os.environ.get("REACH_FOLDER"):
    import reach

    reach.begin()
