"""Settings of all tests: `--hypothesis-profile search` draws other examples each time."""

from hypothesis import settings

settings.register_profile("search", deadline=None)  # a busy machine is slow, and that is no error
settings.register_profile("gristmill", settings.get_profile("search"), derandomize=True)  # same tree, same result
settings.load_profile("gristmill")
