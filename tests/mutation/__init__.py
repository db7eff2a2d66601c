"""Mutation testing: single changes of a module's code, each of which some test must notice.

python -m tests.mutation tessera.engine.core.scheduler --tests tests/engine/core/test_scheduler.py --sample 50 --seed 1
"""
