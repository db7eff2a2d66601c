"""Types that the app and the engine share: configuration, errors, messages, sampling parameters.

Imports nothing else of the project.
"""
