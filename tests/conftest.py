"""Settings of all tests."""

from hypothesis import settings

settings.register_profile("gristmill", deadline=None)  # a busy machine is slow, and that is no error
settings.load_profile("gristmill")
